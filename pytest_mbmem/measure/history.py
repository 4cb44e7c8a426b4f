"""PyTorch's allocator statistics, cut into phases."""

from __future__ import annotations

from typing import Any

import torch

from ..history.maps import segments_at_peak
from ..measurement import METRICS, Metric, PhaseFigures
from ..virtual_gpu.counters import driver_is_loaded, read_counters
from .recording import Recording, can_record


def _figures(which: str) -> dict[Metric, int]:
    """ "current" or "peak" bytes of the current device, by metric."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return {metric: int(statistics[f"{metric}_bytes"]["all"][which]) for metric in METRICS}


def host_peak() -> int:
    """Bytes of pinned host memory at their highest; PyTorch takes blocks of powers of two and keeps freed ones."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def bytes_moved() -> dict[str, int]:
    """Bytes copied between the device and the host since the process started, whatever they were copied for.

    Empty on a real GPU, whose driver does not count them.
    """
    if not driver_is_loaded():
        return {}
    counters = read_counters(torch.cuda.current_device())
    return {"to host": counters.bytes_to_host, "to device": counters.bytes_to_device}


def _number_of_allocations() -> int:
    """Calls for memory since the process started."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


class PhaseRecorder:
    """Peaks and resting figures of each phase, from the peak statistics that it resets at every phase's begin.

    It owns the allocator's peak statistics while it runs; whoever else resets them must call `fold` before.
    """

    def __init__(self) -> None:
        self.current: tuple[int, str] | None = None
        self._figures: dict[tuple[int, str], tuple[dict[Metric, int], dict[Metric, int]]] = {}
        self._retained: dict[int, int] = {}
        self._allocations: int | None = None
        self._segments = 0

    def begin(self, step: int, phase: str) -> None:
        """End the phase before and begin this one."""
        self.end()
        if step > 1 and self._allocations is None:
            self._allocations = _number_of_allocations()
        self.current = (step, phase)
        if phase == "grad-sync":  # what is still there when the last backward is done
            self._retained[step] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def end(self) -> None:
        """End the current phase, if any; a phase that comes again in its step is folded into one."""
        if self.current is None:
            return
        peak, resting = _figures("peak"), _figures("current")
        self._segments = max(self._segments, int(torch.cuda.memory_stats()["segment.all.peak"]))
        if self.current in self._figures:
            earlier = self._figures[self.current][0]
            peak = {metric: max(peak[metric], earlier[metric]) for metric in METRICS}
        self._figures[self.current] = peak, resting
        self.current = None

    def fold(self) -> None:
        """Keep the current phase's peaks so far, and go on with it."""
        current = self.current
        self.end()
        self.current = current

    def results(self) -> dict[str, Any]:
        """Fields of a `RankMeasurement`."""
        return {
            "phases": tuple(PhaseFigures(*key, *figures) for key, figures in self._figures.items()),
            "retained_after_backward": tuple(self._retained.values()),
            "allocations": _number_of_allocations() if self._allocations is None else self._allocations,
            "allocation_retries": int(torch.cuda.memory_stats_as_nested_dict()["num_alloc_retries"]),
            "host_peak": host_peak(),
            "segments": self._segments,
        }


_RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""What torch.cuda and torch.accelerator reset peaks with (torch 2.11 to 2.14)."""


def cuda_is_initialized() -> bool:
    """Whether this process has started CUDA."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class TestWatch:
    """Peaks of this process from its making to `results`, as the phase "test"; a test may reset them meanwhile.

    Where CUDA has not started yet it is left alone: the test may still set what CUDA reads at its start. With `record`,
    the allocator's history tells what the peak is made of.
    """

    __test__ = False
    snapshot: dict[str, Any] | None = None  # of the history, once there are results

    def __init__(self, *, record: bool) -> None:
        self._recorder = PhaseRecorder()
        self._recording = Recording("test", full=True) if record and can_record() else None
        if cuda_is_initialized():
            self._recorder.begin(0, "test")
        else:
            self._recorder.current = (0, "test")  # nothing was allocated before
        self._originals = {name: getattr(torch._C, name) for name in _RESETS if hasattr(torch._C, name)}
        for name, reset in self._originals.items():
            setattr(torch._C, name, self._folding(reset))

    def _folding(self, reset: Any) -> Any:
        def fold_and_reset(*arguments: Any) -> Any:
            if cuda_is_initialized():
                self._recorder.fold()
            return reset(*arguments)

        return fold_and_reset

    def results(self) -> dict[str, Any]:
        """Fields of a `RankMeasurement`."""
        for name, reset in self._originals.items():
            setattr(torch._C, name, reset)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._recorder.end()
        results = self._recorder.results()
        if self._recording is not None:
            history = self._recording.stop()
            results["composition"] = history.composition(results["phases"])
            results["segments_at_peak"] = segments_at_peak(history)
            self.snapshot = self._recording.snapshot
        return results
