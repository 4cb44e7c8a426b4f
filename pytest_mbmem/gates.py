"""A measurement and a rule make a verdict.

Knows neither pytest nor torch. Every comparison is in whole bytes: with `band = floor(baseline * tolerance) + slack`, a
peak above `baseline + band` is a regression, one below `baseline - band` an improvement, and anything between passes.
The floor loses nothing, because a whole number exceeds a bound exactly when it exceeds the bound's floor. The
tolerance is taken as the decimal number that was written, so 0.1 is a tenth and not its nearest binary fraction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from .drift import History, history_notes, history_of
from .errors import UserError
from .measurement import Failure, Measurement, check_phase
from .split import PeakGrowth, growth, places_text, split_of
from .units import format_bytes, format_fraction, parse_bytes, parse_fraction
from .validation import did_you_mean

if TYPE_CHECKING:
    from .baseline_file import Entry, Figure

Verdict = Literal["pass", "improvement", "regression", "stale", "missing", "out of memory", "no effect", "invalid"]
Comparison = Literal["pass", "improvement", "regression"]
GatedMetric = Literal["allocated", "reserved"]

GATED_METRICS: tuple[GatedMetric, ...] = ("allocated", "reserved")

DEFAULT_TOLERANCE: Mapping[GatedMetric, float] = {"allocated": 0.005, "reserved": 0.03}
"""Peak allocated is the same in every run of the same code; half a percent leaves room for a new version's small
buffers. Peak reserved can depend on the addresses that the driver hands out, by up to 2% where that was tried."""

DEFAULT_SLACK: Mapping[GatedMetric, int] = {"allocated": 2**20, "reserved": 20 * 2**20}
"""In the caching allocator's own steps: up to 1 MiB is a small request there (kSmallSize), and 20 MiB is the segment
that it reserves for a larger one (kLargeBuffer), so a single segment more is not a regression."""

_SHOWN_CHANGES = 8
"""Of a stale recipe's differing keys; more of them say that it is another recipe altogether."""

_KEYWORDS = ("limit", "metric", "phase", "tolerance", "slack")


def marker_arguments(
    marker: str, args: Sequence[object], kwargs: Mapping[str, object], keywords: Sequence[str], source: str
) -> dict[str, Any]:
    """A marker's arguments by name, without those that are None; the first keyword may be given without its name.

    Raises `UserError` with `source` (the test's node id) for a name that is not among the keywords.
    """
    for name in kwargs:
        if name not in keywords:
            hint = did_you_mean(name, keywords)
            raise UserError(f"{source}: {marker}() has no argument {name!r}; {hint}allowed: {', '.join(keywords)}")
    if len(args) > 1 or (args and keywords[0] in kwargs):
        raise UserError(
            f"{source}: {marker}() takes one positional argument at most, the {keywords[0]}; "
            f"name the others: {', '.join(keywords)}"
        )
    given = {keywords[0]: args[0]} if args else {}
    return given | {name: value for name, value in kwargs.items() if value is not None}


def figure_arguments(marker: str, given: Mapping[str, Any], source: str) -> tuple[GatedMetric, str | None]:
    """The metric and the phase among a marker's arguments. Raises `UserError` if there is no such figure."""
    metric, phase = given.get("metric", "allocated"), given.get("phase")
    if metric not in GATED_METRICS:
        allowed = ", ".join(GATED_METRICS)
        raise UserError(f"{source}: {marker}(metric=...): {metric!r} is not one of {allowed}")
    if phase is not None:
        if not isinstance(phase, str):
            problem = f"{phase!r} is not a text such as 'optimizer' or 'step-2/backward'"
            raise UserError(f"{source}: {marker}(phase=...): {problem}")
        check_phase(phase, f"{source}: {marker}()")
    return metric, phase


@dataclass(frozen=True)
class GateDefaults:
    """Tolerance and slack (bytes) for gates that name none; None stands for the metric's own default."""

    tolerance: float | None = None
    slack: int | None = None


