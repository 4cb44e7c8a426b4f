"""Training recipes with Transformer Engine's layers: attention, optimizer, fused kernels, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from te_recipes import (
    HEADS,
    HIDDEN,
    LAYERS,
    PARAMETERS,
    RECIPE,
    SEQUENCE,
    SHAPES,
    category,
    distributed,
    resting,
    with_megatron,
)

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Recipe

PRECISION_AWARE = {"use_precision_aware_optimizer": True}
BF16_STATE = {**PRECISION_AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
FP8_STATE = {**PRECISION_AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}

RECIPES: Mapping[str, Recipe] = {
    "plain": RECIPE,
    "rope unfused": with_megatron(apply_rope_fusion=False),
    "fused": RECIPE.but(attention_backend="fused"),
    "auto": RECIPE.but(attention_backend="auto"),
    "flash": RECIPE.but(attention_backend="flash"),
    "fused, context parallel": RECIPE.but(attention_backend="fused", cp=2),
    "gradients in place": with_megatron(gradient_accumulation_fusion=True),
    "cross entropy": RECIPE.but(cross_entropy_loss_fusion=True),
    "cross entropy of TE": RECIPE.but(cross_entropy_loss_fusion=True, megatron={"cross_entropy_fusion_impl": "te"}),
    "activation of TE": with_megatron(use_te_activation_func=True, bias_activation_fusion=False),
    "fp16": RECIPE.but(precision="fp16"),
    "scaled scores": with_megatron(apply_query_key_layer_scaling=True).but(precision="fp16"),
    "zeros counted": with_megatron(log_num_zeros_in_grad=True),
    "distributed": distributed(),
    "remainders": distributed(**PRECISION_AWARE),
    "no remainders": distributed(**PRECISION_AWARE, store_param_remainders=False),
    "bf16 state": distributed(**BF16_STATE),
    "fp8 state": distributed(**FP8_STATE),
    "bf16 gradients": distributed(**PRECISION_AWARE).but(main_grads="bf16"),
    "deterministic": RECIPE.but(deterministic=True, environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}),
}


@pytest.fixture(scope="module")
def measured(launcher_of: Callable[..., Launcher]) -> dict[str, Measurement]:
    found = launcher_of().measure_many(list(RECIPES.values()), count_flops=False, check_effects=False)
    return dict(zip(RECIPES, found, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_it_trains(measured: dict[str, Measurement], name: str) -> None:
    assert measured[name].failure is None


def peaks(measurement: Measurement) -> list[int]:
    return [phase.peak["allocated"] for phase in measurement.ranks[0].phases]


# Attention ------------------------------------------------------------------------------------------------------------

SCORES = 2 * HEADS * SEQUENCE * SEQUENCE
SUMS = 4 * HEADS * SEQUENCE  # an fp32 log-sum-exp for each query and head
SEEDS = 512  # two numbers, in the smallest block
MASK = SEQUENCE * SEQUENCE


def test_fused_attention_keeps_sums_in_place_of_scores(measured: dict[str, Measurement]) -> None:
    unfused, fused = (resting(measured[name], "step-2/forward") for name in ("plain", "fused"))
    assert unfused - fused == LAYERS * (SCORES - SUMS - SEEDS)


def test_flash_attention_keeps_what_fused_attention_keeps(measured: dict[str, Measurement]) -> None:
    fused, flash = (resting(measured[name], "step-2/forward") for name in ("fused", "flash"))
    assert flash == fused


def test_transformer_engine_itself_chooses_fused_attention_on_hopper(measured: dict[str, Measurement]) -> None:
    assert peaks(measured["auto"]) == peaks(measured["fused"])


@pytest.mark.parametrize("groups", [4, 2])
def test_flash_attn_s_stand_in_takes_what_its_sources_say(launcher_of: Callable[..., Launcher], groups: int) -> None:
    batch, sequence, heads, channels = shape = (2, 512, 4, 64)
    arguments = {"shape": shape, "groups": groups}
    (result,) = launcher_of().call_all([("te_models:flash_attention", arguments)], {}, 300)
    assert result.failure is None, result.message
    query, key = (2 * batch * sequence * h * channels for h in (heads, groups))
    sums = 4 * batch * heads * sequence
    assert result.value["retained"] == query + sums + SEEDS
    expanded = 2 * query if groups < heads else 0  # of keys and values, for each head of the queries
    assert result.value["backward"] == query + 2 * key + 2 * query + sums + expanded  # the sum of dq is in fp32


# Optimizer ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "by_parameter"),
    [
        ("plain", 4 + 4 + 4),
        ("distributed", 4 + 4 + 4),
        ("remainders", 2 + 4 + 4),
        ("no remainders", 4 + 4 + 4),
        ("bf16 state", 2 + 2 + 2),
        ("fp8 state", 2 + 2 + 2),  # on Hopper, where Transformer Engine 2.20 keeps a transposed copy of each
        ("bf16 gradients", 2 + 4 + 4),
    ],
)
def test_main_parameters_and_moments_have_the_types_that_were_chosen(
    measured: dict[str, Measurement], name: str, by_parameter: int
) -> None:
    # scales, and counters of a step, are some bytes for each of 15 parameters
    found = category(measured[name], "optimizer state")
    composition = measured[name].ranks[0].composition
    assert composition is not None
    assert any("optimizers/fused_adam.py" in owner.line for owner in composition.owners)
    assert found == pytest.approx(by_parameter * PARAMETERS, abs=15 * 64)


def test_main_gradients_have_the_type_that_was_chosen(measured: dict[str, Measurement]) -> None:
    assert category(measured["remainders"], "main gradients") == 4 * PARAMETERS
    assert category(measured["bf16 gradients"], "main gradients") == 2 * PARAMETERS


def test_fp16_does_not_skip_the_step_that_makes_its_state(measured: dict[str, Measurement]) -> None:
    assert category(measured["fp16"], "optimizer state") == category(measured["plain"], "optimizer state")


# Fused kernels --------------------------------------------------------------------------------------------------------


def test_gradients_added_in_place_leave_one_of_each_shape_that_means_nothing(measured: dict[str, Measurement]) -> None:
    # transformer_engine.pytorch.module.base.get_dummy_wgrad; the output layer's is Megatron's
    fused, apart = (resting(measured[name], "step-2/backward") for name in ("gradients in place", "plain"))
    shapes = {*SHAPES.values(), (RECIPE.model.vocab_size, HIDDEN)}
    assert fused - apart == sum(2 * rows * columns for rows, columns in shapes)
    assert any("Apex" in text for text in measured["gradients in place"].assumptions)


def test_rope_is_fused_as_in_megatron_lm(measured: dict[str, Measurement]) -> None:
    assert resting(measured["plain"], "step-2/forward") < resting(measured["rope unfused"], "step-2/forward")


def test_the_fused_cross_entropy_of_transformer_engine_makes_no_fp32_logits(measured: dict[str, Measurement]) -> None:
    logits, by_token = SEQUENCE * RECIPE.model.vocab_size, 32 * SEQUENCE
    unfused, fused = (category(measured[name], "logits") for name in ("plain", "cross entropy of TE"))
    assert (2 + 4) * logits < unfused < (2 + 4) * logits + by_token
    assert (2 + 2) * logits < fused < (2 + 2) * logits + by_token


# What is told ---------------------------------------------------------------------------------------------------------


def test_workspaces_are_called_so(measured: dict[str, Measurement]) -> None:
    composition = measured["fused"].ranks[0].composition
    assert composition is not None
    of_te = {owner.category for owner in composition.owners if "get_cublas_workspace" in owner.line}
    assert of_te == {"workspaces"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fused", ["cuDNN's fused attention: its plans take a workspace of 0 bytes"]),
        ("auto", ["cuDNN's", "attention_backend auto: chosen by Transformer Engine without flash-attn installed"]),
        ("flash", ["flash-attn 2.8.3: PyTorch's own build of FlashAttention 2 in its place"]),
        ("plain", []),
    ],
)
def test_assumptions_are_those_of_transformer_engine(
    measured: dict[str, Measurement], name: str, expected: list[str]
) -> None:
    stated = measured[name].assumptions
    assert not any("equivalents for memory" in text or "fused softmax" in text for text in stated)
    assert not any("fused Adam" in text for text in stated)
    about_attention = [text for text in stated if "attention" in text.lower()]
    assert len(about_attention) == len(expected)
    for text, start in zip(about_attention, expected, strict=True):
        assert text.startswith(start)


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (with_megatron(tp_comm_overlap=True).but(tp=2, sequence_parallel=True), "tp_comm_overlap: its buffers"),
        (with_megatron(qk_clip=True), "megatron.qk_clip: the training loop"),
        (RECIPE.but(cp=2), "parallelism.cp with training.attention_backend unfused"),
        (RECIPE.but(cp=2, attention_backend="flash"), "fused and auto can be measured"),
        (RECIPE.but(environment={"NVTE_BACKWARD_OVERRIDE": "high_precision"}), "reads it when it is loaded"),
    ],
    ids=["overlap", "qk-clip", "cp-unfused", "cp-flash", "environment"],
)
def test_what_cannot_be_measured_is_refused_before_a_worker_starts(
    launcher_of: Callable[..., Launcher], recipe: Recipe, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        launcher_of().measure(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"deterministic": True},
            "Megatron Core refuses it: deterministic_mode is on and we are using DotProductAttention from",
        ),
        (
            {"attention_backend": "fused", "kv_channels": 260},
            "Transformer Engine refuses it: No dot product attention backend is available for the provided inputs: ",
        ),
    ],
    ids=["deterministic", "attention"],
)
def test_a_refusal_of_megatron_or_transformer_engine_is_its_message_alone(
    launcher_of: Callable[..., Launcher], changes: dict[str, Any], message: str
) -> None:
    failure = launcher_of().measure(RECIPE.but(**changes), count_flops=False, check_effects=False).failure
    assert failure is not None
    assert (failure.kind, failure.message.startswith(message)) == ("refused", True), failure.message
    assert "Traceback" not in failure.message


def test_why_there_is_no_attention_leaves_out_what_the_backend_excludes(launcher_of: Callable[..., Launcher]) -> None:
    (result,) = launcher_of().call_all([("te_models:no_attention", {})], {}, 300)
    assert result.value == ("No dot product attention backend is available for the provided inputs: Disabling A for B")


# Models in one process ------------------------------------------------------------------------------------------------


def test_models_in_one_process_leave_nothing_to_the_next(launcher_of: Callable[..., Launcher]) -> None:
    fp8 = with_megatron(fp8="hybrid", fp8_recipe="delayed", gradient_accumulation_fusion=True)
    recipes = [RECIPE, fp8, RECIPE.but(attention_backend="flash"), RECIPE.but(attention_backend="auto"), RECIPE, fp8]
    arguments, chosen = {"recipes": [recipe.to_dict() for recipe in recipes]}, {"NVTE_APPLY_QK_LAYER_SCALING": "0"}
    (result,) = launcher_of().call_all([("te_models:in_one_process", arguments)], chosen, 300)
    assert result.failure is None, result.message
    first, first_fp8, _, _, again, again_fp8 = result.value
    assert (again, again_fp8) == (first, first_fp8)
    assert {model["left"] for model in result.value} == {0}
    assert all(model["environment"] == chosen for model in result.value)
