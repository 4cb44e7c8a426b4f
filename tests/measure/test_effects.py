"""A memory setting that changes nothing is a failure of the measurement."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mbmem.measure.effects import failures, probes
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.workers import CallResult
from pytest_mbmem.measurement import RankMeasurement
from pytest_mbmem.recipe import Recipe

SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def rank(number: int, allocations: int) -> RankMeasurement:
    return RankMeasurement(
        rank=number, coordinates={}, stands_for=1, phases=(), allocations=allocations, moved_in_step_1=4
    )


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, []),
        ({**SELECTIVE, "recompute_modules": ()}, []),
        (SELECTIVE, ["memory.recompute_granularity 'selective' (core_attn)"]),
        (
            {**SELECTIVE, "recompute_modules": ("mlp", "layernorm")},
            ["memory.recompute_modules 'mlp'", "memory.recompute_modules 'layernorm'"],
        ),
        (FULL, ["memory.recompute_granularity 'full'"]),
        (
            {**FULL, "tp": 2, "distribute_saved_activations": True},
            ["memory.recompute_granularity 'full'", "memory.distribute_saved_activations"],
        ),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, ["memory.cpu_offloading"]),
        ({"offload_modules": ("core_attn",)}, ["memory.offload_modules 'core_attn'"]),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, ["memory.optimizer_cpu_offload"]),
    ],
)
def test_each_setting_is_left_out_alone(changes: dict[str, Any], names: list[str], small_recipe: Recipe) -> None:
    recipe = small_recipe.but(**changes)
    found = probes(recipe)
    assert list(found) == names
    for probe in found.values():
        differing = recipe.but(steps=1).differences(probe)
        assert differing
        assert all(key.startswith("memory.") for key in differing)


def test_a_label_has_an_effect_if_any_rank_allocates_differently_without_it() -> None:
    ranks = [rank(0, 100), rank(4, 200)]
    same = {0: (100, 4), 4: (200, 4)}
    assert failures(ranks, {"a": {0: (100, 4), 4: (199, 4)}, "b": {0: None, 4: (200, 4)}}) == []
    (failure,) = failures(ranks, {"a": same, "b": {0: (99, 4), 4: (200, 4)}, "c": same})
    assert failure.kind == "no effect"
    assert failure.message.startswith("a, c: without it the measured ranks do exactly the same")


def test_an_offload_has_an_effect_if_it_moves_anything() -> None:
    allocates = {"memory.offload_modules 'a'": {0: (99, 4)}}
    assert failures([rank(0, 100)], allocates)[0].kind == "no effect"
    assert failures([rank(0, 100)], {"memory.offload_modules 'a'": {0: (100, 3)}}) == []


def test_an_offload_of_tensors_that_are_all_too_small_is_no_effect(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(offload_modules=("mlp_norm",))
    failure = launcher.measure(recipe).failure
    assert failure is not None
    assert (failure.kind, failure.message[:33]) == ("no effect", "memory.offload_modules 'mlp_norm'")
    assert launcher.measure(recipe.but(min_offloaded_tensor_size=1)).failure is None


def test_an_offload_is_compared_with_the_same_step_without_it(launcher: Launcher, small_recipe: Recipe) -> None:
    """After its first step Megatron offloads a layer less, which may be more than a label of it moves."""
    recipe = small_recipe.but(
        offload_modules=("core_attn", "attn_proj"), min_offloaded_tensor_size=4096, num_layers=4, steps=3
    )
    measurement = launcher.measure(recipe)
    assert measurement.failure is None, measurement.failure
    (rank,) = measurement.ranks
    assert rank.moved_in_step_1 is not None
    assert rank.moved_in_step_1 > rank.moved_bytes["to host"]


@pytest.mark.parametrize("label", ["moe", "shared_experts"])
def test_a_label_whose_module_the_model_has_not_is_no_effect(
    label: str, launcher: Launcher, small_recipe: Recipe
) -> None:
    recipe = small_recipe.but(**SELECTIVE, recompute_modules=("core_attn", label))
    measurement = launcher.measure(recipe)
    assert measurement.failure is not None
    assert measurement.failure.kind == "no effect"
    assert f"memory.recompute_modules '{label}'" in measurement.failure.message
    assert "core_attn" not in measurement.failure.message
    assert launcher.measure(recipe, check_effects=False).failure is None


def test_a_setting_that_acts_on_one_stage_alone_has_an_effect(launcher: Launcher, small_recipe: Recipe) -> None:
    """Block recompute of one layer a stage: the others are as they were, and all stages are looked at."""
    assert launcher.measure(small_recipe.but(**FULL, pp=2)).failure is None


def test_an_empty_list_is_a_control_and_measures_as_no_recompute(launcher: Launcher, small_recipe: Recipe) -> None:
    control = launcher.measure(small_recipe.but(**SELECTIVE, recompute_modules=()))
    assert control.failure is None
    assert control.ranks == launcher.measure(small_recipe).ranks


def test_a_rank_that_cannot_be_run_without_the_setting_is_a_failure(
    launcher: Launcher, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not knowing is not an effect."""
    call_all = launcher.call_all

    def losing_probes(calls: Any, *arguments: Any) -> list[CallResult]:
        lost = CallResult(failure="timeout", message="no result within 1 s")
        results = call_all(calls, *arguments)
        return [lost if name.endswith("probe_rank") else r for (name, _), r in zip(calls, results, strict=True)]

    monkeypatch.setattr(launcher, "call_all", losing_probes)
    failure = launcher.measure(small_recipe.but(**SELECTIVE, recompute_modules=("core_attn",))).failure
    assert failure is not None
    assert failure.kind == "timeout"
    assert failure.message.startswith("without memory.recompute_modules 'core_attn': no result within 1 s")
