"""The fork server: a process with torch and Megatron loaded and CUDA untouched, of which each measurement is a fork.

Started by `workers.Workers` with the connection's file descriptor as its first argument. Over it, it takes requests and
answers each once, in any order; several run at a time. When the connection closes it kills what still runs and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from . import place

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


WITHOUT_TRANSFORMER_ENGINE = "MBMEM_WITHOUT_TRANSFORMER_ENGINE"
"""Set in the environment of a server in which it is as if that were not installed."""

LOST_PEER = 75
"""Exit code of a worker that ends because another rank of its job has failed."""

_TELL = signal.SIGUSR1
"""Has a worker that is out of time print where it is."""

_TELLING = 0.2  # seconds for that

_MOST_OUTPUT = 1_000_000  # bytes of a worker's output that are kept, from its end


@dataclass
class _Child:
    request: dict[str, Any]
    pid: int
    pidfd: int  # readable when the process has ended
    folder: Path  # "output" and, from a worker that came to its end, "result"
    deadline: float
    lost_peer: bool = False  # another call of its group failed, for which it has a little time left


def _run(request: dict[str, Any], folder: Path) -> NoReturn:
    """In the child: call the target and leave {"value": ...} or {"error": traceback} in the folder."""
    os.setsid()  # one group, so that the server can kill whatever the target starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with (folder / "output").open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    # Into the output whatever becomes of stderr: pytest in here captures it.
    place.watched_in(request.get("place"))
    faulthandler.register(_TELL, file=os.dup(1), all_threads=True)
    try:
        os.environ.update(request["environment"])
        if request["cwd"]:
            os.chdir(request["cwd"])
        module, _, name = request["target"].partition(":")
        answer = {"value": getattr(importlib.import_module(module), name)(**request["arguments"])}
    except BaseException:  # whatever ends the target, also SystemExit, is its result
        answer = {"error": traceback.format_exc()}
    part = folder / "part"
    part.write_bytes(pickle.dumps(answer))
    part.rename(folder / "result")
    with contextlib.suppress(OSError, ValueError):  # the target may have closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # no exit handlers: the process is a copy of the server


def _start(request: dict[str, Any]) -> _Child:
    folder = Path(tempfile.mkdtemp(prefix="mbmem-worker-"))
    pid = os.fork()
    if pid == 0:
        _run(request, folder)
    return _Child(request, pid, os.pidfd_open(pid), folder, time.monotonic() + request["timeout"])


def _finish(child: _Child) -> dict[str, Any]:
    """The answer to the child's request; its whole process group is gone afterwards."""
    answer: dict[str, Any] = {"value": None, "failure": None, "message": "", "output": ""}
    in_time = bool(wait([child.pidfd], 0))
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, _TELL)
        wait([child.pidfd], _TELLING)  # it does not end by this
    _kill_group(child.pid)
    status = os.waitpid(child.pid, 0)[1]
    os.close(child.pidfd)
    result = child.folder / "result"
    if result.exists():
        received = pickle.loads(result.read_bytes())
        if "value" in received:
            answer["value"] = received["value"]
        else:
            answer.update(failure="error", message=received["error"])
    elif in_time and status == LOST_PEER << 8:
        answer.update(failure="lost peer", message="another rank of the job had failed")
    elif in_time:
        answer.update(failure="died", message=_how_it_died(status))
    elif child.lost_peer:
        grace = child.request["grace"]
        answer.update(failure="lost peer", message=f"no result within {grace:g} s after another rank had failed")
    else:
        answer.update(failure="timeout", message=f"no result within {child.request['timeout']:g} s")
    with contextlib.suppress(FileNotFoundError), (child.folder / "output").open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - _MOST_OUTPUT))
        answer["output"] = stream.read().decode(errors="replace")
    shutil.rmtree(child.folder, ignore_errors=True)
    return answer


def _hurry_peers(failed: _Child, others: Iterable[_Child]) -> None:
    """Without the one that failed, those of its group may wait for ever."""
    group = failed.request.get("group")
    for child in others:
        if group is not None and child.request.get("group") == group and not child.lost_peer:
            child.lost_peer = True
            child.deadline = min(child.deadline, time.monotonic() + child.request["grace"])


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists only after the child's setsid
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _how_it_died(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"the worker was killed by {signal.Signals(-code).name}"
    return f"the worker ended with exit code {code} before it had a result"


def serve(connection: Connection) -> None:
    """Answer requests until the other side closes the connection."""
    children: dict[int, _Child] = {}
    try:
        while True:
            soonest = min((c.deadline for c in children.values()), default=None)
            timeout = None if soonest is None else max(0.0, soonest - time.monotonic())
            ready = wait([connection, *children], timeout)
            if connection in ready:
                child = _start(connection.recv())
                children[child.pidfd] = child
            for pidfd, child in list(children.items()):
                if pidfd in ready or time.monotonic() >= child.deadline:
                    del children[pidfd]
                    answer = _finish(child)
                    value = answer["value"]
                    if answer["failure"] is not None or (isinstance(value, dict) and value.get("failure") is not None):
                        _hurry_peers(child, children.values())
                    connection.send({"id": child.request["id"], **answer})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for child in children.values():
            _finish(child)


def main() -> None:
    """Load what workers need, say so, and serve."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    if os.environ.get(WITHOUT_TRANSFORMER_ENGINE):
        # Megatron (core 0.16 and 0.19) takes its optimizers and norms where it is installed, and they need a GPU.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # importing it is an ImportError then
    for module in ("pytest_mbmem.measure.worker", "pytest_mbmem.item"):
        importlib.import_module(module)
    if sys.modules["torch"].cuda.is_initialized():
        sys.exit("an installed package starts CUDA when it is imported, which no fork of this process could use then")
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forks
    connection.send("ready")
    serve(connection)
