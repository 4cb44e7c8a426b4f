"""From events to operations: what is run again, and what was only the result of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_snapshots import MIB, event, oom, segment

from pytest_mbmem.history.replay import Kind, Operation, Recorded, each, operations
from pytest_mbmem.history.snapshot import Snapshot

STACK = [{"filename": "a.py", "line": 1, "name": "f"}]
OTHER = [{"filename": "b.py", "line": 2, "name": "g"}]


def of(*events: dict[str, Any]) -> list[Operation]:
    return [Operation(*numbers) for numbers in each(operations(events))]


def kinds(*events: dict[str, Any]) -> list[Kind]:
    return [Kind(operation.kind) for operation in of(*events)]


def test_an_allocation_and_its_free_name_the_same_block() -> None:
    made, freed = of(
        event("segment_alloc", 4096, 2 * MIB, stream=9),
        event("alloc", 4096, 1000, stream=9),
        event("free_requested", 4096, 1000, stream=9),
        event("free_completed", 4096, 1000, stream=9),
    )
    assert made == Operation(Kind.ALLOC, slot=0, size=1000, stream=9, pool=0, event=1)
    assert (freed.kind, freed.slot, freed.event) == (Kind.FREE, 0, 3)


def test_an_address_that_is_used_again_is_another_block() -> None:
    pair = [event(action, 4096, 512) for action in ("alloc", "free_requested", "free_completed")]
    assert [operation.slot for operation in of(*pair, *pair)] == [0, 0, 1, 1]


def test_a_block_is_waited_for_where_something_is_allocated_before_it_can_be_had() -> None:
    waited = [
        event("alloc", 4096, 512),
        event("free_requested", 4096, 512),
        event("alloc", 8192, 512),
        event("free_completed", 4096, 512),
    ]
    assert kinds(*waited) == [Kind.ALLOC_TO_WAIT, Kind.WAIT, Kind.ALLOC, Kind.FREE]
    assert kinds(waited[0], waited[1], waited[3], waited[2]) == [Kind.ALLOC, Kind.FREE, Kind.ALLOC]
    assert kinds(*waited[:3]) == [Kind.ALLOC_TO_WAIT, Kind.WAIT, Kind.ALLOC]
    assert kinds(*waited[:2]) == [Kind.ALLOC]


def test_segments_are_results() -> None:
    mapping = [event(action, 4096, 2 * MIB) for action in ("segment_alloc", "segment_map", "snapshot", "annotate")]
    assert of(*mapping) == []


def test_segments_given_back_by_the_program_are_an_empty_cache() -> None:
    freed = event("segment_free", 4096, 2 * MIB)
    assert kinds(freed) == [Kind.EMPTY_CACHE]
    assert kinds(freed, event("segment_unmap", 8192, 2 * MIB), event("alloc", 16384, 512)) == [
        Kind.EMPTY_CACHE,
        Kind.ALLOC,
    ]


def test_segments_given_back_for_an_allocation_are_its_retry() -> None:
    freed = [event("segment_free", address, 2 * MIB, frames=STACK) for address in (4096, 8192)]
    taken = event("segment_alloc", 16384, 2 * MIB, frames=STACK)
    assert kinds(*freed, taken) == [Kind.RETRY]
    assert kinds(*freed, {**oom(MIB, 0), "frames": STACK}) == [Kind.RETRY, Kind.FAILED]


def test_the_stack_tells_an_empty_cache_before_an_allocation_from_a_retry() -> None:
    freed = event("segment_free", 4096, 2 * MIB, frames=OTHER)
    taken = event("segment_alloc", 16384, 2 * MIB, frames=STACK)
    assert kinds(freed, taken) == [Kind.EMPTY_CACHE]
    assert kinds(event("segment_unmap", 4096, 2 * MIB), taken) == [Kind.EMPTY_CACHE]


def test_without_stacks_it_is_taken_for_a_retry() -> None:
    assert kinds(event("segment_unmap", 4096, 2 * MIB), event("segment_map", 16384, 2 * MIB)) == [Kind.RETRY]


def test_the_segments_of_a_private_pool_end_it() -> None:
    pool = {"pool_id": (0, 3)}
    made, ended, again = of(
        event("alloc", 4096, 512, **pool), event("segment_free", 4096, 2 * MIB, **pool), event("alloc", 4096, 1, **pool)
    )
    assert (made.pool, ended.kind, ended.pool, again.pool) == (1, Kind.END_POOL, 1, 1)
    common = event("segment_free", 2**30, 2 * MIB)
    assert kinds(event("alloc", 4096, 1, **pool), event("segment_free", 4096, 2 * MIB, **pool), common) == [
        Kind.ALLOC,
        Kind.END_POOL,
        Kind.EMPTY_CACHE,
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2**40), st.booleans()), max_size=60))
def test_every_block_is_made_once_and_freed_once(script: list[tuple[int, int, bool]]) -> None:
    """Whatever order: allocations that are freed in between, at once or after others."""
    events: list[dict[str, Any]] = []
    live: dict[int, int] = {}
    waiting: list[int] = []
    for address, size, at_once in script:
        if address in waiting:
            waiting.remove(address)
            events.append(event("free_completed", address, 1))
        elif address in live:
            events.append(event("free_requested", address, live.pop(address)))
            if at_once:
                events.append(event("free_completed", address, 1))
            else:
                waiting.append(address)
        else:
            live[address] = size
            events.append(event("alloc", address, size))
    found = of(*events)
    made = [o.slot for o in found if o.kind in (Kind.ALLOC, Kind.ALLOC_TO_WAIT)]
    freed = [o.slot for o in found if o.kind == Kind.FREE]
    waits = [o.slot for o in found if o.kind == Kind.WAIT]
    assert made == list(range(len(made)))
    assert len(freed) == len(set(freed)) == len(made) - len(live) - len(waiting)
    assert len(waits) == len(set(waits))
    assert set(waits) == {o.slot for o in found if o.kind == Kind.ALLOC_TO_WAIT}
    assert [o.event for o in found] == sorted(o.event for o in found)


def snapshot(events: list[dict[str, Any]], *segments: dict[str, Any]) -> Snapshot:
    return Snapshot(Path("s.pickle"), 0, events, segments, {})


def test_what_a_snapshot_says_of_its_run() -> None:
    events = [
        event("segment_alloc", 2**30, 2 * MIB),
        event("segment_alloc", 2**31, 20 * MIB),
        event("segment_free", 2**31, 20 * MIB),
    ]
    left = segment(2**30, 2 * MIB, (2 * MIB, "inactive"))
    assert Recorded.of(snapshot(events, left)) == Recorded(22 * MIB, 1, 2 * MIB, 2)


def test_of_a_run_that_failed_it_is_what_was_there_then() -> None:
    events = [
        event("segment_alloc", 2**30, 20 * MIB),
        event("alloc", 2**30, 15 * MIB),
        oom(100 * MIB, 50 * MIB),
        event("segment_free", 2**30, 20 * MIB),
        event("segment_alloc", 2**30, 200 * MIB),
    ]
    recorded = Recorded(20 * MIB, 1, 20 * MIB, 1, failed=2, limit=70 * MIB, total=70 * MIB)
    assert Recorded.of(snapshot(events)) == recorded


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ("per_process_memory_fraction:0.5", 70 * MIB),
        ("expandable_segments:True,per_process_memory_fraction:0.1", 200 * MIB),  # else 20 MiB were not allowed
        ("per_process_memory_fraction:0.13", 161319385),  # of which 0.13 are 20 MiB and a part of a byte
        ("per_process_memory_fraction:0", 70 * MIB),
        ("per_process_memory_fraction:1e-300", 70 * MIB),
        ("per_process_memory_fraction:0.1x", 70 * MIB),
    ],
)
def test_the_device_was_so_large_that_a_fraction_of_it_held_what_was_reserved(settings: str, total: int) -> None:
    events = [event("segment_alloc", 2**30, 20 * MIB), oom(100 * MIB, 50 * MIB)]
    recorded = Recorded.of(Snapshot(Path("s.pickle"), 0, events, [], {"PYTORCH_CUDA_ALLOC_CONF": settings}))
    assert (recorded.limit, recorded.total) == (70 * MIB, total)
