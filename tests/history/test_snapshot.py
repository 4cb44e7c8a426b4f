"""Reading PyTorch's snapshot files: whole ones, damaged ones and hostile ones."""

from __future__ import annotations

import os
import pickle
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from made_snapshots import MIB, event, segment, small, write

from pytest_mbmem.errors import UserError
from pytest_mbmem.history.snapshot import read_snapshot
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe


def refusal(path: Path, device: int | None = None) -> str:
    """The message, without the file's name that it must begin with."""
    with pytest.raises(UserError) as info:
        read_snapshot(path, device)
    message = str(info.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 700
    return message.removeprefix(f"{path}: ")


def test_a_whole_snapshot_is_read(tmp_path: Path) -> None:
    data = small()
    snapshot = read_snapshot(write(tmp_path / "s.pickle", data))
    assert snapshot.device == 0
    assert snapshot.events == data["device_traces"][0]
    assert snapshot.segments == data["segments"]
    assert snapshot.settings == data["allocator_settings"]
    assert snapshot.alloc_conf == ""


def test_the_snapshot_of_a_recipe_is_read(tmp_path: Path, launcher: Launcher, small_recipe: Recipe) -> None:
    file = tmp_path / "s.pickle"
    recipe = small_recipe.but(alloc_conf="expandable_segments:True").to_dict()
    arguments = {"file": str(file), "recipe": recipe, "rank": 0}
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    made = launcher.call("pytest_mbmem.measure.snapshot_files:run_and_write", arguments, environment=settings)
    assert (made.failure, made.value) == (None, None)
    snapshot = read_snapshot(file)
    assert snapshot.alloc_conf == "expandable_segments:True"
    assert any(e["action"] == "segment_map" for e in snapshot.events)
    assert all(s["is_expandable"] for s in snapshot.segments)


# Hostile --------------------------------------------------------------------------------------------------------------


class Reduced:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def hostile(mark: Path) -> dict[str, Any]:
    """What would leave a mark if any of it ran."""
    touch = f"touch {mark}"
    code = f"open({str(mark)!r}, 'w')"
    data = small()
    hidden = small()
    hidden["device_traces"][0][1]["frames"] = Reduced(os.system, touch)
    nested = Reduced(eval, f"exec({code!r})")
    return {
        "os.system": Reduced(os.system, touch),
        "nested exec": Reduced(exec, Reduced(eval, repr(code))),
        "in a valid snapshot": {**data, "user": nested},
        "as frames": hidden,
        "a getattr": Reduced(getattr, os, "system"),
        "behind a memo": [nested, nested],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", list(hostile(Path("x"))))
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, name: str, protocol: int) -> None:
    mark = tmp_path / "mark"
    if name == "a getattr":  # a module cannot be pickled, but it can be named
        content = (
            b"\x80\x02cos\nsystem\n(X" + struct.pack("<I", len(f"touch {mark}")) + f"touch {mark}".encode() + b"tR."
        )
    else:
        content = pickle.dumps(hostile(mark)[name], protocol)
    file = tmp_path / "s.pickle"
    file.write_bytes(content)
    assert refusal(file).startswith("refused: a snapshot is plain data, and this file asks for '")
    assert not mark.exists()


def test_an_object_from_outside_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x02X\x01\x00\x00\x00aQ.")
    assert "asks for 'an object outside the file'" in refusal(file)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04]r\x00\x00\x00\x08.",  # a memo of 2**27 places
        b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc",  # bytes of 1 TiB
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc",  # a text of 4 EiB
        b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b"abc",  # a bytearray of 8 GiB
        b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"abc",  # a frame
        b"\x80\x04" + b"]" * 10_000_000 + b".",  # 10 million lists from 10 MB
    ],
)
def test_a_pickle_cannot_take_much_more_memory_than_its_own_size(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(content)
    before = resource.getrlimit(resource.RLIMIT_AS)
    message = refusal(file)
    assert any(
        said in message for said in ("more memory than a snapshot", "cut off or damaged", "damaged (", "no snapsh")
    )
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def laughs() -> list[Any]:
    """10**30 elements for whoever walks it."""
    level: list[Any] = ["ha"]
    for _ in range(30):
        level = [level] * 10
    return level


def deep() -> list[Any]:
    level: list[Any] = []
    for _ in range(100):
        level = [level]
    return level


BOMBS = {
    "laughs": laughs(),
    "deep": deep(),
    "long": "x" * 10_000_000,
    "number": 10**100_000,
    "laughing dict": {"a": laughs()},
    "laughing tuple": (laughs(), laughs()),
}


@pytest.mark.parametrize("name", list(BOMBS))
@pytest.mark.parametrize(
    "place", ["", "segments", "device_traces", "event", "action", "addr", "frames", "frame", "pool_id", "user_metadata"]
)
def test_a_value_that_explodes_when_walked_is_refused_in_short(tmp_path: Path, name: str, place: str) -> None:
    bomb, data = BOMBS[name], cast(Any, small())
    events = data["device_traces"][0]
    if place == "":
        data = bomb
    elif place == "event":
        events[2] = bomb
    elif place == "frame":
        events[2]["frames"] = [bomb]
    elif place in data:
        data[place] = bomb
    else:
        events[2][place] = bomb
    file = write(tmp_path / "s.pickle", data)
    if (name, place) == ("long", "user_metadata"):  # a text, which may be long
        assert read_snapshot(file).events[2][place] == bomb
    else:
        refusal(file)


def test_settings_that_explode_are_left_out(tmp_path: Path) -> None:
    data = small()
    data["allocator_settings"] = {"a": laughs(), "b": 10**100_000, "c": {"d": laughs(), "e": 1}, laughs.__name__: "x"}
    assert read_snapshot(write(tmp_path / "s.pickle", data)).settings == {"c": {"e": 1}, "laughs": "x"}


def test_a_deep_pickle_does_not_end_the_process(tmp_path: Path) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".")
    assert "is a pickle of something else (a list of 1)" in refusal(file)


