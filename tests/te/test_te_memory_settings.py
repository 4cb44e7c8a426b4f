"""Recompute and offload with Transformer Engine's own modules: what they take off, to the byte where theory has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import te_recipes

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Mla, Moe, Recipe

SEQUENCE, HIDDEN, HEADS, FFN, LAYERS = 1024, 512, 8, 1024, 4
RECIPE = te_recipes.RECIPE.but(
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    ffn_hidden_size=FFN,
    seq_length=SEQUENCE,
    attention_backend="fused",
)
STATE = SEQUENCE * HIDDEN * 2  # bytes of the hidden states in bf16
INNER = SEQUENCE * FFN * 2  # half of what an MLP's first matrix gives
NORM = SEQUENCE * 4  # what a norm keeps beside its input
MASK = SEQUENCE * SEQUENCE
TOPK, EXPERT, SHARED = 2, 256, 512
MLA = Mla(q_lora_rank=128, kv_lora_rank=64, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64)
MOE = Moe(
    num_moe_experts=4,
    moe_router_topk=TOPK,
    moe_ffn_hidden_size=EXPERT,
    moe_shared_expert_intermediate_size=SHARED,
    moe_grouped_gemm=True,
)
READ = 4  # Megatron reads the gradients' norm, one fp32 value

Build = Callable[..., Any]
"""`megatron_model`."""


def requested() -> int:
    """Bytes that live tensors asked for, without the allocator's rounding."""
    import torch

    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def retained(megatron_model: Build, recipe: Recipe) -> int:
    """What one microbatch holds when its backward begins."""
    live = megatron_model(recipe)
    live.step()  # allocates what stays
    before, held = requested(), []
    live.step(lambda step, phase: held.append(requested()) if phase == "backward" else None)
    live.close()
    return held[0] - before


