"""Megatron Core on CPU tensors: real numbers, real ranks. Runs in a worker, one process a rank.

Megatron names its device "cuda" in some 100 places and calls torch.cuda (core 0.16 to 0.19). Here what is asked for
there is made in host memory, by patched functions of torch: those that take a device, and those of torch.cuda. All
arithmetic, autograd and communication (over gloo) is torch's own for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import random

from ..recipe import Recipe
from . import offload, solo
from .layers import FlashAttention
from .model import Batch, LiveModel, live_model, random_text

_HOST = torch.device("cpu")


# Tensors --------------------------------------------------------------------------------------------------------------


def _off(tensor: torch.Tensor) -> torch.Tensor:
    """Mark what Megatron wants on the host's side: the only kind of tensor that says no to `is_cuda`."""
    tensor.is_off_the_gpu = True  # type: ignore[attr-defined]
    return tensor


def _is_off(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "is_off_the_gpu", False)


def _kind(argument: object) -> str | None:
    """Of a device; None for anything else."""
    return torch.device(argument).type if isinstance(argument, (str, torch.device)) else None


def _on_host(argument: Any) -> Any:
    return _HOST if _kind(argument) == "cuda" else argument


def _making(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function with "cuda" meaning host memory. What is asked for on the CPU, or pinned, is marked."""

    @functools.wraps(function)
    def make(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs) if device is None else function(*args, device=_on_host(device), **kwargs)
        return _off(tensor) if pin_memory or _kind(device) == "cpu" else tensor

    return make


_to, _clone = torch.Tensor.to, torch.Tensor.clone


def _moving(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to`, which copies between the GPU and the host's side as it would between two devices."""
    kinds = {_kind(argument) for argument in (*args, *kwargs.values())}
    moved = _to(tensor, *map(_on_host, args), **{name: _on_host(value) for name, value in kwargs.items()})
    if moved is tensor and ("cuda" if _is_off(tensor) else "cpu") in kinds:
        moved = _clone(tensor)
    return _off(moved) if "cpu" in kinds or (_is_off(tensor) and "cuda" not in kinds) else moved


def _staying(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A method whose result is where the tensor is. Megatron's optimizer offload makes its fp32 copies with these."""

    @functools.wraps(function)
    def make(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        made = function(tensor, *args, **kwargs)
        return _off(made) if _is_off(tensor) else made

    return make


_type = torch.Tensor.type

_METHODS: dict[str, Any] = {
    "to": _moving,
    "cuda": lambda tensor, *_, **__: _moving(tensor, "cuda"),
    "cpu": lambda tensor, *_, **__: _moving(tensor, "cpu"),
    "pin_memory": lambda tensor, *_: _off(tensor.clone()),
    # so that Megatron moves to the host what it moves from a GPU
    "is_cuda": property(lambda tensor: not _is_off(tensor)),
    # Megatron's optimizers sort parameters by texts such as "torch.cuda.FloatTensor".
    "type": lambda tensor, *args, **kwargs: (
        _type(tensor, *args, **kwargs) if args or kwargs else _type(tensor).replace("torch.", "torch.cuda.")
    ),
    # It takes torch's own streams alone, and there are none.
    "record_stream": lambda *_: None,
}

_MAKERS = (
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"),
    *("tensor", "zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_NEW = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_METHODS |= {name: _making(getattr(torch.Tensor, name)) for name in _NEW}
_METHODS |= {name: _staying(getattr(torch.Tensor, name)) for name in ("clone", "detach", "float")}


# torch.cuda -----------------------------------------------------------------------------------------------------------


class _Stream:
    """A stream, or an event of one: what is put on it is done already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = None  # type: ignore[assignment]

    def query(self) -> bool:
        return True

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def _done(self, *_: Any) -> None:
        pass

    synchronize = wait = wait_stream = wait_event = record = _done


_TORCH_CUDA: dict[str, Any] = {
    "current_device": lambda: torch.device("cuda"),
    "get_device_capability": lambda *_: (0, 0),  # no kernel of any GPU
    "set_device": lambda *_: None,
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": _Stream,
    "default_stream": _Stream,
    "stream": lambda *_: contextlib.nullcontext(),
    # One generator makes all random numbers of the host, so it is the one to save, fork and restore.
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
}
"""Functions that Megatron calls without asking whether there is a GPU (core 0.16 to 0.19)."""


def install() -> None:
    """Have this process run Megatron on the host, from now on."""
    for name in _MAKERS:
        setattr(torch, name, _making(getattr(torch, name)))
    for name, method in _METHODS.items():
        setattr(torch.Tensor, name, method)
    for name, function in _TORCH_CUDA.items():
        setattr(torch.cuda, name, function)
    for name in ("range_push", "range_pop"):  # CPU builds of torch lack them
        setattr(torch.cuda.nvtx, name, lambda *_: None)
    torch.cuda.random.get_rng_state = _TORCH_CUDA["get_rng_state"]
    # It would wait for CUDA to be initialized (core 0.16 to 0.19).
    random._set_cuda_rng_state = _TORCH_CUDA["set_rng_state"]
    # Megatron's tracker warns when the CPU's generator moves while the GPU's is forked; here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
    # Tensors of a shrunk recipe are all small; those that layer offload leaves where they are show nothing.
    offload.FEWEST_ELEMENTS = 1
    dist.all_gather = _all_gather  # type: ignore[assignment]
    FlashAttention._attend = _attend  # type: ignore[method-assign]


_all_gather_of_equal_shapes = dist.all_gather


def _all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    """As NCCL gathers different numbers of tokens, by broadcasts; gloo refuses them (torch 2.11 to 2.14)."""
    if len({part.shape for part in tensors}) == 1:
        return _all_gather_of_equal_shapes(tensors, tensor, group, async_op)
    tensors[dist.get_rank(group)].copy_(tensor)
    for source, part in enumerate(tensors):
        dist.broadcast(part, group=group, group_src=source)
    return None


def host_model(recipe: Recipe, rank: int, store: Path, timeout: float) -> LiveModel:
    """Build rank `rank` of the recipe's job; the other ranks do the same in processes of their own at the same time.

    Args:
        recipe: small enough for a CPU.
        rank: of the whole job.
        store: a file that does not exist yet, where the ranks find each other.
        timeout: seconds that a collective may take.
    """
    model = live_model(recipe, rank, virtual=False, initialize=partial(_initialize, store=store, timeout=timeout))
    model.load = Batches()
    return model


def _initialize(recipe: Recipe, rank: int, *, store: Path, timeout: float) -> None:
    meeting = dist.FileStore(str(store), recipe.world_size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", rank=rank, world_size=recipe.world_size, store=meeting, timeout=limit)
    solo.model_parallel(recipe)
    random.model_parallel_cuda_manual_seed(solo.SEED)


def _attend(self: FlashAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The same attention; the CPU's flash kernel has no dropout and no queries at the end of more keys (torch 2.14)."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
    dropout = self.dropout if self.training else 0.0
    with random.get_cuda_rng_tracker().fork():
        context = F.scaled_dot_product_attention(
            q, k, v, seen, dropout, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
    return context.permute(2, 0, 1, 3).contiguous()


class Batches:
    """Random tokens, the same for all ranks that share a sample; the n-th call for a chunk gives microbatch n."""

    def __init__(self) -> None:
        self._loaded: Counter[int] = Counter()

    def __call__(self, recipe: Recipe, model: DistributedDataParallel) -> Batch:
        """All tensors of the next microbatch. Tokens and labels are [micro batch, sequence]."""
        self._loaded[id(model)] += 1
        samples, length = recipe.training.micro_batch_size, recipe.training.seq_length
        text = random_text(recipe, self._loaded[id(model)])
        masked = torch.ones((1, 1, length, length), dtype=torch.bool).triu(1).expand(samples, -1, -1, -1)
        return {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "loss_mask": torch.ones((samples, length)),
            "attention_mask": None if recipe.training.attention_backend == "flash" else masked,
            "position_ids": torch.arange(length).expand(samples, -1),
        }
