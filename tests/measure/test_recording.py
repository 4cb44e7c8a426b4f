"""What the peaks are made of, from the allocator's own history of real models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_mbmem import preset
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import RankMeasurement
from pytest_mbmem.recipe import Lora, Model, Moe, Parallelism, Recipe, Training

DENSE = Recipe(
    model=Model(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=4,
        vocab_size=1024,
        activation="swiglu",
        share_embeddings_and_output_weights=True,
    ),
    parallelism=Parallelism(),
    training=Training(seq_length=256, steps=3),
)
EXPERTS = DENSE.but(
    model=Model(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        activation="swiglu",
        moe=Moe(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=256, moe_grouped_gemm=True),
    )
)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECIPES = {
    "dense": DENSE,
    "sharded optimizer": DENSE.but(dp=4, distributed_optimizer=True),
    "sequence parallel": DENSE.but(tp=2, sequence_parallel=True, attention_backend="flash"),
    "pipeline": DENSE.but(pp=2, vpp=2, global_batch_size=4),
    "full recompute": DENSE.but(**FULL),
    "experts": EXPERTS.but(ep=2, dp=2),
    "offload": DENSE.but(cpu_offloading=True, cpu_offloading_num_layers=2, attention_backend="flash"),
    "lora": Recipe(
        model=preset("qwen3-8b").shrunk(layers=2, hidden=512),
        parallelism=Parallelism(tp=2, sequence_parallel=True),
        training=Training(seq_length=512, attention_backend="flash"),
        lora=Lora(),
    ),
}


def measured(launcher: Launcher, recipe: Recipe) -> tuple[RankMeasurement, ...]:
    measurement = launcher.measure(recipe, count_flops=False, check_effects=False)
    assert measurement.failure is None, measurement.failure
    return measurement.ranks


@pytest.mark.parametrize("name", RECIPES)
def test_nearly_all_of_every_peak_has_an_owner_and_recording_changes_no_figure(name: str, launcher: Launcher) -> None:
    recipe = RECIPES[name]
    ranks = measured(launcher, recipe)
    call = ("pytest_mbmem.measure.worker:measure_rank", {"recipe": recipe.to_dict(), "record": False})
    for rank in ranks:
        arguments = {"rank": rank.rank, "coordinates": {}, "stands_for": 1, **call[1]}
        plain = RankMeasurement.from_json(launcher.call(call[0], arguments).value["rank"])
        assert plain.composition is None
        assert plain.phases == rank.phases
        assert plain.allocations == rank.allocations
        assert rank.composition is not None
        for index, figures in enumerate(rank.phases):
            categories = rank.composition.categories(index)
            assert sum(categories.values()) == figures.peak["allocated"]
            assert categories["unattributed"] < 0.03 * figures.peak["allocated"], figures.name
            assert categories["rounding"] >= 0
        assert rank.largest_allocation is not None
        assert rank.largest_owner in rank.composition.owners


def numbers_of_parameters(recipe: Recipe) -> int:
    """From first principles: SwiGLU, norms with biases, linears without, embeddings shared with the output layer."""
    model = recipe.model
    hidden, ffn = model.hidden_size, model.ffn_hidden_size or 4 * model.hidden_size
    norm = 2 * hidden
    layer = 4 * hidden**2 + 3 * hidden * ffn + 2 * norm
    return model.padded_vocab_size(1) * hidden + model.num_layers * layer + norm


@pytest.mark.parametrize("dp", [1, 4])
def test_parameters_gradients_and_optimizer_state_are_exact(dp: int, launcher: Launcher) -> None:
    recipe = DENSE.but(dp=dp, distributed_optimizer=dp > 1)
    numbers = numbers_of_parameters(recipe)
    for rank in measured(launcher, recipe):
        assert rank.composition is not None
        held = rank.composition.categories(len(rank.phases) - 2)  # of the last step: grad-sync
        assert rank.phases[-2].phase == "grad-sync"
        assert held["parameters"] == 2 * numbers  # bf16
        assert held["main gradients"] == 4 * numbers  # fp32
        steps = held["optimizer state"] - 12 * numbers // dp  # fp32 main parameters and Adam's two moments
        assert 0 <= steps <= 4 * 64  # Adam's counters, four bytes a parameter tensor
        assert held["gradients"] == held["logits"] == held["temporaries"] == 0


def test_owners_of_a_peak_add_up_to_it(launcher: Launcher) -> None:
    (rank,) = measured(launcher, DENSE)
    for phase in (None, "build", "step-2/backward"):
        assert sum(rank.owners(phase).values()) == rank.peak(phase=phase)
    assert {owner.category for owner in rank.owners("build")} >= {"parameters", "main gradients"}
    assert dataclasses.replace(rank, composition=None).owners() == {}


def test_activations_are_those_that_the_layers_save(launcher: Launcher) -> None:
    flash = DENSE.but(attention_backend="flash", position_embedding_type="none")
    per_layer: dict[int, int] = {}
    for layers in (2, 4):
        (rank,) = measured(launcher, flash.but(num_layers=layers))
        assert rank.composition is not None
        index = rank.phases.index(rank.peak_phase())
        per_layer[layers] = rank.composition.categories(index)["activations"]
        names = {owner.module: owner.modules for owner in rank.composition.at(index)}
        assert names["decoder.layers.*.mlp.linear_fc1"] == layers
    tokens, hidden = 256, 256
    saved = [
        *(2, 2),  # input and output of the norm, in hidden states of two bytes
        6,  # queries, keys and values
        2,  # output of the attention
        *(2, 2),  # the other norm
        *(16, 8),  # before and after SwiGLU, at four times the channels
    ]
    norms, attention = 2 * 2 * tokens, 4 * tokens  # in fp32: mean and deviation; sums of exponents for each head
    more = (per_layer[4] - per_layer[2]) // 2 - tokens * hidden * sum(saved) - 4 * (norms + attention)
    assert 0 <= more < 64  # the random generator's state


def test_recompute_leaves_activations_of_checkpoints_alone(launcher: Launcher) -> None:
    (plain,), (full,) = measured(launcher, DENSE), measured(launcher, DENSE.but(**FULL))

    def activations(rank: RankMeasurement) -> int:
        assert rank.composition is not None
        return rank.composition.categories(rank.phases.index(rank.peak_phase(phase="forward")))["activations"]

    assert activations(full) < activations(plain) / 5
    assert full.composition is not None
    backward = full.phases.index(full.peak_phase(phase="backward"))
    recomputed = [o for o in full.composition.at(backward) if o.category == "activations" and "mlp" in o.module]
    assert recomputed  # one layer's, while its backward runs


@pytest.mark.peak_memory(limit="1 GiB")
def test_plain_torch_in_a_worker_has_owners_too(record_property: Any) -> None:
    """Judged below, by what is recorded of it."""
    import torch

    from pytest_mbmem.measure.recording import Recording, is_running

    assert is_running()
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048, bias=False), torch.nn.Linear(2048, 512, bias=False)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.empty(64, 512, device="cuda")).sum().backward()
        optimizer.step()
    assert Recording.running is not None
    history = Recording.running.stop()
    held: dict[str, int] = {}
    for owner, size in history.at_peak.items():
        held[owner.category] = held.get(owner.category, 0) + size
    numbers = 2 * 512 * 2048
    assert held["parameters"] == held["gradients"] == 4 * numbers
    assert 8 * numbers <= held["optimizer state"] <= 8 * numbers + 64
    modules = {owner.module for owner in history.at_peak if owner.category == "gradients"}
    assert modules == {"*"}
