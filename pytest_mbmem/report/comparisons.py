"""Comparisons as text: the table of a sweep, and why a memory_saving marker fails a test."""

from __future__ import annotations

from collections.abc import Iterator

from ..compare import MODELLED, AllocatorFigures, Comparison, Costs, differences_lines, how, said, said_of_all
from ..measurement import Failure
from ..savings import SavingJudgement, step_times
from ..sweep import Row, Sweep
from ..units import format_bytes, format_fraction
from .oom import headline as out_of_memory
from .oom import message_lines
from .results import Measured
from .rows import NOTHING, format_flops
from .splits import saved_lines
from .text import exactly, table

_UNBEATEN = "*"

_TEXTS = ("setting", "phase", "verdict", "")
_TRAFFIC = {"collectives", "moved to host", "moved to device", "host memory"}

_MOST_RANKS = 8
"""Ranks whose saving a failure lists."""

_DISPENSABLE = ("segments", "FLOPs", "rank", "host memory", "moved to device", "phase", "collectives")
"""Columns that a narrow table goes without, the first one first."""


# A sweep --------------------------------------------------------------------------------------------------------------


def sweep_lines(sweep: Sweep, width: int | None = None) -> list[str]:
    """The table of a sweep, a line for the control and each setting, and what there is to say about them.

    `width` in characters: columns are left out until it fits; None leaves out none.
    """
    cells = sweep_cells(sweep)
    right = {name for name in cells[0] if name not in _TEXTS}
    lines = table(cells, right)
    for name in _DISPENSABLE:
        if width is None or max(map(len, lines)) <= width:
            break
        kept = [index for index, head in enumerate(cells[0]) if head != name]
        cells = [[line[index] for index in kept] for line in cells]
        lines = table(cells, right)
    return [*lines, *sweep_notes(sweep)]


def sweep_cells(sweep: Sweep) -> list[list[str]]:
    """The same as texts, the head first.

    Left out are columns in which no row has anything to say, and those of traffic and host memory if all rows agree.
    """
    head = ["setting", f"peak {sweep.metric}", "saved", "rank", "phase", f"peak {_other(sweep)}", "segments", "retries"]
    head += ["FLOPs", "more FLOPs", "collectives"]
    head += ["moved to host", "moved to device", "host memory", "verdict", ""]
    columns: dict[str, list[str]] = {name: [] for name in head}
    rows = (sweep.control, *sweep.rows)
    for row in rows:
        for name, text in zip(columns, _cells(sweep, row), strict=True):
            columns[name].append(text)
    kept = {name: texts for name, texts in columns.items() if any(text not in (NOTHING, "") for text in texts)}
    compared = (row.comparison for row in sweep if row.comparison is not None and row.comparison.has_figures)
    if not any(comparison.is_about_the_allocator for comparison in compared):
        for name in (f"peak {_other(sweep)}", "segments", "retries"):
            kept.pop(name, None)
    for name in _TRAFFIC & kept.keys():
        if len({text for row, text in zip(rows, kept[name], strict=True) if row.ran}) == 1:
            del kept[name]
    return [list(kept), *(list(line) for line in zip(*kept.values(), strict=True))]


def _cells(sweep: Sweep, row: Row) -> Iterator[str]:
    comparison, measurement = row.comparison, row.measurement
    yield row.name
    if not row.ran:
        yield from [NOTHING] * 13
        yield row.verdict
        yield ""
        return
    worst = measurement.worst(sweep.metric, sweep.phase)
    peak = worst.peak_phase(sweep.metric, sweep.phase)
    costs = Costs.of(measurement)
    compared = comparison if comparison is not None and comparison.has_figures else None
    yield format_bytes(peak.peak[sweep.metric])
    yield NOTHING if compared is None else _saved(compared)
    yield str(worst.rank)
    yield peak.name
    allocator = AllocatorFigures.of(measurement)
    yield format_bytes(getattr(allocator, _other(sweep)))
    yield NOTHING if allocator.segments is None else str(allocator.segments)
    yield str(allocator.retries or NOTHING)
    yield format_flops(costs.flops)
    slowdown = None if compared is None else compared.slowdown
    yield NOTHING if slowdown is None else format_fraction(slowdown, signed=True)
    yield _size(sum(costs.collective_bytes.values()))
    yield _size(costs.moved_bytes.get("to host"))
    yield _size(costs.moved_bytes.get("to device"))
    yield _size(costs.host_peak)
    yield row.verdict
    yield _UNBEATEN if row.unbeaten and len(sweep) > 1 else ""


def _other(sweep: Sweep) -> str:
    """The metric that is not compared."""
    return "allocated" if sweep.metric == "reserved" else "reserved"


def _saved(comparison: Comparison) -> str:
    return f"{format_bytes(comparison.saving)} ({format_fraction(comparison.saving_fraction)})"


def _size(size: int | None) -> str:
    return format_bytes(size) if size else NOTHING


def sweep_notes(sweep: Sweep) -> Iterator[str]:
    """The mark's meaning, why rows have no figures, and where savings hide. Of a single comparison, what it says."""
    if len(sweep) == 1:
        yield sweep.rows[0].explain()
        return
    if sweep.best:
        yield f"{_UNBEATEN} no other row takes less memory, FLOPs, traffic or host memory without more of another"
    for row in (sweep.control, *sweep.rows):
        if row.measurement.failure is not None:
            yield f"{row.name}: {how(row.measurement.failure)}: {said_of_all(row.measurement.failure)}"
        elif row.comparison is not None and row.comparison.has_figures:
            yield from (f"{row.name}: {hint}" for hint in row.comparison.hints())


