"""Runs that allocate in a way of their own, for the workers of tests that read and replay their history."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch

MIB = 2**20


def record(file: str, scenario: str, max_entries: int = 100_000, empty_cache: bool = False) -> dict[str, Any]:
    """Run a scenario of this file and leave PyTorch's snapshot of it. Returns figures as a `ReplayResult` has them."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=max_entries)
    kept = globals()[scenario]()
    if empty_cache:
        torch.cuda.empty_cache()
    torch.cuda.memory._dump_snapshot(file)
    statistics, segments = torch.cuda.memory_stats(), torch.cuda.memory_snapshot()
    del kept
    return {
        "peak_allocated": statistics["allocated_bytes.all.peak"],
        "peak_reserved": statistics["reserved_bytes.all.peak"],
        "segments": len(segments),
        "segment_bytes": sum(segment["total_size"] for segment in segments),
        "segment_allocations": statistics["num_device_alloc"],
        "retries": statistics["num_alloc_retries"],
    }


def view(arguments: list[str]) -> None:
    """What `python -m torch.cuda._memory_viz` does."""
    sys.argv[1:] = arguments
    runpy.run_module("torch.cuda._memory_viz", run_name="__main__")


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def streams() -> Any:
    """The same sizes on three streams: no stream gets what another has freed."""
    kept = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            kept.append(block(MIB))
            for size in (30 * MIB, 5 * MIB, 700):
                block(size)
            kept.append(block(25 * MIB))
    return kept


def emptied() -> Any:
    """What the program gives back by itself, twice, and takes again."""
    kept = []
    for size in (30 * MIB, 40 * MIB):
        block(size)
        kept.append(block(3 * MIB))
        torch.cuda.empty_cache()
        block(size)
    return kept


def pools() -> Any:
    """A private pool that stays, one that ends, and the common one between them."""
    first, second = torch.cuda.MemPool(), torch.cuda.MemPool()
    kept: list[Any] = [first]
    for pool in (first, second):
        with torch.cuda.use_mem_pool(pool):
            block(30 * MIB)
            kept.append(block(2 * MIB))
        kept.append(block(30 * MIB))
    del pool
    kept[3] = None
    del second
    kept.append(block(50 * MIB))
    return kept


def scarce() -> Any:
    """On a device of 256 MiB: two allocations succeed only after the cache was emptied."""
    kept = [block(10 * MIB)]
    for size in (100 * MIB, 200 * MIB, 220 * MIB):
        block(size)
    kept.append(block(30 * MIB))
    return kept


def fragmented() -> Any:
    """On a device of 256 MiB: half of each block that is freed is kept, and the other is too small for what comes."""
    kept = []
    try:
        for size in range(20, 80, 2):
            block(size * MIB)
            kept.append(block((size // 2 + 1) * MIB))
    except torch.OutOfMemoryError:
        return kept
    raise AssertionError("it fits")


def recovered() -> Any:
    """On a device of 256 MiB: goes on with less after memory ran out."""
    try:
        block(300 * MIB)
    except torch.OutOfMemoryError:
        return [block(100 * MIB)]
    raise AssertionError("it fits")