def selective(*labels: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": labels}


def saved(megatron_model: Build, recipe: Recipe) -> Callable[..., int]:
    """How many bytes less a change of the recipe retains."""
    without = retained(megatron_model, recipe)
    return lambda **changes: without - retained(megatron_model, recipe.but(**changes))


# Selective recompute --------------------------------------------------------------------------------------------------

MLP = STATE + 3 * INNER + NORM  # the first matrix's input and output and the activation; the norm is in the matrix
SCORES = HEADS * SEQUENCE * SEQUENCE * 2
STATISTICS = HEADS * SEQUENCE * 4 + 16  # of fused attention's softmax, and the state of its random numbers
ROTATION = SEQUENCE * MLA.qk_pos_emb_head_dim * 2  # bytes of its cosines, its sines, or one head that it turns


@pytest.mark.parametrize(("backend", "kept"), [("fused", STATISTICS), ("unfused", SCORES)])
def test_attention_and_mlp_of_dense_layers(megatron_model: Build, backend: str, kept: int) -> None:
    """The checkpoint of attention keeps its inputs: the mask, and the whole projection of which the values are a view.

    So it takes fused attention more than it saves: without it the values are a copy, and the projection is gone.
    """
    less = saved(megatron_model, RECIPE.but(attention_backend=backend))
    of_attention = LAYERS * (kept - 2 * STATE) - MASK
    assert less(**selective("core_attn")) == of_attention
    assert less(**selective("mlp")) == LAYERS * MLP
    assert less(**selective("core_attn", "mlp")) == of_attention + LAYERS * MLP


@pytest.mark.parametrize(("backend", "kept"), [("fused", STATISTICS), ("unfused", SCORES)])
def test_latent_attention_has_a_norm_and_up_projections(megatron_model: Build, backend: str, kept: int) -> None:
    less = saved(megatron_model, RECIPE.but(attention_backend=backend, mla=MLA))
    of_attention = LAYERS * kept - MASK
    queries = SEQUENCE * HEADS * (MLA.qk_head_dim + MLA.qk_pos_emb_head_dim) * 2
    # cosines and sines of queries and of keys, less the keys' part that all heads share, which is kept in their place
    of_up_projections = 2 * queries + STATE + 4 * ROTATION - ROTATION
    assert less(**selective("core_attn")) == of_attention
    assert less(**selective("layernorm")) == LAYERS * (STATE + NORM)
    assert less(**selective("mla_up_proj")) == LAYERS * of_up_projections
    assert less(**selective("layernorm", "mla_up_proj")) == LAYERS * (STATE + NORM + of_up_projections)
    assert less(**selective("core_attn", "mla_up_proj")) == of_attention + LAYERS * of_up_projections


def test_experts(megatron_model: Build) -> None:
    less = saved(megatron_model, RECIPE.but(moe=MOE))
    of_activation = SEQUENCE * TOPK * EXPERT * 2
    of_shared = 3 * SEQUENCE * SHARED * 2
    assert less(**selective("layernorm")) == LAYERS * (STATE + NORM)
    assert less(**selective("moe_act")) == LAYERS * of_activation
    assert less(**selective("shared_experts")) == LAYERS * of_shared
    assert less(**selective("moe_act", "shared_experts")) == LAYERS * (of_activation + of_shared)
    whole = less(**selective("moe"))
    # beside those the tokens sent to the experts, and what the first matrices give
    assert whole > LAYERS * (of_activation + of_shared + TOPK * STATE + 2 * of_activation)
    assert less(**selective("moe", "moe_act")) == less(**selective("moe", "shared_experts")) == whole


# Full recompute -------------------------------------------------------------------------------------------------------


def test_full_recompute(megatron_model: Build) -> None:
    full: dict[str, Any] = {"recompute_granularity": "full"}

    def kept(method: str, layers: int, **changes: Any) -> int:
        return retained(
            megatron_model, RECIPE.but(**full, recompute_method=method, recompute_num_layers=layers, **changes)
        )

    each, twos, all_in_one = (kept("uniform", layers) for layers in (1, 2, 4))
    assert each - twos == 2 * STATE  # inputs of two layers, of four
    assert twos - all_in_one == STATE
    first, two, four = (kept("block", layers) for layers in (1, 2, 4))
    of_a_layer = 8 * STATE + 3 * INNER - STATE  # its input is kept; see layer offload below
    assert first - two > of_a_layer
    assert two - four == 2 * (first - two)
    assert four == each
    assert retained(megatron_model, RECIPE) - first == first - two - MASK  # an input of the checkpoint
    plain, shared = (kept("uniform", 1, tp=2, distribute_saved_activations=share) for share in (False, True))
    assert plain - shared == LAYERS * STATE // 2


# Layer offload --------------------------------------------------------------------------------------------------------

LAYER = 8 * STATE + 3 * INNER
"""What a layer saves in tensors of 256K elements and more: its input, that of the attention's matrix, queries, keys,
values, the attention's output, the MLP's input, that of its first matrix, its output, and that of the activation."""


def test_layer_offload_takes_off_what_it_moves(megatron_model: Build) -> None:
    less = saved(megatron_model, RECIPE)
    for layers in (1, LAYERS - 1):
        assert less(cpu_offloading=True, cpu_offloading_num_layers=layers) == layers * LAYER


@pytest.mark.parametrize("older", [False, True], ids=["newer", "older"])
def test_layer_offload_is_measured(launcher_of: Callable[[], Launcher], older: bool) -> None:
    environment = {"NVTE_CPU_OFFLOAD_V1": "1"} if older else {}
    plain = RECIPE.but(environment=environment)
    offload = plain.but(cpu_offloading=True, cpu_offloading_num_layers=2)
    without, offloaded = launcher_of().measure_many([plain, offload], count_flops=False)
    assert (without.failure, offloaded.failure) == (None, None)
    (rank,) = offloaded.ranks
    assert rank.host_peak is not None
    if older:  # what Transformer Engine's modules mark, of any size
        assert rank.moved_bytes["to host"] != 2 * LAYER + READ
    else:
        assert rank.moved_bytes == {"to host": 2 * LAYER + READ, "to device": 2 * LAYER}
        assert rank.host_peak >= 2 * LAYER
    assert offloaded.peak() < without.peak()
    assert [(e.setting, e.effective, e.acting) for e in rank.effects] == [("memory.cpu_offloading", True, 2)]


def test_double_buffers_are_for_the_older_layer_offload_alone(launcher_of: Callable[[], Launcher]) -> None:
    offload = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "environment": {"NVTE_CPU_OFFLOAD_V1": "1"}}
    buffers = {"cpu_offloading_double_buffering": True}
    recipes = [RECIPE.but(**{**offload, **more}) for more in ({}, {"megatron": buffers})]
    older, buffered = launcher_of().measure_many(recipes, count_flops=False)
    assert (older.failure, buffered.failure) == (None, None)
    assert buffered.peak() > older.peak()  # the buffers stay
    ignored = launcher_of().measure(recipes[1].but(environment={}), count_flops=False)
    assert ignored.failure is not None
    assert ignored.failure.message.startswith(
        "megatron.cpu_offloading_double_buffering: requested, not effective: only "
    )


