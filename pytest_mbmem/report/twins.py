"""Two measurements of the same thing side by side; above all a real GPU's and that of its virtual twin.

A difference is what the second has more than the first, and its share is of the first: of a real GPU and its twin, what
the virtual GPU shows too much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..compare import how, said
from ..gates import GATED_METRICS
from ..measurement import Measurement, Metric, PhaseFigures, RankMeasurement
from ..units import format_bytes, format_fraction
from .results import Results
from .rows import NOTHING, label_of, measured_ranks, worst_of
from .text import table

DEVICE_USED = "device-used"

TITLE = "virtual against real"

NUMBERS = ("rank", "real", "virtual", "difference", "%")
"""Columns to the right, of the tables here."""

_ESTIMATE = f"{DEVICE_USED} of the virtual GPU: peak reserved, and the estimate of what is beside PyTorch"

_HEAD = ("rank", "metric", "phase", "real", "virtual", "difference", "%")


@dataclass(frozen=True)
class Difference:
    """The same figure of two measurements, in bytes."""

    rank: int
    metric: str  # allocated, reserved or device-used
    phase: str  # or both, where a peak is in another one; empty: of no phase
    first: int
    second: int

    @property
    def size(self) -> int:
        """Bytes that the second has more."""
        return self.second - self.first

    @property
    def share(self) -> float | None:
        """The same as a share of the first, which may be nothing."""
        return self.size / self.first if self.first else None

    @property
    def weight(self) -> tuple[float, int]:
        """The larger, the worse."""
        return (abs(self.share) if self.share is not None else float(self.size != 0), abs(self.size))

    def cells(self) -> list[str]:
        """Metric, phase, both figures, difference and share as texts."""
        share = NOTHING if self.share is None else format_fraction(self.share, signed=True)
        figures = (format_bytes(self.first), format_bytes(self.second), format_bytes(self.size, signed=True))
        return [self.metric, self.phase or NOTHING, *figures, share]

    def text(self) -> str:
        """As in "reserved of rank 3 in step-2/optimizer: +1.24%, +12.00 MiB"."""
        place = f" in {self.phase}" if self.phase else ""
        _, _, _, _, size, share = self.cells()
        return f"{self.metric} of rank {self.rank}{place}: {share}, {size}"


def peaks(first: Measurement, second: Measurement) -> list[Difference]:
    """Of each rank that both have, the peak of each metric over all phases, and device-used where one measured it."""
    return list(_of_ranks(first, second, _rank_peaks))


def phases(first: Measurement, second: Measurement) -> list[Difference]:
    """The same of each phase that both went through."""
    return list(_of_ranks(first, second, _rank_phases))


def _of_ranks(
    first: Measurement,
    second: Measurement,
    differences: Callable[[RankMeasurement, RankMeasurement], Iterator[Difference]],
) -> Iterator[Difference]:
    others = _by_number(second)
    for number, rank in _by_number(first).items():
        if number in others:
            yield from differences(rank, others[number])


def _by_number(measurement: Measurement) -> dict[int, RankMeasurement]:
    """Ranks with figures. Those of a run that failed were cut short."""
    return {rank.rank: rank for rank in measured_ranks(measurement)} if ran(measurement) else {}


def _rank_peaks(first: RankMeasurement, second: RankMeasurement) -> Iterator[Difference]:
    for metric in GATED_METRICS:
        if not (_has(first, metric) and _has(second, metric)):
            continue
        one, other = first.peak_phase(metric), second.peak_phase(metric)
        places = dict.fromkeys((one.name, other.name))
        yield Difference(first.rank, metric, ", ".join(places), one.peak[metric], other.peak[metric])
    if first.device_used is not None or second.device_used is not None:
        one_used, other_used = device_used(first), device_used(second)
        if one_used is not None and other_used is not None:
            yield Difference(first.rank, DEVICE_USED, "", one_used, other_used)


def _rank_phases(first: RankMeasurement, second: RankMeasurement) -> Iterator[Difference]:
    others = {(figures.step, figures.phase): figures for figures in second.phases}
    for figures in first.phases:
        other = others.get((figures.step, figures.phase))
        for metric in GATED_METRICS if other is not None else ():
            assert other is not None
            if metric in figures.peak and metric in other.peak:
                name = _phase_name(figures)
                yield Difference(first.rank, metric, name, figures.peak[metric], other.peak[metric])


def _phase_name(figures: PhaseFigures) -> str:
    """The number of a step that has no name of its own stands behind it."""
    return figures.name + (f" of step {figures.step}" if figures.step > 2 else "")


def device_used(rank: RankMeasurement) -> int | None:
    """As measured; of a virtual GPU the peak of reserved bytes and what is estimated outside PyTorch."""
    if rank.device_used is not None:
        return rank.device_used
    estimated = rank.outside and _has(rank, "reserved")
    return rank.peak("reserved") + sum(rank.outside.values()) if estimated else None


def _has(rank: RankMeasurement, metric: Metric) -> bool:
    return all(metric in figures.peak for figures in rank.phases)


def ran(measurement: Measurement) -> bool:
    """Whether its figures are of a whole run."""
    return measurement.failure is None or measurement.failure.kind == "no effect"


def only_one_has(first: Measurement, second: Measurement, names: tuple[str, str]) -> Iterator[str]:
    """The ranks and phases that cannot be compared, as sentences."""
    if not (ran(first) and ran(second)):
        return
    sides = (_by_number(first), _by_number(second))
    for name, own, other in zip(names, sides, reversed(sides), strict=True):
        if missing := sorted(own.keys() - other.keys()):
            plural = "s" if len(missing) > 1 else ""
            yield f"only {name} has rank{plural} {', '.join(map(str, missing))}"
    places: dict[str, dict[str, None]] = {name: {} for name in names}
    for number in sides[0].keys() & sides[1].keys():
        keys = [{(f.step, f.phase): f for f in side[number].phases} for side in sides]
        for name, own_phases, other_phases in zip(names, keys, reversed(keys), strict=True):
            places[name] |= {_phase_name(f): None for key, f in own_phases.items() if key not in other_phases}
    for name, found in places.items():
        if found:
            yield f"only {name} has {', '.join(found)}"


# A real GPU and its virtual twin --------------------------------------------------------------------------------------


def twin_cells(measurement: Measurement) -> list[list[str]]:
    """Head and a row for each rank and metric; empty where there are no figures of both."""
    found = peaks(measurement, measurement.twin) if measurement.twin is not None else []
    return [list(_HEAD), *([str(d.rank), *d.cells()] for d in found)] if found else []


def twin_notes(measurement: Measurement) -> list[str]:
    """The worst differences, and what could not be compared and why."""
    twin = measurement.twin
    if twin is None:
        return []
    notes = list(_failures(measurement, twin))
    if found := peaks(measurement, twin):
        notes.append(worst_of_all(found))
        if (worst := max(phases(measurement, twin), key=_weight, default=None)) is not None:
            notes.append(f"worst difference of a phase: {worst.text()}")
        if any(d.metric == DEVICE_USED for d in found):
            notes.append(_ESTIMATE)
    return [*notes, *only_one_has(measurement, twin, ("the real GPU", "the virtual GPU"))]


def twin_lines(measurement: Measurement) -> list[str]:
    """The table and the notes, for a terminal; empty without a twin."""
    if measurement.twin is None:
        return []
    cells = twin_cells(measurement)
    lines = table(cells, right=NUMBERS) if cells else []
    return [f"{TITLE} ({measurement.twin.device.key}):", *lines, *twin_notes(measurement)]


def session_lines(results: Results) -> list[str]:
    """Of all tests with a twin: the rank that is worst by each metric, what failed, and the worst of all."""
    rows: list[list[str]] = []
    worst: dict[str, Difference] = {}
    notes: list[str] = []
    for test in results.tests.values():
        for measured in test.measured:
            measurement = measured.measurement
            if measurement.twin is None:
                continue
            label = label_of(test.id, measured)
            by_metric = _worst_by_metric(peaks(measurement, measurement.twin))
            rows += [[label, str(d.rank), *d.cells()] for d in by_metric]
            worst |= {f"{label}, {d.metric}": d for d in by_metric}
            notes += [f"{label}: {note}" for note in _failures(measurement, measurement.twin)]
    lines = table([["test", *_HEAD], *rows], right=NUMBERS) if rows else []
    if worst:
        label, difference = max(worst.items(), key=lambda pair: pair[1].weight)
        lines.append(f"{label.rpartition(', ')[0]}: {worst_of_all([difference])}")
        lines += [_ESTIMATE] if any(d.metric == DEVICE_USED for d in worst.values()) else []
    return [f"{TITLE}:", *lines, *notes] if lines or notes else []


def worst_of_all(differences: Sequence[Difference]) -> str:
    """A sentence."""
    return f"worst difference of a peak: {max(differences, key=_weight).text()}"


def _weight(difference: Difference) -> tuple[float, int]:
    return difference.weight


def _worst_by_metric(differences: Iterable[Difference]) -> list[Difference]:
    found: dict[str, Difference] = {}
    for difference in differences:
        before = found.get(difference.metric)
        if before is None or difference.weight > before.weight:
            found[difference.metric] = difference
    return list(found.values())


def _failures(real: Measurement, virtual: Measurement) -> Iterator[str]:
    ended: Mapping[str, Measurement] = {"the real GPU": real, "the virtual GPU": virtual}
    failed = {name: m.failure for name, m in ended.items() if m.failure is not None}
    for name, failure in failed.items():
        yield f"{name} failed: {how(failure)}: {said(failure)}"
    for name, measurement in ended.items():
        if failed and name not in failed:
            worst = worst_of(measurement)
            peak = f", with a peak of {format_bytes(worst.peak())} allocated" if worst is not None else ""
            yield f"{name} ran through{peak}"