# Damaged and other files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty; record it with torch.cuda.memory._record_memory_history("),
        (b"PK\x03\x04", "is no pickle, so no snapshot of PyTorch's"),
        (b"\x1f\x8b\x08", "is no pickle"),
        (b'{"segments": []}', "is no pickle"),
        (b"\x80\x7f.", "is no pickle"),
        (pickle.dumps(small())[:-1], "the pickle is cut off or damaged"),
        (pickle.dumps(small())[:200], "the pickle is cut off or damaged"),
        (b"\x80\x04.", "the pickle is cut off or damaged"),
        (b"\x80\x04K\x01K\x02s.", "damaged"),
        (pickle.dumps([1, 2, 3]), "is a pickle of something else (a list of 3), no snapshot"),
        (pickle.dumps({"model": 1}), "is a pickle of something else (a dict of 1), no snapshot"),
        (pickle.dumps({"segments": []}), "holds segments but no history, as torch before 2.1 wrote it"),
        (pickle.dumps({"segments": [], "device_traces": [[], []]}), "no history was recorded on any device"),
        (pickle.dumps({"segments": [], "device_traces": []}), "no history was recorded on any device"),
        (pickle.dumps({"segments": [], "device_traces": 3}), "device_traces is not a list of lists"),
        (pickle.dumps({"segments": 3, "device_traces": []}), "segments is not a list"),
    ],
)
def test_another_file_is_one_message(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "s.pickle"
    file.write_bytes(content)
    assert message in refusal(file)


def test_every_cut_of_a_snapshot_is_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(small())
    file = tmp_path / "s.pickle"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refusal(file)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert refusal(tmp_path) == "is not a file; name a snapshot file"
    assert refusal(tmp_path / "none.pickle") == "is not there; name a snapshot file"
    assert refusal(tmp_path / ("x" * 300)) == "cannot be read (File name too long)"


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (1, {"action": "teleport"}, "event 1: action: 'teleport' is not one of alloc, annotate, free_completed, "),
        (1, {"action": None}, "event 1: action: None is not one of"),
        (1, {"addr": "a"}, "event 1 (alloc): addr: 'a' is not a whole number of 0 or more; damaged, or written by"),
        (1, {"size": -1}, "event 1 (alloc): size: -1 is not"),
        (1, {"size": True}, "event 1 (alloc): size: True is not"),
        (1, {"size": 2**63}, "event 1 (alloc): size: 9223372036854775808 is not"),
        (1, {"stream": None}, "event 1 (alloc): stream: None is not"),
        (1, {"pool_id": (0,)}, "event 1 (alloc): pool_id: a tuple of 1 is not two whole numbers"),
        (1, {"frames": "x"}, "event 1 (alloc): frames: 'x' is not a list of at most 10,000 frames"),
        (1, {"frames": [{}]}, "event 1 (alloc): frames: a dict of 0 is not a frame with filename, line and name"),
        (1, {"size": 2**45}, "event 1 (alloc): size 35184372088832 is more than all segments hold by then; damaged"),
        (2, {"addr": 4096}, "event 2 (alloc): 0x1000 is in use already"),
    ],
)
def test_an_event_of_another_form_is_named(tmp_path: Path, index: int, change: dict[str, Any], message: str) -> None:
    data = small()
    data["device_traces"][0][index].update(change)
    assert message in refusal(write(tmp_path / "s.pickle", data))


