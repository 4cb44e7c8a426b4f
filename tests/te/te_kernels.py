"""What runs in a worker on the virtual GPU, for test_te_driver.py."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
import triton
import triton.language as tl

from pytest_mbmem.virtual_gpu.counters import read_counters


def load(libraries: list[str]) -> list[str]:
    """Load each with all its symbols bound at once. Returns the files of this process's libraries."""
    for library in libraries:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if ".so" in line})


@triton.jit
def _add(left, right, out, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * block + tl.arange(0, block)
    mask = places < count
    tl.store(out + places, tl.load(left + places, mask=mask) + tl.load(right + places, mask=mask), mask=mask)


def launch() -> dict[str, int | str]:
    """Have Triton compile a kernel for the virtual GPU and launch it."""
    left, right = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    out = torch.empty_like(left)
    before = read_counters().kernel_launches
    compiled = _add[(4,)](left, right, out, 1000, block=256)
    return {"launches": read_counters().kernel_launches - before, "target": str(compiled.metadata.target.arch)}
