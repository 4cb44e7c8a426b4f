"""The rule of a `memory_saving` marker, and what it says about a measurement and its control.

Knows neither pytest nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeGuard

from .compare import MODELLED, Comparison, check_settings, default_metric, matched
from .drift import LOOSE
from .errors import UserError
from .gates import GatedMetric, figure_arguments, marker_arguments
from .measurement import Measurement, read_plain
from .recipe import DEPENDENTS, Recipe, setting_names
from .throughput import Throughput, format_ns, untimed
from .units import format_bytes, format_fraction, parse_bytes, parse_fraction
from .validation import did_you_mean, show

SavingVerdict = Literal[
    "pass", "fits", "saves too little", "too slow", "no effect", "costs more", "out of memory", "refused", "invalid"
]

_KEYWORDS = ("control", "at_least", "max_slowdown", "metric", "phase", "settings")

_EXAMPLE = 'memory_saving(control={"recompute_granularity": None}, at_least="1 GiB")'


@dataclass(frozen=True)
class SavingRule:
    """What the marker asks for."""

    control: str  # as it is called in reports
    metric: GatedMetric = "allocated"
    phase: str | None = None
    at_least: int | None = None  # bytes
    at_least_fraction: float | None = None  # of the control's peak
    max_slowdown: float | None = None

    @property
    def metric_id(self) -> str:
        """The figure that is compared: "allocated", "reserved@optimizer", ..."""
        return self.metric if self.phase is None else f"{self.metric}@{self.phase}"

    @property
    def asks_for_a_number(self) -> bool:
        """Whether "fits where the control does not" is no answer to it."""
        return (self.at_least, self.at_least_fraction, self.max_slowdown) != (None, None, None)

    def needed(self, before: int) -> int | None:
        """Bytes that must be saved of a control's peak, a fraction of one rounded up; None: any effect will do."""
        if self.at_least_fraction is None:
            return self.at_least
        exact = Fraction(repr(self.at_least_fraction)) * before
        return -(-exact.numerator // exact.denominator)

    @property
    def asked(self) -> str:
        """The saving that is asked for, in words."""
        if self.at_least_fraction is not None:
            return f"{format_fraction(self.at_least_fraction)} of the control"
        return "any" if self.at_least is None else format_bytes(self.at_least)


@dataclass(frozen=True)
class SavingGate:
    """A rule with its control: a recipe, or the settings that the control has instead of the candidate's."""

    rule: SavingRule
    control: Recipe | Mapping[str, object]
    settings: tuple[str, ...] | None = None  # what may differ; None: memory settings, or those of `control`
    metric_is_given: bool = True

    @classmethod
    def from_marker(cls, args: Sequence[object], kwargs: Mapping[str, object], source: str, folder: Path) -> SavingGate:
        """The gate that a marker's arguments describe.

        One positional argument is taken as `control`. None stands for another argument that is not given. The path of a
        control is relative to `folder`. Raises `UserError` with `source` (the test's node id) for anything that is no
        rule.
        """

        def where(argument: str) -> str:
            return f"{source}: memory_saving({argument}=...)"

        given = marker_arguments("memory_saving", args, kwargs, _KEYWORDS, source)
        if "control" not in given:
            raise UserError(
                f"{source}: memory_saving() needs a control: a recipe, or the settings that it has instead of the "
                f"measured one, as in {_EXAMPLE}"
            )
        control, label = _control(given["control"], where("control"), folder)
        settings = check_settings(given["settings"], where("settings")) if "settings" in given else None
        metric, phase = figure_arguments("memory_saving", given, source)
        at_least, fraction = _at_least(given.get("at_least"), where("at_least"))
        slowdown = given.get("max_slowdown")
        rule = SavingRule(
            control=label,
            metric=metric,
            phase=phase,
            at_least=at_least,
            at_least_fraction=fraction,
            max_slowdown=None if slowdown is None else parse_fraction(slowdown, where("max_slowdown")),
        )
        return cls(rule, control, settings, "metric" in given)

    def rule_for(self, differences: Mapping[str, object]) -> SavingRule:
        """The rule, about the metric that these differences can change if the marker names none."""
        if self.metric_is_given:
            return self.rule
        return dataclasses.replace(self.rule, metric=default_metric(differences))

    def control_of(self, candidate: Recipe, source: str) -> tuple[Recipe, dict[str, tuple[Any, Any]]]:
        """The control of a measured recipe, and the settings in which they differ.

        Raises `UserError`, with `source` in front, where they are not matched (see `compare.matched`) or the control
        breaks documented constraints.
        """
        from . import incompatibilities

        source = f"{source}: memory_saving(control={self.rule.control})"
        if isinstance(self.control, Recipe):
            incompatibilities.check(self.control, source)
            return self.control, matched(self.control, candidate, self.settings, source)
        control = changed(candidate, self.control, source)
        # Whoever writes changes has named them.
        return control, matched(control, candidate, self.settings or settings_of(self.control), source)


def changed(recipe: Recipe, changes: Mapping[str, object], source: str) -> Recipe:
    """`recipe.but(**changes)`, with `source` in front of what it raises; also for settings that exclude each other."""
    from . import incompatibilities

    check_changes(changes, source)
    try:
        other = recipe.but(**changes)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    incompatibilities.check(other, source)
    return other


def settings_of(changes: Mapping[str, object]) -> tuple[str, ...]:
    """The settings in which a recipe with these changes may differ: those named, and what goes with them."""
    return (*changes, *(dependent for name in changes for dependent in DEPENDENTS.get(name, ())))


def changes_label(changes: Mapping[str, object]) -> str:
    """Changes of settings on one line, as in "recompute_modules=core_attn+mlp, tp=2"."""
    return ", ".join(f"{name}={_value_label(value)}" for name, value in changes.items())


def _value_label(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "+".join(map(str, value)) or "[]"
    return show(value) if not isinstance(value, str) else value


def is_changes(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether it is a mapping of settings to change, and not one of a whole recipe, which has a model."""
    return isinstance(value, Mapping) and "model" not in value


def check_changes(changes: Mapping[str, object], source: str) -> None:
    """Raise `UserError` for a name that `Recipe.but` does not take."""
    names = setting_names()
    for name in changes:
        if name not in names:
            hint = did_you_mean(name, names)
            raise UserError(f"{source}: {show(name)} is not a field of a recipe; {hint}".rstrip("; "))


def _control(value: object, source: str, folder: Path) -> tuple[Recipe | Mapping[str, object], str]:
    if isinstance(value, Recipe):
        return value, value.name or value.digest
    if isinstance(value, (str, Path)):
        return Recipe.from_yaml(folder / value), str(value)
    if isinstance(value, Mapping):
        if not is_changes(value):
            recipe = Recipe.from_dict(value, source)
            return recipe, recipe.name or recipe.digest
        if value:
            check_changes(value, source)
            return dict(value), changes_label(value)
    raise UserError(
        f"{source}: {show(value)} is no control; allowed are a Recipe, the path of a YAML file, a mapping of what such "
        "a file holds, or a mapping of the settings that the control has instead"
    )


def _at_least(value: object, source: str) -> tuple[int | None, float | None]:
    if value is None:
        return None, None
    if isinstance(value, float) or (isinstance(value, str) and value.rstrip().endswith("%")):
        number: int | float = parse_fraction(value, source)
    else:
        try:
            number = parse_bytes(value, source)
        except UserError:
            raise UserError(
                f"{source}: {value!r} is neither a size (as in '1 GiB') nor a percentage of the control's peak "
                "(as in '5%')"
            ) from None
    if number == 0:
        raise UserError(f"{source}: {value!r} is not more than 0; leave it out to ask for any effect")
    return (number, None) if isinstance(number, int) else (None, number)


@dataclass(frozen=True)
class SavingJudgement:
    """What a rule said about a measurement and its control."""

    verdict: SavingVerdict
    rule: SavingRule
    comparison: Comparison | None  # None where the measurement failed, so that its control was not asked for
    notes: tuple[str, ...] = ()  # sentences for the report, beside the verdict

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.verdict in ("pass", "fits")

    @property
    def needed(self) -> int | None:
        """Bytes that had to be saved; None: any effect will do, or there are no figures."""
        if self.comparison is None or not self.comparison.has_figures:
            return None
        return self.rule.needed(self.comparison.before)

    def to_json(self) -> dict[str, Any]:
        """Plain data; the candidate's measurement is not in it, the control's is."""
        comparison = self.comparison
        return {
            "verdict": self.verdict,
            "passed": self.passed,
            "rule": dataclasses.asdict(self.rule),
            "notes": list(self.notes),
            "needed": self.needed,
            "comparison": comparison and comparison.to_json(),
            "control": comparison and comparison.control.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], candidate: Measurement, source: str) -> SavingJudgement:
        """Read what `to_json` wrote."""
        comparison = None
        if data["comparison"] is not None:
            control = Measurement.from_json(data["control"], f"{source}: control")
            comparison = Comparison.from_json(data["comparison"], control, candidate, f"{source}: comparison")
        return cls(
            read_plain(SavingVerdict, data["verdict"], f"{source}: verdict"),
            read_plain(SavingRule, data["rule"], f"{source}: rule"),
            comparison,
            read_plain(tuple[str, ...], data["notes"], f"{source}: notes"),
        )


def judge_failed(rule: SavingRule, candidate: Measurement) -> SavingJudgement:
    """Of a measurement that failed: whatever its control does, there is no saving."""
    failure = candidate.failure
    assert failure is not None
    verdicts: dict[str, SavingVerdict] = {
        "out of memory": "out of memory",
        "refused": "refused",
        "no effect": "no effect",
    }
    note = f"rank {failure.rank} ended with: {failure.kind}" + (f" in {failure.name}" if failure.name else "")
    return SavingJudgement(verdicts.get(failure.kind, "invalid"), rule, None, (note,))


def step_times(comparison: Comparison) -> tuple[Throughput, Throughput] | None:
    """What a step of the control and of the candidate takes on a real GPU; None where one of them was not timed."""
    before, after = Throughput.of(comparison.control), Throughput.of(comparison.candidate)
    return None if before is None or after is None else (before, after)


def _by_time(
    allowed: float, comparison: Comparison, judgement: Callable[..., SavingJudgement], notes: Sequence[str]
) -> SavingJudgement:
    times = step_times(comparison)
    if times is None:
        why = untimed(comparison.control) or untimed(comparison.candidate)
        return judgement("invalid", f"max_slowdown cannot be judged: {why}", *notes)
    before, after = times
    spread = max(before.spread, after.spread)
    text = (
        f"a step takes {format_ns(after.step)} and the control's {format_ns(before.step)}, spread {format_ns(spread)}"
    )
    longer = after.step - before.step
    too_slow = longer > Fraction(repr(allowed)) * before.step and longer > spread
    return judgement("too slow" if too_slow else "pass", text, *notes)


def judge_saving(rule: SavingRule, comparison: Comparison) -> SavingJudgement:
    """Judge what the worst rank saves against what the rule asks for.

    The first of these that holds: the control alone is out of memory ("fits", or "invalid" where a number is asked
    for); one side did not run ("invalid", "out of memory", "refused", "no effect"); less is saved than asked for ("no
    effect", "costs more", "saves too little"); it slows down more than allowed ("too slow"). With `at_least`, a saving
    that reaches it passes, however small it is. Raises `UserError` if the rule's phase selects nothing.

    On a real GPU `max_slowdown` is judged by the times of steps (see `step_times`): the candidate's must exceed the
    control's by more than that and by more than the spread of either. On a virtual one it is judged by FLOPs alone, and
    a note says so where more bytes are communicated or moved. Where these are all that a step costs, because its FLOPs
    stay the same (offload, re-gathering), it is "invalid": FLOPs would let any slowdown pass.
    """

    def judgement(verdict: SavingVerdict, *notes: str) -> SavingJudgement:
        both = (*comparison.control.notes, *comparison.candidate.notes)
        return SavingJudgement(verdict, rule, comparison, (*notes, *dict.fromkeys(both)))

    verdict = comparison.verdict
    if verdict == "fits" and rule.asks_for_a_number:
        return judgement("invalid", "ask for no number (at_least, max_slowdown), or measure on a larger virtual GPU")
    if not comparison.has_figures:
        assert verdict != "saving"
        return judgement(verdict)
    notes = list(comparison.hints())
    needed = rule.needed(comparison.before)
    if needed is None:
        if verdict != "saving":
            return judgement(verdict, *notes)
    elif comparison.saving < needed:
        return judgement("saves too little" if verdict == "saving" else verdict, *notes)
    elif needed <= comparison.slack:
        slack = format_bytes(comparison.slack)
        notes.append(f"at_least is no more than {slack}, which another order of allocations alone can save or cost")
    elif comparison.saving > LOOSE * needed:
        saved, asked = format_bytes(comparison.saving), format_bytes(needed)
        notes.append(
            f"at_least is loose: {saved} is saved, {comparison.saving / needed:.1f} times the {asked} that is asked "
            "for, and most of it could be lost without a failure; ask for more"
        )
    if rule.max_slowdown is not None and not comparison.candidate.device.virtual:
        return _by_time(rule.max_slowdown, comparison, judgement, notes)
    if rule.max_slowdown is not None:
        extra, before = comparison.extra.flops, comparison.control.flops_per_step
        if extra is None or not before:
            return judgement("invalid", "max_slowdown cannot be judged: FLOPs were not counted", *notes)
        if comparison.more_traffic and not extra:
            reason = "a slowdown by communicated or moved bytes cannot be judged without a real GPU"
            note = f"max_slowdown: {reason}; FLOPs stay the same, for {comparison.traffic_text()}"
            return judgement("invalid", note, *notes)
        notes.append(f"the slowdown is {MODELLED}: FLOPs of a step of the rank that computes most stand for its time")
        if comparison.more_traffic:
            notes.append(f"FLOPs alone cannot judge the slowdown here; it also costs {comparison.traffic_text()}")
        if extra > Fraction(repr(rule.max_slowdown)) * before:
            return judgement("too slow", *notes)
    return judgement("pass", *notes)
