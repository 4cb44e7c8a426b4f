"""Texts for a terminal: why a test failed, and the tables of a session and of a single measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import outside
from ..compare import how
from ..gates import Judgement
from ..measurement import Measurement, RankMeasurement
from ..split import parts_lines, split_of
from ..texts import printable
from ..throughput import figure_text
from ..units import format_bytes, format_fraction
from .comparisons import sweep_lines
from .findings import TITLE, findings_lines, found_in
from .oom import headline as out_of_memory
from .oom import message_lines
from .ratchet import history_lines
from .results import Measured, Results
from .rows import (
    Row,
    coordinates_of,
    extra_columns,
    format_flops,
    label_of,
    measured_ranks,
    rank_text,
    rows_of,
    sizes_of,
    worst_of,
)
from .splits import judged_lines
from .text import GAP, advice_lines, aligned, exactly, note_lines, table
from .throughput import loss_lines, time_lines
from .twins import session_lines, twin_lines

if TYPE_CHECKING:
    from ..baselines import Change, Orphan

_NARROWEST, _WIDEST = 80, 200
_SHORTEST_TEST = 28
"""Characters that the table leaves to a test's id before it gives up a column."""


# Failures -------------------------------------------------------------------------------------------------------------


def failure_text(nodeid: str, measured: Measured, judgement: Judgement, to_paste: str | None) -> str:
    """Why the gate fails the test and what to do, for a verdict that does not pass; `to_paste` if it is "missing"."""
    lines = [_headline(measured, judgement), "", *aligned(list(_facts(measured, judgement)))]
    failure = measured.measurement.failure
    if failure is not None:
        lines += ["", *message_lines(failure)]
    else:
        notes = [part for note in judgement.notes for part in note_lines(note)]
        lines += ["", *notes] if notes else []
        held = judged_lines(measured, judgement)
        lines += ["", *held] if held else []
        past = history_lines(judgement.history, judgement.measured or 0, format_bytes)
        lines += ["", *past] if past else []
    advice = list(advice_lines(nodeid, judgement.verdict, to_paste, "memory")) if judgement.gate.limit is None else []
    return "\n".join([*lines, "", *advice] if advice else lines)


def _headline(measured: Measured, judgement: Judgement) -> str:
    gate, device = judgement.gate, measured.measurement.device
    what = f"peak {gate.metric}" + (f" in {gate.phase}" if gate.phase else "")
    if measured.name:
        what += f" of {measured.name!r}"
    verdict = judgement.verdict
    if verdict == "regression":
        assert judgement.measured is not None
        assert judgement.allowed is not None
        bound = "the limit" if gate.limit is not None else "what the baseline allows"
        return f"REGRESSION: {what} is {format_bytes(judgement.measured - judgement.allowed)} over {bound}"
    if verdict == "missing":
        return f"MISSING: {what} has no baseline on {device.key}"
    if verdict == "stale":
        return f"STALE: the baseline of {what} is of another recipe"
    if verdict == "out of memory":
        failure = measured.measurement.failure
        if failure is not None and failure.shortage is not None:
            return out_of_memory(failure)
        return f"OUT OF MEMORY: the recipe does not fit {device.name}"
    return f"INVALID: {what} could not be measured"


def _facts(measured: Measured, judgement: Judgement) -> Iterator[tuple[str, str]]:
    gate, device = judgement.gate, measured.measurement.device
    if judgement.measured is not None:
        yield "measured", exactly(judgement.measured)
    if judgement.reference is not None:
        other = " (of the other recipe)" if judgement.verdict == "stale" else ""
        yield "baseline" if gate.limit is None else "limit", exactly(judgement.reference) + other
    if judgement.allowed is not None and gate.limit is None:
        rule = f"tolerance {format_fraction(gate.tolerance)}, slack {format_bytes(gate.slack)}"
        yield "allowed", f"{exactly(judgement.allowed)}: {rule}"
    if judgement.measured is not None and judgement.reference is not None:
        difference = judgement.measured - judgement.reference
        share = format_fraction(difference / judgement.reference, signed=True)
        yield "change", f"{share}, {format_bytes(difference, signed=True)}"
    if judgement.rank is not None:
        yield "rank" if measured.measurement.failure is not None else "worst rank", rank_text(measured, judgement.rank)
    if judgement.phase is not None:
        yield "phase", judgement.phase
    yield "device", f"{device.key}, capacity {format_bytes(device.capacity)}"


