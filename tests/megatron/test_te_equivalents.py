"""What stands for Transformer Engine's layers where it is not installed does with memory settings what they do.

The same figures are those of its own layers in tests/te.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Lora, Mla, Model, Moe, Parallelism, Recipe, Training

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="Transformer Engine is installed, so that its own layers are measured (tests/te)",
)

SEQUENCE, HIDDEN, HEADS, FFN, LAYERS = 1024, 512, 8, 1024, 4
RECIPE = Recipe(
    model=Model(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=1024,
        normalization="RMSNorm",
        activation="swiglu",
        position_embedding_type="none",
    ),
    parallelism=Parallelism(),
    training=Training(seq_length=SEQUENCE, steps=2, transformer_impl="transformer_engine", attention_backend="flash"),
)
STATE = SEQUENCE * HIDDEN * 2  # bytes of the hidden states in bf16
INNER = SEQUENCE * FFN * 2  # half of what an MLP's first matrix gives
SCORES = HEADS * SEQUENCE * SEQUENCE * 2
MLA = Mla(q_lora_rank=128, kv_lora_rank=64, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64)
MOE = Moe(num_moe_experts=4, moe_ffn_hidden_size=256, moe_grouped_gemm=True)

ATTN_NORM = {"offload_modules": ("attn_norm",), "min_offloaded_tensor_size": 100_000}
LAYERNORM = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}


@pytest.mark.parametrize(
    ("setting", "changes", "acting"),
    [
        ("memory.recompute_modules 'layernorm'", LAYERNORM, 0),
        ("memory.recompute_modules 'layernorm'", {**LAYERNORM, "moe": MOE}, LAYERS),
        ("memory.offload_modules 'attn_norm'", ATTN_NORM, 0),
        ("memory.offload_modules 'attn_norm'", {**ATTN_NORM, "mla": MLA}, LAYERS),
        ("memory.offload_modules 'mlp_norm'", {"offload_modules": ("mlp_norm",), "mla": MLA}, 0),
    ],
    ids=["layernorm dense", "layernorm experts", "attn_norm dense", "attn_norm latent", "mlp_norm latent"],
)
def test_norms_in_matrices_are_out_of_reach(
    launcher: Launcher, setting: str, changes: dict[str, Any], acting: int
) -> None:
    recipe = RECIPE.but(position_embedding_type="rope", **changes)
    measured = launcher.measure(recipe, count_flops=False)
    (effect,) = measured.ranks[0].effects
    assert (effect.setting, effect.acting) == (setting, acting)
    alone = f"no norm that is a module of its own in the {LAYERS} layers"
    messages = [] if acting else [f"{setting}: requested, not effective: {alone} (rank 0)"]
    assert [f.message for f in (measured.failure,) if f] == messages


@pytest.mark.parametrize(
    ("backend", "moved"),
    [
        ("flash", 8 * STATE + 3 * INNER),
        ("unfused", 5 * STATE + 3 * INNER + SCORES),  # views of the projection have gaps, and stay
    ],
)
def test_layer_offload(launcher: Launcher, backend: str, moved: int) -> None:
    recipe = RECIPE.but(attention_backend=backend, cpu_offloading=True, cpu_offloading_num_layers=2)
    (rank,) = launcher.measure(recipe, count_flops=False).ranks
    assert rank.moved_bytes["to device"] == 2 * moved


def test_regather_of_lora_takes_off_the_whole_input(megatron_model: Callable[..., Any]) -> None:
    """The norm's own shard is kept either way."""
    import torch

    recipe = RECIPE.but(tp=2, sequence_parallel=True, pp=2, lora=Lora(rank=8))

    def requested() -> int:
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    def retained(regather: bool) -> int:
        live = megatron_model(recipe.but(sequence_parallel_input_regather=regather), rank=2)
        live.step()  # allocates what stays
        before, held = requested(), []
        live.step(lambda step, phase: held.append(requested()) if phase == "backward" else None)
        live.close()
        return held[0] - before

    assert retained(False) - retained(True) == LAYERS // 2 * 2 * STATE
