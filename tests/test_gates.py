"""Markers become gates, gates become verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_mbmem.baseline_file import Entry, Figure
from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import (
    DEFAULT_SLACK,
    DEFAULT_TOLERANCE,
    GateDefaults,
    Judgement,
    Origin,
    PeakGate,
    compare,
    judge,
    recipe_changes,
)
from pytest_mbmem.measurement import (
    Composition,
    Device,
    Failure,
    Measurement,
    Owner,
    PhaseFigures,
    RankMeasurement,
)
from pytest_mbmem.split import Part

H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=True)
MIB, GIB = 2**20, 2**30
SOURCE = "tests/test_x.py::test_y"
EXACT = PeakGate(tolerance=0.0, slack=0)


def measured(
    *allocated: int,
    reserved: int = 0,
    digest: str | None = "d1",
    environment: Mapping[str, str] | None = None,
    **rest: Any,
) -> Measurement:
    """One rank for each figure; every rank has a small build phase and its peak in the backward pass of step 2."""
    ranks = tuple(
        RankMeasurement(
            number,
            {},
            1,
            (
                PhaseFigures(0, "build", {"allocated": 1, "reserved": 1}, {}),
                PhaseFigures(2, "backward", {"allocated": size, "reserved": reserved}, {}),
            ),
        )
        for number, size in enumerate(allocated)
    )
    return Measurement(
        H100,
        ranks,
        recipe_digest=digest,
        environment={"torch": "2.14.1"} if environment is None else environment,
        **rest,
    )


def baseline(
    peak: int, metric_id: str = "allocated", digest: str | None = "d1", recipe: Any = None, **rest: Any
) -> Entry:
    figure = Figure(
        **{
            "value": peak,
            "rank": 0,
            "phase": "step-2/backward",
            "ranks": {0: peak},
            "first": peak,
            "environment": {"torch": "2.14.1"},
            **rest,
        }
    )
    return Entry(digest, recipe, {metric_id: figure})


def marker(*args: object, **kwargs: object) -> PeakGate:
    return PeakGate.from_marker(args, kwargs, GateDefaults(), SOURCE)


# Markers --------------------------------------------------------------------------------------------------------------


def test_a_bare_marker_gates_peak_allocated_against_a_baseline_with_the_defaults() -> None:
    assert marker() == PeakGate("allocated", None, DEFAULT_TOLERANCE["allocated"], DEFAULT_SLACK["allocated"], None)


def test_reserved_has_wider_defaults_than_allocated() -> None:
    gate = marker(metric="reserved")
    assert gate.tolerance == DEFAULT_TOLERANCE["reserved"] > DEFAULT_TOLERANCE["allocated"]
    assert gate.slack == DEFAULT_SLACK["reserved"] > DEFAULT_SLACK["allocated"]


@pytest.mark.parametrize("gate", [marker("2.5 GiB"), marker(limit="2.5 GiB"), marker(limit=5 * 2**29)])
def test_a_limit_is_a_size_named_or_positional(gate: PeakGate) -> None:
    assert gate.limit == 5 * 2**29


def test_every_argument_is_used() -> None:
    gate = marker(metric="reserved", phase="step-2/backward", tolerance="2%", slack="3 MiB")
    assert gate == PeakGate("reserved", None, 0.02, 3 * MIB, "step-2/backward")
    assert gate.metric_id == "reserved@step-2/backward"


def test_the_marker_goes_before_the_sessions_defaults_and_these_before_the_metrics() -> None:
    defaults = GateDefaults(tolerance=0.1, slack=5)
    assert PeakGate.from_marker((), {"metric": "reserved"}, defaults, SOURCE).tolerance == 0.1
    assert PeakGate.from_marker((), {"metric": "reserved"}, defaults, SOURCE).slack == 5
    assert PeakGate.from_marker((), {"tolerance": 0, "slack": 0}, defaults, SOURCE) == EXACT


def test_none_stands_for_an_argument_that_is_not_given() -> None:
    assert marker(None, metric=None, phase=None, tolerance=None, slack=None) == marker()
    assert marker(limit=None) == marker()


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {"limits": 5}, r"no argument 'limits'; did you mean 'limit'\? allowed: limit, metric, phase"),
        ((), {"foo": 5}, r"no argument 'foo'; allowed: limit, metric"),
        (("1 GiB", "reserved"), {}, "one positional argument at most, the limit"),
        (("1 GiB",), {"limit": "1 GiB"}, "one positional argument at most, the limit"),
        ((), {"metric": "Allocated"}, r"metric=...\): 'Allocated' is not one of allocated, reserved"),
        ((), {"metric": ["allocated"]}, r"metric=...\): \['allocated'\] is not one of"),
        ((), {"metric": "active"}, "'active' is not one of allocated, reserved"),
        ((), {"phase": "backwards"}, "phase='backwards' is not one of build, forward"),
        ((), {"phase": 2}, r"phase=...\): 2 is not a text"),
        ((), {"limit": "1 GiB", "tolerance": "1%"}, "a limit is absolute; remove tolerance"),
        ((), {"limit": "1 GiB", "tolerance": 0, "slack": 0}, "a limit is absolute; remove tolerance and slack"),
        ((), {"limit": 0}, "0 is not more than 0 bytes"),
        ((), {"limit": "0 GiB"}, "'0 GiB' is not more than 0 bytes"),
        ((), {"limit": -1}, r"limit=...\): -1 is not a size"),
        ((), {"limit": "-1 GiB"}, "'-1 GiB' is not a size"),
        ((), {"limit": 1.5}, "1.5 is not a size"),
        ((), {"limit": float("nan")}, "nan is not a size"),
        ((), {"limit": True}, "True is not a size"),
        ((), {"limit": "40 gigs"}, "'40 gigs' is not a size"),
        ((), {"slack": -1}, r"slack=...\): -1 is not a size"),
        ((), {"slack": False}, "False is not a size"),
        ((), {"slack": "3%"}, "'3%' is not a size"),
        ((), {"tolerance": -0.1}, r"tolerance=...\): -0.1 is not a fraction"),
        ((), {"tolerance": float("nan")}, "nan is not a fraction"),
        ((), {"tolerance": float("inf")}, "inf is not a fraction"),
        ((), {"tolerance": True}, "True is not a fraction"),
        ((), {"tolerance": 3}, "3 is not a fraction"),
        ((), {"tolerance": "100%"}, "'100%' would let the peak double; allowed are 0% to below 100%"),
    ],
)
def test_a_wrong_marker_is_refused_with_the_test_and_the_argument(
    args: tuple[object, ...], kwargs: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=rf"^tests/test_x\.py::test_y: peak_memory\(.*{message}"):
        PeakGate.from_marker(args, kwargs, GateDefaults(), SOURCE)


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=1)


@given(
    st.lists(anything, max_size=2),
    st.dictionaries(st.sampled_from(["limit", "metric", "phase", "tolerance", "slack", "x"]), anything),
)
def test_any_marker_is_a_usable_gate_or_a_user_error(args: list[object], kwargs: dict[str, object]) -> None:
    try:
        gate = PeakGate.from_marker(args, kwargs, GateDefaults(), SOURCE)
    except UserError:
        return
    assert gate.limit is None or gate.limit > 0
    assert 0 <= gate.tolerance < 1
    assert gate.slack >= 0


# The comparison -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(100, "pass"), (115, "pass"), (116, "regression"), (85, "pass"), (84, "improvement"), (1, "improvement")],
)
def test_tolerance_and_slack_add_up_and_only_more_memory_fails(peak: int, verdict: str) -> None:
    judgement = judge(PeakGate(tolerance=0.1, slack=5), measured(peak), baseline(100), "k")
    assert (judgement.verdict, judgement.allowed, judgement.reference) == (verdict, 115, 100)
    assert judgement.passed == (verdict != "regression")


def test_a_byte_more_fails_an_exact_gate() -> None:
    assert judge(EXACT, measured(2**50), baseline(2**50), "k").verdict == "pass"
    assert judge(EXACT, measured(2**50 + 1), baseline(2**50), "k").verdict == "regression"


def test_a_tolerance_is_the_decimal_that_was_written() -> None:
    # 0.07 * 100 is 7.000000000000001 in binary floating point, and 0.29 * 100 is 28.999999999999996.
    assert compare(129, 100, 0.29, 0) == "pass"
    assert compare(130, 100, 0.29, 0) == "regression"
    assert compare(107, 100, 0.07, 0) == "pass"
    assert compare(108, 100, 0.07, 0) == "regression"


@given(
    reference=st.integers(1, 2**60),
    tolerance=st.floats(0, 1, exclude_max=True),
    slack=st.integers(0, 2**40),
    change=st.integers(-(2**60), 2**60),
)
@example(reference=1, tolerance=5e-324, slack=0, change=0)
def test_the_comparison_is_exact(reference: int, tolerance: float, slack: int, change: int) -> None:
    peak = max(1, reference + change)
    exact = reference * Fraction(str(tolerance)) + slack
    if peak > reference + exact:
        expected = "regression"
    elif peak < reference - exact:
        expected = "improvement"
    else:
        expected = "pass"
    assert compare(peak, reference, tolerance, slack) == expected


def test_one_step_of_twenty_with_two_fifths_more_fails() -> None:
    steps = [PhaseFigures(n, "backward", {"allocated": GIB if n != 13 else GIB * 14 // 10}, {}) for n in range(1, 21)]
    run = Measurement(H100, (RankMeasurement(0, {}, 1, tuple(steps)),), recipe_digest="d1")
    judgement = judge(marker(), run, baseline(GIB), "k")
    assert (judgement.verdict, judgement.phase) == ("regression", "steady/backward")


def test_the_worst_rank_is_judged_and_named() -> None:
    judgement = judge(EXACT, measured(90, 130, 120), baseline(100, ranks={0: 100, 1: 100, 2: 100}), "k")
    assert (judgement.verdict, judgement.rank, judgement.measured, judgement.phase) == (
        "regression",
        1,
        130,
        "step-2/backward",
    )


def test_reserved_is_judged_by_its_own_figure() -> None:
    gate = replace(EXACT, metric="reserved")
    assert judge(gate, measured(1, reserved=50), baseline(50, "reserved"), "k").verdict == "pass"
    assert judge(gate, measured(1, reserved=51), baseline(50, "reserved"), "k").verdict == "regression"


def test_a_phase_is_judged_by_its_own_figure() -> None:
    gate = replace(EXACT, phase="build")
    judgement = judge(gate, measured(10**9), baseline(1, "allocated@build"), "k")
    assert (judgement.verdict, judgement.measured, judgement.phase) == ("pass", 1, "build")


def test_a_phase_that_never_ran_is_an_error_of_the_marker() -> None:
    with pytest.raises(UserError, match="'optimizer' selects nothing"):
        judge(replace(EXACT, phase="optimizer"), measured(5), baseline(5), "k")


def test_the_change_is_a_fraction_of_the_baseline() -> None:
    assert judge(EXACT, measured(102), baseline(100), "k").change == pytest.approx(0.02)
    assert judge(EXACT, measured(102), None, "k").change is None
    assert judge(marker(limit=100), measured(102), None, "k").change is None


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("peak", "verdict"), [(99, "pass"), (100, "pass"), (101, "regression")])
def test_a_limit_is_absolute(peak: int, verdict: str) -> None:
    judgement = judge(marker(limit=100), measured(peak), None, "k")
    assert (judgement.verdict, judgement.reference, judgement.allowed) == (verdict, 100, 100)


def test_a_limit_asks_no_baseline() -> None:
    assert judge(marker(limit=100), measured(100), baseline(1, digest="other"), "k").verdict == "pass"


@pytest.mark.parametrize(("limit", "noted"), [(80 * GIB - 1, False), (80 * GIB, True)])
def test_a_limit_that_the_device_cannot_reach_is_noted(limit: int, noted: bool) -> None:
    notes = judge(marker(limit=limit), measured(100), None, "k").notes
    assert ("cannot be exceeded" in "".join(notes)) is noted


# No figure to compare -------------------------------------------------------------------------------------------------


def test_without_an_entry_the_verdict_is_missing_and_fails() -> None:
    judgement = judge(EXACT, measured(5), None, "k")
    assert (judgement.verdict, judgement.passed, judgement.measured, judgement.allowed) == ("missing", False, 5, None)


def test_a_metric_that_the_entry_lacks_is_missing_and_not_skipped() -> None:
    judgement = judge(replace(EXACT, metric="reserved"), measured(5, reserved=5), baseline(5), "k")
    assert (judgement.verdict, judgement.passed) == ("missing", False)
    assert "no figure 'reserved'" in judgement.notes[0]


@pytest.mark.parametrize("peak", [1, 100, 10**9])
def test_a_changed_recipe_is_stale_whatever_the_peak(peak: int) -> None:
    judgement = judge(EXACT, measured(peak, digest="d2"), baseline(100), "k")
    assert (judgement.verdict, judgement.passed, judgement.allowed) == ("stale", False, None)


def test_stale_goes_before_a_missing_metric() -> None:
    assert judge(replace(EXACT, metric="reserved"), measured(5, digest="d2"), baseline(5), "k").verdict == "stale"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            ("d1", {"training": {"seq_length": 4096}}),
            ("d2", {"training": {"seq_length": 2048}}),
            "training.seq_length: 4096 -> 2048",
        ),
        (("d1", {}), ("d2", {"model": {"moe": {"top_k": 2}}}), r"model.moe.top_k: \(not set\) -> 2"),
        (("d1", {"a": 1, "name": "x"}), ("d2", {"a": 1, "name": "y"}), "a default of it changed"),
        ((None, None), ("d2", {}), "recorded without a recipe"),
        (("d1", {}), (None, None), "this test has none"),
        (("d1", None), ("d2", {}), "the recipe changed"),
    ],
)
def test_stale_says_what_changed(old: tuple[Any, Any], new: tuple[Any, Any], message: str) -> None:
    judgement = judge(EXACT, measured(5, digest=new[0], recipe=new[1]), baseline(5, digest=old[0], recipe=old[1]), "k")
    assert judgement.verdict == "stale"
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(judgement.notes)


def test_the_changes_of_a_whole_other_recipe_are_cut_short() -> None:
    new = {f"key{n}": n for n in range(20)}
    note = judge(EXACT, measured(5, digest="d2", recipe=new), baseline(5, recipe={}), "k").notes[0]
    assert "key7" in note
    assert "key8" not in note
    assert note.endswith("and 12 more")


def test_changes_compare_what_is_written_whatever_the_container() -> None:
    assert recipe_changes({"m": {"a": [1, 2], "b": 1}}, {"m": {"a": (1, 2), "b": 2}}) == ["m.b: 1 -> 2"]
    assert recipe_changes({"m": {"a": 1}}, {}) == ["m.a: 1 -> (not set)"]
    assert recipe_changes({"m": {}}, {"m": {}}) == []


def test_a_test_without_a_recipe_has_a_baseline_too() -> None:
    assert judge(EXACT, measured(5, digest=None), baseline(5, digest=None), "k").verdict == "pass"


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [("out of memory", "out of memory"), ("error", "invalid"), ("died", "invalid"), ("timeout", "invalid")],
)
@pytest.mark.parametrize("gate", [EXACT, marker(limit=10**9)])
def test_a_failed_measurement_is_never_compared(gate: PeakGate, kind: Any, verdict: str) -> None:
    failed = measured(1, failure=Failure(kind, 3, "text", 2, "backward"))
    judgement = judge(gate, failed, baseline(10**9), "k")
    assert (judgement.verdict, judgement.passed, judgement.measured) == (verdict, False, None)
    assert (judgement.rank, judgement.phase, judgement.reference) == (3, "step-2/backward", 10**9)
    assert judgement.notes == (f"rank 3 ended with: {kind} in step-2/backward",)


@pytest.mark.parametrize("gate", [EXACT, marker(limit=10**9)])
@pytest.mark.parametrize(
    ("run", "why"),
    [(measured(), "no rank"), (measured(0), "nothing was allocated"), (measured(-5), r"negative \(-5 bytes\)")],
)
def test_a_measurement_of_nothing_is_invalid(gate: PeakGate, run: Measurement, why: str) -> None:
    run = replace(run, ranks=tuple(replace(r, phases=r.phases[1:]) for r in run.ranks))
    judgement = judge(gate, run, baseline(5), "k")
    assert (judgement.verdict, judgement.passed, judgement.measured) == ("invalid", False, None)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(judgement.notes)


# Notes ----------------------------------------------------------------------------------------------------------------


def notes(gate: PeakGate, run: Measurement, entry: Entry) -> str:
    return "\n".join(judge(gate, run, entry, "k").notes)


def test_an_ordinary_pass_has_no_notes() -> None:
    assert notes(marker(), measured(GIB), baseline(GIB)) == ""


def test_another_environment_is_a_note_beside_the_verdict() -> None:
    run = measured(100, environment={"torch": "2.15.0", "megatron-core": "0.17.0"})
    judgement = judge(EXACT, run, baseline(100), "k")
    assert judgement.verdict == "pass"
    assert judgement.notes == (
        "the environment is not the baseline's: torch 2.14.1 -> 2.15.0, megatron-core (not recorded) -> 0.17.0",
    )


def test_another_set_of_ranks_is_a_note_and_the_worst_is_still_judged() -> None:
    judgement = judge(EXACT, measured(100, 200), baseline(100, ranks={0: 100, 7: 1}), "k")
    assert judgement.verdict == "regression"
    assert "the baseline has ranks 0, 7, measured were ranks 0, 1" in judgement.notes


@pytest.mark.parametrize(("slack", "noted"), [(250, False), (251, True), (10**6, True)])
def test_a_slack_beyond_the_effect_is_noted(slack: int, noted: bool) -> None:
    assert ("hardly tests anything" in notes(PeakGate(tolerance=0, slack=slack), measured(500), baseline(500))) is noted


def test_a_model_of_500_kb_with_a_slack_of_2_mb_is_noted() -> None:
    assert "smaller slack" in notes(marker(slack="2 MB"), measured(500_000), baseline(500_000))


@pytest.mark.parametrize(("peak", "noted"), [(500, False), (499, True), (333, True)])
def test_a_loose_baseline_is_noted(peak: int, noted: bool) -> None:
    assert ("the baseline is loose" in notes(EXACT, measured(peak), baseline(1000))) is noted


def test_the_drift_since_the_first_record_is_noted() -> None:
    peak = first = GIB
    for _ in range(10):
        peak += peak * 3 // 100
    drifted = baseline(peak, first=first, updates=10)
    text = notes(marker(), measured(peak), drifted)
    assert "drift: +34.39% since the first recorded peak of 1.00 GiB; the baseline was changed 10 times" in text
    assert "drift" in notes(marker(), measured(peak + GIB), drifted)


@pytest.mark.parametrize(
    ("peak", "first", "updates"), [(GIB, GIB, 3), (GIB, 2 * GIB, 3), (2 * GIB, GIB, 0), (GIB + MIB, GIB, 1)]
)
def test_no_drift_without_updates_beyond_the_band_or_upwards(peak: int, first: int, updates: int) -> None:
    assert "drift" not in notes(marker(), measured(peak), baseline(peak, first=first, updates=updates))


# Growth ---------------------------------------------------------------------------------------------------------------


def held_by(*owners: tuple[str, int]) -> RankMeasurement:
    """A rank whose peak in step-2/backward is held by activations of modules, by name."""
    (rank,) = measured(sum(size for _, size in owners)).ranks
    parts = tuple(Owner("activations", name, "a/b.py:1 (f)") for name, _ in owners)
    at_peaks = ((1, *[0] * (len(owners) - 1)), tuple(size for _, size in owners))
    return replace(rank, composition=Composition(parts, at_peaks))


SPLIT = (Part("activations", 500, "mlp", "a/b.py (f)"), Part("activations", 500, "norm", "a/b.py (f)"))


@pytest.mark.parametrize(("size", "verdict"), [(600, "regression"), (400, "improvement"), (500, "pass")])
def test_a_baseline_with_a_split_tells_what_grew_whatever_the_verdict(size: int, verdict: str) -> None:
    run = replace(measured(1), ranks=(held_by(("mlp", size), ("norm", 500)),))
    found = judge(EXACT, run, baseline(1000, split=SPLIT), "k")
    assert found.verdict == verdict
    assert found.growth is not None
    assert [(change.part.module, change.size) for change in found.growth.changes] == (
        [("mlp", size - 500)] if size != 500 else []
    )
    assert found.growth.total == size - 500


def test_the_growth_is_the_worst_ranks_and_names_the_one_that_was() -> None:
    ranks = (held_by(("mlp", 900)), replace(held_by(("mlp", 1100)), rank=3))
    found = judge(EXACT, replace(measured(1), ranks=ranks), baseline(1000, split=SPLIT, phase="build"), "k").growth
    assert found is not None
    assert found.places == "rank 3 in step-2/backward now, rank 0 in build then"
    assert found.total == 100


def test_without_one_of_the_splits_nothing_is_said_to_have_grown() -> None:
    run = replace(measured(1), ranks=(held_by(("mlp", 2000)),))
    assert judge(EXACT, run, baseline(1000), "k").growth is None
    assert judge(EXACT, measured(2000), baseline(1000, split=SPLIT), "k").growth is None


# Sentences ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judgement", "text"),
    [
        (
            judge(PeakGate(tolerance=0.01, slack=MIB), measured(1100 * MIB), baseline(1000 * MIB), "k"),
            "peak allocated 1.07 GiB on rank 0 in step-2/backward: +10.00% against the baseline of 1000.00 MiB, "
            "89.00 MiB more than the 1011.00 MiB allowed (tolerance 1.00%, slack 1.00 MiB)",
        ),
        (
            judge(EXACT, measured(500 * MIB), baseline(1000 * MIB), "k"),
            "peak allocated 500.00 MiB on rank 0 in step-2/backward: -50.00% against the baseline of 1000.00 MiB",
        ),
        (
            judge(marker("1 GiB"), measured(3 * GIB), None, "k"),
            "peak allocated 3.00 GiB on rank 0 in step-2/backward: 2.00 GiB over the limit of 1.00 GiB",
        ),
        (
            judge(marker("4 GiB", metric="reserved", phase="step-2"), measured(1, reserved=3 * GIB), None, "k"),
            "peak reserved in step-2 3.00 GiB on rank 0 in step-2/backward: 1.00 GiB below the limit of 4.00 GiB",
        ),
        (judge(EXACT, measured(GIB), None, "k"), "peak allocated 1.00 GiB on rank 0 in step-2/backward: missing"),
        (
            judge(EXACT, measured(GIB, digest="d2"), baseline(5), "k"),
            "peak allocated 1.00 GiB on rank 0 in step-2/backward: stale",
        ),
        (
            judge(EXACT, measured(failure=Failure("timeout", 2, "")), baseline(5), "k"),
            "peak allocated: invalid (rank 2 ended with: timeout)",
        ),
    ],
)
def test_a_verdict_is_one_sentence(judgement: Judgement, text: str) -> None:
    assert judgement.explain() == text


# Where the baseline is from -------------------------------------------------------------------------------------------

OLD = {"torch": "2.13.0"}


def test_a_judgement_says_where_the_figure_of_its_baseline_was_measured() -> None:
    entry = baseline(100, rank=3, phase="step-1/forward", environment=OLD)
    assert judge(EXACT, measured(200), entry, "k").origin == Origin(3, "step-1/forward", OLD)
    failed = measured(200, failure=Failure("out of memory", 0, "CUDA out of memory", 1, "forward"))
    assert judge(EXACT, failed, entry, "k").origin == Origin(3, "step-1/forward", OLD)


def test_a_limit_another_recipe_and_a_missing_figure_have_no_such_place() -> None:
    assert judge(PeakGate(limit=100), measured(200), None, "k").origin is None
    assert judge(EXACT, measured(200), baseline(100, digest="d2"), "k").origin is None
    assert judge(EXACT, measured(200), None, "k").origin is None
    failed = measured(200, failure=Failure("died", 0, "killed"))
    assert judge(EXACT, failed, baseline(100, digest="d2"), "k").origin is None
