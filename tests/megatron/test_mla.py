"""Multi-latent attention without Transformer Engine."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Mla, Model, Moe, Recipe, Training

RECIPE = Recipe(
    model=Model(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        vocab_size=1024,
        activation="swiglu",
        normalization="RMSNorm",
        qk_layernorm=True,
        mla=Mla(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24),
    ),
    training=Training(seq_length=128, global_batch_size=2),
)


def attention_of(live):
    return live.chunks[0].module.module.decoder.layers[0].self_attention


@pytest.mark.parametrize(
    "changes",
    [{}, {"qk_layernorm": False}, {"q_lora_rank": None}, {"q_lora_rank": None, "qk_layernorm": False}],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_attention_has_the_parameters_of_its_recipe(megatron_model, changes) -> None:
    recipe = RECIPE.but(**changes)
    live = megatron_model(recipe)
    assert sum(p.numel() for p in live.chunks[0].parameters()) == recipe.model.num_parameters


def test_down_projections_are_whole_on_every_tensor_parallel_rank(megatron_model) -> None:
    attention = attention_of(megatron_model(RECIPE.but(tp=2, sequence_parallel=True)))
    assert attention.linear_q_down_proj.weight.shape == (48, 128)
    assert attention.linear_kv_down_proj.weight.shape == (32 + 16, 128)
    assert attention.linear_q_up_proj.weight.shape == (4 * (32 + 16) // 2, 48)
    assert attention.linear_kv_up_proj.weight.shape == (4 * (32 + 24) // 2, 32)
    # Each rank has seen a part of the sequence, so these gradients are summed over the ranks; and they count once.
    for linear in (attention.linear_q_down_proj, attention.linear_kv_down_proj):
        assert linear.weight.sequence_parallel
        assert linear.weight.allreduce
        assert not getattr(linear.weight, "tensor_model_parallel", False)


def test_norms_are_of_the_low_rank_vectors(megatron_model) -> None:
    attention = attention_of(megatron_model(RECIPE.but(tp=2, sequence_parallel=True)))
    assert attention.q_layernorm.weight.shape == (48,)
    assert attention.kv_layernorm.weight.shape == (32,)
    assert all(norm.weight.sequence_parallel for norm in (attention.q_layernorm, attention.kv_layernorm))


@pytest.mark.parametrize("backend", ["unfused", "flash"])
def test_attention_returns_its_input_shape(megatron_model, backend: str) -> None:
    import torch

    attention = attention_of(megatron_model(RECIPE.but(attention_backend=backend)))
    hidden = torch.empty(128, 1, 128, dtype=torch.bfloat16, device="cuda")
    output, bias = attention(hidden, torch.zeros(1, 1, 128, 128, dtype=torch.bool, device="cuda"))
    assert output.shape == hidden.shape
    assert bias is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "flash", "attention_dropout": 0.1},
        {"v_head_dim": 48, "attention_backend": "flash"},
        {"q_lora_rank": None},
        {"precision": "fp32", "add_bias_linear": True},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "dp": 2, "distributed_optimizer": True},
        {"cp": 2, "attention_backend": "flash"},
        {"pp": 2},
        {"mtp_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj", "layernorm")},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",), "attention_backend": "flash"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_every_setting_trains_two_steps(megatron_model, changes) -> None:
    live = megatron_model(RECIPE.but(**changes))
    assert all(live.step()[0] for _ in range(2))


@pytest.mark.parametrize("cp", [1, 2])
def test_it_goes_with_experts(megatron_model, cp: int) -> None:
    moe = Moe(num_moe_experts=4, moe_ffn_hidden_size=64, moe_layer_freq=(0, 1), moe_grouped_gemm=True)
    recipe = RECIPE.but(moe=moe, tp=2, sequence_parallel=True, ep=2, etp=1, cp=cp, attention_backend="flash")
    live = megatron_model(recipe)
    assert all(live.step()[0] for _ in range(2))


def test_recomputing_up_projections_keeps_less(megatron_model) -> None:
    import torch

    recipe = RECIPE.but(seq_length=1024, global_batch_size=1, attention_backend="flash")
    kept = []
    for modules in ((), ("mla_up_proj",)):
        live = megatron_model(recipe.but(recompute_granularity="selective", recompute_modules=modules))
        live.step()
        held: dict[str, int] = {}
        live.step(lambda step, phase, held=held: held.setdefault(phase, torch.cuda.memory_allocated()))
        kept.append(held["backward"] - held["forward"])
        live.close()
    queries_and_keys = 2 * 1024 * 4 * (32 + 16) * 2  # of one layer: heads, channels, bytes
    assert kept[0] - kept[1] >= 2 * queries_and_keys
