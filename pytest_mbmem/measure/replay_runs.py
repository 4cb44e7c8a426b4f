"""Would a recorded run have fitted? Its history, replayed as it was and under other circumstances.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import alloc_conf
from ..errors import UserError
from ..history.replay import Recorded, ReplayResult, operations
from ..units import format_bytes, parse_bytes
from ..validation import show
from ..virtual_gpu.gpus import MOST_BYTES
from .launch import allocator_environment

if TYPE_CHECKING:
    from ..history.snapshot import Snapshot
    from ..virtual_gpu.gpus import Gpu
    from .launch import Launcher


@dataclass(frozen=True)
class Run:
    """One replay."""

    settings: str  # of the allocator
    result: ReplayResult


@dataclass(frozen=True)
class Limit:
    """What PyTorch could have, and why."""

    size: int | None  # bytes; None: without limit
    reason: str
    total: int | None = None  # bytes of the whole device, of which settings may allow a fraction; None: `size`


@dataclass(frozen=True)
class Replays:
    """Of one snapshot."""

    snapshot: Snapshot
    recorded: Recorded
    limit: Limit  # of the changed runs
    unchanged: Run
    changed: tuple[Run, ...]

    @property
    def exact(self) -> bool:
        """Whether the unchanged replay ended with the recorded segments, on the recorded way."""
        return self.differences == []

    @property
    def differences(self) -> list[str]:
        """Names of the figures that differ between the record and its unchanged replay."""
        result, failed = self.unchanged.result, self.unchanged.result.failed
        same = {
            "segments": result.segments == self.recorded.segments,
            "segment_bytes": result.segment_bytes == self.recorded.segment_bytes,
            "peak_reserved": result.peak_reserved == self.recorded.peak_reserved,
            "segment_allocations": result.segment_allocations == self.recorded.segment_allocations,
            "failed": (failed and failed.operation) == self.recorded.failed,
        }
        return [name for name, is_same in same.items() if not is_same]


def limit_of(capacity: str | None, gpu: Gpu, *, named: bool) -> Limit | None:
    """The limit by --capacity, or by --virtual-gpu where it was `named`; None where neither was given.

    Raises `UserError` for a capacity that no GPU can have.
    """
    if capacity is None and not named:
        return None
    unit = ""
    if capacity is None:
        size = gpu.capacity
    elif re.fullmatch("[0-9]{1,18}", capacity):
        size, unit = int(capacity), " bytes (a size may have a unit, as in '80 GiB')"
    else:
        size = parse_bytes(capacity, "--capacity")
    context = f"the CUDA context of {gpu.key} takes {format_bytes(gpu.context_bytes)}"
    if size > MOST_BYTES:
        raise UserError(
            f"--capacity: {show(capacity)}{unit} is above the {format_bytes(MOST_BYTES)} that can be replayed"
        )
    if size <= gpu.context_bytes:
        raise UserError(f"--capacity: {show(capacity)}{unit} leaves nothing for PyTorch: {context}")
    usable = size - gpu.context_bytes
    reason = f"{format_bytes(size)} of capacity, of which {context}: {format_bytes(usable)} for PyTorch"
    return Limit(usable, reason, size)


def replay_snapshot(
    launcher: Launcher, snapshot: Snapshot, settings: Sequence[str] | None, limit: Limit | None
) -> Replays:
    """Replay as recorded, then with each of the settings (None: with the recorded ones) under the limit.

    Where no limit is given, that of the recorded run holds, if it is known. Raises `UserError` for settings that
    PyTorch does not take.
    """
    recorded = Recorded.of(snapshot)
    packed = operations(snapshot.events).tobytes()
    if settings is not None:
        for text in settings:
            if alloc_conf.parse(text, "--alloc-conf").get("backend", "native") != "native":
                raise UserError(
                    f"--alloc-conf: {show(text)}: only PyTorch's own allocator (backend:native) is replayed"
                )

    def run(text: str, limit: Limit, source: str, *, retries: bool = False, check: bool = False) -> Run:
        size = MOST_BYTES if limit.size is None else limit.size
        total = size if limit.total is None else limit.total
        environment = {
            **allocator_environment(text),
            "MBMEM_GPU_CAPACITY": str(total),
            "MBMEM_GPU_CONTEXT_BYTES": str(total - size),
        }
        arguments = {"recorded": packed, "retries": retries, "settings": text if check else ""}
        call = launcher.call("pytest_mbmem.measure.replay:replay_operations", arguments, environment=environment)
        if call.failure is not None:
            option = " (--timeout gives it more)" if call.failure == "timeout" else ""
            raise UserError(
                f"{snapshot.path}: the replay ended without a result: {call.message}{option}\n{call.output}".strip()
            )
        if "refused" in call.value:
            raise UserError(f"{source}: {show(text)}: {call.value['refused']}")
        return Run(text, ReplayResult.from_plain(call.value))

    if not snapshot.alloc_conf.isprintable():
        raise UserError(f"{snapshot.path}: the recorded settings are no text: {show(snapshot.alloc_conf)}")
    own = Limit(None, "without limit (name one with --capacity or --virtual-gpu)")
    if recorded.limit is not None:
        reason = f"{format_bytes(recorded.limit)} for PyTorch, as the recorded run had"
        own = Limit(recorded.limit, reason, recorded.total)
    source = f"{snapshot.path}: recorded settings"  # which PyTorch took: they are not checked again
    unchanged = run(snapshot.alloc_conf, own, source, retries=own.size is None)
    limit = limit or own
    if settings is None:
        changed = [run(snapshot.alloc_conf, limit, source)]
    else:
        changed = [run(text, limit, "--alloc-conf", check=True) for text in settings]
    return Replays(snapshot, recorded, limit, unchanged, tuple(changed))