@dataclass(frozen=True)
class PeakGate:
    """The rule of one `peak_memory` marker: an absolute limit in bytes, or a baseline with a tolerance and a slack."""

    metric: GatedMetric = "allocated"
    limit: int | None = None
    tolerance: float = DEFAULT_TOLERANCE["allocated"]
    slack: int = DEFAULT_SLACK["allocated"]
    phase: str | None = None

    @property
    def metric_id(self) -> str:
        """What the baseline file calls the gated figure: "allocated", "reserved@optimizer", ..."""
        return self.metric if self.phase is None else f"{self.metric}@{self.phase}"

    @classmethod
    def from_marker(
        cls, args: Sequence[object], kwargs: Mapping[str, object], defaults: GateDefaults, source: str
    ) -> PeakGate:
        """The gate that a marker's arguments describe.

        One positional argument is taken as `limit`. None stands for an argument that is not given. Raises `UserError`
        with `source` (the test's node id) for anything that is not a rule.
        """

        def where(argument: str) -> str:
            return f"{source}: peak_memory({argument}=...)"

        given = marker_arguments("peak_memory", args, kwargs, _KEYWORDS, source)
        metric, phase = figure_arguments("peak_memory", given, source)

        limit = None
        if given.get("limit") is not None:
            both = [name for name in ("tolerance", "slack") if name in given]
            if both:
                raise UserError(
                    f"{source}: peak_memory(limit=..., {both[0]}=...): a limit is absolute; "
                    f"remove {' and '.join(both)}, or remove limit to compare with a baseline"
                )
            limit = parse_bytes(given["limit"], where("limit"))
            if limit == 0:
                raise UserError(f"{where('limit')}: {given['limit']!r} is not more than 0 bytes")

        tolerance = defaults.tolerance if defaults.tolerance is not None else DEFAULT_TOLERANCE[metric]
        if "tolerance" in given:
            tolerance = parse_fraction(given["tolerance"], where("tolerance"))
            if tolerance >= 1:
                raise UserError(
                    f"{where('tolerance')}: {given['tolerance']!r} would let the peak double; "
                    "allowed are 0% to below 100%"
                )
        slack = defaults.slack if defaults.slack is not None else DEFAULT_SLACK[metric]
        if "slack" in given:
            slack = parse_bytes(given["slack"], where("slack"))
        return cls(metric=metric, limit=limit, tolerance=tolerance, slack=slack, phase=phase)


@dataclass(frozen=True)
class Origin:
    """Where the figure of a baseline was measured."""

    rank: int
    phase: str  # as in "step-2/backward"
    environment: Mapping[str, str]  # versions, as in `Measurement.environment`

    @classmethod
    def of(cls, figure: Figure) -> Origin:
        """Of a baseline's figure."""
        return cls(figure.rank, figure.phase, figure.environment)


@dataclass(frozen=True)
class Judgement:
    """What a gate said about a measurement; all sizes in bytes."""

    verdict: Verdict
    gate: PeakGate
    key: str
    measured: int | None = None  # None where the measurement has no figure to trust
    reference: int | None = None  # the limit, or the baseline's peak
    allowed: int | None = None  # the highest peak that passes
    rank: int | None = None  # the worst rank, or the one that failed
    phase: str | None = None  # where that rank reached its peak, as in "step-2/backward"
    notes: tuple[str, ...] = ()  # sentences for the report, beside the verdict
    growth: PeakGrowth | None = None  # against the baseline's peak; None where one of the two has no split
    history: History = ()  # of the baseline's figure; empty where it is of another recipe, or there is none
    origin: Origin | None = None  # of the same figure, of a measurement that failed too

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.verdict in ("pass", "improvement")

    @property
    def change(self) -> float | None:
        """Measured against the baseline as a fraction: 0.02 is 2% more. None without a baseline."""
        if self.gate.limit is not None or self.measured is None or not self.reference:
            return None
        return (self.measured - self.reference) / self.reference

    def explain(self) -> str:
        """The verdict in one sentence; the notes are not in it."""
        what = f"peak {self.gate.metric}" + (f" in {self.gate.phase}" if self.gate.phase else "")
        if self.measured is None:
            reason = f" ({self.notes[0]})" if self.notes else ""
            return f"{what}: {self.verdict}{reason}"
        place = f" on rank {self.rank} in {self.phase}"
        text = f"{what} {format_bytes(self.measured)}{place}"
        if self.reference is None or self.allowed is None or self.verdict in ("stale", "missing"):
            return f"{text}: {self.verdict}"
        if self.gate.limit is not None:
            side = "over" if self.verdict == "regression" else "below"
            return f"{text}: {format_bytes(abs(self.measured - self.allowed))} {side} the limit of " + format_bytes(
                self.allowed
            )
        assert self.change is not None
        text += f": {format_fraction(self.change, signed=True)} against the baseline of {format_bytes(self.reference)}"
        if self.verdict == "regression":
            over = format_bytes(self.measured - self.allowed)
            text += (
                f", {over} more than the {format_bytes(self.allowed)} allowed "
                f"(tolerance {format_fraction(self.gate.tolerance)}, slack {format_bytes(self.gate.slack)})"
            )
        return text


