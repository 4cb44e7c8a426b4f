"""What a step takes, and the rule of a `throughput` marker.

On a real GPU that is time. A figure is the median of the timed steps, and its spread their interquartile range: one
step that something disturbed moves neither, and unlike a standard deviation it assumes no bell curve, which step times
are not. On a virtual GPU there is no time; what a step computes, sends and moves is counted and gated instead.

Baselines hold what a step takes, not what it yields, so that of every stored figure more is worse. The recipe is the
same wherever two are compared, and so a step's tokens are. Figures are whole numbers: nanoseconds, FLOPs, bytes.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from .drift import History, history_notes, history_of
from .errors import UserError
from .gates import (
    Comparison,
    Origin,
    Verdict,
    environment_notes,
    marker_arguments,
    stale_notes,
    verdict_of_failure,
)
from .measurement import Measurement, RankMeasurement
from .recipe import Recipe
from .units import (
    Rate,
    RateUnit,
    format_bytes,
    format_flops,
    format_fraction,
    format_seconds,
    parse_fraction,
    parse_rate,
)

if TYPE_CHECKING:
    from .baseline_file import Entry, Figure

ThroughputVerdict = Literal[Verdict, "not gated"]
"""Not gated: a minimum without a tolerance on a virtual GPU, which has no time."""

StepMetric = Literal["throughput", "solo-throughput", "counted-flops", "collective-bytes", "moved-bytes"]

DEFAULT_TOLERANCE = 0.05

_KEYWORDS = ("minimum", "tolerance", "steps", "warmup")
_STEPS, _WARMUP = range(3, 1001), range(1, 1001)

SOLO = "without communication and pipeline bubbles (solo)"


@dataclass(frozen=True)
class Timing:
    """How many steps of a recipe run on a real GPU: those that are timed, and those before them that are not."""

    steps: int = 3
    warmup: int = 1


MARKED = Timing(steps=10, warmup=3)
"""Where a marker judges the times and does not say it otherwise."""


# Figures --------------------------------------------------------------------------------------------------------------


def format_ns(nanoseconds: int) -> str:
    """As in "41.20 ms"."""
    return format_seconds(nanoseconds / 1e9)


@dataclass(frozen=True)
class Kind:
    """A figure that a baseline can hold for a step."""

    name: str  # in sentences
    key: str  # in the baseline file, with the unit
    text: Callable[[int], str]
    lowest: int  # that can be true


STEP_METRICS: Mapping[str, Kind] = {
    "throughput": Kind("step time", "step_ns", format_ns, 1),
    "solo-throughput": Kind("step time", "step_ns", format_ns, 1),  # never compared with that of joint ranks
    "counted-flops": Kind("counted FLOPs", "flops", format_flops, 1),
    "collective-bytes": Kind("collective bytes", "bytes", format_bytes, 0),
    "moved-bytes": Kind("moved bytes", "bytes", format_bytes, 0),
}
TIMES: tuple[StepMetric, ...] = ("throughput", "solo-throughput")
"""Step times, in nanoseconds."""

_COUNTS: tuple[StepMetric, ...] = ("counted-flops", "collective-bytes", "moved-bytes")


def figure_name(metric_id: str) -> str:
    """What a baseline's figure is, in sentences."""
    return STEP_METRICS[metric_id].name if metric_id in STEP_METRICS else "peak"


def figure_text(metric_id: str, value: int) -> str:
    """A baseline's figure for people, with its unit."""
    return STEP_METRICS[metric_id].text(value) if metric_id in STEP_METRICS else format_bytes(value)


