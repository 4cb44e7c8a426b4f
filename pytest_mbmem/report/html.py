"""A report to be read in a browser: one page without anything from outside, for screens of any width."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from .. import outside
from ..compare import Comparison
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import GATED_METRICS, GatedMetric, Judgement
from ..growth import GrowthSummary
from ..measurement import Measurement, PhaseFigures, RankMeasurement
from ..savings import SavingJudgement
from ..sweep import Sweep
from ..throughput import ThroughputJudgement
from ..units import format_bytes
from .comparisons import sweep_cells, sweep_notes
from .oom import message_lines
from .results import Judged, Measured, Results, TestResult
from .rows import (
    NOTHING,
    Row,
    coordinates_of,
    extra_columns,
    format_flops,
    label_of,
    measured_ranks,
    rows_of,
    shown_verdict,
    sizes_of,
    worst_of,
)
from .splits import judged_lines, saved_lines
from .throughput import loss_lines, time_lines
from .twins import TITLE, twin_cells, twin_notes

_TEMPLATE = Path(__file__).with_name("page.html")

_MOST_RANKS = 32
"""Ranks that are drawn, the highest ones; of more of them nobody compares bars."""

_GOOD = ("pass", "improvement", "accepted", "fits")


def page(results: Results) -> str:
    """The whole page. All text that comes from tests, recipes and files is escaped."""
    tests = list(results.tests.values())
    text = _TEMPLATE.read_text(encoding="utf-8")
    parts = {
        "FACTS": _facts(results.header),
        "FILTERS": _filters(tests),
        "ROWS": "\n".join(_table_row(number, row) for number, test in enumerate(tests) for row in rows_of(test)),
        "TESTS": "\n".join(_test(number, test) for number, test in enumerate(tests)),
    }
    head, *rest = text.split("<!--")  # the template's places, as in <!--ROWS-->
    filled = [head]
    for piece in rest:
        name, _, tail = piece.partition("-->")
        filled += [parts[name], tail]
    return "".join(filled).encode("utf-8", "backslashreplace").decode()


def _facts(facts: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>" if rows else ""


# The table ------------------------------------------------------------------------------------------------------------


def _filters(tests: Sequence[TestResult]) -> str:
    counts = Counter(row.verdict for test in tests for row in rows_of(test))
    shown = [("", f"all {counts.total()}")] + [
        (verdict, f"{_verdict_name(verdict)} {count}") for verdict, count in sorted(counts.items())
    ]
    return "".join(
        f'<button type="button" data-show="{escape(verdict)}" aria-pressed="{"false" if verdict else "true"}">'
        f"{escape(text)}</button>"
        for verdict, text in shown
    )


def _verdict_name(verdict: str) -> str:
    return "no verdict" if verdict == NOTHING else verdict


def _table_row(number: int, row: Row) -> str:
    cells = [f'<th scope="row"><a href="#test-{number}">{escape(row.test)}</a></th>']
    for field in dataclasses.fields(Row):
        if field.name not in ("test", "verdict"):
            cells.append(f'<td data-name="{field.name}">{escape(getattr(row, field.name))}</td>')
    cells.append(f'<td data-name="verdict">{_badge(row.verdict)}</td>')
    return f'<tr data-verdict="{escape(row.verdict)}">{"".join(cells)}</tr>'


def _badge(verdict: str) -> str:
    kind = "none" if verdict in (NOTHING, "not gated") else "good" if verdict in _GOOD else "bad"
    return f'<span class="badge {kind}">{escape(verdict)}</span>'


# A test ---------------------------------------------------------------------------------------------------------------


def _test(number: int, test: TestResult) -> str:
    verdicts = list(dict.fromkeys(row.verdict for row in rows_of(test)))
    body = "".join(
        [
            *(_measured(test, m) for m in test.measured),
            *map(_sweep, test.sweeps),
            *map(_growth, test.growths),
            *(f"<p>{escape(proof['headline'])}</p>" for proof in test.proofs),
        ]
    )
    body = body or "<p>Nothing was measured.</p>"
    return (
        f'<section id="test-{number}" data-verdicts="{escape(json.dumps(verdicts))}"><h2>{escape(test.id)}</h2>'
        f"<p>{escape(test.outcome)} in {test.duration:.2f} s</p>{body}</section>"
    )


def _measured(test: TestResult, measured: Measured) -> str:
    measurement = measured.measurement
    parts = [f"<h3>{escape(label_of(test.id, measured))}</h3>"] if measured.name else []
    parts += [_judged(measured, judged) for judged in measured.judged]
    parts += map(_of_steps, measured.throughputs)
    parts += [_saving(saving) for saving in measured.savings]
    parts += map(_stated, measured.stated)
    if measurement.notes and not measured.is_judged:  # verdicts have these notes too
        parts.append(_list(measurement.notes))
    if measurement.failure is not None:
        parts.append(_preformatted(message_lines(measurement.failure, whole=True)))
    times = () if measured.throughputs else time_lines(measurement)
    parts.append(_list((*times, *loss_lines(measurement))))
    worst = worst_of(measurement)
    if worst is not None:
        parts += [_rank_bars(measured), _phase_bars(measured, worst), _rank_table(measurement)]
    parts.append(_twin(measurement))
    parts.append(_details("Recipe, environment and assumptions", _background(measurement)))
    return "".join(parts)


def _twin(measurement: Measurement) -> str:
    """The same recipe on a real and a virtual GPU."""
    if measurement.twin is None:
        return ""
    head, *rows = twin_cells(measurement) or [[]]
    shown = _cells(head, rows) if rows else ""
    title = f"{TITLE[0].upper()}{TITLE[1:]} ({measurement.twin.device.key})"
    return f"<h3>{escape(title)}</h3>{shown}{_list(twin_notes(measurement))}"


def _list(texts: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _of_steps(judged: Judged[ThroughputJudgement]) -> str:
    judgement = judged.judgement
    unsaid = judgement.notes if judgement.shown is not None else judgement.notes[1:]  # explain() has the first one then
    return f"<p>{_badge(shown_verdict(judged))} {escape(judgement.explain())}</p>{_list(unsaid)}"


def _judged(measured: Measured, judged: Judged[Judgement]) -> str:
    judgement = judged.judgement
    unsaid = judgement.notes if judgement.measured is not None else ()  # explain() says why nothing was measured
    held = () if judgement.passed else judged_lines(measured, judgement)
    said = f"<p>{_badge(shown_verdict(judged))} {escape(judgement.explain())}</p>{_list(unsaid)}"
    return said + _preformatted(held)


def _preformatted(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def _saving(saving: SavingJudgement) -> str:
    comparison = saving.comparison
    said = comparison.explain() if comparison is not None else ""
    asked = f"asked for: {saving.rule.asked}; the control is {saving.rule.control}"
    unsaid = (note for note in saving.notes if note not in said)
    ranks = _rank_savings({"": comparison} if comparison is not None else {})
    held = _preformatted(() if saving.passed else saved_lines(comparison))
    return f"<p>{_badge(saving.verdict)} {escape(said)}</p>{_list((asked, *unsaid))}{held}{ranks}"


def _stated(judgement: FitJudgement | FragmentationJudgement) -> str:
    return f"<p>{_badge(judgement.verdict)} {escape(judgement.explain())}</p>{_list(judgement.notes)}"


def _rank_savings(comparisons: Mapping[str, Comparison | None]) -> str:
    """Of each comparison with figures, by the name of its row."""
    rows = [
        (name, str(r.rank), *map(format_bytes, (r.before, r.after)), format_bytes(r.saving, signed=True))
        for name, comparison in comparisons.items()
        if comparison is not None and comparison.has_figures
        for r in comparison.ranks
    ]
    first = 1 if len(comparisons) == 1 else 0  # a single one needs no name
    head = ("setting", "rank", "control", "measured", "saved")[first:]
    return _details("Saving of each rank", _cells(head, [row[first:] for row in rows])) if rows else ""


def _growth(growth: GrowthSummary) -> str:
    found = [" ".join(line.strip() for line in finding.lines()) for finding in growth.findings]
    return f"<p>{_badge('pass' if growth.passed else 'growth')} {escape(growth.headline)}</p>{_list(found)}"


def _sweep(sweep: Sweep) -> str:
    title = f"<h3>{escape(sweep.name)}</h3>" if sweep.name else ""
    head, *rows = sweep_cells(sweep)
    ranks = _rank_savings({row.name: row.comparison for row in sweep})
    return title + _cells(head, rows) + _list(sweep_notes(sweep)) + ranks


def _rank_table(measurement: Measurement) -> str:
    head = (
        "rank",
        "coordinates",
        "stands for",
        "allocated",
        "reserved",
        "retained after the last backward",
        "largest allocation",
        "allocation retries",
        "outside PyTorch",
        "FLOPs a step",
        "collectives a step, by group",
    )
    ranks = measured_ranks(measurement)
    more = extra_columns(ranks)
    rows = [
        (
            str(rank.rank),
            coordinates_of(rank) or NOTHING,
            str(rank.stands_for),
            format_bytes(rank.peak()),
            format_bytes(rank.peak("reserved")),
            format_bytes(rank.retained_after_backward[-1]) if rank.retained_after_backward else NOTHING,
            _largest(rank),
            str(rank.allocation_retries),
            outside.text(rank.outside, list(rank.collective_bytes)) or NOTHING,
            format_flops(rank.flops_per_step),
            sizes_of(rank.collective_bytes),
            *(texts[index] for texts in more.values()),
        )
        for index, rank in enumerate(ranks)
    ]
    return _details("Figures of each rank", _cells((*head, *more), rows))


def _cells(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>'


def _background(measurement: Measurement) -> str:
    device = measurement.device
    facts = {
        "device": f"{device.key}, {device.name}",
        "capacity": f"{format_bytes(device.capacity)} ({device.capacity} bytes)",
        "ranks of the job": str(measurement.world_size),
        **({"recipe digest": measurement.recipe_digest} if measurement.recipe_digest else {}),
        **measurement.environment,
    }
    assumptions = "".join(f"<li>{escape(text)}</li>" for text in measurement.assumptions)
    recipe = json.dumps(measurement.recipe, indent=1, ensure_ascii=False) if measurement.recipe else ""
    return (
        _facts(facts)
        + (f"<p>Assumed:</p><ul>{assumptions}</ul>" if assumptions else "")
        + (f"<pre>{escape(recipe)}</pre>" if recipe else "")
    )


def _largest(rank: RankMeasurement) -> str:
    """The largest single allocation, and whose it is."""
    if not rank.largest_allocation:
        return NOTHING
    owner = rank.largest_owner
    return format_bytes(rank.largest_allocation) + (f" ({owner.category} {owner.module})" if owner is not None else "")


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


# Bars -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A line across the bars of a metric: a baseline, a limit or the device's capacity."""

    kind: str  # baseline, limit or capacity
    name: str
    size: int
    metrics: tuple[GatedMetric, ...]


