"""Activation recompute: the decision order of NVIDIA's guidance as one sweep, on a shrunk Moonlight (MLA, experts)."""

from __future__ import annotations

import pytest

from pytest_mbmem import Recipe, Training, preset, recompute_labels

MOONLIGHT = Recipe(
    name="Moonlight 16B on 8 GPUs, shrunk to 4 layers of 512",
    model=preset("moonlight-16b").shrunk(layers=4, hidden=512),
    training=Training(seq_length=4096, attention_backend="flash"),
).but(
    tp=2,
    sequence_parallel=True,
    dp=4,
    ep=8,
    etp=1,
    distributed_optimizer=True,
    moe_grouped_gemm=True,
    recompute_granularity="selective",
    recompute_modules=[],  # a control that recomputes nothing
)

FULL = {
    "recompute_granularity": "full",
    "recompute_modules": None,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SETTINGS = {
    "core_attn": {"recompute_modules": ["core_attn"]},
    "mla_up_proj": {"recompute_modules": ["mla_up_proj"]},
    "moe_act": {"recompute_modules": ["moe_act"]},
    "layernorm + moe_act": {"recompute_modules": ["layernorm", "moe_act"]},
    "mlp": {"recompute_modules": ["mlp"]},
    "moe": {"recompute_modules": ["moe"]},
    "full": FULL,
}


def test_decision_order(mbmem):
    """Each row against the control; the unbeaten ones are those that a team has to choose among."""
    sweep = mbmem.sweep(MOONLIGHT, SETTINGS)
    print(sweep)
    assert sweep["full"].unbeaten  # nothing saves more
    assert not sweep["core_attn"].unbeaten  # flash attention keeps little of its own: others save more for less


@pytest.mark.parametrize("setting", ["moe_act", "mla_up_proj", "moe", "full"])
def test_each_setting_saves(mbmem, setting):
    """The same sweep, measured once: each of its rows as a test of its own."""
    row = mbmem.sweep(MOONLIGHT, SETTINGS)[setting]
    assert row.verdict == "saving", row.explain()


@pytest.mark.memory_saving(control={"recompute_modules": []}, at_least="1 MiB", max_slowdown="5%")
def test_mla_up_proj_is_worth_its_replay(mbmem):
    mbmem.measure(MOONLIGHT.but(recompute_modules=["mla_up_proj"]))


@pytest.mark.parametrize("label", recompute_labels())
def test_labels_of_the_installed_megatron(mbmem, label):
    """Whatever the installed version offers: it saves, or the reason why not is said."""
    row = mbmem.sweep(MOONLIGHT, {label: {"recompute_modules": [label]}})[label]
    print(row.explain())
    assert row.verdict in ("saving", "no effect") or label == "gdn_norm_out"  # needs gated delta net attention


LLAMA = Recipe(
    name="Llama 3 8B, shrunk to 8 layers of 1024",
    model=preset("llama3-8b").shrunk(layers=8, hidden=1024),
    training=Training(seq_length=2048, global_batch_size=8, attention_backend="flash"),
)


@pytest.mark.parametrize(("method", "layers"), [("uniform", 1), ("uniform", 2), ("block", 1)])
def test_full_recompute_of_interleaved_stages(mbmem, method, layers):
    """Groups of layers, or the first ones, of every model chunk: on each rank of the pipeline."""
    full = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}
    comparison = mbmem.compare(LLAMA.but(pp=2, vpp=2), full)
    assert all(rank.saving > 0 for rank in comparison.ranks), comparison.explain()


def test_saved_inputs_are_shared_out(mbmem):
    """What full recompute keeps, distributed over the tensor-parallel ranks where the sequence is not."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    comparison = mbmem.compare(LLAMA.but(tp=2, **full), {"distribute_saved_activations": True})
    assert comparison.verdict == "saving", comparison.explain()
