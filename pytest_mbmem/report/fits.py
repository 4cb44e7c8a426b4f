"""Why a `fits` or a `fragmentation` marker fails a test, as text."""

from __future__ import annotations

from collections.abc import Iterator

from .. import alloc_conf, outside
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..measurement import Measurement
from ..units import format_bytes, format_fraction
from .oom import message_lines
from .results import Measured
from .text import aligned, exactly

_EXPANDABLE = 'memory.alloc_conf "expandable_segments:True" lets free pieces join'


def fit_failure_text(measured: Measured, judgement: FitJudgement) -> str:
    """Why the recipe does not train on that GPU, and what to do."""
    facts = list(_fit_facts(measured, judgement))
    lines = [_fit_headline(measured, judgement), "", *aligned(facts)]
    failure = judgement.failure
    if failure is not None:
        lines += ["", *message_lines(failure)]
    lines += ["", *(f"  - {note}" for note in judgement.notes)] if judgement.notes else []
    if judgement.verdict == "starved":
        lines += ["", *_advice(measured.measurement)]
    return "\n".join(lines)


def _fit_headline(measured: Measured, judgement: FitJudgement) -> str:
    rule = judgement.rule
    what = repr(measured.name) if measured.name else "the recipe" if measured.measurement.recipe else "the test"
    if judgement.verdict == "starved":
        return f"STARVED: {what} fits {rule.name} alone, but PyTorch's reserve leaves too little for the rest"
    if judgement.verdict != "out of memory":
        return f"{judgement.verdict.upper()}: whether {what} fits {rule.name} could not be measured"
    if judgement.reserved is None or judgement.allocated is None:
        return f"OUT OF MEMORY: {what} does not fit {rule.name}"
    lacks = format_bytes(judgement.allocated - judgement.room)
    return f"OUT OF MEMORY: {what} fits {rule.name} alone, but its live bytes leave {lacks} too little for the rest"


def _fit_facts(measured: Measured, judgement: FitJudgement) -> Iterator[tuple[str, str]]:
    rule = judgement.rule
    yield "capacity", f"{exactly(rule.capacity)} of {rule.gpu}"
    if judgement.outside:
        rank = measured.rank(judgement.rank)
        groups = list(rank.collective_bytes) if rank is not None else []
        size = exactly(sum(judgement.outside.values()))
        yield "outside", f"{size}, estimated: {outside.text(judgement.outside, groups)}"
    yield "headroom", exactly(rule.headroom)
    if judgement.outside:
        yield "for PyTorch", exactly(judgement.room)
    if judgement.allocated is not None and judgement.reserved is not None:
        yield "allocated", f"{exactly(judgement.allocated)} at its peak, with the whole GPU"
        yield "reserved", f"{exactly(judgement.reserved)} at its peak, with the whole GPU"
    if judgement.rank is not None:
        yield "rank", str(judgement.rank)
    failure = judgement.failure
    phase = failure.name if failure is not None and failure.name else judgement.phase
    if phase is not None:
        yield ("failed in" if failure is not None else "phase"), phase


def fragmentation_failure_text(measured: Measured, judgement: FragmentationJudgement) -> str:
    """Why too much of what is reserved holds no tensor, and what to do."""
    rule, device = judgement.rule, measured.measurement.device
    what = "fragmentation" + (f" in {rule.phase}" if rule.phase else "")
    what += f" of {measured.name!r}" if measured.name else ""
    facts: list[tuple[str, str]] = []
    if judgement.verdict == "out of memory":
        headline = f"OUT OF MEMORY: {repr(measured.name) if measured.name else 'the recipe'} does not fit {device.name}"
    elif judgement.unused is None or judgement.fraction is None or judgement.reserved is None:
        headline = f"{judgement.verdict.upper()}: {what} could not be measured"
    else:
        assert judgement.allocated is not None
        headline = f"FRAGMENTED: {what} is {format_fraction(judgement.fraction)}, {rule.bound} are allowed"
        facts += [
            ("reserved", exactly(judgement.reserved)),
            ("allocated", exactly(judgement.allocated)),
            ("unused", exactly(judgement.unused)),
            ("allowed", exactly(rule.allowed(judgement.reserved))),
        ]
    if judgement.rank is not None:
        facts.append(("worst rank" if judgement.verdict == "fragmented" else "rank", str(judgement.rank)))
    if judgement.phase is not None:
        facts.append(("phase", judgement.phase))
    facts.append(("device", f"{device.key}, capacity {format_bytes(device.capacity)}"))
    lines = [headline, "", *aligned(facts)]
    failure = measured.measurement.failure
    if failure is not None:
        lines += ["", *message_lines(failure)]
    elif judgement.notes:
        lines += ["", *(f"  - {note}" for note in judgement.notes)]
    return "\n".join([*lines, "", *_advice(measured.measurement)] if judgement.verdict == "fragmented" else lines)


def _advice(measurement: Measurement) -> Iterator[str]:
    """What the documents name first, then what else gives memory back."""
    memory = measurement.recipe.get("memory", {}) if measurement.recipe is not None else {}
    yield "What gives unused memory back, the documents' remedy first:"
    if alloc_conf.has_expandable_segments(memory.get("alloc_conf", "")):
        yield "  - expandable segments are on already"
    else:  # of expandable segments PyTorch collects no garbage
        yield f"  - {_EXPANDABLE}"
        settings = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95"
        yield f'  - memory.alloc_conf "{settings}" frees cached segments early'
    yield "  - torch.cuda.empty_cache() between phases of the training loop gives whole segments back"