def band(reference: int, tolerance: float, slack: int) -> int:
    """Bytes by which a peak may differ from `reference`: floor(reference * tolerance) + slack."""
    exact = Fraction(repr(tolerance))
    return reference * exact.numerator // exact.denominator + slack


def compare(measured: int, reference: int, tolerance: float, slack: int) -> Comparison:
    """One peak against another, one-sided: less memory never fails."""
    width = band(reference, tolerance, slack)
    if measured > reference + width:
        return "regression"
    return "improvement" if measured < reference - width else "pass"


def judge(gate: PeakGate, measurement: Measurement, baseline: Entry | None, key: str) -> Judgement:
    """Judge the worst rank's peak by the gate's limit, or by the baseline entry of the test.

    The first of these that holds: the measurement failed ("out of memory", "no effect", "invalid"); there is no entry
    ("missing"); the entry belongs to another recipe ("stale"); the entry lacks the gated figure ("missing"); then the
    comparison.
    Raises `UserError` if the gate's phase selects nothing in the measurement.
    """
    figure = baseline.figures.get(gate.metric_id) if baseline is not None and gate.limit is None else None
    stale = baseline is not None and gate.limit is None and baseline.recipe_digest != measurement.recipe_digest
    if gate.limit is not None:
        reference, allowed = gate.limit, gate.limit
    elif figure is not None:
        reference, allowed = figure.value, figure.value + band(figure.value, gate.tolerance, gate.slack)
    else:
        reference, allowed = None, None

    def judgement(verdict: Verdict, notes: tuple[str, ...] = (), **rest: Any) -> Judgement:
        bound = None if stale else allowed
        return Judgement(
            verdict, gate, key, reference=reference, allowed=bound, notes=notes + measurement.notes, **rest
        )

    failure = measurement.failure
    if failure is not None:
        verdict, note = verdict_of_failure(failure)
        origin = Origin.of(figure) if figure is not None and not stale else None
        return judgement(verdict, rank=failure.rank, phase=failure.name, notes=(note,), origin=origin)
    if not measurement.ranks:
        return judgement("invalid", notes=("no rank was measured",))

    worst = measurement.worst(gate.metric, gate.phase)
    peak = worst.peak_phase(gate.metric, gate.phase)
    measured = peak.peak[gate.metric]
    found: dict[str, Any] = {"measured": measured, "rank": worst.rank, "phase": peak.name}
    if measured <= 0:
        del found["measured"]
        why = "nothing was allocated on the device" if measured == 0 else f"the peak is negative ({measured} bytes)"
        return judgement("invalid", notes=(why,), **found)

    if gate.limit is not None:
        notes = []
        if gate.limit >= measurement.device.capacity:
            capacity = format_bytes(measurement.device.capacity)
            notes.append(f"the limit is not below the device's capacity of {capacity}, so it cannot be exceeded")
        return judgement("regression" if measured > gate.limit else "pass", notes=tuple(notes), **found)
    if baseline is None:
        return judgement("missing", notes=("the baseline file has no entry for this test",), **found)
    split = split_of(worst, gate.metric, gate.phase)
    if split is not None and figure is not None and figure.split is not None:
        places = places_text((figure.rank, figure.phase), (worst.rank, peak.name))
        found["growth"] = growth(figure.split, split, places)
    if stale:
        return judgement("stale", notes=tuple(stale_notes(baseline, measurement)), **found)
    if figure is None:
        return judgement("missing", notes=(f"the test's baseline has no figure {gate.metric_id!r}",), **found)
    found |= {"history": history_of(figure), "origin": Origin.of(figure)}
    return judgement(
        compare(measured, figure.value, gate.tolerance, gate.slack),
        notes=tuple(_notes(gate, figure, measured, measurement)),
        **found,
    )


