"""Recompute on the virtual GPU: what it saves is what its region held, and what cannot run is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from pytest_mbmem import incompatibilities
from pytest_mbmem.errors import IncompatibleSettings
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.megatron_settings import settings
from pytest_mbmem.recipe import Model, Recipe, Training

MIB = 2**20
LAYERS, HIDDEN, HEADS, SEQUENCE = 4, 256, 4, 512
RECIPE = Recipe(
    model=Model(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, vocab_size=1000),
    training=Training(seq_length=SEQUENCE, steps=2),
)
SELECTIVE = {"recompute_granularity": "selective"}
TOKEN_STATES = SEQUENCE * HIDDEN * 2  # bytes of one bf16 tensor of the hidden states
SCORES = HEADS * SEQUENCE**2 * 2


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def measure(launcher: Launcher, **changes: Any) -> Measurement:
    measurement = launcher.measure(RECIPE.but(**changes))
    assert measurement.failure is None, measurement.failure
    return measurement


def held_after_forward(launcher: Launcher, **changes: Any) -> int:
    """Bytes that wait for the backward: what the rank holds at the end of a forward on top of its resting model."""
    (rank,) = measure(launcher, **changes).ranks
    resting = {phase.name: phase.resting["allocated"] for phase in rank.phases}
    return resting["step-2/forward"] - resting["step-1/optimizer"]


def test_core_attention_saves_its_probabilities(launcher: Launcher) -> None:
    """Without dropout the softmax alone keeps the scores; the checkpoint keeps the mask, one byte for each position."""
    saved = held_after_forward(launcher) - held_after_forward(launcher, **SELECTIVE, recompute_modules=("core_attn",))
    assert saved == LAYERS * SCORES - SEQUENCE**2


def test_core_attention_is_what_selective_stands_for_alone(launcher: Launcher) -> None:
    named = measure(launcher, **SELECTIVE, recompute_modules=("core_attn",))
    assert measure(launcher, **SELECTIVE).ranks == named.ranks


def test_norms_save_their_outputs(launcher: Launcher) -> None:
    """The outputs of the input norm and of the one before the MLP, with an fp32 mean and deviation a token."""
    saved = held_after_forward(launcher) - held_after_forward(launcher, **SELECTIVE, recompute_modules=("layernorm",))
    assert saved == LAYERS * 2 * (TOKEN_STATES + 2 * 4 * SEQUENCE)


def test_mlp_saves_what_is_between_its_input_and_output(launcher: Launcher) -> None:
    """The inner activations before and after GELU, four times as wide each."""
    saved = held_after_forward(launcher) - held_after_forward(launcher, **SELECTIVE, recompute_modules=("mlp",))
    assert saved == LAYERS * 2 * 4 * TOKEN_STATES


def test_labels_add_up_where_their_regions_are_apart(launcher: Launcher) -> None:
    labels = ("core_attn", "mlp")
    control = held_after_forward(launcher)
    alone = [control - held_after_forward(launcher, **SELECTIVE, recompute_modules=(label,)) for label in labels]
    assert control - held_after_forward(launcher, **SELECTIVE, recompute_modules=labels) == sum(alone)


def test_full_recompute_keeps_the_inputs_of_its_groups(launcher: Launcher) -> None:
    """Apart from the inputs of one, two or four groups, the same is held."""
    held = {n: held_after_forward(launcher, **full("uniform", n)) for n in (1, 2, 4)}
    assert held[1] - held[2] == 2 * TOKEN_STATES
    assert held[2] - held[4] == TOKEN_STATES


def test_block_recomputes_so_many_layers(launcher: Launcher) -> None:
    held = [held_after_forward(launcher, **full("block", n)) for n in (1, 2, 3, 4)]
    steps = {before - after for before, after in itertools.pairwise(held)}
    assert len(steps) == 1  # every layer saves the same
    assert steps.pop() > SCORES
    assert held[3] == held_after_forward(launcher, **full("uniform", 1))


def test_recompute_costs_a_forward_of_what_it_replays(launcher: Launcher) -> None:
    """Forward FLOPs of a layer: projections 24 * s * h^2, attention 4 * s^2 * h; the replay adds them once."""
    control = measure(launcher).flops_per_step
    assert control is not None
    layer = 24 * SEQUENCE * HIDDEN**2 + 4 * SEQUENCE**2 * HIDDEN
    assert measure(launcher, **full("uniform", 1)).flops_per_step == control + LAYERS * layer
    attention = measure(launcher, **SELECTIVE, recompute_modules=("core_attn",))
    assert attention.flops_per_step == control + LAYERS * 4 * SEQUENCE**2 * HIDDEN


def test_saved_inputs_can_be_distributed_over_tensor_parallel_ranks(launcher: Launcher) -> None:
    whole = held_after_forward(launcher, tp=2, **full("uniform", 1))
    halves = held_after_forward(launcher, tp=2, **full("uniform", 1), distribute_saved_activations=True)
    # The output of the last layer is nobody's input, and the first input is kept by the embedding's dropout or not.
    assert whole - halves >= (LAYERS - 1) * TOKEN_STATES // 2


def test_interleaved_chunks_are_recomputed_too(launcher: Launcher) -> None:
    split = {"pp": 2, "vpp": 2, "global_batch_size": 4}
    control, recomputed = measure(launcher, **split), measure(launcher, **split, **full("uniform", 1))
    for before, after in zip(control.ranks, recomputed.ranks, strict=True):
        assert after.peak() < before.peak()


@pytest.mark.parametrize("changes", [{}, {"pp": 2}, {"pp": 2, "pipeline_model_parallel_layout": "Et|tttL"}])
def test_groups_that_do_not_divide_the_layers_are_refused_or_the_last_one_is_smaller(
    changes: dict[str, Any], launcher: Launcher
) -> None:
    """Megatron Core 0.16 reads beyond the last layer; later versions cut the last group, and keep as many inputs."""
    recipe = RECIPE.but(**changes, **full("uniform", 3))
    if broken := incompatibilities.broken(settings(recipe)):
        assert [entry.id for entry in broken] == ["recompute-uniform-not-dividing"]
    else:
        assert launcher.measure(recipe).peak() < measure(launcher, **changes).peak()


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({"recompute_modules": ("mlp",), "add_bias_linear": True}, "recompute-mlp-with-bias"),
        ({"recompute_modules": ("moe_act",)}, "recompute-moe-act-without-grouped-gemm"),
        ({"recompute_modules": ("mla_up_proj",)}, "recompute-mla-up-proj-without-mla"),
        ({"recompute_modules": ("nonsense",)}, "recompute-label-unknown"),
    ],
)
def test_what_cannot_run_is_refused_before_it_does(
    changes: dict[str, Any], constraint: str, launcher: Launcher
) -> None:
    with pytest.raises(IncompatibleSettings) as error:
        launcher.measure(RECIPE.but(**SELECTIVE, **changes))
    assert error.value.ids == (constraint,)
