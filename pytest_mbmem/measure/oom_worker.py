"""In a worker: what PyTorch's allocator found when memory ran out, and the runs that show how much is needed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UserError
from ..history.owners import fold, line_of
from ..history.replay import operations
from ..history.snapshot import read_snapshot
from ..history.stamps import read_stamp
from ..oom import Shortage
from .recording import MAX_EVENTS
from .replay import replay_operations
from .snapshot_files import write_snapshot


class _Failed(NamedTuple):
    """A request that the allocator could not serve."""

    device: int
    asked: int  # bytes that it wanted of the driver: the request, rounded up to a segment
    shortage: Shortage  # with `asked` as the request


class Observer:
    """Keeps what the allocator had at each failure, which it tells before its error unwinds the stack.

    It stays attached: a process measures once.
    """

    def __init__(self) -> None:
        self._failed: list[_Failed] = []

    def attach(self) -> None:
        """Now, or where CUDA has not started yet, when it does."""
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        torch.cuda._lazy_call(lambda: attach(self._observe))  # type: ignore[no-untyped-call]

    def _observe(self, device: int, asked: int, limit: int, device_free: int) -> None:
        try:
            self._failed.append(_Failed(device, asked, _shortage(device, asked, limit, device_free)))
        except Exception:  # PyTorch would raise it instead of its own error
            traceback.print_exc()

    @property
    def shortage(self) -> Shortage | None:
        """At the last failure."""
        if not self._failed:
            return None
        return self._in_history(len(self._failed) - 1, torch.cuda.memory._snapshot())[0]

    def of(self, error: BaseException, snapshot: Mapping[str, Any] | None) -> tuple[Shortage | None, int | None]:
        """At the failure that raised this error, and its event in the snapshot's history; None for what is not known.

        A program may catch an error and raise it later, or raise one of its own: the text tells.
        """
        text = str(error)
        for index in reversed(range(len(self._failed))):
            if all(part in text for part in _parts_of_message(self._failed[index])):
                return self._in_history(index, snapshot)
        return None, None

    def _in_history(self, index: int, snapshot: Mapping[str, Any] | None) -> tuple[Shortage, int | None]:
        """A failure with the request as it was made, where the history has it."""
        device, _, shortage = self._failed[index]
        events = snapshot["device_traces"][device] if snapshot is not None else ()
        recorded = [number for number, event in enumerate(events) if event["action"] == "oom"]
        if len(recorded) != sum(failed.device == device for failed in self._failed):  # not recorded throughout
            return shortage, None
        number = recorded[sum(failed.device == device for failed in self._failed[:index])]
        return replace(shortage, requested=events[number]["size"]), number


def _shortage(device: int, asked: int, limit: int, device_free: int) -> Shortage:
    state = _state()
    segments = [segment for segment in state["segments"] if segment["device"] == device]
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    settings = state["allocator_settings"]
    stamp = read_stamp(torch._C._cuda_getMemoryMetadata()) if hasattr(torch._C, "_cuda_getMemoryMetadata") else None
    allocated = sum(segment["allocated_size"] for segment in segments)
    return Shortage(
        requested=asked,
        allocated=allocated,
        reserved=sum(segment["total_size"] for segment in segments),
        pieces=len(free),
        largest_piece=max(free, default=0),
        device_free=device_free,
        limit=limit,
        expandable_segments=bool(settings["expandable_segments"]),
        waiting=sum(segment["active_size"] for segment in segments) - allocated,
        alloc_conf=settings["PYTORCH_CUDA_ALLOC_CONF"],
        module=fold(stamp.module) if stamp is not None else "",
        line=line_of(_frames()),
    )


def _state() -> dict[str, Any]:
    """The allocator's segments and settings, without its history, which may have millions of events."""
    snapshot: Any = torch._C._cuda_memorySnapshot
    try:
        state: dict[str, Any] = snapshot((0, 0, False))
    except (RuntimeError, TypeError):  # an earlier torch copies both
        state = snapshot(None)
    return state


def _parts_of_message(failed: _Failed) -> list[str]:
    """What PyTorch's error says of the failure."""
    return [
        f"Tried to allocate {_size(failed.asked)}.",
        f"{_size(failed.shortage.device_free)} is free",
        f"{_size(failed.shortage.allocated)} is allocated by PyTorch",
    ]


def _size(size: int) -> str:
    """As PyTorch writes it."""
    for unit, bound in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size > bound:
            return f"{size / bound:.2f} {unit}"
    return f"{size} bytes"


def _frames() -> list[dict[str, Any]]:
    """The Python stack of this thread as in the allocator's history, innermost first."""
    stack = traceback.walk_stack(sys._getframe(2))
    return [{"filename": frame.f_code.co_filename, "line": line, "name": frame.f_code.co_name} for frame, line in stack]


def measure_and_record(file: str, **arguments: Any) -> dict[str, Any]:
    """`worker.measure_rank`, and the allocator's history as a snapshot in the file."""
    from .worker import measure_rank

    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS)
    measured = measure_rank(**arguments, record=False)
    write_snapshot(torch.cuda.memory._snapshot(), Path(file))
    return measured


def replay_history(file: str, request: int | None) -> dict[str, Any]:
    """Replay the file's history, as `replay.replay_operations` does.

    With `request`, up to that event, an allocation that failed: those that failed before it are left out.
    """
    path = Path(file)
    try:
        events = read_snapshot(path, 0).events
    except UserError as error:
        return {"refused": str(error).removeprefix(f"{path}: ")}
    if request is not None:
        events = [e for i, e in enumerate(events[: request + 1]) if e["action"] != "oom" or i == request]
    return replay_operations(operations(events).tobytes(), retries=False, settings="")
