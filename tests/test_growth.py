"""The rule of `no_memory_growth`: what is growth and what is not, the verdict's text, and wrong arguments."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem import growth
from pytest_mbmem.errors import UserError
from pytest_mbmem.growth import Growth, GrowthRule, GrowthSummary, Holder, RankGrowth, Trace, slope
from pytest_mbmem.item import Worker
from pytest_mbmem.measure import growth_runs
from pytest_mbmem.measurement import Device
from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training

KIB = 1024
MIB = 2**20

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=1000),
    parallelism=Parallelism(),
    training=Training(seq_length=128),
)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([100] * 6, 0),
        ([100, 107, 114, 121, 128, 135], 7),  # a leak
        ([100, 100, 180, 180, 180, 180], 0),  # a buffer that is made late
        ([100, 100, 100, 100, 100, 180], 0),
        ([100, 105, 100, 105, 100, 105], 0),  # up and down
        ([180, 100, 107, 114, 121, 128], 7),  # one that is freed, and a leak
        ([100, 107, 194, 201, 208, 215], 7),  # one that is made late, and a leak
        ([100, 100, 140, 140, 180, 180], 13),  # a leak in every other step
        ([135, 128, 121, 114, 107, 100], 0),
        ([100], 0),
        ([], 0),
    ],
)
def test_slope(figures: list[int], expected: int) -> None:
    assert slope(figures) == expected


@given(
    st.integers(0, 2**40), st.integers(1, 2**30), st.integers(growth.MIN_STEPS, 12), st.integers(0, 2**40), st.data()
)
def test_a_steady_leak_is_found_exactly_whatever_else_is_made_once(
    start: int, leak: int, steps: int, once: int, data: st.DataObject
) -> None:
    made = data.draw(st.integers(1, steps))
    figures = [start + leak * step + (once if step >= made else 0) for step in range(steps + 1)]
    assert slope(figures) == leak


@given(st.integers(0, 2**40), st.integers(growth.MIN_STEPS, 12), st.integers(0, 2**40), st.data())
def test_what_is_made_once_is_never_growth(start: int, steps: int, once: int, data: st.DataObject) -> None:
    made = data.draw(st.integers(0, steps))
    assert slope([start + (once if step >= made else 0) for step in range(steps + 1)]) == 0


def a_trace(**figures: object) -> Trace:
    steady: dict[str, object] = {"resting": (MIB,) * 6, "retained": (2 * MIB,) * 6, "peak": 3 * MIB}
    return Trace(**{**steady, **figures})  # type: ignore[arg-type]


def a_growth(run: Trace, slack: int = 0, **others: object) -> Growth:
    return Growth((RankGrowth(3, run, **others),), slack)  # type: ignore[arg-type]


def test_a_steady_run_passes() -> None:
    steady = a_growth(a_trace(), control=a_trace(), microbatches={4: a_trace(), 16: a_trace()})
    assert steady.passed
    assert steady.explain() == "no memory growth (slack 0 B)"
    assert (steady.per_step, steady.over_control, steady.per_microbatch, steady.freed_by_gc) == (0, 0, 0, 0)


def test_growth_at_rest_and_after_backward_is_per_step() -> None:
    rising = tuple(MIB + step * KIB for step in range(6))
    for trace, place in ((a_trace(resting=rising), "at rest"), (a_trace(retained=rising), "after backward")):
        grows = a_growth(trace)
        assert grows.per_step == KIB
        assert grows.explain().startswith(
            f"MEMORY GROWTH: rank 3 grows by 1.00 KiB a step\n  {place}, 5 steps: 1048576 -> 1049600 -> "
        )


def test_retained_is_compared_with_the_control_and_named_by_what_the_control_does_not_hold() -> None:
    probs = Holder("decoder.layers.*.mlp.token_dispatcher.probs", 4096, 4, "128x4 bfloat16")
    leaf = Holder("the autograd graph of it", 64 * KIB, 4, "128x1x64 bfloat16", "random.py:557 (backward)")
    run = a_trace(retained=(2 * MIB + 64 * KIB,) * 6, kept=(leaf, dataclasses.replace(probs, bytes=6144, count=6)))
    kept = a_growth(run, control=a_trace(kept=(probs,)))
    assert kept.over_control == 64 * KIB
    (finding,) = kept.findings
    assert finding.holders == (leaf, dataclasses.replace(probs, bytes=2048, count=2))
    assert "    4 tensors, 64.00 KiB, as in 128x1x64 bfloat16, made at random.py:557 (backward)" in finding.lines()
    assert not a_growth(a_trace(), control=run).findings  # less than the control is no finding


def test_less_recompute_than_the_control_is_no_finding() -> None:
    assert a_growth(a_trace(retained=(MIB,) * 6), control=a_trace()).over_control == 0


@pytest.mark.parametrize("figure", ["peak", "retained"])
def test_peak_and_retained_may_not_depend_on_the_number_of_microbatches(figure: str) -> None:
    def held(number: int) -> Trace:
        amount = 3 * MIB + number * 100
        return a_trace(**{figure: amount if figure == "peak" else (amount,) * 6})

    grows = a_growth(a_trace(), microbatches={16: held(16), 4: held(4)})
    assert grows.per_microbatch == 100
    assert "takes 100 B more with every microbatch" in grows.explain()


def test_needing_gc_is_a_finding_that_names_the_cycle() -> None:
    text = a_growth(a_trace(freed_by_gc=MIB, cycles=("Model", "Wrapper"))).explain()
    assert "rank 3 needs a garbage collection to free 1.00 MiB" in text
    assert "cycles through Model, Wrapper:" in text


def test_what_a_test_leaves_is_a_finding() -> None:
    cache = Holder("test_it.CACHE[*]", MIB, 2)
    text = a_growth(Trace(left=MIB, kept=(cache,))).explain()
    assert "still has 1.00 MiB that the test allocated" in text
    assert "held by test_it.CACHE[*]\n    2 tensors, 1.00 MiB" in text


def test_the_worst_rank_counts_and_the_largest_finding_comes_first() -> None:
    small = RankGrowth(0, a_trace(freed_by_gc=10))
    large = RankGrowth(1, a_trace(freed_by_gc=1000))
    both = Growth((small, large), slack=0)
    assert both.freed_by_gc == 1000
    assert both.explain().splitlines()[0] == "MEMORY GROWTH: rank 1 needs a garbage collection to free 1000 B"
    assert "rank 0" in both.explain()
    assert dataclasses.replace(both, slack=999).findings == tuple(large.findings(999))
    assert dataclasses.replace(both, slack=1000).passed


def test_many_holders_are_cut_short_with_their_sum() -> None:
    holders = tuple(Holder(f"h{index}", KIB, 1) for index in range(9))
    rising = a_trace(resting=tuple(range(0, 6 * MIB, MIB)), grown=holders)
    assert "  and 3.00 KiB by 3 more" in a_growth(rising).explain()


def test_a_trace_survives_json() -> None:
    trace = a_trace(kept=(Holder("x", 1, 1),), cycles=("A",), left=3)
    assert Trace.from_json(json.loads(json.dumps(dataclasses.asdict(trace)))) == trace


# Which runs --------------------------------------------------------------------------------------------------------


def test_the_control_of_a_recipe_is_the_one_without_recompute_and_offload() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    assert growth.default_control(RECIPE.but(**full)) == RECIPE
    selective = RECIPE.but(recompute_granularity="selective", recompute_modules=("mlp",), alloc_conf="roundup:1")
    assert growth.default_control(selective) == RECIPE.but(alloc_conf="roundup:1")
    assert growth.default_control(RECIPE.but(offload_modules=("core_attn",))) == RECIPE
    assert growth.default_control(RECIPE) is None
    assert growth.default_control(RECIPE.but(optimizer_cpu_offload=True)) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (2, 4)),
        ({"global_batch_size": 8}, (8, 16)),
        ({"pp": 2}, (4, 8)),
        ({"pp": 2, "global_batch_size": 5}, (6, 12)),
        ({"pp": 2, "vpp": 2, "global_batch_size": 2}, (8, 16)),
    ],
)
def test_the_numbers_of_microbatches_fill_the_pipeline(changes: dict[str, int], expected: tuple[int, int]) -> None:
    recipe = RECIPE.but(**changes)
    assert growth.microbatch_pair(recipe) == expected
    assert [growth.with_microbatches(recipe, number).num_microbatches for number in expected] == list(expected)


def test_microbatches_are_those_of_one_data_parallel_rank() -> None:
    recipe = RECIPE.but(dp=2, micro_batch_size=3, global_batch_size=6)
    assert growth.with_microbatches(recipe, 5).global_batch_size == 2 * 3 * 5


# Arguments ---------------------------------------------------------------------------------------------------------


def rule(**arguments: object) -> GrowthRule:
    return GrowthRule.from_marker((), arguments, "t.py::test_x", lambda value: RECIPE)


def test_arguments_of_a_marker() -> None:
    assert rule() == GrowthRule()
    assert rule(steps=None, control=None) == GrowthRule()
    given = rule(steps=7, slack="1 MiB", microbatches=[4, 16], control="control.yaml")
    assert (given.steps, given.slack, given.microbatches, given.control) == (7, MIB, (4, 16), RECIPE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 5}, "no_memory_growth() has no argument 'step'; did you mean 'steps'? allowed: control, steps"),
        ({"steps": 4}, "no_memory_growth(steps=...): 4 is not a whole number from 5 to 1000"),
        ({"steps": True}, "no_memory_growth(steps=...): True is not a whole number from 5 to 1000"),
        ({"slack": "1"}, "no_memory_growth(slack=...): '1' is not a size"),
        ({"microbatches": 4}, "no_memory_growth(microbatches=...): 4 is not two whole numbers"),
        ({"microbatches": (16, 4)}, "no_memory_growth(microbatches=...): (16, 4) is not two whole numbers"),
        ({"microbatches": (0, 4)}, "no_memory_growth(microbatches=...): (0, 4) is not two whole numbers"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        rule(**arguments)
    assert str(caught.value).startswith(f"t.py::test_x: {message}")


def test_a_positional_argument_is_refused() -> None:
    with pytest.raises(UserError, match="takes no positional argument; name it: control, steps"):
        GrowthRule.from_marker((5,), {}, "t.py::test_x", lambda value: RECIPE)


@pytest.mark.parametrize("argument", [{"steps": 6}, {"control": "x"}, {"microbatches": (2, 4)}])
def test_a_test_that_is_measured_as_a_whole_takes_only_slack(argument: dict[str, object]) -> None:
    with pytest.raises(UserError, match=rf"no_memory_growth\({next(iter(argument))}=\.\.\.\) is about recipes"):
        rule(**argument).check_in_worker("t.py::test_x")
    rule(slack=3).check_in_worker("t.py::test_x")


# Reports -----------------------------------------------------------------------------------------------------------


def test_a_summary_is_plain_data_and_read_back() -> None:
    run = Trace(resting=(0, MIB, 2 * MIB, 3 * MIB), freed_by_gc=2 * MIB, grown=(Holder("a.b", MIB, 1),))
    summary = Growth((RankGrowth(0, run),), name="n").summary()
    assert (summary.passed, summary.per_step, summary.freed_by_gc) == (False, MIB, 2 * MIB)
    assert [finding.kind for finding in summary.findings] == ["gc", "per step"]
    assert GrowthSummary.from_json(json.loads(json.dumps(summary.to_json())), "f") == summary
    with pytest.raises(UserError, match=r"f\.passed: 1 is not true or false"):
        GrowthSummary.from_json({**summary.to_json(), "passed": 1}, "f")


def test_what_a_whole_test_leaves_is_of_the_rank_that_it_built() -> None:
    device = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=True)
    worker = Worker(device, Path("no history"), None, {})
    body: Any = SimpleNamespace(end=lambda fixtures, with_model: Trace())
    assert worker.grown(body, {}, GrowthRule())[0].ranks[0].rank == 0
    worker.built.append((RECIPE, 3))
    assert worker.grown(body, {}, GrowthRule())[0].ranks[0].rank == 3


@pytest.mark.parametrize("off", [{"recompute_granularity": None}, {"recompute_granularity": None, "tp": 1}])
def test_the_control_may_be_changes_of_what_is_run(off: dict[str, object]) -> None:
    full = RECIPE.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert growth_runs.control_of(full, GrowthRule(control=off)) == RECIPE
    with pytest.raises(UserError, match="control and candidate are the same recipe"):
        growth_runs.control_of(RECIPE, GrowthRule(control=off))
