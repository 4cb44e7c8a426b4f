"""The evidence of one test, as the rules read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..compare import Comparison
from ..errors import UserError
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import Judgement
from ..growth import GrowthSummary
from ..measurement import Failure, Measurement, RankMeasurement, selects
from ..oom import Shortage
from ..recipe import Recipe
from ..savings import SavingJudgement
from ..split import PeakGrowth
from ..throughput import ThroughputJudgement


def is_fragmented(shortage: Shortage) -> bool:
    """By its diagnosis; where that has no trial with expandable segments, if what is free would have been enough."""
    if shortage.verdict != "unknown":
        return shortage.verdict == "fragmentation"
    tried = shortage.diagnosis is not None and shortage.diagnosis.trial("expandable segments") is not None
    return not tried and not shortage.expandable_segments and shortage.unusable >= shortage.requested


class Spot(NamedTuple):
    """A peak of allocated bytes that is too high: of one rank, over all phases or over those that `phase` selects."""

    rank: RankMeasurement
    phase: str | None
    why: str  # as in "rank 0 ran out of memory"
    growth: PeakGrowth | None = None  # against its baseline, where it is over that and both have a split


@dataclass(frozen=True)
class Subject:
    """A measurement, and what was said about it."""

    measurement: Measurement
    name: str = ""  # that the test gave it
    peaks: tuple[Judgement, ...] = ()
    savings: tuple[SavingJudgement, ...] = ()
    fits: tuple[FitJudgement, ...] = ()
    fragmentations: tuple[FragmentationJudgement, ...] = ()
    throughputs: tuple[ThroughputJudgement, ...] = ()

    @cached_property
    def recipe(self) -> Recipe | None:
        """None for a test without one, and for one that another version of this package wrote."""
        if self.measurement.recipe is None:
            return None
        try:
            return Recipe.from_dict(self.measurement.recipe, "recipe")
        except UserError:
            return None

    @property
    def of(self) -> str:
        """Behind what is said of the measurement, where it has a name."""
        return f" ({self.name})" if self.name else ""

    @property
    def out_of_memory(self) -> Failure | None:
        """How the measurement itself ran out of memory."""
        failure = self.measurement.failure
        return failure if failure is not None and failure.kind == "out of memory" else None

    @property
    def shortages(self) -> Iterator[tuple[Failure, str]]:
        """Every way in which memory ran out, on the GPUs of fits markers too: with the GPU's name, if it is another."""
        own = self.out_of_memory
        if own is not None and own.shortage is not None:
            yield own, ""
        for fit in self.fits:
            failure = fit.failure
            if failure is None or failure.kind != "out of memory" or failure.shortage is None:
                continue
            if own is None or failure.shortage != own.shortage:
                yield failure, f" on {fit.rule.gpu}"

    def rank(self, number: int | None) -> RankMeasurement | None:
        """The measured rank of that number."""
        return next((rank for rank in self.measurement.ranks if rank.rank == number and rank.phases), None)

    @property
    def too_high(self) -> Spot | None:
        """The peak that fails the test: where memory ran out, else the first that a marker refuses.

        Of allocated bytes alone: what is reserved beyond them, or lost to fragmentation, is no peak of any tensors.
        """
        spots: list[tuple[int | None, str | None, str, PeakGrowth | None]] = []
        if (failure := self.out_of_memory) is not None and not _lost_to_fragments(failure):
            spots.append((failure.rank, failure.name, f"rank {failure.rank} ran out of memory", None))
        for fit in self.fits:
            if fit.verdict == "out of memory" and not (fit.failure is not None and _lost_to_fragments(fit.failure)):
                spots.append((fit.rank, None, f"rank {fit.rank} does not fit {fit.rule.gpu}", None))
        for peak in self.peaks:
            if peak.verdict == "regression" and peak.gate.metric == "allocated":
                bound = "its limit" if peak.gate.limit is not None else "what its baseline allows"
                why = f"the peak of rank {peak.rank} is over {bound}"
                spots.append((peak.rank, peak.gate.phase, why, peak.growth))
        for saving in self.savings:
            comparison = saving.comparison
            saves_little = saving.verdict in ("saves too little", "no effect", "costs more")
            if comparison is None or comparison.metric != "allocated":
                continue
            if comparison.has_figures and saves_little:
                worst = comparison.worst_after.rank
                spots.append((worst, comparison.phase, f"rank {worst} saves too little against its control", None))
        for number, phase, why, growth in spots:
            if (rank := self.rank(number)) is not None:
                has_phase = any(selects(phase, figures) for figures in rank.phases)
                return Spot(rank, phase if has_phase else None, f"{why}{self.of}", growth)
        return None


def _lost_to_fragments(failure: Failure) -> bool:
    return failure.shortage is not None and is_fragmented(failure.shortage)


@dataclass(frozen=True)
class Case:
    """All that one test measured, and what was said about it."""

    subjects: tuple[Subject, ...] = ()
    comparisons: tuple[Comparison, ...] = ()  # of sweeps, which no marker judges
    growths: tuple[GrowthSummary, ...] = ()
    refused: tuple[str, ...] = ()  # the documented constraints that its recipes break, by id

    @property
    def compared(self) -> list[Comparison]:
        """All comparisons, those of memory_saving markers first."""
        judged = [saving.comparison for subject in self.subjects for saving in subject.savings]
        return [*(comparison for comparison in judged if comparison is not None), *self.comparisons]
