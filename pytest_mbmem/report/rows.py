"""What the terminal's table and the HTML page's say alike: one row for each verdict of each measurement."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import units
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import Judgement
from ..measurement import Measurement, RankMeasurement
from ..savings import SavingJudgement
from ..throughput import ThroughputJudgement
from ..units import format_bytes, format_fraction
from .results import Judged, Measured, TestResult

NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table, as text; `NOTHING` where there is nothing to say."""

    test: str
    device: str
    baseline: str = NOTHING  # or the limit, as in "<= 60.00 GiB", or the control, as in "vs 60.00 GiB"
    measured: str
    change: str = NOTHING
    rank: str = NOTHING
    phase: str = NOTHING
    verdict: str = NOTHING


def rows_of(test: TestResult) -> Iterator[Row]:
    """One for each verdict, or one without a verdict for a measurement that no gate judges."""
    for measured in test.measured:
        label = label_of(test.id, measured)
        if not measured.is_judged:
            yield _without_verdict(label, measured.measurement)
        for judged in measured.judged:
            yield _with_verdict(label, measured.measurement, judged)
        for saving in measured.savings:
            yield _with_control(label, measured.measurement, saving)
        for fit in measured.fits:
            yield _on_gpu(label, measured.measurement, fit)
        for fragmentation in measured.fragmentations:
            yield _fragmented(label, measured.measurement, fragmentation)
        for throughput in measured.throughputs:
            yield _of_steps(label, measured.measurement, throughput)


def label_of(nodeid: str, measured: Measured) -> str:
    """The test, and the measurement's name if it has one."""
    return nodeid + (f"@{measured.name}" if measured.name else "")


def shown_verdict(judged: Judged[Judgement] | Judged[ThroughputJudgement]) -> str:
    """The verdict, or "accepted" where --mbmem-update lets a test pass that would have failed."""
    return "accepted" if judged.accepted and not judged.judgement.passed else judged.judgement.verdict


def reference_of(judgement: Judgement) -> str:
    """Baseline or limit."""
    if judgement.reference is None:
        return NOTHING
    bound = "<= " if judgement.gate.limit is not None else ""
    return bound + format_bytes(judgement.reference)


def measured_ranks(measurement: Measurement) -> list[RankMeasurement]:
    """Those that have a peak; one that failed at once has none."""
    return [rank for rank in measurement.ranks if rank.phases]


def worst_of(measurement: Measurement) -> RankMeasurement | None:
    """The rank that allocated most, among those of a failed measurement too."""
    ranks = measured_ranks(measurement)
    return max(ranks, key=lambda rank: (rank.peak(), -rank.rank)) if ranks else None


def losses_of(measurement: Measurement) -> str:
    """Of the first and the last step of a host run, as in "5.5910 -> 5.5845"."""
    ends = measurement.steps[:1] + measurement.steps[1:][-1:]
    return " -> ".join(NOTHING if step.loss is None else f"{step.loss:.4f}" for step in ends)


def rank_text(measured: Measured, number: int) -> str:
    """A rank's number, where it stands in the job, and for how many ranks."""
    rank = measured.rank(number)
    if rank is None or not rank.coordinates:
        return str(number)
    ranks = f"{rank.stands_for} rank" + ("s" if rank.stands_for > 1 else "")
    return f"{number} ({coordinates_of(rank)}), stands for {ranks} of {measured.measurement.world_size}"


def coordinates_of(rank: RankMeasurement) -> str:
    """As in "tp=0 pp=1"; empty for a test without a recipe."""
    return " ".join(f"{name}={value}" for name, value in rank.coordinates.items())


