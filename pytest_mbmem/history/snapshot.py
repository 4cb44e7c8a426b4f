"""PyTorch's snapshot files (`torch.cuda.memory._dump_snapshot`), read without running what is in them, and checked.

A snapshot is a pickle of plain data. What names anything to import, to call or to look up is refused, and reading may
take no more memory than a file of that size could need. What comes out is checked once, so that nobody after has to.
"""

from __future__ import annotations

import pickle
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UserError
from ..garbage import no_collections
from ..units import format_bytes
from ..validation import show

Event = Mapping[str, Any]
Segment = Mapping[str, Any]

_RECORD = (
    "record it with torch.cuda.memory._record_memory_history(max_entries=...) before the first allocation, and write "
    "it with torch.cuda.memory._dump_snapshot(FILE) while that still records"
)
_OF_BLOCKS = ("alloc", "free_requested", "free_completed")
_OF_SEGMENTS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
_NUMBERS = {
    **dict.fromkeys((*_OF_BLOCKS, *_OF_SEGMENTS), ("addr", "size", "stream")),
    "oom": ("device_free", "size", "stream"),
    "annotate": ("addr",),
}
"""What an event must have besides its action."""

ACTIONS = frozenset((*_NUMBERS, "snapshot"))
"""Of events, in torch 2.1 to 2.14 (`annotate` is of the newest)."""

_OTHER_VERSION = "damaged, or written by a torch that this version cannot read"

_MOST_FRAMES = 10_000  # of one stack
_LONGEST = 10_000  # characters of a name
_MOST = 2**63 - 1


@dataclass(frozen=True)
class Snapshot:
    """A checked snapshot of one device: each event and segment has the keys of its kind, with values of the right type.

    The history is whole: every block that was freed or is live was allocated in it, and so was every segment.
    """

    path: Path
    device: int
    events: Sequence[Event]  # in the order in which they happened
    segments: Sequence[Segment]  # at the end
    settings: Mapping[str, Any]  # of the allocator, as PyTorch parsed them

    @property
    def alloc_conf(self) -> str:
        """The text that the settings were parsed from; empty for the defaults and where torch did not say."""
        text = self.settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
        return text if isinstance(text, str) else ""


def read_snapshot(path: Path, device: int | None = None) -> Snapshot:
    """Read a snapshot file. `device` is needed only where several have a history.

    Raises `UserError` that names the file, what was found there and what to do, for everything but a whole history.
    """
    with no_collections():
        return _check(path, _load(path), device)


# Unpickling -----------------------------------------------------------------------------------------------------------


