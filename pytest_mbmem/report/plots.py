"""What the page's plots are drawn from, as plain data: page.js makes plotly's figures of it, in the browser.

All sizes are bytes.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..measurement import CATEGORIES, Measurement, Metric, RankMeasurement, SegmentMap
from ..split import UNALLOCATED, by_category, split_of
from ..throughput import figure_text
from ..units import format_bytes

if TYPE_CHECKING:
    from .trend import Series

UNKNOWN = "not attributed"
"""Of a peak that the allocator did not tell the parts of."""

COLORS: Mapping[str, str] = {
    "parameters": "#0072b2",
    "optimizer state": "#009e73",
    "main gradients": "#e69f00",
    "gradients": "#d55e00",
    "activations": "#cc79a7",
    "logits": "#8c4fb0",
    "communication buffers": "#f0e442",
    "workspaces": "#56b4e9",
    "temporaries": "#a0522d",
    "buffers": "#5b6abf",
    "rounding": "#b0b7bf",
    "unattributed": "#7d8590",
    UNALLOCATED: "#c9d6e8",
    UNKNOWN: "#7d8590",
}
"""Of each category, in the order in which they are stacked: what stays over a step is at the bottom. The first ones,
which hold most, are those of Okabe and Ito (2008), which most colour-blind readers can tell apart."""

MOST_OWNERS = 8
"""That the timeline names at the peak."""

MOST_SEGMENTS = 40
"""That are drawn, the largest ones; the sums are of all of them."""


_VISIBLE = 50
"""A segment is drawn if it has at least one part in 50 of the largest one's bytes: others would be a line."""


class Plot(NamedTuple):
    """A plot: its data, and what it shows in words, for who cannot see it."""

    data: dict[str, Any]
    words: str


# The timeline ---------------------------------------------------------------------------------------------------------


def timeline(rank: RankMeasurement, bounds: Iterable[tuple[str, int]] = ()) -> Plot | None:
    """A rank's memory over time, and who held most at its peak; None where the allocator did not tell.

    `bounds` are the names and sizes of baselines and limits.
    """
    composition = rank.composition
    if composition is None or not composition.timeline:
        return None
    figures = rank.peak_phase()
    phase = next(index for index, other in enumerate(rank.phases) if other is figures)
    levels = [sum(sizes) for _, *sizes in composition.timeline]
    there = [point for point, (at, *_) in enumerate(composition.timeline) if at == phase]
    columns = zip(*(sizes for _, *sizes in composition.timeline), strict=True)
    parts = {name: list(column) for name, column in zip(CATEGORIES, columns, strict=True) if any(column)}
    held = composition.at(phase)
    top = max(there, key=lambda point: levels[point]) if there else None
    data = {
        "kind": "timeline",
        "phases": [figures.name for figures in rank.phases],
        "at": [at for at, *_ in composition.timeline],
        "parts": {name: parts[name] for name in COLORS if name in parts},
        "peak": {
            "point": top,
            "drawn": 0 if top is None else levels[top],
            "size": rank.peak(),
            "phase": figures.name,
            "owners": [
                [owner.category, module_text(owner.module, owner.modules), owner.line, size]
                for owner, size in list(held.items())[:MOST_OWNERS]
            ],
            "others": sum(list(held.values())[MOST_OWNERS:]),
        },
        "bounds": [[name, size] for name, size in bounds],
    }
    most = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in by_category((owner.category, size) for owner, size in held.items()).items()
    )
    words = f"Memory of rank {rank.rank} over time. Highest with {format_bytes(rank.peak())} in {figures.name}: {most}."
    return Plot(data, words)


def module_text(module: str, modules: int) -> str:
    """A module's name, and how many are folded into it: "decoder.layers.*.mlp x 12"."""
    return f"{module} \u00d7 {modules}" if modules > 1 else module


# Segments -------------------------------------------------------------------------------------------------------------


class SegmentSums(NamedTuple):
    """Of all segments at the peak."""

    segments: int
    reserved: int
    free: int
    largest_free: int  # block
    pools: tuple[tuple[str, int, int, int], ...]  # name, segments, bytes, and free ones
    parts: Mapping[str, int]  # of the blocks, by category, the most first


def segment_sums(segments: Sequence[SegmentMap]) -> SegmentSums:
    """Sums that the fragmentation view states."""
    blocks = [block for segment in segments for block in segment.blocks]
    free = [size for size, category in blocks if category < 0]
    pools = []
    for name, small in (("up to 1 MiB", True), ("larger ones", False)):
        pool = [segment for segment in segments if segment.small == small]
        unused = sum(size for segment in pool for size, category in segment.blocks if category < 0)
        pools.append((name, len(pool), sum(segment.size for segment in pool), unused))
    return SegmentSums(
        len(segments),
        sum(segment.size for segment in segments),
        sum(free),
        max(free, default=0),
        tuple(pool for pool in pools if pool[1]),
        by_category((CATEGORIES[category], size) for size, category in blocks if category >= 0),
    )


