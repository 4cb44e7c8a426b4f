"""Recorded histories, replayed through PyTorch's own allocator on the virtual GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from made_snapshots import MIB, event, oom, write

from pytest_mbmem.errors import UserError
from pytest_mbmem.history.replay import ReplayResult, operations
from pytest_mbmem.history.segments import held_at, held_at_end
from pytest_mbmem.history.snapshot import Snapshot, read_snapshot
from pytest_mbmem.measure.launch import Launcher, allocator_environment, recipe_environment
from pytest_mbmem.measure.replay_runs import Limit, limit_of, replay_snapshot
from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training
from pytest_mbmem.report.snapshots import replay_lines
from pytest_mbmem.virtual_gpu.gpus import load_gpus

EXPANDABLE = "expandable_segments:True"
SCARCE = {"MBMEM_GPU_CAPACITY": str(256 * MIB), "MBMEM_GPU_CONTEXT_BYTES": "0"}


def record(launcher: Launcher, file: Path, scenario: str, settings: str = "", **more: Any) -> dict[str, Any]:
    """Run a scenario of allocations.py. Returns its figures."""
    arguments = {"file": str(file), "scenario": scenario, **more.pop("arguments", {})}
    environment = {**allocator_environment(settings), **more.pop("environment", {})}
    done = launcher.call("allocations:record", arguments, environment=environment)
    assert done.failure is None, done.message
    return dict(done.value)


def replay(launcher: Launcher, file: Path, settings: str = "", **environment: str) -> ReplayResult:
    environment = {**allocator_environment(settings), **environment}
    done = launcher.call("pytest_mbmem.measure.replay:replay_file", {"path": str(file)}, environment=environment)
    assert done.failure is None, done.message
    return ReplayResult.from_plain(done.value)


def replay_events(launcher: Launcher, *events: dict[str, Any]) -> ReplayResult:
    arguments = {"recorded": operations(events).tobytes(), "retries": False, "settings": ""}
    done = launcher.call("pytest_mbmem.measure.replay:replay_operations", arguments)
    assert done.failure is None, done.message
    return ReplayResult.from_plain(done.value)


# The same run again ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
@pytest.mark.parametrize("empty_cache", [False, True])
@pytest.mark.parametrize("scenario", ["streams", "emptied", "pools"])
def test_a_replay_ends_as_the_run_did(
    launcher: Launcher, tmp_path: Path, scenario: str, empty_cache: bool, settings: str
) -> None:
    file = tmp_path / "s.pickle"
    recorded = record(launcher, file, scenario, settings, arguments={"empty_cache": empty_cache})
    assert asdict(replay(launcher, file, settings)) == {**recorded, "failed": None}


@pytest.mark.parametrize("scenario", ["streams", "pools"])
def test_a_replay_with_expandable_segments_ends_as_a_run_with_them(
    launcher: Launcher, tmp_path: Path, scenario: str
) -> None:
    record(launcher, tmp_path / "default.pickle", scenario)
    recorded = record(launcher, tmp_path / "expandable.pickle", scenario, EXPANDABLE)
    assert asdict(replay(launcher, tmp_path / "default.pickle", EXPANDABLE)) == {**recorded, "failed": None}


def test_a_cache_emptied_to_make_room_is_emptied_again_on_the_same_device(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    recorded = record(launcher, file, "scarce", environment=SCARCE)
    assert recorded["retries"] > 0
    assert asdict(replay(launcher, file, **SCARCE)) == {**recorded, "failed": None}
    roomy = replay(launcher, file)
    assert roomy.retries == 0
    assert roomy.peak_reserved > 256 * MIB


TWELVE_LAYERS = Recipe(
    model=Model(num_layers=12, hidden_size=512, num_attention_heads=8),
    parallelism=Parallelism(dp=8, distributed_optimizer=True),
    training=Training(micro_batch_size=4, seq_length=1024),
)


def run_recipe(launcher: Launcher, recipe: Recipe, file: Path) -> None:
    arguments = {"file": str(file), "recipe": recipe.to_dict(), "rank": 0}
    target = "pytest_mbmem.measure.snapshot_files:run_and_write"
    done = launcher.call(target, arguments, environment=recipe_environment(recipe))
    assert (done.message, done.value) == ("", None)


@pytest.mark.parametrize("size", ["small", "twelve layers"])
def test_a_recipe_replayed_is_the_recipe_measured(
    launcher: Launcher, small_recipe: Recipe, tmp_path: Path, size: str
) -> None:
    """To the byte, with the settings of the record and with others."""
    recipe = small_recipe if size == "small" else TWELVE_LAYERS
    file = tmp_path / "s.pickle"
    run_recipe(launcher, recipe, file)
    for settings in ("", EXPANDABLE):
        measured = launcher.measure(recipe.but(alloc_conf=settings), count_flops=False, check_effects=False).ranks[0]
        replayed = replay(launcher, file, settings)
        assert (replayed.peak_allocated, replayed.peak_reserved) == (measured.peak(), measured.peak("reserved"))
        if settings == "":
            segments = read_snapshot(file).segments
            assert replayed.segments == replayed.segment_allocations == len(segments)
            assert replayed.segment_bytes == sum(segment["total_size"] for segment in segments)


# What a replay must get right -----------------------------------------------------------------------------------------


def test_blocks_that_wait_for_a_stream_are_not_live_and_cannot_be_had(launcher: Launcher) -> None:
    block = 20 * MIB
    freed = [event("alloc", 2**30, block), event("free_requested", 2**30, block)]
    done = event("free_completed", 2**30, block)
    following = event("alloc", 2**31, block)
    waited = replay_events(launcher, *freed, following, done)
    assert (waited.peak_allocated, waited.peak_reserved) == (block, 2 * block)
    at_once = replay_events(launcher, *freed, done, following)
    assert (at_once.peak_allocated, at_once.peak_reserved) == (block, block)


@pytest.mark.parametrize(
    ("before", "between", "after", "peak"), [(60, 20, 30, 100), (10, 70, 30, 110), (10, 20, 130, 170)]
)
def test_peaks_before_between_and_after_waiting_are_seen(
    launcher: Launcher, before: int, between: int, after: int, peak: int
) -> None:
    """40 MiB wait while others come; what is live beside them has its peak before, meanwhile or after."""

    def block(number: int, size: int, *actions: str) -> list[dict[str, Any]]:
        return [event(action, number * 2**32, size * MIB) for action in actions]

    result = replay_events(
        launcher,
        *block(1, 40, "alloc"),
        *block(2, before, "alloc", "free_requested", "free_completed"),
        *block(1, 40, "free_requested"),
        *block(3, between, "alloc"),
        *block(4, 40, "alloc"),
        *block(3, between, "free_requested", "free_completed"),
        *block(1, 40, "free_completed"),
        *block(5, after, "alloc", "free_requested", "free_completed"),
    )
    assert result.peak_allocated == peak * MIB


def test_an_allocation_that_fails_is_the_end_and_a_result(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    record(launcher, file, "fragmented", environment=SCARCE)
    failed = replay(launcher, file, **SCARCE).failed
    assert failed is not None
    snapshot = read_snapshot(file)
    assert snapshot.events[failed.operation]["action"] == "oom"
    held = held_at(snapshot.events, failed.operation)
    assert failed.requested == snapshot.events[failed.operation]["size"]
    assert failed.reserved == sum(h.reserved for h in held)
    assert failed.unusable == sum(h.free for h in held) > failed.requested > failed.device_free
    assert failed.device_free == 256 * MIB - failed.reserved
    assert failed.message.startswith("CUDA out of memory. Tried to allocate ")


# Would it have fitted? ------------------------------------------------------------------------------------------------


def snapshot_of(launcher: Launcher, tmp_path: Path, scenario: str) -> Snapshot:
    file = tmp_path / f"{scenario}.pickle"
    record(launcher, file, scenario, environment=SCARCE)
    return read_snapshot(file)


def fits(replays: Any) -> Sequence[bool]:
    return [run.result.failed is None for run in replays.changed]


def test_the_limit_of_a_run_that_failed_is_known(launcher: Launcher, tmp_path: Path) -> None:
    replays = replay_snapshot(launcher, snapshot_of(launcher, tmp_path, "fragmented"), ["", EXPANDABLE], None)
    assert replays.recorded.limit == replays.limit.size == 256 * MIB
    assert replays.differences == []
    assert fits(replays) == [False, True]


def test_a_fraction_of_the_recorded_settings_is_of_the_whole_device(launcher: Launcher, tmp_path: Path) -> None:
    """Half of 512 MiB, of which 32 are outside PyTorch: it may have 256 MiB, not half of the other 480."""
    half = "per_process_memory_fraction:0.5"
    device = {"MBMEM_GPU_CAPACITY": str(512 * MIB), "MBMEM_GPU_CONTEXT_BYTES": str(32 * MIB)}
    record(launcher, tmp_path / "s.pickle", "fragmented", half, environment=device)
    snapshot = read_snapshot(tmp_path / "s.pickle")
    replays = replay_snapshot(launcher, snapshot, [half, ""], None)
    assert replays.recorded.limit == 480 * MIB
    assert replays.recorded.peak_reserved > 240 * MIB
    assert replays.differences == []
    assert fits(replays) == [False, True]
    gpu = replace(load_gpus()["h100-80gb"], context_bytes=32 * MIB)
    (named,) = replay_snapshot(launcher, snapshot, None, limit_of("512 MiB", gpu, named=False)).changed
    ends = [run.result.failed and run.result.failed.operation for run in (named, replays.changed[0])]
    assert ends == [replays.recorded.failed] * 2


def test_without_a_limit_a_replay_does_as_the_run_did_and_empties_the_cache(launcher: Launcher, tmp_path: Path) -> None:
    replays = replay_snapshot(launcher, snapshot_of(launcher, tmp_path, "scarce"), None, None)
    assert replays.recorded.limit is replays.limit.size is None
    assert replays.differences == []
    assert fits(replays) == [True]
    assert replays.changed[0].result.peak_reserved > replays.unchanged.result.peak_reserved


def test_a_limit_decides(launcher: Launcher, tmp_path: Path) -> None:
    snapshot = snapshot_of(launcher, tmp_path, "scarce")
    assert fits(replay_snapshot(launcher, snapshot, None, Limit(252 * MIB, ""))) == [True]
    assert fits(replay_snapshot(launcher, snapshot, None, Limit(220 * MIB, ""))) == [False]


def test_a_run_that_went_on_is_compared_up_to_its_failure(launcher: Launcher, tmp_path: Path) -> None:
    replays = replay_snapshot(launcher, snapshot_of(launcher, tmp_path, "recovered"), [""], Limit(2**30, ""))
    assert replays.recorded.failed == 0
    assert replays.differences == []
    assert fits(replays) == [True]
    assert replays.changed[0].result.peak_allocated == 300 * MIB


def test_a_difference_is_named(launcher: Launcher, tmp_path: Path) -> None:
    """Of a record whose segments PyTorch would not make."""
    events = [event("segment_alloc", 2**30, 50 * MIB), event("alloc", 2**30, 1000)]
    snapshot = Snapshot(tmp_path, 0, events, [{"total_size": 50 * MIB}], {})
    replays = replay_snapshot(launcher, snapshot, None, None)
    assert replays.differences == ["segment_bytes", "peak_reserved"]
    text = "\n".join(replay_lines(replays))
    assert "does not reproduce the recorded segments exactly: peak reserved is -96.00% off." in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("nonsense:True", "--alloc-conf: 'nonsense:True': PyTorch refuses the allocator's settings: Unrecognized key"),
        ("expandable_segments:maybe", "--alloc-conf: expandable_segments:maybe: not one of True, False"),
        ("expandable_segments", "has no value; write expandable_segments:VALUE"),
        ("backend:cudaMallocAsync", "only PyTorch's own allocator (backend:native) is replayed"),
        ("garbage_collection_threshold:0.8", "ignores garbage_collection_threshold:0.8"),
    ],
)
def test_settings_that_pytorch_does_not_take_are_one_message(
    launcher: Launcher, tmp_path: Path, settings: str, message: str
) -> None:
    events = [event("segment_alloc", 2**30, 2 * MIB), event("alloc", 2**30, 1000)]
    snapshot = Snapshot(tmp_path, 0, events, [], {})
    with pytest.raises(UserError) as info:
        replay_snapshot(launcher, snapshot, [settings], None)
    assert message in str(info.value)
    assert "\n" not in str(info.value)


def test_recorded_settings_that_pytorch_does_not_take_name_the_file(launcher: Launcher, tmp_path: Path) -> None:
    for settings in ("old_setting:1", "a\0b"):
        snapshot = Snapshot(tmp_path, 0, [oom(1, 1)], [], {"PYTORCH_CUDA_ALLOC_CONF": settings})
        with pytest.raises(
            UserError, match=r"the recorded settings|recorded settings: 'old_setting:1': PyTorch refuses"
        ):
            replay_snapshot(launcher, snapshot, None, None)


@pytest.mark.parametrize("settings", ["max_split_size_mb:64abc", "garbage_collection_threshold:0.8"])
def test_recorded_settings_that_only_pytorch_takes_are_replayed(
    launcher: Launcher, tmp_path: Path, settings: str
) -> None:
    """As --alloc-conf they are refused: PyTorch reads on over a part of them, or does nothing with them."""
    events = [event("segment_alloc", 2**30, 2 * MIB), event("alloc", 2**30, 1000)]
    snapshot = Snapshot(tmp_path, 0, events, [{"total_size": 2 * MIB}], {"PYTORCH_CUDA_ALLOC_CONF": settings})
    replays = replay_snapshot(launcher, snapshot, None, None)
    assert replays.differences == []
    assert [run.settings for run in replays.changed] == [settings]
    with pytest.raises(UserError, match="--alloc-conf: "):
        replay_snapshot(launcher, snapshot, [settings], None)


def test_a_capacity_is_of_the_whole_gpu() -> None:
    gpu = load_gpus()["h100-80gb"]
    limit = limit_of("80 GiB", gpu, named=False)
    assert limit is not None
    assert limit.size == 80 * 2**30 - gpu.context_bytes
    assert "80.00 GiB of capacity, of which the CUDA context of h100-80gb takes 512.00 MiB: 79.50 GiB" in limit.reason
    named = limit_of(None, gpu, named=True)
    assert named is not None
    assert named.size == gpu.usable
    assert limit_of(None, gpu, named=False) is None


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ("0 B", "'0 B' leaves nothing for PyTorch: the CUDA context of h100-80gb takes 512.00 MiB"),
        ("512 MiB", "leaves nothing for PyTorch"),
        ("-1 GiB", "'-1 GiB' is not a size"),
        ("80", "'80' bytes (a size may have a unit, as in '80 GiB') leaves nothing for PyTorch"),
        ("nan GiB", "is not a size"),
        ("513 GiB", "'513 GiB' is above the 512.00 GiB that can be replayed"),
        ("9" * 400 + " TiB", "is above the 512.00 GiB"),
    ],
)
def test_a_capacity_that_no_gpu_has_is_one_message(capacity: str, message: str) -> None:
    with pytest.raises(UserError) as info:
        limit_of(capacity, load_gpus()["h100-80gb"], named=False)
    assert message in str(info.value)
    assert len(str(info.value)) < 300


# Segments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
@pytest.mark.parametrize("scenario", ["streams", "emptied", "pools"])
def test_what_segments_hold_follows_from_the_events(
    launcher: Launcher, tmp_path: Path, scenario: str, settings: str
) -> None:
    file = tmp_path / "s.pickle"
    record(launcher, file, scenario, settings)
    snapshot = read_snapshot(file)
    assert held_at(snapshot.events, len(snapshot.events) - 1) == held_at_end(snapshot)


def test_a_file_that_is_no_history_is_the_callers_mistake(launcher: Launcher, tmp_path: Path) -> None:
    file = write(tmp_path / "s.pickle", [])
    done = launcher.call("pytest_mbmem.measure.replay:replay_file", {"path": str(file), "device": 0})
    assert done.failure == "error"
    assert f"UserError: {file}: is a pickle of something else" in done.message
