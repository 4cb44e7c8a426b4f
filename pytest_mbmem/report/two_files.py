"""What `mbmem compare` prints: the measurements of two files side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..compare import how
from ..errors import UserError
from ..gates import environment_changes, recipe_changes
from ..measurement import Device, Measurement
from ..texts import printable
from .rows import measured_ranks
from .run_figures import File
from .text import table
from .twins import DEVICE_USED, Difference, only_one_has, peaks, phases, ran

_NUMBERS = ("rank", "A", "B", "difference", "%")
_SIDES = ("A", "B")


def compare_lines(first: File, second: File, *, every_phase: bool = False) -> list[str]:
    """A table of the peaks of each rank, or of every phase, and below it what else differs.

    Raises `UserError` if nothing is in both files.
    """
    pairs = _pairs(first, second)
    lines = [f"A: {_described(first)}", f"B: {_described(second)}", ""]
    cells = [["measurement", "rank", "metric", "phase", "A", "B", "difference", "%"]]
    for label, (one, other) in pairs.items():
        cells += [[label, str(d.rank), *d.cells()] for d in _differences(one, other, every_phase=every_phase)]
    if len(cells) > 1:
        lines += table(cells, right=_NUMBERS)
    return [printable(line) for line in (*lines, *_notes(first, second, pairs, _SIDES))]


def notes(first: File, second: File, sides: tuple[str, str]) -> list[str]:
    """What differs beside the figures, by what the two are called; nothing of JUnit files, which do not know it.

    Raises `UserError` if nothing is in both files.
    """
    if first.is_junit or second.is_junit:
        return []
    return list(_notes(first, second, _pairs(first, second), sides))


def _pairs(first: File, second: File) -> dict[str, tuple[Measurement, Measurement]]:
    """Those of equal names; a single measurement is compared with that of a test with the same recipe or the only one.

    Two single ones are compared whatever they are of.
    """
    mine, theirs = first.measurements, second.measurements
    for file in (first, second):
        if not file.measurements:
            raise UserError(f"{file.path}: no test measured anything, so there is nothing to compare")
    if first.is_single and second.is_single:
        ((label, one),) = mine.items()
        ((other_label, other),) = theirs.items()
        return {label if label == other_label else f"{label} / {other_label}": (one, other)}
    if first.is_single or second.is_single:
        digest = next(iter((first if first.is_single else second).measurements.values())).recipe_digest
        found = {
            other_label if first.is_single else label: (one, other)
            for label, one in mine.items()
            for other_label, other in theirs.items()
            if one.recipe_digest == other.recipe_digest or len(mine) == len(theirs) == 1
        }
        if not found:
            raise UserError(f"{first.path} and {second.path} have nothing in common: no test measured recipe {digest}")
        return found
    found = {label: (one, theirs[label]) for label, one in mine.items() if label in theirs}
    if not found:
        raise UserError(
            f"{first.path} and {second.path} have nothing in common: no test measured something in both; "
            f"A has {_some(list(mine))}, B has {_some(list(theirs))}"
        )
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _described(file: File) -> str:
    kinds = dict.fromkeys(_kind(m) for m in file.measurements.values())
    return f"{file.path}: {'; '.join(kinds)}"


def _kind(measurement: Measurement) -> str:
    device: Device = measurement.device
    kind = "the host" if measurement.steps else "virtual" if device.virtual else "real"
    return f"{device.key}, {device.name} ({kind})"


def _differences(one: Measurement, other: Measurement, *, every_phase: bool) -> list[Difference]:
    found = peaks(one, other)
    if not every_phase:
        return found
    by_phase = phases(one, other)
    return sorted(
        [*by_phase, *(d for d in found if d.metric == DEVICE_USED)],
        key=lambda d: d.rank,  # stable: phases stay in the order of the run
    )


def _notes(
    first: File, second: File, pairs: Mapping[str, tuple[Measurement, Measurement]], sides: tuple[str, str]
) -> Iterator[str]:
    """Equal ones of several measurements come once."""
    labels: dict[str, list[str]] = {}
    for label, (one, other) in pairs.items():
        for note in _pair_notes(one, other, sides):
            labels.setdefault(note, []).append(label)
    for note, (label, *more) in labels.items():
        yield f"{label}{f' and {len(more)} more' if more else ''}: {note}"
    if first.is_single or second.is_single:
        return
    for name, own, others in zip(sides, (first, second), (second, first), strict=True):
        missing = [label for label in own.measurements if label not in others.measurements]
        if missing:
            yield f"only {name} has {', '.join(missing)}"


def _pair_notes(one: Measurement, other: Measurement, sides: tuple[str, str]) -> Iterator[str]:
    for name, measurement in zip(sides, (one, other), strict=True):
        if measurement.failure is not None:
            what = "" if ran(measurement) else ", so there is nothing to compare"
            yield f"{name} failed: {how(measurement.failure)}{what}"
        elif measurement.steps:
            yield f"{name} ran on the host, where memory is not measured"
        elif not measured_ranks(measurement):
            yield f"{name} has no measured rank"
    yield from only_one_has(one, other, sides)
    yield from _recipe_notes(one, other, sides)
    if one.mode != other.mode:
        yield f"{sides[0]} has {one.mode} ranks, {sides[1]} {other.mode} ones"
    if differing := environment_changes(one.environment, other.environment):
        yield f"the environment differs: {', '.join(differing)}"
    if any(d.metric == DEVICE_USED for d in peaks(one, other)):
        for name, measurement in zip(sides, (one, other), strict=True):
            if all(rank.device_used is None for rank in measurement.ranks):
                yield f"{DEVICE_USED} of {name}: peak reserved, and the estimate of what is beside PyTorch"


def _recipe_notes(one: Measurement, other: Measurement, sides: tuple[str, str]) -> Iterator[str]:
    if one.recipe_digest == other.recipe_digest:
        return
    if one.recipe is None or other.recipe is None:
        yield f"only {sides[other.recipe is not None]} has a recipe"
    elif changes := recipe_changes(one.recipe, other.recipe):
        yield f"the recipe differs: {'; '.join(changes)}"
    else:
        yield "the recipe is written alike, but means something else: a default of it differs"
