"""The segments at the peak: against what PyTorch itself says at a known moment, and in few enough pieces."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from pytest_mbmem.history.maps import MOST_PIECES, segments_at_peak
from pytest_mbmem.history.owners import attribute
from pytest_mbmem.history.stamps import Stamp
from pytest_mbmem.measure.launch import Launcher, allocator_environment
from pytest_mbmem.measurement import CATEGORIES, SegmentMap
from pytest_mbmem.recipe import Recipe

MIB = 2**20


def record(seed: int) -> dict[str, Any]:
    """In a worker: allocate and free at random up to a peak, of which PyTorch's own snapshot is taken, and free it."""
    import torch

    from pytest_mbmem.measure.recording import Recording

    torch.cuda.init()  # type: ignore[no-untyped-call]
    recording = Recording("test", full=False)
    chance, live = random.Random(seed), list[torch.Tensor]()
    for _ in range(400):
        if live and chance.random() < 0.4:
            del live[chance.randrange(len(live))]
        else:
            live.append(torch.empty(int(2 ** chance.uniform(6, 25)), dtype=torch.uint8, device="cuda"))
    live.append(torch.empty(2**31, dtype=torch.uint8, device="cuda"))
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    segments = torch.cuda.memory._snapshot()["segments"]
    live.clear()
    history = recording.stop()
    return {
        "allocated": allocated,
        "reserved": reserved,
        "pieces": [
            (s["address"], s["total_size"], [(b["size"], b["state"] == "active_allocated") for b in s["blocks"]])
            for s in segments
        ],
        "maps": segments_at_peak(history),
    }


def allocated(segments: tuple[SegmentMap, ...]) -> int:
    return sum(size for segment in segments for size, kind in segment.blocks if kind >= 0)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_pytorchs_own_snapshot(launcher: Launcher, seed: int, settings: str) -> None:
    call = ("test_maps:record", {"seed": seed})
    (result,) = launcher.call_all([call], allocator_environment(settings), 120)
    assert result.failure is None, result.message
    maps = result.value["maps"]
    assert sum(segment.size for segment in maps) == result.value["reserved"]
    assert allocated(maps) == result.value["allocated"]
    assert all(sum(size for size, _ in segment.blocks) == segment.size for segment in maps)
    if not settings:  # of expandable segments PyTorch also lists what is not mapped yet
        theirs = [(size, sum(b for b, taken in blocks if taken)) for _, size, blocks in sorted(result.value["pieces"])]
        assert [(segment.size, allocated((segment,))) for segment in maps] == theirs
        # what is large enough to be drawn lies where it lay
        largest = max(range(len(maps)), key=lambda index: maps[index].size)
        assert maps[largest].blocks == ((2**31, CATEGORIES.index("temporaries")),)


@pytest.mark.parametrize("alloc_conf", ["", "expandable_segments:True"])
def test_a_measured_rank_has_its_peak_in_them(launcher: Launcher, small_recipe: Recipe, alloc_conf: str) -> None:
    recipe = small_recipe.but(alloc_conf=alloc_conf)
    (rank,) = launcher.measure(recipe, count_flops=False, check_effects=False).ranks
    maps = rank.segments_at_peak
    assert allocated(maps) == rank.peak()
    assert sum(segment.size for segment in maps) <= rank.peak("reserved")
    held: Counter[str] = Counter()
    for segment in maps:
        assert sum(size for size, _ in segment.blocks) == segment.size
        for size, kind in segment.blocks:
            held[CATEGORIES[kind] if kind >= 0 else "free"] += size
    assert rank.composition is not None
    for category, size in rank.composition.categories(rank.phases.index(rank.peak_phase())).items():
        if category != "rounding":  # a piece has its own
            assert held[category] >= size, category


def test_many_small_pieces_become_few_and_the_sums_stay() -> None:
    stamps = [Stamp(1, 1, "forward", "forward", "layer").text(), ""]  # what is kept: activations, unattributed
    events: list[dict[str, Any]] = []
    for segment in range(400):
        address = segment * 2**30
        events.append({"action": "segment_alloc", "addr": address, "size": 20 * MIB})
        for block in range(9):
            stamp = {"user_metadata": stamps[block % 2], "frames": [{"filename": "/a/b.py", "line": 1, "name": "f"}]}
            events.append({"action": "alloc", "addr": address + 2 * block * MIB, "size": 3 * MIB // 2, **stamp})
    history = attribute(events)
    maps = segments_at_peak(history)
    assert sum(len(segment.blocks) for segment in maps) <= MOST_PIECES
    assert sum(segment.size for segment in maps) == 400 * 20 * MIB
    assert all(sum(size for size, _ in segment.blocks) == segment.size for segment in maps)
    sums: Counter[int] = Counter()
    for one in maps:
        for size, kind in one.blocks:
            sums[kind] += size
    # What is left over between them, half a MiB, is too little to be split from them; after the last one it is not.
    assert sorted(sums.values()) == [400 * 5 * MIB // 2, 400 * 8 * MIB, 400 * 19 * MIB // 2]


def test_without_events_there_are_none() -> None:
    assert segments_at_peak(attribute([])) == ()
