"""The text of a shortage: where memory ran out, what was there, why it was too little, and what would help."""

from __future__ import annotations

from collections.abc import Iterator

from ..measurement import Failure
from ..oom import DOCUMENTS, Diagnosis, Remedy, Shortage, Trial
from ..units import format_bytes
from .text import exactly, shortened, table

_UNDER = {
    "without limit": "on a device without limit",
    "as recorded": "on this device",
    "expandable segments": "on this device with expandable segments",
    "nothing outside PyTorch": "on a device on which nothing outside PyTorch holds memory",
}


def message_lines(failure: Failure, *, whole: bool = False) -> list[str]:
    """What a failure has to say: why memory ran out, if it did, and its message, shortened unless it is to be whole."""
    lines = [] if failure.shortage is None else [*shortage_lines(failure.shortage), ""]
    return [*lines, *(f"  {line}" for line in (failure.message.splitlines() if whole else shortened(failure.message)))]


def failure_lines(failure: Failure) -> list[str]:
    """Headline and text of a failure whose shortage is known."""
    assert failure.shortage is not None
    return [headline(failure), "", *shortage_lines(failure.shortage)]


def headline(failure: Failure) -> str:
    """As in "OUT OF MEMORY by fragmentation: rank 0 asked for 1.00 GiB in step-2/backward (output_layer)"."""
    shortage = failure.shortage
    assert shortage is not None
    by = "" if shortage.diagnosis is None else _BY[shortage.verdict]
    place = f" in {failure.name}" if failure.name else ""
    module = f" ({shortage.module})" if shortage.module else ""
    return f"OUT OF MEMORY{by}: rank {failure.rank} asked for {format_bytes(shortage.requested)}{place}{module}"


_BY = {
    "fragmentation": " by fragmentation",
    "capacity": " by capacity",
    "starved": ", starved by memory outside PyTorch",
    "unknown": ", cause not found",
}


def shortage_lines(shortage: Shortage) -> list[str]:
    """The facts; with a diagnosis, also its reason, the evidence and the remedies."""
    facts = list(_facts(shortage))
    width = max(len(name) for name, _ in facts)
    lines = [f"  {name:<{width}}  {value}" for name, value in facts]
    if shortage.diagnosis is not None:
        lines += ["", *_diagnosis_lines(shortage, shortage.diagnosis)]
    return lines


def _facts(shortage: Shortage) -> Iterator[tuple[str, str]]:
    yield "asked for", exactly(shortage.requested)
    if shortage.line:
        yield "by", shortage.line
    yield "allocated", exactly(shortage.allocated)
    yield "reserved", exactly(shortage.reserved)
    pieces = f"{shortage.pieces} free piece{'s' if shortage.pieces != 1 else ''}"
    if shortage.pieces:
        pieces += f", the largest {format_bytes(shortage.largest_piece)}"
    if shortage.waiting:
        yield "waiting", f"{exactly(shortage.waiting)} freed, but a stream is not done with it"
    yield "unusable", f"{exactly(shortage.unusable)} reserved and free: {pieces}"
    if shortage.reserved + shortage.device_free > shortage.limit:  # a fraction of the device
        limit = f"PyTorch may reserve {format_bytes(shortage.limit)} in all"
        yield "device free", f"{exactly(shortage.device_free)}, but {limit}"
    else:
        yield "device free", f"{exactly(shortage.device_free)} of {format_bytes(shortage.limit)}"
    if (outside := shortage.limit - shortage.usable) > 0:
        yield "the rest", f"{exactly(outside)}: CUDA context, and what else is outside PyTorch"
    yield "allocator", shortage.alloc_conf or "default settings"


def _diagnosis_lines(shortage: Shortage, diagnosis: Diagnosis) -> Iterator[str]:
    yield f"{diagnosis.verdict}: {diagnosis.reason}"
    yield from (f"  - {_trial_line(trial)}" for trial in diagnosis.trials)
    if diagnosis.remedies:
        yield ""
        yield from _remedy_lines(shortage, diagnosis)


def _trial_line(trial: Trial) -> str:
    done = "its allocations replayed" if trial.replayed else "the rank run again"
    text = f"{done} {_UNDER[trial.under]}: "
    if trial.fits is None:
        return text + f"no answer ({trial.note})"
    peaks = ""
    if trial.peak_allocated is not None and trial.peak_reserved is not None:
        allocated, reserved = format_bytes(trial.peak_allocated), format_bytes(trial.peak_reserved)
        peaks = f"peak allocated {allocated}, reserved {reserved}"
    if trial.fits:
        return text + ("" if trial.under == "without limit" else "fits, ") + peaks
    asked = f" when it asks for {format_bytes(trial.failed_request)}" if trial.failed_request is not None else ""
    return text + f"out of memory{asked}"


def _remedy_lines(shortage: Shortage, diagnosis: Diagnosis) -> Iterator[str]:
    yield f"Remedies in the order of {DOCUMENTS}, and their cost as it says:"
    measured = [remedy for remedy in diagnosis.remedies if remedy.peak_allocated is not None]
    cells = [["remedy", "peak", "saves", "fits", "cost"], *map(_cells, measured)]
    yield from (f"  {line}" for line in table(cells, right={"peak", "saves"}) if measured)
    notes: dict[str, list[str]] = {}
    for remedy in diagnosis.remedies:
        if remedy not in measured:
            notes.setdefault(remedy.note, []).append(remedy.name)
    yield from (f"  {'; '.join(names)}: {note}" for note, names in notes.items())
    if not measured:
        return
    steps = f"{diagnosis.steps} step{'s' if diagnosis.steps != 1 else ''}"
    how = f"measured: {steps} of rank {diagnosis.rank}, or of the rank with its place in the job"
    if diagnosis.verdict != "fragmentation" and not shortage.expandable_segments:
        how += "; each with expandable segments"
    yield f"  {how}; other ranks were not"


def _cells(remedy: Remedy) -> list[str]:
    assert remedy.peak_allocated is not None
    assert remedy.saved is not None
    fits = {True: "yes", False: "no", None: "unknown"}[remedy.fits]
    return [remedy.name, format_bytes(remedy.peak_allocated), format_bytes(remedy.saved), fits, remedy.cost]
