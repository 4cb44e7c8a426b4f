"""A memory setting that changes nothing is a failure of the measurement: "requested, not effective", and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_mbmem.compare import Comparison
from pytest_mbmem.measure.effects import failure, notes, probes
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.workers import CallResult
from pytest_mbmem.measurement import Adapter, Effect, Measurement, RankMeasurement
from pytest_mbmem.recipe import Lora, Moe, Recipe

SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}


def rank(number: int, allocations: int, *effects: Effect, adapters: tuple[Adapter, ...] = ()) -> RankMeasurement:
    return RankMeasurement(
        rank=number,
        coordinates={},
        stands_for=1,
        phases=(),
        allocations=allocations,
        moved_in_step_1=4,
        effects=effects,
        adapters=adapters,
    )


def message(*arguments: Any) -> str:
    found = failure(*arguments)
    assert found is not None
    assert found.kind == "no effect"
    return found.message


def refusal(measurement: Measurement) -> str:
    assert measurement.failure is not None
    assert measurement.failure.kind == "no effect"
    return measurement.failure.message


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


def test_the_core_attention_is_left_out_with_what_megatron_refuses_without_it(small_recipe: Recipe) -> None:
    found = probes(small_recipe.but(offload_modules=("core_attn", "attn_proj", "mlp_norm")))
    assert [probe.memory.offload_modules for probe in found.values()] == [
        ("mlp_norm",),
        ("core_attn", "mlp_norm"),
        ("core_attn", "attn_proj"),
    ]


def test_a_label_has_an_effect_if_any_rank_allocates_differently_without_it() -> None:
    ranks = [rank(0, 100), rank(4, 200)]
    same = {0: (100, 4), 4: (200, 4)}
    assert failure(ranks, {"a": {0: (100, 4), 4: (199, 4)}, "b": {0: None, 4: (200, 4)}}) is None
    assert message(ranks, {"a": same, "b": {0: (99, 4), 4: (200, 4)}, "c": same}).splitlines() == [
        "a: requested, not effective: all measured ranks do exactly the same without it",
        "c: requested, not effective: all measured ranks do exactly the same without it",
    ]


def test_an_offload_has_an_effect_if_it_moves_anything() -> None:
    name = "memory.offload_modules 'a'"
    verdict = message([rank(0, 100)], {name: {0: (99, 4)}})
    assert verdict == f"{name}: requested, not effective: rank 0 moves no more to the host than without it"
    assert failure([rank(0, 100)], {name: {0: (100, 3)}}) is None


def test_the_built_model_tells_why_a_setting_changes_nothing() -> None:
    def without_experts(layers: int) -> Effect:
        return Effect("moe", False, 0, f"no experts in the {layers} layers")

    same = {"moe": {0: (100, 4), 1: (100, 4)}}
    start = "moe: requested, not effective: "
    alike, other = rank(1, 100, without_experts(2)), rank(1, 100, without_experts(3))
    first = rank(0, 100, without_experts(2))
    assert message([first], {"moe": {0: (100, 4)}}) == f"{start}no experts in the 2 layers (rank 0)"
    assert message([first, alike], same) == f"{start}no experts in the 2 layers (all measured ranks)"
    assert message([first, other], same) == (
        f"{start}no experts in the 2 layers (rank 0); no experts in the 3 layers (rank 1)"
    )
    with_experts = rank(1, 100, Effect("moe", True, 1, "small tensors stay"))
    assert message([first, with_experts], same) == (
        f"{start}the model has 1 place for it, but all measured ranks do exactly the same without it; "
        "small tensors stay"
    )


def test_the_built_model_judges_what_was_not_probed() -> None:
    beyond = Effect("layers 3", False, 2, "the stage has 2 layers, so it comes to 2")
    within = Effect("layers 3", True, 3)
    verdict = "layers 3: requested, not effective: the stage has 2 layers, so it comes to 2 (rank 0)"
    assert message([rank(0, 100, beyond)], {}) == verdict
    assert message([rank(0, 100, beyond)], {"layers 3": {0: None}}) == verdict  # refused without it
    assert failure([rank(0, 100, beyond), rank(1, 100, within)], {}) is None


def test_the_run_counts_where_the_built_model_shows_nothing() -> None:
    ranks = [rank(0, 100, Effect("a", False, 0, "nobody to share with"), Effect("b", False, 0, "none"))]
    without = {"a": {0: (99, 4)}, "b": {0: (100, 4)}}
    assert message(ranks, without) == "b: requested, not effective: none (rank 0)"
    (note,) = notes(ranks, without)
    assert note.startswith("a: nobody to share with (rank 0); the ranks do otherwise without it")


def test_re_gather_is_one_of_several_settings() -> None:
    adapter = Adapter("linear_qkv", 2, True, False, "tensor parallel size 1")
    assert message([rank(0, 100, adapters=(adapter,))], {"a": {0: (100, 4)}}).splitlines() == [
        "a: requested, not effective: rank 0 does exactly the same without it",
        "lora.sequence_parallel_input_regather: requested, not effective: linear_qkv: tensor parallel size 1",
    ]


def test_an_offload_of_tensors_that_are_all_too_small_is_no_effect(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(offload_modules=("core_attn", "attn_proj"))
    for verdict, label in zip(refusal(launcher.measure(recipe)).splitlines(), ("core_attn", "attn_proj"), strict=True):
        assert verdict == (
            f"memory.offload_modules '{label}': requested, not effective: the model has 2 places for it, but rank 0 "
            "moves no more to the host than without it; tensors of fewer than 1048576 elements "
            "(min_offloaded_tensor_size) stay"
        )
    assert launcher.measure(recipe.but(min_offloaded_tensor_size=4096)).failure is None


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


def test_labels_whose_modules_the_model_has_not_are_no_effect(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(**SELECTIVE, recompute_modules=("core_attn", "moe", "shared_experts"))
    measurement = launcher.measure(recipe)
    assert refusal(measurement).splitlines() == [
        f"memory.recompute_modules '{label}': requested, not effective: no experts in the 2 layers (rank 0)"
        for label in ("moe", "shared_experts")
    ]
    read = Measurement.from_json(json.loads(json.dumps(measurement.to_json())))
    assert [rank.effects for rank in read.ranks] == [rank.effects for rank in measurement.ranks]
    assert [effect.effective for effect in read.ranks[0].effects] == [True, False, False]
    unchecked = launcher.measure(recipe, check_effects=False)
    assert unchecked.failure is None
    control = launcher.measure(recipe.but(recompute_modules=("core_attn",)))
    differences = {"memory.recompute_modules": (("core_attn",), recipe.memory.recompute_modules)}
    for candidate in (measurement, unchecked):
        compared = Comparison(control, candidate, differences)
        assert compared.verdict == "no effect"
        assert refusal(measurement).replace("\n", "; ") in compared.explain()


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 0},
            "memory.cpu_offloading: requested, not effective: cpu_offloading_num_layers 0: no layer is offloaded",
        ),
        (
            {**FULL, "recompute_num_layers": 0},
            "memory.recompute_granularity 'full': requested, not effective: recompute_num_layers 0: no layer is",
        ),
        (
            {**FULL, "recompute_num_layers": 3, "pp": 2},
            "memory.recompute_num_layers 3: requested, not effective: the stage has 1 layer, so it comes to 1 (all",
        ),
    ],
    ids=["offload-0", "block-0", "beyond-stage"],
)
def test_numbers_of_layers_that_come_to_less(
    changes: dict[str, Any], verdict: str, launcher: Launcher, small_recipe: Recipe
) -> None:
    assert refusal(launcher.measure(small_recipe.but(**changes))).startswith(verdict)


def test_re_gather_does_not_hide_other_settings(launcher: Launcher, small_recipe: Recipe) -> None:
    lora = Lora(rank=8, targets=("linear_qkv",), sequence_parallel_input_regather=True)
    recipe = small_recipe.but(**SELECTIVE, recompute_modules=("moe",), lora=lora)
    assert [line.split()[0] for line in refusal(launcher.measure(recipe)).splitlines()] == [
        "memory.recompute_modules",
        "lora.sequence_parallel_input_regather:",
    ]


def test_a_label_counts_if_one_stage_has_its_module(launcher: Launcher, small_recipe: Recipe) -> None:
    """Experts are on the second stage alone, and a dense MLP on the first."""
    moe = Moe(num_moe_experts=4, moe_layer_freq=(0, 1))
    recipe = small_recipe.but(moe=moe, pp=2, **SELECTIVE, recompute_modules=("moe", "mlp"))
    measurement = launcher.measure(recipe)
    assert (measurement.failure, measurement.notes) == (None, ())


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
    lost = launcher.measure(small_recipe.but(**SELECTIVE, recompute_modules=("core_attn",))).failure
    assert lost is not None
    assert lost.kind == "timeout"
    assert lost.message.startswith("without memory.recompute_modules 'core_attn': no result within 1 s")
