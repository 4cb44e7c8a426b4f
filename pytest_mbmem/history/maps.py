"""The caching allocator's segments and what lay in them at the highest allocated level, in few enough pieces to draw.

Blocks are as large as PyTorch makes them without roundup_power2_divisions and max_split_size_mb: multiples of 512
bytes, and in a large segment that is not expandable with up to 1 MiB of what the free piece had too much. What waits
for another stream counts as free. With these, the pieces add up to what torch.cuda.memory_reserved and
memory_allocated said at that moment.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..measurement import CATEGORIES, SegmentMap
from .owners import Block, History
from .segments import UNSPLIT, ranges

MOST_PIECES = 600
"""Of all segments of a rank: a report of some hundred tests stays small."""

_LEAST = 2**19  # bytes of a piece that is shown as it is
_SHARE = 200  # so is one of this part of its segment
_FREE = -1

_Piece = tuple[int, int]  # bytes, and an index into `CATEGORIES` or _FREE
_Taken = tuple[int, int, int]  # address, bytes, and an index into `CATEGORIES`


def segments_at_peak(history: History) -> tuple[SegmentMap, ...]:
    """In the order of addresses, with at most some `MOST_PIECES` blocks in all; expandable segments are one each.

    Neighbours of one category are one piece. Pieces below 512 KiB or 1/200 of their segment are gathered: of a row of
    them each category becomes one piece, so that they may have changed places within their row, and all sums stay. If
    that is still too many, this limit is doubled until it is not. Where the segments themselves are too many, the
    smallest of each pool are gathered as one.
    """
    exact = list(_exact(history))
    smallest = _LEAST
    maps = [_gathered(segment, smallest) for segment in exact]
    while _number(maps) > MOST_PIECES and smallest < max(segment.size for segment in exact):
        smallest *= 2
        maps = [_gathered(segment, smallest) for segment in exact]
    return tuple(maps if _number(maps) <= MOST_PIECES else _joined(maps))


def _exact(history: History) -> Iterator[SegmentMap]:
    """With every block."""
    peak = history.peak_event
    owners = history.owners
    category = {number: CATEGORIES.index(owner.category) for number, owner in enumerate(owners)}
    alive = [block for block in history.blocks if block.made <= peak < block.freed and block.parts]
    alive.sort(key=lambda block: block.address)
    starts = [block.address for block in alive]
    events = [event for index, event in history.segment_events if index <= peak]
    found = sorted(ranges(events))
    own = _own(history.blocks, alive, [(r.begin, r.end) for r in found if not (r.small or r.expandable)])
    for begin, end, small, _, _ in found:
        inside = alive[bisect_left(starts, begin) : bisect_left(starts, end)]
        taken = [(b.address, b.rounded + own.get(b.made, 0), category[b.parts[0][0]]) for b in inside]
        yield SegmentMap(end - begin, small, tuple(_joined_neighbours(_pieces(begin, end, taken))))


def _own(blocks: Sequence[Block], alive: Sequence[Block], segments: Sequence[tuple[int, int]]) -> dict[int, int]:
    """By when they were made, of those alive: bytes that they have beyond what was asked for, as they were not split.

    A free piece is split if more than 1 MiB is left over. It reached to the next block of that time, which may be gone.
    """
    begins = [begin for begin, _ in segments]
    ends: list[tuple[int, int, int]] = []  # of blocks: address after one, of what comes then, and when it was made
    for block, following in itertools.zip_longest(alive, alive[1:]):
        address = block.address
        segment = bisect_right(begins, address) - 1
        if segment >= 0 and address < (limit := segments[segment][1]):
            limit = min(limit, following.address) if following is not None else limit
            ends.append((address + block.rounded, limit, block.made))
    own = {made: limit - after for after, limit, made in ends if limit - after <= UNSPLIT}
    addresses = sorted({block.address for block in blocks})
    beside: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # address -> ends that are little below
    for after, limit, made in ends:
        if limit - after > UNSPLIT:
            for address in addresses[bisect_left(addresses, after) : bisect_right(addresses, after + UNSPLIT)]:
                beside[address].append((after, made))
    for block in [block for block in blocks if block.address in beside]:
        for after, made in beside[block.address]:
            if block.made < made < block.freed:
                own[made] = min(own.get(made, UNSPLIT), block.address - after)
    return own


def _pieces(begin: int, end: int, blocks: Iterable[_Taken]) -> Iterator[_Piece]:
    at = begin
    for address, size, category in blocks:
        if address > at:
            yield address - at, _FREE
        yield size, category
        at = address + size
    if end > at:
        yield end - at, _FREE


def _joined_neighbours(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    total, last = 0, _FREE
    for size, kind in pieces:
        if kind != last and total:
            yield total, last
            total = 0
        total, last = total + size, kind
    if total:
        yield total, last


def _gathered(segment: SegmentMap, smallest: int) -> SegmentMap:
    """With rows of small pieces gathered."""
    limit = max(smallest, segment.size // _SHARE * (smallest // _LEAST))
    pieces: list[_Piece] = []
    for is_small, row in itertools.groupby(segment.blocks, key=lambda piece: piece[0] < limit):
        if is_small:
            sums = Counter[int]()
            for size, kind in row:
                sums[kind] += size
            before = pieces[-1][1] if pieces else None
            pieces += sorted(((size, kind) for kind, size in sums.items()), key=lambda piece: piece[1] != before)
        else:
            pieces += row
    return SegmentMap(segment.size, segment.small, tuple(_joined_neighbours(pieces)))


def _number(maps: Iterable[SegmentMap]) -> int:
    return sum(len(segment.blocks) for segment in maps)


def _joined(maps: Sequence[SegmentMap]) -> list[SegmentMap]:
    """The largest ones, and the others of each pool as one."""
    left = MOST_PIECES - 2 * (len(CATEGORIES) + 1)
    kept: set[int] = set()
    for index in sorted(range(len(maps)), key=lambda index: -maps[index].size):
        left -= len(maps[index].blocks)
        if left < 0:
            break
        kept.add(index)
    result = [segment for index, segment in enumerate(maps) if index in kept]
    for small in (False, True):
        others = [segment for index, segment in enumerate(maps) if index not in kept and segment.small == small]
        if others:
            size = sum(segment.size for segment in others)
            blocks = tuple(itertools.chain.from_iterable(segment.blocks for segment in others))
            result.append(_gathered(SegmentMap(size, small, blocks), _LEAST + size))
    return result