def test_a_segment_that_its_blocks_do_not_fill_is_named(tmp_path: Path) -> None:
    data = small()
    data["segments"][0]["blocks"][0]["size"] += 2**40
    assert "segment 0: total_size: " in refusal(write(tmp_path / "s.pickle", data))


@pytest.mark.parametrize("key", ["device", "address", "total_size", "blocks"])
def test_a_segment_without_a_key_is_named(tmp_path: Path, key: str) -> None:
    data = small()
    del data["segments"][0][key]
    assert f"segment 0: {key}: None is not" in refusal(write(tmp_path / "s.pickle", data))


def test_events_of_older_versions_have_fewer_keys(tmp_path: Path) -> None:
    data = small()
    for one in data["device_traces"][0]:
        for key in ("pool_id", "time_us", "frames"):
            one.pop(key, None)
    del data["allocator_settings"], data["segments"][0]["segment_pool_id"], data["segments"][0]["is_expandable"]
    snapshot = read_snapshot(write(tmp_path / "s.pickle", data))
    assert (len(snapshot.events), snapshot.settings, snapshot.alloc_conf) == (5, {}, "")


# Several devices ------------------------------------------------------------------------------------------------------


def test_the_only_device_with_a_history_is_taken(tmp_path: Path) -> None:
    data = small()
    data["device_traces"] = [[], *data["device_traces"]]
    data["segments"][0]["device"] = 1
    file = write(tmp_path / "s.pickle", data)
    assert read_snapshot(file).device == 1
    assert refusal(file, 0) == "--device 0 has no history; recorded are 1 (5 events)"


def test_of_several_devices_one_must_be_chosen(tmp_path: Path) -> None:
    data = small()
    data["device_traces"] *= 2
    data["segments"].append({**data["segments"][0], "device": 1})
    file = write(tmp_path / "s.pickle", data)
    assert refusal(file) == ("has the history of several devices: 0 (5 events), 1 (5 events); choose one with --device")
    assert read_snapshot(file, 1).segments == [data["segments"][1]]


# Histories that are not whole -----------------------------------------------------------------------------------------


def test_a_history_that_begins_after_an_allocation_says_so(tmp_path: Path) -> None:
    data = small()
    del data["device_traces"][0][:2]
    message = refusal(write(tmp_path / "s.pickle", data))
    assert message.startswith(
        "the history starts in mid-run: 2 of its events free blocks that it does not allocate; 2.00 MiB of segments "
        "come from before it. It was begun after the first allocation, or max_entries was too small (it holds 3 events)"
    )


def test_live_blocks_without_an_allocation_say_so(tmp_path: Path) -> None:
    data = small()
    del data["device_traces"][0][2]
    message = refusal(write(tmp_path / "s.pickle", data))
    assert "starts in mid-run: 1 live blocks (512 B) have no allocation in it." in message


def test_a_history_whose_buffer_was_full_says_so(tmp_path: Path, launcher: Launcher) -> None:
    file = tmp_path / "s.pickle"
    arguments = {"file": str(file), "scenario": "streams", "max_entries": 20}
    assert launcher.call("allocations:record", arguments).message == ""
    message = refusal(file)
    assert "the history starts in mid-run: " in message
    assert "max_entries was too small (it holds 20 events)" in message


def test_a_history_that_stops_early_says_so(tmp_path: Path) -> None:
    data = small()
    data["segments"] = [segment(4096, 2 * MIB, (2 * MIB, "inactive"))]
    message = refusal(write(tmp_path / "s.pickle", data))
    assert "the history does not lead to its segments: by its events 1 blocks are live in 2.00 MiB, by its" in message
    data["device_traces"][0].append(event("segment_alloc", 2**30, 2 * MIB))
    assert "are live in 4.00 MiB" in refusal(write(tmp_path / "s.pickle", data))
