"""Recipes whose settings exclude each other are refused before any process starts, however they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_mbmem.errors import IncompatibleSettings, UserError
from pytest_mbmem.growth import GrowthRule
from pytest_mbmem.measure import workers
from pytest_mbmem.measure.growth_runs import measure_growth
from pytest_mbmem.measure.host import HostLauncher
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Model, Recipe, Training
from pytest_mbmem.remedies import remedies
from pytest_mbmem.savings import changed
from pytest_mbmem.virtual_gpu.gpus import load_gpus

PLAIN = Recipe(
    model=Model(num_layers=4, hidden_size=64, num_attention_heads=4), training=Training(seq_length=64), name="mine"
)
OFFLOAD = PLAIN.but(cpu_offloading=True, cpu_offloading_num_layers=2)
BROKEN = OFFLOAD.but(cpu_offloading_num_layers=4, recompute_granularity="selective")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(workers.subprocess, "Popen", refuse)


RUNS: dict[str, Callable[[Launcher, HostLauncher, Recipe], object]] = {
    "measure": lambda virtual, _, recipe: virtual.measure(recipe),
    "several": lambda virtual, _, recipe: virtual.measure_many([PLAIN, recipe]),
    "growth": lambda virtual, _, recipe: measure_growth(virtual, recipe, GrowthRule()),
    "host": lambda _, host, recipe: host.measure(recipe),
    "parity": lambda _, host, recipe: host.parity(PLAIN, recipe),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.usefixtures("no_process")
def test_a_broken_recipe_is_refused_before_a_process_starts(run: str) -> None:
    virtual, host = Launcher(load_gpus()["h100-80gb"]), HostLauncher()
    with pytest.raises(IncompatibleSettings, match=r"^recipe mine: ") as error:
        RUNS[run](virtual, host, BROKEN)
    assert error.value.ids == ("cpu-offload-with-recompute", "cpu-offload-too-many-layers")


@pytest.mark.parametrize(
    "control", [{"recompute_granularity": "selective"}, OFFLOAD.but(recompute_granularity="selective")]
)
@pytest.mark.usefixtures("no_process")
def test_a_growth_control_is_checked_too(control: Recipe | dict[str, object]) -> None:
    with pytest.raises(IncompatibleSettings) as error:
        measure_growth(Launcher(load_gpus()["h100-80gb"]), OFFLOAD, GrowthRule(control=control))
    assert error.value.ids == ("cpu-offload-with-recompute",)


@pytest.mark.parametrize("marker", ["memory_saving", "no_memory_growth"])
@pytest.mark.parametrize("control", ['{"recompute_granularity": "selective"}', "BROKEN"])
@pytest.mark.usefixtures("no_process")
def test_a_markers_control_is_checked_before_the_recipe_is_measured(
    pytester: pytest.Pytester, marker: str, control: str
) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        from pytest_mbmem import Model, Recipe, Training

        MODEL = Model(num_layers=4, hidden_size=64, num_attention_heads=4)
        OFFLOAD = Recipe(model=MODEL, training=Training(seq_length=64)).but(
            cpu_offloading=True, cpu_offloading_num_layers=2
        )
        BROKEN = OFFLOAD.but(recompute_granularity="selective")

        @pytest.mark.{marker}(control={control})
        def test_x(mbmem):
            mbmem.measure(OFFLOAD)
        """
    )
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*incompatible settings: cpu-offload-with-recompute*"])
    result.stdout.no_fnmatch_line("*a process was started*")


@pytest.mark.usefixtures("no_process")
def test_what_cannot_be_measured_yet_is_refused_after_what_excludes_each_other() -> None:
    virtual = Launcher(load_gpus()["h100-80gb"])
    with pytest.raises(IncompatibleSettings, match="cpu-offload"):
        virtual.measure(OFFLOAD.but(megatron={"cuda_graph_impl": "local", "nccl_ub": True}))
    with pytest.raises(UserError, match=r"^recipe mine cannot be measured yet: megatron\.nccl_ub: NCCL's registered"):
        virtual.measure(PLAIN.but(megatron={"nccl_ub": True}))


def test_changes_that_make_settings_exclude_each_other_are_refused_by_their_place() -> None:
    with pytest.raises(IncompatibleSettings, match=r"^the place: incompatible settings: cpu-offload-with-recompute"):
        changed(OFFLOAD, {"recompute_granularity": "selective"}, "the place")


def test_a_remedy_that_excludes_a_setting_is_named_with_the_constraint() -> None:
    notes = {remedy.name: remedy.note for remedy in remedies(OFFLOAD, expandable_segments=True)}
    assert notes["recompute core_attn"].startswith("not possible: cpu-offload-with-recompute")
    assert notes["PP 1 -> 2, keeping DP"].startswith("not possible: cpu-offload-with-pp")


def test_added_settings_reach_the_measured_model(launcher: Launcher) -> None:
    recipe = PLAIN.but(dp=2, distributed_optimizer=True)
    plain, padded = launcher.measure_many(
        [recipe, recipe.but(megatron={"pad_buckets_for_high_nccl_busbw": True})], check_effects=False
    )
    assert padded.failure is None
    assert padded.ranks[0].peak() > plain.ranks[0].peak()  # buckets of multiples of 2**16 elements
    assert padded.recipe_digest != plain.recipe_digest


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"init_method_std": None}, "Megatron Core fails with init_method_std added: TypeError: "),
        ({"xyzzy": 1}, "megatron.xyzzy: no setting of TransformerConfig"),
        ({"init_method_std": "big"}, "megatron.init_method_std: 'big' is not a number"),
    ],
)
def test_megatron_s_answer_to_an_added_setting_is_a_refusal(
    added: dict[str, object], message: str, launcher: Launcher
) -> None:
    failure = launcher.measure(PLAIN.but(megatron=added), count_flops=False).failure
    assert failure is not None
    assert (failure.kind, failure.message[: len(message)]) == ("refused", message)
