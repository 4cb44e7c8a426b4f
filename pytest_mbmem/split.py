"""What a peak is made of, in a form short enough for a baseline file, and what grew from one peak to another.

Sums are exact: the sizes of a split add up to the peak, and the changes between two splits to the peaks' difference. So
what nobody can be named for is there as well, as the part "other" of its category.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .measurement import CATEGORIES, Metric, RankMeasurement
from .texts import encodable
from .units import format_bytes

UNALLOCATED = "reserved, not allocated"
"""The category of a split of reserved bytes for what PyTorch's allocator holds beyond live bytes."""

SPLIT_CATEGORIES: tuple[str, ...] = (*CATEGORIES, UNALLOCATED)

_SMALLEST = 200
"""Kept by name is what has at least one part in 200 of the peak: half a percent, a gate's tolerance."""

_MOST_LINES, _FIRST_LINES = 6, 3
"""Of changes, or of parts, that a text names, and those of them that are to name half of it or more."""

_LEAST = 100
"""A change of less than one part in 100 of the largest is not named in a text."""

_OF_MODULES = ("parameters", "gradients", "main gradients")
"""Their place is always that of a buffer or an __init__, and says nothing that the module does not."""

_WITHOUT_NAMES = ("rounding", "unattributed", UNALLOCATED)

_TIMES = "\u00d7"

_LINE_NUMBER = re.compile(r":[0-9]+(?= \(|$)")


@dataclass(frozen=True)
class Part:
    """A part of a peak. The same part of another run has the same category, module and place.

    With neither module nor place it is what remains of its category, "other": too small to be named, or without a name.
    """

    category: str  # one of SPLIT_CATEGORIES
    size: int  # bytes
    module: str = ""  # with each number written as *
    place: str = ""  # that allocated: "tensor_parallel/layers.py (forward)", without the number, which edits move
    modules: int = 1  # that are folded into the name
    line: str = ""  # the whole of that, with the number; empty in a baseline

    @property
    def is_other(self) -> bool:
        """Whether it is what remains of its category."""
        return not self.module and not self.place

    @property
    def identity(self) -> tuple[str, str, str]:
        """What it has in common with the same part of another run."""
        return self.category, self.module, self.place


Split = tuple[Part, ...]
"""A peak's parts, sorted by category and name; identities differ."""


def split_of(rank: RankMeasurement, metric: Metric = "allocated", phase: str | None = None) -> Split | None:
    """The parts of the peak that `rank.peak(metric, phase)` is; None where the allocator did not tell.

    Of reserved bytes: the parts of the phase's allocated peak, and what is reserved beyond it.
    """
    composition = rank.composition
    if composition is None:
        return None
    figures = rank.peak_phase(metric, phase)
    index = next(index for index, other in enumerate(rank.phases) if other is figures)
    parts = []
    for owner, size in composition.at(index).items():
        module, line = _text(owner.module), _text(owner.line)
        place = "" if module and owner.category in _OF_MODULES else _place(line)
        parts.append(Part(owner.category, size, module, place, owner.modules, line))
    parts.append(Part("unattributed", figures.peak["allocated"] - sum(part.size for part in parts)))
    parts.append(Part(UNALLOCATED, figures.peak[metric] - figures.peak["allocated"]))
    split = _joined(parts)
    return split if all(part.size > 0 for part in split) else None  # of more than there is, nothing can be believed


def compact(split: Split) -> Split:
    """The same with small parts added up by category, and without lines: what a baseline keeps."""
    least = _least(split)
    return _joined(replace(part, line="") if part.size >= least else Part(part.category, part.size) for part in split)


def in_order(parts: Iterable[Part]) -> Split:
    """Sorted as a split is."""
    return tuple(sorted(parts, key=lambda part: (SPLIT_CATEGORIES.index(part.category), *part.identity)))


def total(split: Iterable[Part]) -> int:
    """Bytes of all parts."""
    return sum(part.size for part in split)


