"""Why memory ran out, and what is reserved and not used: each rule with its evidence, and not without."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evidence import (
    DENSE,
    GIB,
    MIB,
    STEP_2,
    compared,
    held,
    measurement,
    out_of_memory,
    rank,
    rules,
    shortage,
    text,
    the,
)

from pytest_mbmem.diagnosis import Case, Subject
from pytest_mbmem.fits import FitJudgement, FitRule
from pytest_mbmem.fragmentation import FragmentationJudgement, FragmentationRule
from pytest_mbmem.gates import DEFAULT_SLACK, Judgement, PeakGate
from pytest_mbmem.measurement import Composition, Owner
from pytest_mbmem.oom import Remedy, Shortage, Trial
from pytest_mbmem.split import UNALLOCATED, Part, growth

EXPANDED = Trial("expandable segments", False, True, 72 * GIB, 73 * GIB)
NEED = Trial("without limit", False, True, 90 * GIB, 95 * GIB)


def ran_out(found: Shortage | None, *others: Any, **rest: Any) -> Subject:
    return Subject(measurement(*others, failure=out_of_memory(found), **rest))


# Fragmentation --------------------------------------------------------------------------------------------------------


def test_fragmentation_is_what_the_trial_with_expandable_segments_shows() -> None:
    found = the("fragmentation", ran_out(shortage("fragmentation", EXPANDED)))
    assert found.symptom.startswith("rank 0 asked for 2.00 GiB in step-1/forward")
    assert "6.00 GiB were reserved and free, in 4 pieces, the largest 1.00 GiB" in text(found)
    assert "the same allocations fit with expandable segments: it reserves 73.00 GiB" in text(found)
    assert [(action.what, action.cost) for action in found.actions] == [
        ('set memory.alloc_conf "expandable_segments:True"', "no cost in throughput")
    ]


@pytest.mark.parametrize("verdict", [None, "unknown"])
@given(unusable=st.integers(0, 8), requested=st.integers(1, 8), expandable=st.booleans())
def test_without_a_trial_only_free_pieces_that_would_be_enough_are_fragmentation(
    verdict: Any, unusable: int, requested: int, expandable: bool
) -> None:
    found = shortage(
        verdict,
        reserved=(70 + unusable) * GIB,
        requested=requested * GIB,
        expandable_segments=expandable,
    )
    fires = unusable >= requested and not expandable
    assert ("fragmentation" in rules(ran_out(found))) == fires


def test_fragmentation_is_not_said_against_its_trial() -> None:
    contradicted = Trial("expandable segments", False, False)
    assert "fragmentation" not in rules(ran_out(shortage("unknown", EXPANDED, contradicted)))
    assert "fragmentation" not in rules(ran_out(shortage("capacity", contradicted)))
    assert rules(ran_out(None)) == []


# Capacity and what is outside -----------------------------------------------------------------------------------------


def test_capacity_says_what_lacks_and_what_would_fit_at_which_cost() -> None:
    remedies = (
        Remedy("recompute core_attn", "little", peak_allocated=89 * GIB, saved=GIB, fits=False),
        Remedy("recompute mlp", "-16%", peak_allocated=60 * GIB, saved=30 * GIB, fits=True),
        Remedy("full recompute", "most", peak_allocated=40 * GIB, saved=50 * GIB, fits=True),
    )
    partial = rank(owners=held({"mlp": 50 * GIB}, rest=20 * GIB))
    found = the("capacity", ran_out(shortage("capacity", NEED, remedies=remedies), partial))
    assert "the whole run needs 90.00 GiB and PyTorch can have 77.00 GiB: 13.00 GiB too little" in text(found)
    assert "the most that was live: 50.00 GiB activations, 20.00 GiB parameters" in text(found)
    assert found.cause == "a genuine capacity limit: mostly activations"
    assert [(action.what, action.cost) for action in found.actions] == [
        ("recompute mlp (saves 30.00 GiB), which fits", "-16%"),
        ("full recompute (saves 50.00 GiB), which fits", "most"),
    ]


def test_capacity_where_no_remedy_fits_names_those_that_save_much_and_that() -> None:
    remedies = (
        Remedy("recompute mlp", "-16%", peak_allocated=85 * GIB, saved=5 * GIB, fits=False),
        Remedy("recompute core_attn", "little", peak_allocated=90 * GIB, saved=MIB, fits=False),
        Remedy("PP 1 -> 2", "moderate", note="not possible: x"),
    )
    held_by = held({"mlp": 20 * GIB}, rest=50 * GIB)
    found = the("capacity", ran_out(shortage("capacity", NEED, remedies=remedies), rank(owners=held_by)))
    assert [action.what for action in found.actions] == [
        "recompute mlp (saves 5.00 GiB, not enough alone)",
    ]
    assert found.cause == "a genuine capacity limit: mostly model state, which recompute does not reach"


def test_capacity_is_not_said_to_lack_less_than_nothing() -> None:
    """Where the live bytes alone would fit, and what PyTorch reserves around them does not."""
    near = dataclasses.replace(NEED, peak_allocated=76 * GIB)
    evidence = text(the("capacity", ran_out(shortage("capacity", near))))
    assert "needs 76.00 GiB and PyTorch can have 77.00 GiB: too little, as it reserves more than is live" in evidence


def test_capacity_names_a_request_that_is_larger_than_what_was_live() -> None:
    logits = shortage("capacity", NEED, requested=125 * GIB)
    found = the("capacity", ran_out(logits, rank(owners=held({"mlp": 3 * GIB}, rest=4 * GIB))))
    assert found.cause == "a genuine capacity limit: mostly the request that failed"
    temporary = {Owner("temporaries", "output_layer"): 18 * GIB, Owner("main gradients", "decoder"): GIB}
    found = the("capacity", ran_out(shortage("capacity", NEED), rank(owners=temporary)))
    assert found.cause == "a genuine capacity limit: mostly temporaries"


def test_capacity_is_told_by_the_phase_that_ran_out() -> None:
    sizes = {(1, "backward"): 70 * GIB, (1, "optimizer"): 20 * GIB}
    owners = held({"mlp": 50 * GIB}) | {Owner("optimizer state", "decoder"): 20 * GIB}
    at_peaks = ((50 * GIB, 20 * GIB), (0, 20 * GIB))
    one = rank(phases=sizes, composition=Composition(tuple(owners), at_peaks))
    failure = out_of_memory(shortage("capacity", NEED), place=(1, "optimizer"))
    found = the("capacity", Subject(measurement(one, failure=failure)))
    assert "the most that was live in step-1/optimizer: 20.00 GiB optimizer state" in text(found)
    assert found.cause.startswith("a genuine capacity limit: mostly model state")


def test_remedies_that_were_not_measured_are_named_with_the_reason() -> None:
    remedies = (
        Remedy("recompute mlp", "-16%", note="timeout"),
        Remedy("PP 1 -> 2", "moderate", note="not possible: x"),
    )
    found = the("capacity", ran_out(shortage("capacity", NEED, remedies=remedies)))
    assert [action.what for action in found.actions] == ["recompute mlp (timeout)", "PP 1 -> 2 (not possible: x)"]


def test_capacity_of_a_whole_test_names_what_the_documents_advise() -> None:
    replayed = dataclasses.replace(NEED, replayed=True)
    found = the("capacity", ran_out(shortage("capacity", replayed), recipe=None))
    assert "what was asked for makes 90.00 GiB" in text(found)
    assert [action.cost for action in found.actions][:2] == [
        "about 1 to 2%",
        "moderate (-6% on Llama 3 70B if DP is halved)",
    ]


@pytest.mark.parametrize("verdict", ["fragmentation", "starved", "unknown", None])
def test_capacity_is_no_other_verdict(verdict: Any) -> None:
    assert "capacity" not in rules(ran_out(shortage(verdict)))


def test_memory_outside_pytorch() -> None:
    found = the("memory outside PyTorch", ran_out(shortage("starved")))
    assert "3.00 GiB of 80.00 GiB are outside PyTorch's reach" in text(found)
    assert "expandable" not in " ".join(action.what for action in found.actions)  # these were tried, and did not fit
    fitting = Remedy("recompute mlp", "-16%", peak_allocated=60 * GIB, saved=30 * GIB, fits=True)
    found = the("memory outside PyTorch", ran_out(shortage("starved", remedies=(fitting,))))
    assert found.actions[1].what == "recompute mlp (saves 30.00 GiB), which fits"
    assert "memory outside PyTorch" not in rules(ran_out(shortage("capacity")))


def fit(**rest: Any) -> FitJudgement:
    rule = FitRule("h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, 0)
    return FitJudgement("starved", rule, 0, "step-2/backward", 70 * GIB, 79 * GIB, {"NCCL": 2 * GIB}, **rest)


def test_a_fits_marker_that_is_starved_has_the_room_and_what_is_reserved() -> None:
    found = the("memory outside PyTorch", Subject(measurement(rank()), fits=(fit(),)))
    assert "PyTorch may have 78.00 GiB, it reserves 79.00 GiB for 70.00 GiB of live bytes; 2.00 GiB outside" in text(
        found
    )


def test_a_fits_marker_whose_run_was_explained_is_said_by_that() -> None:
    failure = out_of_memory(shortage("fragmentation", EXPANDED))
    assert rules(Subject(measurement(rank()), fits=(fit(failure=failure),))) == ["fragmentation"]
    assert rules(Subject(measurement(rank()), fits=(dataclasses.replace(fit(), verdict="fits"),))) == []


# A single rank --------------------------------------------------------------------------------------------------------


def alone(verdict: Any, *, left: int = 3 * GIB, others: int = 1, phases: Any = None, **rest: Any) -> Subject:
    fine = [rank(n, 60 * GIB, reserved=80 * GIB - left, phases=phases) for n in range(1, others + 1)]
    return ran_out(shortage(verdict, **rest), rank(0, 70 * GIB, phases={(1, "forward"): 70 * GIB}), *fine)


def test_a_single_rank_out_of_memory_despite_headroom_is_fragmentation() -> None:
    found = the("single-rank out of memory", alone("unknown"))
    assert found.symptom == "rank 0 alone runs out of memory; 1 other measured rank does not"
    assert "rank 1, the fullest other one, peaks at 60.00 GiB live and 77.00 GiB reserved, with 3.00 GiB left" in text(
        found
    )
    assert found.cause == "memory fragmentation on this rank"
    assert "the allocator has default settings" in found.confirm


def test_a_single_rank_that_holds_more_is_a_matter_of_the_split() -> None:
    found = the("single-rank out of memory", alone("capacity", others=2))
    assert found.cause == "this rank holds more than the others: the split is uneven"
    assert found.symptom.endswith("2 other measured ranks do not")


def test_a_single_rank_without_free_pieces_is_not_said_to_be_fragmented() -> None:
    found = the("single-rank out of memory", alone("unknown", reserved=70 * GIB))
    assert found.cause.endswith("nothing measured tells which")
    assert len(found.actions) == 2
    expandable = the("single-rank out of memory", alone("unknown", reserved=70 * GIB, expandable_segments=True))
    assert expandable.cause == "this rank holds more than the others: the split is uneven"


def test_a_single_rank_beside_what_is_outside_is_no_matter_of_the_split() -> None:
    assert rules(alone("starved")) == ["memory outside PyTorch"]


def test_what_others_have_left_is_of_what_the_process_may_have() -> None:
    assert "single-rank out of memory" not in rules(alone("unknown", left=3 * GIB, limit=78 * GIB))


@given(left=st.integers(0, 4 * GIB), others=st.integers(0, 3))
def test_a_single_rank_needs_others_that_could_have_served_the_request(left: int, others: int) -> None:
    fires = others > 0 and left >= 2 * GIB
    assert ("single-rank out of memory" in rules(alone("unknown", left=left, others=others))) == fires


def test_ranks_that_did_not_come_to_their_end_are_no_evidence() -> None:
    cut_short = {place: size or 60 * GIB for place, size in STEP_2.items() if place != (2, "optimizer")}
    assert "single-rank out of memory" not in rules(alone("unknown", phases=cut_short))


# The estimate ---------------------------------------------------------------------------------------------------------

HUGE = DENSE.but(num_layers=64, hidden_size=8192, num_attention_heads=64)


def test_an_estimate_beyond_the_gpu_names_its_largest_component() -> None:
    found = the("estimate exceeds capacity", ran_out(None, recipe=HUGE))
    assert "and the GPU has 80.00 GiB; the largest component is " in text(found)
    assert "mbmem estimate" in found.confirm


def test_what_the_recipe_has_already_is_not_advised_before_the_launch() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names = [
        [action.what for action in the("estimate exceeds capacity", ran_out(None, recipe=recipe)).actions]
        for recipe in (HUGE, HUGE.but(dp=2), HUGE.but(dp=2, distributed_optimizer=True, **full))
    ]
    assert ["the distributed optimizer" in found for found in names] == [False, True, False]
    assert [any("recompute" in what for what in found) for found in names] == [True, True, False]
    assert not any("expert" in what for found in names for what in found)


def test_an_estimate_that_counts_what_waits_in_host_memory_proves_nothing() -> None:
    offloading = HUGE.but(cpu_offloading=True, cpu_offloading_num_layers=1)
    assert "estimate exceeds capacity" not in rules(ran_out(None, recipe=offloading))


def test_an_estimate_that_fits_or_a_run_that_did_says_nothing() -> None:
    assert "estimate exceeds capacity" not in rules(ran_out(None, recipe=DENSE))
    assert "estimate exceeds capacity" not in rules(Subject(measurement(rank(), recipe=HUGE)))
    assert "estimate exceeds capacity" not in rules(ran_out(None, recipe=None))


# Reserved and not used ------------------------------------------------------------------------------------------------

RESERVED = "reserved high, allocated stable"


def fragmented(verdict: Any = "fragmented") -> Subject:
    rule = FragmentationRule(limit_fraction=0.1)
    found = FragmentationJudgement(verdict, rule, 0, "step-2/backward", 50 * GIB, 75 * GIB)
    return Subject(measurement(rank()), fragmentations=(found,))


def test_the_fragmentation_marker_tells_reserved_from_allocated() -> None:
    found = the(RESERVED, fragmented())
    assert "peaks of rank 0: reserved 75.00 GiB, allocated 50.00 GiB; 25.00 GiB (33.33%) hold no tensor" in text(found)
    assert found.actions[0].cost == "no cost in throughput"
    assert rules(fragmented("pass")) == []


def test_with_expandable_segments_on_they_are_not_advised_again() -> None:
    expandable = DENSE.but(alloc_conf="expandable_segments:True")
    subject = dataclasses.replace(fragmented(), measurement=measurement(rank(), recipe=expandable))
    first, second = the(RESERVED, subject).actions
    assert "are on already" in first.what
    assert "garbage_collection" not in second.what  # which frees no expandable segments


def grown(unallocated: int, allocated: int) -> Subject:
    """A regression of reserved bytes by so many that hold no tensor, and so many that do."""
    then = (Part("activations", 50 * GIB, "mlp", "x.py (f)"),)
    now = (Part("activations", 50 * GIB + allocated, "mlp", "x.py (f)"), Part(UNALLOCATED, unallocated))
    total = 50 * GIB + allocated + unallocated
    peak = Judgement(
        "regression",
        PeakGate("reserved"),
        "k",
        total,
        50 * GIB,
        51 * GIB,
        0,
        "step-2/backward",
        growth=growth(then, tuple(part for part in now if part.size)),
    )
    return Subject(measurement(rank(0, 50 * GIB + allocated, reserved=total)), peaks=(peak,))


def test_reserved_that_grew_alone_is_not_activations() -> None:
    found = the(RESERVED, grown(10 * GIB, 0))
    assert "reserved 50.00 GiB -> 60.00 GiB against the baseline, allocated 50.00 GiB -> 50.00 GiB" in text(found)


@given(unallocated=st.integers(0, 10 * GIB), allocated=st.integers(0, 2 * GIB))
def test_stable_is_what_a_gate_of_allocated_lets_pass(unallocated: int, allocated: int) -> None:
    stable = allocated <= 50 * GIB // 200 + DEFAULT_SLACK["allocated"]
    assert (RESERVED in rules(grown(unallocated, allocated))) == stable


def test_a_gate_of_allocated_beside_it_is_evidence_too() -> None:
    subject = grown(10 * GIB, 0)
    (peak,) = subject.peaks
    peak = dataclasses.replace(peak, growth=None)
    assert rules(dataclasses.replace(subject, peaks=(peak,))) == []
    allocated = Judgement("pass", PeakGate(), "k", 50 * GIB + MIB, 50 * GIB, 51 * GIB, 0, "step-2/backward")
    assert rules(dataclasses.replace(subject, peaks=(peak, allocated))) == [RESERVED]
    grew = dataclasses.replace(allocated, verdict="regression", measured=55 * GIB, rank=None)
    assert rules(dataclasses.replace(subject, peaks=(peak, grew))) == []


def test_a_candidate_that_reserves_more_than_its_control() -> None:
    control, candidate = (measurement(rank(0, 50 * GIB, reserved=size * GIB)) for size in (52, 60))
    assert RESERVED in rules(compared(control, candidate, metric="reserved", alloc_conf=("", "x")))
    more = measurement(rank(0, 58 * GIB, reserved=60 * GIB))
    assert RESERVED not in rules(compared(control, more, metric="reserved", alloc_conf=("", "x")))


def test_nothing_is_said_of_nothing() -> None:
    assert rules(Case()) == []
    assert rules(Subject(measurement(rank()))) == []
