"""In a worker: run a recorded history's operations through PyTorch's own caching allocator."""

from __future__ import annotations

import contextlib
import dataclasses
from array import array
from pathlib import Path
from typing import Any

import torch

from .. import alloc_conf
from ..errors import Refused, UserError
from ..history.replay import Failed, Kind, ReplayResult, each, operations
from ..history.snapshot import read_snapshot
from . import allocator

_ALLOCATED, _RESERVED = "allocated_bytes", "reserved_bytes"


def replay_file(path: str, device: int | None = None) -> dict[str, Any]:
    """Replay the history of a snapshot file on this process's GPU: a `ReplayResult` as plain data.

    The GPU's capacity and the allocator's settings are those of the environment. The first allocation that does not fit
    ends it. Raises `UserError` for a file that is no whole history of the device, and `Refused` where PyTorch does not
    take the settings.
    """
    return _replay(operations(read_snapshot(Path(path), device).events), retries=False)


def replay_operations(recorded: bytes, retries: bool, settings: str) -> dict[str, Any]:
    """The same for `history.replay.operations`, or {"refused": reason} where PyTorch takes no or ignores some settings.

    With `retries` the cache is emptied where an allocation of the recorded run did so, for a run whose limit is not
    known. `settings` are those of the environment that must be in effect; empty: not checked.
    """
    flat = array("q")
    flat.frombytes(recorded)
    try:
        result = _replay(flat, retries)
        wrong = alloc_conf.not_in_effect(alloc_conf.parse(settings, "settings"), allocator.reported())
    except (Refused, UserError) as error:
        return {"refused": str(error)}
    return {"refused": f"torch {torch.__version__} ignores {'; '.join(wrong)}"} if wrong else result


def _replay(flat: array[int], retries: bool) -> dict[str, Any]:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.memory_stats()
    except (RuntimeError, ValueError) as error:
        raise Refused(f"PyTorch refuses the allocator's settings: {str(error).splitlines()[0]}") from None
    replaying = _Allocator()
    failed = replaying.run(flat, retries)
    return dataclasses.asdict(replaying.result(failed))


class _Allocator:
    """PyTorch's, with the peaks of a program that had freed some blocks earlier than this replay may."""

    def __init__(self) -> None:
        self._pools: dict[int, Any] = {}
        self._waiting = 0  # bytes that the program has freed and this replay has not
        self._peaks = {_ALLOCATED: 0, _RESERVED: 0}

    def run(self, flat: array[int], retries: bool) -> Failed | None:
        """Run the operations up to the first allocation that fails, which is returned."""
        allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
        free = torch._C._cuda_cudaCachingAllocator_raw_delete
        blocks: dict[int, int] = {}  # slot -> address
        sizes: dict[int, int] = {}  # slot -> bytes of a block that will be waited for
        common, release = int(Kind.ALLOC), int(Kind.FREE)
        for kind, slot, size, stream, pool, event in each(flat):
            try:
                if kind == common and not pool:
                    blocks[slot] = allocate(size, stream)
                elif kind == release:
                    free(blocks.pop(slot))
                    if slot in sizes:
                        self._wait(-sizes.pop(slot))
                elif kind == Kind.WAIT:
                    self._wait(sizes[slot])
                elif kind == Kind.EMPTY_CACHE or (kind == Kind.RETRY and retries):
                    torch.cuda.empty_cache()
                elif kind == Kind.END_POOL:
                    self._pools.pop(pool, None)
                elif kind != Kind.RETRY:
                    before = _statistics()[_ALLOCATED]["current"]
                    with self._in_pool(pool):
                        blocks[slot] = allocate(size, stream)
                    if kind == Kind.FAILED:
                        free(blocks.pop(slot))
                    elif kind == Kind.ALLOC_TO_WAIT:
                        sizes[slot] = _statistics()[_ALLOCATED]["current"] - before
            except torch.OutOfMemoryError as error:
                statistics = _statistics()
                return Failed(
                    operation=event,
                    requested=size,
                    allocated=statistics[_ALLOCATED]["current"] - self._waiting,
                    reserved=statistics[_RESERVED]["current"],
                    device_free=torch.cuda.mem_get_info()[0],
                    message=str(error),
                )
        return None

    def result(self, failed: Failed | None) -> ReplayResult:
        """What came of it."""
        self._wait(0)
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        counted = torch.cuda.memory_stats()
        return ReplayResult(
            peak_allocated=self._peaks[_ALLOCATED],
            peak_reserved=self._peaks[_RESERVED],
            segments=len(segments),
            segment_bytes=sum(segment["total_size"] for segment in segments),
            segment_allocations=counted["num_device_alloc"],
            retries=counted["num_alloc_retries"] - (failed is not None),
            failed=failed,
        )

    def _in_pool(self, pool: int) -> contextlib.AbstractContextManager[None]:
        """Around an allocation; 0 is the common pool."""
        if not pool:
            return contextlib.nullcontext()
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.MemPool()
        return torch.cuda.use_mem_pool(self._pools[pool])

    def _wait(self, size: int) -> None:
        """From now on `size` bytes more (or less, below 0) are held that the program has freed."""
        for name, values in _statistics().items():
            self._peaks[name] = max(self._peaks[name], values["peak"] - (self._waiting if name == _ALLOCATED else 0))
        torch.cuda.reset_peak_memory_stats()
        self._waiting += size


def _statistics() -> dict[str, dict[str, int]]:
    """ "current" and "peak" bytes, by name."""
    statistics = torch.cuda.memory_stats_as_nested_dict()
    return {name: statistics[name]["all"] for name in (_ALLOCATED, _RESERVED)}
