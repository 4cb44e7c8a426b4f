"""In a worker: what PyTorch's allocator found when memory ran out, and the run that shows how much is needed."""

from __future__ import annotations

import pickle
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..history.owners import fold, line_of
from ..history.stamps import read_stamp
from ..oom import Shortage
from .recording import MAX_EVENTS


class Observer:
    """Keeps what the allocator had at its last failure, which it tells before its error unwinds the stack.

    With `file`, the allocator's history up to there is written to it, in PyTorch's format. It stays attached: a process
    measures once.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.shortage: Shortage | None = None
        self._file = file

    def attach(self) -> None:
        """Now, or where CUDA has not started yet, when it does."""
        attach: Any = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        torch.cuda._lazy_call(lambda: attach(self._observe))  # type: ignore[no-untyped-call]

    def _observe(self, device: int, asked: int, limit: int, device_free: int) -> None:
        try:
            snapshot = torch.cuda.memory._snapshot()
            self.shortage = _shortage(snapshot, device, asked, limit, device_free)
            if self._file is not None:
                self._file.write_bytes(pickle.dumps(snapshot))
        except Exception:  # PyTorch would raise it instead of its own error
            traceback.print_exc()


def _shortage(snapshot: Mapping[str, Any], device: int, asked: int, limit: int, device_free: int) -> Shortage:
    """`asked` is what the allocator wanted of the driver: the request, rounded up to a segment."""
    segments = [segment for segment in snapshot["segments"] if segment["device"] == device]
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "inactive"]
    settings = snapshot["allocator_settings"]
    trace = snapshot["device_traces"][device]
    stamp = read_stamp(torch._C._cuda_getMemoryMetadata()) if hasattr(torch._C, "_cuda_getMemoryMetadata") else None
    return Shortage(
        requested=trace[-1]["size"] if trace and trace[-1]["action"] == "oom" else asked,
        allocated=sum(segment["allocated_size"] for segment in segments),
        reserved=sum(segment["total_size"] for segment in segments),
        pieces=len(free),
        largest_piece=max(free, default=0),
        device_free=device_free,
        limit=limit,
        expandable_segments=bool(settings["expandable_segments"]),
        alloc_conf=settings["PYTORCH_CUDA_ALLOC_CONF"],
        module=fold(stamp.module) if stamp is not None else "",
        line=line_of(_frames()),
    )


def _frames() -> list[dict[str, Any]]:
    """The Python stack of this thread as in the allocator's history, innermost first."""
    stack = traceback.walk_stack(sys._getframe(2))
    return [{"filename": frame.f_code.co_filename, "line": line, "name": frame.f_code.co_name} for frame, line in stack]


def measure_and_record(file: str, **arguments: Any) -> dict[str, Any]:
    """`worker.measure_rank`, and the allocator's history as a snapshot in the file."""
    from .worker import measure_rank

    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_EVENTS)
    measured = measure_rank(**arguments, record=False)
    Path(file).write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    return measured
