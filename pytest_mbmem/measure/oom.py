"""Why memory ran out: repeats the failing rank's allocations under other circumstances, and tries what would help.

Runs in the pytest process, so it imports neither torch nor Megatron. It costs several runs of one rank, so it is only
asked for when somebody will read the answer.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import alloc_conf as settings
from ..errors import UserError
from ..measurement import Failure, Measurement, RankMeasurement
from ..oom import Circumstance, Diagnosis, Remedy, Shortage, Trial, diagnose, taken_outside
from ..recipe import Recipe
from ..remedies import EXPANDABLE, remedies, with_expandable_segments
from ..virtual_gpu.gpus import MOST_BYTES
from . import ranks as rank_choice
from .ranks import Rank

if TYPE_CHECKING:
    from ..virtual_gpu.gpus import Gpu
    from .launch import Launcher
    from .workers import CallResult

_MOST_STEPS = 2
"""Of training to measure a remedy: optimizer state is there from the second step on."""


def explained(launcher: Launcher, measurement: Measurement) -> Measurement:
    """The measurement, whose failure says why memory ran out. Raises `UserError` if it did not fail so."""
    failure, shortage = _failed(measurement)
    if shortage.diagnosis is not None:
        return measurement
    if measurement.recipe is None:
        raise UserError("the measurement is of no recipe, so that its run cannot be repeated")
    recipe = Recipe.from_dict(measurement.recipe, "recipe")
    key = (launcher.gpu, recipe.digest, failure.rank, shortage)
    if key not in launcher.diagnoses:
        launcher.diagnoses[key] = _Investigation(launcher, recipe, failure.rank, shortage).diagnosis()
    return _with(measurement, launcher.diagnoses[key])


def explained_by_history(launcher: Launcher, measurement: Measurement, file: Path, request: int) -> Measurement:
    """The same of a test that ran whole in a worker, by its history in the file: `request` is the event that failed."""
    _, shortage = _failed(measurement)
    replays = _Replays(launcher, shortage, file, {}, request)
    trials = [replays.trial("without limit"), *replays.trials()]
    verdict, reason = diagnose(shortage, trials, complete=False)
    return _with(measurement, Diagnosis(verdict, reason, tuple(trials)))


def not_explained(measurement: Measurement, reason: str) -> Measurement:
    """The measurement, whose failure says why nothing more is known."""
    return _with(measurement, Diagnosis("unknown", reason))


def _failed(measurement: Measurement) -> tuple[Failure, Shortage]:
    failure = measurement.failure
    if failure is None or failure.kind != "out of memory":
        how = "did not fail" if failure is None else f"failed otherwise: {failure.kind}"
        raise UserError(f"the measurement {how}; only one that ran out of memory can be explained")
    if failure.shortage is None:
        raise UserError("the measurement does not say what the allocator found when memory ran out")
    return failure, failure.shortage


def _with(measurement: Measurement, diagnosis: Diagnosis) -> Measurement:
    failure, shortage = _failed(measurement)
    return replace(measurement, failure=replace(failure, shortage=replace(shortage, diagnosis=diagnosis)))


def _device(gpu: Gpu, alloc_conf: str, usable: int | None) -> dict[str, str]:
    """The environment of a device on which PyTorch can have so many bytes; None: without limit.

    Settings may allow PyTorch a fraction of the whole device, which for that reason stays as large as it is: the
    context takes what is not usable. Without limit it is so large that the fraction is.
    """
    total = gpu.capacity
    if usable is None:
        usable = MOST_BYTES - gpu.context_bytes
        fraction = float(settings.parse(alloc_conf, "memory.alloc_conf").get("per_process_memory_fraction", 1))
        total = math.ceil(MOST_BYTES / (fraction or 1))
    return {"MBMEM_GPU_CAPACITY": str(total), "MBMEM_GPU_CONTEXT_BYTES": str(total - usable)}


class _Replays:
    """Of a recorded history, on virtual GPUs of several sizes and with several settings of the allocator.

    With `request`, up to that event: an allocation that failed. Those that failed before it are left out.
    """

    def __init__(
        self,
        launcher: Launcher,
        shortage: Shortage,
        file: Path,
        environment: Mapping[str, str],
        request: int | None = None,
    ) -> None:
        self._launcher, self._shortage, self._file = launcher, shortage, file
        self._environment, self._request = environment, request

    def trials(self) -> list[Trial]:
        """All that tell the verdicts apart, as far as those before leave it open."""
        found = [self.trial("as recorded")]
        if found[0].fits is False and not self._shortage.expandable_segments:
            found.append(self.trial("expandable segments"))
        if found[-1].fits is False and taken_outside(self._shortage, self._launcher.gpu.usable):
            found.append(self.trial("nothing outside PyTorch"))
        return found

    def trial(self, under: Circumstance) -> Trial:
        """Replay under one circumstance."""
        from .launch import allocator_environment

        gpu, conf = self._launcher.gpu, self._shortage.alloc_conf
        usable: int | None = self._shortage.usable
        if under == "expandable segments":
            conf = with_expandable_segments(conf)
        elif under == "without limit":
            usable = None
        elif under == "nothing outside PyTorch":
            usable = min(self._shortage.limit, gpu.usable)
        environment = {**self._environment, **allocator_environment(conf), **_device(gpu, conf, usable)}
        arguments = {"file": str(self._file), "request": self._request}
        result = self._launcher.call(
            "pytest_mbmem.measure.oom_worker:replay_history", arguments, environment=environment
        )
        if result.failure is not None:
            return Trial(under, replayed=True, fits=None, note=_reason(result))
        value = result.value
        if "refused" in value:
            return Trial(under, replayed=True, fits=None, note=value["refused"])
        failed = value["failed"]
        return Trial(
            under,
            replayed=True,
            fits=failed is None,
            peak_allocated=value["peak_allocated"],
            peak_reserved=value["peak_reserved"],
            failed_request=failed and failed["requested"],
        )


class _Investigation:
    """Of one failing rank of a recipe."""

    def __init__(self, launcher: Launcher, recipe: Recipe, rank: int, shortage: Shortage) -> None:
        self._launcher, self._recipe, self._shortage = launcher, recipe, shortage
        self._rank = rank_choice.at(recipe, rank)

    def diagnosis(self) -> Diagnosis:
        """All trials, the verdict, and the remedies that are worth a try by it."""
        trials, need = self._trials()
        verdict, reason = diagnose(self._shortage, trials, complete=True)
        advised = remedies(self._recipe, expandable_segments=self._shortage.expandable_segments)
        steps = min(self._recipe.training.steps, _MOST_STEPS)
        if verdict == "unknown" or need is None:
            advised = [replace(r, note=r.note or "not measured") for r in advised]
            return Diagnosis(verdict, reason, tuple(trials), tuple(advised))
        if verdict == "fragmentation":
            advised = [self._enough(r, need, trials[-1]) for r in advised]
            steps = self._recipe.training.steps
        else:
            advised = self._measured(advised, _peak(need, steps), steps)
        return Diagnosis(verdict, reason, tuple(trials), tuple(advised), self._rank.rank, steps)

    def _trials(self) -> tuple[list[Trial], RankMeasurement | None]:
        """Those that the verdict needs, and what the rank needs on a device without limit."""
        with tempfile.TemporaryDirectory(prefix="mbmem-oom-") as folder:
            file = Path(folder) / "history.pickle"
            arguments = {"file": str(file), **self._arguments(self._recipe, self._rank)}
            call = ("pytest_mbmem.measure.oom_worker:measure_and_record", arguments)
            (result,) = self._run([call], self._recipe, None)
            trial, need = _run_trial("without limit", result)
            if trial.fits is None:
                return [trial], None
            replays = _Replays(self._launcher, self._shortage, file, self._recipe.environment)
            trials = [trial, *replays.trials()]
        if trials[-1].under == "expandable segments" and trials[-1].fits:  # so it seems: see whether it is so
            trials.append(self._with_expandable_segments())
        return trials, need if trial.fits else None

    def _with_expandable_segments(self) -> Trial:
        recipe = self._recipe.but(alloc_conf=with_expandable_segments(self._recipe.memory.alloc_conf))
        call = ("pytest_mbmem.measure.worker:measure_rank", {**self._arguments(recipe, self._rank), "record": False})
        (result,) = self._run([call], recipe, self._shortage.usable)
        return _run_trial("expandable segments", result)[0]

    @staticmethod
    def _enough(remedy: Remedy, need: RankMeasurement, run: Trial) -> Remedy:
        """Where the run with expandable segments fits, it is all that is said of the remedies."""
        if remedy.name != EXPANDABLE:
            return replace(remedy, note=remedy.note or "not measured: expandable segments are enough")
        assert run.peak_allocated is not None
        return replace(remedy, peak_allocated=run.peak_allocated, saved=need.peak() - run.peak_allocated, fits=True)

    def _measured(self, advised: Sequence[Remedy], before: int, steps: int) -> list[Remedy]:
        """The remedies, each with expandable segments, which are the first: what they save is against these alone.

        They run on a device without limit, and on this one where that does not tell whether they fit: if all that was
        ever reserved fits, every request would have been granted.
        """
        recipes = {r.name: self._changed(r, steps) for r in advised if not r.note}
        ranks = {name: self._counterparts(recipe) for name, recipe in recipes.items()}
        without_limit = self._measure_all(recipes, ranks, None)
        found: dict[str, Remedy] = {}
        undecided: list[str] = []
        for remedy in advised:
            if remedy.name not in recipes:
                found[remedy.name] = remedy
                continue
            results = [_run_trial("without limit", result) for result in without_limit[remedy.name]]
            measured = [rank for _, rank in results if rank is not None]
            problem = next((trial.note for trial, _ in results if not trial.fits), "")
            if problem or not measured:
                found[remedy.name] = replace(remedy, note=problem)
                continue
            peak = max(rank.peak() for rank in measured)
            fits: bool | None = None
            if peak > self._shortage.usable or remedy.name == EXPANDABLE:  # as its replay said
                fits = False
            elif all(rank.peak("reserved") <= self._shortage.usable for rank in measured):
                fits = True
            else:
                undecided.append(remedy.name)
            found[remedy.name] = replace(remedy, peak_allocated=peak, saved=before - peak, fits=fits)
            if remedy.name == EXPANDABLE:
                before = peak
        on_this = self._measure_all(recipes, {name: ranks[name] for name in undecided}, self._shortage.usable)
        for name, answers in on_this.items():
            fitting = [_run_trial("as recorded", answer)[0].fits for answer in answers]
            found[name] = replace(found[name], fits=None if None in fitting else all(fitting))
        return list(found.values())

    def _changed(self, remedy: Remedy, steps: int) -> Recipe:
        conf = with_expandable_segments(self._recipe.memory.alloc_conf)
        return self._recipe.but(**{"alloc_conf": conf, "steps": steps, **remedy.changes})

    def _counterparts(self, other: Recipe) -> list[Rank]:
        """The ranks of another recipe that have the failing one's place in the job; of a single pipeline stage that is
        split, the first and the last."""
        mine, theirs, here = self._recipe.parallelism, other.parallelism, self._rank.coordinates
        at = {name: _scaled(here[name], getattr(mine, name), getattr(theirs, name)) for name in ("tp", "cp", "dp")}
        stages = {_scaled(here["pp"], mine.pp, theirs.pp), *([theirs.pp - 1] if mine.pp == 1 else [])}
        within = at["tp"] + theirs.tp * (at["cp"] + theirs.cp * at["dp"])
        return [rank_choice.at(other, within + theirs.tp * theirs.cp * theirs.dp * stage) for stage in sorted(stages)]

    def _measure_all(
        self, recipes: Mapping[str, Recipe], ranks: Mapping[str, Sequence[Rank]], usable: int | None
    ) -> dict[str, list[CallResult]]:
        """Results by name of the remedy and rank; all of them have the same environment."""
        names = [name for name, several in ranks.items() for _ in several]
        calls = [
            (
                "pytest_mbmem.measure.worker:measure_rank",
                {**self._arguments(recipes[name], rank), "record": False},
            )
            for name, several in ranks.items()
            for rank in several
        ]
        results: dict[str, list[CallResult]] = {name: [] for name in ranks}
        if calls:
            answers = self._run(calls, recipes[names[0]], usable)
            for name, answer in zip(names, answers, strict=True):
                results[name].append(answer)
        return results

    def _run(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], recipe: Recipe, usable: int | None
    ) -> list[CallResult]:
        """On a device on which PyTorch can have so many bytes; None: without limit."""
        from .launch import recipe_environment

        device = _device(self._launcher.gpu, recipe.memory.alloc_conf, usable)
        environment = {**recipe_environment(recipe), **device}
        return self._launcher.call_all(calls, environment, self._launcher.timeout)

    @staticmethod
    def _arguments(recipe: Recipe, rank: Rank) -> dict[str, Any]:
        place = {"rank": rank.rank, "coordinates": rank.coordinates, "stands_for": rank.stands_for}
        return {"recipe": recipe.to_dict(), **place}


def _run_trial(under: Circumstance, result: CallResult) -> tuple[Trial, RankMeasurement | None]:
    """What a run of `measure_rank` says."""
    if result.failure is not None:
        return Trial(under, replayed=False, fits=None, note=_reason(result)), None
    failure, fields = result.value["failure"], result.value["rank"]
    rank = None if fields is None else RankMeasurement.from_json(fields)
    if failure is not None and failure["kind"] != "out of memory":
        return Trial(
            under, replayed=False, fits=None, note=f"{failure['kind']}: {_first_line(failure['message'])}"
        ), rank
    shortage = failure["shortage"] if failure is not None else None
    trial = Trial(
        under,
        replayed=False,
        fits=failure is None,
        peak_allocated=None if rank is None else rank.peak(),
        peak_reserved=None if rank is None else rank.peak("reserved"),
        failed_request=shortage and shortage["requested"],
        note="" if failure is None else "out of memory",
    )
    return trial, rank


def _peak(rank: RankMeasurement, steps: int) -> int:
    """Of the first so many steps."""
    return max(figures.peak["allocated"] for figures in rank.phases if figures.step <= steps)


def _scaled(index: int, count: int, new_count: int) -> int:
    """The place among so many others: the first stays the first, the last the last."""
    return index * (new_count - 1) // (count - 1) if count > 1 else 0


def _reason(result: CallResult) -> str:
    """Of a call that ended without a value, on one line: of a traceback the last."""
    lines = result.message.strip().splitlines()
    return f"{result.failure}: {lines[-1].strip()}" if lines else str(result.failure)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
