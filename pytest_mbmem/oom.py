"""Out of memory as a result: what was asked for and what was there, why that was too little, and what would help.

A `Shortage` is what the allocator found at the moment of failure. `diagnose` says why, from what the same allocations
did elsewhere (`Trial`); nothing is concluded where such a trial is missing. `measure.oom` makes the trials. Imports
neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .units import format_bytes

ShortageVerdict = Literal["fragmentation", "capacity", "starved", "unknown"]
"""Fragmentation: the same allocations fit with expandable segments. Capacity: they do not fit with these either.
Starved: they would fit a device on which nothing outside PyTorch holds memory. Unknown: not told by any evidence."""

Circumstance = Literal["without limit", "as recorded", "expandable segments", "nothing outside PyTorch"]
"""Under which the allocations were repeated."""

DOCUMENTS = "NVIDIA's Megatron Bridge skill perf-memory-tuning"
"""Whose order the remedies have and whose costs they quote."""


@dataclass(frozen=True)
class Trial:
    """The allocations of the failing rank once more: run again, or replayed through PyTorch's own allocator."""

    under: Circumstance
    replayed: bool  # False: the rank was built and trained again
    fits: bool | None  # None: no answer, and `note` says why
    peak_allocated: int | None = None  # bytes, up to where it ended
    peak_reserved: int | None = None
    failed_request: int | None = None  # bytes of the request that failed, if one did
    note: str = ""


@dataclass(frozen=True)
class Remedy:
    """A change that the documents name. Peaks are of the failing rank's counterpart, in bytes."""

    name: str
    cost: str  # as the documents have it
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the recipe, as `Recipe.but` takes them
    peak_allocated: int | None = None
    saved: int | None = (
        None  # against as many steps of the recipe, with expandable segments if they are a remedy before
    )
    fits: bool | None = None  # on the same device; None: not measured, and `note` says why
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Why there was too little memory, and what would help."""

    verdict: ShortageVerdict
    reason: str  # one sentence
    trials: tuple[Trial, ...] = ()
    remedies: tuple[Remedy, ...] = ()  # in the documents' order
    rank: int | None = None  # on which the remedies were measured; None: they were not
    steps: int | None = None  # of training that they were measured for

    def trial(self, under: Circumstance) -> Trial | None:
        """The trial under a circumstance, if it was made."""
        return next((trial for trial in self.trials if trial.under == under), None)

    def remedy(self, name: str) -> Remedy:
        """The remedy of that name. Raises `KeyError` if it does not apply to the recipe."""
        return {remedy.name: remedy for remedy in self.remedies}[name]


@dataclass(frozen=True)
class Shortage:
    """What PyTorch's allocator had when it could not serve a request, in bytes."""

    requested: int
    allocated: int  # live
    reserved: int  # by the caching allocator, after it gave back every segment that was wholly free
    pieces: int  # free pieces in what it reserved
    largest_piece: int
    device_free: int  # what the driver still had
    limit: int  # the device's memory, or the share of it that the process was allowed
    expandable_segments: bool
    waiting: int = 0  # freed by the program, not to be had before a stream is done with it
    alloc_conf: str = ""  # the allocator's settings
    module: str = ""  # that was running, with each number in its name written as *
    line: str = ""  # of Python that asked, as in "megatron/core/tensor_parallel/layers.py:744 (forward)"
    diagnosis: Diagnosis | None = None  # None: nobody asked why

    @property
    def unusable(self) -> int:
        """Bytes that PyTorch had reserved, and free in pieces that it could not use."""
        return self.reserved - self.allocated - self.waiting

    @property
    def usable(self) -> int:
        """Bytes that PyTorch had or could have had: the rest of the device is not its own."""
        return min(self.limit, self.reserved + self.device_free)

    @property
    def verdict(self) -> ShortageVerdict:
        """Of the diagnosis; "unknown" without one."""
        return self.diagnosis.verdict if self.diagnosis is not None else "unknown"

    def explain(self) -> str:
        """The facts, the verdict, its evidence and the remedies, as text."""
        from .report.oom import shortage_lines

        return "\n".join(shortage_lines(self))


def taken_outside(shortage: Shortage, usable: int) -> int:
    """Bytes that PyTorch could not have because of what else is on a device where it can have `usable` bytes alone."""
    return max(0, min(shortage.limit, usable) - shortage.usable)


def diagnose(shortage: Shortage, trials: Sequence[Trial], *, complete: bool) -> tuple[ShortageVerdict, str]:
    """Verdict and reason. With `complete` the trials are of the whole run, else they end at the request that failed."""
    found = {trial.under: trial for trial in trials}
    end = "" if complete else " up to the failed request (what comes after it is not known)"
    recorded = found.get("as recorded")
    need = found.get("without limit")
    if recorded is None:
        return "unknown", f"the need of the whole run could not be measured{_because(need)}"
    if recorded.fits is None:
        return "unknown", f"the allocations could not be replayed as recorded{_because(recorded)}"
    if recorded.fits:
        return "unknown", "the same allocations fit when they are replayed as recorded, so a replay cannot explain this"
    numbers = ""
    if need is not None and need.fits and need.peak_allocated is not None:
        numbers = (
            f": {format_bytes(need.peak_allocated)} are needed and PyTorch can have {format_bytes(shortage.usable)}"
        )
    if not shortage.expandable_segments:
        tried = [trial for trial in trials if trial.under == "expandable segments"]
        no_answer = next((trial for trial in tried if trial.fits is None), None)
        if not tried or no_answer is not None:
            return "unknown", f"nothing shows what expandable segments would do{_because(no_answer)}"
        if all(trial.fits for trial in tried):
            if complete and (need is None or not need.fits):
                return "unknown", f"the need of the whole run could not be measured{_because(need)}"
            return "fragmentation", f"the same allocations fit with expandable segments{end}{numbers}"
        if any(trial.fits for trial in tried):
            return "unknown", "with expandable segments the replay fits and the run does not"
    alone = found.get("nothing outside PyTorch")
    if alone is not None and alone.fits is None:
        return "unknown", f"nothing shows what a device without memory outside PyTorch would do{_because(alone)}"
    if alone is not None and alone.fits:
        return "starved", "the same allocations fit a device on which nothing outside PyTorch holds memory" + end
    if need is not None and need.fits is False and "per_process_memory_fraction" in shortage.alloc_conf:
        return "unknown", "per_process_memory_fraction of the allocator's settings limits any device" + _because(need)
    how = "are on already" if shortage.expandable_segments else "do not make it fit"
    return "capacity", f"expandable segments {how}{numbers}"


def _because(trial: Trial | None) -> str:
    return f": {trial.note}" if trial is not None and trial.note else ""