def _rank_bars(measured: Measured) -> str:
    ranks = measured_ranks(measured.measurement)
    shown = sorted(ranks, key=lambda rank: (-rank.peak(), rank.rank))[:_MOST_RANKS]
    bars = [
        (f"rank {rank.rank}", coordinates_of(rank), {metric: rank.peak(metric) for metric in GATED_METRICS})
        for rank in sorted(shown, key=lambda rank: rank.rank)
    ]
    more = f", the highest {len(shown)} of {len(ranks)}" if len(shown) < len(ranks) else ""
    return _bars(f"Peak of each measured rank{more}", bars, list(_bounds(measured, of_phases=False)))


def _phase_bars(measured: Measured, worst: RankMeasurement) -> str:
    bars = [
        (figures.name, f"step {figures.step}" if figures.step > 2 else "", _sizes(figures)) for figures in worst.phases
    ]
    return _bars(f"Peak of each phase on rank {worst.rank}", bars, list(_bounds(measured, of_phases=True)))


def _sizes(figures: PhaseFigures) -> dict[GatedMetric, int]:
    return {metric: figures.peak[metric] for metric in GATED_METRICS if metric in figures.peak}


def _bounds(measured: Measured, of_phases: bool) -> Iterator[_Bound]:
    """Of the gates; one of a single phase bounds no rank's overall peak."""
    for judged in measured.judged:
        judgement = judged.judgement
        gate = judgement.gate
        if judgement.reference is not None and (of_phases or gate.phase is None):
            kind = "baseline" if gate.limit is None else "limit"
            yield _Bound(kind, f"{kind} of {gate.metric_id}", judgement.reference, (gate.metric,))
    yield _Bound("capacity", "capacity", measured.measurement.device.capacity, GATED_METRICS)


