"""What the host reads from the device although kernels would have computed it. Only on the virtual GPU.

A copy to the host that no answer was given for (`answers`) brings what was there before, mostly zeros. A size or a
branch that depends on it makes a measurement silently wrong, so whoever measures reads under `answered_reads`, which
ends in `UnansweredRead` with the places in the code. Copies of data that is only kept are no decisions: large ones, and
those of the code in `MOVERS`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..history.owners import line_of
from .answers import UnmetAssumption, driver
from .counters import driver_is_loaded

LARGEST_DECISION = 64 * 1024
"""Bytes. A larger copy moves data; the host decides on less: a number, or one for each of 8192 experts."""

_MEGATRON, _TE = "megatron.core", "transformer_engine.pytorch"
_HYBRID_OPTIMIZER = f"{_MEGATRON}.optimizer.cpu_offloading.hybrid_optimizer"
MOVERS = {
    # optimizer offload: parameters, gradients and what changed of both (core 0.16)
    (_HYBRID_OPTIMIZER, "_get_sub_optimizer_param_groups"),
    (_HYBRID_OPTIMIZER, "_set_sub_optimizer_grads"),
    (_HYBRID_OPTIMIZER, "fp32_param_copy_back_gpu_hook"),
    (_HYBRID_OPTIMIZER, "_update_fp32_params_by_new_state"),
    (_HYBRID_OPTIMIZER, "update_fp32_param_by_new_param"),
    # activation offload: Megatron's by module, Transformer Engine's by layers (2.20) and its equivalent
    (f"{_MEGATRON}.pipeline_parallel.fine_grained_activation_offload", "offload"),
    (f"{_TE}.cpu_offload", "start_offload"),
    (f"{_TE}.cpu_offload_v1", "offload"),
    ("pytest_mbmem.megatron.offload", "start_offload"),
    # in place of a data loader: batches that are copied back into a graph's inputs
    ("pytest_mbmem.megatron.cuda_graphs", "_on_host"),
}
"""Module and function that copies to the host, itself or in what it calls, and never looks at what it copied."""


class UnansweredRead(UnmetAssumption):
    """The host read from the virtual GPU what no assumption states."""


class _Reads:
    """Those that were seen since `answered_reads` began."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0  # of the first
        self.places: dict[str, int] = {}  # how often the host read there, first place first

    def add(self, size: int, frame: FrameType | None) -> None:
        if size > LARGEST_DECISION:
            return
        stack = []
        while frame is not None:
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) in MOVERS:
                return
            code = frame.f_code
            stack.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            frame = frame.f_back
        self.bytes = self.bytes or size
        self.count += 1
        line = line_of(stack) or "code that is not Python's, in backward"
        self.places[line] = self.places.get(line, 0) + 1

    def message(self) -> str:
        first, *more = self.places
        others = f" (and then at {', '.join(more[:3])}{', …' if len(more) > 3 else ''})" if more else ""
        return (
            f"the host read {self.bytes} bytes from the device at {first}, which a kernel would have computed{others}; "
            "a virtual GPU computes nothing and no assumption states the value, so what follows from it would be wrong"
        )


_reads: _Reads | None = None


def _note(size: int) -> None:
    reads = _reads  # another thread may end them meanwhile
    if reads is not None:
        reads.add(size, sys._getframe().f_back)


_CALL = ctypes.CFUNCTYPE(None, ctypes.c_uint64)(_note)


@contextmanager
def answered_reads() -> Iterator[None]:
    """Raise `UnansweredRead` at the end for reads within that no answer was given for.

    Does nothing within another one, and on a real GPU.

    An error within that such reads came before is raised as `UnansweredRead` too: it is most likely what they led to.
    """
    global _reads
    if _reads is not None or not driver_is_loaded():
        yield
        return
    _reads = found = _Reads()
    driver().vgpu_tell_reads(_CALL)
    try:
        yield
    except (MemoryError, RuntimeError, ArithmeticError, LookupError, ValueError, AssertionError) as error:
        if found.count:
            raise UnansweredRead(f"{found.message()}; it ended in {type(error).__name__}: {error}") from error
        raise
    finally:
        _reads = None
        driver().vgpu_tell_reads(None)
    if found.count:
        raise UnansweredRead(found.message())
