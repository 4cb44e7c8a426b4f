"""Memory settings must not change the numbers: real ones, on the CPU, against the control."""

from __future__ import annotations

import pytest

from pytest_mbmem import Recipe, Training, preset

QWEN = Recipe(
    name="Qwen3 8B, shrunk to 4 layers of 512",
    model=preset("qwen3-8b").shrunk(layers=4, hidden=512),
    training=Training(seq_length=1024),
).but(hidden_dropout=0.1)  # a replay must draw the same

SETTINGS = {
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "offload": {"cpu_offloading": True, "cpu_offloading_num_layers": 2},
    "full": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_recompute(mbmem, setting):
    parity = mbmem.parity(QWEN, QWEN.but(**SETTINGS[setting]))
    print(parity.table())


def test_experts(mbmem):
    """The activation between the experts' two linears, computed again."""
    mixtral = QWEN.but(name="Mixtral 8x7B", model=preset("mixtral-8x7b").shrunk(layers=4, hidden=512), ep=2, dp=2)
    replay = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
    mbmem.parity(mixtral.but(moe_grouped_gemm=True), replay)
