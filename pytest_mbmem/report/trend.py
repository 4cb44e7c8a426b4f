"""The figures of each test over several runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile
from pathlib import Path

from ..texts import printable
from ..throughput import figure_text
from ..units import format_fraction
from . import run_figures
from .results import Results
from .rows import NOTHING
from .run_figures import File, Tested
from .text import table

NOTE = "More is worse of every metric; throughput is the time of a step."
"""Below a table of series."""

_APART = timedelta(seconds=2)
"""By which the starts may differ that the files of one run say: pytest's own takes its time."""

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

    Runs come in time, and before them those of files that do not say when they were, in the order of `paths`. Several
    files of one run are one point. Raises `UserError` naming the file for one that is missing, damaged or something
    else.
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
    series: dict[tuple[str, str, str], list[list[Tested]]] = {}  # of each run what its files say
    for one in sorted(tested, key=lambda one: one.started):  # stable
        for metric in one.figures:
            runs = series.setdefault((one.label, one.device, metric), [])
            run = _run_of(runs, one, metric)
            if run is None:
                runs.append([one])
            else:
                run.append(one)
    return [Series(*key, _points(runs, key[-1])) for key, runs in sorted(series.items())]


def _run_of(runs: Sequence[list[Tested]], one: Tested, metric: str) -> list[Tested] | None:
    """The run that left this file as well: it began at about the same time, with an equal figure, of no other revision,
    and this kind of file is not known of it yet, unless it is the same file again."""
    for run in takewhile(lambda run: _began_together(run[0].started, one.started), reversed(runs)):
        revisions = {said.run for said in (*run, one) if said.has_revision}
        if run[0].figures[metric] != one.figures[metric] or len(revisions) > 1:
            continue
        if all(said.kind != one.kind or (said.run, said.started) == (one.run, one.started) for said in run):
            return run
    return None


def _began_together(first: str, second: str) -> bool:
    try:
        began, other = (datetime.strptime(started, "%Y-%m-%dT%H:%M:%SZ") for started in (first, second))
    except ValueError:  # a file that says no time, or something else
        return False
    return abs(other - began) <= _APART


def _points(runs: Iterable[Sequence[Tested]], metric: str) -> tuple[Point, ...]:
    """Of each run by the file that knows most: the revision, or all measurements."""
    best = [min(run, key=lambda one: (not one.has_revision, one.measurement is None)) for run in runs]
    points = (Point(one.run, one.started, one.figures[metric]) for one in best)
    return tuple(sorted(points, key=lambda point: point.started))


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
