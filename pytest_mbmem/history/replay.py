"""A history as operations that can be run again, and what came of running them. See `measure.replay` for the running.

Allocations and frees are operations; segments are what they led to. Only two events of segments are operations too:
the program's own torch.cuda.empty_cache(), and the end of a private pool. A call of empty_cache() that gave nothing
back is not in the history, so a replay does not make it either, where it might have given something back.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .. import alloc_conf
from ..errors import UserError
from ..virtual_gpu.gpus import MOST_BYTES
from .segments import held_at, reserved_levels
from .snapshot import Event, Snapshot


class Kind(IntEnum):
    """What an operation does."""

    ALLOC = 0
    ALLOC_TO_WAIT = 1  # the same, of a block that will be waited for
    WAIT = 2  # freed by the program, but not to be had before a stream is done with it
    FREE = 3  # may be had again
    EMPTY_CACHE = 4  # by the program
    RETRY = 5  # by an allocation that did not fit
    END_POOL = 6
    FAILED = 7  # an allocation that ended out of memory when it was recorded


class Operation(NamedTuple):
    """One operation; fields that its kind has no use for are 0."""

    kind: int  # a `Kind`
    slot: int  # which block, counted in the order of the allocations
    size: int  # bytes that are asked for
    stream: int
    pool: int  # 0 for the common one
    event: int  # index in the history


WIDTH = len(Operation._fields)


@dataclass(frozen=True)
class Failed:
    """The allocation that did not fit."""

    operation: int  # index of its event in the history
    requested: int  # bytes
    allocated: int  # bytes that were live then
    reserved: int  # bytes that the caching allocator held then
    device_free: int  # bytes that the driver could still give
    message: str = ""  # PyTorch's

    @property
    def unusable(self) -> int:
        """Bytes that the allocator held free, in pieces that could not be used."""
        return self.reserved - self.allocated


@dataclass(frozen=True)
class ReplayResult:
    """How the allocator ended up. Bytes."""

    peak_allocated: int
    peak_reserved: int
    segments: int  # at the end; of expandable ones, each contiguous piece
    segment_bytes: int  # at the end
    segment_allocations: int  # calls for more memory of the device in all
    retries: int  # allocations that got their memory only after the cache had been emptied
    failed: Failed | None = None

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> ReplayResult:
        """Of what a worker returns."""
        failed = data["failed"]
        return cls(**{**data, "failed": failed and Failed(**failed)})


@dataclass(frozen=True)
class Recorded:
    """What a snapshot says of its own run, up to the first allocation that failed, if any. Bytes."""

    peak_reserved: int
    segments: int
    segment_bytes: int
    segment_allocations: int
    failed: int | None = None  # index of the event
    limit: int | None = None  # bytes that the device had for PyTorch; known only where an allocation failed
    total: int | None = None  # bytes of the whole device, at least

    @classmethod
    def of(cls, snapshot: Snapshot) -> Recorded:
        """From the snapshot's events and segments."""
        events = snapshot.events
        failed = next((i for i, event in enumerate(events) if event["action"] == "oom"), None)
        if failed is None:
            levels, sizes = reserved_levels(events), [s["total_size"] for s in snapshot.segments]
            return cls(levels.peak, len(sizes), sum(sizes), levels.allocations)
        levels, held = reserved_levels(events[:failed]), held_at(events, failed)
        reserved = sum(h.reserved for h in held)
        limit = reserved + events[failed]["device_free"]
        return cls(
            peak_reserved=levels.peak,
            segments=sum(h.segments for h in held),
            segment_bytes=reserved,
            segment_allocations=levels.allocations,
            failed=failed,
            limit=limit,
            total=_least_device(limit, levels.peak, snapshot.alloc_conf),
        )


def _least_device(limit: int, peak: int, settings: str) -> int:
    """Bytes of the smallest device that had `limit` for PyTorch, and let it reserve `peak` with these settings.

    These may allow PyTorch a fraction of the whole device, whose size is not in a snapshot.
    """
    try:
        fraction = float(alloc_conf.parse(settings, "settings").get("per_process_memory_fraction", 1))
    except UserError:  # PyTorch took them, so it read something else than is written
        return limit
    if fraction <= 0 or peak / fraction > MOST_BYTES:
        return limit
    total = max(limit, math.ceil(peak / fraction))
    return total if int(fraction * total) >= peak else total + 1


