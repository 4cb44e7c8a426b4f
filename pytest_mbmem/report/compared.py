"""What `mbmem compare` says of two runs: the figures of each test in both, and which of them got worse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import gates, throughput
from ..errors import UserError
from ..measurement import Measurement
from ..split import growth, places_text, split_of
from ..texts import printable
from ..throughput import figure_text
from ..units import format_fraction
from . import run_figures
from .fail_on import MISSING, Rule
from .rows import NOTHING
from .run_figures import Band, File, Tested, band_of, peak_of
from .text import table
from .trend import Series, change

HEAD = ("test", "device", "metric", "base", "head", "change", "verdict")

WORSE, BETTER, SAME, NEW, GONE, FAILED, FIXED = "worse", "better", "same", "new", "gone", "failed", "fixed"

_BAD = (WORSE, FAILED, GONE)

_MOST_LINES = 12
"""Of what grew in a test."""


@dataclass(frozen=True)
class Row:
    """A figure of a test in both runs, or a test that one of them has alone or could not measure."""

    label: str
    device: str
    metric: str  # `NOTHING` where a run has no figures
    before: int | None
    after: int | None
    verdict: str
    base: Tested | None
    head: Tested | None

    @property
    def change(self) -> float | None:
        """As a fraction of the base's figure."""
        return change(self.before, self.after) if self.before is not None and self.after is not None else None

    @property
    def changed(self) -> bool:
        """Whether it is worth a line in a summary."""
        return self.verdict != SAME

    @property
    def is_bad(self) -> bool:
        """Whether it asks for someone to look."""
        return self.verdict in _BAD

    @property
    def change_text(self) -> str:
        """As in "+1.00%"."""
        return NOTHING if self.change is None else format_fraction(self.change, signed=True)

    def cells(self) -> list[str]:
        """A row below `HEAD`."""
        before, after = _shown(self.metric, self.before, self.base), _shown(self.metric, self.after, self.head)
        return [self.label, self.device, self.metric, before, after, self.change_text, self.verdict]

    def growth_lines(self) -> list[str]:
        """What the head's peak has more and less than the base's. Empty where one of them is not known."""
        one, other = (side.measurement if side is not None else None for side in (self.base, self.head))
        if one is None or other is None or self.change is None:
            return []
        return _growth_lines(one, other, self.metric)[:_MOST_LINES]


@dataclass(frozen=True)
class Compared:
    """Two runs side by side."""

    base: str  # as the user named it
    head: str
    rows: tuple[Row, ...]

    @classmethod
    def of(cls, base: File, head: File) -> Compared:
        """Of two files. Raises `UserError` for one that has nothing to compare."""
        for file in (base, head):
            if not file.tested:
                raise UserError(f"{file.path}: no test measured anything, so there is nothing to compare")
        return cls(str(base.path), str(head.path), tuple(_rows(base.tested, head.tested)))

    @property
    def summary(self) -> str:
        """In one sentence."""
        tests = len({(row.label, row.device) for row in self.rows})
        counts = Counter(row.verdict for row in self.rows)
        order = (WORSE, FAILED, GONE, BETTER, FIXED, NEW, SAME)
        said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
        return f"{_number(len(self.rows), 'figure')} of {_number(tests, 'test')}: {said}"

    def lines(self) -> list[str]:
        """A table with a row for each figure, and the summary."""
        rows = [[printable(cell) for cell in row.cells()] for row in self.rows]
        return [*table([HEAD, *rows], right=("base", "head", "change")), self.summary]


def broken_rules(rows: Sequence[Row], rules: Sequence[Rule]) -> list[str]:
    """A line for each figure that is worse than a rule lets it be.

    Raises `UserError` for a rule on a metric that no test has, because it would never fail.
    """
    found = []
    for rule in rules:
        judged = False
        for row in rows:
            if rule.metric == MISSING:
                bad, judged = row.verdict == GONE, True
            elif row.verdict == FAILED and row.base is not None and any(map(rule.is_about, row.base.figures)):
                bad = judged = True
            elif rule.is_about(row.metric) and row.before is not None and row.after is not None:
                bad, judged = rule.is_broken(row.before, row.after), True
            else:
                continue
            if bad:
                label, _, metric, before, after, share, verdict = row.cells()
                what = f"{metric}: {before} -> {after} ({verdict if share == NOTHING else share})"
                what = f"{label}: {after}" if verdict == FAILED else f"{label} {what}"
                found.append(printable(f"--fail-on {rule.text}: {what}"))
        if not judged:
            have = ", ".join(dict.fromkeys(row.metric for row in rows if row.metric != NOTHING)) or "none"
            raise UserError(f"--fail-on: {rule.text}: no test has this figure in both runs; they have {have}")
    return found


