"""Mixture of experts: dispatchers, expert parallelism, and what an uneven load would cost."""

from __future__ import annotations

import pytest

from pytest_mbmem import Recipe, Training, preset

MIXTRAL = Recipe(
    name="Mixtral 8x7B, shrunk to 4 layers of 1024",
    model=preset("mixtral-8x7b").shrunk(layers=4, hidden=1024),
    training=Training(seq_length=4096, attention_backend="flash"),
).but(ep=4, dp=4, distributed_optimizer=True, moe_grouped_gemm=True)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.peak_memory
def test_dispatcher(mbmem, dispatcher):
    mbmem.measure(MIXTRAL.but(moe_token_dispatcher_type=dispatcher))


@pytest.mark.peak_memory
def test_capacity(mbmem):
    """Experts that drop what is over their capacity, padded to it."""
    mbmem.measure(MIXTRAL.but(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True))


def test_uneven_routing(mbmem):
    """Routing is an assumption where no kernel computes: balanced, or one expert rank gets more than its share."""
    sweep = mbmem.sweep(MIXTRAL, {f"{factor}x": {"overload": factor} for factor in (1.5, 2)})
    print(sweep)
    peaks = [row.measurement.peak() for row in sweep]
    assert peaks == sorted(peaks)
    assert "1.5 times its share" in str(sweep["1.5x"].measurement.assumptions)


@pytest.mark.peak_memory
def test_shared_experts_and_multi_token_prediction(mbmem):
    """DeepSeek-V3's make: latent attention, shared experts, sigmoid routing, a layer that predicts one more token."""
    deepseek = preset("deepseek-v3").shrunk(layers=4, hidden=512)
    recipe = MIXTRAL.but(name="DeepSeek-V3, shrunk to 4 layers of 512", model=deepseek, seq_length=1024)
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    mbmem.measure(recipe.but(mtp_num_layers=1, moe_grouped_gemm=True, **router), ranks=[0])