class _PlainData(pickle.Unpickler):
    """Makes numbers, texts, lists and the like, and nothing else."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise _Hostile(f"{module}.{name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise _Hostile("an object outside the file")


class _Hostile(Exception):
    """What the pickle asks for beyond plain data."""


def _load(path: Path) -> Any:
    try:
        if not path.is_file():
            raise UserError(f"{path}: is {'not a file' if path.exists() else 'not there'}; name a snapshot file")
        with path.open("rb") as file:
            start = file.read(2)
            if not start:
                raise UserError(f"{path}: the file is empty; {_RECORD}")
            if start[:1] != pickle.PROTO or start[1] > pickle.HIGHEST_PROTOCOL:
                raise UserError(f"{path}: is no pickle, so no snapshot of PyTorch's; {_RECORD}")
            file.seek(0)
            with _bounded_memory(path.stat().st_size):
                return _PlainData(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UserError:
        raise
    except _Hostile as error:
        raise UserError(
            f"{path}: refused: a snapshot is plain data, and this file asks for {show(str(error))}; nothing was run"
        ) from None
    except (EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path}: the pickle is cut off or damaged ({show(str(error))}); write the file anew") from None
    except MemoryError:
        raise UserError(f"{path}: asks for more memory than a snapshot of its size needs; not read") from None
    except Exception as error:  # the unpickler raises whatever a damaged stack of its operations leads to
        raise UserError(f"{path}: the pickle is damaged ({type(error).__name__}: {show(str(error))})") from None


@contextmanager
def _bounded_memory(file_size: int) -> Iterator[None]:
    """Let this process grow by what a snapshot of this size can need (up to 12 bytes a byte), with room to spare."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limit = now + 2**29 + 24 * file_size
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([limit, *bounds]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# Checking -------------------------------------------------------------------------------------------------------------


def _check(path: Path, data: Any, device: int | None) -> Snapshot:
    if type(data) is not dict or "segments" not in data:
        raise UserError(f"{path}: is a pickle of something else ({_kind(data)}), no snapshot of PyTorch's; {_RECORD}")
    if "device_traces" not in data:
        raise UserError(f"{path}: holds segments but no history, as torch before 2.1 wrote it; {_RECORD}")
    traces, segments, settings = data["device_traces"], data["segments"], data.get("allocator_settings", {})
    if type(traces) is not list or any(type(t) is not list for t in traces):
        raise UserError(f"{path}: device_traces is not a list of lists; {_OTHER_VERSION}")
    if type(segments) is not list:
        raise UserError(f"{path}: segments is not a list; {_OTHER_VERSION}")
    chosen = _choose(path, traces, device)
    events = traces[chosen]
    _check_events(path, events)
    mine = [s for i, s in enumerate(segments) if _check_segment(path, i, s) == chosen]
    _check_whole(path, events, mine)
    return Snapshot(path, chosen, events, mine, _simple(settings))


def _simple(settings: Any) -> dict[str, Any]:
    """What settings can be: numbers, short texts, and mappings of these. Other things are left out."""

    def is_simple(value: Any) -> bool:
        if type(value) is str:
            return len(value) <= _LONGEST
        return type(value) in (bool, float) or (type(value) is int and -_MOST <= value <= _MOST)

    def kept(values: Any) -> dict[str, Any]:
        pairs = values.items() if type(values) is dict else ()
        return {key: value for key, value in pairs if type(key) is str and is_simple(key) and is_simple(value)}

    mappings = settings.items() if type(settings) is dict else ()
    return kept(settings) | {key: kept(v) for key, v in mappings if type(key) is str and type(v) is dict}


def _choose(path: Path, traces: list[list[Any]], device: int | None) -> int:
    recorded = {number: len(events) for number, events in enumerate(traces) if events}
    if not recorded:
        raise UserError(f"{path}: no history was recorded on any device; {_RECORD}")
    names = ", ".join(f"{number} ({count:,} events)" for number, count in recorded.items())
    if device is None and len(recorded) > 1:
        raise UserError(f"{path}: has the history of several devices: {names}; choose one with --device")
    if device is not None and device not in recorded:
        raise UserError(f"{path}: --device {device} has no history; recorded are {names}")
    return next(iter(recorded)) if device is None else device


def _check_events(path: Path, events: list[Any]) -> None:
    """Raise for the first event that lacks something. A million of them take seconds: this is written for speed."""
    seen: set[int] = set()  # ids of stacks and of frames, which events share
    pool = None  # of the event before
    for index, event in enumerate(events):
        if type(event) is not dict:
            _wrong(path, f"event {index}", event, "an event")
        action = event.get("action")
        if type(action) is not str or action not in ACTIONS:
            _wrong(path, f"event {index}: action", action, f"one of {', '.join(sorted(ACTIONS))}")
        for key in _NUMBERS.get(action, ()):
            if type(number := event.get(key)) is not int or not 0 <= number <= _MOST:
                _wrong(path, f"event {index} ({action}): {key}", number, "a whole number of 0 or more")
        if type(event.get("user_metadata", "")) is not str:
            _wrong(path, f"event {index} ({action}): user_metadata", event["user_metadata"], "a text")
        if event.get("pool_id") is not pool:
            pool = event.get("pool_id")
            if pool is not None and not _is_pool(pool):
                _wrong(path, f"event {index} ({action}): pool_id", pool, "two whole numbers")
        frames = event.get("frames")
        if frames is not None and id(frames) not in seen:
            seen.add(id(frames))
            if type(frames) is not list or len(frames) > _MOST_FRAMES:
                _wrong(path, f"event {index} ({action}): frames", frames, f"a list of at most {_MOST_FRAMES:,} frames")
            for frame in frames:
                if id(frame) not in seen:
                    seen.add(id(frame))
                    if not _is_frame(frame):
                        _wrong(path, f"event {index} ({action}): frames", frame, "a frame with filename, line and name")


def _is_pool(pool: Any) -> bool:
    return type(pool) is tuple and len(pool) == 2 and all(map(_is_number, pool))


def _is_frame(frame: Any) -> bool:
    if type(frame) is not dict or not _is_number(frame.get("line")):
        return False
    return all(type(frame.get(key)) is str and len(frame[key]) <= _LONGEST for key in ("filename", "name"))


def _check_segment(path: Path, index: int, segment: Any) -> int:
    """The segment's device."""
    if type(segment) is not dict:
        _wrong(path, f"segment {index}", segment, "a segment")
    for key in ("device", "address", "total_size"):
        if not _is_number(segment.get(key)):
            _wrong(path, f"segment {index}: {key}", segment.get(key), "a whole number of 0 or more")
    if type(segment.get("blocks")) is not list:
        _wrong(path, f"segment {index}: blocks", segment.get("blocks"), "a list")
    for block in segment["blocks"]:
        if type(block) is not dict or not _is_number(block.get("size")) or type(block.get("state")) is not str:
            _wrong(path, f"segment {index}: a block", block, "a block with size and state")
    if (held := sum(block["size"] for block in segment["blocks"])) != segment["total_size"]:
        _wrong(path, f"segment {index}: total_size", segment["total_size"], f"the {held} bytes of its blocks")
    return int(segment["device"])


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _check_whole(path: Path, events: list[Event], segments: list[Segment]) -> None:
    """Raise unless the events lead from an empty device to these segments."""
    live: set[int] = set()
    waiting: set[int] = set()  # freed by the program, in use by a stream
    reserved = unknown = 0
    too_large: tuple[int, Event] | None = None
    for index, event in enumerate(events):
        action = event["action"]
        if action == "alloc":
            if event["addr"] in live or event["addr"] in waiting:
                raise UserError(
                    f"{path}: event {index} (alloc): {event['addr']:#x} is in use already; {_OTHER_VERSION}"
                )
            live.add(event["addr"])
            if event["size"] > reserved:
                too_large = too_large or (index, event)
        elif action == "free_requested" and event["addr"] in live:
            live.remove(event["addr"])
            waiting.add(event["addr"])
        elif action == "free_completed" and event["addr"] in waiting:
            waiting.remove(event["addr"])
        elif action in ("free_requested", "free_completed"):
            unknown += 1
        elif action in ("segment_alloc", "segment_map"):
            reserved += event["size"]
        elif action in ("segment_free", "segment_unmap"):
            reserved -= event["size"]
    held = sum(segment["total_size"] for segment in segments)
    at_end = dict(_live_blocks(segments))
    missing = [size for address, size in at_end.items() if address not in live]
    found = []
    if unknown:
        found.append(f"{unknown:,} of its events free blocks that it does not allocate")
    if missing:
        found.append(f"{len(missing):,} live blocks ({format_bytes(sum(missing))}) have no allocation in it")
    if reserved < held:
        found.append(f"{format_bytes(held - reserved)} of segments come from before it")
    if found:
        raise UserError(
            f"{path}: the history starts in mid-run: {'; '.join(found)}. It was begun after the first allocation, or "
            f"max_entries was too small (it holds {len(events):,} events); {_RECORD}"
        )
    if too_large is not None:
        index, event = too_large
        raise UserError(
            f"{path}: event {index} (alloc): size {event['size']} is more than all segments hold by then; "
            f"{_OTHER_VERSION}"
        )
    if reserved > held or len(live) > len(at_end):
        raise UserError(
            f"{path}: the history does not lead to its segments: by its events {len(live):,} blocks are live in "
            f"{format_bytes(reserved)}, by its segments {len(at_end):,} in {format_bytes(held)}; it was not recorded "
            f"throughout; {_RECORD}"
        )


def _live_blocks(segments: Sequence[Segment]) -> Iterator[tuple[int, int]]:
    """Address and size of each."""
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                yield address, block["size"]
            address += block["size"]


def _wrong(path: Path, where: str, value: object, allowed: str) -> NoReturn:
    shown = _kind(value) if isinstance(value, (list, dict, tuple)) else show(value)
    raise UserError(f"{path}: {where}: {shown} is not {allowed}; {_OTHER_VERSION}")


def _kind(data: object) -> str:
    """What a thing is, without walking it."""
    if isinstance(data, (dict, list, tuple, set, bytes, str)):
        return f"a {type(data).__name__} of {len(data):,}"
    return f"a {type(data).__name__}"
