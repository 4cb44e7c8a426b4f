"""From a recipe to a measurement: which ranks, which processes, which environment and driver; time limits.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from .. import virtual_gpu
from ..errors import UserError
from ..measurement import Device, Failure, FailureKind, Measurement, RankMeasurement
from ..recipe import Recipe
from ..virtual_gpu.build import ensure_driver
from ..virtual_gpu.gpus import Gpu
from . import ranks as rank_choice
from .ranks import Rank, Ranks

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch 2.9 ignored the new name for some settings and later ones warn about the old: both are always set."""

_NOT_INHERITED = ("PYTORCH_", "TORCH", "CUBLAS", "CUDNN_", "CUDA_", "NVIDIA_", "NVTE_", "NCCL_")
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


class Launcher:
    """Runs measurements on one kind of virtual GPU, each in a fork of a server that is started when first needed.

    Args:
        gpu: what the device pretends to be.
        count: number of devices a worker sees.
        timeout: seconds that one worker may take.
        jobs: workers that run at a time; None for one a CPU core, shared with the other workers of pytest-xdist.

    Raises `UserError` from the first call where this machine cannot run a virtual GPU.
    """

    def __init__(self, gpu: Gpu, *, count: int = 1, timeout: float = 600.0, jobs: int | None = None) -> None:
        self.gpu, self.count, self.timeout = gpu, count, timeout
        shared_by = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self.jobs = jobs or max(1, len(os.sched_getaffinity(0)) // shared_by)
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._log: Any = None
        self._next_id = 0

    @property
    def device(self) -> Device:
        """What measurements are made on."""
        return Device(key=f"virtual-{self.gpu.key}", name=self.gpu.name, capacity=self.gpu.capacity, virtual=True)

    def command_environment(self) -> dict[str, str]:
        """The environment of a process that sees the virtual GPU."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or not name.startswith(_NOT_INHERITED)
        }
        preload = [ensure_driver().preload, os.environ.get("LD_PRELOAD", "")]
        return {
            **environment,
            **virtual_gpu.environment(self.gpu, self.count),
            "LD_PRELOAD": ":".join(filter(None, preload)),
            # Nothing here could run what these compile: fused functions run eagerly, and operators that torch 2.14 has
            # in Triton as well take their ATen kernels.
            "TORCHDYNAMO_DISABLE": "1",
            "TORCH_DISABLE_NATIVE_JIT": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with tensor and context parallelism
        }

    def measure(self, recipe: Recipe, *, ranks: Ranks = "distinct", count_flops: bool = True) -> Measurement:
        """Measure the recipe's ranks, alone and one process each.

        What goes wrong in a worker is in the measurement's `failure`. Raises `UserError` when the recipe or `ranks`
        cannot be measured at all.
        """
        check(recipe)
        chosen = rank_choice.chosen(recipe, ranks)
        common = {"recipe": recipe.to_dict(), "virtual": True}
        environment = recipe_environment(recipe)
        calls = [
            ("measure_rank", {**common, "rank": r.rank, "coordinates": r.coordinates, "stands_for": r.stands_for})
            for r in chosen
        ]
        # What a rank computes and sends depends on its pipeline stage alone, so one rank of each stage is counted.
        stages = {r.coordinates["pp"]: r.rank for r in reversed(chosen)} if count_flops else {}
        calls += [("count_rank", {**common, "rank": rank}) for rank in stages.values()]
        results = self._call_all([(f"pytest_mbmem.measure.worker:{n}", a) for n, a in calls], environment, self.timeout)
        counted = dict(zip(stages, results[len(chosen) :], strict=True))
        return self._measurement(recipe, chosen, results[: len(chosen)], counted)

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
        return self._call_all([(target, arguments)], environment or {}, timeout or self.timeout, cwd)[0]

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

    def _measurement(
        self, recipe: Recipe, chosen: list[Rank], measured: list[CallResult], counted: dict[int, CallResult]
    ) -> Measurement:
        ranks: list[RankMeasurement] = []
        failures: list[Failure] = []
        assumptions: list[str] = []
        for rank, result in zip(chosen, measured, strict=True):
            if result.failure is not None:
                failures.append(_failure(result, rank.rank))
                continue
            fields = result.value["rank"]
            assumptions += result.value["assumptions"]
            if result.value["failure"]:
                failures.append(Failure(**result.value["failure"]))
            if fields is None:
                continue
            counts = counted.get(rank.coordinates["pp"], CallResult(value={}))
            if counts.failure is not None:
                failures.append(_failure(counts, rank.rank, "while counting FLOPs: "))
            else:
                fields.update(counts.value)
            ranks.append(RankMeasurement.from_json(fields))
        return Measurement(
            device=self.device,
            ranks=tuple(ranks),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=recipe.world_size,
            environment=versions(),
            assumptions=tuple(dict.fromkeys(assumptions)),
            failure=failures[0] if failures else None,
        )

    def _call_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        """Results in the order of the calls, at most `jobs` of which run at a time."""
        connection = self._connect()
        waiting = list(enumerate(calls))
        running: dict[int, int] = {}  # the request's number -> the call's index
        results: dict[int, CallResult] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    index, (target, arguments) = waiting.pop(0)
                    self._next_id += 1
                    running[self._next_id] = index
                    connection.send(
                        {
                            "id": self._next_id,
                            "target": target,
                            "arguments": dict(arguments),
                            "environment": dict(environment),
                            "timeout": timeout,
                            "cwd": cwd and str(cwd),
                        }
                    )
                answer = connection.recv()
                index = running.pop(answer.pop("id"))
                results[index] = CallResult(**answer)
        except (EOFError, OSError):
            log = self._server_log()
            self.close()
            lost = CallResult(failure="died", message=f"the fork server ended unexpectedly\n{log}".strip())
            return [results.get(i, lost) for i in range(len(calls))]
        except BaseException:  # an interrupt leaves answers underway: the next call starts afresh
            self.close()
            raise
        return [results[i] for i in range(len(calls))]

    def _connect(self) -> Connection:
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the server)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _START_SERVER, str(theirs.fileno()), *sys.path],
                env=self.command_environment(),
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
            raise UserError(f"the measuring process could not start (torch and megatron-core must import):\n{log}")
        return ours

    def _server_log(self) -> str:
        self._log.seek(0)
        return str(self._log.read()[-4000:].decode(errors="replace"))


def check(recipe: Recipe) -> None:
    """Raise `UserError` for a recipe that this version cannot measure."""
    if reasons := recipe.not_yet():
        raise UserError(f"recipe {recipe.name or recipe.digest} cannot be measured yet: {'; '.join(reasons)}")


def recipe_environment(recipe: Recipe) -> dict[str, str]:
    """What the recipe sets in the environment of the process that runs it."""
    allocator = {name: recipe.memory.alloc_conf for name in _ALLOCATOR_VARIABLES if recipe.memory.alloc_conf}
    return {**allocator, **recipe.environment}


def _failure(result: CallResult, rank: int, doing: str = "") -> Failure:
    assert result.failure is not None
    return Failure(result.failure, rank, f"{doing}{result.message}\n{result.output[-4000:]}".strip())


def versions() -> dict[str, str]:
    """What a measurement depends on, as far as it is installed."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("torch", "megatron-core", "transformer-engine", "pytest-mbmem"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
