"""The figures of each test over several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..throughput import figure_text
from ..units import format_fraction
from . import run_figures
from .results import Results
from .rows import NOTHING
from .run_figures import File, Tested
from .text import printable, table

NOTE = "More is worse of every metric; throughput is the time of a step."
"""Below a table of series."""

_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"

_MOST_BLOCKS = 20
"""Of the latest runs, that a line of text draws."""


@dataclass(frozen=True)
class Point:
    """A figure of one run."""

    run: str  # the revision's first 10 characters, or the file's name
    started: str  # in UTC, as in "2026-01-31T12:00:00Z"; empty where the file does not say
    value: int


@dataclass(frozen=True)
class Series:
    """A figure over the runs, in time. Of each figure more is worse: of "throughput" it is a step's nanoseconds."""

    label: str  # the test, "@name" behind it
    device: str
    metric: str  # as baselines call it
    points: tuple[Point, ...]

    @property
    def values(self) -> list[int]:
        """Of its points; there is one at least."""
        return [point.value for point in self.points]

    @property
    def since_first(self) -> float | None:
        """The last one's change since the first, as a fraction; None where there is no other, or it is 0."""
        return change(self.values[0], self.values[-1]) if len(self.points) > 1 else None

    @property
    def since_previous(self) -> float | None:
        """The same since the one before."""
        return change(self.values[-2], self.values[-1]) if len(self.points) > 1 else None


def change(before: int, after: int) -> float | None:
    """As a fraction of `before`; None of 0."""
    return (after - before) / before if before else None


def read_series(paths: Sequence[Path]) -> list[Series]:
    """Of JUnit files and files of --mbmem-json; a folder stands for the files in it.

    Runs come in time, and before them those of files that do not say when they were, in the order of `paths`. Raises
    `UserError` naming the file for one that is missing, damaged or something else.
    """
    return _series([one for path in run_figures.files_of(paths) for one in File.load(path).tested])


def series_of(results: Results, earlier: Sequence[Series]) -> list[Series]:
    """The earlier ones with this run's figures as the last point, and this run's that no earlier one had."""
    now = {_key(series): series for series in _series(run_figures.of_results(results, "this run"))}
    found = []
    for series in earlier:
        last = now.pop(_key(series), None)
        if last is None:
            found.append(series)
            continue
        (point,) = last.points
        before = [p for p in series.points if (p.run, p.started) != (point.run, point.started)]
        found.append(replace(series, points=(*before, point)))
    return [*found, *now.values()]


def _key(series: Series) -> tuple[str, str, str]:
    return series.label, series.device, series.metric


def _series(tested: Iterable[Tested]) -> list[Series]:
    points: dict[tuple[str, str, str], list[Point]] = {}
    for one in sorted(tested, key=lambda one: one.started):  # stable
        for metric, value in one.figures.items():
            found, point = points.setdefault((one.label, one.device, metric), []), Point(one.run, one.started, value)
            if not point.started or point not in found:  # a run may have left files of both kinds
                found.append(point)
    return [Series(*key, tuple(found)) for key, found in sorted(points.items())]


# Text -----------------------------------------------------------------------------------------------------------------

HEAD = ("test", "device", "metric", "runs", "first", "last", "to previous", "since first", "min", "max")


def cells_of(series: Series) -> list[str]:
    """A row below `HEAD`."""
    values = series.values
    shown = [figure_text(series.metric, value) for value in (values[0], values[-1], min(values), max(values))]
    changes = [
        NOTHING if share is None else format_fraction(share, signed=True)
        for share in (series.since_previous, series.since_first)
    ]
    return [series.label, series.device, series.metric, str(len(values)), *shown[:2], *changes, *shown[2:]]


def sparkline(values: Sequence[int]) -> str:
    """The latest values as blocks, the lowest of them as the lowest block."""
    shown = values[-_MOST_BLOCKS:]
    least, span = min(shown), max(shown) - min(shown)
    return "".join(_BLOCKS[(value - least) * (len(_BLOCKS) - 1) // span if span else 0] for value in shown)


def lines_of(series: Sequence[Series]) -> list[str]:
    """A table with a row for each test and metric."""
    rows = [[*cells_of(one), sparkline(one.values)] for one in series]
    lines = table([[*HEAD, "trend"], *([printable(cell) for cell in row] for row in rows)], right=HEAD[3:])
    return [*lines, NOTE]