# Offload by module ----------------------------------------------------------------------------------------------------


def test_modules_move_exactly_what_they_save(launcher_of: Callable[[], Launcher]) -> None:
    """After its first step Megatron leaves the last layer on the device."""
    experts, unfused = {"moe": MOE}, {"attention_backend": "unfused"}
    cases: list[tuple[tuple[str, ...], dict[str, Any], int]] = [
        (("qkv_linear",), {}, 2 * STATE),  # the norm in it too
        (("core_attn",), {}, 4 * STATE),  # queries, keys, values and the output
        (("core_attn", "attn_proj"), {}, 5 * STATE),
        (("core_attn",), unfused, 3 * STATE + 2 * SCORES),  # the softmax' result as its own and as a matrix' input
        (("mlp_norm",), experts, STATE),
        (("expert_fc1",), experts, TOPK * STATE),
        (("moe_act",), experts, 2 * SEQUENCE * TOPK * EXPERT * 2),
    ]
    recipes = [
        RECIPE.but(offload_modules=modules, min_offloaded_tensor_size=100_000, **changes)
        for modules, changes, _ in cases
    ]
    for (modules, changes, moved), measured in zip(
        cases, launcher_of().measure_many(recipes, count_flops=False), strict=True
    ):
        assert measured.failure is None, (modules, changes)
        assert measured.ranks[0].moved_bytes["to device"] == (LAYERS - 1) * moved, (modules, changes)


def test_norms_in_matrices_are_out_of_reach(launcher_of: Callable[[], Launcher]) -> None:
    alone = f"no norm that is a module of its own in the {LAYERS} layers"
    wanted = {
        "memory.recompute_modules 'layernorm'": selective("layernorm"),
        "memory.offload_modules 'attn_norm'": {"offload_modules": ("attn_norm",)},
        "memory.offload_modules 'mlp_norm'": {"offload_modules": ("mlp_norm",), "mla": MLA},
    }
    recipes = [RECIPE.but(**changes) for changes in wanted.values()]
    for setting, measured in zip(wanted, launcher_of().measure_many(recipes, count_flops=False), strict=True):
        assert measured.failure is not None
        assert measured.failure.kind == "no effect"
        assert measured.failure.message == f"{setting}: requested, not effective: {alone} (rank 0)"


# Optimizer offload ----------------------------------------------------------------------------------------------------


def test_an_offloaded_optimizer_leaves_gradients_and_parameters_on_the_device(
    launcher_of: Callable[[], Launcher],
) -> None:
    recipe = RECIPE.but(dp=2, global_batch_size=2, distributed_optimizer=True)
    plain, offloaded = launcher_of().measure_many(
        [recipe, recipe.but(optimizer_cpu_offload=True)], ranks=[0], count_flops=False
    )
    assert (plain.failure, offloaded.failure) == (None, None)
    share = 4 * RECIPE.model.num_parameters // 2  # bytes in fp32
    assert offloaded.ranks[0].moved_bytes == {"to host": share + READ, "to device": share}
    resting = [m.ranks[0].phases[-1].resting["allocated"] for m in (plain, offloaded)]
    assert 3 * share <= resting[0] - resting[1] < 3.2 * share  # main parameters and both averages; blocks are rounded