def verdict_of_failure(failure: Failure) -> tuple[Verdict, str]:
    """What a measurement that failed is judged, and a note that says why."""
    note = f"rank {failure.rank} ended with: {failure.kind}" + (f" in {failure.name}" if failure.name else "")
    return failure.kind if failure.kind in ("out of memory", "no effect") else "invalid", note


def recipe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys in which two written recipes differ, as in "training.seq_length: 4096 -> 2048".

    The name is left out: it is no part of what runs.
    """
    before, after = dict(_flat(old)), dict(_flat(new))
    before.pop("name", None)
    after.pop("name", None)
    keys = [*before, *(key for key in after if key not in before)]
    return [
        f"{key}: {before.get(key, '(not set)')} -> {after.get(key, '(not set)')}"
        for key in keys
        if key not in before or key not in after or before[key] != after[key]
    ]


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            # A recipe read back from a file has lists where the one in memory may have tuples.
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def stale_notes(baseline: Entry, measurement: Measurement) -> Iterator[str]:
    """What changed in the recipe since the baseline was recorded."""
    if baseline.recipe_digest is None:
        yield "the baseline was recorded without a recipe"
    elif measurement.recipe_digest is None:
        yield "the baseline was recorded with a recipe, and this test has none"
    elif baseline.recipe is None or measurement.recipe is None:
        yield "the recipe changed since the baseline was recorded"
    else:
        changes = recipe_changes(baseline.recipe, measurement.recipe)
        if changes:
            more = f"; and {len(changes) - _SHOWN_CHANGES} more" if len(changes) > _SHOWN_CHANGES else ""
            yield f"the recipe changed since the baseline was recorded: {'; '.join(changes[:_SHOWN_CHANGES])}{more}"
        else:
            yield "the recipe is written as before, but means something else: a default of it changed"


def environment_notes(figure: Figure, measurement: Measurement) -> Iterator[str]:
    """Versions that are not those of the baseline."""
    now = {key: str(value) for key, value in measurement.environment.items()}
    if differing := environment_changes(figure.environment, now):
        yield f"the environment is not the baseline's: {', '.join(differing)}"


def environment_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """What differs between two environments, as in "torch 2.13.0 -> 2.14.1"."""
    return [
        f"{name} {old.get(name, '(not recorded)')} -> {new.get(name, '(not recorded)')}"
        for name in dict.fromkeys((*old, *new))
        if old.get(name) != new.get(name)
    ]


def _notes(gate: PeakGate, figure: Figure, measured: int, measurement: Measurement) -> Iterator[str]:
    yield from environment_notes(figure, measurement)
    ranks = {rank.rank for rank in measurement.ranks}
    if ranks != set(figure.ranks):
        yield f"the baseline has ranks {_listed(figure.ranks)}, measured were ranks {_listed(ranks)}"

    width = band(figure.value, gate.tolerance, gate.slack)
    if 2 * width > figure.value:
        yield (
            f"tolerance and slack allow {format_bytes(width)} on top of {format_bytes(figure.value)}: "
            "the gate hardly tests anything; give it a smaller slack"
        )
    allowed = figure.first + band(figure.first, gate.tolerance, gate.slack)
    yield from history_notes(figure, measured, allowed, "peak", format_bytes)


def _listed(ranks: Mapping[int, int] | set[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))
