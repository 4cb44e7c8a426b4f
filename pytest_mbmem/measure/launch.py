"""From a recipe to a measurement: which ranks, which processes, which environment and driver; time limits.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import outside, virtual_gpu
from ..errors import UserError
from ..installed import versions_of
from ..measurement import Device, Failure, Measurement, RankMeasurement, read_plain
from ..oom import Diagnosis
from ..recipe import Recipe
from ..te import hardware, installation
from ..virtual_gpu.build import cache_folder, ensure_driver, package_folder
from ..virtual_gpu.gpus import Gpu
from . import adapters, effects
from . import ranks as rank_choice
from .ranks import Rank, Ranks, Work
from .workers import CallResult, Workers

_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch 2.9 ignored the new name for some settings and later ones warn about the old: both are always set."""


_NO_COMPILING = "TORCHDYNAMO_DISABLE"
"""Turns torch.compile off in a process ("1"), once for all: its decorators look when a module is imported."""


class Launcher(Workers):
    """Runs measurements on one kind of virtual GPU, each in a fork of a server that is started when first needed.

    Args:
        gpu: what the device pretends to be.
        count: number of devices a worker sees.
        timeout: seconds that one worker may take.
        jobs: workers that run at a time; None for one a CPU core, shared with the other workers of pytest-xdist.

    Raises `UserError` from the first call where this machine cannot run a virtual GPU.
    """

    def __init__(self, gpu: Gpu, *, count: int = 1, timeout: float = 600.0, jobs: int | None = None) -> None:
        super().__init__(timeout=timeout, jobs=jobs)
        self.gpu, self.count = gpu, count
        self.diagnoses: dict[object, Diagnosis] = {}  # that `explain` made
        self._compiling: _Compiling | None = None

    @property
    def device(self) -> Device:
        """What measurements are made on."""
        return Device(key=f"virtual-{self.gpu.key}", name=self.gpu.name, capacity=self.gpu.capacity, virtual=True)

    def on(self, gpu: Gpu) -> Launcher:
        """The same for another virtual GPU, in forks of the same server. Needs no closing."""
        return self if gpu == self.gpu else _Elsewhere(self, gpu)

    def command_environment(self) -> dict[str, str]:
        """The environment of a process that sees the virtual GPU."""
        driver = ensure_driver()
        return {
            **super().command_environment(),
            **virtual_gpu.environment(self.gpu, self.count),
            **driver.environment,
            "LD_PRELOAD": ":".join(filter(None, (driver.preload, os.environ.get("LD_PRELOAD", "")))),
        }

    def call_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        """Results in the order of the calls, at most `jobs` of which run at a time."""
        return Workers.call_all(self._workers_for(environment), calls, environment, timeout, cwd)

    def _workers_for(self, environment: Mapping[str, str]) -> Workers:
        """Those that calls with this environment are made in."""
        if environment.get(_NO_COMPILING) != "0":
            return self
        if package_folder("triton") is None:
            raise UserError(
                "training.jit_fusion: 'compiled' needs Triton, and it is not installed ('pip install triton')"
            )
        if self._compiling is None:
            self._compiling = _Compiling(self.gpu, count=self.count, timeout=self.timeout, jobs=self.jobs)
        self._compiling.progress = self.progress
        return self._compiling

    def close(self) -> None:
        """End the servers and whatever still runs under them."""
        super().close()
        if self._compiling is not None:
            self._compiling.close()

    def measure(
        self, recipe: Recipe, *, ranks: Ranks = "distinct", count_flops: bool = True, check_effects: bool = True
    ) -> Measurement:
        """Measure the recipe's ranks, alone and one process each.

        With `check_effects`, a memory setting that changes nothing on any rank is a failure ("no effect"), which tells
        why. What goes wrong in a worker is in the measurement's `failure`. Raises `UserError` when the recipe or
        `ranks` cannot be measured at all.
        """
        return self.measure_many([recipe], ranks=ranks, count_flops=count_flops, check_effects=check_effects)[0]

    def measure_many(
        self,
        recipes: Sequence[Recipe],
        *,
        ranks: Ranks = "distinct",
        count_flops: bool = True,
        check_effects: bool = True,
    ) -> list[Measurement]:
        """Measure several recipes as `measure` does each, in the order of the recipes.

        The workers of recipes that set the same environment run side by side.
        """
        jobs = [self._job(recipe, ranks, count_flops, check_effects) for recipe in recipes]
        environments = [recipe_environment(recipe) for recipe in recipes]
        results: dict[int, Measurement] = {}
        while left := [index for index in range(len(recipes)) if index not in results]:
            environment = environments[left[0]]
            alike = [index for index in left if environments[index] == environment]
            answers = iter(self.call_all([c for i in alike for c in jobs[i][0]], environment, self.timeout))
            for index in alike:
                calls, finish = jobs[index]
                results[index] = finish([next(answers) for _ in calls])
        return [results[index] for index in range(len(recipes))]

    def versions(self) -> dict[str, str]:
        """What a measurement depends on."""
        return versions()

    def cannot_run_alone(self, recipe: Recipe) -> str | None:
        """Why one rank of the recipe means nothing without the others; on a virtual GPU what they send is assumed."""
        return None

    def explain(self, measurement: Measurement) -> Measurement:
        """The measurement, whose failure also has why memory ran out and what would help: `failure.shortage.diagnosis`.

        Takes several runs of the failing rank, once for the same failure. Raises `UserError` for a measurement that did
        not run out of memory, or of no recipe.
        """
        from .oom import explained

        return explained(self, measurement)

    def _job(
        self, recipe: Recipe, ranks: Ranks, count_flops: bool, check_effects: bool
    ) -> tuple[list[tuple[str, dict[str, Any]]], Callable[[list[CallResult]], Measurement]]:
        """The calls that measure the recipe, and what makes a measurement of their results."""
        check_on_gpu(recipe, virtual=True)
        hardware.check(recipe, self.gpu)
        chosen = rank_choice.chosen(recipe, ranks)
        common = {"recipe": recipe.to_dict()}
        calls = [
            ("measure_rank", {**common, "rank": r.rank, "coordinates": r.coordinates, "stands_for": r.stands_for})
            for r in chosen
        ]
        # Ranks with equal work compute and send the same, so one of them is counted.
        workers = {r.work: r.rank for r in reversed(chosen)} if count_flops else {}
        calls += [("count_rank", {**common, "rank": rank}) for rank in workers.values()]
        # The effect of a setting depends on the pipeline stage alone.
        probes = effects.probes(recipe) if check_effects else {}
        probed = [
            next(r for r in chosen if r.coordinates["pp"] == pp) for pp in {r.coordinates["pp"]: 0 for r in chosen}
        ]
        calls += [
            ("probe_rank", {"recipe": probe.to_dict(), "rank": r.rank}) for probe in probes.values() for r in probed
        ]

        def finish(results: list[CallResult]) -> Measurement:
            answers = iter(results)
            measured = [next(answers) for _ in chosen]
            counted = {work: next(answers) for work in workers}
            without = {name: {r.rank: next(answers) for r in probed} for name in probes}
            return self._measurement(recipe, chosen, measured, counted, without, check_effects)

        return [(f"pytest_mbmem.measure.worker:{name}", arguments) for name, arguments in calls], finish

    def _measurement(
        self,
        recipe: Recipe,
        chosen: list[Rank],
        measured: list[CallResult],
        counted: dict[Work, CallResult],
        without: dict[str, dict[int, CallResult]],
        check_effects: bool,
    ) -> Measurement:
        ranks: list[RankMeasurement] = []
        failures: list[Failure] = []
        assumptions: list[str] = []
        for rank, result in zip(chosen, measured, strict=True):
            if result.failure is not None:
                failures.append(failure_of(result, rank.rank))
                continue
            fields = result.value["rank"]
            assumptions += result.value["assumptions"]
            if result.value["failure"]:
                failures.append(read_plain(Failure, result.value["failure"], "failure"))
            if fields is None:
                continue
            counts = counted.get(rank.work, CallResult(value={}))
            if counts.failure is not None:
                failures.append(failure_of(counts, rank.rank, "while counting FLOPs: "))
            else:
                fields.update(counts.value)
            fields["outside"] = outside.estimate(self.gpu, (counts.value or {}).get("collective_bytes"))
            ranks.append(RankMeasurement.from_json(fields))
        for name, runs in without.items():
            failures += [failure_of(c, r, f"without {name}: ") for r, c in runs.items() if c.failure is not None]
        probed = {name: {r: c.value for r, c in results.items()} for name, results in without.items()}
        notes = adapters.adapter_notes(ranks)
        if check_effects and not failures:
            notes += effects.notes(ranks, probed)
            failures += filter(None, [effects.failure(ranks, probed)])
        return Measurement(
            device=self.device,
            ranks=tuple(ranks),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=recipe.world_size,
            environment=versions(),
            assumptions=tuple(dict.fromkeys([*assumptions, *([outside.assumption(self.gpu)] if ranks else [])])),
            notes=notes,
            failure=failures[0] if failures else None,
            logs=_logs(chosen, measured, counted, without),
        )


