"""Memory of the device that is not PyTorch's: the CUDA context and NCCL's buffers. Never part of allocated or reserved.

On a virtual GPU both are estimates of gpus.yaml: NCCL's for each communicator, which are the process groups of more
than one rank that this rank used in a step. What else takes memory there (other processes, DeepEP, cuDNN's and other
libraries' own) is not in it. Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .units import format_bytes

if TYPE_CHECKING:
    from .measurement import RankMeasurement
    from .virtual_gpu.gpus import Gpu

CONTEXT, NCCL = "CUDA context", "NCCL"


def estimate(gpu: Gpu, collective_bytes: Mapping[str, int] | None) -> dict[str, int]:
    """Bytes by what holds them, of a rank with these collectives in a step (None: not counted, so NCCL is left out)."""
    found = {CONTEXT: gpu.context_bytes}
    if collective_bytes is not None:
        found[NCCL] = len(collective_bytes) * gpu.nccl_per_communicator
    return found


def counted(rank: RankMeasurement) -> Mapping[str, int] | None:
    """The rank's collectives; None where they were not counted, as FLOPs then were not either."""
    return rank.collective_bytes if rank.flops_per_step is not None else None


def assumption(gpu: Gpu) -> str:
    """The sentence for a measurement on this virtual GPU."""
    return (
        f"memory outside PyTorch is an estimate, in no peak: {format_bytes(gpu.context_bytes)} of CUDA context, which "
        f"PyTorch cannot have, and {format_bytes(gpu.nccl_per_communicator)} of NCCL buffers for each process group "
        "that a step uses"
    )


def text(outside: Mapping[str, int], groups: Sequence[str]) -> str:
    """On one line, as in "CUDA context 512.00 MiB, NCCL 384.00 MiB (tp, pp, dp)"."""
    parts = [f"{name} {format_bytes(size)}" for name, size in outside.items()]
    if groups and NCCL in outside:
        parts[-1] += f" ({', '.join(groups)})"
    return ", ".join(parts)
