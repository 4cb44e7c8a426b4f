"""A peak or a failure that is at another place than before."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evidence import GIB, MIB, RECOMPUTE, STEP_2, compared, measurement, out_of_memory, rank, rules, text, the

from pytest_mbmem.diagnosis import Case, Subject
from pytest_mbmem.gates import Judgement, Origin, PeakGate
from pytest_mbmem.measurement import PHASES

MOVED, FARTHER = "peak moved", "advanced, still out of memory"


def phases(forward: int, backward: int) -> dict[tuple[int, str], int]:
    return {(0, "build"): MIB, (2, "forward"): forward, (2, "backward"): backward, (2, "optimizer"): MIB}


# In a comparison ------------------------------------------------------------------------------------------------------


def in_phases(before: tuple[int, int], after: tuple[int, int]) -> Case:
    control, candidate = (measurement(rank(0, max(both), phases=phases(*both))) for both in (before, after))
    return compared(control, candidate, **RECOMPUTE)


def test_a_saving_that_another_phase_hides() -> None:
    found = the(MOVED, in_phases((10 * GIB, 9 * GIB), (6 * GIB, 9 * GIB)))
    assert "rank 0 in step-2/forward takes 4.00 GiB less (10.00 GiB -> 6.00 GiB)" in text(found)
    assert "the peak, now on rank 0 in step-2/backward, is 9.00 GiB" in text(found)
    assert "another part of the step" in found.cause


@given(*[st.integers(1, 20)] * 4)
def test_a_phase_that_is_the_same_or_saves_no_more_is_none(a: int, b: int, c: int, d: int) -> None:
    before, after = (a * MIB * 100, b * MIB * 100), (c * MIB * 100, d * MIB * 100)
    at, to = ("forward" if pair[0] >= pair[1] else "backward" for pair in (before, after))
    there = after[0] if at == "forward" else after[1]
    hidden = max(before) - there > max(before) - max(after) + MIB
    assert (MOVED in rules(in_phases(before, after))) == (at != to and hidden)


def test_another_rank_is_the_worst_now() -> None:
    control = measurement(rank(0, 10 * GIB), rank(1, 9 * GIB))
    candidate = measurement(rank(0, 6 * GIB), rank(1, 9 * GIB))
    found = the(MOVED, compared(control, candidate, **RECOMPUTE))
    assert "rank 0 takes 4.00 GiB less (10.00 GiB -> 6.00 GiB); the peak, now on rank 1" in text(found)
    assert "pipeline stages" in found.cause
    alike = measurement(rank(0, 9 * GIB), rank(1, 9 * GIB))
    assert MOVED not in rules(compared(control, alike, **RECOMPUTE))


def test_ranks_of_one_stage_have_the_same_layers() -> None:
    def of(first: int, second: int) -> Any:
        sizes = zip((0, 1), (first, second), strict=True)
        return measurement(
            *(dataclasses.replace(rank(n, size * GIB), coordinates={"pp": 0, "dp": n}) for n, size in sizes)
        )

    found = the(MOVED, compared(of(10, 9), of(6, 9), **RECOMPUTE))
    assert found.cause.startswith("ranks of one pipeline stage hold unequal shares")
    assert "attribute the peak" in found.actions[0].what


def test_of_a_phase_only_its_own_peaks_are_compared() -> None:
    control = measurement(*(rank(n, 10 * GIB, phases=phases(size, 20 * GIB)) for n, size in ((0, 10 * GIB), (1, GIB))))
    candidate = measurement(*(rank(n, 10 * GIB, phases=phases(size, 20 * GIB)) for n, size in ((0, GIB), (1, 9 * GIB))))
    (comparison,) = compared(control, candidate, **RECOMPUTE).comparisons
    case = Case(comparisons=(dataclasses.replace(comparison, phase="forward"),))
    assert "rank 0 takes 9.00 GiB less (10.00 GiB -> 1.00 GiB)" in text(the(MOVED, case))


def test_a_rank_that_the_candidate_does_not_have_is_no_evidence() -> None:
    control, candidate = measurement(rank(3, 10 * GIB)), measurement(rank(0, 9 * GIB))
    assert rules(compared(control, candidate, pp=(4, 1))) == []


# Against a baseline ---------------------------------------------------------------------------------------------------


def regressed(origin: Origin | None, *ranks: Any, allowed: int = 10 * GIB) -> Subject:
    one = measurement(*ranks)
    worst = one.worst()
    place = worst.peak_phase().name
    peak = Judgement("regression", PeakGate(), "k", worst.peak(), 9 * GIB, allowed, worst.rank, place, origin=origin)
    return Subject(one, peaks=(peak,))


THEN = Origin(0, "step-2/forward", {"torch": "2.14.1"})


def test_a_regression_on_another_rank_or_in_another_phase() -> None:
    found = the(MOVED, regressed(THEN, rank(0, 9 * GIB), rank(1, 12 * GIB)))
    assert "rank 0, where it was 9.00 GiB, has 9.00 GiB; rank 1 in step-2/backward has 12.00 GiB" in text(found)
    found = the(MOVED, regressed(THEN, rank(0, 12 * GIB, phases=phases(9 * GIB, 12 * GIB))))
    assert "rank 0 in step-2/forward, where it was 9.00 GiB, has 9.00 GiB" in text(found)


@pytest.mark.parametrize(
    ("origin", "ranks"),
    [
        (THEN, [rank(0, 12 * GIB, phases=phases(12 * GIB, 9 * GIB))]),  # the same place
        (THEN, [rank(0, 12 * GIB, phases=phases(11 * GIB, 12 * GIB))]),  # which is over what is allowed too
        (dataclasses.replace(THEN, phase="step-1/backward"), [rank(0, 12 * GIB)]),  # the same phase of another step
        (dataclasses.replace(THEN, rank=7), [rank(0, 12 * GIB)]),  # not measured now
        (None, [rank(0, 12 * GIB)]),
    ],
    ids=["same", "both", "step", "unmeasured", "unknown"],
)
def test_a_regression_where_the_peak_was_is_none(origin: Origin | None, ranks: list[Any]) -> None:
    assert rules(regressed(origin, *ranks)) == []


# Out of memory on both sides ------------------------------------------------------------------------------------------


def both_fail(control: Any, candidate: Any) -> Case:
    cut = rank(0, GIB, phases=dict(list(STEP_2.items())[:1]))
    return compared(measurement(cut, failure=control), measurement(cut, failure=candidate), **RECOMPUTE)


def test_farther_and_still_out_of_memory() -> None:
    case = both_fail(out_of_memory(place=(1, "forward")), out_of_memory(place=(1, "optimizer")))
    found = the(FARTHER, case)
    assert found.evidence == (
        "the control ends out of memory on rank 0 in step-1/forward, the candidate out of memory on rank 0 in "
        "step-1/optimizer",
    )
    assert MOVED not in rules(case)


places = st.tuples(st.integers(0, 3), st.sampled_from(PHASES))


@given(places, places)
def test_farther_is_later_in_the_order_of_a_step(before: tuple[int, str], after: tuple[int, str]) -> None:
    later = (after[0], PHASES.index(after[1])) > (before[0], PHASES.index(before[1]))
    assert (FARTHER in rules(both_fail(out_of_memory(place=before), out_of_memory(place=after)))) == later


def test_out_of_memory_on_another_rank_than_the_control() -> None:
    case = both_fail(out_of_memory(number=0), out_of_memory(number=3))
    assert "on rank 3 in step-1/forward" in text(the(MOVED, case))


def test_one_side_alone_is_no_evidence() -> None:
    later = out_of_memory(number=1, place=(2, "optimizer"))
    assert rules(both_fail(None, later)) == []
    assert rules(both_fail(dataclasses.replace(out_of_memory(), kind="died"), later)) == []
    assert FARTHER not in rules(both_fail(dataclasses.replace(out_of_memory(), step=None), later))
