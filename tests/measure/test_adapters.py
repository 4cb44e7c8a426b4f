"""LoRA's input re-gather in a measurement: what was requested, what is in effect, and a failure if nothing is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_mbmem.measure.adapters import adapter_notes, not_regathered
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Adapter, Measurement, RankMeasurement
from pytest_mbmem.recipe import Lora, Recipe

LORA = Lora(rank=8, sequence_parallel_input_regather=True)
ROW = "row-parallel adapter: its input is shared out by channels and never gathered"
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}


def rank(number: int, *adapters: Adapter) -> RankMeasurement:
    return RankMeasurement(rank=number, coordinates={}, stands_for=1, phases=(), adapters=adapters)


def missing(target: str) -> Adapter:
    return Adapter(target, 0, True, False, f"no module named {target} on this rank")


def measure(launcher: Launcher, recipe: Recipe, **changes: Any) -> Measurement:
    return launcher.measure(recipe.but(lora=LORA, **changes), count_flops=False)


def test_one_adapter_of_one_rank_in_effect_is_enough() -> None:
    in_effect, not_in_effect = Adapter("linear_qkv", 2, True, True), Adapter("linear_proj", 2, True, False, ROW)
    assert not not_regathered([rank(0, not_in_effect), rank(1, in_effect, not_in_effect)])


def test_without_a_request_nothing_fails() -> None:
    assert not not_regathered([rank(0, Adapter("linear_qkv", 2, False, False))])
    assert not not_regathered([rank(0)])


def test_a_request_without_any_effect_fails_with_every_target_and_reason() -> None:
    off = "sequence parallelism is off"
    found = (Adapter("linear_qkv", 2, True, False, off), Adapter("linear_proj", 2, True, False, ROW))
    ranks = [rank(3, *found, Adapter("linear_fc1", 2, True, False, off)), rank(4, *found)]
    assert not_regathered(ranks) == f"linear_qkv, linear_fc1: {off}; linear_proj: {ROW}"


def test_what_only_some_ranks_lack_is_no_reason() -> None:
    proj = Adapter("linear_proj", 2, True, False, ROW)
    ranks = [rank(0, missing("linear_qkv"), missing("linear_proj")), rank(1, missing("linear_qkv"), proj)]
    assert not_regathered(ranks) == f"linear_qkv: no module named linear_qkv on this rank; linear_proj: {ROW}"


def test_notes_say_what_is_in_effect_and_what_is_not() -> None:
    expert = Adapter("linear_fc1", 8, True, False, "expert adapter")
    shared, qkv = Adapter("linear_fc1", 2, True, True), Adapter("linear_qkv", 2, True, True)
    notes = adapter_notes([rank(0, qkv, expert, shared), rank(1, qkv, expert, shared)])
    assert notes == (
        "LoRA input re-gather of linear_qkv, linear_fc1: in effect",
        "LoRA input re-gather of linear_fc1: requested, not effective: expert adapter",
    )


def test_a_target_without_a_module_is_noted_even_without_a_request() -> None:
    absent = Adapter("linear_qkv", 0, False, False, "no module named linear_qkv on this rank")
    notes = adapter_notes([rank(0, absent, Adapter("linear_proj", 2, False, False))])
    assert notes == ("LoRA target linear_qkv: requested, not effective: no module named linear_qkv on this rank",)


def test_a_measurement_tells_requested_from_effective(launcher: Launcher, small_recipe: Recipe) -> None:
    measurement = measure(launcher, small_recipe, pp=2, **SEQUENCE_PARALLEL)
    assert measurement.failure is None
    for measured in measurement.ranks:
        assert measured.adapters == (
            Adapter("linear_qkv", 1, True, True),
            Adapter("linear_proj", 1, True, False, ROW),
            Adapter("linear_fc1", 1, True, True),
            Adapter("linear_fc2", 1, True, False, ROW),
        )
    assert measurement.notes[0] == "LoRA input re-gather of linear_qkv, linear_fc1: in effect"
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "linear_qkv, linear_fc1: tensor parallel size 1: "),
        ({"tp": 2}, "linear_qkv, linear_fc1: sequence parallelism is off: "),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
                **SEQUENCE_PARALLEL,
            },
            "linear_qkv, linear_fc1: full-layer recompute: ",
        ),
    ],
)
def test_a_measurement_fails_where_re_gather_has_no_effect(
    launcher: Launcher, small_recipe: Recipe, changes: dict[str, Any], reason: str
) -> None:
    measurement = measure(launcher, small_recipe, **changes)
    assert measurement.failure is not None
    assert measurement.failure.kind == "no effect"
    setting = "lora.sequence_parallel_input_regather: requested, not effective: "
    assert f"{setting}{reason}" in measurement.failure.message
    assert f"linear_proj, linear_fc2: {ROW}" in measurement.failure.message
    assert measurement.ranks  # what was measured is kept


def test_adapters_cost_less_than_training_all(launcher: Launcher, small_recipe: Recipe) -> None:
    everything = launcher.measure(small_recipe, count_flops=False)
    adapters = launcher.measure(small_recipe.but(lora=Lora(rank=8)), count_flops=False)
    assert adapters.failure is None
    assert not adapters.notes
    trained = sum(8 * (i + o) for i, o in [(64, 192), (64, 64), (64, 256), (256, 64)]) * small_recipe.model.num_layers
    # bf16 weights, fp32 gradients, fp32 main weights and two moments: 18 bytes for each that is trained, 2 if frozen.
    model = small_recipe.model
    parameters = model.num_parameters + 2 * (model.padded_vocab_size() - model.vocab_size) * model.hidden_size
    saved = 16 * parameters - 18 * trained

    def resting(measurement: Measurement) -> int:
        return measurement.ranks[0].phases[-1].resting["allocated"]

    # The allocator rounds blocks up to 512 bytes: a few of each of the 20 parameters.
    assert abs(resting(everything) - resting(adapters) - saved) <= 512 * 4 * 20
