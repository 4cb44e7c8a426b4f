"""Measurements on real GPUs: which of them, all ranks of a job or one at a time, and a virtual twin beside them.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ..errors import CannotRunSolo, MeasurementFailed, TooFewGpus, UserError
from ..measurement import Device, Failure, Measurement, Mode, RankMeasurement, read_plain
from ..options import RanksMode
from ..recipe import Recipe
from ..throughput import Timing
from ..virtual_gpu.gpus import Gpu
from ..virtual_gpu.stand_in import stand_ins
from . import adapters, effects, foreign, gpu_locks
from . import ranks as rank_choice
from .launch import Launcher, check_on_gpu, failure_of, recipe_environment, versions
from .nvml import Machine, PhysicalGpu
from .parts import Part, Twin, is_about_peers
from .ranks import Rank, Ranks
from .torchrun import Torchrun
from .workers import CallResult, Workers

GRACE = 30.0
"""Seconds that a rank has left when another one failed: NCCL may still tell it, and its traceback says where it was."""

_LONGEST_WAIT = 6 * 3600.0
"""Seconds to wait for GPUs that other processes hold for their measurements."""

_TELLING = 60.0
"""Seconds that a worker has beyond the limit of what it waits for, to say so itself."""

_MEETINGS = "meetings"
"""Under this name the processes of a torchrun say in which test they are."""

_MOST_TWINS = 8
"""Ranks of a joint job up to which each has a twin; of a larger job one of each kind has."""

_NETWORK = ("NCCL_", "TORCHELASTIC_")
"""Prefixes of variables that workers inherit: a cluster's network, and torchrun. They change nothing in PyTorch's own
memory."""


class GpuLauncher(Launcher):
    """Runs measurements on the real GPUs of this machine, and each recipe on a virtual GPU like them as well.

    A measurement holds the GPUs that it needs by lock files, so that several processes share them one after another.

    Args:
        machine: whose visible GPUs are used.
        known: virtual GPUs, one of which the first one may be.
        timeout: seconds that one worker may take.
        mode: "joint", all ranks of a job at once, "solo", one at a time with its collectives unanswered, or "auto":
            joint where there are GPUs enough.
        torchrun: the processes that measure together with this one.
        occupied: asked before each measurement, says why this very process makes it worthless, or nothing.
    """

    def __init__(
        self,
        machine: Machine,
        known: Mapping[str, Gpu],
        *,
        timeout: float = 600.0,
        mode: RanksMode = "auto",
        torchrun: Torchrun | None = None,
        occupied: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(like(machine.gpus[0], known), timeout=timeout, jobs=1)
        self.gpus = machine.gpus
        self.machine, self.mode, self.torchrun, self._occupied = machine, mode, torchrun, occupied
        self._measured_in: Counter[str] = Counter()  # each test
        self.test_number, self.test_name = 0, ""  # where the session is, which with torchrun all its processes must be
        self._import_time: dict[str, str] = {}

    @property
    def device(self) -> Device:
        """What measurements are made on."""
        gpu = self.gpus[0]
        return Device(key=gpu.key, name=gpu.name, capacity=gpu.capacity, virtual=False)

    @cached_property
    def _description(self) -> dict[str, Any]:
        """See `on_gpu.describe`."""
        with self._held(1) as (gpu,):
            arguments = {"gpu": dataclasses.asdict(gpu)}
            (result,) = self._call_on(gpu, [("pytest_mbmem.measure.on_gpu:describe", arguments)], {}, self.timeout)
        if result.failure is not None:
            raise UserError(f"--mbmem-gpu: CUDA does not start on {self.gpus[0].name}:\n{result.message}")
        return dict(result.value)

    @cached_property
    def twin(self) -> Launcher:
        """On a virtual GPU with the properties of the real ones."""
        found = self._description["gpu"]
        gpu = replace(self.gpu, **{**found, "compute_capability": tuple(found["compute_capability"])})
        twin = Launcher(gpu, timeout=self.timeout)
        twin.progress = self.progress
        return twin

    def on(self, gpu: Gpu) -> Launcher:
        """This one for its own GPU, a virtual one for any other."""
        return self if gpu == self.gpu else self.twin.on(gpu)

    def explain(self, measurement: Measurement) -> Measurement:
        """As `Launcher.explain`, by runs on the virtual twin."""
        return self.twin.explain(measurement)

    def close(self) -> None:
        """End the servers and whatever still runs under them."""
        super().close()
        if "twin" in self.__dict__:
            self.twin.close()

    def leave(self) -> None:
        """Close at the end of a session, with torchrun once all its processes are there.

        It ends them all when one ends that has failed, also the first one, which may not have written its reports yet.
        """
        if self.torchrun is not None and self._server is not None:
            with contextlib.suppress(UserError):
                self._exchanged(self.torchrun, "end", {}, False, self.timeout)
        self.close()

    def command_environment(self) -> dict[str, str]:
        """The environment of the fork server. Each call is told its GPU.

        The server is told none: the name of a MIG device would make torch start CUDA, which no fork could use then.
        """
        found = Workers.command_environment(self)
        pretended = stand_ins()
        if pretended is None:  # what torch compiles can run
            del found["TORCHDYNAMO_DISABLE"], found["TORCH_DISABLE_NATIVE_JIT"]
        else:
            found |= pretended.environment()
        return {
            **found,
            **{name: value for name, value in os.environ.items() if name.startswith(_NETWORK)},
            **self._import_time,
            # torch.cuda.is_available() asks NVML then, which leaves a later fork free to use CUDA
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }

    def _workers_for(self, environment: Mapping[str, str]) -> Workers:
        return self  # which compile on a real GPU

    def call_all(
        self,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        """One after another on one GPU, which is held meanwhile.

        Raises `UserError` if something else uses it before or after.
        """
        with self._held(1) as (gpu,):
            self._check_alone("before", gpu)
            results = self._call_on(gpu, calls, environment, timeout, cwd)
            self._check_alone("after", gpu)
        return results

    def _check_alone(self, when: str, gpu: PhysicalGpu) -> None:
        if problem := self._occupied() or _problem(when, gpu):
            raise UserError(f"--mbmem-gpu: invalid: {problem}")

    def _call_on(
        self,
        gpu: PhysicalGpu,
        calls: Sequence[tuple[str, Mapping[str, Any]]],
        environment: Mapping[str, str],
        timeout: float,
        cwd: Path | None = None,
    ) -> list[CallResult]:
        self._restart_if_needed(environment)
        return super().call_all(calls, {**environment, "CUDA_VISIBLE_DEVICES": gpu.uuid}, timeout, cwd)

    def _restart_if_needed(self, environment: Mapping[str, str]) -> None:
        """Transformer Engine reads some of its variables when it is imported, which the server does once."""
        wanted = {name: value for name, value in environment.items() if name.startswith("NVTE_")}
        if wanted != self._import_time:
            Workers.close(self)
            self._import_time = wanted

    @contextlib.contextmanager
    def one_gpu(self) -> Iterator[dict[str, str]]:
        """Hold one GPU. Yields the environment of a process that sees no other."""
        with self._held(1) as (gpu,):
            yield {"CUDA_VISIBLE_DEVICES": gpu.uuid}

    def _held(self, count: int) -> contextlib.AbstractContextManager[list[PhysicalGpu]]:
        gpus = self.gpus if self.torchrun is None else [self._own_gpu(self.torchrun)]
        # Another job of torchrun may hold a part of what this one needs, and the other way round.
        return gpu_locks.held(gpus, count, _LONGEST_WAIT if self.torchrun is None else self.timeout)

    def _own_gpu(self, torchrun: Torchrun) -> PhysicalGpu:
        if torchrun.local_rank >= len(self.gpus):
            raise UserError(
                f"torchrun: LOCAL_RANK is {torchrun.local_rank}, and {len(self.gpus)} GPUs are visible; start as many "
                f"processes on a machine as it has GPUs: torchrun --nproc-per-node={len(self.gpus)}"
            )
        return self.gpus[torchrun.local_rank]

    # Measuring --------------------------------------------------------------------------------------------------------

    def measure(
        self,
        recipe: Recipe,
        *,
        ranks: Ranks = "distinct",
        count_flops: bool = True,
        check_effects: bool = True,
        timing: Timing | None = None,
    ) -> Measurement:
        """Measure the recipe's ranks on the GPUs, and on the virtual twin.

        What goes wrong is in the measurement's `failure`: that of the rank that failed first. Raises `UserError` when
        the recipe or `ranks` cannot be measured at all, `TooFewGpus` when joint ranks are asked for and need more.
        """
        check_on_gpu(recipe, virtual=False)
        chosen = rank_choice.chosen(recipe, ranks)
        mode = self._mode_of(recipe)
        reported = {rank.rank for rank in chosen}
        if mode == "joint":
            chosen = rank_choice.chosen(recipe, "all")
            if isinstance(ranks, str):
                reported = {rank.rank for rank in chosen}
                ranks = "all" if recipe.world_size <= _MOST_TWINS else ranks
        self._measured_in[self.test_name] += 1
        timing = timing or Timing()
        twin = partial(self._twin, recipe, ranks, count_flops, check_effects)
        if self.torchrun is None:
            part = self._part(recipe, mode, chosen, timing)
            part.twin = twin()
            parts = [part]
        else:
            parts = self._parts_of_all(self.torchrun, recipe, mode, chosen, timing, twin)
        shown = [rank for rank in chosen if rank.rank in reported]
        return self._measurement_of(recipe, mode, shown, parts, check_effects)

    def measure_many(
        self,
        recipes: Sequence[Recipe],
        *,
        ranks: Ranks = "distinct",
        count_flops: bool = True,
        check_effects: bool = True,
    ) -> list[Measurement]:
        """Measure several recipes, one after another."""
        return [
            self.measure(recipe, ranks=ranks, count_flops=count_flops, check_effects=check_effects)
            for recipe in recipes
        ]

    def _mode_of(self, recipe: Recipe) -> Mode:
        there = len(self.gpus) if self.torchrun is None else self.torchrun.world_size
        if self.gpus[0].is_mig:
            there = 1  # NCCL does not connect MIG devices
        if self.mode != "solo" and recipe.world_size <= there:
            return "joint"
        if self.mode == "joint":
            raise TooFewGpus(
                f"the recipe's job has {recipe.world_size} ranks, and {there} "
                + ("processes were started by torchrun" if self.torchrun else f"{self.gpus[0].name} can be used here")
                + "; solo ranks are measured one at a time"
            )
        if problem := self.cannot_run_alone(recipe):
            if self.mode == "solo":
                raise CannotRunSolo(problem)
            raise TooFewGpus(f"the recipe's job has {recipe.world_size} ranks, {there} can be used, and {problem}")
        return "solo"

    def cannot_run_alone(self, recipe: Recipe) -> str | None:
        """Why one rank of the recipe means nothing without the others."""
        split = recipe.parallelism
        if recipe.model.moe is None or (split.ep == split.tp == split.pp == 1):
            return None
        return (
            "solo ranks cannot know how many tokens the others send to an expert "
            f"(ep={split.ep}, tp={split.tp}, pp={split.pp})"
        )

    def _part(self, recipe: Recipe, mode: Mode, chosen: Sequence[Rank], timing: Timing) -> Part:
        """What this process alone finds out."""
        if mode == "solo":
            with self._held(1) as gpus:
                return self._watched(gpus, chosen, lambda: self._solo(gpus[0], recipe, chosen, timing))
        with self._held(recipe.world_size) as gpus:
            return self._watched(gpus, chosen, lambda: self._joint(gpus, recipe, chosen, timing))

    def _watched(self, gpus: Sequence[PhysicalGpu], chosen: Sequence[Rank], run: Callable[[], Part]) -> Part:
        """The part that `run` makes; none if this process holds memory or another one uses a GPU already."""

        def disturbed(when: str) -> tuple[int, str] | None:
            found = ((rank.rank, _problem(when, gpu)) for rank, gpu in zip(chosen, gpus, strict=False))
            return next(((rank, problem) for rank, problem in found if problem is not None), None)

        if (occupied := self._occupied()) is not None:
            return Part(disturbed=(chosen[0].rank, occupied))
        if (problem := disturbed("before")) is not None:
            return Part(disturbed=problem)
        part = run()
        part.disturbed = disturbed("after")
        return part

    def _solo(self, gpu: PhysicalGpu, recipe: Recipe, chosen: Sequence[Rank], timing: Timing) -> Part:
        calls = [_call(recipe, rank, gpu, timing) for rank in chosen]
        results = self._call_on(gpu, calls, recipe_environment(recipe), self.timeout)
        return Part({rank.rank: result for rank, result in zip(chosen, results, strict=True)})

    def _joint(self, gpus: Sequence[PhysicalGpu], recipe: Recipe, chosen: Sequence[Rank], timing: Timing) -> Part:
        environment = recipe_environment(recipe)
        self._restart_if_needed(environment)
        with tempfile.TemporaryDirectory(prefix="mbmem-job-") as folder:
            job = {"file": f"{folder}/store", "world_size": recipe.world_size, "timeout": 0.8 * self.timeout}
            calls = [
                (*_call(recipe, rank, gpu, timing, job=job), {**environment, "CUDA_VISIBLE_DEVICES": gpu.uuid})
                for rank, gpu in zip(chosen, gpus, strict=True)
            ]
            results = self.call_together(calls, self.timeout, min(GRACE, 0.5 * self.timeout))
        return Part({rank.rank: result for rank, result in zip(chosen, results, strict=True)})

    def _parts_of_all(
        self,
        torchrun: Torchrun,
        recipe: Recipe,
        mode: Mode,
        chosen: Sequence[Rank],
        timing: Timing,
        twin: Callable[[], Twin],
    ) -> list[Part]:
        """What each process of a torchrun finds out, the same list in all of them.

        Raises `UserError` in all of them if they do not measure the same, or one of them cannot.
        """
        name = f"measurement-{self.test_number}-{self._measured_in[self.test_name]}"
        what = {"recipe": recipe.digest, "GPU": self.device.key, "driver": self.machine.driver}
        self._meet(torchrun, what)
        try:
            part = self._own_part(torchrun, name, recipe, mode, chosen, timing)
            if torchrun.rank == 0 and not part.has_failed:
                part.twin = twin()
        except (UserError, MeasurementFailed) as error:  # the others must not wait for this one
            part = Part(error=str(error))
        part.ended = time.time()
        limit = (len(chosen) + 3 if mode == "solo" else 4) * self.timeout
        found = self._exchanged(torchrun, name, part.to_json(), part.has_failed, limit)
        missing = [str(number) for number, data in enumerate(found) if data is None]
        if missing:
            raise UserError(f"torchrun: no figures from rank {', '.join(missing)} within {limit:g} s")
        parts = [Part.from_json(data) for data in found if data is not None]
        for number, other in enumerate(parts):
            if other.error is not None:
                raise UserError(f"torchrun: rank {number}: {other.error}")
        return parts

    def _own_part(
        self, torchrun: Torchrun, name: str, recipe: Recipe, mode: Mode, chosen: Sequence[Rank], timing: Timing
    ) -> Part:
        """Of a joint job this process's rank; solo ranks are all the first one's."""
        if mode == "solo":
            return self._part(recipe, mode, chosen, timing) if torchrun.rank == 0 else Part()
        if torchrun.rank >= recipe.world_size:
            return Part()
        rank = chosen[torchrun.rank]
        job = torchrun.job(name, 0.8 * self.timeout, min(GRACE, 0.5 * self.timeout))
        with self._held(1) as (gpu,):

            def run() -> Part:
                call = _call(recipe, rank, gpu, timing, job=job)
                (result,) = self._call_on(gpu, [call], recipe_environment(recipe), self.timeout)
                return Part({rank.rank: result})

            return self._watched([gpu], [rank], run)

    def _meet(self, torchrun: Torchrun, what: Mapping[str, str]) -> None:
        """Wait until all processes of a torchrun are here. Raises `UserError` if they are not in the same test."""
        arguments = {
            "job": torchrun.job(_MEETINGS, self.timeout),
            "rank": torchrun.rank,
            "place": [self.test_number, self._measured_in[self.test_name], self.test_name],
            "what": dict(what),
        }
        result = self._tell("meet", arguments, self.timeout)
        problem = result.message if result.failure is not None else result.value["problem"]
        if problem is not None:
            raise UserError(f"torchrun: {problem}; all must run the same tests in the same order (-p no:randomly)")

    def failed_elsewhere(self, failed: Mapping[str, str]) -> list[tuple[int, str, str]]:
        """At the end of a session under torchrun: rank, test and text of what failed in the other processes.

        `failed`: texts of this process, by test.
        """
        if self.torchrun is None:
            return []
        place = {"job": self.torchrun.job(_MEETINGS, self.timeout), "rank": self.torchrun.rank}
        self._tell("leave", place, self.timeout)
        found = self._exchanged(self.torchrun, "failed", {"failed": list(failed.items())}, False, self.timeout)
        return [
            (rank, test, text)
            for rank, data in enumerate(found)
            if rank != self.torchrun.rank
            for test, text in ([] if data is None else data["failed"])
        ]

    def _exchanged(
        self, torchrun: Torchrun, name: str, payload: Mapping[str, Any], failed: bool, limit: float
    ) -> list[dict[str, Any] | None]:
        """What all processes of a torchrun say under a name, by rank."""
        arguments = {"job": torchrun.job(name, limit), "rank": torchrun.rank, "payload": payload, "failed": failed}
        result = self._tell("exchange", arguments, limit)
        if result.failure is not None:
            raise UserError(f"torchrun: the ranks cannot reach each other: {result.message}\n{result.output}".strip())
        return list(result.value)

    def _tell(self, function: str, arguments: Mapping[str, Any], limit: float) -> CallResult:
        """Call a function of `peers` that ends within `limit` seconds, in a worker without a GPU."""
        call = (f"pytest_mbmem.measure.peers:{function}", arguments)
        return super().call_all([call], {"CUDA_VISIBLE_DEVICES": ""}, limit + _TELLING)[0]

    # Results ----------------------------------------------------------------------------------------------------------

    def _twin(self, recipe: Recipe, ranks: Ranks, count_flops: bool, check_effects: bool) -> Twin:
        """The same on the virtual twin, which also counts what no GPU tells."""
        try:
            found = self.twin.measure(recipe, ranks=ranks, count_flops=count_flops, check_effects=check_effects)
        except UserError as error:
            return Twin(None, {}, f"no virtual twin: {error}")
        kinds = {rank_choice.at(recipe, rank.rank).work: rank for rank in reversed(found.ranks)}
        model_flops = {work: rank.flops_per_step for work, rank in kinds.items()}
        plain = without_recompute(recipe)
        if count_flops and plain != recipe:
            calls = [
                ("pytest_mbmem.measure.worker:count_rank", {"recipe": plain.to_dict(), "rank": rank.rank})
                for rank in kinds.values()
            ]
            results = self.twin.call_all(calls, recipe_environment(plain), self.timeout)
            model_flops = {
                work: (result.value or {}).get("flops_per_step") for work, result in zip(kinds, results, strict=True)
            }
        small = tuple(replace(rank, composition=None) for rank in found.ranks)
        return Twin(replace(found, ranks=small), {kinds[work].rank: flops for work, flops in model_flops.items()})

    def _measurement_of(
        self, recipe: Recipe, mode: Mode, reported: Sequence[Rank], parts: Sequence[Part], check_effects: bool
    ) -> Measurement:
        """Of the ranks to report; what fails on any other is the measurement's failure all the same."""
        results = {number: (part.ended, result) for part in parts for number, result in part.results.items()}
        twin = next((part.twin for part in parts if part.twin is not None), Twin(None, {}))
        counted = twin.counted(recipe)
        ranks: list[RankMeasurement] = []
        failures: list[tuple[tuple[bool, float, int], Failure]] = []  # whether it is for want of a peer, and when
        assumptions: list[str] = []
        for number, (ended, result) in sorted(results.items()):
            if result.failure is not None:
                failures.append(((is_about_peers(result), ended, result.order), failure_of(result, number)))
                continue
            assumptions += result.value["assumptions"]
            if result.value["failure"]:
                failed: Failure = read_plain(Failure, result.value["failure"], "failure")
                failures.append(((False, ended, result.order), failed))
            rank = next((rank for rank in reported if rank.rank == number), None)
            if rank is not None and result.value["rank"] is not None:
                fields = {**result.value["rank"], **counted.get(rank.work, {})}
                ranks.append(RankMeasurement.from_json(fields))
        disturbed = next((part.disturbed for part in parts if part.disturbed is not None), None)
        first = Failure("disturbed", *disturbed) if disturbed is not None else None
        if first is None and failures:
            first = min(failures, key=lambda failure: failure[0])[1]
        if first is None and check_effects:
            first = twin.no_effect if twin.ran else effects.failure(ranks, {})
        return Measurement(
            device=self.device,
            ranks=tuple(ranks),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=recipe.world_size,
            environment=self.versions(mode),
            assumptions=tuple(dict.fromkeys(assumptions)),
            notes=(*adapters.adapter_notes(ranks), *self._notes(recipe, mode, ranks), *twin.notes),
            failure=first,
            mode=mode,
            twin=twin.measurement,
            logs={f"rank{number}": result.output for number, (_, result) in results.items()},
        )

    def versions(self, mode: Mode = "solo") -> dict[str, str]:
        """What a measurement depends on."""
        found = {**versions(), "driver": self.machine.driver, "ranks": mode}
        with contextlib.suppress(UserError):  # what does not start CUDA is the measurement's own failure
            found |= self._description["versions"]
        return found

    def _notes(self, recipe: Recipe, mode: Mode, ranks: Sequence[RankMeasurement]) -> Iterator[str]:
        if any(map(foreign.used_here, self.gpus)):
            yield "a test has started CUDA in the pytest process, whose context stays on the GPU beside this run"
        if mode == "solo" and recipe.world_size > 1:
            yield (
                f"solo: each measured rank of {recipe.world_size} ran alone on one GPU; its collectives took no time "
                "and brought nothing, so that its losses mean nothing"
            )
        for rank in ranks:
            steps = [str(number) for number, loss in enumerate(rank.losses, 1) if loss is None]
            if steps:
                yield f"the loss on rank {rank.rank} is not finite in step {', '.join(steps)}"
            if rank.skipped_steps:
                of = f"{rank.skipped_steps} of {recipe.training.steps} steps"
                yield f"the optimizer skipped {of} on rank {rank.rank}, which then hold less than others"