class _Compiling(Launcher):
    """Workers in which torch.compile is on from the start, as its decorators ask when Megatron is imported."""

    def command_environment(self) -> dict[str, str]:
        found = super().command_environment()
        del found[_NO_COMPILING]
        return {
            **found,
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder("inductor")),
            "TRITON_CACHE_DIR": str(cache_folder("triton")),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the worker itself, without processes beside it
        }

    def _workers_for(self, environment: Mapping[str, str]) -> Workers:
        return self


class _Elsewhere(Launcher):
    """Another virtual GPU: the driver reads what it is when a worker first calls it."""

    def __init__(self, launcher: Launcher, gpu: Gpu) -> None:
        super().__init__(gpu, count=launcher.count, timeout=launcher.timeout, jobs=launcher.jobs)
        self._launcher = launcher
        self.diagnoses = launcher.diagnoses

    def call_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        environment = {**virtual_gpu.environment(self.gpu, self.count), **environment}
        return self._launcher.call_all(calls, environment, timeout, cwd)


def check(recipe: Recipe) -> None:
    """Raise `UserError` for a recipe whose settings exclude each other, or that this version cannot measure."""
    from .. import incompatibilities

    incompatibilities.check(recipe)
    if reasons := recipe.not_yet():
        raise UserError(f"{recipe.origin[0]} cannot be measured yet: {'; '.join(reasons)}")


