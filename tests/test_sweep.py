"""Sweeps: names of rows, recipes, and which rows nothing beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Model, Recipe, Training
from pytest_mbmem.sweep import Sweep, beats, cost_figures, named_settings, recipes_of

MIB, GIB = 2**20, 2**30
RECIPE = Recipe(model=Model(num_layers=2, hidden_size=64, num_attention_heads=4), training=Training(seq_length=64))
DIFFERENCES = {"memory.recompute_modules": ([], ["core_attn"])}


def job(peak: int, flops: int | None = 100, failure: Any = None, **costs: Any) -> Measurement:
    device = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=True)
    phases = (PhaseFigures(2, "backward", *[{"allocated": peak, "reserved": peak}] * 2),)
    rank = RankMeasurement(0, {}, 1, phases, flops_per_step=flops, **costs)
    reason = failure and Failure(failure, 0, "CUDA out of memory.", 1, "forward")
    return Measurement(device, (rank,), failure=reason)


def swept(control: Measurement, **rows: Measurement) -> Sweep:
    return Sweep.of(("none", control), [(n, m, DIFFERENCES) for n, m in rows.items()], "allocated", None, None)


# Unbeaten rows --------------------------------------------------------------------------------------------------------

figures = st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=3, max_size=3)


def test_a_row_beats_another_that_is_nowhere_lower_and_somewhere_higher() -> None:
    assert beats([1, 2, 3], [1, 2, 4])
    assert not beats([1, 2, 3], [1, 2, 3])
    assert not beats([1, 2, 3], [0, 9, 9])


def test_an_unknown_figure_is_neither_higher_nor_lower_than_a_known_one() -> None:
    assert not beats([1, None], [2, 5])
    assert not beats([1, 5], [2, None])
    assert beats([1, None], [2, None])


@given(figures, figures)
def test_of_two_rows_at_most_one_beats_the_other(one: list[int | None], other: list[int | None]) -> None:
    assert not (beats(one, other) and beats(other, one))


@given(figures, figures, figures)
def test_what_beats_a_beaten_row_beats_what_that_one_beats(a: Any, b: Any, c: Any) -> None:
    if beats(a, b) and beats(b, c):
        assert beats(a, c)


@given(st.lists(figures, min_size=1, max_size=6))
def test_every_beaten_row_is_beaten_by_an_unbeaten_one(rows: list[Sequence[int | None]]) -> None:
    unbeaten = [row for row in rows if not any(beats(other, row) for other in rows)]
    assert unbeaten
    for row in rows:
        assert row in unbeaten or any(beats(best, row) for best in unbeaten)


def test_less_memory_for_more_of_anything_is_unbeaten() -> None:
    sweep = swept(
        job(10 * GIB),
        recompute=job(8 * GIB, 130),
        better=job(8 * GIB, 120),
        offload=job(8 * GIB, moved_bytes={"to host": GIB}),
        regather=job(8 * GIB, collective_bytes={"tp": GIB}),
        pinned=job(8 * GIB, host_peak=GIB),
    )
    assert {row.name for row in sweep if row.unbeaten} == {"better", "offload", "regather", "pinned"}
    assert sweep.control.unbeaten
    assert [row.name for row in sweep.best][-1] == "none"


def test_a_control_that_takes_more_of_everything_is_beaten() -> None:
    sweep = swept(job(10 * GIB), better=job(8 * GIB, 90))
    assert [row.name for row in sweep.best] == ["better"]


def test_rows_without_figures_or_effect_take_no_part() -> None:
    sweep = swept(
        job(10 * GIB),
        oom=job(9 * GIB, failure="out of memory"),
        same=job(10 * GIB - 512),
        costly=job(12 * GIB, 90),
    )
    assert [(row.name, row.verdict, row.unbeaten) for row in sweep] == [
        ("oom", "out of memory", False),
        ("same", "no effect", False),
        ("costly", "costs more", True),
    ]
    assert sweep.control.unbeaten  # 512 bytes less and no effect do not beat it


def test_rows_are_compared_where_the_control_is_out_of_memory() -> None:
    sweep = swept(job(1, failure="out of memory"), one=job(60 * GIB, 130), other=job(70 * GIB, 140))
    assert sweep.control.verdict == "out of memory"
    assert [(row.name, row.verdict, row.unbeaten) for row in sweep] == [("one", "fits", True), ("other", "fits", False)]


def test_the_figures_that_count_are_those_of_the_swept_metric_and_phase() -> None:
    row = swept(job(GIB, collective_bytes={"tp": 2, "dp": 3}, moved_bytes={"to host": 4}, host_peak=5)).control
    assert cost_figures(row, "reserved", "backward") == (GIB, 100, 5, 4, 5)
    with pytest.raises(UserError, match="phase='forward' selects nothing"):
        cost_figures(row, "allocated", "forward")


# The object -----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_sequence_of_its_settings_and_knows_rows_by_name() -> None:
    sweep = swept(job(10 * GIB), a=job(8 * GIB), b=job(9 * GIB))
    assert [row.name for row in sweep] == ["a", "b"]
    assert len(sweep) == 2
    assert sweep["b"].comparison is not None
    assert sweep["b"].comparison.saving == GIB
    assert sweep["none"] is sweep.control
    with pytest.raises(KeyError, match="'c' is no row of the sweep; there are a, b"):
        sweep["c"]


def test_it_prints_as_a_table_without_empty_columns() -> None:
    sweep = swept(
        job(10 * GIB),
        core_attn=job(8 * GIB, 110),
        offload=job(9 * GIB, moved_bytes={"to host": GIB}),
        all=job(GIB, failure="out of memory"),
    )
    assert [" ".join(line.split()) for line in str(sweep).splitlines()] == [
        "setting peak allocated saved rank phase FLOPs more FLOPs moved to host verdict",
        "none 10.00 GiB - 0 step-2/backward 100.00 FLOP - - control *",
        "core_attn 8.00 GiB 2.00 GiB (20.00%) 0 step-2/backward 110.00 FLOP +10.00% - saving *",
        "offload 9.00 GiB 1.00 GiB (10.00%) 0 step-2/backward 100.00 FLOP +0.00% 1.00 GiB saving *",
        "all - - - - - - - out of memory",
        "* no other row takes less memory, FLOPs, traffic or host memory without more of another",
        "all: out of memory on rank 0 in step-1/forward: CUDA out of memory.",
    ]


def test_plain_data_are_read_back() -> None:
    sweep = swept(job(10 * GIB), a=job(8 * GIB), b=job(1, failure="out of memory"))
    assert Sweep.from_json(sweep.to_json(), "f") == sweep
    damaged = sweep.to_json()
    damaged["rows"][0]["name"] = 5
    with pytest.raises(UserError, match="f: the name of a row: 5 is not a text"):
        Sweep.from_json(damaged, "f")


# Settings -------------------------------------------------------------------------------------------------------------


def test_a_list_of_changes_names_itself() -> None:
    modules = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")}
    nothing = {"recompute_granularity": "selective", "recompute_modules": []}
    assert list(named_settings([modules, nothing, {"alloc_conf": "a:b"}, {"tp": 2}], "t")) == [
        "recompute_granularity=selective, recompute_modules=core_attn+mlp",
        "recompute_granularity=selective, recompute_modules=[]",
        "alloc_conf=a:b",
        "tp=2",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"t: \[\] are no settings; allowed are a mapping of names to changes"),
        ("core_attn", "t: 'core_attn' are no settings"),
        ({"a": 3}, "t: 3 is not a mapping of settings to values"),
        ({3: {}}, "t: the name 3 is not a text on one line"),
        ({"a\n": {}}, r"t: the name 'a\\n' is not a text on one line"),
        ([{"tp": 2}, {"tp": 2}], "t: two settings are named 'tp=2'"),
    ],
)
def test_settings_that_are_none_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        named_settings(settings, "t")


def test_the_recipe_itself_is_the_control_unless_one_is_named() -> None:
    named = {"a": {"recompute_granularity": "selective"}, "b": {"tp": 2}}
    (name, control), others = recipes_of(RECIPE, named, None, "t")
    assert (name, control) == ("control", RECIPE)
    assert others["b"] == (RECIPE.but(tp=2), {"parallelism.tp": (1, 2)})
    (name, control), others = recipes_of(RECIPE, named, "a", "t")
    assert (name, control) == ("a", RECIPE.but(recompute_granularity="selective"))
    assert others == {
        "b": (RECIPE.but(tp=2), {"memory.recompute_granularity": ("selective", None), "parallelism.tp": (1, 2)})
    }


@pytest.mark.parametrize(
    ("named", "control", "message"),
    [
        ({"a": {"tp": 2}}, "b", "t: control='b' is none of the settings: a"),
        ({"control": {"tp": 2}}, None, "t: a setting is named 'control'; write control='control'"),
        ({"a": {"tpp": 2}}, None, "t: a: 'tpp' is not a field of a recipe; did you mean 'tp'?"),
        ({"a": {"tp": 0}}, None, "t: a: parallelism.tp: 0 is not a whole number"),
        ({"a": {}}, None, "t: a: control and candidate are the same recipe"),
        ({"a": {"tp": 2}, "b": {"tp": 2, "pp": 1}}, None, "t: a and b are the same recipe"),
    ],
)
def test_impossible_sweeps_are_refused(named: Any, control: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        recipes_of(RECIPE, named, control, "t")


def test_a_row_without_recompute_may_lack_what_goes_with_it() -> None:
    base = RECIPE.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    rows = {"none": {"recompute_granularity": None}, "layer norms": {"recompute_granularity": "selective"}}
    _, others = recipes_of(base, rows, None, "t")
    assert others["none"][0] == RECIPE
    _, others = recipes_of(base, rows, "none", "t")
    assert others["layer norms"][0] == RECIPE.but(recompute_granularity="selective")