def like(gpu: PhysicalGpu, known: Mapping[str, Gpu]) -> Gpu:
    """A `Gpu` with what NVML says of a real one; the rest is of the known one of its name, or that is most like it."""

    def distance(other: Gpu) -> tuple[bool, bool, int]:
        other_kind = other.compute_capability != gpu.compute_capability
        return other.name != gpu.name, other_kind, abs(other.capacity - gpu.capacity)

    closest = min(known.values(), key=distance)
    return replace(
        closest, key=gpu.key, name=gpu.name, capacity=gpu.capacity, compute_capability=gpu.compute_capability
    )


def without_recompute(recipe: Recipe) -> Recipe:
    """The recipe whose FLOPs are those of the model alone."""
    memory = recipe.memory
    plain: dict[str, Any] = {
        field.name: field.default
        for field in dataclasses.fields(memory)
        if field.name.startswith(("recompute_", "distribute_saved_"))
    }
    return replace(recipe, memory=replace(memory, **plain))


def _call(
    recipe: Recipe,
    rank: Rank,
    gpu: PhysicalGpu,
    timing: Timing,
    *,
    job: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    has_losses = job is not None or recipe.world_size == 1
    arguments: dict[str, Any] = {
        "recipe": recipe.to_dict(),
        "rank": rank.rank,
        "coordinates": rank.coordinates,
        "stands_for": rank.stands_for,
        "real": {
            "gpu": dataclasses.asdict(gpu),
            "timing": dataclasses.asdict(timing),
            "has_losses": has_losses,
            "ours": _ours(gpu),
        },
    }
    if job is not None:
        arguments["job"] = dict(job)
    return "pytest_mbmem.measure.worker:measure_rank", arguments


def _ours(gpu: PhysicalGpu) -> list[int]:
    """The number of this process, if it uses the GPU."""
    return [os.getpid()] if foreign.used_here(gpu) else []


def _problem(when: str, gpu: PhysicalGpu) -> str | None:
    problem = foreign.problem(gpu, _ours(gpu))
    return None if problem is None else f"{when} the measurement {problem}"
