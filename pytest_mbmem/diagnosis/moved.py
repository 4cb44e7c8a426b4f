"""Rules on a peak, or a failure, that is at another place than before."""

from __future__ import annotations

from collections.abc import Iterator

from ..compare import Comparison, how
from ..gates import Judgement
from ..measurement import PHASES, Failure, Metric, RankMeasurement, selects
from ..units import format_bytes
from .case import Case, Subject
from .finding import RECOMPUTE, Action, Finding

_BALANCE = Action("tune full block or uniform recompute, or selective labels, for the stage that is hot now")
_WHERE = "mbmem measure RECIPE.yaml --ranks all shows every rank and phase; peak_memory(phase=...) gates one phase"


def _name(place: str) -> str:
    """The phase without its step."""
    return place.rpartition("/")[2]


def peaks(case: Case) -> Iterator[Finding]:
    """A peak that is on another rank or in another phase than its control's or its baseline's."""
    for comparison in case.compared:
        control, candidate = comparison.control.failure, comparison.candidate.failure
        if comparison.has_figures:
            yield from _of_comparison(comparison)
            continue
        if control is None or candidate is None or not _both_out_of_memory(control, candidate):
            continue
        if control.rank != candidate.rank:
            yield _finding(
                "the candidate runs out of memory on another rank than its control",
                (f"the control ends {how(control)}, the candidate {how(candidate)}",),
                other_rank=True,
            )
    for subject in case.subjects:
        for peak in subject.peaks:
            yield from _of_baseline(subject, peak)


def _both_out_of_memory(control: Failure, candidate: Failure) -> bool:
    return control.kind == candidate.kind == "out of memory"


def _of_comparison(comparison: Comparison) -> Iterator[Finding]:
    before, after = comparison.worst_before, comparison.worst_after
    other_rank = before.rank != after.rank
    if not other_rank and _name(comparison.phase_before) == _name(comparison.phase_after):
        return
    same = next(
        (r for r in comparison.candidate.ranks if (r.rank, r.coordinates) == (before.rank, before.coordinates)), None
    )
    left = _peak_at(same, comparison.metric, comparison.phase if other_rank else comparison.phase_before)
    if left is None or comparison.before - left <= comparison.saving + comparison.slack:
        return
    there = f"rank {before.rank}" + ("" if other_rank else f" in {comparison.phase_before}")
    yield _finding(
        "the peak is at another place than in the control, so that less is saved of it than where it was",
        (
            f"{there} takes {format_bytes(comparison.before - left)} less ({format_bytes(comparison.before)} -> "
            f"{format_bytes(left)}); the peak, now on rank {after.rank} in {comparison.phase_after}, is "
            f"{format_bytes(comparison.after)}",
        ),
        other_rank,
        _are_of_one_stage(before, after),
    )


def _of_baseline(subject: Subject, peak: Judgement) -> Iterator[Finding]:
    """Of a regression, where the place of the baseline's peak is still within what it allows."""
    origin, rank = peak.origin, subject.rank(peak.rank)
    if peak.verdict != "regression" or origin is None or rank is None or peak.phase is None:
        return
    other_rank = origin.rank != rank.rank
    if not other_rank and _name(origin.phase) == _name(peak.phase):
        return
    then = subject.rank(origin.rank)
    left = _peak_at(then, peak.gate.metric, peak.gate.phase if other_rank else origin.phase)
    if then is None or left is None or peak.allowed is None or left > peak.allowed:
        return
    assert peak.measured is not None
    there = f"rank {origin.rank}" + ("" if other_rank else f" in {origin.phase}")
    yield _finding(
        f"the peak is at another place than the baseline's{subject.of}",
        (
            f"{there}, where it was {format_bytes(peak.reference or 0)}, has {format_bytes(left)}; rank {rank.rank} in "
            f"{peak.phase} has {format_bytes(peak.measured)}",
        ),
        other_rank,
        _are_of_one_stage(then, rank),
    )


def _peak_at(rank: RankMeasurement | None, metric: Metric, phase: str | None) -> int | None:
    """Of a rank, of all its phases or of those that `phase` selects; None where it was not measured there."""
    if rank is None:
        return None
    return max((figures.peak[metric] for figures in rank.phases if selects(phase, figures)), default=None)


def _are_of_one_stage(one: RankMeasurement, other: RankMeasurement) -> bool:
    """Whether both are known to have the same layers."""
    return "pp" in one.coordinates and one.coordinates["pp"] == other.coordinates.get("pp")


def _finding(symptom: str, evidence: tuple[str, ...], other_rank: bool, one_stage: bool = False) -> Finding:
    if other_rank and one_stage:
        cause = "ranks of one pipeline stage hold unequal shares, as of routed tokens or of the optimizer's state"
    elif other_rank:
        cause = "the layers' distribution over (virtual) pipeline stages makes another stage the bottleneck"
    else:
        cause = "another part of the step sets the peak now; what the setting saves lies before or behind it"
    phase = Action("attribute the peak of the phase where it is now, and choose the boundary that holds it")
    action = _BALANCE if other_rank and not one_stage else phase
    return Finding("peak moved", symptom, evidence, cause, _WHERE, (action,), RECOMPUTE)


def advanced(case: Case) -> Iterator[Finding]:
    """A candidate that runs out of memory as its control does, only later in the step."""
    for comparison in case.compared:
        control, candidate = comparison.control.failure, comparison.candidate.failure
        if control is None or candidate is None or not _both_out_of_memory(control, candidate):
            continue
        before, after = _order(control), _order(candidate)
        if before is None or after is None or after <= before:
            continue
        yield Finding(
            "advanced, still out of memory",
            f"with {' and '.join(comparison.differences)} the run gets farther, and still runs out of memory",
            (f"the control ends {how(control)}, the candidate {how(candidate)}",),
            "the peak moved into a later part of the step, such as gradient synchronization or the optimizer's state",
            "training.steps of 2 or more runs through optimizer-state initialization; mbmem.explain(measurement) says "
            "what the later failure lacks",
            (
                Action("record the changed stage, and call it no success before several steady steps run"),
                Action("go for what the later stage needs: the distributed optimizer, more stages, broader recompute"),
            ),
            RECOMPUTE,
        )


def _order(failure: Failure) -> tuple[int, int] | None:
    """How far the run came; None where that is not known."""
    if failure.step is None or failure.phase not in PHASES:
        return None
    return failure.step, PHASES.index(failure.phase)
