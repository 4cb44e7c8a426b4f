"""What only a run on a real GPU has: memory by NVML, other processes, step times, losses. In the worker of one rank."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from ..megatron.model import LiveModel
from ..throughput import Timing
from ..virtual_gpu.counters import driver_is_loaded
from . import foreign, nvml
from .nvml import PhysicalGpu

CONTEXT = "CUDA context"
"""In `RankMeasurement.outside`: what the device lacks once CUDA has started, before anything is allocated."""

OTHERS = "NCCL and others"
"""In `RankMeasurement.outside`: what the device lacked at its fullest beyond the context and PyTorch's reserve."""


class Disturbed(RuntimeError):
    """Something else used the GPU."""


class OnGpu:
    """Figures of one rank on one real GPU. Make it before CUDA starts.

    Args:
        gpu: the device, which this process has to itself.
        timing: how many steps are timed, after the run whose memory is measured.
        has_losses: whether the numbers mean anything: no rank's collectives go unanswered.
        ours: numbers of other processes that use the GPU and belong to the test run.
    """

    def __init__(self, gpu: PhysicalGpu, timing: Timing, *, has_losses: bool, ours: Sequence[int] = ()) -> None:
        self._gpu, self._timing = gpu, timing
        self._computes = not driver_is_loaded()
        self._has_losses = has_losses and self._computes
        self._ours = {os.getpid(), *ours}
        self._before = nvml.used(gpu)
        self._context: int | None = None
        self._most = self._outside = 0
        self._can_see = True
        self._cold: float | None = None
        self._losses: list[float | None] = []
        self._skipped = 0

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> OnGpu:
        """The same, of plain data: {"gpu": {...}, "timing": {...}, "has_losses": true, "ours": []}."""
        more = {name: arguments[name] for name in ("has_losses", "ours")}
        return cls(_gpu_of(arguments["gpu"]), Timing(**arguments["timing"]), **more)

    def begin(self, step: int, phase: str) -> None:
        """A phase begins. Raises `Disturbed` if another process uses the GPU."""
        self.look_at_memory()
        if phase in ("build", "optimizer"):  # asking takes a millisecond
            self._look_for_others()

    def look_at_memory(self) -> None:
        """The driver hands memory out in large pieces and seldom takes it back: it is enough to look between phases."""
        if self._context is None:
            torch.cuda.synchronize()  # which makes the context
            self._context = nvml.used(self._gpu) - self._before
            self._can_see = foreign.can_see(self._gpu)
        used = nvml.used(self._gpu) - self._before
        self._most = max(self._most, used)
        self._outside = max(self._outside, used - torch.cuda.memory_reserved() - self._context)

    def _look_for_others(self) -> None:
        if problem := foreign.problem(self._gpu, self._ours):
            raise Disturbed(f"during the measurement {problem}")

    def step(self, model: LiveModel, on_phase: Callable[[int, str], None]) -> None:
        """Train one step of the run whose memory is measured."""
        begun = _mark()
        model.on_losses = self._keep_loss if self._has_losses else None
        updated, _norm, _zeros = model.step(on_phase)
        seconds = _seconds(begun, _mark())
        if model.steps_done == 1:
            self._cold = seconds
        self._skipped += not updated
        self.look_at_memory()

    def _keep_loss(self, reduced: list[dict[str, torch.Tensor]]) -> None:
        """Of a step, what Megatron's loss function reports of each microbatch: the sum, and the number of tokens."""
        if not reduced:  # another pipeline stage has them
            return
        total, tokens = torch.stack([microbatch["lm loss"].float() for microbatch in reduced]).sum(0).tolist()
        loss = total / tokens if tokens else math.nan
        self._losses.append(loss if math.isfinite(loss) else None)

    def time_steps(self, model: LiveModel) -> tuple[float, ...]:
        """Seconds of each timed step; empty where the device does not tell. Changes no figure of memory."""
        model.on_losses = None
        for _ in range(self._timing.warmup):
            model.step()
        marks = [_mark()]
        for _ in range(self._timing.steps):
            model.step()
            marks.append(_mark())
        seconds = [_seconds(begun, ended) for begun, ended in pairwise(marks)]
        self._look_for_others()
        return tuple(s for s in seconds if s is not None)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on."""
        return () if self._can_see else (foreign.UNSEEN,)

    def fields(self) -> dict[str, Any]:
        """Of a `RankMeasurement`, without the times."""
        losses: dict[str, Any] = {"losses": tuple(self._losses)} if self._has_losses else {}
        losses |= {"skipped_steps": self._skipped} if self._computes else {}
        return {
            "device_used": self._most,
            "outside": {CONTEXT: self._context or 0, OTHERS: max(0, self._outside)},
            "cold_step": self._cold,
            **losses,
        }


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(begun: torch.cuda.Event, ended: torch.cuda.Event) -> float | None:
    """Between two marks; None on a virtual GPU, where nothing takes time."""
    ended.synchronize()
    milliseconds = float(begun.elapsed_time(ended))
    return None if math.isnan(milliseconds) else milliseconds / 1000


def _gpu_of(fields: Mapping[str, Any]) -> PhysicalGpu:
    return PhysicalGpu(**{**fields, "compute_capability": tuple(fields["compute_capability"])})


def describe(gpu: dict[str, Any]) -> dict[str, Any]:
    """The properties of the current device as the fields of a `Gpu`, and the versions of what drives it.

    `gpu`: the fields of its `PhysicalGpu`.
    """
    before = nvml.used(_gpu_of(gpu))
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    context = nvml.used(_gpu_of(gpu)) - before
    total = torch.cuda.mem_get_info()[1]
    torch.ones(1, device="cuda").sum().item()  # a GPU that is too old for this torch has no kernels for it
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": {
            "capacity": total,
            "context_bytes": context,
            "compute_capability": [found.major, found.minor],
            "sm_count": found.multi_processor_count,
            "threads_per_sm": found.max_threads_per_multi_processor,
            "l2_cache": found.L2_cache_size,
            "shared_memory_per_sm": found.shared_memory_per_multiprocessor,
            "shared_memory_per_block": found.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        },
        "versions": {
            "CUDA": str(torch.version.cuda),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        },
    }