def _trend_verdict(before: int, after: int) -> str:
    return WORSE if after > before else BETTER if after < before else SAME


def trend_rows(series: Sequence[Series]) -> list[Row]:
    """The last figure of each series against the one before, for rules."""
    return [
        Row(one.label, one.device, one.metric, before, after, _trend_verdict(before, after), None, None)
        for one in series
        if len(one.points) > 1
        for before, after in [one.values[-2:]]
    ]


def _number(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _shown(metric: str, value: int | None, tested: Tested | None) -> str:
    if value is not None:
        return figure_text(metric, value)
    return (tested.failure if tested is not None else None) or NOTHING


# Rows -----------------------------------------------------------------------------------------------------------------


def _rows(first: Sequence[Tested], second: Sequence[Tested]) -> Iterator[Row]:
    for base, head in _pairs(first, second):
        one = base or head
        assert one is not None
        device = one.device
        if base is None or head is None:
            verdict = NEW if base is None else GONE
            metric = next(iter(one.figures), NOTHING)
            value = one.figures.get(metric)
            before, after = (None, value) if base is None else (value, None)
            yield Row(one.label, device, metric, before, after, verdict, base, head)
            continue
        label = base.label if base.label == head.label else f"{base.label} / {head.label}"
        if base.device != head.device:
            device = f"{base.device} / {head.device}"
        if base.failure is not None or head.failure is not None:
            verdict = SAME if base.failure == head.failure else FAILED if head.failure is not None else FIXED
            yield Row(label, device, NOTHING, None, None, verdict, base, head)
            continue
        for metric in dict.fromkeys((*base.figures, *head.figures)):
            before, after = _figure(base, metric), _figure(head, metric)
            yield Row(label, device, metric, before, after, _verdict(metric, before, after, base, head), base, head)


def _pairs(first: Sequence[Tested], second: Sequence[Tested]) -> Iterator[tuple[Tested | None, Tested | None]]:
    """Those of equal names and devices, or of equal names where each run has a single device for it."""
    if any(one.alone for one in (*first, *second)):
        yield from _pairs_of_a_recipe(first, second)
        return
    theirs = {(one.label, one.device): one for one in second}
    devices = [Counter(one.label for one in tested) for tested in (first, second)]
    for one in first:
        other = theirs.pop((one.label, one.device), None)
        if other is None and all(counts[one.label] == 1 for counts in devices):
            other = next(candidate for candidate in theirs.values() if candidate.label == one.label)
            del theirs[other.label, other.device]
        yield one, other
    for other in theirs.values():
        yield None, other


def _pairs_of_a_recipe(first: Sequence[Tested], second: Sequence[Tested]) -> Iterator[tuple[Tested, Tested]]:
    """A single measurement is compared with those of the same recipe, or with the only one."""
    found = False
    for one in first:
        for other in second:
            mine, theirs = one.measurement, other.measurement
            alike = mine is not None and theirs is not None and mine.recipe_digest == theirs.recipe_digest
            if alike or len(first) == len(second) == 1:
                found = True
                yield one, other
    if not found:
        raise UserError("the two files have nothing in common: no test measured the recipe of the single measurement")


def _figure(tested: Tested, metric: str) -> int | None:
    """Also of a phase that this run had no gate for."""
    value = tested.figures.get(metric)
    return value if value is not None or tested.measurement is None else run_figures.figure(tested.measurement, metric)


def _verdict(metric: str, before: int | None, after: int | None, base: Tested, head: Tested) -> str:
    if before is None or after is None:
        return NEW if before is None else GONE
    band: Band = band_of(metric, head, base)
    if peak_of(metric) is not None:
        found = gates.compare(after, before, band.tolerance, band.slack)
        return {"regression": WORSE, "improvement": BETTER, "pass": SAME}[found]
    noise = max(base.spread or 0, head.spread or 0) if metric in throughput.TIMES else None
    lowest, highest = throughput.band(before, band.tolerance, noise)
    return WORSE if after > highest else BETTER if after < lowest else SAME


def _growth_lines(one: Measurement, other: Measurement, metric_id: str) -> list[str]:
    peak = peak_of(metric_id)
    if peak is None:
        return []
    ranks = [measurement.worst(*peak) for measurement in (one, other)]
    before, after = (split_of(rank, *peak) for rank in ranks)
    if before is None or after is None:
        return []
    places = [(rank.rank, rank.peak_phase(*peak).name) for rank in ranks]
    return growth(before, after, places_text(*places)).lines(f"{metric_id}: what changed")
