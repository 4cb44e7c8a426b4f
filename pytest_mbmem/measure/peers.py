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

_END = 10**9  # the number of no test


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


def meet(job: dict[str, Any], rank: int, place: list[Any], what: dict[str, Any]) -> dict[str, Any]:
    """Wait until all processes of a torchrun are at the same place of the run: [number of the test, count, its name].

    `what` they measure there must be the same. Returns {"problem": text}, or None in it. One that is behind another
    learns it at once, and the one ahead waits for it there.
    """
    store = _store(job)
    store.set(f"at/{rank}", json.dumps({"place": place, "what": what}))
    deadline = time.monotonic() + job["timeout"]
    others = [other for other in range(job["world_size"]) if other != rank]
    while True:
        there = {other: json.loads(store.get(f"at/{other}")) for other in others if store.check([f"at/{other}"])}
        ahead = [other for other, found in there.items() if found["place"][:2] > place[:2]]
        if ahead:
            names = ", ".join(f"rank {other} at {there[other]['place'][2]}" for other in ahead)
            return {"problem": f"this rank is at {place[2]}, and {names}: it failed or was skipped there before"}
        if len(there) == len(others) and all(found["place"] == place for found in there.values()):
            for name, own in what.items():
                values = list(dict.fromkeys([own, *(found["what"][name] for found in there.values())]))
                if len(values) > 1:
                    return {"problem": f"the ranks differ in their {name}: {', '.join(values)}"}
            return {"problem": None}
        if time.monotonic() > deadline:
            late = [str(o) for o in others if o not in there or there[o]["place"] != place]
            return {"problem": f"rank {', '.join(late)} did not come to {place[2]} within {job['timeout']:g} s"}
        time.sleep(_POLL / 10)


def leave(job: dict[str, Any], rank: int) -> None:
    """Tell those who wait to `meet` this rank that it comes to no more tests."""
    _store(job).set(f"at/{rank}", json.dumps({"place": [_END, 0, "the end of its tests"], "what": {}}))


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