def segments(rank: RankMeasurement) -> Plot | None:
    """The segments at a rank's peak and what lay in them, the largest first; None where the allocator did not tell."""
    found = rank.segments_at_peak
    if not found:
        return None
    largest = sorted(found, key=lambda segment: -segment.size)[:MOST_SEGMENTS]
    drawn = [segment for segment in largest if segment.size * _VISIBLE >= largest[0].size]
    sums = segment_sums(found)
    data = {
        "kind": "segments",
        "names": CATEGORIES,
        "segments": [[number for block in _joined(segment.blocks) for number in block] for segment in drawn],
        "small": [int(segment.small) for segment in drawn],
    }
    return Plot(data, f"{sums.segments} segments, {format_bytes(sums.free)} of {format_bytes(sums.reserved)} free.")


def _joined(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours of the same category as one block; free ones stay apart only if something lies between them."""
    joined: list[tuple[int, int]] = []
    for size, category in blocks:
        if joined and joined[-1][1] == category:
            size += joined.pop()[0]
        joined.append((size, category))
    return joined


# Peaks side by side ---------------------------------------------------------------------------------------------------


def peaks(named: Mapping[str, Measurement], metric: Metric, phase: str | None) -> Plot | None:
    """The worst rank's peak of each measurement by category; None with fewer than two that have one."""
    rows: list[tuple[str, dict[str, int]]] = []
    for name, measurement in named.items():
        if measurement.failure is None and measurement.ranks:
            worst = measurement.worst(metric, phase)
            split = split_of(worst, metric, phase)
            parts = by_category((part.category, part.size) for part in split or ())
            rows.append((name, parts or {UNKNOWN: worst.peak(metric, phase)}))
    if len(rows) < 2:
        return None
    names = [name for name in COLORS if any(name in parts for _, parts in rows)]
    data = {
        "kind": "peaks",
        "rows": [name for name, _ in rows],
        "parts": {name: [parts.get(name, 0) for _, parts in rows] for name in names},
    }
    sizes = ", ".join(f"{name} {format_bytes(sum(parts.values()))}" for name, parts in rows)
    return Plot(data, f"Peak {metric} of each setting by category: {sizes}.")


# The trend ------------------------------------------------------------------------------------------------------------


def trend(found: Sequence[Series]) -> list[Plot]:
    """Figures over runs: a plot for each unit, with a line for each series. Runs are in the order of time."""
    by_unit: dict[str, list[Series]] = {}
    for series in found:
        by_unit.setdefault(_unit(series.metric), []).append(series)
    return [_trend(unit, of_unit) for unit, of_unit in by_unit.items()]


def runs_of(found: Sequence[Series]) -> list[tuple[str, str]]:
    """Time and name of the runs that the series have points of; those without a time stay in their order."""
    runs = dict.fromkeys((point.started, point.run) for series in found for point in series.points)
    return sorted(runs) if all(started for started, _ in runs) else list(runs)


def line_name(series: Series, found: Sequence[Series]) -> str:
    """What tells a line from the others: the metric, and what else differs among them."""
    label = f"{series.label} " if len({other.label for other in found}) > 1 else ""
    device = f" on {series.device}" if len({other.device for other in found}) > 1 else ""
    return f"{label}{series.metric}{device}"


def _trend(unit: str, found: Sequence[Series]) -> Plot:
    runs = runs_of(found)
    values = [{(point.started, point.run): point.value for point in series.points} for series in found]
    data = {
        "kind": "trend",
        "unit": unit,
        "runs": [[run, started] for started, run in runs],
        "lines": [
            [line_name(series, found), [points.get(run) for run in runs]]
            for series, points in zip(found, values, strict=True)
        ],
    }
    ends = ", ".join(
        f"{line_name(series, found)} from {figure_text(series.metric, series.points[0].value)} "
        f"to {figure_text(series.metric, series.points[-1].value)}"
        for series in found
    )
    return Plot(data, f"Trend over {len(runs)} runs: {ends}.")


def _unit(metric: str) -> str:
    return {"throughput": "ns", "solo-throughput": "ns", "counted-flops": "FLOP"}.get(metric, "B")


# In the page ----------------------------------------------------------------------------------------------------------


def packed(text: str) -> str:
    """A text as the page holds it: gzip, then base64, which no text can break out of."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "backslashreplace"), 6, mtime=0)).decode()


def packed_plots(plots: Sequence[Plot]) -> str:
    """All plots of a page, with the colours."""
    data = {"colors": COLORS, "plots": [plot.data for plot in plots]}
    return packed(json.dumps(data, separators=(",", ":"), ensure_ascii=False))


@functools.cache
def packed_library() -> str:
    """plotly's own JavaScript."""
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())
