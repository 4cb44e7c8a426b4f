"""Values that kernels would have computed and that the host reads, supplied under a stated assumption.

Which expert a token goes to is the outcome of kernels. Megatron's dispatchers read the resulting counts on the host to
size what follows, and on a virtual GPU would read zeros: every expert would get an empty input. Here those reads are
answered (`answers`) with the counts of `routing`; all of Megatron's own code still runs, with its own temporaries, in
recomputation too. A read that these places do not know is an error (`UnmetAssumption`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization, get_capacity
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)

from .answers import answer_read, exactly_taken
from .routing import SINKHORN_ITERATIONS, padded, tokens_sent


def install(config: TransformerConfig, overload: float = 1.0) -> None:
    """Have the MoE layers of this configuration read the counts that the assumption states.

    Args:
        config: of the model to be built. The overload is kept in it: models in one process may differ.
        overload: how many times its balanced share the first expert-parallel rank receives.
    """
    config.assumed_overload = overload
    _patch()


@functools.cache
def _patch() -> None:
    """Put the assumption around the places that read, once per process (core 0.16 to 0.19)."""
    alltoall, allgather = MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher
    # makes the tensors with the tokens per expert and to and from each rank, which the next one reads
    _wrap(alltoall, "preprocess", _alltoall_counts)
    # reads those tensors, and the number of elements that masks select (core 0.16)
    _wrap(alltoall, "dispatch_preprocess", _alltoall_dispatch)
    # reads the tokens per expert, and the number of elements that masks select
    _wrap(allgather, "dispatch_postprocess", _allgather_dispatch)
    # reads the number of selected elements, an int32 (torch 2.11 to 2.14)
    _wrap(torch.Tensor, "masked_select", _masked_select)
    # reads in each iteration whether the error is still above the tolerance
    _wrap(router, "sinkhorn", _sinkhorn)
    if HAVE_TE:
        # measures how long each configuration of a kernel takes: of the fused permutation's (Triton 3.4 to 3.8)
        Autotuner = importlib.import_module("triton.runtime.autotuner").Autotuner
        Autotuner._bench = _equally_fast


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)


def _sent(dispatcher: MoETokenDispatcher, tokens: int) -> list[int]:
    """How many of its `tokens` each rank sends to each expert of the layer."""
    config = dispatcher.config
    experts, topk, factor = config.num_moe_experts, config.moe_router_topk, config.moe_expert_capacity_factor
    capacity = None if factor is None else get_capacity(tokens * topk, experts, factor)
    overload = getattr(config, "assumed_overload", 1.0)
    sent = tokens_sent(tokens, topk, experts, dispatcher.ep_size, overload=overload, capacity=capacity)
    if config.moe_router_padding_for_quantization:
        sent = padded(sent, tokens, get_align_size_for_quantization(config))
    return sent


def _bytes(values: list[int], dtype: torch.dtype) -> bytes:
    return torch.tensor(values, dtype=dtype).numpy().tobytes()


def _answer(tensor: object, values: list[int]) -> None:
    """The next read of this tensor brings these values, if it is on the device at all."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        assert tensor.numel() == len(values), (tensor.shape, values)
        answer_read(_bytes(values, tensor.dtype), tensor.data_ptr())


def _alltoall_counts(original: Callable[..., Any], self: Any, routing_map: torch.Tensor) -> torch.Tensor:
    tokens_per_expert: torch.Tensor = original(self, routing_map)
    if self.drop_and_pad:  # every expert takes its capacity, a number that the host knows
        return tokens_per_expert
    sent = _sent(self, routing_map.size(0))
    local = [sent[expert] for expert in self.local_expert_indices]
    size = self.num_local_experts
    _answer(tokens_per_expert, [count * self.ep_size * self.tp_size for count in local])
    _answer(self.input_splits, [sum(sent[first : first + size]) for first in range(0, len(sent), size)])
    _answer(self.output_splits, [sum(local)] * self.ep_size)
    _answer(self.output_splits_tp, [sum(local) * self.ep_size] * self.tp_size)
    _answer(self.num_out_tokens, [sum(sent)])
    if size > 1 and not self.config.moe_permute_fusion:  # otherwise it stays on the device
        _answer(self.num_global_tokens_per_local_expert, local * (self.ep_size * self.tp_size))
    return tokens_per_expert


def _alltoall_dispatch(
    original: Callable[..., Any], self: Any, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
) -> Any:
    selected = sum(_sent(self, routing_map.size(0)))
    with exactly_taken("MoEAlltoAllTokenDispatcher.dispatch_preprocess"), _masks_select(selected):
        return original(self, hidden_states, routing_map, probs)


def _allgather_dispatch(
    original: Callable[..., Any], self: Any, hidden_states: torch.Tensor, probs: torch.Tensor
) -> Any:
    ranks = self.ep_size * self.tp_size
    sent = _sent(self, self.routing_map.size(0) // ranks)
    received = [sent[expert] * ranks for expert in self.local_expert_indices]
    with exactly_taken("MoEAllGatherTokenDispatcher.dispatch_postprocess"), _masks_select(sum(received)):
        answer_read(_bytes(received, torch.long))
        return original(self, hidden_states, probs)


_selected: int | None = None


@contextmanager
def _masks_select(count: int) -> Iterator[None]:
    """Every mask that selects within selects this many elements."""
    global _selected
    _selected = count
    try:
        yield
    finally:
        _selected = None


def _masked_select(original: Callable[..., Any], self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if _selected is not None:
        answer_read(_bytes([_selected], torch.int32))
    selected: torch.Tensor = original(self, mask)
    return selected


def _sinkhorn(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with exactly_taken("sinkhorn"):
        for iteration in range(SINKHORN_ITERATIONS):
            answer_read(_bytes([iteration + 1 < SINKHORN_ITERATIONS], torch.bool))
        return original(*args, **kwargs)


def _equally_fast(self: Any, *args: Any, **kwargs: Any) -> list[float]:
    """A configuration's times, which nobody can measure here: the first one is taken. The benchmark's buffer is real:
    in the first step it stays in the allocator's cache."""
    importlib.import_module("triton.runtime").driver.active.get_empty_cache_for_benchmark()
    return [1.0, 1.0, 1.0]
