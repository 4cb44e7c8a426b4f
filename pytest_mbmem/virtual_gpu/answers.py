"""Answers to what the host reads from the device, where a kernel would have computed it. Only on the virtual GPU.

An answer is given before the read and taken by it once (`vgpu_answer_read` in driver/virtual_gpu.h). Whoever gives some
checks with `exactly_taken` that all were taken and that nothing else was read: an assumption that the installed torch
or Megatron does not meet must end a measurement, never change it in silence.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from .counters import read_counters


class UnmetAssumption(RuntimeError):
    """The host read something else from the virtual GPU than what was assumed."""


@cache
def driver() -> ctypes.CDLL:
    """The driver's functions that `driver/virtual_gpu.h` declares, in this process."""
    library = ctypes.CDLL(None)
    library.vgpu_answer_read.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64]
    library.vgpu_answer_read.restype = library.vgpu_forget_answers.restype = library.vgpu_tell_reads.restype = None
    library.vgpu_answers_left.restype = ctypes.c_uint64
    return library


def answer_read(value: bytes, address: int | None = None) -> None:
    """The next copy of `len(value)` bytes from this device address (None: from any) to the host brings `value`."""
    driver().vgpu_answer_read(address, value, len(value))


def answers_left() -> int:
    """Answers that were given and not taken yet."""
    return int(driver().vgpu_answers_left())


def forget_answers() -> None:
    """Drop the answers that are left."""
    driver().vgpu_forget_answers()


@contextmanager
def exactly_taken(what: str) -> Iterator[None]:
    """All answers given within are taken within, and nothing else is read. Does not nest.

    Args:
        what: the code that reads, for the message of `UnmetAssumption`.
    """
    reads = read_counters().unanswered_reads
    try:
        yield
        left, reads = answers_left(), read_counters().unanswered_reads - reads
    finally:
        forget_answers()
    if left or reads:
        raise UnmetAssumption(
            f"{what} read other values from the device than known: {left} answers were not taken and {reads} reads "
            "had none; the installed torch or megatron-core is not supported here"
        )
