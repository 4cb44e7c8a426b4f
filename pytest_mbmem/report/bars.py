"""Bars of peaks, of ranks and of phases, without any script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..gates import GATED_METRICS, GatedMetric
from ..measurement import RankMeasurement
from ..units import format_bytes
from .results import Measured
from .rows import coordinates_of, measured_ranks

_MOST_RANKS = 32
"""Ranks that are drawn, the highest ones; of more of them nobody compares bars."""

_Bar = tuple[str, str, Mapping[GatedMetric, int]]  # name, what stands beside it, and its sizes


@dataclass(frozen=True)
class Bound:
    """A line across the bars of a metric: a baseline, a limit or the device's capacity."""

    kind: str  # baseline, limit or capacity
    name: str
    size: int
    metrics: tuple[GatedMetric, ...]


def bounds_of(measured: Measured, *, of_phases: bool) -> Iterator[Bound]:
    """Of the gates, those of a single phase only with `of_phases`: they bound no rank's overall peak."""
    for judged in measured.judged:
        judgement = judged.judgement
        gate = judgement.gate
        if judgement.reference is not None and (of_phases or gate.phase is None):
            kind = "baseline" if gate.limit is None else "limit"
            yield Bound(kind, f"{kind} of {gate.metric_id}", judgement.reference, (gate.metric,))
    yield Bound("capacity", "capacity", measured.measurement.device.capacity, GATED_METRICS)


def rank_bars(measured: Measured) -> str:
    """The peaks of each measured rank."""
    ranks = measured_ranks(measured.measurement)
    shown = sorted(ranks, key=lambda rank: (-rank.peak(), rank.rank))[:_MOST_RANKS]
    bars = [
        (f"rank {rank.rank}", coordinates_of(rank), {metric: rank.peak(metric) for metric in GATED_METRICS})
        for rank in sorted(shown, key=lambda rank: rank.rank)
    ]
    more = f", the highest {len(shown)} of {len(ranks)}" if len(shown) < len(ranks) else ""
    return _bars(f"Peak of each measured rank{more}", bars, list(bounds_of(measured, of_phases=False)))


def phase_bars(measured: Measured, rank: RankMeasurement) -> str:
    """The peaks of each phase on a rank."""
    bars = [
        (
            figures.name,
            f"step {figures.step}" if figures.step > 2 else "",
            {metric: figures.peak[metric] for metric in GATED_METRICS if metric in figures.peak},
        )
        for figures in rank.phases
    ]
    return _bars(f"Peak of each phase on rank {rank.rank}", bars, list(bounds_of(measured, of_phases=True)))


def _bars(title: str, bars: Sequence[_Bar], bounds: Sequence[Bound]) -> str:
    """Horizontal bars from zero; bounds far beyond the longest one are named only, or no bar could be seen."""
    longest = max(size for _, _, sizes in bars for size in sizes.values())
    drawn = [bound for bound in bounds if bound.size <= 2 * longest]
    full = max([longest, 1, *(bound.size for bound in drawn)]) * 1.02
    rows = "".join(
        f"<tr><th>{escape(name)}{f' <small>{escape(beside)}</small>' if beside else ''}<td>"
        + "".join(f'<i class="{metric}" style="--size:{_percent(size, full)}"></i>' for metric, size in sizes.items())
        + f"<td>{'<br>'.join(map(format_bytes, sizes.values()))}"
        for name, beside, sizes in bars
    )
    lines = "".join(_lines(metric, full, drawn) for metric in GATED_METRICS)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption>{_legend(bounds, drawn)}<table class="bars" style="{lines}">'
        f"<tbody>{rows}</table></figure>"
    )


def _lines(metric: GatedMetric, full: float, bounds: Sequence[Bound]) -> str:
    """The bounds as a background of all of a metric's bars."""
    lines = [
        f"linear-gradient(var(--{bound.kind}) 0 0) {_percent(bound.size, full)}/2px 100% no-repeat"
        for bound in bounds
        if metric in bound.metrics
    ]
    return f"--of-{metric}:{','.join(lines)};" if lines else ""


def _percent(size: int, full: float) -> str:
    return f"{100 * size / full:.2f}%"


def _legend(bounds: Sequence[Bound], drawn: Sequence[Bound]) -> str:
    keys = [f'<span class="key {metric}"></span>{metric}' for metric in GATED_METRICS]
    for bound in bounds:
        text = f"{escape(bound.name)} {format_bytes(bound.size)}"
        if bound in drawn:
            keys.append(f'<span class="key line {bound.kind}"></span>{text}')
        else:
            keys.append(f"{text} (beyond the right edge)")
    return f'<p class="legend">{" ".join(f"<span>{key}</span>" for key in keys)}</p>'
