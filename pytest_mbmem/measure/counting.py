"""What a step computes and communicates: FLOPs and collective bytes, counted by watching every operator.

Collective bytes follow the convention of nccl-tests for the size of a call: the larger of what goes in and what comes
out on this rank (an all-gather counts its output, a reduce-scatter its input, an all-reduce its tensor, a send its
tensor). A receive is the peer's send and does not count.

A dispatch mode changes how autograd accumulates gradients, so it never runs where memory is measured.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

_GROUPS = {  # those with "e" are the experts'; where they span the same ranks as others they are groups of their own
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "cp": parallel_state.get_context_parallel_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "etp": parallel_state.get_expert_tensor_parallel_group,
    "etp-ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "etp-ep-pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
    "dp": lambda: parallel_state.get_data_parallel_group(with_context_parallel=True),
    "edp": parallel_state.get_expert_data_parallel_group,
    "tp-cp": parallel_state.get_tensor_and_context_parallel_group,
    "tp-cp-dp": lambda: parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    "embedding": lambda: parallel_state.get_embedding_group(check_initialized=False),
    "model": parallel_state.get_model_parallel_group,
    "world": lambda: dist.group.WORLD,
}


class _Counting(TorchDispatchMode):
    """Sums FLOPs, and the sizes of this rank's collective calls by process group.

    With torch's own formulas, without its `FlopCounterMode`, which also follows every module and takes twice as long.
    """

    def __init__(self) -> None:
        super().__init__()
        self.formulas = {torch.ops.aten._grouped_mm: shape_wrapper(_grouped_mm_flops), **flop_registry}
        self.flops = 0
        self.names: dict[str, str] = {}
        for name, get in _GROUPS.items():
            group = get()
            if group is not None and group.size() > 1:
                self.names.setdefault(group.group_name, name)
        self.bytes: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "recv" not in func.name():
            self._count(func, args)
        result = func(*args, **(kwargs or {}))
        if (formula := self.formulas.get(func.overloadpacket)) is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        group = next((dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)), None)
        if group is None or group.size() == 1:
            return
        given = dict(zip((p.name for p in func._schema.arguments), args, strict=False))
        sides = [sum(_bytes(given[name]) for name in names if name in given) for names in (_INPUTS, _OUTPUTS)]
        self.bytes[self.names.get(group.group_name, "other")] += max(sides)


# The c10d operators' names for their tensors (torch 2.11 to 2.14); in-place ones have `tensors` alone.
_INPUTS = ("input_tensors", "input_tensor", "inputs", "input", "tensors")
_OUTPUTS = ("output_tensors", "output_tensor", "outputs", "output")


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in _flatten([tensors]))


def _flatten(nested: Any) -> Iterator[torch.Tensor]:
    for item in nested:
        if isinstance(item, torch.Tensor):
            yield item
        else:
            yield from _flatten(item)


class Counted:
    """Filled when `counting` ends."""

    flops: int = 0
    collective_bytes: dict[str, int]


def _grouped_mm_flops(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """One product of [rows, inner] and [inner, columns] for each group; torch 2.14 has no formula of its own.

    Of two matrices, and of one matrix and a stack, a dimension is cut into the groups: together they multiply once.
    """
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * a[-2] * a[-1] * b[-1]


@contextmanager
def counting() -> Iterator[Counted]:
    """Count matrix multiplications and attention (2 FLOPs a multiply-add, torch's formulas) and collectives."""
    counted = Counted()
    with _Counting() as mode:
        yield counted
    counted.flops = int(mode.flops)
    counted.collective_bytes = dict(sorted(mode.bytes.items()))
