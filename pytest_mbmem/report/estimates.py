"""The closed-form estimate as text, beside what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..estimate import NOT_IN_IT, Estimate, estimate
from ..measurement import CATEGORIES, Category, Measurement, Owner, RankMeasurement
from ..recipe import Recipe
from ..texts import printable
from ..units import format_bytes, format_fraction
from .rows import coordinates_of, measured_ranks, worst_of
from .text import table

KINDS = ("parameters", "gradients", "optimizer state", "activations")
"""What both an estimate and a measurement tell apart."""

OTHER = "not in the estimate"

_KIND_OF: Mapping[Category, str] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "main gradients": "gradients",
    "optimizer state": "optimizer state",
    **dict.fromkeys(("activations", "logits", "temporaries", "communication buffers"), "activations"),
}
"""Of a measured category; the others are not in the estimate."""

_GLOBAL_BUFFER = "(get_tensor)"
"""How the line of a workspace ends that the estimate has: of Megatron's global memory buffer."""

_WIDTH = 118


@dataclass(frozen=True)
class Side:
    """A measurement beside the estimate."""

    name: str  # "virtual", "real"
    rank: RankMeasurement
    worst: int  # the number of the rank that has most
    more: int  # bytes that it has more
    kinds: Mapping[str, int] | None  # bytes by kind at its peak, and `OTHER`; None: the allocator did not tell

    @property
    def peak(self) -> int:
        """Bytes allocated at the highest."""
        return self.rank.peak()

    @classmethod
    def of(cls, name: str, measurement: Measurement, found: Estimate) -> Side | None:
        """The rank that the estimate is of, or the one most like it; None where none was measured to its end."""
        worst = worst_of(measurement)
        if worst is None or measurement.failure is not None:
            return None
        ranks = {rank.rank: rank for rank in measured_ranks(measurement)}
        alike = [r for r in ranks.values() if r.coordinates.get("pp") == found.coordinates["pp"]]
        rank = ranks.get(found.rank) or max(alike, key=RankMeasurement.peak, default=worst)
        return cls(name, rank, worst.rank, worst.peak() - rank.peak(), _kinds(rank))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"rank": self.rank.rank, "worst_rank": self.worst, "peak": self.peak, "by_kind": self.kinds}


def _kinds(rank: RankMeasurement) -> dict[str, int] | None:
    owners = rank.owners()
    if not owners:
        return None
    found = dict.fromkeys((*KINDS, OTHER), 0)
    for owner, size in owners.items():
        found[_kind(owner)] += size
    return found


def _kind(owner: Owner) -> str:
    assert owner.category in CATEGORIES
    if owner.category == "workspaces" and owner.line.endswith(_GLOBAL_BUFFER):
        return "activations"
    return _KIND_OF.get(owner.category, OTHER)


@dataclass(frozen=True)
class Room:
    """A GPU, and what of it is not PyTorch's."""

    gpu: str
    capacity: int
    outside: Mapping[str, int]

    @property
    def size(self) -> int:
        """Bytes for PyTorch; may be negative."""
        return self.capacity - sum(self.outside.values())


def estimate_lines(found: Estimate, room: Room, sides: Sequence[Side] = ()) -> list[str]:
    """The components, the estimate beside measurements, what is not in it, and whether it exceeds the GPU."""
    return [printable(line) for line in _lines(found, room, sides)]


def _lines(found: Estimate, room: Room, sides: Sequence[Side]) -> Iterator[str]:
    coordinates = ", ".join(f"{name} {number}" for name, number in found.coordinates.items())
    stages = f", the stage with most of {len(found.totals)}" if len(found.totals) > 1 else ""
    yield f"most loaded: rank {found.rank} ({coordinates}){stages}"
    yield ""
    yield from _component_table(found)
    yield ""
    for part in found.components:
        yield from textwrap.wrap(f"{part.name}: {part.formula}", _WIDTH, subsequent_indent="    ")
    if sides:
        yield ""
        yield from _side_table(found, sides)
        yield from _ranks(found, sides)
    yield ""
    yield from (f"note: {note}" for note in found.notes)
    yield from textwrap.wrap(f"not in it: {', '.join(NOT_IN_IT)}", _WIDTH, subsequent_indent="    ")
    yield _verdict(found, room)


def _component_table(found: Estimate) -> list[str]:
    cells = [["component", "of", "bytes", "share"]]
    for category, size in found.by_category.items():
        for part in found.components:
            if part.category == category:
                cells.append([part.name, category, format_bytes(part.size), _share(part.size, found.total)])
        if size:
            cells.append([f"all {category}", "", format_bytes(size), _share(size, found.total)])
    cells.append(["estimate", "", format_bytes(found.total), ""])
    return table(cells, right={"bytes", "share"})


def _share(size: int, whole: int) -> str:
    return format_fraction(size / whole)


def _side_table(found: Estimate, sides: Sequence[Side]) -> list[str]:
    names = [name for side in sides for name in (side.name, f"{side.name}: estimate's difference")]
    cells = [["peak allocated", "estimate", *names]]
    estimated = {kind: found.by_kind.get(kind, 0) for kind in KINDS}
    rows = {**estimated, OTHER: 0, "all": found.total} if any(s.kinds for s in sides) else {"all": found.total}
    for kind, size in rows.items():
        row = [kind, format_bytes(size) if kind != OTHER else "-"]
        for side in sides:
            measured = side.peak if kind == "all" else (side.kinds or {}).get(kind)
            row += ["-", "-"] if measured is None else [format_bytes(measured), _difference(size, measured)]
        cells.append(row)
    return table(cells, right={"estimate", *names})


def _difference(size: int, measured: int) -> str:
    share = f" ({format_fraction(size / measured - 1, signed=True)})" if measured else ""
    return f"{format_bytes(size - measured, signed=True)}{share}"


def _ranks(found: Estimate, sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        if side.rank.rank != found.rank:
            yield f"{side.name}: rank {side.rank.rank} ({coordinates_of(side.rank)}) is shown"
        if side.more:
            yield f"{side.name}: rank {side.worst} has most there, {format_bytes(side.more)} more than this one"


def _verdict(found: Estimate, room: Room) -> str:
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in room.outside.items())
    of = f"the {format_bytes(room.size)} that {room.gpu} has for PyTorch ({format_bytes(room.capacity)} less {held})"
    left = format_bytes(abs(room.size - found.total))
    if found.exceeds(room.size):
        return f"EXCEEDS {of} by {left}; the largest component is {found.largest.name}"
    return f"fits into {of}, with {left} left"


def measurement_line(measurement: Measurement) -> str:
    """The estimate beside the peak of a measured recipe, on one line; empty for a test without a recipe."""
    if measurement.recipe is None:
        return ""
    try:
        found = estimate(Recipe.from_dict(measurement.recipe, "recipe"))
    except UserError as error:  # measured by another version, which took it
        return f"estimate: none: {str(error).splitlines()[0]}"
    side = Side.of("", measurement, found)
    beside = ""
    if side is not None and side.peak:
        share = found.total / side.peak - 1
        whose = "that rank's" if side.rank.rank == found.rank else f"rank {side.rank.rank}'s"
        beside = f", {format_fraction(abs(share))} {'below' if share < 0 else 'above'} {whose} peak"
        if side.kinds is not None:
            beside += f", of which {format_bytes(side.kinds[OTHER])} are not in it: workspaces and rounding"
    return f"estimate: {format_bytes(found.total)} allocated on rank {found.rank} (closed form{beside})"
