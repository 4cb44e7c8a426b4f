"""What a step takes, as text: lines of a measurement, and why a `throughput` marker fails a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from ..measurement import Measurement
from ..throughput import SOLO, STEP_METRICS, Throughput, ThroughputJudgement, figure_text, format_ns, untimed
from ..units import format_bytes, format_fraction
from .oom import message_lines
from .ratchet import history_lines
from .results import Measured
from .rows import rank_text
from .text import advice_lines, aligned, note_lines


def time_lines(measurement: Measurement) -> Iterator[str]:
    """Step time and rates of a measurement on a real GPU; none on a virtual one, which has no time."""
    throughput = Throughput.of(measurement)
    if throughput is not None:
        yield throughput.explain()
        yield from throughput.notes
    elif not measurement.device.virtual and any(rank.step_times for rank in measurement.ranks):
        yield f"no step time: {untimed(measurement)}"


def loss_lines(measurement: Measurement) -> Iterator[str]:
    """Steps that cannot have trained the model, by rank."""
    for rank in measurement.ranks:
        if lost := rank.losses.count(None):
            yield f"rank {rank.rank}: the loss is not finite in {lost} of {len(rank.losses)} steps"
        if rank.skipped_steps:
            yield f"rank {rank.rank}: steps that the optimizer skipped: {rank.skipped_steps}"


def throughput_failure_text(
    nodeid: str, measured: Measured, judgements: Sequence[ThroughputJudgement], to_paste: str | None
) -> str:
    """Why a test fails, for all verdicts on a measurement that do not pass; `to_paste` has those that are "missing"."""
    lines: list[str] = []
    for judgement in judgements:
        lines += [_headline(measured, judgement), "", *aligned(list(_facts(measured, judgement))), ""]
    failure = measured.measurement.failure
    if failure is not None:
        lines += [*message_lines(failure), ""]
    else:
        notes = dict.fromkeys(note for judgement in judgements for note in judgement.notes)
        lines += [line for note in notes for line in note_lines(note)] + [""] * bool(notes)
        for judgement in judgements:
            past = history_lines(judgement.history, judgement.measured or 0, partial(figure_text, judgement.metric_id))
            lines += [*past, ""] if past else []
    for verdict in dict.fromkeys(j.verdict for j in judgements if j.against_minimum is None):
        lines += advice_lines(nodeid, verdict, to_paste, "time")
    return "\n".join(lines).rstrip()


def _headline(measured: Measured, judgement: ThroughputJudgement) -> str:
    what = judgement.what + (f" of {measured.name!r}" if measured.name else "")
    is_, has = ("is", "has") if judgement.what == "throughput" else ("are", "have")
    device, verdict = measured.measurement.device, judgement.verdict
    if verdict == "regression":
        if judgement.against_minimum is not None:
            return f"REGRESSION: {what} is {judgement.shown} per GPU, less than the minimum allows"
        return f"REGRESSION: {what} {is_} {judgement.shown}, the baseline allows {judgement.bound}"
    if verdict == "missing":
        return f"MISSING: {what} {has} no baseline on {device.key}"
    if verdict == "stale":
        return f"STALE: the baseline of {what} is of another recipe"
    if verdict == "out of memory":
        return f"OUT OF MEMORY: the recipe does not fit {device.name}"
    return f"{verdict.upper()}: {what} could not be measured"


def _facts(measured: Measured, judgement: ThroughputJudgement) -> Iterator[tuple[str, str]]:
    throughput = judgement.throughput
    if throughput is not None:
        yield "step", f"{format_ns(throughput.step)}, the median of {throughput.steps}"
        yield "spread", f"{format_ns(throughput.spread)}, between the quartiles"
        if throughput.cold is not None:
            yield "cold step", format_ns(throughput.cold)
        if throughput.rates:
            yield "throughput", throughput.rates
        yield "mode", SOLO if throughput.solo else measured.measurement.mode
    elif judgement.measured is not None:
        yield "measured", _exactly(judgement, judgement.measured)
    if judgement.against_minimum is not None:
        yield "minimum", f"{judgement.against_minimum} per GPU"
    if judgement.reference is not None:
        other = " (of the other recipe)" if judgement.verdict == "stale" else ""
        yield "baseline", _exactly(judgement, judgement.reference) + other
    if judgement.allowed is not None:
        yield "allowed", f"{_exactly(judgement, judgement.allowed)}: {judgement.leeway}"
    if judgement.change is not None:
        yield "change", format_fraction(judgement.change, signed=True)
    if judgement.rank is not None:
        failed = measured.measurement.failure is not None
        name = "rank" if failed else "slowest rank" if throughput is not None else "worst rank"
        yield name, rank_text(measured, judgement.rank)
    device = measured.measurement.device
    yield "device", f"{device.key}, capacity {format_bytes(device.capacity)}"


def _exactly(judgement: ThroughputJudgement, figure: int) -> str:
    kind = STEP_METRICS[judgement.metric_id]
    shown = judgement.text(figure) if judgement.verdict != "stale" else kind.text(figure)
    exact = kind.text(figure) if judgement.throughput is not None else f"{figure} {kind.key}"
    return shown if shown == exact else f"{shown} ({exact}{' a step' if judgement.throughput is not None else ''})"
