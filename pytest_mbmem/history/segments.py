"""What the allocator's segments held at a time: how much was free in them, and in how small pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .snapshot import Event, Snapshot

_BLOCK = 512  # bytes that each block is a multiple of
_SMALL_SEGMENT = 2**21  # bytes; larger segments are "large" (kSmallBuffer in CUDACachingAllocator.cpp)
UNSPLIT = 2**20  # bytes that a block of a large segment may have too much, unless the segment is expandable


@dataclass(frozen=True)
class Held:
    """By the segments of one type at a time. Bytes; what waits for a stream is not free."""

    type: str  # "small" or "large", and "in a private pool"
    segments: int
    reserved: int
    free: int
    pieces: int  # that the free bytes are in
    largest_piece: int

    @property
    def allocated(self) -> int:
        """Bytes of blocks."""
        return self.reserved - self.free


class Levels(NamedTuple):
    """Of reserved bytes in a history."""

    peak: int
    event: int  # after which the peak is reached for the first time; -1 where nothing was ever reserved
    allocations: int  # calls for more memory of the device


def reserved_levels(events: Iterable[Event]) -> Levels:
    """The highest level, and how much was asked for on the way."""
    reserved = peak = allocations = 0
    at = -1
    for index, event in enumerate(events):
        if event["action"] in ("segment_alloc", "segment_map"):
            reserved += event["size"]
            allocations += 1
            if reserved > peak:
                peak, at = reserved, index
        elif event["action"] in ("segment_free", "segment_unmap"):
            reserved -= event["size"]
    return Levels(peak, at, allocations)


def held_at_end(snapshot: Snapshot) -> list[Held]:
    """From the segments of the snapshot."""
    return _sums(
        (
            _type("small" if segment.get("segment_type") == "small" else "large", segment.get("segment_pool_id")),
            segment["total_size"],
            [block["size"] for block in segment["blocks"] if block["state"] == "inactive"],
        )
        for segment in snapshot.segments
    )


def held_at(events: Sequence[Event], last: int) -> list[Held]:
    """After the event with index `last`, from the events.

    Blocks are taken as large as PyTorch makes them without roundup_power2_divisions and max_split_size_mb.
    """
    blocks = sorted(_blocks(events[: last + 1]).items())
    starts = [address for address, _ in blocks]

    def inside(begin: int, end: int) -> Sequence[tuple[int, int]]:
        return blocks[bisect_right(starts, begin - 1) : bisect_right(starts, end - 1)]

    return _sums(
        (
            _type("small" if small else "large", pool),
            end - begin,
            list(_gaps(begin, end, inside(begin, end), 0 if small or expandable else UNSPLIT)),
        )
        for begin, end, small, expandable, pool in ranges(events[: last + 1])
    )


class Range(NamedTuple):
    """Of addresses, all with memory behind them."""

    begin: int
    end: int
    small: bool
    expandable: bool
    pool: object


def ranges(events: Sequence[Event]) -> Iterator[Range]:
    """That the events leave mapped: a segment each, and of expandable ones what adjoins."""
    segments: dict[int, Event] = {}
    changes: defaultdict[int, int] = defaultdict(int)  # address -> mappings that begin there, less those that end there
    mapped: dict[int, Event] = {}
    for event in events:
        action, address = event["action"], event.get("addr", 0)
        if action == "segment_alloc":
            segments[address] = event
        elif action == "segment_free":
            segments.pop(address, None)
        elif action in ("segment_map", "segment_unmap"):
            sign = 1 if action == "segment_map" else -1
            changes[address] += sign
            changes[address + event["size"]] -= sign
            if sign > 0:
                mapped[address] = event
    for address, event in segments.items():
        small = event["size"] <= _SMALL_SEGMENT
        yield Range(address, address + event["size"], small, False, event.get("pool_id"))
    origins = sorted(mapped)
    depth = begin = 0
    for address in sorted(address for address, change in changes.items() if change):
        if depth <= 0 < depth + changes[address]:
            begin = address
        elif depth + changes[address] <= 0 < depth:
            event = mapped[origins[bisect_right(origins, begin) - 1]]
            yield Range(begin, address, event["size"] <= _SMALL_SEGMENT, True, event.get("pool_id"))
        depth += changes[address]


def _blocks(events: Iterable[Event]) -> dict[int, int]:
    """Address -> bytes of what is not free."""
    blocks: dict[int, int] = {}
    for event in events:
        if event["action"] == "alloc":
            blocks[event["addr"]] = -(-event["size"] // _BLOCK) * _BLOCK
        elif event["action"] == "free_completed":
            blocks.pop(event["addr"], None)
    return blocks


def _gaps(begin: int, end: int, blocks: Iterable[tuple[int, int]], unsplit: int) -> Iterator[int]:
    """Bytes of the free pieces between blocks; up to `unsplit` after a block are its own."""
    after, own = begin, 0
    for address, size in [*blocks, (end, 0)]:
        if address - after > own:
            yield address - after
        after, own = address + size, unsplit


def _type(name: str, pool: object) -> str:
    return name if pool in (None, (0, 0)) else f"{name} in a private pool"


def _sums(segments: Iterable[tuple[str, int, Sequence[int]]]) -> list[Held]:
    """From type, bytes and free pieces of each segment."""
    by_type: dict[str, list[tuple[int, Sequence[int]]]] = {}
    for type_, size, free in segments:
        by_type.setdefault(type_, []).append((size, free))
    return [
        Held(
            type=type_,
            segments=len(found),
            reserved=sum(size for size, _ in found),
            free=sum(sum(free) for _, free in found),
            pieces=sum(len(free) for _, free in found),
            largest_piece=max((piece for _, free in found for piece in free), default=0),
        )
        for type_, found in sorted(by_type.items())
    ]
