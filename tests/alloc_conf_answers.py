"""What the installed torch makes of texts of PYTORCH_CUDA_ALLOC_CONF. Runs in workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def at_start() -> dict[str, Any]:
    """What the allocator reports when CUDA starts under this process's environment, or what PyTorch raised."""
    import torch

    from pytest_mbmem.measure.allocator import reported

    try:
        torch.cuda.init()
        torch.cuda.memory_stats()
        torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        return reported()
    except (RuntimeError, ValueError) as error:
        return {"error": str(error)}


def one_after_the_other(texts: Sequence[str]) -> list[dict[str, Any]]:
    """The same of settings that are changed while CUDA runs: each but `expandable_segments` starts from its default."""
    import torch

    torch.cuda.init()
    torch.cuda.memory_stats()
    answers: list[dict[str, Any]] = []
    for text in texts:
        try:
            torch._C._accelerator_setAllocatorSettings(_DEFAULTS)
            torch._C._accelerator_setAllocatorSettings(text)
            answers.append(dict(torch.cuda.memory._snapshot()["allocator_settings"]))
        except (RuntimeError, ValueError, IndexError) as error:
            answers.append({"error": str(error)})
    return answers


_DEFAULTS = (
    "expandable_segments:False,pinned_num_register_threads:1,release_lock_on_cudamalloc:False,"
    "pinned_use_cuda_host_register:False,graph_capture_record_stream_reuse:False"
)


def collects_early() -> bool:
    """Whether the allocator frees cached segments before the device is full, of 4 GiB here."""
    import torch

    held = [torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del held
    before = torch.cuda.memory_reserved()
    torch.empty(400 * 2**20, dtype=torch.uint8, device="cuda")
    return torch.cuda.memory_reserved() < before


def segments_of_before() -> dict[str, Any]:
    """What is reported where expandable segments are turned on, and all memory was reserved before."""
    import torch

    from pytest_mbmem.measure.allocator import reported

    torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return reported()
