"""A report to be read in a browser: one page without anything from outside, for screens of any width.

The tables need no script. Plots are drawn by plotly, whose script is in the page where there is anything to draw.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from .. import outside
from ..compare import Comparison
from ..diagnosis import Finding
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import Judgement
from ..growth import GrowthSummary
from ..measurement import Measurement, RankMeasurement
from ..savings import SavingJudgement
from ..split import split_of
from ..sweep import Sweep
from ..texts import encodable
from ..throughput import ThroughputJudgement
from ..units import format_bytes
from . import plots
from .bars import rank_bars
from .comparisons import sweep_cells, sweep_notes
from .markup import details, facts, listed, preformatted, table
from .oom import message_lines
from .page_figures import PageFigures, growth_table, parts_table
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
from .splits import judged_lines
from .throughput import loss_lines, time_lines
from .twins import TITLE, twin_cells, twin_notes

if TYPE_CHECKING:
    from .trend import Series

_FOLDER = Path(__file__).parent

_GOOD = ("pass", "improvement", "accepted", "fits")

_NEITHER = (NOTHING, "not gated", "skipped", "xfailed", "xpassed")
"""Verdicts and outcomes that are neither good nor bad."""

_MOST_OPEN = 10
"""Tests that are open at first: the failed ones, if they are no more than that."""


def page(results: Results, earlier: Sequence[Series] = ()) -> str:
    """The whole page. All text that comes from tests, recipes and files is escaped.

    `earlier` are figures of earlier runs, which the page shows the trend of.
    """
    tests = list(results.tests.values())
    figures = PageFigures()
    failed = {test.id for test in tests if test.has_failed}
    opened = {tests[0].id} if len(tests) == 1 else failed if len(failed) <= _MOST_OPEN else set()
    trends = _trends(results, earlier)
    rows = [(number, row) for number, test in enumerate(tests) for row in _rows(test)]
    sections = [_test(number, test, trends[test.id], figures, test.id in opened) for number, test in enumerate(tests)]
    when = {name: value for name, value in (("started", results.started), ("revision", results.revision)) if value}
    parts = {
        "STYLE": _own("page.css"),
        "FACTS": facts({**results.header, **when}),
        "FILTERS": _filters(tests),
        "ROWS": "\n".join(_table_row(number, row) for number, row in rows),
        "TESTS": "\n".join(sections),
        "PLOTS": _plots(figures.plots),
        "SCRIPT": _own("page.js"),
    }
    head, *rest = _own("page.html").split("<!--")  # the template's places, as in <!--ROWS-->
    filled = [head]
    for piece in rest:
        name, _, tail = piece.partition("-->")
        filled += [parts[name], tail]
    return encodable("".join(filled))


def _own(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _plots(drawn: Sequence[plots.Plot]) -> str:
    """What the script draws from, and plotly; nothing where there is nothing to draw."""
    if not drawn:
        return ""
    packed = {"plots": plots.packed_plots(drawn), "plotly": plots.packed_library()}
    blocks = (f'<script type="application/gzip" id="{name}">{text}</script>' for name, text in packed.items())
    notice = (
        "This browser draws no plots: it is too old for them, or scripts are switched off. The tables say the same."
    )
    return f'<p id="no-plots">{notice}</p>{"".join(blocks)}'


def _trends(results: Results, earlier: Sequence[Series]) -> Mapping[str, list[Series]]:
    """By test: those with more than this run's figure."""
    found: dict[str, list[Series]] = defaultdict(list)
    if not earlier:
        return found
    from .trend import series_of

    of_label = {label_of(test.id, measured): test.id for test in results.tests.values() for measured in test.measured}
    for series in series_of(results, earlier):
        if len(series.points) > 1 and series.label in of_label:
            found[of_label[series.label]].append(series)
    return found


# The table ------------------------------------------------------------------------------------------------------------


