"""Comparisons of a test: measures what `mbmem.compare`, `mbmem.sweep` and the `memory_saving` marker ask for.

A recipe is measured for them once in a session (each of pytest-xdist's workers has its own), so that many cases of a
parametrised test can share a control or a whole sweep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare import Comparison, check_settings, default_metric, matched
from .errors import UserError
from .gates import GATED_METRICS, GatedMetric
from .measurement import Measurement, check_phase
from .recipe import Recipe
from .savings import SavingGate, SavingJudgement, changed, is_changes, judge_failed, judge_saving, settings_of
from .sweep import CONTROL, Sweep, named_settings, recipes_of
from .validation import show

if TYPE_CHECKING:
    import pytest

    from .measure.ranks import Ranks
    from .report.results import Measured
    from .session import Run

Given = Recipe | Mapping[str, Any] | str | Path

_LASTING = ("out of memory", "refused", "no effect")
"""Failures that come again; a worker that died or took too long may have had bad luck, and is tried once more."""


class Comparing:
    """Of one pytest process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._measured: dict[object, Measurement] = {}

    def compare(
        self,
        item: pytest.Item,
        control: Given,
        candidate: Given,
        settings: Sequence[str] | None,
        name: str | None,
        ranks: Ranks,
        metric: GatedMetric | None,
        phase: str | None,
    ) -> Sweep:
        """A sweep of one row."""
        source = f"{item.nodeid}: mbmem.compare()"
        _check(name, metric, phase, source)
        allowed = None if settings is None else check_settings(settings, source)
        if is_changes(control) and is_changes(candidate):
            raise UserError(f"{source}: control and candidate are changes of settings; one must be a whole recipe")
        if is_changes(control):
            second = self._run.recipe(item, candidate, "mbmem.compare")
            first = changed(second, control, source)
        else:
            first = self._run.recipe(item, control, "mbmem.compare")
            if is_changes(candidate):
                second = changed(first, candidate, source)
            else:
                second = self._run.recipe(item, candidate, "mbmem.compare")
        if allowed is None:  # whoever writes changes has named them
            allowed = next((settings_of(given) for given in (control, candidate) if is_changes(given)), None)
        differences = matched(first, second, allowed, source)
        before, after = self._measurements(item, [first, second], ranks)
        row = (name or "candidate", after, differences)
        return Sweep.of((CONTROL, before), [row], metric or default_metric(differences), phase, None)

    def sweep(
        self,
        item: pytest.Item,
        recipe: Given,
        settings: object,
        control: str | None,
        name: str | None,
        ranks: Ranks,
        metric: GatedMetric | None,
        phase: str | None,
    ) -> Sweep:
        """All settings, and the control first."""
        source = f"{item.nodeid}: mbmem.sweep()"
        _check(name, metric, phase, source)
        base = self._run.recipe(item, recipe, "mbmem.sweep")
        (first, control_recipe), others = recipes_of(base, named_settings(settings, source), control, source)
        measured = self._measurements(item, [control_recipe, *(other for other, _ in others.values())], ranks)
        rows = [(n, m, diff) for (n, (_, diff)), m in zip(others.items(), measured[1:], strict=True)]
        metrics = {default_metric(differences) for _, _, differences in rows}
        metric = metric or (metrics.pop() if len(metrics) == 1 else "allocated")
        return Sweep.of((first, measured[0]), rows, metric, phase, name)

    def judge(self, item: pytest.Item, measured: Measured, gate: SavingGate) -> SavingJudgement:
        """Measure the control of what a test measured, and judge what is saved against it."""
        candidate = measured.measurement
        if candidate.failure is not None:
            return judge_failed(gate.rule, candidate)
        control, differences = gate.control_of(Recipe.from_dict(candidate.recipe, item.nodeid), item.nodeid)
        (before,) = self._measurements(item, [control], measured.ranks)
        rule = gate.rule_for(differences)
        return judge_saving(rule, Comparison(before, candidate, differences, rule.metric, rule.phase))

    def _measurements(self, item: pytest.Item, recipes: Sequence[Recipe], ranks: Ranks) -> list[Measurement]:
        """Each recipe's, measured now if it was not before."""
        keys = [_key(recipe, ranks) for recipe in recipes]
        missing = {key: recipe for key, recipe in zip(keys, recipes, strict=True) if key not in self._measured}
        found = dict(zip(missing, self._run.launcher.measure_many(list(missing.values()), ranks=ranks), strict=True))
        for key, measurement in found.items():
            if measurement.failure is None or measurement.failure.kind in _LASTING:
                self._measured[key] = measurement
            self._run.snapshots.write(f"{item.nodeid} {measurement.recipe_digest}", measurement)
        return [found[key] if key in found else self._measured[key] for key in keys]


def _key(recipe: Recipe, ranks: Ranks) -> tuple[object, ...]:
    """The same for all that is measured alike; what the ranks may be is checked when they are measured."""
    return recipe.digest, *((ranks,) if isinstance(ranks, str) else map(repr, ranks))


def _check(name: object, metric: object, phase: object, source: str) -> None:
    if name is not None and (not isinstance(name, str) or not name or not name.isprintable()):
        raise UserError(f"{source}: name={show(name)} is not a text on one line")
    if metric is not None and metric not in GATED_METRICS:
        raise UserError(f"{source}: metric={show(metric)} is not one of {', '.join(GATED_METRICS)}")
    if phase is not None:
        if not isinstance(phase, str):
            raise UserError(f"{source}: phase={show(phase)} is not a text such as 'optimizer' or 'step-2/backward'")
        check_phase(phase, source)
