"""What a step takes: figures of hand-made measurements, the rule and its noise, and baselines of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_mbmem.baseline_file import BaselineFile, DamagedFile, Entry, Figure, dump, parse, read
from pytest_mbmem.baselines import Record, apply_updates, baseline_path, paste
from pytest_mbmem.errors import UserError
from pytest_mbmem.measurement import Device, Failure, Measurement, RankMeasurement
from pytest_mbmem.report.results import Judged
from pytest_mbmem.throughput import (
    MARKED,
    STEP_METRICS,
    Throughput,
    ThroughputGate,
    ThroughputJudgement,
    Timing,
    compare_steps,
    figure_text,
    judge,
    two_modes,
    untimed,
)
from pytest_mbmem.units import Rate, RateUnit

MS = 10**6  # nanoseconds
REAL = Device("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=False)
VIRTUAL = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=True)
RECIPE = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
    "training": {"seq_length": 1000, "micro_batch_size": 2},
}
MODULE, KEY = "tests/test_x.py", "test_y"
STEADY = (100, 101, 99, 100, 102)  # ms; the quartiles are 100 and 101


def timed(*ranks: tuple[float, ...], flops: Any = None, stands_for: int = 1, **fields: Any) -> Measurement:
    """On a real GPU: for each rank the milliseconds of its timed steps. Its cold step takes three times the first."""
    found = tuple(
        RankMeasurement(
            number,
            {},
            stands_for,
            (),
            step_times=tuple(time / 1000 for time in times),
            cold_step=3 * times[0] / 1000 if times else None,
            model_flops=flops,
        )
        for number, times in enumerate(ranks)
    )
    return measurement(REAL, found, **fields)


def counted(flops: int | None = 10**12, collective: int = 0, moved: int = 0, **fields: Any) -> Measurement:
    """On a virtual GPU: rank 0 has these counts, and rank 1 half of them."""
    found = tuple(
        RankMeasurement(
            number,
            {},
            1,
            (),
            flops_per_step=None if flops is None else flops // (1 + number),
            collective_bytes={"tp": collective // (1 + number)},
            moved_bytes={"to host": moved // (1 + number)},
        )
        for number in range(2)
    )
    return measurement(VIRTUAL, found, **fields)


def measurement(device: Device, ranks: tuple[RankMeasurement, ...], **fields: Any) -> Measurement:
    defaults = {
        "recipe": RECIPE,
        "recipe_digest": "d1",
        "world_size": max(len(ranks), 1),
        "environment": {"torch": "2.14.1"},
    }
    return Measurement(device, ranks, **{**defaults, **fields})


def throughput_of(measured: Measurement) -> Throughput:
    found = Throughput.of(measured)
    assert found is not None
    return found


def entry(digest: str = "d1", recipe: Any = RECIPE, **figures: Figure) -> Entry:
    return Entry(digest, recipe, {name.replace("_", "-"): figure for name, figure in figures.items()})


def figure(value: int, spread: int | None = None, **fields: Any) -> Figure:
    defaults = {"rank": 0, "phase": "", "ranks": {}, "first": value, "environment": {"torch": "2.14.1"}}
    return Figure(value, spread=spread, **{**defaults, **fields})


def judged(gate: ThroughputGate, measured: Measurement, baseline: Entry | None = None) -> ThroughputJudgement:
    (judgement,) = judge(gate, measured, baseline, KEY)
    return judgement


# Figures --------------------------------------------------------------------------------------------------------------


def test_a_joint_step_takes_as_long_as_its_slowest_rank() -> None:
    found = throughput_of(timed((10, 40, 10, 10), (20, 20, 20, 20), mode="joint", world_size=2))
    assert (found.step, found.rank, found.steps) == (20 * MS, 1, 4)  # 20, 40, 20, 20
    assert found.cold == 60 * MS
    assert (found.metric_id, found.solo) == ("throughput", False)
    assert "solo" not in found.explain()


def test_of_solo_ranks_the_slowest_decides_and_the_text_says_what_is_not_in_it() -> None:
    found = throughput_of(timed((10, 40, 10, 10), (20, 20, 20, 20), mode="solo"))
    assert (found.step, found.spread, found.rank, found.metric_id) == (20 * MS, 0, 1, "solo-throughput")
    assert found.explain() == (
        "a step takes 20.00 ms (median of 4, spread 0.00 us; the cold step 60.00 ms): 50.00 k tokens/s per GPU, "
        "without communication and pipeline bubbles (solo)"
    )


def test_a_job_of_one_rank_communicates_with_nobody() -> None:
    assert throughput_of(timed(STEADY)).metric_id == "throughput"


def test_the_spread_is_the_interquartile_range_which_one_straggler_does_not_move() -> None:
    steady = throughput_of(timed((100, 101, 99, 100, 102, 98, 100, 101)))
    disturbed = throughput_of(timed((100, 101, 99, 100, 900, 98, 100, 101)))
    assert steady.spread == disturbed.spread == 1.25 * MS
    assert steady.step == disturbed.step == 100 * MS


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=40), st.integers(1, 100))
def test_median_and_spread_scale_with_the_times(times: list[int], factor: int) -> None:
    one, many = throughput_of(timed(tuple(times))), throughput_of(timed(tuple(t * factor for t in times)))
    assert many.step == pytest.approx(factor * one.step, abs=factor)
    assert many.spread == pytest.approx(factor * one.spread, abs=factor)
    assert min(times) * MS <= one.step <= max(times) * MS
    assert 0 <= one.spread <= (max(times) - min(times)) * MS


def test_rates_are_per_gpu_with_flops_weighted_by_what_ranks_stand_for() -> None:
    both = timed((100,) * 4, (50,) * 4, world_size=8)
    first, last = both.ranks
    ranks = (replace(first, model_flops=4 * 10**12, stands_for=6), replace(last, model_flops=8 * 10**12, stands_for=2))
    found = throughput_of(replace(both, ranks=ranks))
    assert found.rate("FLOP/s") == Rate(50 * 10**12, "FLOP/s")  # (6 * 4 + 2 * 8) / 8 = 5 TFLOP in 0.1 s
    assert found.rate("tokens/s") == Rate(2000 * 1 / 8 / 0.1, "tokens/s")  # of one sample's micro-batch of 2 x 1000
    assert found.notes == ()


def test_flops_of_some_ranks_are_no_figure_and_those_of_a_part_of_the_job_say_so() -> None:
    both = timed((100,) * 4, (50,) * 4, flops=10**12)
    assert throughput_of(replace(both, ranks=(both.ranks[0], replace(both.ranks[1], model_flops=None)))).flops is None
    part = throughput_of(timed((100,) * 4, flops=10**12, world_size=4))
    assert part.notes == ("FLOP/s are those of the measured ranks, which stand for 1 of 4",)


def test_what_was_not_measured_is_absent() -> None:
    bare = throughput_of(replace(timed(STEADY), recipe=None))
    assert (bare.rate("tokens/s"), bare.rate("FLOP/s"), bare.rates) == (None, None, "")
    assert bare.explain() == "a step takes 100.00 ms (median of 5, spread 1.00 ms; the cold step 300.00 ms)"
    cold = timed(STEADY, STEADY, mode="joint")
    ranks = (cold.ranks[0], replace(cold.ranks[1], cold_step=None))
    assert throughput_of(replace(cold, ranks=ranks)).cold is None


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (replace(timed(STEADY), device=VIRTUAL), "a virtual GPU has no time"),
        (timed(), "no rank was measured"),
        (timed(STEADY, ()), "no step was timed on rank 1"),
        (timed((100,)), "a single step was timed on rank 0"),
        (timed((100, float("nan"))), "rank 0 has a step time of nan s"),
        (timed((100, 0)), "rank 0 has a step time of 0.0 s"),
        (timed((100, 100, 1e-9)), "rank 0 has a step time of 1e-12 s"),
        (timed((1, 2), (1, 2, 3), mode="joint"), "the joint ranks timed different numbers of steps: 2, 3"),
    ],
)
def test_times_that_cannot_be_trusted_are_no_throughput(measured: Measurement, why: str) -> None:
    assert untimed(measured) == why
    assert Throughput.of(measured) is None


# Two modes ------------------------------------------------------------------------------------------------------------


def test_two_modes_are_found_and_said() -> None:
    times = (2540, 2570, 2580, 4040, 4160)
    assert two_modes(times) == ([2540, 2570, 2580], [4040, 4160])
    found = throughput_of(timed(times))
    assert found.notes == (
        "the step times show two modes, 3 of about 2.57 s and 2 of about 4.10 s: their median says little; find out "
        "what alternates",
    )


@pytest.mark.parametrize(
    "times",
    [
        (100, 101, 99, 100, 300),  # one straggler
        (100, 100, 100, 100, 100, 100, 100, 300, 301),  # two of nine
        (100, 110, 120, 130, 140, 150),  # spread evenly
        (100, 100, 104, 104),  # two clusters that hardly differ
        (100, 102, 200),  # too few to tell
        (100, 100),
    ],
)
def test_what_is_no_second_mode(times: tuple[int, ...]) -> None:
    assert two_modes(times) is None


@given(st.lists(st.integers(1000, 1010), min_size=2, max_size=20), st.data())
def test_clusters_far_apart_are_modes_exactly_if_each_has_a_quarter_of_the_steps(
    fast: list[int], data: st.DataObject
) -> None:
    slow = data.draw(st.lists(st.integers(2000, 2010), min_size=1, max_size=20))
    there = min(len(fast), len(slow)) >= max(2, (len(fast) + len(slow)) / 4)
    times = data.draw(st.permutations([*fast, *slow]))
    assert two_modes(times) == ((sorted(fast), sorted(slow)) if there else None)


# The marker's arguments -----------------------------------------------------------------------------------------------


def marker(*args: object, **kwargs: object) -> tuple[ThroughputGate, Timing]:
    return ThroughputGate.from_marker(args, kwargs, "t")


def test_a_marker_makes_one_gate() -> None:
    minimum = Rate(4e14, "FLOP/s")
    assert marker() == (ThroughputGate(None, 0.05, counts=True), Timing(10, 3))
    assert marker(tolerance="3%") == (ThroughputGate(None, 0.03, counts=True), MARKED)
    assert marker("400 TFLOP/s") == marker(minimum="0.4 PFLOP/s") == (ThroughputGate(minimum, 0, counts=False), MARKED)
    for tolerance, number in (("10%", 0.1), ("0%", 0)):
        gate, timing = marker("400 TFLOP/s", tolerance=tolerance)
        assert (gate, timing) == (ThroughputGate(minimum, number, counts=True), MARKED)


def test_a_minimum_needs_a_baseline_on_a_virtual_gpu_alone_and_by_a_tolerance_alone() -> None:
    def needs(*args: object, **kwargs: object) -> list[bool]:
        return [marker(*args, **kwargs)[0].needs_baseline(virtual) for virtual in (True, False)]

    assert needs() == needs(tolerance="3%") == [True, True]
    assert needs("400 TFLOP/s", tolerance="0%") == [True, False]
    assert needs("400 TFLOP/s") == [False, False]


def test_how_many_steps_are_timed_is_the_markers() -> None:
    assert marker(steps=20, warmup=5)[1] == Timing(20, 5)
    assert Timing() == Timing(steps=3, warmup=1)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"minimum": 400}, "throughput(minimum=...): 400 is not a rate; write a number above 0 with one of the units"),
        ({"minimum": "400"}, "throughput(minimum=...): '400' is not a rate"),
        ({"minimum": "0 TFLOP/s"}, "throughput(minimum=...): '0 TFLOP/s' is not a rate"),
        ({"minimum": "400 TFLOPS"}, "throughput(minimum=...): '400 TFLOPS' is not a rate"),
        ({"tolerance": "100%"}, "throughput(tolerance=...): '100%' would let throughput fall to nothing"),
        ({"tolerance": 5}, "throughput(tolerance=...): 5 is not a fraction"),
        ({"steps": 2}, "throughput(steps=...): 2 is not a whole number from 3 to 1000"),
        ({"steps": True}, "throughput(steps=...): True is not a whole number from 3 to 1000"),
        ({"steps": 10.0}, "throughput(steps=...): 10.0 is not a whole number from 3 to 1000"),
        ({"warmup": 0}, "throughput(warmup=...): 0 is not a whole number from 1 to 1000"),
        ({"warmup": 1001}, "throughput(warmup=...): 1001 is not a whole number from 1 to 1000"),
        ({"step": 10}, "throughput() has no argument 'step'; did you mean 'steps'? allowed: minimum, tolerance, steps"),
    ],
)
def test_mistakes_name_the_test_the_argument_and_what_is_allowed(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        marker(**kwargs)
    assert str(raised.value).startswith(f"t: {message}")


def test_only_the_minimum_is_positional() -> None:
    with pytest.raises(UserError, match="one positional argument at most, the minimum"):
        marker("1 TFLOP/s", "5%")


# Comparing ------------------------------------------------------------------------------------------------------------

times = st.integers(1, 10**11)
spreads = st.integers(0, 10**11)
tolerances = st.integers(0, 9999).map(lambda hundredths: hundredths / 10000)


@given(times, times, spreads, spreads, tolerances)
def test_a_regression_exceeds_both_the_tolerance_and_the_larger_spread(
    now: int, before: int, spread: int, recorded: int, tolerance: float
) -> None:
    share = Fraction(repr(tolerance))
    lower = Fraction(before, now) < 1 - share  # throughput is the inverse of a step's time
    higher = Fraction(before, now) > 1 + share
    verdict = compare_steps(now, spread, figure(before, recorded), tolerance)
    beyond_noise = abs(now - before) > max(spread, recorded)
    assert (verdict == "regression") == (lower and beyond_noise)
    assert (verdict == "improvement") == (higher and beyond_noise)


@given(times, times, spreads, spreads, tolerances)
def test_more_throughput_never_fails(now: int, less: int, spread: int, recorded: int, tolerance: float) -> None:
    assume(less <= now)
    assert compare_steps(less, spread, figure(now, recorded), tolerance) != "regression"
    assert compare_steps(now, spread, figure(now, recorded), tolerance) == "pass"
    if compare_steps(now, spread, figure(less, recorded), tolerance) == "pass":  # then a faster step passes too
        assert compare_steps((now + less) // 2, spread, figure(less, recorded), tolerance) == "pass"


@given(st.integers(0, 10**18), st.integers(0, 10**18), tolerances)
def test_a_count_regresses_exactly_above_the_tolerance(now: int, before: int, tolerance: float) -> None:
    verdict = compare_steps(now, None, figure(before), tolerance)
    assert (verdict == "regression") == (now > before * (1 + Fraction(repr(tolerance))))
    assert (verdict == "improvement") == (now < before * (1 - Fraction(repr(tolerance))))


@given(st.lists(st.integers(50, 150), min_size=2, max_size=12), st.lists(st.integers(50, 150), min_size=2, max_size=12))
def test_a_judgement_follows_from_medians_and_quartiles(now: list[int], before: list[int]) -> None:
    old = throughput_of(timed(tuple(before)))
    baseline = entry(throughput=figure(old.step, old.spread))
    judgement = judged(ThroughputGate(tolerance=0.1), timed(tuple(now)), baseline)
    quartiles = [statistics.quantiles(side, n=4, method="inclusive") for side in (now, before)]
    noise = max(upper - lower for lower, _, upper in quartiles)
    medians = [statistics.median(side) for side in (now, before)]
    slower = Fraction(medians[1]) / Fraction(medians[0]) < Fraction("0.9") and medians[0] - medians[1] > noise
    assert judgement.passed == (not slower)


# Judging on a real GPU ------------------------------------------------------------------------------------------------

BASELINE = ThroughputGate(tolerance=0.05)


def at_least(amount: float, unit: RateUnit = "tokens/s", tolerance: float | None = None) -> ThroughputGate:
    """As a marker makes it."""
    return ThroughputGate(Rate(amount, unit), tolerance or 0, counts=tolerance is not None)


def test_a_minimum_is_judged_in_its_unit() -> None:
    measured = timed((100,) * 4, flops=10**12)  # 10 TFLOP/s and 20000 tokens/s
    for gate, verdict in (
        (at_least(10 * 10**12, "FLOP/s"), "pass"),
        (at_least(10 * 10**12 + 1, "FLOP/s"), "regression"),
        (at_least(20000), "pass"),
        (at_least(20001), "regression"),
    ):
        judgement = judged(gate, measured)
        assert (judgement.verdict, judgement.shown_reference) == (verdict, f">= {gate.minimum}")
        assert judgement.against_minimum == gate.minimum
        assert judgement.change is None
    assert judged(at_least(8e12, "FLOP/s"), measured).explain() == (
        "throughput 10.00 TFLOP/s: 2.00 TFLOP/s over the minimum of 8.00 TFLOP/s; a step takes 100.00 ms (median of 4, "
        "spread 0.00 us; the cold step 300.00 ms): 20.00 k tokens/s and 10.00 TFLOP/s per GPU"
    )


def test_a_tolerance_belongs_to_the_minimum_and_no_baseline_is_looked_at() -> None:
    measured, fast = timed((100,) * 4, flops=10**12), entry(throughput=figure(50 * MS, 0))
    for baseline in (None, fast):
        below = judged(at_least(12.5e12, "FLOP/s", 0.2), measured, baseline)  # 20% of it less is 10 TFLOP/s
        assert (below.verdict, below.allowed, below.reference) == ("pass", 100 * MS, None)
        assert below.notes == ("less than the minimum, but within its tolerance of 20.00%",)
        assert below.explain().startswith(
            "throughput 10.00 TFLOP/s: 2.50 TFLOP/s below the minimum of 12.50 TFLOP/s, at least 10.00 TFLOP/s allowed "
            "(tolerance 20.00%, or the steps' spread where that is more); a step takes "
        )
        assert judged(at_least(12.5e12, "FLOP/s", 0.19), measured, baseline).verdict == "regression"
        assert judged(at_least(12.5e12, "FLOP/s"), measured, baseline).verdict == "regression"


def test_a_pass_with_less_than_the_minimum_says_why() -> None:
    def found(step: float, tolerance: float | None = None) -> tuple[str, tuple[str, ...]]:
        steps = timed((90, 100, 100, 100, 110, 120))  # 100 ms; the quartiles are 100 and 107.5
        judgement = judged(at_least(2000 / (step / 1000), "tokens/s", tolerance), steps)
        return judgement.verdict, judgement.notes

    tolerated = "less than the minimum, but within its tolerance of 5.00%"
    note = "the minimum lies within the spread of the steps, and that alone lets this pass; time more steps"
    assert found(107) == found(100) == ("pass", ())  # milliseconds of a step that makes the minimum
    assert found(99) == found(93) == ("pass", (note,))
    assert found(92) == ("regression", ())
    assert found(101, 0.05) == ("pass", ())
    assert found(96, 0.05) == ("pass", (tolerated,))
    assert found(94, 0.05) == ("pass", (note,))
    assert found(92, 0.05) == ("regression", ())
    assert found(91, 0.1) == ("pass", (tolerated.replace("5.00%", "10.00%"),))


@given(
    st.lists(st.integers(50, 150), min_size=2, max_size=12),
    st.integers(1, 10**6),
    st.integers(1, 10**5),
    st.none() | tolerances,
)
def test_a_minimum_regresses_exactly_beyond_both_tolerance_and_spread(
    steps: list[int], flops: int, minimum: int, tolerance: float | None
) -> None:
    judgement = judged(at_least(minimum, "FLOP/s", tolerance), timed(tuple(steps), flops=flops))
    lower, _, upper = statistics.quantiles(steps, n=4, method="inclusive")
    seconds = Fraction(statistics.median(steps)) / 1000
    below = flops / seconds < minimum * (1 - Fraction(repr(tolerance or 0.0)))
    beyond_noise = seconds - Fraction(flops, minimum) > Fraction(upper - lower) / 1000
    assert (judgement.verdict == "regression") == (below and beyond_noise)
    assert judgement.verdict in ("regression", "pass")
    assert any("lies within the spread" in note for note in judgement.notes) == (below and not beyond_noise)


def test_a_minimum_that_no_step_makes_is_a_regression() -> None:
    judgement = judged(at_least(1e300), timed((100,) * 4))
    assert (judgement.verdict, judgement.allowed) == ("regression", 1)
    assert "below the minimum of" in judgement.explain()


def test_a_minimum_in_flops_without_model_flops_is_invalid_and_one_in_tokens_works() -> None:
    judgement = judged(at_least(1e12, "FLOP/s"), timed(STEADY))
    assert (judgement.verdict, judgement.shown) == ("invalid", None)
    assert "model FLOPs were not counted on a virtual twin" in judgement.explain()
    assert judged(at_least(1), timed(STEADY)).verdict == "pass"


def test_a_slower_step_is_a_regression_in_the_same_direction_as_throughput() -> None:
    baseline = entry(throughput=figure(80 * MS, MS))
    judgement = judged(BASELINE, timed(STEADY), baseline)
    assert (judgement.verdict, judgement.measured, judgement.reference) == ("regression", 100 * MS, 80 * MS)
    assert judgement.change == pytest.approx(-0.2)
    assert judgement.allowed == 84210526  # 80 ms / 0.95
    assert judgement.explain().startswith(
        "throughput 20.00 k tokens/s: -20.00% against the baseline of 25.00 k tokens/s, at least 23.75 k tokens/s "
        "allowed (tolerance 5.00%, or the steps' spread where that is more); a step takes 100.00 ms"
    )


@pytest.mark.parametrize(
    ("before", "spread", "verdict"),
    [
        (96, 0, "pass"),  # 4% less throughput
        (94, 0, "regression"),
        (94, 6, "pass"),  # but the recorded times spread by as much
        (94, 5.99, "regression"),
        (104, 0, "pass"),
        (106, 0, "improvement"),
        (106, 6, "pass"),
        (50, 60, "pass"),
    ],
)
def test_noise_and_tolerance(before: int, spread: float, verdict: str) -> None:
    baseline = entry(throughput=figure(before * MS, round(spread * MS)))
    judgement = judged(BASELINE, timed(STEADY), baseline)
    assert judgement.verdict == verdict
    assert any("cannot be told from noise" in note for note in judgement.notes) == (spread > 5.5)


def test_the_measured_spread_counts_as_the_recorded_one_does() -> None:
    baseline = entry(throughput=figure(80 * MS, 0))
    noisy = timed((70, 90, 100, 110, 130))  # quartiles 90 and 110
    assert judged(BASELINE, noisy, baseline).verdict == "pass"
    assert judged(BASELINE, timed((99, 100, 100, 100, 101)), baseline).verdict == "regression"


@pytest.mark.parametrize(
    ("baseline", "verdict", "note"),
    [
        (None, "missing", "the baseline file has no entry for this test"),
        (entry(allocated=figure(1)), "missing", "the test's baseline has no figure 'throughput'"),
        (
            entry(solo_throughput=figure(100 * MS, 0)),
            "missing",
            "the one that it has was recorded with ranks that ran solo, and these ran jointly",
        ),
        (
            entry("d0", {**RECIPE, "training": {"seq_length": 500}}, throughput=figure(50 * MS, 0)),
            "stale",
            "the recipe changed since the baseline was recorded: training.seq_length: 500 -> 1000; "
            "training.micro_batch_size: (not set) -> 2",
        ),
    ],
)
def test_without_a_baseline_of_this_recipe_and_mode(baseline: Entry | None, verdict: str, note: str) -> None:
    judgement = judged(BASELINE, timed(STEADY, STEADY, mode="joint"), baseline)
    assert (judgement.verdict, judgement.passed) == (verdict, False)
    assert note in judgement.notes
    assert judgement.change is None


def test_a_stale_figure_is_shown_as_a_time_since_the_other_recipe_had_other_tokens() -> None:
    judgement = judged(BASELINE, timed(STEADY), entry("d0", throughput=figure(50 * MS, 0)))
    assert judgement.shown_reference == "50.00 ms"


@pytest.mark.parametrize(
    ("kind", "verdict"), [("out of memory", "out of memory"), ("no effect", "no effect"), ("disturbed", "invalid")]
)
@pytest.mark.parametrize("gate", [BASELINE, at_least(1), at_least(1, tolerance=0.05)])
@pytest.mark.parametrize("make", [lambda **f: timed(STEADY, **f), counted])
def test_a_measurement_that_failed_keeps_its_verdict(gate: ThroughputGate, kind: Any, verdict: str, make: Any) -> None:
    failed = make(failure=Failure(kind, 1, "why", 1, "forward"), notes=("careful",))
    judgement = judged(gate, failed, entry(throughput=figure(1, 0)))
    assert (judgement.verdict, judgement.rank, judgement.passed) == (verdict, 1, False)
    assert judgement.notes == (f"rank 1 ended with: {kind} in step-1/forward", "careful")
    assert judgement.explain() == f"throughput: {verdict} (rank 1 ended with: {kind} in step-1/forward)"


@pytest.mark.parametrize("gate", [BASELINE, at_least(1), at_least(1, tolerance=0.05)])
def test_a_real_gpu_without_times_is_invalid(gate: ThroughputGate) -> None:
    judgement = judged(gate, timed(()), entry(throughput=figure(1, 0)))
    assert (judgement.verdict, judgement.notes, judgement.measured) == (
        "invalid",
        ("no step was timed on rank 0",),
        None,
    )


def test_a_verdict_says_what_else_changed() -> None:
    old = figure(105 * MS, 0, environment={"torch": "2.13"}, first=80 * MS, updates=2)
    judgement = judged(BASELINE, timed((100, 100, 200, 200, 200)), entry(throughput=old))
    assert judgement.notes[0] == "the environment is not the baseline's: torch 2.13 -> 2.14.1"
    assert any(note.startswith("the step times spread by 95.24%, more than") for note in judgement.notes)
    assert any(note.startswith("the step times show two modes") for note in judgement.notes)
    drifted = judged(BASELINE, timed((100,) * 4), entry(throughput=replace(old, environment={"torch": "2.14.1"})))
    assert drifted.notes == (
        "drift: +25.00% since the first recorded step time of 80.00 ms; the baseline was changed 2 times",
    )
    loose = judged(BASELINE, timed((100,) * 4), entry(throughput=figure(250 * MS, 0)))
    assert loose.notes == (
        "the baseline is loose: it is 2.5 times what was measured and would hide a regression of that size; refresh it",
    )


# Judging on a virtual GPU ---------------------------------------------------------------------------------------------


def test_counts_of_the_most_loaded_rank_are_gated_where_there_is_no_time() -> None:
    baseline = entry(
        counted_flops=figure(10**12), collective_bytes=figure(100), moved_bytes=figure(0, updates=1, first=7)
    )
    flops, collective, moved = judge(BASELINE, counted(collective=106, moved=1), baseline, KEY)
    assert (flops.metric_id, flops.verdict, flops.measured, flops.rank) == ("counted-flops", "pass", 10**12, 0)
    assert (collective.metric_id, collective.verdict, collective.allowed) == ("collective-bytes", "regression", 105)
    assert collective.change == pytest.approx(0.06)
    assert collective.explain() == (
        "collective bytes of a step 106 B on rank 0: +6.00% against the baseline of 100 B, at most 105 B allowed "
        "(tolerance 5.00%)"
    )
    assert (moved.metric_id, moved.verdict, moved.change) == ("moved-bytes", "regression", None)
    assert moved.explain().startswith("moved bytes of a step 1 B on rank 0: against the baseline of 0 B, at most 0 B")
    for judgement in (flops, collective, moved):
        assert (judgement.throughput, judgement.spread) == (None, None)


def test_a_minimum_is_not_gated_where_there_is_no_time() -> None:
    judgement = judged(at_least(4e14, "FLOP/s"), counted())
    assert (judgement.verdict, judgement.passed, judgement.shown) == ("not gated", True, None)
    assert judgement.notes == (
        "a virtual GPU has no time, so the minimum of 400.00 TFLOP/s is judged with --mbmem-gpu alone",
    )


def test_a_minimum_with_a_tolerance_compares_the_counts_where_there_is_no_time() -> None:
    baseline = entry(counted_flops=figure(10**12), collective_bytes=figure(100), moved_bytes=figure(0))
    found = judge(at_least(4e14, "FLOP/s", tolerance=0.1), counted(collective=111), baseline, KEY)
    assert [(j.metric_id, j.verdict, j.against_minimum) for j in found] == [
        ("counted-flops", "pass", None),
        ("collective-bytes", "regression", None),
        ("moved-bytes", "pass", None),
    ]
    assert (found[1].allowed, found[1].shown_reference) == (110, "100 B")
    assert "minimum" not in "".join(j.explain() for j in found)


def test_counts_that_another_gate_compares_are_left_to_it() -> None:
    other = replace(BASELINE, counts=False)
    assert judge(other, counted(), None, KEY) == []
    assert judged(other, timed(STEADY)).verdict == "missing"


def test_what_was_not_counted_is_invalid_and_never_zero() -> None:
    verdicts = {j.metric_id: (j.verdict, j.measured) for j in judge(BASELINE, counted(flops=None), None, KEY)}
    assert verdicts == {
        "counted-flops": ("invalid", None),
        "collective-bytes": ("invalid", None),
        "moved-bytes": ("missing", 0),
    }


def test_times_on_a_virtual_gpu_are_not_looked_at() -> None:
    with_times = replace(counted(), ranks=timed(STEADY).ranks)
    assert {j.verdict for j in judge(BASELINE, with_times, None, KEY)} == {"invalid", "missing"}
    assert not any("ms" in j.explain() for j in judge(BASELINE, with_times, None, KEY))


@pytest.mark.parametrize("measured", [timed(STEADY, flops=10**12), timed((1, 9)), counted(), timed(())])
@pytest.mark.parametrize("gate", [BASELINE, at_least(1.5), at_least(1.5, tolerance=0.05)])
def test_judgements_come_back_from_json(measured: Measurement, gate: ThroughputGate) -> None:
    for judgement in judge(gate, measured, entry(throughput=figure(1, 0)), KEY):
        data = json.loads(json.dumps(Judged(judgement, True).to_json()))
        assert Judged.from_json(ThroughputJudgement, data, "t") == Judged(judgement, True)
        assert data["explanation"] == judgement.explain()


# Baselines ------------------------------------------------------------------------------------------------------------


def records(measured: Measurement, tolerance: float = 0.05) -> list[Record]:
    gate = ThroughputGate(tolerance=tolerance)
    return [Record.of_step(MODULE, judgement, measured) for judgement in judge(gate, measured, None, KEY)]


def stored(folder: Path, device: Device = REAL) -> Mapping[str, Figure]:
    return read(baseline_path(folder, device.key, MODULE)).entries[KEY].figures


def test_what_an_update_writes_is_what_the_next_run_is_judged_by(tmp_path: Path) -> None:
    measured = timed(STEADY)
    (change,) = apply_updates(tmp_path, records(measured), "new")
    assert (change.metric_id, change.kind, change.new) == ("throughput", "new", 100 * MS)
    lines = baseline_path(tmp_path, REAL.key, MODULE).read_text().splitlines()
    assert lines[lines.index("      throughput:") :] == [
        "      throughput:",
        "        step_ns: 100000000  # 100.00 ms",
        "        spread_ns: 1000000  # 1.00 ms",
        "        rank: 0",
        "        first: 100000000  # 100.00 ms",
        "        updates: 0",
        "        environment: e1",
    ]
    found = read(baseline_path(tmp_path, REAL.key, MODULE)).entries[KEY]
    assert judged(BASELINE, measured, found).verdict == "pass"
    assert apply_updates(tmp_path, records(measured), "all") == []


def test_counts_are_stored_beside_each_other_and_zero_is_a_figure(tmp_path: Path) -> None:
    measured = counted(collective=2048)
    apply_updates(tmp_path, records(measured), "new")
    found = {name: (f.value, f.spread) for name, f in stored(tmp_path, VIRTUAL).items()}
    assert found == {"counted-flops": (10**12, None), "collective-bytes": (2048, None), "moved-bytes": (0, None)}
    text = baseline_path(tmp_path, VIRTUAL.key, MODULE).read_text()
    assert "        flops: 1000000000000  # 1.00 TFLOP\n" in text
    assert "        bytes: 2048  # 2.00 KiB\n" in text
    baseline = read(baseline_path(tmp_path, VIRTUAL.key, MODULE)).entries[KEY]
    assert [j.verdict for j in judge(BASELINE, measured, baseline, KEY)] == ["pass"] * 3


@pytest.mark.parametrize("mode", ["changed", "all"])
def test_lower_throughput_needs_a_reason(tmp_path: Path, mode: Any) -> None:
    apply_updates(tmp_path, records(timed(STEADY)), "new")
    slower = records(timed((120,) * 4))
    with pytest.raises(UserError, match=r"the step time would rise from 100\.00 ms to 120\.00 ms; give --mbmem-reason"):
        apply_updates(tmp_path, slower, mode)
    assert stored(tmp_path)["throughput"].value == 100 * MS
    (change,) = apply_updates(tmp_path, slower, mode, "more layers")
    assert change.kind == "regression"
    found = stored(tmp_path)["throughput"]
    assert (found.value, found.first, found.updates, found.reason) == (120 * MS, 100 * MS, 1, "more layers")
    (change,) = apply_updates(tmp_path, records(timed((80,) * 4)), "changed")  # faster needs none
    assert change.kind == "improvement"


def test_higher_counts_need_a_reason(tmp_path: Path) -> None:
    apply_updates(tmp_path, records(counted()), "new")
    with pytest.raises(UserError, match=r"the counted FLOPs would rise from 1\.00 TFLOP to 1\.10 TFLOP"):
        apply_updates(tmp_path, records(counted(flops=11 * 10**11)), "all")
    with pytest.raises(UserError, match="the moved bytes would rise from 0 B to 1 B"):
        apply_updates(tmp_path, records(counted(moved=1)), "changed")
    apply_updates(tmp_path, records(counted(flops=9 * 10**11)), "changed")
    assert stored(tmp_path, VIRTUAL)["counted-flops"].value == 9 * 10**11


def test_a_step_time_within_the_noise_is_refreshed_without_a_reason_and_drift_stays_on_record(tmp_path: Path) -> None:
    apply_updates(tmp_path, records(timed(STEADY)), "new")
    for step in range(1, 11):
        slower = tuple(time + step for time in STEADY)
        assert apply_updates(tmp_path, records(timed(slower)), "changed") == []
        (change,) = apply_updates(tmp_path, records(timed(slower)), "all")
        assert change.kind == "refreshed"
    found = stored(tmp_path)["throughput"]
    assert (found.value, found.first, found.updates) == (110 * MS, 100 * MS, 10)
    baseline = Entry("d1", RECIPE, {"throughput": found})
    assert any(note.startswith("drift: +10.00% since") for note in judged(BASELINE, timed(slower), baseline).notes)


def test_another_recipe_begins_anew_and_takes_its_test_with_it(tmp_path: Path) -> None:
    apply_updates(tmp_path, records(timed(STEADY)), "new")
    (change,) = apply_updates(tmp_path, records(timed((200,) * 4, recipe_digest="d2")), "changed")
    assert (change.kind, stored(tmp_path)["throughput"].updates) == ("stale", 0)


def test_of_a_test_that_ran_several_times_the_slowest_is_kept(tmp_path: Path) -> None:
    times = ((90,) * 4, (110,) * 4, STEADY, (100, 110, 120), (110, 110, 111))
    for order in (times, times[::-1]):
        runs = [record for each in order for record in records(timed(each))]
        apply_updates(tmp_path, runs, "all")
        assert (stored(tmp_path)["throughput"].value, stored(tmp_path)["throughput"].spread) == (110 * MS, 10 * MS)


def test_solo_and_joint_times_have_figures_of_their_own(tmp_path: Path) -> None:
    apply_updates(tmp_path, records(timed(STEADY, STEADY, mode="joint")), "new")
    apply_updates(tmp_path, records(timed((50,) * 4, (50,) * 4, mode="solo")), "new")
    assert {name: f.value for name, f in stored(tmp_path).items()} == {
        "throughput": 100 * MS,
        "solo-throughput": 50 * MS,
    }


def test_records_travel_as_json() -> None:
    for record in [*records(timed(STEADY)), *records(counted())]:
        assert Record.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_pasted_text_is_the_file_that_an_update_writes(tmp_path: Path) -> None:
    text = paste(tmp_path, records(counted())).text
    apply_updates(tmp_path, records(counted()), "new")
    assert text == baseline_path(tmp_path, VIRTUAL.key, MODULE).read_text()


@st.composite
def step_figures(draw: st.DrawFn) -> dict[str, Figure]:
    found = {}
    for name in draw(st.sets(st.sampled_from(sorted(STEP_METRICS)), min_size=1)):
        kind = STEP_METRICS[name]
        values = st.integers(kind.lowest, 2**60)
        value, updates = draw(values), draw(st.integers(0, 3))
        found[name] = figure(
            value,
            draw(st.integers(0, 2**60)) if kind.key == "step_ns" else None,
            rank=draw(st.integers(0, 9999)),
            first=draw(values) if updates else value,
            updates=updates,
            reason=draw(st.none() | st.just("why: not")),
        )
    return found


@given(step_figures())
def test_every_figure_comes_back_from_a_baseline_file(figures: dict[str, Figure]) -> None:
    file = BaselineFile({KEY: Entry("d1", None, figures)})
    again = parse(dump(file), Path("f"))
    assert again.entries == file.entries
    assert dump(again) == dump(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("step_ns: 5", "step_ns: 0", "step_ns is '0'; allowed: a whole number, 1 or more"),
        ("step_ns: 5", "step_ms: 5", "throughput: unknown key 'step_ms'; allowed: step_ns, spread_ns, rank, first"),
        ("spread_ns: 1", "spread_ns: 1.5", "spread_ns is '1.5'; allowed: a whole number, 0 or more"),
        ("    spread_ns: 1", "    reason: x", "throughput: the key 'spread_ns' is missing"),
        ("first: 5", "first: 6", "first is '6'; allowed: the step_ns, 5, as long as updates is 0"),
        ("throughput:", "throughput@backward:", "'throughput@backward' is no figure; allowed: allocated or reserved"),
        ("throughput:", "counted-flops:", "counted-flops: unknown key 'step_ns'; allowed: flops, rank, first"),
        ("    rank: 0", "    phase: build", "throughput: unknown key 'phase'"),
    ],
)
def test_a_file_is_read_strictly(old: str, new: str, message: str) -> None:
    text = dump(BaselineFile({KEY: Entry("d1", None, {"throughput": figure(5, 1)})})).replace("  # 0.01 us", "")
    text = text.replace("  # 0.00 us", "")
    assert old in text
    with pytest.raises(DamagedFile) as raised:
        parse(text.replace(old, new), Path("f"))
    assert message in str(raised.value)


def test_figures_are_shown_in_their_own_unit() -> None:
    assert [
        figure_text(name, 2 * 10**9) for name in ("throughput", "counted-flops", "moved-bytes", "allocated@build")
    ] == [
        "2.00 s",
        "2.00 GFLOP",
        "1.86 GiB",
        "1.86 GiB",
    ]