def _rows(test: TestResult) -> list[Row]:
    """Its verdicts. Of a test without any the outcome, and of a failed one where no verdict says so."""
    rows = list(rows_of(test))
    if not rows or (test.has_failed and all(row.verdict in (*_GOOD, *_NEITHER) for row in rows)):
        device = next((sweep.control.measurement.device.key for sweep in test.sweeps), NOTHING)
        settings = sum(len(sweep) for sweep in test.sweeps)
        measured = f"{settings} setting{'s' * (settings > 1)}" if settings else NOTHING
        verdict = NOTHING if test.outcome == "passed" else test.outcome
        rows.append(Row(test=test.id, device=device, measured=measured, verdict=verdict))
    return rows


def _filters(tests: Sequence[TestResult]) -> str:
    counts = Counter(row.verdict for test in tests for row in _rows(test))
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
            text = getattr(row, field.name)
            nothing = ' class="nothing"' if text == NOTHING else ""
            cells.append(f'<td data-name="{field.name}"{nothing}>{escape(text)}</td>')
    cells.append(f'<td data-name="verdict">{_badge(row.verdict)}</td>')
    return f'<tr data-verdict="{escape(row.verdict)}" data-test="{number}">{"".join(cells)}</tr>'


def _badge(verdict: str) -> str:
    kind = "none" if verdict in _NEITHER else "good" if verdict in _GOOD else "bad"
    return f'<span class="badge {kind}">{escape(verdict)}</span>'


# A test ---------------------------------------------------------------------------------------------------------------


def _test(number: int, test: TestResult, trend: Sequence[Series], figures: PageFigures, is_open: bool) -> str:
    verdicts = list(dict.fromkeys(row.verdict for row in _rows(test)))
    body = "".join(
        [
            *map(_finding, test.findings),
            *(_measured(test, m, figures) for m in test.measured),
            *(_sweep(sweep, figures) for sweep in test.sweeps),
            *map(_growth, test.growths),
            *(f"<p>{escape(proof['headline'])}</p>" for proof in test.proofs),
        ]
    )
    why = "What failed" if test.has_failed else f"Why it is {test.outcome}"
    failure = details(why, preformatted(test.failure.splitlines()))
    failure += "".join(details("What failed before", preformatted(text.splitlines())) for text in test.earlier)
    left = listed(test.artifacts)
    badges = "".join(f" {_badge(verdict)}" for verdict in verdicts if verdict != NOTHING)
    return (
        f'<section id="test-{number}" data-verdicts="{escape(json.dumps(verdicts))}">'
        f"<details{' open' if is_open else ''}><summary><h2>{escape(test.id)}</h2>{badges}</summary>"
        f"<p>{escape(test.outcome)} in {test.duration:.2f} s</p>{body or '<p>Nothing was measured.</p>'}{failure}"
        f"{f'<h3>Left behind</h3>{left}' if left else ''}{figures.trend(trend) if trend else ''}</details></section>"
    )


def _finding(finding: Finding) -> str:
    actions = (action.what + (f" ({action.cost})" if action.cost else "") for action in finding.actions)
    return (
        f'<article class="finding"><h3>{escape(finding.symptom)}</h3>{listed(finding.evidence)}'
        f"<p>Likely cause: {escape(finding.cause)}</p><p>To make sure: {escape(finding.confirm)}</p>"
        f"<p>Next:</p>{listed(actions, 'ol')}<small>{escape(finding.rule)}; {escape(finding.source)}</small></article>"
    )


def _measured(test: TestResult, measured: Measured, figures: PageFigures) -> str:
    measurement = measured.measurement
    parts = [f"<h3>{escape(label_of(test.id, measured))}</h3>"] if measured.name else []
    parts += [_judged(measured, judged) for judged in measured.judged]
    parts += map(_of_steps, measured.throughputs)
    parts += [_saving(saving, figures) for saving in measured.savings]
    parts += map(_stated, measured.stated)
    if measurement.notes and not measured.is_judged:  # verdicts have these notes too
        parts.append(listed(measurement.notes))
    if measurement.failure is not None:
        parts.append(preformatted(message_lines(measurement.failure, whole=True)))
    times = () if measured.throughputs else time_lines(measurement)
    parts.append(listed((*times, *loss_lines(measurement))))
    worst = worst_of(measurement)
    if worst is not None:
        parts += [figures.timeline(measured, worst), rank_bars(measured), figures.segments(worst)]
        parts.append(_rank_table(measurement))
    parts += [_twin(measurement), _estimate(measurement)]
    parts.append(details("Recipe, environment and assumptions", _background(measurement)))
    return "".join(parts)


