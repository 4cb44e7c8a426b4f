"""A GPU that remembers but does not compute: NVIDIA's libraries replaced, under torch's CUDA build, by a driver that
keeps account of memory and runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError

if TYPE_CHECKING:
    from .gpus import Gpu

MOST_DEVICES = 16  # VGPU_MAX_DEVICES in driver/virtual_gpu.h


def environment(gpu: Gpu, count: int = 1) -> dict[str, str]:
    """What a process needs in its environment, besides LD_PRELOAD, to see `count` of these GPUs.

    The driver reads it at the first CUDA call, so a forked child may set it after torch was imported.
    """
    if not 1 <= count <= MOST_DEVICES:
        raise UserError(f"{count} virtual GPUs in one process: 1 to {MOST_DEVICES} are possible")
    major, minor = gpu.compute_capability
    return {
        "MBMEM_GPU_COUNT": str(count),
        "MBMEM_GPU_NAME": gpu.name,
        "MBMEM_GPU_CAPACITY": str(gpu.capacity),
        "MBMEM_GPU_CONTEXT_BYTES": str(gpu.context_bytes),
        "MBMEM_GPU_COMPUTE_CAPABILITY_MAJOR": str(major),
        "MBMEM_GPU_COMPUTE_CAPABILITY_MINOR": str(minor),
        "MBMEM_GPU_SM_COUNT": str(gpu.sm_count),
        "MBMEM_GPU_THREADS_PER_SM": str(gpu.threads_per_sm),
        "MBMEM_GPU_L2_BYTES": str(gpu.l2_cache),
        "MBMEM_GPU_SHARED_BYTES_PER_SM": str(gpu.shared_memory_per_sm),
        "MBMEM_GPU_SHARED_BYTES_PER_BLOCK": str(gpu.shared_memory_per_block),
        # a machine without a GPU may hide GPUs by an empty value, which torch would obey
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count))),
        # torch.cuda.is_available() asks NVML then, which leaves a later fork free to use CUDA
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
