"""Memory that waits on the host: layers' activations, single modules' inputs, and optimizer state."""

from __future__ import annotations

import pytest

from pytest_mbmem import Recipe, Training, preset

LLAMA = Recipe(
    name="Llama 3 8B, shrunk to 8 layers of 1024",
    model=preset("llama3-8b").shrunk(layers=8, hidden=1024),
    training=Training(seq_length=4096, attention_backend="flash"),
).but(dp=2, distributed_optimizer=True)


@pytest.mark.memory_saving(control={"cpu_offloading": False, "cpu_offloading_num_layers": None}, at_least="5%")
def test_layers(mbmem):
    """What the first four layers save for backward; the device holds four layers at any time."""
    measurement = mbmem.measure(LLAMA.but(cpu_offloading=True, cpu_offloading_num_layers=4))
    (first, _) = measurement.ranks
    assert first.host_peak > 2**28
    assert first.moved_bytes["to device"] > 2**28  # each step brings back what it took away


@pytest.mark.parametrize("modules", [["core_attn"], ["core_attn", "attn_proj"], ["qkv_linear"]])
def test_modules(mbmem, modules):
    """Megatron's fine-grained offload: the inputs of single modules."""
    comparison = mbmem.compare(LLAMA, {"offload_modules": modules})
    assert comparison.verdict == "saving", comparison.explain()


def test_optimizer_by_fraction(mbmem):
    """Half of Adam's state, then all of it: the host's share and the device's add up."""
    sweep = mbmem.sweep(
        LLAMA,
        {
            "half": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
            "all": {"optimizer_cpu_offload": True},
        },
        phase="step-2",
    )
    print(sweep)
    assert sweep["all"].comparison.saving > sweep["half"].comparison.saving > 0