def _twin(measurement: Measurement) -> str:
    """The same recipe on a real and a virtual GPU."""
    if measurement.twin is None:
        return ""
    head, *rows = twin_cells(measurement) or [[]]
    shown = table(head, rows) if rows else ""
    title = f"{TITLE[0].upper()}{TITLE[1:]} ({measurement.twin.device.key})"
    return f"<h3>{escape(title)}</h3>{shown}{listed(twin_notes(measurement))}"


def _estimate(measurement: Measurement) -> str:
    """The closed-form estimate beside what was measured; nothing where the formula does not take the recipe."""
    if measurement.recipe is None:
        return ""
    from ..errors import UserError
    from ..estimate import estimate
    from ..recipe import Recipe
    from .estimates import KINDS, OTHER, Side

    try:
        found = estimate(Recipe.from_dict(measurement.recipe, "recipe"))
    except UserError:  # what was measured can be a recipe that this version does not take
        return ""
    measured = [measurement, *((measurement.twin,) if measurement.twin is not None else ())]
    sides = [Side.of("virtual" if one.device.virtual else "real", one, found) for one in measured]
    shown = [(f"{side.name} (rank {side.rank.rank})", side) for side in sides if side is not None]
    if not shown:
        return ""
    cells = [("all", format_bytes(found.total), *(format_bytes(side.peak) for _, side in shown))]
    for kind in (*KINDS, OTHER) if any(side.kinds for _, side in shown) else ():
        sizes = [NOTHING if side.kinds is None else format_bytes(side.kinds[kind]) for _, side in shown]
        cells.append((kind, NOTHING if kind == OTHER else format_bytes(found.by_kind.get(kind, 0)), *sizes))
    notes = listed((*found.notes, "mbmem estimate shows the formulas, and says what is not in them"))
    head = ("peak allocated", f"estimate (rank {found.rank})", *(name for name, _ in shown))
    return details(f"Estimate of {format_bytes(found.total)} beside the measured peak", table(head, cells) + notes)


def _of_steps(judged: Judged[ThroughputJudgement]) -> str:
    judgement = judged.judgement
    unsaid = judgement.notes if judgement.shown is not None else judgement.notes[1:]  # explain() has the first one then
    return f"<p>{_badge(shown_verdict(judged))} {escape(judgement.explain())}</p>{listed(unsaid)}"


def _judged(measured: Measured, judged: Judged[Judgement]) -> str:
    judgement = judged.judgement
    unsaid = judgement.notes if judgement.measured is not None else ()  # explain() says why nothing was measured
    said = f"<p>{_badge(shown_verdict(judged))} {escape(judgement.explain())}</p>{listed(unsaid)}"
    if judgement.growth is not None and judgement.growth.changes:
        grown = growth_table(judgement.growth, "Against the baseline")
        return said + (grown if judgement.verdict == "regression" else details("Change against the baseline", grown))
    rank = measured.rank(judgement.rank)
    if judgement.verdict == "regression" and rank is not None:
        split = split_of(rank, judgement.gate.metric, judgement.gate.phase)
        return said + (parts_table(split, "The peak is made of") if split is not None else "")
    return said + preformatted(() if judgement.passed else judged_lines(measured, judgement))


def _saving(saving: SavingJudgement, figures: PageFigures) -> str:
    comparison, rule = saving.comparison, saving.rule
    said = comparison.explain() if comparison is not None else ""
    asked = f"asked for: {rule.asked}; the control is {rule.control}"
    unsaid = (note for note in saving.notes if note not in said)
    head = f"<p>{_badge(saving.verdict)} {escape(said)}</p>{listed((asked, *unsaid))}"
    if comparison is None:
        return head
    sides = {"control": comparison.control, "measured": comparison.candidate}
    drawn = figures.peaks(sides, comparison.metric, comparison.phase)
    changes = _change("Change against the control", comparison, is_open=not saving.passed)
    return head + drawn + changes + _rank_savings({"": comparison})