@dataclass(frozen=True)
class Throughput:
    """How fast a real GPU trains. Times are nanoseconds."""

    step: int  # the median
    steps: int  # that were timed
    spread: int  # interquartile range
    rank: int  # the slowest
    solo: bool  # of a larger job: each rank ran alone
    cold: int | None = None  # the first step
    tokens: float | None = None  # of a step, for each GPU of the job
    flops: float | None = None  # the same, of the model: without what recompute repeats
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, measurement: Measurement) -> Throughput | None:
        """None where there is none; `untimed` says why.

        Joint ranks wait for each other, so that a step takes as long as its slowest rank. Of solo ranks the slowest one
        decides.
        """
        if untimed(measurement) is not None:
            return None
        ranks = measurement.ranks
        slowest = max(ranks, key=lambda rank: (statistics.median(rank.step_times), -rank.rank))
        solo = measurement.mode == "solo"
        times = slowest.step_times if solo else [max(step) for step in zip(*(r.step_times for r in ranks), strict=True)]
        colds = [rank.cold_step for rank in ([slowest] if solo else ranks)]
        whole = [_ns(time) for time in times]
        flops = _model_flops(ranks)
        return cls(
            step=round(statistics.median(whole)),
            steps=len(whole),
            spread=spread_of(whole),
            rank=slowest.rank,
            solo=solo and measurement.world_size > 1,
            cold=None if None in colds else max(_ns(cold) for cold in colds if cold is not None),
            tokens=_tokens(measurement),
            flops=flops,
            notes=(*_notes_on_times(whole), *(_notes_on_ranks(measurement) if flops is not None else ())),
        )

    @property
    def metric_id(self) -> StepMetric:
        """What a baseline calls it."""
        return "solo-throughput" if self.solo else "throughput"

    def yielded(self, unit: RateUnit) -> float | None:
        """Tokens or FLOPs of a step, for each GPU of the job. None where they are not known."""
        return self.tokens if unit == "tokens/s" else self.flops

    def rate(self, unit: RateUnit, step: int | None = None) -> Rate | None:
        """For each GPU, with steps of this time or of the measured one. None where what a step yields is not known."""
        yielded = self.yielded(unit)
        return None if yielded is None else Rate(yielded * 1e9 / (step or self.step), unit)

    @property
    def rates(self) -> str:
        """Those that are known, as in "3.10 k tokens/s and 412.30 TFLOP/s per GPU"; empty if none is."""
        rates = [self.rate("tokens/s"), self.rate("FLOP/s")]
        known = " and ".join(str(rate) for rate in rates if rate is not None)
        return f"{known} per GPU" if known else ""

    def explain(self) -> str:
        """Step time and rates in one sentence."""
        text = f"a step takes {format_ns(self.step)} (median of {self.steps}, spread {format_ns(self.spread)}"
        text += f"; the cold step {format_ns(self.cold)})" if self.cold is not None else ")"
        text += f": {self.rates}" if self.rates else ""
        return text + (f", {SOLO}" if self.solo else "")


def untimed(measurement: Measurement) -> str | None:
    """Why a measurement has no throughput; None where it has one."""
    if measurement.device.virtual:
        return "a virtual GPU has no time"
    if not measurement.ranks:
        return "no rank was measured"
    counts = {len(rank.step_times) for rank in measurement.ranks}
    for rank in measurement.ranks:
        if len(rank.step_times) < 2:
            few = "no step was" if not rank.step_times else "a single step was"
            return f"{few} timed on rank {rank.rank}"
        for time in (*rank.step_times, *([] if rank.cold_step is None else [rank.cold_step])):
            if not math.isfinite(time) or _ns(time) <= 0:
                return f"rank {rank.rank} has a step time of {time} s"
    if measurement.mode == "joint" and len(counts) > 1:
        return f"the joint ranks timed different numbers of steps: {', '.join(map(str, sorted(counts)))}"
    return None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def spread_of(times: Sequence[int]) -> int:
    """Interquartile range of two times or more."""
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return round(upper - lower)


