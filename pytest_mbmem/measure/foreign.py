"""Whether anything else computes on a GPU, by NVML. In the pytest process and in workers; imports no torch."""

from __future__ import annotations

import os

from ..units import format_bytes
from . import nvml
from .nvml import PhysicalGpu

UNSEEN = "other processes that use the GPU cannot be seen here: NVML does not list them"
"""What a measurement states where `can_see` is false."""


def can_see(gpu: PhysicalGpu) -> bool:
    """Whether NVML lists processes; asked in one that uses the GPU, which must be among them."""
    return bool(nvml.processes(gpu))


def problem(gpu: PhysicalGpu, *, uses_it: bool) -> str | None:
    """A sentence on the other processes that use the GPU, or None. `uses_it`: whether this process does.

    Where NVML does not list processes (see `nvml.processes`), none are seen.
    """
    found = nvml.processes(gpu) or ()
    others = [process for process in found if process.pid != os.getpid()]
    if uses_it and len(others) == len(found):
        # In a container NVML has the host's numbers of processes: one of them is this one.
        others = others[1:]
    if not others:
        return None
    listed = [f"{p.pid}" + ("" if p.used is None else f" with {format_bytes(p.used)}") for p in others]
    return f"other processes use GPU {gpu.index} ({gpu.uuid}): {', '.join(listed)}"