def operations(events: Sequence[Event]) -> array[int]:
    """The operations of a whole history (see `Snapshot`), flat: `WIDTH` numbers each, as `each` reads them."""
    waited = _waited_for(events)
    flat = array("q")
    add = flat.extend
    slots: dict[int, int] = {}  # by address
    pools: dict[Any, int] = {(0, 0): 0}
    count = 0
    releases: list[tuple[int, Event]] = []  # segments given back, with nothing else in between
    for index, event in enumerate(events):
        action = event["action"]
        if action == "segment_free" or action == "segment_unmap":
            releases.append((index, event))
            continue
        if releases and action not in ("free_completed", "annotate", "snapshot"):
            for operation in _of_releases(releases, events, pools):
                add(operation)
            releases = []
        if action == "alloc":
            pool = pools.setdefault(event.get("pool_id") or (0, 0), len(pools))
            kind = Kind.ALLOC_TO_WAIT if index in waited else Kind.ALLOC
            add((kind, count, event["size"], event.get("stream", 0), pool, index))
            slots[event["addr"]] = count
            count += 1
        elif action == "free_requested":
            if index in waited:
                add((Kind.WAIT, slots[event["addr"]], 0, 0, 0, index))
        elif action == "free_completed":
            add((Kind.FREE, slots.pop(event["addr"]), 0, 0, 0, index))
        elif action == "oom":
            pool = pools.setdefault(event.get("pool_id") or (0, 0), len(pools))
            add((Kind.FAILED, count, event["size"], event.get("stream", 0), pool, index))
            count += 1
    for operation in _of_releases(releases, events, pools):
        add(operation)
    return flat


def each(flat: array[int]) -> Iterator[Sequence[int]]:
    """The fields of each operation, as a plain tuple for speed."""
    numbers = iter(flat)
    return zip(*[numbers] * WIDTH, strict=True)


def _waited_for(events: Sequence[Event]) -> set[int]:
    """Indices of the allocations, and of the requests to free, of blocks that others could not have at once.

    That is so only where something was allocated between the request and its completion.
    """
    made: dict[int, int] = {}  # address -> index of its alloc
    requested: dict[int, int] = {}  # address -> index of the request
    found: set[int] = set()
    last_alloc = -1
    for index, event in enumerate(events):
        action = event["action"]
        if action == "alloc":
            made[event["addr"]] = last_alloc = index
        elif action == "oom":
            last_alloc = index
        elif action == "free_requested":
            requested[event["addr"]] = index
        elif action == "free_completed":
            since = requested.pop(event["addr"])
            if last_alloc > since:
                found |= {since, made[event["addr"]]}
    for address, since in requested.items():  # still waiting at the end
        if last_alloc > since:
            found |= {since, made[address]}
    return found


def _of_releases(
    releases: Sequence[tuple[int, Event]], events: Sequence[Event], pools: Mapping[Any, int]
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Operations for segments that were given back: by an allocation that did not fit at first, or by the program."""
    if not releases:
        return
    index = releases[-1][0]
    released = dict.fromkeys(event.get("pool_id") or (0, 0) for _, event in releases)
    for pool in released:
        if pools.get(pool):
            yield Kind.END_POOL, 0, 0, 0, pools[pool], index
    if (0, 0) in released:
        kind = Kind.RETRY if _by_an_allocation([event for _, event in releases], index, events) else Kind.EMPTY_CACHE
        yield kind, 0, 0, 0, 0, index


def _by_an_allocation(releases: Sequence[Event], last: int, events: Sequence[Event]) -> bool:
    """Whether segments were given back, the last of them at `last`, to make room for an allocation.

    Then the next event is that PyTorch asks the device again, or gives up, with the same stack. Without stacks, a call
    of empty_cache() just before an allocation that needs a segment is taken for this too.
    """
    passed_over = ("free_completed", "annotate", "snapshot")
    following = (events[i] for i in range(last + 1, len(events)) if events[i]["action"] not in passed_over)
    asked = next(following, None)
    if asked is None or asked["action"] not in ("segment_alloc", "segment_map", "oom"):
        return False
    stack = asked.get("frames") or []
    return all((event.get("frames") or []) == stack for event in releases)
