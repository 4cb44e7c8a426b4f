"""The rule of a `fits` marker: does what a test measures train on a GPU, with headroom, beside memory outside PyTorch?

Found out by running it: PyTorch empties its cache when the device has no more, so peak reserved alone does not tell.
Imports neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from . import outside
from .errors import UserError
from .measurement import Failure, Measurement, RankMeasurement, read_plain
from .recipe import Recipe
from .units import format_bytes, parse_bytes
from .validation import did_you_mean, show
from .virtual_gpu.gpus import Gpu

if TYPE_CHECKING:
    from .measure.launch import Launcher
    from .measure.ranks import Ranks

FitVerdict = Literal["fits", "starved", "out of memory", "refused", "no effect", "invalid"]
"""Starved: PyTorch runs out of memory beside what is outside it and the headroom, though its live bytes leave room for
both: what it reserves and cannot use takes it. Out of memory: the live bytes leave no room either."""


@dataclass(frozen=True)
class FitRule:
    """What the marker asks for, in bytes."""

    gpu: str  # "h100-80gb"
    name: str  # "NVIDIA H100 80GB HBM3"
    capacity: int
    headroom: int


@dataclass(frozen=True)
class FitGate:
    """A GPU, and the bytes that must stay free there."""

    gpu: Gpu
    headroom: int = 0

    @property
    def rule(self) -> FitRule:
        """For reports."""
        return FitRule(self.gpu.key, self.gpu.name, self.gpu.capacity, self.headroom)

    @classmethod
    def from_marker(
        cls,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        gpus: Mapping[str, Gpu],
        session_gpu: Gpu,
        source: str,
    ) -> list[FitGate]:
        """A gate for each GPU that a marker names among `gpus`; without a name, for the session's.

        Raises `UserError` with `source` (the test's node id) for anything that is no rule.
        """
        for name in kwargs:
            if name != "headroom":
                hint = did_you_mean(name, ["headroom"])
                raise UserError(
                    f"{source}: fits() has no argument {name!r}; {hint}allowed: names of GPUs, and headroom"
                )
        for given_name in args:
            if not isinstance(given_name, str) or given_name not in gpus:
                hint = did_you_mean(given_name, list(gpus)) if isinstance(given_name, str) else ""
                raise UserError(
                    f"{source}: fits({show(given_name)}): there is no virtual GPU of that name; {hint}known are "
                    f"{', '.join(gpus)}"
                )
        given = kwargs.get("headroom")
        where = f"{source}: fits(headroom=...)"
        headroom = 0 if given is None else parse_bytes(given, where)
        chosen = [gpus[str(name)] for name in dict.fromkeys(args)] or [session_gpu]
        for gpu in chosen:
            if headroom >= gpu.usable:
                raise UserError(
                    f"{where}: {show(given)} leaves nothing of {gpu.key}, where PyTorch can have "
                    f"{format_bytes(gpu.usable)}"
                )
        return [cls(gpu, headroom) for gpu in chosen]


@dataclass(frozen=True)
class FitJudgement:
    """What a rule said about a measurement. Figures are bytes of the rank that has the least left."""

    verdict: FitVerdict
    rule: FitRule
    rank: int | None = None  # None where nothing was measured
    phase: str | None = None  # where that rank has its peak reserved, or where it failed
    allocated: int | None = None  # peak of a run that has the whole GPU
    reserved: int | None = None
    outside: Mapping[str, int] = field(default_factory=dict)  # by what holds them
    failure: Failure | None = None  # of the run on that GPU, alone or with less memory
    notes: tuple[str, ...] = ()  # sentences for the report, beside the verdict

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.verdict == "fits"

    @property
    def room(self) -> int:
        """Bytes that PyTorch may have."""
        return self.rule.capacity - sum(self.outside.values()) - self.rule.headroom

    @property
    def left(self) -> int | None:
        """Bytes that PyTorch's reserve leaves beside headroom and memory outside; negative: it takes some of these."""
        return None if self.reserved is None else self.room - self.reserved

    def explain(self) -> str:
        """The verdict in one sentence."""
        rule = self.rule
        beside = f"beside {format_bytes(sum(self.outside.values()))} outside PyTorch"
        if rule.headroom:
            beside += f" and {format_bytes(rule.headroom)} of headroom"
        if self.verdict == "fits":
            assert self.left is not None
            rest = f"with {format_bytes(self.left)} left" if self.left >= 0 else "when PyTorch empties its cache"
            return f"fits {rule.gpu} {rest} {beside}"
        if self.reserved is None or self.allocated is None:
            how = f": rank {self.failure.rank} ended with {self.failure.kind}" if self.failure else ""
            return f"{rule.gpu}: {self.verdict}{how}"
        if self.verdict == "starved":
            return (
                f"starved: fits {rule.gpu} alone and not {beside}: PyTorch's live bytes leave "
                f"{format_bytes(self.room - self.allocated)}, what it reserves takes them"
            )
        return f"out of memory: {rule.gpu} lacks {format_bytes(self.allocated - self.room)} {beside}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, and what follows from it."""
        return {
            **dataclasses.asdict(self),
            "passed": self.passed,
            "left": self.left,
            "explanation": self.explain(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> FitJudgement:
        """Read what `to_json` wrote."""
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        judgement: FitJudgement = read_plain(cls, fields, source)
        return judgement


def judge_recipe(gate: FitGate, measurement: Measurement, ranks: Ranks, launcher: Launcher) -> FitJudgement:
    """Judge a measured recipe by evidence, and by as few runs as that takes.

    If the measurement is of that GPU and every rank's peak reserved leaves room, it fits; if the live bytes of one do
    not, it does not. Else ranks that lack room are run again on that GPU with just the memory that is there for
    PyTorch, and it fits exactly if none runs out of it.
    """
    from .measure.ranks import chosen

    assert measurement.recipe is not None
    recipe = Recipe.from_dict(measurement.recipe, "recipe")
    there = launcher.on(gate.gpu)
    alone = measurement
    if measurement.device != there.device:
        # What a rank sends does not depend on the GPU, so that it need not be counted again.
        known = {rank.rank: rank for rank in measurement.ranks if outside.counted(rank) is not None}
        uncounted = any(rank.rank not in known for rank in chosen(recipe, ranks))
        alone = there.measure(recipe, ranks=ranks, count_flops=uncounted, check_effects=False)
        alone = replace(alone, ranks=tuple(_with_counts(rank, known.get(rank.rank)) for rank in alone.ranks))
    if alone.failure is not None or not alone.ranks:
        return _failed(gate, _explained(there, alone))
    short = [rank for rank in alone.ranks if _left(gate, rank) < 0]
    squeezed: dict[int, RankMeasurement] = {}
    failed: dict[int, Measurement] = {}
    lacking = [rank for rank in short if _beside(gate, rank) == "out of memory"]
    for gpu in dict.fromkeys(_squeezed(gate, rank) for rank in short if not lacking):
        alike = [rank.rank for rank in short if _squeezed(gate, rank) == gpu]
        again = launcher.on(gpu).measure(recipe, ranks=alike, count_flops=False, check_effects=False)
        squeezed |= {rank.rank: rank for rank in again.ranks}
        if again.failure is not None:
            if again.failure.kind != "out of memory":
                return _failed(gate, again)
            failed[again.failure.rank] = again
    lacking = lacking or [rank for rank in short if rank.rank in failed]
    if lacking:
        worst = max(lacking, key=lambda rank: (rank.peak() + _outside_bytes(gate, rank), -rank.rank))
        failure = _failure_of(worst, failed.get(worst.rank), recipe, launcher.on(_squeezed(gate, worst)))
        return _judgement(gate, _beside(gate, worst), worst, alone, failure=failure)
    worst = min(alone.ranks, key=lambda rank: (_left(gate, rank), rank.rank))
    notes = []
    if worst.rank in squeezed:
        times = squeezed[worst.rank].allocation_retries
        now = format_bytes(squeezed[worst.rank].peak("reserved"))
        notes.append(
            f"with the whole GPU PyTorch reserves {format_bytes(worst.peak('reserved'))}, more than there is beside "
            f"the rest; with less it emptied its cache {times} times and reserved {now}"
        )
    return _judgement(gate, "fits", worst, alone, notes=tuple(notes))


def judge_own(gate: FitGate, measurement: Measurement) -> FitJudgement:
    """Judge a test that ran whole in a worker on that GPU, by its figures alone."""
    if measurement.failure is not None or not measurement.ranks:
        return _failed(gate, measurement)
    worst = min(measurement.ranks, key=lambda rank: _left(gate, rank))
    if worst.peak("reserved") == 0:
        return FitJudgement("invalid", gate.rule, worst.rank, notes=("nothing was allocated on the device",))
    if _left(gate, worst) >= 0:
        return _judgement(gate, "fits", worst, measurement)
    note = "judged by the peaks alone: with less memory PyTorch might have emptied its cache and run on"
    return _judgement(gate, _beside(gate, worst), worst, measurement, notes=(note,))


def _failure_of(rank: RankMeasurement, again: Measurement | None, recipe: Recipe, tight: Launcher) -> Failure | None:
    """Of a rank that lacks memory on the GPU of `tight`; `again` is the run there that it ended, if there was one."""
    if tight.gpu.usable <= 0:
        return Failure("out of memory", rank.rank, "headroom and memory outside PyTorch leave nothing of the GPU")
    if again is None:
        again = tight.measure(recipe, ranks=[rank.rank], count_flops=False, check_effects=False)
    return _explained(tight, again).failure


def _with_counts(rank: RankMeasurement, known: RankMeasurement | None) -> RankMeasurement:
    if known is None:
        return rank
    return replace(rank, flops_per_step=known.flops_per_step, collective_bytes=known.collective_bytes)


def _outside(gate: FitGate, rank: RankMeasurement) -> dict[str, int]:
    return outside.estimate(gate.gpu, outside.counted(rank))


def _outside_bytes(gate: FitGate, rank: RankMeasurement) -> int:
    return sum(_outside(gate, rank).values())


def _left(gate: FitGate, rank: RankMeasurement) -> int:
    """Bytes that the rank's reserve leaves beside the rest."""
    return gate.gpu.capacity - gate.headroom - _outside_bytes(gate, rank) - rank.peak("reserved")


def _squeezed(gate: FitGate, rank: RankMeasurement) -> Gpu:
    """The GPU with just the memory that is there for the rank. It keeps its size, of which settings may be a share."""
    return replace(gate.gpu, context_bytes=_outside_bytes(gate, rank) + gate.headroom)


def _beside(gate: FitGate, rank: RankMeasurement) -> FitVerdict:
    """Why a rank has too little: of its peaks when it has the whole GPU."""
    live = rank.peak() + _outside_bytes(gate, rank) + gate.headroom
    return "starved" if live <= gate.gpu.capacity else "out of memory"


def _judgement(
    gate: FitGate,
    verdict: FitVerdict,
    rank: RankMeasurement,
    alone: Measurement,
    failure: Failure | None = None,
    notes: tuple[str, ...] = (),
) -> FitJudgement:
    uncounted = ", ".join(str(one.rank) for one in alone.ranks if outside.counted(one) is None)
    if uncounted:
        notes += (f"NCCL's memory is not in it: the collectives of a step were not counted on rank {uncounted}",)
    return FitJudgement(
        verdict,
        gate.rule,
        rank.rank,
        rank.peak_phase("reserved").name,
        rank.peak(),
        rank.peak("reserved"),
        _outside(gate, rank),
        failure,
        notes,
    )


def _failed(gate: FitGate, measurement: Measurement) -> FitJudgement:
    """Of a run that did not come to its end on that GPU."""
    failure = measurement.failure
    if failure is None:
        return FitJudgement("invalid", gate.rule, notes=("no rank was measured",))
    verdicts: dict[str, FitVerdict] = {k: k for k in ("out of memory", "refused", "no effect")}
    verdict = verdicts.get(failure.kind, "invalid")
    return FitJudgement(verdict, gate.rule, failure.rank, failure.name, failure=failure)


def _explained(launcher: Launcher, measurement: Measurement) -> Measurement:
    """With what would help, if the allocator said what it lacked."""
    return launcher.explain(measurement) if measurement.can_be_explained else measurement
