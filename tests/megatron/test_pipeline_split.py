"""Uneven pipelines: which layers each stage builds, that it trains, and what Megatron refuses."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Moe, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=6, hidden_size=64, num_attention_heads=2, vocab_size=1024),
    training=Training(seq_length=64, global_batch_size=12),
)
MOE = Moe(num_moe_experts=2, moe_ffn_hidden_size=64, moe_layer_freq=(0, 0, 0, 1, 1, 1))

SPLITS = [
    ({"pp": 2, "num_layers_in_first_pipeline_stage": 1}, [[[1]], [[2, 3, 4, 5, 6]]]),
    ({"pp": 3, "num_layers_in_last_pipeline_stage": 2}, [[[1, 2]], [[3, 4]], [[5, 6]]]),
    (
        {"pp": 4, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        [[[1]], [[2, 3]], [[4, 5]], [[6]]],
    ),
    (
        {
            "pp": 2,
            "vpp": 2,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        [[[1], [4, 5]], [[2, 3], [6]]],
    ),
    ({"pp": 2, "vpp": 2, "num_layers_in_first_pipeline_stage": 2}, [[[1], [4]], [[2, 3], [5, 6]]]),
    ({"pp": 3, "pipeline_model_parallel_layout": "Et|tt|tttL"}, [[[1]], [[2, 3]], [[4, 5, 6]]]),
    ({"pp": 4, "pipeline_model_parallel_layout": "E|t*3|t*3|L"}, [[[]], [[1, 2, 3]], [[4, 5, 6]], [[]]]),
    ({"pp": 4, "pipeline_model_parallel_layout": "Ettt||ttt|L"}, [[[1, 2, 3]], [[]], [[4, 5, 6]], [[]]]),
    ({"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|(tt|)*2tL"}, [[[1], [4, 5]], [[2, 3], [6]]]),
]
STAGES = [
    pytest.param(changes, stage, chunks, id=f"{'-'.join(changes)}-{index}-stage{stage}")
    for index, (changes, stages) in enumerate(SPLITS)
    for stage, chunks in enumerate(stages)
]


@pytest.mark.parametrize(("changes", "stage", "chunks"), STAGES)
def test_a_stage_builds_its_layers_and_trains(megatron_model, changes, stage: int, chunks: list[list[int]]) -> None:
    live = megatron_model(RECIPE.but(moe=MOE, **changes), rank=stage)
    decoders = [chunk.module.module.decoder.layers for chunk in live.chunks]
    assert [[layer.layer_number for layer in layers] for layers in decoders] == chunks
    # The pattern of dense and expert layers is the whole model's.
    assert all(layer.is_moe_layer == (layer.layer_number > 3) for layers in decoders for layer in layers)
    assert all(live.step()[0] for _ in range(2))


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2, "num_layers_in_first_pipeline_stage": 6}, "Mismatch: 0 middle layers"),
        ({"pp": 3, "num_layers_in_first_pipeline_stage": 1}, "number of layers at middle stage: 5 must be divisible"),
        ({"pp": 2, "vpp": 2, "num_layers_in_first_pipeline_stage": 3}, "number of layers at first stage: 3"),
        ({"pp": 2, "account_for_embedding_in_pipeline_split": True}, "number of middle layers: 7 must be divisible"),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ettt|tttt"}, "The last layer must be loss"),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ettt|ttL"}, "Number of decoder layers 5"),
        ({"pp": 2, "pipeline_model_parallel_layout": "Ex|tL"}, "Invalid layer character: x"),
        (
            {"pp": 2, "pipeline_model_parallel_layout": "Ettt|ttt|L"},
            "must be divisible by pipeline_model_parallel_size",
        ),
        ({"pp": 2, "pipeline_model_parallel_layout": "Etttttt|mL"}, "Number of mtp layers in layout must match"),
        ({"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Ettt|tttL"}, "conflicts with"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_an_impossible_split_is_refused_with_the_configuration(changes, message: str) -> None:
    from pytest_mbmem.megatron import configs

    with pytest.raises((ValueError, AssertionError), match=message):
        configs.transformer_config(RECIPE.but(**changes))