# The session's summary ------------------------------------------------------------------------------------------------


def summary_lines(results: Results, width: int) -> list[str]:
    """The table of all verdicts and measurements, fitted into `width` characters, and notes on tests that passed."""
    rows = [row for test in results.tests.values() for row in rows_of(test)]
    lines = [*_summary_table(rows, width), *_notes(results)] if rows else []
    twins = session_lines(results)
    return [printable(line) for line in (*lines, *_sweeps(results, width), *([""] if twins else []), *twins)]


def _sweeps(results: Results, width: int) -> Iterator[str]:
    """The tables of comparisons and sweeps. Equal ones, which cases of a parametrised test share, come once."""
    tests: dict[tuple[str, ...], list[str]] = {}
    for test in results.tests.values():
        for sweep in test.sweeps:
            label = test.id + (f", {sweep.name}" if sweep.name else "")
            tests.setdefault(tuple(sweep_lines(sweep, width)), []).append(label)
    for lines, (first, *more) in tests.items():
        yield ""
        yield f"{first}{f' and {len(more)} more' if more else ''}:"
        yield from lines


def _summary_table(rows: Sequence[Row], width: int) -> Iterator[str]:
    width = min(max(width, _NARROWEST), _WIDEST)
    columns = [f.name for f in dataclasses.fields(Row)]
    longest = max(len(row.test) for row in rows)
    for dispensable in ("device", "phase"):
        if _left_for_tests(rows, columns, width) < min(longest, _SHORTEST_TEST):
            columns.remove(dispensable)
    room = max(_left_for_tests(rows, columns, width), len("test"))
    cells = [[getattr(row, name) for name in columns] for row in rows]
    for line in cells:
        line[0] = _end(line[0], room)
    yield from table([columns, *cells], right={"baseline", "measured", "change", "rank"})
    if "device" not in columns:
        yield f"device: {', '.join(dict.fromkeys(row.device for row in rows))}"


def _left_for_tests(rows: Sequence[Row], columns: Sequence[str], width: int) -> int:
    others = [max(len(name), *(len(getattr(row, name)) for row in rows)) for name in columns if name != "test"]
    return width - sum(others) - len(GAP) * len(others)


def _end(text: str, room: int) -> str:
    """The end says most: a test's name and parameters."""
    return text if len(text) <= room else f"...{text[len(text) - (room - 3) :]}"


def _notes(results: Results) -> Iterator[str]:
    """What verdicts that passed have to say; those that failed say it in their failure. Equal ones come once."""
    tests: dict[str, list[str]] = {}
    for test in results.tests.values():
        for measured in test.measured:
            for note in () if measured.is_judged else measured.measurement.notes:  # verdicts have these notes too
                tests.setdefault(note, []).append(label_of(test.id, measured))
            for judged in measured.judged:
                for note in judged.judgement.notes if judged.judgement.passed else ():
                    tests.setdefault(note, []).append(label_of(test.id, measured))
            for saving in measured.savings:
                if saving.passed and saving.comparison is not None:
                    said = saving.comparison.explain()  # which has some of the notes
                    for note in (said, *(note for note in saving.notes if note not in said)):
                        tests.setdefault(note, []).append(label_of(test.id, measured))
            for stated in measured.stated:
                for note in (stated.explain(), *stated.notes) if stated.passed else ():
                    tests.setdefault(note, []).append(label_of(test.id, measured))
            for throughput in (judged.judgement for judged in measured.throughputs):
                times = () if throughput.throughput is None else (throughput.throughput.explain(),)
                for note in (*times, *throughput.notes) if throughput.passed else ():
                    tests.setdefault(note, []).append(label_of(test.id, measured))
    for note, (first, *more) in tests.items():
        yield f"note: {first}{f' and {len(more)} more' if more else ''}: {note}"


