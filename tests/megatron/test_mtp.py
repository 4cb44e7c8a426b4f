"""Multi-token prediction: what it adds, where it is, and what it needs there."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=128, num_attention_heads=4, vocab_size=1024, mtp_num_layers=1),
    training=Training(seq_length=128, global_batch_size=4),
)
MOE = Moe(num_moe_experts=2, moe_ffn_hidden_size=64, moe_layer_freq=(0, 0, 1, 1))


def parts(live):
    return [chunk.module.module for chunk in live.chunks]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mtp_num_layers": 3},
        {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": True},
        {"share_embeddings_and_output_weights": True},
        {"position_embedding_type": "learned_absolute", "max_position_embeddings": 256},
        {"moe": MOE},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_a_model_has_the_parameters_of_its_recipe(megatron_model, changes) -> None:
    recipe = RECIPE.but(**changes)
    live = megatron_model(recipe)
    assert sum(p.numel() for part in parts(live) for p in part.parameters()) == recipe.model.num_parameters
    without = recipe.but(mtp_num_layers=None).model.num_parameters
    assert sum(p.numel() for p in parts(live)[0].mtp.parameters()) == recipe.model.num_parameters - without


def test_its_layers_are_of_the_last_layers_make(megatron_model) -> None:
    (part,) = parts(megatron_model(RECIPE.but(moe=MOE)))
    assert [layer.is_moe_layer for layer in part.decoder.layers] == [False, False, True, True]
    names = [name for name, _ in part.mtp.named_parameters()]
    assert any("router" in name for name in names)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_stage_has_it_with_an_embedding(megatron_model, stage: int) -> None:
    (part,) = parts(megatron_model(RECIPE.but(pp=2), rank=stage))
    assert part.mtp_process == (stage == 1)
    assert hasattr(part, "embedding")


@pytest.mark.parametrize("stage", [0, 1])
def test_the_last_chunk_of_the_last_stage_has_it(megatron_model, stage: int) -> None:
    live = megatron_model(RECIPE.but(pp=2, vpp=2), rank=stage)
    assert [part.mtp_process for part in parts(live)] == [False, stage == 1]


def test_a_layout_says_where_it_is(megatron_model) -> None:
    layout = Parallelism(pp=2, pipeline_model_parallel_layout="Ettt|tmL")
    (part,) = parts(megatron_model(RECIPE.but(parallelism=layout), rank=1))
    assert part.mtp_process
    assert [layer.layer_number for layer in part.decoder.layers] == [4]


def test_a_stage_that_has_it_alone_cannot_be_measured_yet() -> None:
    recipe = RECIPE.but(pp=4, pipeline_model_parallel_layout="Ett|tt|m|L")
    (reason,) = recipe.not_yet()
    assert "parallelism.pipeline_model_parallel_layout" in reason
    assert not RECIPE.but(pp=2, pipeline_model_parallel_layout="Ett|ttmL").not_yet()


@pytest.mark.parametrize("rank", [2, 3])  # the last stage's two tensor-parallel ranks
def test_it_is_given_tokens_and_labels(megatron_model, rank: int) -> None:
    from pytest_mbmem.megatron.model import _batch

    live = megatron_model(RECIPE.but(pp=2, tp=2), rank=rank)
    assert all(tensor is not None for tensor in _batch(live.recipe, live.chunks[0]).values())


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({}, 0),
        ({"mtp_num_layers": 2}, 0),
        ({"tp": 2}, 0),
        ({"tp": 2, "sequence_parallel": True}, 1),
        ({"cp": 2, "attention_backend": "flash"}, 0),
        ({"cp": 2, "attention_backend": "flash"}, 1),
        ({"pp": 2}, 0),
        ({"pp": 2}, 1),
        ({"pp": 2, "share_embeddings_and_output_weights": True}, 1),
        ({"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|tt|t|mL"}, 0),
        ({"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|tt|t|mL"}, 1),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 0),
    ],
    ids=str,
)
def test_every_setting_trains_two_steps(megatron_model, changes, rank: int) -> None:
    live = megatron_model(RECIPE.but(**changes), rank=rank)
    assert all(live.step()[0] for _ in range(2))
