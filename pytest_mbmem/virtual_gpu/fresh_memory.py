"""New tensors that read as zeros, so that what a kernel should have counted is 0 and not an old value."""

from __future__ import annotations

import ctypes

from ..errors import UserError

_installed = False


def zero_new_tensors() -> None:
    """From now on in this process the first 512 bytes of each new CUDA tensor read as zeros until the host writes.

    PyTorch hands out memory again without telling the driver, and kernels write nothing: without this a result such as
    a token count or an "found inf" flag reads as whatever the host once wrote at that address. 512 bytes are the
    smallest block of PyTorch's allocator, so no other tensor is touched. Costs about 4 microseconds an allocation and
    changes no memory figure. Raises `UserError` outside of the virtual GPU.
    """
    global _installed
    if _installed:
        return
    import torch
    from torch.cuda import _gpu_trace

    try:
        forget = ctypes.PyDLL(None).vgpu_forget  # keeps the GIL: the call is shorter than giving it up
    except AttributeError:
        raise UserError("this process does not run on the virtual GPU: its driver is not in LD_PRELOAD") from None
    forget.argtypes, forget.restype = [ctypes.c_uint64], None
    torch._C._activate_gpu_trace()  # PyTorch's hook for sanitizers; each allocation calls back
    _gpu_trace.register_callback_for_memory_allocation(forget)
    _installed = True