def _change(summary: str, comparison: Comparison | None, *, is_open: bool = False) -> str:
    """What the candidate's peak has more and less; nothing where one of them is not known."""
    if comparison is None or not comparison.has_figures or comparison.growth is None:
        return ""
    return details(summary, growth_table(comparison.growth, f"Peak {comparison.metric}"), is_open=is_open)


def _stated(judgement: FitJudgement | FragmentationJudgement) -> str:
    return f"<p>{_badge(judgement.verdict)} {escape(judgement.explain())}</p>{listed(judgement.notes)}"


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
    return details("Saving of each rank", table(head, [row[first:] for row in rows])) if rows else ""


def _growth(growth: GrowthSummary) -> str:
    found = [" ".join(line.strip() for line in finding.lines()) for finding in growth.findings]
    return f"<p>{_badge('pass' if growth.passed else 'growth')} {escape(growth.headline)}</p>{listed(found)}"


def _sweep(sweep: Sweep, figures: PageFigures) -> str:
    title = f"<h3>{escape(sweep.name)}</h3>" if sweep.name else ""
    head, *rows = sweep_cells(sweep)
    sides = {row.name: row.measurement for row in (sweep.control, *sweep.rows)}
    drawn = figures.peaks(sides, sweep.metric, sweep.phase)
    changes = "".join(_change(f"Change from {sweep.control.name} to {row.name}", row.comparison) for row in sweep)
    ranks = _rank_savings({row.name: row.comparison for row in sweep})
    return title + table(head, rows) + listed(sweep_notes(sweep)) + drawn + changes + ranks


def _rank_table(measurement: Measurement) -> str:
    """A row for each rank; what is the same of several ones is said once."""
    ranks = measured_ranks(measurement)
    columns = {
        "coordinates": [coordinates_of(rank) or NOTHING for rank in ranks],
        "stands for": [str(rank.stands_for) for rank in ranks],
        "allocated": [format_bytes(rank.peak()) for rank in ranks],
        "reserved": [format_bytes(rank.peak("reserved")) for rank in ranks],
        "retained after the last backward": [
            format_bytes(rank.retained_after_backward[-1]) if rank.retained_after_backward else NOTHING
            for rank in ranks
        ],
        "largest allocation": [_largest(rank) for rank in ranks],
        "allocation retries": [str(rank.allocation_retries) for rank in ranks],
        "outside PyTorch": [outside.text(rank.outside, list(rank.collective_bytes)) or NOTHING for rank in ranks],
        "FLOPs a step": [format_flops(rank.flops_per_step) for rank in ranks],
        "collectives a step, by group": [sizes_of(rank.collective_bytes) for rank in ranks],
        **extra_columns(ranks),
    }
    alike = {name: texts[0] for name, texts in columns.items() if len(ranks) > 1 and len(set(texts)) == 1}
    shown = {name: texts for name, texts in columns.items() if name not in alike}
    rows = zip([str(rank.rank) for rank in ranks], *shown.values(), strict=True)
    said = "; ".join(f"{name} {text}" for name, text in alike.items())
    same = f"<p>The same of every rank: {escape(said)}.</p>" if said else ""
    return details("Figures of each rank", table(("rank", *shown), rows) + same)


def _background(measurement: Measurement) -> str:
    device = measurement.device
    about = {
        "device": f"{device.key}, {device.name}",
        "capacity": f"{format_bytes(device.capacity)} ({device.capacity} bytes)",
        "ranks of the job": str(measurement.world_size),
        **({"recipe digest": measurement.recipe_digest} if measurement.recipe_digest else {}),
        **measurement.environment,
    }
    recipe = json.dumps(measurement.recipe, indent=1, ensure_ascii=False) if measurement.recipe else ""
    return (
        facts(about)
        + (f"<p>Assumed:</p>{listed(measurement.assumptions)}" if measurement.assumptions else "")
        + (f"<pre>{escape(recipe)}</pre>" if recipe else "")
    )


def _largest(rank: RankMeasurement) -> str:
    """The largest single allocation, and whose it is."""
    if not rank.largest_allocation:
        return NOTHING
    owner = rank.largest_owner
    return format_bytes(rank.largest_allocation) + (f" ({owner.category} {owner.module})" if owner is not None else "")
