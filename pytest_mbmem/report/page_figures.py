"""The page's figures: the place of each plot, what it shows in words, and its figures as tables.

A plot is drawn by a script when it comes into view; everything else here can be read without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..gates import GATED_METRICS
from ..measurement import CATEGORIES, Measurement, Metric, RankMeasurement
from ..split import Part, PeakGrowth, Split, total
from ..throughput import figure_text
from ..units import format_bytes
from . import plots
from .bars import bounds_of, phase_bars
from .markup import details, table
from .results import Measured
from .rows import NOTHING

if TYPE_CHECKING:
    from .trend import Series

_MOST_PARTS = 12
"""Of a peak, that a table names."""

_NEAR = 1.3
"""A bound is drawn over the timeline if it is at most so many times the peak; farther ones would flatten it."""


class PageFigures:
    """Makes the figures of a page, and gathers what its plots are drawn from."""

    def __init__(self) -> None:
        self.plots: list[plots.Plot] = []

    def timeline(self, measured: Measured, rank: RankMeasurement) -> str:
        """A rank's memory over time; where that is not known, bars of its phases alone."""
        bounds = [
            (bound.name, bound.size)
            for bound in bounds_of(measured, of_phases=False)
            if "allocated" in bound.metrics and bound.size <= _NEAR * rank.peak()
        ]
        plot = plots.timeline(rank, bounds)
        if plot is None:
            return phase_bars(measured, rank)
        title = f"Memory of rank {rank.rank} over time, by category"
        beyond = rank.peak() - plot.data["peak"]["drawn"]
        rounding = f"Areas are bytes as they were asked for; the peak has {format_bytes(beyond)} more, of rounding"
        said = f"{rounding} and what no history tells." if beyond > 0 else ""
        return self._figure(title, plot, _owners(rank) + _phases(rank), said)

    def segments(self, rank: RankMeasurement) -> str:
        """The allocator's segments at a rank's peak."""
        plot = plots.segments(rank)
        if plot is None:
            return ""
        sums = plots.segment_sums(rank.segments_at_peak)
        drawn = len(plot.data["segments"])
        most = f", the largest {drawn} of {sums.segments}" if drawn < sums.segments else ""
        title = f"Segments of PyTorch's allocator at the peak of rank {rank.rank}{most}"
        said = (
            f"{format_bytes(sums.reserved)} in {sums.segments} segments: {format_bytes(sums.reserved - sums.free)} in "
            f"blocks and {format_bytes(sums.free)} free, at most {format_bytes(sums.largest_free)} of them in one piece"
        )
        pools = [(name, str(count), *map(format_bytes, (size, free))) for name, count, size, free in sums.pools]
        parts = [(name, format_bytes(size)) for name, size in sums.parts.items()]
        tables = table(("requests", "segments", "reserved", "free"), pools) + table(("blocks of", "size"), parts)
        return self._figure(title, plot, tables, said)

    def peaks(self, named: Mapping[str, Measurement], metric: Metric, phase: str | None) -> str:
        """The peaks of several settings by category."""
        plot = plots.peaks(named, metric, phase)
        if plot is None:
            return ""
        parts: Mapping[str, Sequence[int]] = plot.data["parts"]
        rows = [
            (name, *(format_bytes(sizes[index]) if sizes[index] else NOTHING for sizes in parts.values()))
            for index, name in enumerate(plot.data["rows"])
        ]
        where = f" in {phase}" if phase else ""
        return self._figure(f"Peak {metric}{where} by category", plot, table(("setting", *parts), rows))

    def trend(self, found: Sequence[Series]) -> str:
        """Figures of earlier runs, and of this one."""
        runs = plots.runs_of(found)
        head = ("run", "date", *(plots.line_name(series, found) for series in found))
        values = [{(point.started, point.run): point.value for point in series.points} for series in found]
        rows = [
            (
                run,
                started or NOTHING,
                *(
                    figure_text(series.metric, points[started, run]) if (started, run) in points else NOTHING
                    for series, points in zip(found, values, strict=True)
                ),
            )
            for started, run in runs
        ]
        drawn = plots.trend(found)
        tables = ["" for _ in drawn[1:]] + [table(head, rows)]  # one of all of them, under the last
        return "".join(
            self._figure("Trend over earlier runs", plot, text) for plot, text in zip(drawn, tables, strict=True)
        )

    def _figure(self, title: str, plot: plots.Plot, tables: str, said: str = "") -> str:
        self.plots.append(plot)
        place = f'class="plot {plot.data["kind"]}" data-plot="{len(self.plots) - 1}"'
        return (
            f"<figure><figcaption>{escape(title)}</figcaption>"
            + (f'<p class="legend">{escape(said)}</p>' if said else "")
            + f'<div {place} role="img" aria-label="{escape(plot.words)}"></div>{details("Figures", tables)}</figure>'
        )


