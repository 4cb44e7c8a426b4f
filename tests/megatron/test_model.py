"""Live Megatron Core objects of a recipe. Each test runs whole in a worker, through the plugin's own fixture."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=128, num_attention_heads=8, vocab_size=1000),
    parallelism=Parallelism(),
    training=Training(seq_length=128, global_batch_size=4),
)


def parameters(live) -> int:
    return sum(p.numel() for chunk in live.chunks for p in chunk.parameters())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "ffn_hidden_size": 384},
        {"add_bias_linear": True, "position_embedding_type": "learned_absolute", "max_position_embeddings": 256},
        {"share_embeddings_and_output_weights": True, "qk_layernorm": True},
    ],
    ids=["default", "llama", "gpt", "qwen"],
)
def test_a_model_has_the_parameters_of_its_recipe(megatron_model, changes) -> None:
    recipe = RECIPE.but(vocab_size=1024, **changes)
    assert parameters(megatron_model(recipe)) == recipe.model.num_parameters


def test_gradients_and_main_parameters_take_what_mixed_precision_says(megatron_model) -> None:
    import torch

    live = megatron_model(RECIPE)
    (buffer,) = live.chunks[0].buffers
    assert buffer.grad_data.dtype is torch.float32
    assert buffer.grad_data.numel() == parameters(live)
    groups = live.optimizer.param_groups
    main = [p for group in groups for p in group["params"]]
    assert {p.dtype for p in main} == {torch.float32}
    assert sum(p.numel() for p in main) == parameters(live)


def test_a_distributed_optimizer_holds_one_shard(megatron_model) -> None:
    live = megatron_model(RECIPE.but(dp=4, distributed_optimizer=True))
    held = sum(p.numel() for group in live.optimizer.param_groups for p in group["params"])
    assert parameters(live) / 4 <= held <= parameters(live) / 4 + 128


@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline_stages_hold_their_layers_and_ends(megatron_model, stage) -> None:
    live = megatron_model(RECIPE.but(pp=2), rank=stage)
    model = live.chunks[0].module.module
    assert [layer.layer_number for layer in model.decoder.layers] == [2 * stage + 1, 2 * stage + 2]
    assert (hasattr(model, "embedding"), hasattr(model, "output_layer")) == (stage == 0, stage == 1)


def test_interleaved_stages_hold_every_other_chunk(megatron_model) -> None:
    live = megatron_model(RECIPE.but(pp=2, vpp=2), rank=0)
    numbers = [[layer.layer_number for layer in chunk.module.module.decoder.layers] for chunk in live.chunks]
    assert numbers == [[1], [3]]


def test_sequence_parallel_norms_are_marked_for_reduction(megatron_model) -> None:
    live = megatron_model(RECIPE.but(tp=2, sequence_parallel=True))
    norms = [p for name, p in live.chunks[0].named_parameters() if "norm" in name]
    assert len(norms) == 2 * (2 * 4 + 1)
    assert all(p.sequence_parallel for p in norms)


def test_phases_of_a_pipelined_step_are_those_of_one_forward_one_backward(megatron_model) -> None:
    live = megatron_model(RECIPE.but(pp=2), rank=0)
    phases: list[str] = []
    live.step(lambda step, phase: phases.append(phase))
    one_forward_one_backward = ["forward"] + ["forward", "backward"] * 3 + ["backward"]
    assert phases == ["forward", *one_forward_one_backward, "grad-sync", "optimizer"]  # the first is the step's begin


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"kind": "sgd"},
        {"main_grads": "bf16", "dp": 2, "distributed_optimizer": True},
        {"deterministic": True, "position_embedding_type": "none"},
        {"masked_softmax_fusion": False},
        {"attention_backend": "flash", "attention_dropout": 0.1, "hidden_dropout": 0.1},
        {"attention_backend": "flash", "cp": 2, "tp": 2, "sequence_parallel": True, "num_query_groups": 2},
        {"pp": 2, "vpp": 2, "dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
        {"dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_trains_two_steps(megatron_model, changes) -> None:
    live = megatron_model(RECIPE.but(**changes))
    live.step()
    live.step()
    assert live.steps_done == 2


def test_random_numbers_fit_graphs_where_the_model_before_had_none(megatron_model) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    fit = []
    for graphs in ({}, {"cuda_graph_impl": "local"}):
        megatron_model(RECIPE.but(megatron=graphs, steps=3)).close()
        fit.append(get_cuda_rng_tracker().use_cudagraphable_rng)
    assert fit == [False, True]


def test_a_model_does_not_take_over_the_environment_of_the_one_before(megatron_model) -> None:
    recipe = RECIPE.but(environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"})
    megatron_model(recipe).close()
    megatron_model(recipe).close()
    with pytest.raises(pytest.fail.Exception, match="an earlier model of this test set NVTE_ALLOW_NONDETERMINISTIC"):
        megatron_model(RECIPE)


def test_closing_frees_the_device(megatron_model) -> None:
    import torch

    live = megatron_model(RECIPE.but(seq_length=1024))
    live.step()
    before = torch.cuda.memory_allocated()
    live.close()
    workspaces = 2 * (32 * 2**20 + 2**20)  # cuBLAS keeps them
    assert torch.cuda.memory_allocated() <= workspaces < before
