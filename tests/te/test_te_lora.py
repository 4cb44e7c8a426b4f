"""LoRA on Transformer Engine's linears: what adapters retain, to the byte, and what input re-gather takes off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Adapter
from pytest_mbmem.recipe import Lora, Mla, Model, Moe, Parallelism, Recipe, Training

SEQUENCE, HIDDEN, FFN, RANK, TP = 256, 128, 384, 8, 2
RECIPE = Recipe(
    model=Model(
        num_layers=4,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=FFN,
        vocab_size=1024,
        normalization="RMSNorm",
        activation="swiglu",
    ),
    parallelism=Parallelism(tp=TP, pp=2, sequence_parallel=True),
    training=Training(seq_length=SEQUENCE, transformer_impl="transformer_engine", attention_backend="fused"),
    lora=Lora(rank=RANK),
)
LAYERS = 2  # of the second stage, whose input requires gradients as in the middle of any model
WHOLE = SEQUENCE * HIDDEN * 2  # bytes of the hidden states in bf16
SHARD = WHOLE // TP
A_OUTPUT = SEQUENCE * RANK * 2
MLA = Mla(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64)
MOE = Moe(num_moe_experts=4, moe_ffn_hidden_size=128, moe_shared_expert_intermediate_size=256, moe_grouped_gemm=True)

Build = Callable[..., Any]
"""`megatron_model`."""

ROW = "row-parallel adapter: its input is shared out by channels and never gathered"
EXPERT = "expert adapter: its input is what the token dispatcher sends, not a shard of the sequence"


def requested() -> int:
    """Bytes that live tensors asked for, without the allocator's rounding."""
    import torch

    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def retained(megatron_model: Build, recipe: Recipe, rank: int = TP) -> int:
    """What one microbatch holds when its backward begins, on a rank of the second stage (or the only one)."""
    live = megatron_model(recipe, rank=rank)
    live.step()  # allocates what stays
    before, held = requested(), []
    live.step(lambda step, phase: held.append(requested()) if phase == "backward" else None)
    live.close()
    return held[0] - before


# What adapters retain -------------------------------------------------------------------------------------------------

KEPT = {
    # the norm's output: the shard that Transformer Engine keeps with it, and without re-gather the whole for A
    False: {"linear_qkv": WHOLE + SHARD, "linear_fc1": WHOLE + SHARD},
    True: {"linear_qkv": SHARD, "linear_fc1": SHARD},
}
FC2_INPUT = SEQUENCE * FFN // TP * 2


@pytest.mark.parametrize("regather", [False, True], ids=["gathered", "regather"])
def test_an_adapter_retains_its_input_and_that_of_b(megatron_model: Build, regather: bool) -> None:
    recipe = RECIPE.but(sequence_parallel_input_regather=regather)
    assert recipe.lora is not None
    everything = retained(megatron_model, recipe)
    # fused attention keeps its output anyway
    for target, kept in {**KEPT[regather], "linear_proj": 0, "linear_fc2": FC2_INPUT}.items():
        others = tuple(other for other in recipe.lora.targets if other != target)
        assert everything - retained(megatron_model, recipe.but(targets=others)) == LAYERS * (kept + A_OUTPUT), target


@pytest.mark.parametrize(
    ("impl", "kept_less"), [("transformer_engine", WHOLE), ("local", WHOLE - SHARD)], ids=["te", "local"]
)
def test_regather_takes_off_the_whole_input_with_transformer_engine(
    megatron_model: Build, impl: str, kept_less: int
) -> None:
    """Its norm's own shard is kept either way, where Megatron's local layers keep none but A's."""
    recipe = RECIPE.but(transformer_impl=impl, attention_backend="fused" if impl == "transformer_engine" else "flash")
    without, regathered = (
        retained(megatron_model, recipe.but(sequence_parallel_input_regather=regather)) for regather in (False, True)
    )
    assert without - regathered == LAYERS * 2 * kept_less


def test_without_sequence_parallelism_a_keeps_what_transformer_engine_keeps(megatron_model: Build) -> None:
    recipe = RECIPE.but(sequence_parallel=False)
    without_qkv = recipe.but(targets=("linear_proj", "linear_fc1", "linear_fc2"))
    assert retained(megatron_model, recipe) - retained(megatron_model, without_qkv) == LAYERS * (WHOLE + A_OUTPUT)


# What is trained ------------------------------------------------------------------------------------------------------