def _bars(title: str, bars: Sequence[tuple[str, str, Mapping[GatedMetric, int]]], bounds: Sequence[_Bound]) -> str:
    """Horizontal bars from zero; bounds far beyond the longest one are named only, or no bar could be seen."""
    longest = max(size for _, _, sizes in bars for size in sizes.values())
    drawn = [bound for bound in bounds if bound.size <= 2 * longest]
    full = max([longest, 1, *(bound.size for bound in drawn)]) * 1.02
    lines = [
        f'<div class="bar-name">{escape(name)} <small>{escape(extra)}</small></div><div>'
        + "".join(_bar(metric, size, full, drawn) for metric, size in sizes.items())
        + "</div>"
        for name, extra, sizes in bars
    ]
    return f'<figure><figcaption>{escape(title)}</figcaption>{_legend(bounds, drawn)}<div class="bars">' + (
        "".join(lines) + "</div></figure>"
    )


def _bar(metric: GatedMetric, size: int, full: float, bounds: Iterable[_Bound]) -> str:
    marks = "".join(
        f'<line class="{bound.kind}" x1="{_percent(bound.size, full)}" x2="{_percent(bound.size, full)}" '
        'y1="0" y2="100%"/>'
        for bound in bounds
        if metric in bound.metrics
    )
    text = format_bytes(size)
    return (
        f'<div class="bar"><svg role="img" aria-label="{metric} {text}"><title>{metric} {size} bytes</title>'
        f'<rect class="{metric}" width="{_percent(size, full)}" height="100%"/>{marks}</svg><span>{text}</span></div>'
    )


def _percent(size: int, full: float) -> str:
    return f"{100 * size / full:.2f}%"


def _legend(bounds: Iterable[_Bound], drawn: Sequence[_Bound]) -> str:
    keys = [f'<span class="key {metric}"></span>{metric}' for metric in GATED_METRICS]
    for bound in bounds:
        text = f"{escape(bound.name)} {format_bytes(bound.size)}"
        if bound in drawn:
            keys.append(f'<span class="key line {bound.kind}"></span>{text}')
        else:
            keys.append(f"{text} (beyond the right edge)")
    return f'<p class="legend">{" ".join(f"<span>{key}</span>" for key in keys)}</p>'