def two_modes(times: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The times in two clusters, the faster one first; None where they are no two.

    They are where the largest gap that leaves a quarter of the steps on each side, and two at least, is wider than
    either side from end to end, and the sides' medians differ by more than 5%.
    """
    ordered = sorted(times)
    fewest = max(2, math.ceil(len(ordered) / 4))
    cuts = range(fewest, len(ordered) - fewest + 1)
    if not cuts:
        return None
    at = max(cuts, key=lambda cut: ordered[cut] - ordered[cut - 1])
    fast, slow = ordered[:at], ordered[at:]
    apart = slow[0] - fast[-1] > max(fast[-1] - fast[0], slow[-1] - slow[0])
    return (fast, slow) if apart and statistics.median(slow) > 1.05 * statistics.median(fast) else None


def _notes_on_times(times: Sequence[int]) -> Iterator[str]:
    clusters = two_modes(times)
    if clusters is not None:
        fast, slow = (f"{len(side)} of about {format_ns(round(statistics.median(side)))}" for side in clusters)
        yield f"the step times show two modes, {fast} and {slow}: their median says little; find out what alternates"


def _notes_on_ranks(measurement: Measurement) -> Iterator[str]:
    there = sum(rank.stands_for for rank in measurement.ranks)
    if there < measurement.world_size:
        yield f"FLOP/s are those of the measured ranks, which stand for {there} of {measurement.world_size}"


def _tokens(measurement: Measurement) -> float | None:
    if measurement.recipe is None:
        return None
    recipe = Recipe.from_dict(measurement.recipe, "recipe")
    return recipe.global_batch_size * recipe.training.seq_length / measurement.world_size


def _model_flops(ranks: Sequence[RankMeasurement]) -> float | None:
    """Mean over the job's ranks, each measured one counted for all that it stands for."""
    counted = [(rank.model_flops, rank.stands_for) for rank in ranks if rank.model_flops is not None]
    if len(counted) < len(ranks):
        return None
    return sum(flops * times for flops, times in counted) / sum(times for _, times in counted)


def _counts(rank: RankMeasurement) -> dict[StepMetric, int | None]:
    counted = rank.flops_per_step is not None  # which counts collectives too
    return {
        "counted-flops": rank.flops_per_step,
        "collective-bytes": sum(rank.collective_bytes.values()) if counted else None,
        "moved-bytes": sum(rank.moved_bytes.values()),
    }


# The rule -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ThroughputGate:
    """What a marker compares a step with, and the tolerance of that.

    On a real GPU a minimum for each GPU, or a baseline where there is none.
    """

    minimum: Rate | None = None
    tolerance: float = DEFAULT_TOLERANCE
    counts: bool = True  # whether it compares a virtual GPU's counts with a baseline

    @property
    def judges(self) -> str:
        """Of two rules that judge the same, the one of the closest marker decides."""
        return "baseline" if self.minimum is None else self.minimum.unit

    def needs_baseline(self, virtual: bool) -> bool:
        """Whether it compares with a baseline on this kind of GPU."""
        return self.counts if virtual else self.minimum is None

    @classmethod
    def from_marker(
        cls, args: Sequence[object], kwargs: Mapping[str, object], source: str
    ) -> tuple[ThroughputGate, Timing]:
        """The gate that a marker's arguments describe, and the steps that it takes to judge by it.

        A minimum has no tolerance unless one is given, and counts are compared by a given tolerance, or where there is
        no minimum. One positional argument is taken as `minimum`. Raises `UserError` with `source` (the test's node id)
        for anything that is no rule.
        """

        def where(argument: str) -> str:
            return f"{source}: throughput({argument}=...)"

        given = marker_arguments("throughput", args, kwargs, _KEYWORDS, source)
        gate = cls()
        if "minimum" in given:
            gate = cls(parse_rate(given["minimum"], where("minimum")), tolerance=0.0, counts=False)
        if "tolerance" in given:
            tolerance = parse_fraction(given["tolerance"], where("tolerance"))
            if tolerance >= 1:
                raise UserError(
                    f"{where('tolerance')}: {given['tolerance']!r} would let throughput fall to nothing; "
                    "allowed are 0% to below 100%"
                )
            gate = cls(gate.minimum, tolerance)
        steps = _number(given.get("steps", MARKED.steps), _STEPS, where("steps"))
        warmup = _number(given.get("warmup", MARKED.warmup), _WARMUP, where("warmup"))
        return gate, Timing(steps, warmup)


def _number(value: object, allowed: range, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value in allowed:
        return value
    raise UserError(f"{where}: {value!r} is not a whole number from {allowed[0]} to {allowed[-1]}")


@dataclass(frozen=True)
class ThroughputJudgement:
    """What a gate said about a measurement; figures are in the metric's unit (see `STEP_METRICS`)."""

    verdict: ThroughputVerdict
    gate: ThroughputGate
    key: str
    metric_id: StepMetric
    measured: int | None = None  # None where the measurement has no figure to trust
    spread: int | None = None  # of a step time
    reference: int | None = None  # the baseline's figure
    allowed: int | None = None  # the highest that passes
    rank: int | None = None  # the slowest or most loaded, or the one that failed
    throughput: Throughput | None = None
    notes: tuple[str, ...] = ()  # sentences for the report, beside the verdict
    history: History = ()  # of the baseline's figure, in the metric's unit
    origin: Origin | None = None  # of the same figure

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.verdict in ("pass", "improvement", "not gated")

    @property
    def what(self) -> str:
        """What is judged, in sentences."""
        return "throughput" if self.metric_id in TIMES else f"{STEP_METRICS[self.metric_id].name} of a step"

    @property
    def against_minimum(self) -> Rate | None:
        """The minimum that throughput is judged by; None where a baseline is."""
        return self.gate.minimum if self.metric_id in TIMES else None

    @property
    def change(self) -> float | None:
        """Against the baseline as a fraction: of throughput -0.02 is 2% less, of what is counted 0.02 is 2% more."""
        if not self.measured or not self.reference or self.verdict == "stale":
            return None
        if self.metric_id in TIMES:
            return self.reference / self.measured - 1
        return self.measured / self.reference - 1

    @property
    def rate(self) -> Rate | None:
        """What is compared with the minimum."""
        if self.against_minimum is None or self.throughput is None:
            return None
        return self.throughput.rate(self.against_minimum.unit)

    def text(self, value: int) -> str:
        """A figure as reports show it: a step's time as the rate that it makes with the measured recipe."""
        unit = "tokens/s" if self.against_minimum is None else self.against_minimum.unit
        rate = self.throughput.rate(unit, value) if self.throughput is not None else None
        return figure_text(self.metric_id, value) if rate is None else str(rate)

    @property
    def shown(self) -> str | None:
        """What was measured, as reports show it."""
        if self.against_minimum is not None:
            return None if self.rate is None else str(self.rate)
        return None if self.measured is None else self.text(self.measured)

    @property
    def shown_reference(self) -> str | None:
        """The minimum or the baseline's figure, as reports show it."""
        if self.against_minimum is not None:
            return f">= {self.against_minimum}"
        if self.reference is None:
            return None
        of_other_recipe = self.verdict == "stale"
        return figure_text(self.metric_id, self.reference) if of_other_recipe else self.text(self.reference)

    def explain(self) -> str:
        """The verdict in one sentence; the notes are not in it."""
        if self.shown is None:
            return f"{self.what}: {self.verdict}" + (f" ({self.notes[0]})" if self.notes else "")
        place = "" if self.throughput is not None else f" on rank {self.rank}"
        text = f"{self.what} {self.shown}{place}"
        if self.against_minimum is not None:
            assert self.rate is not None
            over = self.rate.amount - self.against_minimum.amount
            difference = Rate(abs(over), self.against_minimum.unit)
            text += f": {difference} {'over' if over >= 0 else 'below'} the minimum of {self.against_minimum}"
            if over < 0:
                text += f", {self.bound} allowed ({self.leeway})"
        elif self.reference is None or self.allowed is None:
            text += f": {self.verdict}"
        else:
            change = "" if self.change is None else f"{format_fraction(self.change, signed=True)} "
            text += f": {change}against the baseline of {self.shown_reference}"
            if self.verdict == "regression":
                text += f", {self.bound} allowed ({self.leeway})"
        return text + (f"; {self.throughput.explain()}" if self.throughput is not None else "")

    @property
    def bound(self) -> str:
        """The worst that passes, as in "at least 2.10 k tokens/s"."""
        assert self.allowed is not None
        shown = self.text(self.allowed)
        return f"{'at least' if shown.endswith('/s') else 'at most'} {shown}"

    @property
    def leeway(self) -> str:
        """Why `allowed` is not what is compared with."""
        text = f"tolerance {format_fraction(self.gate.tolerance)}"
        return text if self.throughput is None else f"{text}, or the steps' spread where that is more"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)


def judge(
    gate: ThroughputGate, measurement: Measurement, baseline: Entry | None, key: str
) -> list[ThroughputJudgement]:
    """Judge by the gate's minimum, or by the baseline entry of the test: time, or on a virtual GPU each count.

    The first of these that holds: the measurement failed; nothing was timed or counted ("invalid"); there is no entry
    ("missing"); the entry belongs to another recipe ("stale"); the entry lacks the figure ("missing"); then the
    comparison. Empty on a virtual GPU for a gate that has no minimum and leaves the counts to another one.
    """
    throughput = Throughput.of(measurement)
    time: StepMetric = throughput.metric_id if throughput is not None else "throughput"
    if measurement.failure is not None:
        verdict, note = verdict_of_failure(measurement.failure)
        notes = (note, *measurement.notes)
        return [ThroughputJudgement(verdict, gate, key, time, rank=measurement.failure.rank, notes=notes)]
    if not measurement.device.virtual and throughput is None:
        notes = (str(untimed(measurement)), *measurement.notes)
        return [ThroughputJudgement("invalid", gate, key, time, notes=notes)]
    if gate.needs_baseline(measurement.device.virtual):
        metrics = _COUNTS if throughput is None else (time,)
        return [
            _against_baseline(ThroughputJudgement("missing", gate, key, metric), throughput, measurement, baseline)
            for metric in metrics
        ]
    if gate.minimum is None:
        return []
    return [_against_minimum(gate.minimum, ThroughputJudgement("pass", gate, key, time), throughput, measurement)]


def _against_minimum(
    minimum: Rate, judgement: ThroughputJudgement, throughput: Throughput | None, measurement: Measurement
) -> ThroughputJudgement:
    if throughput is None:
        note = f"a virtual GPU has no time, so the minimum of {minimum} is judged with --mbmem-gpu alone"
        return dataclasses.replace(judgement, verdict="not gated", notes=(note, *measurement.notes))
    yielded = throughput.yielded(minimum.unit)
    found = dataclasses.replace(
        judgement,
        measured=throughput.step,
        spread=throughput.spread,
        rank=throughput.rank,
        throughput=throughput,
        notes=throughput.notes + measurement.notes,
    )
    if yielded is None:
        what = "model FLOPs were not counted on a virtual twin, so that only a minimum in tokens/s can be judged"
        what = what if minimum.unit == "FLOP/s" else "the tokens of a step are not known without a recipe"
        return dataclasses.replace(found, verdict="invalid", notes=(what, *found.notes))
    needed = Fraction(yielded) * 10**9 / Fraction(repr(minimum.amount))  # a step that makes the minimum
    slowest, tolerated = (band(needed, judgement.gate.tolerance, noise)[1] for noise in (throughput.spread, 0))
    if needed < throughput.step <= slowest:
        note = f"less than the minimum, but within its tolerance of {format_fraction(judgement.gate.tolerance)}"
        if throughput.step > tolerated:
            note = "the minimum lies within the spread of the steps, and that alone lets this pass; time more steps"
        found = dataclasses.replace(found, notes=(note, *found.notes))
    verdict: Verdict = "regression" if throughput.step > slowest else "pass"
    return dataclasses.replace(found, verdict=verdict, allowed=max(slowest, 1))  # no step takes less


def _against_baseline(
    judgement: ThroughputJudgement, throughput: Throughput | None, measurement: Measurement, baseline: Entry | None
) -> ThroughputJudgement:
    gate, metric = judgement.gate, judgement.metric_id
    found: dict[str, Any] = {"throughput": throughput}
    if throughput is not None:
        found |= {"measured": throughput.step, "spread": throughput.spread, "rank": throughput.rank}
    else:
        counts = {rank.rank: _counts(rank)[metric] for rank in measurement.ranks}
        known = {rank: count for rank, count in counts.items() if count is not None}
        if known and len(known) == len(counts):
            most = max(known, key=lambda rank: (known[rank], -rank))
            found |= {"measured": known[most], "rank": most}
    measured = found.get("measured")

    def judged(verdict: Verdict, *notes: str, **more: Any) -> ThroughputJudgement:
        said = (*notes, *(throughput.notes if throughput is not None else ()), *measurement.notes)
        return dataclasses.replace(judgement, **{**found, "verdict": verdict, "notes": said, **more})

    if measured is None or measured < STEP_METRICS[metric].lowest:
        found.pop("measured", None)
        return judged("invalid", f"{STEP_METRICS[metric].name} were not counted on every rank")
    if baseline is None:
        return judged("missing", "the baseline file has no entry for this test")
    figure = baseline.figures.get(metric)
    if baseline.recipe_digest != measurement.recipe_digest:
        reference = None if figure is None else figure.value
        return judged("stale", *stale_notes(baseline, measurement), reference=reference)
    if figure is None:
        return judged("missing", *_missing_notes(metric, baseline))
    noise = noise_of(found.get("spread"), figure)
    return judged(
        compare_steps(measured, found.get("spread"), figure, gate.tolerance),
        *_notes(judgement, measured, noise, figure, measurement),
        reference=figure.value,
        allowed=band(figure.value, gate.tolerance, noise)[1],
        history=history_of(figure),
        origin=Origin.of(figure),
    )


def _missing_notes(metric: StepMetric, baseline: Entry) -> Iterator[str]:
    yield f"the test's baseline has no figure {metric!r}"
    if metric in TIMES and any(other in baseline.figures for other in TIMES):
        was, now = ("solo", "jointly") if metric == "throughput" else ("jointly", "solo")
        yield f"the one that it has was recorded with ranks that ran {was}, and these ran {now}"


def _notes(
    judgement: ThroughputJudgement, measured: int, noise: int | None, figure: Figure, measurement: Measurement
) -> Iterator[str]:
    kind, tolerance = STEP_METRICS[judgement.metric_id], judgement.gate.tolerance
    yield from environment_notes(figure, measurement)
    if noise and figure.value + noise > band(figure.value, tolerance, 0)[1]:
        yield (
            f"the step times spread by {format_fraction(noise / figure.value)}, more than the tolerance of "
            f"{format_fraction(tolerance)}: a smaller regression cannot be told from noise; time more steps"
        )
    allowed = band(figure.value, tolerance, noise)[1]
    if 2 * allowed > 3 * figure.value > 0:  # as of a peak: half of it on top
        yield (
            f"tolerance and spread allow {kind.text(allowed - figure.value)} on top of {kind.text(figure.value)}: the "
            "gate hardly tests anything; give it a smaller tolerance"
        )
    yield from history_notes(figure, measured, band(figure.first, tolerance, noise)[1], kind.name, kind.text)


# Comparing ------------------------------------------------------------------------------------------------------------


def noise_of(spread: int | None, before: Figure) -> int | None:
    """What two step times may differ by and mean nothing: the larger of their spreads. None for counts."""
    return None if spread is None or before.spread is None else max(spread, before.spread)


def band(reference: int | Fraction, tolerance: float, noise: int | None) -> tuple[int, int]:
    """The lowest and the highest figure that neither improve on the reference nor regress.

    Counts may differ by the tolerance. Throughput, of which a step time is the inverse, may too, and by the noise.
    """
    exact = Fraction(repr(tolerance))
    if noise is None:
        return math.ceil(reference * (1 - exact)), math.floor(reference * (1 + exact))
    fastest, slowest = reference / (1 + exact), reference / (1 - exact)
    return math.ceil(min(fastest, reference - noise)), math.floor(max(slowest, reference + noise))


def compare_steps(measured: int, spread: int | None, before: Figure, tolerance: float) -> Comparison:
    """A step's figure against a baseline's, one-sided: a faster step, and a lower count, never fail."""
    lowest, highest = band(before.value, tolerance, noise_of(spread, before))
    if measured > highest:
        return "regression"
    return "improvement" if measured < lowest else "pass"