def sizes_of(sizes: Mapping[str, int]) -> str:
    """Bytes by name, as in "tp 1.00 MiB, dp 2.00 GiB"."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()) or NOTHING


def extra_columns(ranks: Sequence[RankMeasurement]) -> dict[str, list[str]]:
    """Head and a text for each rank of what only some have: memory of device and host, bytes moved, times."""
    ways = dict.fromkeys(way for rank in ranks for way in rank.moved_bytes)
    columns = {"device used": [rank.device_used for rank in ranks], "host memory": [rank.host_peak for rank in ranks]}
    columns |= {f"moved {way} a step": [rank.moved_bytes.get(way) for rank in ranks] for way in ways}
    texts = {name: [format_bytes(size) if size else NOTHING for size in sizes] for name, sizes in columns.items()}
    times = {
        "cold step": [rank.cold_step for rank in ranks],
        "step": [statistics.median(rank.step_times) if rank.step_times else None for rank in ranks],
    }
    texts |= {name: [NOTHING if t is None else units.format_seconds(t) for t in each] for name, each in times.items()}
    return {name: column for name, column in texts.items() if set(column) != {NOTHING}}


def format_flops(flops: int | None) -> str:
    """As in "1.23 TFLOP"; `NOTHING` where they were not counted."""
    return NOTHING if flops is None else units.format_flops(flops)


def _without_verdict(label: str, measurement: Measurement) -> Row:
    device, failure, worst = measurement.device.key, measurement.failure, worst_of(measurement)
    if failure is not None:
        place = failure.name or NOTHING
        return Row(test=label, device=device, measured=failure.kind, rank=str(failure.rank), phase=place)
    if measurement.steps:
        return Row(test=label, device=device, measured=f"loss {losses_of(measurement)}", verdict="not gated")
    if worst is None:
        return Row(test=label, device=device, measured=NOTHING)
    peak, place = format_bytes(worst.peak()), worst.peak_phase().name
    return Row(test=label, device=device, measured=peak, rank=str(worst.rank), phase=place)


def _with_verdict(label: str, measurement: Measurement, judged: Judged[Judgement]) -> Row:
    judgement = judged.judgement
    metric = judgement.gate.metric_id
    return Row(
        test=label if metric == "allocated" else f"{label} {metric}",
        device=measurement.device.key,
        baseline=reference_of(judgement),
        measured=NOTHING if judgement.measured is None else format_bytes(judgement.measured),
        change=NOTHING if judgement.change is None else format_fraction(judgement.change, signed=True),
        rank=NOTHING if judgement.rank is None else str(judgement.rank),
        phase=judgement.phase or NOTHING,
        verdict=shown_verdict(judged),
    )


def _with_control(label: str, measurement: Measurement, judgement: SavingJudgement) -> Row:
    comparison, metric = judgement.comparison, judgement.rule.metric_id
    label += " saving" if metric == "allocated" else f" saving {metric}"
    if comparison is None or not comparison.has_figures:
        row = _without_verdict(label, measurement)
        reference = f"vs {comparison.control.failure.kind}" if comparison and comparison.control.failure else NOTHING
        return dataclasses.replace(row, baseline=reference, verdict=judgement.verdict)
    return Row(
        test=label,
        device=measurement.device.key,
        baseline=f"vs {format_bytes(comparison.before)}",
        measured=format_bytes(comparison.after),
        change=format_fraction(-comparison.saving_fraction, signed=True),
        rank=str(comparison.worst_after.rank),
        phase=comparison.phase_after,
        verdict=judgement.verdict,
    )


def _on_gpu(label: str, measurement: Measurement, judgement: FitJudgement) -> Row:
    """Peak reserved against what PyTorch may have on the GPU that the marker names."""
    failure, reserved = judgement.failure, judgement.reserved
    return Row(
        test=f"{label} {judgement.rule.gpu}",
        device=f"virtual-{judgement.rule.gpu}" if measurement.device.virtual else judgement.rule.gpu,
        baseline=f"<= {format_bytes(judgement.room)}" if judgement.outside else NOTHING,
        measured=format_bytes(reserved) if reserved is not None else failure.kind if failure is not None else NOTHING,
        rank=NOTHING if judgement.rank is None else str(judgement.rank),
        phase=(failure.name if failure is not None else None) or judgement.phase or NOTHING,
        verdict=judgement.verdict,
    )


def _of_steps(label: str, measurement: Measurement, judged: Judged[ThroughputJudgement]) -> Row:
    judgement = judged.judgement
    return Row(
        test=f"{label} {judgement.metric_id}",
        device=measurement.device.key,
        baseline=judgement.shown_reference or NOTHING,
        measured=judgement.shown or NOTHING,
        change=NOTHING if judgement.change is None else format_fraction(judgement.change, signed=True),
        rank=NOTHING if judgement.rank is None else str(judgement.rank),
        verdict=shown_verdict(judged),
    )


def _fragmented(label: str, measurement: Measurement, judgement: FragmentationJudgement) -> Row:
    row = Row(
        test=f"{label} {judgement.rule.metric_id}",
        device=measurement.device.key,
        baseline=f"<= {judgement.rule.bound}",
        measured=NOTHING,
        rank=NOTHING if judgement.rank is None else str(judgement.rank),
        phase=judgement.phase or NOTHING,
        verdict=judgement.verdict,
    )
    if judgement.unused is None or judgement.fraction is None:
        return row
    as_size = judgement.rule.limit is not None
    return dataclasses.replace(
        row, measured=format_bytes(judgement.unused) if as_size else format_fraction(judgement.fraction)
    )
