"""Whether anything else computes on a GPU, by NVML. In the pytest process and in workers; imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Collection

from ..units import format_bytes
from . import nvml
from .nvml import PhysicalGpu

UNSEEN = "other processes that use the GPU cannot be seen here: NVML does not list them"
"""What a measurement states where `can_see` is false."""


def can_see(gpu: PhysicalGpu) -> bool:
    """Whether NVML lists processes; asked in one that uses the GPU, which must be among them."""
    return bool(nvml.processes(gpu))


def used_here(gpu: PhysicalGpu) -> bool:
    """Whether this process has a CUDA context on the GPU, by the torch that it has imported, if any."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    devices = [d for d in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(d)]
    names = {f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices}
    return gpu.uuid in names or (gpu.is_mig and bool(devices))


def problem(gpu: PhysicalGpu, ours: Collection[int]) -> str | None:
    """A sentence on the processes that use the GPU beside `ours`, which are known to use it; None if there are none.

    In a container NVML may have the host's numbers of processes, among which ours cannot be told: there as many as ours
    are taken for them. Where NVML lists none (see `can_see`), none are seen.
    """
    found = nvml.processes(gpu) or ()
    others = [process for process in found if process.pid not in ours]
    if len(others) == len(found):
        others = others[len(ours) :]
    if not others:
        return None
    listed = [f"{p.pid}" + ("" if p.used is None else f" with {format_bytes(p.used)}") for p in others]
    return f"other processes use GPU {gpu.index} ({gpu.uuid}): {', '.join(listed)}"
