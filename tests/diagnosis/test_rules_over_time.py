"""Leaks, loose baselines, changed environments; and settings that exclude each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evidence import GIB, MIB, measurement, out_of_memory, rank, rules, text, the

from pytest_mbmem.diagnosis import Case, Subject
from pytest_mbmem.diagnosis.settings import IDS
from pytest_mbmem.gates import Judgement, Origin, PeakGate
from pytest_mbmem.growth import Growth, Holder, RankGrowth, Trace
from pytest_mbmem.incompatibilities import catalog
from pytest_mbmem.throughput import ThroughputGate, ThroughputJudgement

# Leaks ----------------------------------------------------------------------------------------------------------------


def growing(*resting: int, slack: int = 4096, **rest: Any) -> Case:
    trace = Trace(resting=resting, peak=max(resting), **rest)
    return Case(growths=(Growth((RankGrowth(3, trace),), slack).summary(),))


def test_a_leak_by_step_has_its_figures_and_its_holder() -> None:
    holder = Holder("losses[*]", 6 * MIB, 6, "1 float32", "train.py:9 (step)")
    found = the("leak by step", growing(*(n * MIB for n in range(1, 7)), grown=(holder,)))
    assert found.symptom == "rank 3 keeps 1.00 MiB more with every step"
    assert "1048576 -> 2097152" in text(found)
    assert "held by losses[*]: 6 tensors, 6.00 MiB" in text(found)


@given(st.integers(0, 20000), st.integers(0, 20000))
def test_a_leak_is_more_than_the_slack(step: int, slack: int) -> None:
    assert ("leak by step" in rules(growing(*(n * step for n in range(7)), slack=slack))) == (step > slack)


def test_other_growth_is_no_leak_by_step() -> None:
    assert rules(growing(MIB, MIB, MIB, MIB, MIB, MIB, freed_by_gc=GIB)) == []


# Baselines ------------------------------------------------------------------------------------------------------------


def judged(verdict: Any, measured: int | None, reference: int, **rest: Any) -> Subject:
    gate = rest.pop("gate", PeakGate())
    peak = Judgement(verdict, gate, "k", measured, reference, reference, 0, "step-2/backward", **rest)
    return Subject(measurement(rank()), peaks=(peak,))


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_baseline_is_loose_beyond_twice_what_was_measured(measured: int, reference: int) -> None:
    assert ("loose baseline" in rules(judged("improvement", measured, reference))) == (reference > 2 * measured)


def test_a_loose_baseline_says_how_loose() -> None:
    found = the("loose baseline", judged("improvement", GIB, 3 * GIB))
    assert found.evidence == ("it is 3.00 GiB, 3.0 times the 1.00 GiB that were measured",)
    assert "--mbmem-update=changed" in found.actions[0].what


def test_a_limit_and_a_baseline_of_another_recipe_are_not_loose() -> None:
    assert rules(judged("pass", GIB, 30 * GIB, gate=PeakGate(limit=30 * GIB))) == []
    assert rules(judged("stale", GIB, 30 * GIB)) == []


def test_a_loose_baseline_of_step_times_has_their_unit() -> None:
    gate = ThroughputGate()
    steps = ThroughputJudgement("improvement", gate, "k", "throughput", measured=10**7, reference=3 * 10**7)
    assert text(the("loose baseline", Subject(measurement(), throughputs=(steps,)))) == (
        "it is 30.00 ms, 3.0 times the 10.00 ms that were measured"
    )


OLD = Origin(0, "step-2/backward", {"torch": "2.13.0", "python": "3.11"})


def test_a_regression_in_another_environment() -> None:
    found = the("environment changed", judged("regression", 2 * GIB, GIB, origin=OLD))
    assert found.evidence[0] == "torch 2.13.0 -> 2.14.1, python 3.11 -> (not recorded)"
    assert "peak allocated 2.00 GiB on rank 0" in found.evidence[1]
    assert found.confirm == "run the test once in that environment: torch 2.13.0, python 3.11"


@pytest.mark.parametrize("verdict", ["pass", "stale", "invalid"])
def test_a_verdict_that_did_not_change_needs_no_environment(verdict: Any) -> None:
    assert rules(judged(verdict, GIB, GIB, origin=OLD)) == []


def test_the_same_environment_is_no_cause() -> None:
    same = dataclasses.replace(OLD, environment={"torch": "2.14.1"})
    assert rules(judged("regression", 2 * GIB, GIB, origin=same)) == []
    assert rules(judged("regression", 2 * GIB, GIB)) == []


def test_memory_that_runs_out_in_another_environment() -> None:
    subject = judged("out of memory", None, GIB, origin=OLD, notes=("rank 0 ended with: out of memory",))
    subject = dataclasses.replace(subject, measurement=measurement(failure=out_of_memory()))
    assert rules(subject) == ["environment changed"]


# Settings that exclude each other -------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", sorted(IDS))
def test_a_constraint_of_the_documents_tables_has_a_finding(id: str) -> None:
    found = the(IDS[id], Case(refused=(id, "another-one")))
    assert found.evidence == (f"{id} forbids: {catalog()[id].forbids.text}",)
    assert f"mbmem explain {id}" in found.confirm
    assert found.actions


def test_every_other_constraint_is_said_by_its_error_alone() -> None:
    assert rules(Case(refused=tuple(id for id in catalog() if id not in IDS))) == []
    assert set(IDS) <= set(catalog())
    assert {id for id in catalog() if id.startswith("ep-overlap-with-") and id.endswith("moe-recompute")} <= set(IDS)