def by_category(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Bytes of each category that has any, the most first."""
    found: dict[str, int] = {}
    for category, size in sizes:
        found[category] = found.get(category, 0) + size
    return {category: size for category, size in sorted(found.items(), key=lambda pair: -abs(pair[1])) if size}


def _joined(parts: Iterable[Part]) -> Split:
    """One part for each identity; its line is the largest one's."""
    found: dict[tuple[str, str, str], Part] = {}
    for part in sorted(parts, key=lambda part: -part.size):
        first = found.get(part.identity)
        if first is not None:
            part = replace(first, size=first.size + part.size, modules=max(first.modules, part.modules))
        found[part.identity] = part if not part.is_other else Part(part.category, part.size)
    return in_order(part for part in found.values() if part.size)


def _least(split: Split) -> int:
    return total(split) // _SMALLEST


def _place(line: str) -> str:
    """File and function of a line; of the file its folder and name, which are short and stay when packages move."""
    return "/".join(_LINE_NUMBER.sub("", line).split("/")[-2:]).strip()


def _text(name: str) -> str:
    """As a file can hold it, where "@" and spaces around it separate names."""
    return encodable(name).replace("@", "_").strip()


# What grew ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A part before and now; None where it is not there, or not named."""

    was: Part | None
    now: Part | None

    @property
    def size(self) -> int:
        """Bytes more, negative if less."""
        return (self.now.size if self.now else 0) - (self.was.size if self.was else 0)

    @property
    def part(self) -> Part:
        """The part as it is now, or as it was."""
        part = self.now or self.was
        assert part is not None
        return part


@dataclass(frozen=True)
class PeakGrowth:
    """What one peak has more and less than another."""

    changes: tuple[Change, ...]  # that are not 0 bytes, the most grown first; they add up to the peaks' difference
    places: str = ""  # which peaks, where they are of different ranks or phases: "rank 3 now, rank 0 then"

    @property
    def total(self) -> int:
        """The difference of the peaks in bytes."""
        return sum(change.size for change in self.changes)

    def categories(self) -> dict[str, int]:
        """The net change of each category in bytes, the largest first."""
        return by_category((change.part.category, change.size) for change in self.changes)

    def lines(self, title: str = "what grew") -> list[str]:
        """The changes worth naming, grown ones first, then the rest in a sum, then the net by category."""
        places = f"; {self.places}" if self.places else ""
        first = f"{title} ({format_bytes(self.total, signed=True)}{places}):"
        if not self.changes:
            return [first, "  nothing"]
        lines = _named_lines(self.named(), self.total, signed=True)
        return [first, *lines, f"  by category: {categories_text(self.categories(), signed=True)}"]

    def text(self) -> str:
        """The largest of these on one line, as in "+384.00 MiB activations decoder.layers.*.mlp"; empty without any."""
        sized = sorted(self.named() if self.changes else (), key=lambda cell: -abs(cell[0]))
        cells = [(format_bytes(size, True), part.category, _module(part)) for size, part, _ in sized[:_FIRST_LINES]]
        return "; ".join(" ".join(filter(None, cell)) for cell in cells)

    def named(self) -> list[_Cell]:
        """What reports name, the most grown first: the largest changes, folded until the first few name half of all."""
        cells = self._folded()
        sized = sorted(cells, key=lambda cell: -abs(cell[0]))
        leading = [cell for cell in sized if (cell[0] > 0) == (self.total >= 0)][:_FIRST_LINES]
        others = [cell for cell in sized if cell not in leading][: _MOST_LINES - len(leading)]
        return [cell for cell in cells if cell in (*leading, *others) and abs(cell[0]) * _LEAST >= abs(sized[0][0])]

    def _folded(self) -> list[_Cell]:
        """The changes as they are, if the first few of them make half of the growth; else those of one module in one,
        or of the modules that it belongs to."""
        cells = [(change.size, change.part, _remark(change)) for change in self.changes]
        deepest = max((change.part.module.count(".") + 1 for change in self.changes), default=0)
        found = cells
        for depth in range(deepest, 0, -1):
            if self._tells_most(found):
                return found
            found = _fold(cells, depth)
        return found if self._tells_most(found) else cells

    def _tells_most(self, cells: Sequence[_Cell]) -> bool:
        sizes = sorted((abs(size) for size, _, _ in cells if (size > 0) == (self.total >= 0)), reverse=True)
        return 2 * sum(sizes[:_FIRST_LINES]) >= sum(sizes)


_Cell = tuple[int, Part, str]
"""Of a line: bytes, what they are of, and a remark on it."""


def _fold(cells: Iterable[_Cell], depth: int) -> list[_Cell]:
    """Those of one category and module in one, of whose name `depth` parts count; its line is the largest one's."""
    found: dict[tuple[str, str], list[_Cell]] = {}
    for cell in cells:
        part = cell[1]
        found.setdefault((part.category, ".".join(part.module.split(".")[:depth])), []).append(cell)
    folded = []
    for (_, module), several in found.items():
        size = sum(size for size, _, _ in several)
        _, part, remark = max(several, key=lambda cell: abs(cell[0]))
        if len(several) > 1:
            remark = f" ({len(several)} places, most of it at)"
        if size:
            folded.append((size, replace(part, module=module), remark))
    return sorted(folded, key=lambda cell: -cell[0])


def growth(before: Split, after: Split, places: str = "") -> PeakGrowth:
    """What `after` (not compact) has more and less than `before` (compact or not).

    A part whose module or place was renamed is the same one: the one of the other name that is as large, or that
    belongs to the same module.
    """
    with_other = {part.category for part in before if part.is_other}
    known = {part.identity for part in before}
    least = _least(before)
    after = _joined(
        # Before, it may have been among those too small to be named.
        Part(part.category, part.size)
        if part.category in with_other and part.identity not in known and part.size < least
        else part
        for part in after
    )
    there = {part.identity: part for part in after}
    pairs = [(part, there[part.identity]) for part in before if part.identity in there]
    gone = _largest_first(part for part in before if part.identity not in there and not part.is_other)
    come = _largest_first(part for part in after if part.identity not in known and not part.is_other)
    pairs += _renamed(gone, come, lambda part: (part.category, part.module, part.size))
    pairs += _renamed(gone, come, lambda part: (part.category, part.place, part.size))
    pairs += _renamed(gone, come, lambda part: (part.category, part.module) if part.module else None)
    other = [Change(part, None) for part in before if part.is_other and part.identity not in there]
    other += [Change(None, part) for part in after if part.is_other and part.identity not in known]
    changes = [
        *(Change(was, now) for was, now in pairs),
        *(Change(part, None) for part in gone),
        *(Change(None, part) for part in come),
        *other,
    ]
    return PeakGrowth(
        tuple(sorted((change for change in changes if change.size), key=lambda change: -change.size)), places
    )


def places_text(before: tuple[int, str], after: tuple[int, str]) -> str:
    """Ranks and phases of two peaks where they differ: "rank 3 now, rank 0 then"; empty where they do not."""
    (rank, phase), (now_rank, now_phase) = before, after
    then, now = "", ""
    if rank != now_rank:
        then, now = f"rank {rank}", f"rank {now_rank}"
    if phase != now_phase:
        then, now = f"{then} in {phase}".strip(), f"{now} in {now_phase}".strip()
    return f"{now} now, {then} then" if then else ""


def _largest_first(parts: Iterable[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: -part.size)


def _renamed(gone: list[Part], come: list[Part], alike: Callable[[Part], object]) -> Iterator[tuple[Part, Part]]:
    """Take pairs that are alike out of both lists."""
    for was in list(gone):
        now = next((part for part in come if alike(was) is not None and alike(part) == alike(was)), None)
        if now is not None:
            gone.remove(was)
            come.remove(now)
            yield was, now


# Texts ----------------------------------------------------------------------------------------------------------------


def parts_lines(split: Split, title: str = "the peak is made of") -> list[str]:
    """The largest parts, the rest in a sum, then the categories."""
    sized = _largest_first(split)
    named = [part for part in sized[:_MOST_LINES] if part.size * _LEAST >= sized[0].size]
    lines = _named_lines([(part.size, part, "") for part in named], total(split), signed=False)
    return [f"{title} ({format_bytes(total(split))}):", *lines, f"  by category: {parts_text(split)}"]


def parts_text(split: Split) -> str:
    """The categories of a split in one line."""
    return categories_text(by_category((part.category, part.size) for part in split))


def categories_text(categories: Mapping[str, int], signed: bool = False) -> str:
    """As in "+384.00 MiB activations, -2.00 MiB temporaries"; small ones in a sum."""
    largest = max(map(abs, categories.values()), default=0)
    named = {category: size for category, size in categories.items() if abs(size) * _LEAST >= largest}
    rest = sum(categories.values()) - sum(named.values())
    named |= {"others": rest} if rest else {}
    return ", ".join(f"{format_bytes(size, signed)} {category}" for category, size in named.items())


def _named_lines(cells: Sequence[tuple[int, Part, str]], whole: int, signed: bool) -> list[str]:
    rows = [
        (format_bytes(size, signed), part.category, _module(part) + remark, part.line or part.place)
        for size, part, remark in cells
    ]
    rest = whole - sum(size for size, _, _ in cells)
    if rest:
        rows.append((format_bytes(rest, signed), "everything else", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"    {size:>{widths[0]}}  {category:<{widths[1]}}  {module:<{widths[2]}}  {place}".rstrip()
        for size, category, module, place in rows
    ]


def _module(part: Part) -> str:
    if part.is_other:
        return "" if part.category in _WITHOUT_NAMES else "(small or unnamed)"
    return part.module + (f" {_TIMES} {part.modules}" if part.modules > 1 else "")


def _remark(change: Change) -> str:
    was, now = change.was, change.now
    if was is not None and now is not None and was.modules != now.modules:
        return f" (was {_TIMES} {was.modules})"
    return " (gone)" if now is None and not change.part.is_other else ""
