"""What the driver counted in this process. Only inside a process that runs on the virtual GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..errors import UserError


@dataclass(frozen=True)
class Counters:
    """Since the process started, for one device."""

    kernel_launches: int  # of torch's own and other launched kernels; calls into cuBLAS and the like are not among them
    allocations: int  # of device memory that the driver granted: cudaMalloc, cuMemCreate, growth of a memory pool
    frees: int
    failed_allocations: int  # those that ended in out of memory
    bytes_used: int  # without the context
    bytes_peak: int
    zero_reads: int  # copies to the host that brought zeros alone: most likely what a kernel would have computed
    bytes_to_host: int  # that copies moved from the device
    bytes_to_device: int
    unanswered_reads: int  # copies to the host that no answer was given for, whatever they brought


class _Counters(ctypes.Structure):  # vgpu_counters in driver/virtual_gpu.h
    _fields_ = [(name, ctypes.c_uint64) for name in Counters.__dataclass_fields__]


def driver_is_loaded() -> bool:
    """Whether the GPUs of this process are virtual ones, which compute nothing."""
    return hasattr(ctypes.CDLL(None), "vgpu_read_counters")


def read_counters(device: int = 0) -> Counters:
    """The counters of a device. Raises `UserError` in a process that has no virtual GPU's driver in front."""
    try:
        read = ctypes.CDLL(None).vgpu_read_counters
    except AttributeError:
        raise UserError("this process does not run on the virtual GPU: its driver is not in LD_PRELOAD") from None
    raw = _Counters()
    if read(ctypes.c_int(device), ctypes.byref(raw)):
        raise UserError(f"device {device}: the virtual GPU has no such device")
    return Counters(**{name: getattr(raw, name) for name in Counters.__dataclass_fields__})
