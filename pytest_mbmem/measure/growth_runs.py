"""The runs that show whether a recipe's memory grows: each rank of it, of its control, and with more microbatches.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Any

from .. import incompatibilities
from ..compare import matched
from ..errors import MeasurementFailed, OutOfMemory, Refused, UserError
from ..growth import (
    MARKER,
    Growth,
    GrowthRule,
    RankGrowth,
    Trace,
    default_control,
    microbatch_pair,
    with_microbatches,
)
from ..recipe import Recipe
from ..savings import changed
from . import ranks as rank_choice
from .launch import Launcher, check_on_gpu, recipe_environment
from .ranks import Ranks
from .workers import CallResult

_STEPS_OF_OTHERS = 1
"""Of the control, and of the runs with other numbers of microbatches: a single steady step says what they hold."""


def measure_growth(
    launcher: Launcher, recipe: Recipe, rule: GrowthRule, ranks: Ranks = "distinct", name: str = ""
) -> Growth:
    """Run the recipe's ranks as the rule says, one process each.

    Raises `UserError` for a recipe, ranks or a rule that cannot be run, `OutOfMemory`, `Refused` and
    `MeasurementFailed` for a run that ends without figures.
    """
    check_on_gpu(recipe, virtual=launcher.device.virtual)
    if problem := launcher.cannot_run_alone(recipe):
        raise UserError(f"{MARKER}: each rank runs alone, and {problem}")
    chosen = rank_choice.chosen(recipe, ranks)
    control = control_of(recipe, rule)
    pair = rule.microbatches or microbatch_pair(recipe)
    stages = recipe.parallelism.pp
    if pair[0] < stages:
        raise UserError(
            f"{MARKER}(microbatches={pair}): {pair[0]} do not fill the pipeline's {stages} stages, so memory grows "
            f"with more of them anyway; allowed are numbers from {stages}"
        )
    runs: dict[str, tuple[Recipe, int]] = {"": (recipe, rule.steps)}
    if control is not None:
        runs["in the control, "] = (control, _STEPS_OF_OTHERS)
    by_number = {}
    for number in pair:
        variant = with_microbatches(recipe, number)
        by_number[number] = "" if variant.digest == recipe.digest else f"with {number} microbatches, "
        runs.setdefault(by_number[number], (variant, _STEPS_OF_OTHERS))
    traces = {
        label: _traces(launcher, label, variant, steps, [rank.rank for rank in chosen])
        for label, (variant, steps) in runs.items()
    }
    grown = []
    for rank in chosen:
        mine = {label: by_rank[rank.rank] for label, by_rank in traces.items()}
        by_microbatches = {number: mine[label] for number, label in by_number.items()}
        grown.append(RankGrowth(rank.rank, mine[""], rank.coordinates, mine.get("in the control, "), by_microbatches))
    return Growth(tuple(grown), rule.slack, name)


def control_of(recipe: Recipe, rule: GrowthRule) -> Recipe | None:
    """The recipe whose retained memory is no finding; None: there is none.

    Raises `UserError` for one that differs in more than memory settings or breaks documented constraints.
    """
    if rule.control is None:
        return default_control(recipe)
    source = f"{MARKER}(control=...)"
    given = rule.control
    control = given if isinstance(given, Recipe) else changed(recipe, given, source)
    incompatibilities.check(control, source)
    matched(control, recipe, None, source, remedy="Make them equal")
    return control


def _traces(launcher: Launcher, label: str, recipe: Recipe, steps: int, ranks: list[int]) -> dict[int, Trace]:
    common = {"recipe": recipe.to_dict(), "steps": steps}
    calls = [("pytest_mbmem.measure.worker:trace_rank", {**common, "rank": rank}) for rank in ranks]
    results = launcher.call_all(calls, recipe_environment(recipe), launcher.timeout)
    return {rank: _trace(result, f"{label}rank {rank}") for rank, result in zip(ranks, results, strict=True)}


def _trace(result: CallResult, where: str) -> Trace:
    if result.failure is not None:
        raise MeasurementFailed(f"memory growth: {where}: {result.failure}: {result.message}\n{result.output[-4000:]}")
    value: dict[str, Any] = result.value
    if value["failure"] is not None:
        kind = OutOfMemory if value["failure"] == "out of memory" else Refused
        raise kind(f"memory growth: {where}: {value['failure']}: {value['message']}")
    return Trace.from_json(value["trace"])
