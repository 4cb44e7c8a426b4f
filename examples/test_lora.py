"""LoRA with sequence parallelism: what gathering the adapters' inputs again in backward saves."""

from __future__ import annotations

import pytest

from pytest_mbmem import Lora, NoEffect, Recipe, Training, preset

SEQUENCE, HIDDEN, LAYERS = 8192, 1024, 4
QWEN = Recipe(
    name="Qwen3 8B with LoRA, shrunk to 4 layers of 1024",
    model=preset("qwen3-8b").shrunk(layers=LAYERS, hidden=HIDDEN),
    training=Training(seq_length=SEQUENCE, attention_backend="flash"),
    lora=Lora(rank=32, alpha=32, sequence_parallel_input_regather=True),
).but(tp=2, sequence_parallel=True)


@pytest.mark.memory_saving(control={"sequence_parallel_input_regather": False}, at_least="40 MiB")
def test_input_regather(mbmem):
    """Half of the gathered input of each adapter of linear_qkv and linear_fc1, less one buffer for gathering."""
    measurement = mbmem.measure(QWEN)
    effective = {adapter.target: adapter.regather_effective for adapter in measurement.ranks[0].adapters}
    assert effective == {"linear_qkv": True, "linear_fc1": True, "linear_proj": False, "linear_fc2": False}
    gathered = SEQUENCE * HIDDEN * 2  # bytes of one input in bf16
    assert 2 * LAYERS * gathered // 2 - gathered == 48 * 2**20  # what is saved


def test_asked_for_where_it_cannot_act(mbmem):
    """Without sequence parallelism nothing is gathered, and asking for it is a failure, not a pass."""
    with pytest.raises(NoEffect, match="sequence"):
        mbmem.measure(QWEN.but(tp=1, sequence_parallel=False))


def test_same_numbers(mbmem):
    """On the CPU, with real numbers: outputs and all gradients as without it."""
    parity = mbmem.parity(QWEN.but(sequence_parallel_input_regather=False), QWEN)
    print(parity.table())