def _owners(rank: RankMeasurement) -> str:
    rows = [
        (format_bytes(size), owner.category, plots.module_text(owner.module, owner.modules), owner.line)
        for owner, size in list(rank.owners().items())[: plots.MOST_OWNERS]
    ]
    return table(("at the peak", "category", "module", "allocated in"), rows)


def _phases(rank: RankMeasurement) -> str:
    """The peak of each, and what it is made of."""
    composition = rank.composition
    assert composition is not None
    of_phases = [composition.categories(index) for index in range(len(rank.phases))]
    names = [name for name in CATEGORIES if any(sizes[name] for sizes in of_phases)]
    rows = [
        (
            figures.name,
            *(format_bytes(figures.peak[metric]) if metric in figures.peak else NOTHING for metric in GATED_METRICS),
            *(format_bytes(sizes[name]) if sizes[name] else NOTHING for name in names),
        )
        for figures, sizes in zip(rank.phases, of_phases, strict=True)
    ]
    return table(("phase", *GATED_METRICS, *names), rows)


def growth_table(growth: PeakGrowth, title: str) -> str:
    """What one peak has more and less than another: what texts name of it, the largest changes first."""
    places = f"; {growth.places}" if growth.places else ""
    caption = f"{title}: {format_bytes(growth.total, signed=True)}{places}"
    if not growth.changes:
        return f"<figure><figcaption>{escape(caption)}</figcaption><p>Nothing differs.</p></figure>"
    return _sized_table(caption, growth.named(), growth.total, signed=True)


def parts_table(split: Split, title: str) -> str:
    """What a peak is made of, the largest parts first."""
    named = sorted(split, key=lambda part: -part.size)[:_MOST_PARTS]
    caption = f"{title} ({format_bytes(total(split))})"
    return _sized_table(caption, [(part.size, part, "") for part in named], total(split), signed=False)


def _sized_table(caption: str, named: Sequence[tuple[int, Part, str]], whole: int, *, signed: bool) -> str:
    """A bar and a name for each part, each with a remark; what remains of the whole in a sum."""
    found = sorted(named, key=lambda one: -abs(one[0]))
    rows = [(size, part.category, _what(part, remark)) for size, part, remark in found]
    rest = whole - sum(size for size, _, _ in found)
    rows += [(rest, "everything else", "")] if rest else []
    largest = max(abs(size) for size, _, _ in rows)
    body = "".join(_sized_row(*row, largest, signed) for row in rows)
    sized = f'<table class="growth"><tbody>{body}</table>'
    return f"<figure><figcaption>{escape(caption)}</figcaption>{sized}</figure>"


def _sized_row(size: int, category: str, what: str, largest: int, signed: bool) -> str:
    kind = "held" if not signed else "more" if size > 0 else "less"
    color = plots.COLORS.get(category)
    key = f'<span class="key" style="background:{color}"></span>' if color else ""
    return (
        f"<tr><td>{format_bytes(size, signed=signed)}"
        f'<i class="{kind}" style="--size:{100 * abs(size) / largest:.2f}%"></i>'
        f"<th>{key}{escape(category)} <small>{escape(what)}</small>"
    )


def _what(part: Part, remark: str) -> str:
    if part.is_other:
        return ""
    module = plots.module_text(part.module, part.modules) + remark
    return ", ".join(filter(None, (module.strip(), part.line or part.place)))
