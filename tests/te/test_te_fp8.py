"""FP8 and FP4 by Megatron's names, in Transformer Engine's layers: what they save and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from te_recipes import (
    FFN,
    HIDDEN,
    LAYERS,
    PARAMETERS,
    RECIPE,
    SEQUENCE,
    SHAPES,
    WEIGHTS,
    category,
    distributed,
    resting,
    with_megatron,
)

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

TENSORWISE = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
DELAYED = {"fp8": "hybrid", "fp8_recipe": "delayed"}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}

H100: Mapping[str, Recipe] = {
    "bf16": RECIPE,
    "bf16 longer": RECIPE.but(seq_length=2 * SEQUENCE),
    "tensorwise": with_megatron(**TENSORWISE),
    "tensorwise longer": with_megatron(**TENSORWISE).but(seq_length=2 * SEQUENCE),
    "delayed": with_megatron(**DELAYED),
    "delayed longer": with_megatron(**DELAYED).but(seq_length=2 * SEQUENCE),
    "delayed, long history": with_megatron(**DELAYED, fp8_amax_history_len=1024),
    "blockwise": with_megatron(**BLOCKWISE),
    "tensorwise parameters": distributed(**TENSORWISE, fp8_param_gather=True),
    "tensorwise parameters by the other name": distributed(**TENSORWISE, fp8_param=True),
    "delayed parameters": distributed(**DELAYED, fp8_param_gather=True),
    "blockwise parameters": distributed(**BLOCKWISE, fp8_param_gather=True),
    "attention in fp8": with_megatron(**DELAYED, fp8_dot_product_attention=True).but(
        attention_backend="fused", num_attention_heads=2
    ),
}
B200: Mapping[str, Recipe] = {
    "bf16": RECIPE,
    "tensorwise parameters": distributed(**TENSORWISE, fp8_param_gather=True),
    "mxfp8": with_megatron(**MXFP8),
    "mxfp8 parameters": distributed(**MXFP8, fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True),
    "nvfp4": with_megatron(fp4="e2m1"),
}


def measured(launcher: Launcher, recipes: Mapping[str, Recipe]) -> dict[str, Measurement]:
    found = launcher.measure_many(list(recipes.values()), count_flops=False, check_effects=False)
    return dict(zip(recipes, found, strict=True))


@pytest.fixture(scope="module")
def h100(launcher_of: Callable[..., Launcher]) -> dict[str, Measurement]:
    return measured(launcher_of(), H100)


@pytest.fixture(scope="module")
def b200(launcher_of: Callable[..., Launcher]) -> dict[str, Measurement]:
    return measured(launcher_of().on(load_gpus()["b200-180gb"]), B200)


def scales_of_blocks() -> int:
    """Bytes of all weights' fp32 scales, of blocks of 128 by 128: by rows and by columns, padded to 4 in a row."""

    def one_way(rows: int, columns: int) -> int:
        return 4 * (rows // 128) * (-(-columns // 128 // 4) * 4)

    return LAYERS * sum(one_way(*shape) + one_way(*shape[::-1]) for shape in SHAPES.values())


def test_a_parameter_in_fp8_is_one_byte_on_blackwell(b200: dict[str, Measurement]) -> None:
    assert category(b200["bf16"], "parameters") == 2 * PARAMETERS
    saved = WEIGHTS - 4 * LAYERS * len(SHAPES)  # a scale for each weight
    assert category(b200["tensorwise parameters"], "parameters") == 2 * PARAMETERS - saved


def test_a_parameter_in_fp8_is_two_bytes_on_hopper_which_multiplies_transposed_copies(
    h100: dict[str, Measurement],
) -> None:
    for kind in ("tensorwise", "delayed"):
        assert category(h100[f"{kind} parameters"], "parameters") == 2 * PARAMETERS + 4 * LAYERS * len(SHAPES)
    assert category(h100["blockwise parameters"], "parameters") == 2 * PARAMETERS + scales_of_blocks()


def test_a_parameter_in_mxfp8_is_held_by_rows_and_by_columns(b200: dict[str, Measurement]) -> None:
    each_way = WEIGHTS + WEIGHTS // 32  # a scale of a byte for 32 values
    assert category(b200["mxfp8 parameters"], "parameters") == 2 * (PARAMETERS - WEIGHTS) + 2 * each_way


def test_one_setting_suffices_for_the_model_and_its_buffers(h100: dict[str, Measurement]) -> None:
    one, other = h100["tensorwise parameters"], h100["tensorwise parameters by the other name"]
    assert [p.peak for p in one.ranks[0].phases] == [p.peak for p in other.ranks[0].phases]


def saved_by_token(measurements: dict[str, Measurement], kind: str) -> float:
    """Bytes that a token keeps less for backward than in bf16."""

    def by_token(name: str) -> float:
        longer = resting(measurements[f"{name} longer"], "step-2/forward")
        return (longer - resting(measurements[name], "step-2/forward")) / SEQUENCE

    return by_token("bf16") - by_token(kind)


def test_fp8_halves_what_linears_keep_for_backward(h100: dict[str, Measurement]) -> None:
    # the inputs of linear_qkv, linear_fc1 and linear_fc2. That of linear_proj, which is attention's output, Megatron
    # has kept as it is (save_original_input), except with delayed scaling.
    inputs = LAYERS * (2 * HIDDEN + FFN)
    assert saved_by_token(h100, "tensorwise") == pytest.approx(inputs, abs=1)
    assert saved_by_token(h100, "delayed") == pytest.approx(inputs + LAYERS * HIDDEN, abs=1)


def test_delayed_scaling_keeps_a_history_for_every_tensor_of_a_linear(h100: dict[str, Measurement]) -> None:
    # forward and backward: input, weight and output, and two gradients; of attention three times as many
    tensors = [3, 2] * len(SHAPES) + [9, 6]
    one, long = (sum(-(-4 * length * number // 512) * 512 for number in tensors) for length in (1, 1024))
    found = resting(h100["delayed, long history"], "step-2/optimizer") - resting(h100["delayed"], "step-2/optimizer")
    assert found == LAYERS * (long - one)


@pytest.mark.parametrize("name", ["blockwise", "attention in fp8"])
def test_it_runs_on_hopper(h100: dict[str, Measurement], name: str) -> None:
    assert h100[name].failure is None


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_it_runs_on_blackwell(b200: dict[str, Measurement], name: str) -> None:
    assert b200[name].failure is None


@pytest.mark.parametrize(
    ("gpu", "settings", "message"),
    [
        ("a100-80gb", TENSORWISE, r"megatron.fp8_recipe: 'tensorwise' needs compute capability 8.9 or higher"),
        ("a100-80gb", {"fp8": "hybrid"}, r"megatron.fp8_recipe: 'delayed' needs .* a100-80gb \(.*\) has 8.0"),
        ("l4-24gb", BLOCKWISE, r"'blockwise' needs compute capability 9.0 or higher, and l4-24gb .* has 8.9"),
        ("h100-80gb", MXFP8, r"'mxfp8' needs compute capability 10.0 and below 12.0, and h100-80gb .* has 9.0"),
        ("h100-80gb", {"fp4": "e2m1"}, r"megatron.fp4_recipe: 'nvfp4' needs compute capability 10.0 or higher"),
    ],
)
def test_a_recipe_without_hardware_for_it_is_refused_before_a_worker_starts(
    launcher_of: Callable[..., Launcher], gpu: str, settings: dict[str, Any], message: str
) -> None:
    launcher = launcher_of().on(load_gpus()[gpu])
    with pytest.raises(UserError, match=message):
        launcher.measure(with_megatron(**settings))


@pytest.mark.parametrize(
    ("gpu", "recipe", "message"),
    [
        ("h100-80gb", with_megatron(**TENSORWISE).but(seq_length=500), "Transformer Engine refuses it: FP8 execution"),
        (
            "h100-80gb",
            with_megatron(**DELAYED, fp8_dot_product_attention=True).but(attention_backend="fused"),
            "provided inputs: Disabling FusedAttention: hidden_dim",
        ),
        ("b200-180gb", distributed(**MXFP8, fp8_param_gather=True), "replace_raw_data for MXFP8Tensor"),
    ],
    ids=["sequence", "attention", "mxfp8-parameters"],
)
def test_what_transformer_engine_refuses_is_told_in_its_words(
    launcher_of: Callable[..., Launcher], gpu: str, recipe: Recipe, message: str
) -> None:
    failure = launcher_of().on(load_gpus()[gpu]).measure(recipe, count_flops=False, check_effects=False).failure
    assert failure is not None
    assert failure.kind == "refused"
    assert message in failure.message