# A memory_saving marker -----------------------------------------------------------------------------------------------


def saving_failure_text(measured: Measured, judgement: SavingJudgement) -> str:
    """Why the marker fails the test: the arithmetic, and what to do."""
    lines = [_headline(measured, judgement), ""]
    facts = list(_facts(measured, judgement))
    width = max(len(name) for name, _ in facts)
    lines += [f"  {name:<{width}}  {value}" for name, value in facts]
    failure = measured.measurement.failure
    if failure is None and judgement.comparison is not None:
        failure = judgement.comparison.control.failure
    if failure is not None:
        lines += ["", *message_lines(failure)]
    if judgement.notes:
        lines += ["", *(f"  - {note}" for note in judgement.notes)]
    held = saved_lines(judgement.comparison)
    return "\n".join([*lines, "", *held] if held else lines)


def _headline(measured: Measured, judgement: SavingJudgement) -> str:
    rule, comparison, verdict = judgement.rule, judgement.comparison, judgement.verdict
    what = f"peak {rule.metric}" + (f" in {rule.phase}" if rule.phase else "")
    if measured.name:
        what += f" of {measured.name!r}"
    if comparison is None or comparison.candidate.failure is not None:
        failure = measured.measurement.failure
        if verdict == "out of memory" and failure is not None and failure.shortage is not None:
            return out_of_memory(failure)
        said_more = f"the recipe does not fit {measured.measurement.device.name}"
        return f"{verdict.upper()}: {said_more if verdict == 'out of memory' else f'{what} could not be measured'}"
    if comparison.control.failure is not None:
        kind = comparison.control.failure.kind
        wrong = "has a setting without effect" if kind == "no effect" else f"does not run ({kind})"
        return f"INVALID: the control itself {wrong}, so nothing is compared"
    if comparison.has_figures and verdict == "invalid":
        return f"INVALID: {what} is compared with its control, but the slowdown cannot be judged"
    if not comparison.has_figures:
        return f"INVALID: {what} could not be compared with its control"
    if verdict == "no effect":
        return f"NO EFFECT: {' and '.join(comparison.differences)} saves nothing of {what}"
    if verdict == "costs more":
        return f"COSTS MORE: {what} is {format_bytes(-comparison.saving)} above the control's"
    if verdict == "too slow":
        assert rule.max_slowdown is not None
        if (times := step_times(comparison)) is not None:
            longer = format_fraction(times[1].step / times[0].step - 1)
            return f"TOO SLOW: a step takes {longer} longer, {format_fraction(rule.max_slowdown)} are allowed"
        assert comparison.slowdown is not None
        more, allowed = format_fraction(comparison.slowdown), format_fraction(rule.max_slowdown)
        return f"TOO SLOW: {more} more FLOPs than the control, {allowed} are allowed"
    short = (judgement.needed or 0) - comparison.saving
    return f"SAVES TOO LITTLE: {what} falls by {format_bytes(comparison.saving)}, {format_bytes(short)} less than asked"


def _facts(measured: Measured, judgement: SavingJudgement) -> Iterator[tuple[str, str]]:
    rule, comparison = judgement.rule, judgement.comparison
    device = measured.measurement.device
    if comparison is None:
        assert measured.measurement.failure is not None
        yield "candidate", _failed(measured.measurement.failure)
    else:
        yield from _compared_facts(judgement, comparison)
    yield "control is", rule.control
    if comparison is not None:
        first, *more = differences_lines(comparison.differences)
        yield "differs", first
        yield from (("", line) for line in more)
    yield "device", f"{device.key}, capacity {format_bytes(device.capacity)}"


def _failed(failure: Failure) -> str:
    return f"{how(failure)}: {said(failure)}"


def _compared_facts(judgement: SavingJudgement, comparison: Comparison) -> Iterator[tuple[str, str]]:
    rule = judgement.rule
    if comparison.control.failure is not None:
        yield "control", _failed(comparison.control.failure)
    if not comparison.has_figures:
        return
    yield "control", f"{exactly(comparison.before)} on rank {comparison.worst_before.rank} in {comparison.phase_before}"
    yield "candidate", f"{exactly(comparison.after)} on rank {comparison.worst_after.rank} in {comparison.phase_after}"
    yield "saved", f"{exactly(comparison.saving)}, {format_fraction(comparison.saving_fraction)} of the control"
    if judgement.needed is None:
        yield "asked for", f"any effect; up to {format_bytes(comparison.slack)} is none"
    else:
        share = f": {rule.asked}" if rule.at_least_fraction is not None else ""
        yield "asked for", f"{exactly(judgement.needed)}{share}"
    ranks = ", ".join(f"{r.rank}: {format_bytes(r.saving, signed=True)}" for r in comparison.ranks[:_MOST_RANKS])
    if len(comparison.ranks) > 1:
        yield "by rank", ranks + (", ..." if len(comparison.ranks) > _MOST_RANKS else "")
    if comparison.slowdown is not None:
        judged = rule.max_slowdown is not None and comparison.candidate.device.virtual
        allowed = "" if rule.max_slowdown is None or not judged else f", allowed {format_fraction(rule.max_slowdown)}"
        modelled = f" ({MODELLED})" if comparison.candidate.device.virtual else ""
        yield "more FLOPs", f"{format_fraction(comparison.slowdown, signed=True)}{modelled}{allowed}"
    costs = comparison.traffic_text()
    if costs:
        yield "and", costs
    if comparison.is_about_the_allocator:
        yield "allocator", comparison.allocator_text()