def check_on_gpu(recipe: Recipe, *, virtual: bool) -> None:
    """As `check`, and for one that asks for another Transformer Engine than such a GPU can have here."""
    check(recipe)
    installation.check(recipe, virtual=virtual)


def recipe_environment(recipe: Recipe) -> dict[str, str]:
    """What the recipe sets in the environment of the process that runs it."""
    compiling = {_NO_COMPILING: "0"} if recipe.training.jit_fusion == "compiled" else {}
    return {**allocator_environment(recipe.memory.alloc_conf), **compiling, **recipe.environment}


def allocator_environment(alloc_conf: str) -> dict[str, str]:
    """What gives a process these settings of the allocator."""
    return {name: alloc_conf for name in _ALLOCATOR_VARIABLES if alloc_conf}


def _logs(
    chosen: Sequence[Rank],
    measured: Sequence[CallResult],
    counted: Mapping[Work, CallResult],
    without: Mapping[str, Mapping[int, CallResult]],
) -> dict[str, str]:
    logs = {f"rank{rank.rank}": result.output for rank, result in zip(chosen, measured, strict=True)}
    first = {rank.work: rank.rank for rank in reversed(chosen)}
    logs |= {f"rank{first[work]}-counting": result.output for work, result in counted.items()}
    logs |= {f"rank{rank}-without-{name}": r.output for name, probed in without.items() for rank, r in probed.items()}
    return logs


def failure_of(result: CallResult, rank: int, doing: str = "") -> Failure:
    """Of a call that did not come to its end."""
    assert result.failure is not None
    return Failure(result.failure, rank, f"{doing}{result.message}\n{result.output[-4000:]}".strip())


def versions() -> dict[str, str]:
    """What a measurement depends on, as far as it is installed."""
    packages = ("torch", "megatron-core", "transformer-engine", "pytest-mbmem")
    return {"python": ".".join(platform.python_version_tuple()[:2]), **versions_of(packages)}
