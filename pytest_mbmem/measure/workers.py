"""Worker processes: forks of a server that has torch and Megatron loaded, and the calls that are made in them.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..measurement import FailureKind
from ..progress import INTERVAL, Calls, Progress
from ..te import installation
from .server import WITHOUT_TRANSFORMER_ENGINE

_NOT_INHERITED = ("PYTORCH_", "TORCH", "CUBLAS", "CUDNN_", "CUDA_", "NVIDIA_", "NVTE_", "NCCL_", "MBMEM_GPU_")
"""Prefixes of variables that can change what is allocated: a recipe states them, the caller's shell does not."""

_INHERITED = ("CUDA_HOME", "CUDA_PATH", "TORCH_HOME")
"""Folders, in spite of their prefix."""

_START_SERVER = "import sys; sys.path[:] = sys.argv[2:]; from pytest_mbmem.measure.server import main; main()"
"""With this process's module path, so that workers import what it would."""

_START_TIMEOUT = 300.0  # seconds for a cold import of torch and Megatron


@dataclass(frozen=True)
class CallResult:
    """How a call in a worker ended: `value` (plain data), or `failure` with a message; `output` is what it printed."""

    value: Any = None
    failure: FailureKind | None = None
    message: str = ""
    output: str = ""
    order: int = 0  # in which it ended among those that were made with it


class Workers:
    """Makes calls in worker processes of their own. Which environment these see is what subclasses decide.

    Args:
        timeout: seconds that one worker may take.
        jobs: workers that run at a time; None for one a CPU core, shared with the other workers of pytest-xdist.
    """

    def __init__(self, *, timeout: float = 600.0, jobs: int | None = None) -> None:
        self.timeout = timeout
        self.progress: Progress | None = None  # what is told of the calls while they are made
        shared_by = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self.jobs = jobs or max(1, len(os.sched_getaffinity(0)) // shared_by)
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: Any = None
        self._next_id = self._next_group = 0

    def command_environment(self) -> dict[str, str]:
        """The environment of a worker process."""
        return {
            **{
                name: value
                for name, value in os.environ.items()
                if name in _INHERITED or not name.startswith(_NOT_INHERITED)
            },
            # Nothing here could run what these compile: fused functions run eagerly, and operators that torch 2.14 has
            # in Triton as well take their ATen kernels.
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with tensor and context parallelism
        }

    def call(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
    ) -> CallResult:
        """Call "module:function" with plain data as arguments in a worker of its own."""
        return self.call_all([(target, arguments)], environment or {}, timeout or self.timeout, cwd)[0]

    def close(self) -> None:
        """End the server and whatever still runs under it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
            self._server = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def leave(self) -> None:
        """Close at the end of a session."""
        self.close()

    def call_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        """Results in the order of the calls, at most `jobs` of which run at a time."""
        common = {"environment": dict(environment), "timeout": timeout, "cwd": cwd and str(cwd)}
        return self._answers([{"target": t, "arguments": dict(a), **common} for t, a in calls], self.jobs)

    def call_together(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any], Mapping[str, str]]],
        timeout: float,
        grace: float,
    ) -> list[CallResult]:
        """Make calls that need each other, each with an environment of its own, all at the same time.

        When one fails, those that have not ended `grace` seconds later are ended ("lost peer").
        """
        self._next_group += 1
        common = {"timeout": timeout, "cwd": None, "group": self._next_group, "grace": grace}
        requests = [{"target": t, "arguments": dict(a), "environment": dict(e), **common} for t, a, e in calls]
        return self._answers(requests, len(requests))

    def _answers(self, requests: Sequence[dict[str, Any]], jobs: int) -> list[CallResult]:
        if self.progress is None:
            return self._exchange(requests, jobs, None)
        with self.progress.following(requests) as calls:
            return self._exchange(requests, jobs, calls)

    def _exchange(self, requests: Sequence[dict[str, Any]], jobs: int, calls: Calls | None) -> list[CallResult]:
        connection = self._connect()
        waiting = list(enumerate(requests))
        running: dict[int, int] = {}  # the request's number -> the call's index
        results: dict[int, CallResult] = {}
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    index, request = waiting.pop(0)
                    self._next_id += 1
                    running[self._next_id] = index
                    if calls is not None:
                        calls.began(index)
                    connection.send({"id": self._next_id, **request})
                while calls is not None and not connection.poll(INTERVAL):
                    calls.look()
                answer = connection.recv()
                index = running.pop(answer.pop("id"))
                if calls is not None:
                    calls.ended(index)
                results[index] = CallResult(**answer, order=len(results))
        except (EOFError, OSError):
            log = self._server_log()
            self.close()
            lost = CallResult(failure="died", message=f"the fork server ended unexpectedly\n{log}".strip())
            return [results.get(i, lost) for i in range(len(requests))]
        except BaseException:  # an interrupt leaves answers underway: the next call starts afresh
            self.close()
            raise
        return [results[i] for i in range(len(requests))]

    def _connect(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        environment = self.command_environment()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _START_SERVER, str(theirs.fileno()), *sys.path],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        ready = False
        with contextlib.suppress(EOFError, OSError):
            ready = ours.poll(_START_TIMEOUT) and ours.recv() == "ready"
        if not ready:
            log = self._server_log()
            self.close()
            why = "torch and megatron-core must import"
            if WITHOUT_TRANSFORMER_ENGINE not in environment and (problem := installation.problem()):
                why = f"megatron-core imports Transformer Engine where it is installed: {problem}"
                log = log.strip().rpartition("\n")[2]
            raise UserError(f"the measuring process could not start ({why}):\n{log}")
        return ours

    def _server_log(self) -> str:
        self._log.seek(0)
        return str(self._log.read()[-4000:].decode(errors="replace"))
