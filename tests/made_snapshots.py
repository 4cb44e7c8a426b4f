"""Snapshots as PyTorch writes them, made by hand: a list of events, and the segments that they lead to."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

MIB = 2**20


def event(action: str, address: int, size: int, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "pool_id": (0, 0), "time_us": 1, **more}


def oom(size: int, device_free: int) -> dict[str, Any]:
    return {"action": "oom", "device_free": device_free, "size": size, "stream": 0, "pool_id": (0, 0), "time_us": 1}


def segment(address: int, size: int, *blocks: tuple[int, str], **more: Any) -> dict[str, Any]:
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "segment_type": "small" if size <= 2 * MIB else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": [{"size": block, "state": state, "frames": []} for block, state in blocks],
        **more,
    }


def small() -> dict[str, Any]:
    """Two blocks in one segment, one of which is freed."""
    frames = [{"filename": "train.py", "line": 7, "name": "step"}]
    events = [
        event("segment_alloc", 4096, 2 * MIB, frames=frames),
        event("alloc", 4096, 1000, frames=frames),
        event("alloc", 5120, 512, frames=frames),
        event("free_requested", 4096, 1000),
        event("free_completed", 4096, 1000),
    ]
    blocks = [(1024, "inactive"), (512, "active_allocated"), (2 * MIB - 1536, "inactive")]
    return {
        "segments": [segment(4096, 2 * MIB, *blocks)],
        "device_traces": [events],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
    }


def write(path: Path, data: Any) -> Path:
    path.write_bytes(pickle.dumps(data))
    return path