def changes_lines(changes: Sequence[Change]) -> list[str]:
    """What an update wrote, by file."""
    lines: list[str] = []
    for path in dict.fromkeys(change.path for change in changes):
        lines.append(f"baselines written: {path}")
        for change in changes:
            if change.path == path:
                metric = "" if change.metric_id == "allocated" else f" {change.metric_id}"
                before = "" if change.old is None else f"{figure_text(change.metric_id, change.old)} -> "
                new = figure_text(change.metric_id, change.new)
                lines.append(f"  {change.key}{metric}: {change.kind}, {before}{new}")
    return lines


def orphan_lines(orphans: Sequence[Orphan]) -> list[str]:
    """Baselines whose test is gone."""
    if not orphans:
        return []
    places = [f"  {orphan.path}:{orphan.line}: {orphan.key}" for orphan in orphans]
    return ["baselines without a test (renamed or removed; delete their entries):", *places]


# A single measurement -------------------------------------------------------------------------------------------------


def measurement_lines(measurement: Measurement) -> list[str]:
    """Peaks of every rank, and of every phase of the worst one; its failure, if it has one."""
    return [printable(line) for line in _measurement_lines(measurement)]


def _measurement_lines(measurement: Measurement) -> Iterator[str]:
    device = measurement.device
    ranks = measured_ranks(measurement)
    yield f"device: {device.key}, {device.name}, capacity {format_bytes(device.capacity)}"
    if ranks:
        yield f"job: {measurement.world_size} ranks, {len(ranks)} of them measured"
        yield ""
        yield from _rank_table(ranks)
    from .estimates import measurement_line  # the catalogue of constraints, which no other report needs

    if line := measurement_line(measurement):
        yield ""
        yield line
    worst = worst_of(measurement)
    if worst is not None:
        yield ""
        yield f"phases of rank {worst.rank}:"
        yield from _phase_table(worst)
        if (split := split_of(worst)) is not None:
            yield ""
            yield from parts_lines(split)
        yield ""
        yield f"collectives in a step by group: {sizes_of(worst.collective_bytes)}"
        if worst.outside:
            yield f"outside PyTorch: {outside.text(worst.outside, list(worst.collective_bytes))}"
        if worst.allocation_retries:
            yield f"cudaMalloc failed and the cache was emptied {worst.allocation_retries} times"
    yield from (*time_lines(measurement), *loss_lines(measurement))
    if measurement.twin is not None:
        yield ""
        yield from twin_lines(measurement)
        yield ""
    for note in measurement.notes:
        yield f"note: {note}"
    for assumption in measurement.assumptions:
        yield f"assumed: {assumption}"
    yield f"versions: {', '.join(f'{name} {value}' for name, value in measurement.environment.items())}"
    failure = measurement.failure
    if failure is not None:
        yield ""
        yield f"FAILED: {how(failure)}"
        yield from message_lines(failure)
        if findings := found_in(measurement):
            yield from ("", f"{TITLE}:", "", *findings_lines(findings))


def _rank_table(ranks: Sequence[RankMeasurement]) -> list[str]:
    head = ["rank", "coordinates", "stands for", "peak allocated", "peak reserved", "phase of the peak", "FLOPs a step"]
    more = extra_columns(ranks)
    cells = [
        [
            str(rank.rank),
            coordinates_of(rank),
            str(rank.stands_for),
            format_bytes(rank.peak()),
            format_bytes(rank.peak("reserved")),
            rank.peak_phase().name,
            format_flops(rank.flops_per_step),
            *(texts[index] for texts in more.values()),
        ]
        for index, rank in enumerate(ranks)
    ]
    right = {"rank", "stands for", "peak allocated", "peak reserved", "FLOPs a step", *more}
    return table([[*head, *more], *cells], right=right)


def _phase_table(rank: RankMeasurement) -> list[str]:
    head = ["step", "phase", "allocated", "at its end", "reserved"]
    cells = [
        [
            str(figures.step),
            figures.phase,
            format_bytes(figures.peak["allocated"]),
            format_bytes(figures.resting["allocated"]),
            format_bytes(figures.peak["reserved"]),
        ]
        for figures in rank.phases
    ]
    return table([head, *cells], right={"step", "allocated", "at its end", "reserved"})