def test_only_adapters_are_trained(megatron_model: Build) -> None:
    live = megatron_model(RECIPE.but(pp=1, tp=1, sequence_parallel=False))
    live.step()
    trained = {name: p for name, p in live.chunks[0].named_parameters() if p.requires_grad}
    assert all(".adapter." in name for name in trained)
    sizes = [(HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    size = 4 * sum(RANK * (inputs + outputs) for inputs, outputs in sizes)
    assert sum(p.numel() for p in trained.values()) == size
    assert sum(buffer.grad_data.numel() for buffer in live.chunks[0].buffers) == size
    frozen = [p for p in live.chunks[0].parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == RECIPE.model.num_parameters
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in frozen)


SELECTIVE = {"recompute_granularity": "selective"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "regather": {"sequence_parallel_input_regather": True},
    "bias that Transformer Engine returns": {"add_bias_linear": True, "add_qkv_bias": True, "activation": "gelu"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "mlp": {**SELECTIVE, "recompute_modules": ("mlp",), "sequence_parallel_input_regather": True},
    "core_attn": {**SELECTIVE, "recompute_modules": ("core_attn",), "sequence_parallel_input_regather": True},
    "mla_up_proj": {**SELECTIVE, "recompute_modules": ("mla_up_proj", "layernorm"), "mla": MLA},
    "moe_act": {**SELECTIVE, "recompute_modules": ("moe_act", "shared_experts"), "moe": MOE},
    "moe": {**SELECTIVE, "recompute_modules": ("moe", "layernorm"), "moe": MOE},
    "sequential experts": {"moe": dataclasses.replace(MOE, moe_grouped_gemm=False)},
    "expert parallel": {"moe": MOE, "ep": 2, "etp": 1, "sequence_parallel_input_regather": True},
    "overlapped shared experts": {"moe": dataclasses.replace(MOE, moe_shared_expert_overlap=True)},
    "layer offload": {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
    "offload by module": {"offload_modules": ("core_attn", "attn_proj"), "min_offloaded_tensor_size": 1000},
}


def _count(reached: list[int], index: int, grad: object) -> None:
    reached[index] += 1


@pytest.mark.parametrize("half", [0, 1], ids=["first", "second"])
def test_every_adapter_gets_a_gradient(megatron_model: Build, half: int) -> None:
    for name, changes in list(SETTINGS.items())[half::2]:
        live = megatron_model(RECIPE.but(pp=1, **changes))
        trained = [p for p in live.chunks[0].parameters() if p.requires_grad]
        reached = [0] * len(trained)
        for index, parameter in enumerate(trained):
            parameter.register_hook(partial(_count, reached, index))
        live.step()
        assert reached == [1] * len(trained), name
        live.close()


# What is reported -----------------------------------------------------------------------------------------------------


def test_requested_against_effective_of_each_adapter(launcher_of: Callable[[], Launcher]) -> None:
    regather = RECIPE.but(pp=1, sequence_parallel_input_regather=True)
    dense, experts, latent = launcher_of().measure_many(
        [regather, regather.but(moe=MOE), regather.but(mla=MLA)], ranks=[0], count_flops=False
    )
    assert [m.failure for m in (dense, experts, latent)] == [None] * 3
    qkv, fc1 = Adapter("linear_qkv", 4, True, True), Adapter("linear_fc1", 4, True, True)
    proj, fc2 = (Adapter(target, 4, True, False, ROW) for target in ("linear_proj", "linear_fc2"))
    absent = Adapter("linear_qkv", 0, True, False, "no module named linear_qkv on this rank")
    assert dense.ranks[0].adapters == (qkv, proj, fc1, fc2)
    assert latent.ranks[0].adapters == (absent, proj, fc1, fc2)
    routed = [Adapter(target, 4, True, False, EXPERT) for target in ("linear_fc1", "linear_fc2")]
    assert experts.ranks[0].adapters == (qkv, proj, routed[0], fc1, routed[1], fc2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 1, "sequence_parallel": False}, "tensor parallel size 1"),
        ({"sequence_parallel": False}, "sequence parallelism is off"),
        (SETTINGS["full"], "full-layer recompute"),
        (SETTINGS["layer offload"], "CPU offload of activations"),
    ],
    ids=["tp1", "no sp", "full", "offload"],
)
def test_regather_without_effect_fails(
    launcher_of: Callable[[], Launcher], changes: dict[str, Any], reason: str
) -> None:
    recipe = RECIPE.but(pp=1, sequence_parallel_input_regather=True, seq_length=2048, **changes)
    failure = launcher_of().measure(recipe, ranks=[0], count_flops=False).failure
    assert failure is not None
    assert failure.kind == "no effect"
    setting = "lora.sequence_parallel_input_regather: requested, not effective: "
    assert f"{setting}linear_qkv, linear_fc1: {reason}" in failure.message
