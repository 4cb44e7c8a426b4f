"""How the ranks of a job find each other and what they tell each other, in the worker of one rank.

A job is plain data: {"file": path, "timeout": seconds} on one machine, or what `torchrun.Torchrun.job` makes.
"""

from __future__ import annotations

import base64
import json
import os
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ..megatron import joint, solo
from ..recipe import Recipe
from .server import LOST_PEER

_POLL = 0.5  # seconds


def join(job: dict[str, Any] | None) -> Callable[[Recipe, int], None]:
    """What makes this process a rank: of this job, or alone if it is None."""
    if job is None:
        return solo.initialize
    if "grace" in job:
        threading.Thread(target=_end_with_peers, args=(job,), daemon=True).start()
    return partial(joint.initialize, store=_store(job), timeout=job["timeout"])


def _store(job: dict[str, Any]) -> Store:
    limit = timedelta(seconds=job["timeout"])
    if "file" in job:
        return FileStore(job["file"], job["world_size"])
    there = TCPStore(job["address"], job["port"], is_master=False, timeout=limit)
    return PrefixStore(job["prefix"], there)


def _end_with_peers(job: dict[str, Any]) -> None:
    """End this process if another rank fails: it may wait for it in a kernel that nothing interrupts."""
    store = _store(job)
    while not store.check(["failed"]):
        time.sleep(_POLL)
    time.sleep(job["grace"])
    os._exit(LOST_PEER)


def times_here(job: dict[str, Any], rank: int) -> int:
    """How often this has been called for this job and rank, this time included."""
    return int(_store(job).add(f"times/{rank}", 1))


def exchange(job: dict[str, Any], rank: int, payload: dict[str, Any], failed: bool) -> list[dict[str, Any] | None]:
    """Tell all processes of a torchrun what this one has, and hear what they have: one answer for each rank.

    None stands for a process that gave none within the job's timeout. `failed` ends the workers of the others.
    """
    store = _store(job)
    if failed:
        store.set("failed", "")
    store.set(f"result/{rank}", _packed(payload))
    keys = [f"result/{other}" for other in range(job["world_size"])]
    deadline = time.monotonic() + job["timeout"]
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_POLL / 10)
    return [_unpacked(store.get(key)) if store.check([key]) else None for key in keys]


def _packed(payload: dict[str, Any]) -> str:
    """The store takes 8 MiB at most."""
    return base64.b64encode(zlib.compress(json.dumps(payload).encode())).decode()


def _unpacked(packed: bytes) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return payload
