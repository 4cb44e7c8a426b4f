"""The fork server: a process with torch and Megatron loaded and CUDA untouched, of which each measurement is a fork.

Started by `launch.Launcher` with the connection's file descriptor as its first argument. Over it, it takes requests and
answers each once, in any order; several run at a time. When the connection closes it kills what still runs and ends.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


@dataclass
class _Child:
    request: dict[str, Any]
    pid: int
    pidfd: int
    results: Connection
    output: Path
    deadline: float


def _run(request: dict[str, Any], results: Connection, output: Path) -> NoReturn:
    """In the child: call the target and send {"value": ...} or {"error": traceback}."""
    os.setsid()  # one group, so that the server can kill whatever the target starts
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with output.open("wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        os.environ.update(request["environment"])
        if request["cwd"]:
            os.chdir(request["cwd"])
        module, _, name = request["target"].partition(":")
        answer = {"value": getattr(importlib.import_module(module), name)(**request["arguments"])}
    except BaseException:  # whatever ends the target, also SystemExit, is its result
        answer = {"error": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    results.send(answer)
    os._exit(0)  # no exit handlers: the process is a copy of the server


def _start(request: dict[str, Any]) -> _Child:
    read, write = os.pipe()
    handle, name = tempfile.mkstemp(prefix="mbmem-", suffix=".log")
    os.close(handle)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(request, Connection(write, readable=False), Path(name))
    os.close(write)
    deadline = time.monotonic() + request["timeout"]
    return _Child(request, pid, os.pidfd_open(pid), Connection(read, writable=False), Path(name), deadline)


def _finish(child: _Child) -> dict[str, Any]:
    """The answer to the child's request; its whole process group is gone afterwards."""
    answer: dict[str, Any] = {"value": None, "failure": None, "message": ""}
    try:
        received = child.results.recv() if child.results.poll() else None
    except EOFError:
        received = None
    if received is None and time.monotonic() >= child.deadline:
        answer.update(failure="timeout", message=f"no result within {child.request['timeout']:g} s")
    _kill_group(child.pid)
    status = os.waitpid(child.pid, 0)[1]
    if received is not None and "value" in received:
        answer["value"] = received["value"]
    elif received is not None:
        answer.update(failure="error", message=received["error"])
    elif answer["failure"] is None:
        answer.update(failure="died", message=_how_it_died(status))
    child.results.close()
    os.close(child.pidfd)
    answer["output"] = child.output.read_text(errors="replace")
    child.output.unlink()
    return answer


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
            ready = wait([connection, *(c.results for c in children.values()), *children], timeout)
            if connection in ready:
                child = _start(connection.recv())
                children[child.pidfd] = child
            for pidfd, child in list(children.items()):
                if pidfd in ready or child.results in ready or time.monotonic() >= child.deadline:
                    del children[pidfd]
                    connection.send({"id": child.request["id"], **_finish(child)})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        for child in children.values():
            _finish(child)


def main() -> None:
    """Load what workers need, say so, and serve."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    for module in ("pytest_mbmem.measure.worker", "pytest_mbmem.item"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forks
    connection.send("ready")
    serve(connection)
