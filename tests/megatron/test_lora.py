"""LoRA on live Megatron Core objects. Tests that need torch run whole in a worker, through the plugin's own fixture."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.recipe import Lora, Mla, Model, Moe, Parallelism, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=128, num_attention_heads=8, vocab_size=1024),
    parallelism=Parallelism(),
    training=Training(seq_length=128, global_batch_size=4),
    lora=Lora(rank=8),
)
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
MLA = Mla(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16)
MOE = Moe(num_moe_experts=4, moe_ffn_hidden_size=64, moe_shared_expert_intermediate_size=128)
GROUPED = dataclasses.replace(MOE, moe_grouped_gemm=True)
MIB, KIB = 2**20, 2**10


def adapter_parameters(recipe: Recipe) -> int:
    """Of a dense model without tensor parallelism and with all four targets."""
    model, rank = recipe.model, recipe.lora.rank
    hidden, qkv = model.hidden_size, (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
    sizes = [(hidden, qkv), (hidden, hidden), (hidden, model.ffn_size), (model.ffn_size, hidden)]
    return model.num_layers * sum(rank * (inputs + outputs) for inputs, outputs in sizes)


# What is trained ------------------------------------------------------------------------------------------------------


def test_only_adapters_have_gradients_and_optimizer_state(megatron_model) -> None:
    live = megatron_model(RECIPE)
    live.step()
    trained = {name: p for name, p in live.chunks[0].named_parameters() if p.requires_grad}
    assert all(".adapter." in name for name in trained)
    size = adapter_parameters(RECIPE)
    assert sum(p.numel() for p in trained.values()) == size
    assert sum(buffer.grad_data.numel() for buffer in live.chunks[0].buffers) == size
    main = [p for group in live.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in main) == size
    state = live.optimizer.optimizer.state
    assert sum(s["exp_avg"].numel() for s in state.values()) == size
    frozen = [p for p in live.chunks[0].parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) == RECIPE.model.num_parameters
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in frozen)


def test_a_distributed_optimizer_holds_a_shard_of_the_adapters(megatron_model) -> None:
    live = megatron_model(RECIPE.but(dp=4, distributed_optimizer=True))
    held = sum(p.numel() for group in live.optimizer.param_groups for p in group["params"])
    assert adapter_parameters(RECIPE) / 4 <= held <= adapter_parameters(RECIPE) / 4 + 256


def test_targets_say_which_layers_have_adapters(megatron_model) -> None:
    live = megatron_model(RECIPE.but(targets=("linear_proj", "linear_fc1")))
    adapted = {name.split(".")[-4] for name, _ in live.chunks[0].named_parameters() if ".adapter." in name}
    assert adapted == {"linear_proj", "linear_fc1"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp",), "targets": ("linear_fc1",)},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",), "targets": ("linear_fc1",), "moe": MOE},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
        {"recompute_granularity": "selective", "recompute_modules": ("mla_up_proj",), "mla": MLA},
        {
            "recompute_granularity": "selective",
            "recompute_modules": ("moe_act",),
            "targets": ("linear_fc2",),
            "moe": GROUPED,
        },
    ],
    ids=["none", "uniform", "block", "mlp", "mlp-fc1", "moe-fc1", "layernorm", "mla_up_proj", "moe_act-fc2"],
)
def test_every_adapter_gets_a_gradient_under_recompute(megatron_model, changes) -> None:
    live = megatron_model(RECIPE.but(global_batch_size=1, **changes))
    trained = {name: p for name, p in live.chunks[0].named_parameters() if p.requires_grad}
    reached = []
    for name, parameter in trained.items():
        parameter.register_hook(lambda grad, name=name: reached.append(name))
    live.step()
    assert sorted(reached) == sorted(trained)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.1},
        {"precision": "fp32", **SEQUENCE_PARALLEL},
        {"share_embeddings_and_output_weights": True, "tp": 2},
        {"pp": 2, "vpp": 2, "dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
        {"dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"mla": MLA, **SEQUENCE_PARALLEL},
        {"moe": MOE, **SEQUENCE_PARALLEL},
        {"moe": MOE, "ep": 2, "dp": 2, "etp": 1, **SEQUENCE_PARALLEL},
        {"mtp_num_layers": 1},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_setting_trains_two_steps(megatron_model, changes) -> None:
    live = megatron_model(RECIPE.but(**{"sequence_parallel_input_regather": "tp" in changes, **changes}))
    live.step()
    live.step()
    assert live.steps_done == 2


@pytest.mark.parametrize(("layout", "rank"), [("E|ttttL", 0), ("Etttt|L", 1)])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_rank_without_adapters_trains_nothing_and_takes_part(megatron_model, layout, rank, distributed) -> None:
    from pytest_mbmem.megatron import lora

    recipe = RECIPE.but(pp=2, pipeline_model_parallel_layout=layout, distributed_optimizer=distributed)
    live = megatron_model(recipe, rank=rank)
    live.step()
    live.step()
    assert not any(p.requires_grad for p in live.chunks[0].parameters())
    found = lora.adapters(live.chunks, recipe.lora)
    assert [(a.target, a.count, a.reason) for a in found] == [
        (target, 0, f"no module named {target} on this rank") for target in recipe.lora.targets
    ]


@pytest.mark.parametrize("grouped", [False, True])
def test_experts_have_adapters_of_their_own_unless_they_are_grouped(megatron_model, grouped) -> None:
    from pytest_mbmem.measurement import Adapter
    from pytest_mbmem.megatron import lora

    moe = GROUPED if grouped else MOE
    recipe = RECIPE.but(moe=moe, ep=2, dp=2, sequence_parallel_input_regather=True, **SEQUENCE_PARALLEL)
    live = megatron_model(recipe)
    expert = "expert adapter: its input is what the token dispatcher sends, not a shard of the sequence"
    row = "row-parallel adapter: its input is shared out by channels and never gathered"
    routed = 4 if grouped else 4 * 2  # layers, or layers times the experts of a rank
    assert lora.adapters(live.chunks, recipe.lora) == (
        Adapter("linear_qkv", 4, True, True),
        Adapter("linear_proj", 4, True, False, row),
        Adapter("linear_fc1", routed, True, False, expert),
        Adapter("linear_fc1", 4, True, True),  # of the shared experts
        Adapter("linear_fc2", routed, True, False, expert),
        Adapter("linear_fc2", 4, True, False, row),
    )
    of_experts = [p for name, p in live.chunks[0].named_parameters() if ".experts." in name and p.requires_grad]
    assert len(of_experts) == 2 * 2 * routed
    assert not any(p.allreduce for p in of_experts)  # reduced over the ranks that hold the same experts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 6, "tp": 4}, "lora.rank: 6 is not a multiple of parallelism.tp (4)"),
        (
            {"rank": 6, "moe": MOE, "targets": ("linear_fc1",), "tp": 2, "sequence_parallel": True, "etp": 4, "dp": 2},
            "lora.rank: 6 is not a multiple of parallelism.etp (4)",
        ),
        (
            {"mla": MLA, "targets": ("linear_qkv",)},
            "lora.targets: ['linear_qkv'] trains nothing: a model with model.mla has no such layer",
        ),
    ],
)
def test_adapters_that_cannot_be_built_are_refused_by_the_recipe(changes, message) -> None:
    with pytest.raises(UserError) as caught:
        RECIPE.but(**changes)
    assert str(caught.value) == message


def test_row_parallel_adapters_take_any_rank(megatron_model) -> None:
    live = megatron_model(RECIPE.but(rank=7, tp=2, targets=("linear_proj", "linear_fc2")))
    live.step()
    assert live.steps_done == 1


# Input re-gather ------------------------------------------------------------------------------------------------------


ELIGIBILITY: list[tuple[str, dict[str, bool], dict[str, object], str]] = [
    ("linear_qkv", {}, {}, ""),
    ("linear_fc1", {}, {}, ""),
    ("linear_fc1", {"shared_expert": True}, {}, ""),
    ("linear_proj", {"row_parallel": True}, {}, "row-parallel adapter"),
    ("linear_fc2", {"row_parallel": True}, {}, "row-parallel adapter"),
    ("linear_fc1", {"expert": True}, {}, "expert adapter"),
    ("linear_fc2", {"expert": True, "row_parallel": True}, {}, "expert adapter"),
    ("linear_qkv", {}, {"tensor_model_parallel_size": 1, "sequence_parallel": False}, "tensor parallel size 1"),
    ("linear_qkv", {}, {"sequence_parallel": False}, "sequence parallelism is off"),
    ("linear_qkv", {}, {"cuda_graph_impl": "local"}, "CUDA graphs"),
    ("linear_fc1", {}, {"cuda_graph_impl": "transformer_engine"}, "CUDA graphs"),
    ("linear_fc1", {}, {"enable_cuda_graph": True}, "CUDA graphs"),
    ("linear_fc1", {}, {"external_cuda_graph": True}, "CUDA graphs"),
    ("linear_fc1", {}, {"cpu_offloading": True, "cpu_offloading_activations": True}, "CPU offload of activations"),
    ("linear_fc1", {}, {"cpu_offloading": True, "cpu_offloading_activations": False}, ""),
    ("linear_qkv", {}, {"offload_modules": ["qkv_linear"]}, "CPU offload of qkv_linear's input"),
    ("linear_qkv", {}, {"offload_modules": ["attn_norm", "mlp_norm"]}, ""),
    ("linear_fc1", {}, {"offload_modules": ["qkv_linear"]}, ""),
    ("linear_qkv", {}, {"recompute_granularity": "full"}, "full-layer recompute"),
    ("linear_fc1", {}, {"recompute_granularity": "full"}, "full-layer recompute"),
    ("linear_fc1", {}, {"recompute_modules": ["mlp"]}, "selective recompute of mlp"),
    ("linear_qkv", {}, {"recompute_modules": ["mlp"]}, ""),
    ("linear_fc1", {}, {"recompute_modules": ["core_attn", "layernorm", "moe"]}, ""),
    ("linear_fc1", {"shared_expert": True}, {"recompute_modules": ["moe"]}, "selective recompute of moe"),
    ("linear_fc1", {"shared_expert": True}, {"recompute_modules": ["shared_experts"]}, "selective recompute of sh"),
    ("linear_fc1", {"shared_expert": True}, {"recompute_modules": ["core_attn", "moe_act"]}, ""),
    ("linear_fc1", {"shared_expert": True}, {"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
]
"""Target, kind of layer, changes to a configuration with TP 2 and sequence parallelism, how the reason begins."""


@pytest.mark.usefixtures("megatron_model")  # one worker for all rows
def test_eligibility_for_input_regather() -> None:
    from megatron.core.transformer import TransformerConfig

    from pytest_mbmem.megatron import lora

    for target, kind, changes, reason in ELIGIBILITY:
        config = TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, tensor_model_parallel_size=2, sequence_parallel=True
        )
        settings = dict(changes)
        if "recompute_modules" in settings:
            settings["recompute_granularity"] = "selective"
        if "offload_modules" in settings:
            settings["fine_grained_activation_offloading"] = True
        for name, value in settings.items():  # not all of them can be set without Transformer Engine
            assert hasattr(config, name)
            setattr(config, name, value)
        found = lora.regather_eligibility(config, target, **{"row_parallel": False, **kind})
        assert found[: len(reason) or None] == reason, (target, kind, changes)


def requested() -> int:
    """Bytes that live tensors asked for, without the allocator's rounding."""
    import torch

    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize(("a_is_trained", "kept"), [(True, 8 * MIB + 32 * KIB), (False, 32 * KIB)])
def test_a_trained_a_keeps_its_input_and_a_frozen_one_does_not(megatron_model, a_is_trained, kept) -> None:
    """Public figures for X (512 x 4096, fp32) @ A (4096 x 16) @ B (16 x 4096): 8.03125 MiB and 32 KiB."""
    import torch

    small = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 1, "vocab_size": 128, "seq_length": 512}
    live = megatron_model(RECIPE.but(rank=16, precision="fp32", targets=("linear_proj",), **small))
    adapter = live.chunks[0].module.decoder.layers[0].self_attention.linear_proj.adapter
    adapter.linear_a.weight.requires_grad_(a_is_trained)

    adapter(torch.empty(512, 1, 4096, device="cuda"))  # cuBLAS takes its workspace
    before = requested()
    output = adapter(torch.empty(512, 1, 4096, device="cuda"))
    assert requested() - before - output.nbytes == kept


def test_regather_keeps_shards_alone_of_all_microbatches_in_flight(megatron_model) -> None:
    recipe = RECIPE.but(pp=2, **SEQUENCE_PARALLEL)

    def retained_when_backward_begins(regather: bool) -> int:
        live = megatron_model(recipe.but(sequence_parallel_input_regather=regather), rank=0)
        live.step()  # allocates what stays, Megatron's buffer for gathered tensors among it
        before, held = requested(), []
        live.step(lambda step, phase: held.append(requested()) if phase == "backward" else None)
        live.close()
        return held[0] - before

    gathered = recipe.training.seq_length * recipe.training.micro_batch_size * recipe.model.hidden_size * 2  # bf16
    layers, adapters, in_flight, tp = 2, 2, 2, 2  # of the first of two stages: qkv and fc1, two forwards are done
    saved = layers * adapters * in_flight * gathered * (tp - 1) // tp
    assert retained_when_backward_begins(False) - retained_when_backward_begins(True) == saved


def test_a_target_that_no_module_has_is_reported(megatron_model) -> None:
    from pytest_mbmem.megatron import lora

    recipe = RECIPE.but(mla=MLA, sequence_parallel_input_regather=True, **SEQUENCE_PARALLEL)
    first, *rest = lora.adapters(megatron_model(recipe).chunks, recipe.lora)
    assert (first.target, first.count, first.regather_effective) == ("linear_qkv", 0, False)
    assert first.reason == "no module named linear_qkv on this rank"
    assert [(a.target, a.regather_effective) for a in rest] == [
        ("linear_proj", False),
        ("linear_fc1", True),
        ("linear_fc2", False),
    ]


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("megatron_model")  # in a worker, where torch is loaded once
@pytest.mark.parametrize("kind", ["tensor parallel", "sequence parallel", "re-gather", "overlapped", "expert"])
def test_two_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    """Outputs and the gradients of input, A and B, with real numbers on the CPU, against whole matrices."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_compare_with_whole_matrices, args=(kind, r, str(tmp_path / "f"))) for r in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]


def _compare_with_whole_matrices(kind: str, rank: int, file: str) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer import TransformerConfig

    from pytest_mbmem.megatron import lora

    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    sharded = kind != "tensor parallel"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sharded,
        use_cpu_initialization=True,
    )
    torch.manual_seed(1)
    common = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": False, "skip_bias_add": True}
    common["is_expert"] = kind == "expert"
    first = tensor_parallel.ColumnParallelLinear(8, 12, **common)
    second = tensor_parallel.RowParallelLinear(12, 8, input_is_parallel=True, **common)
    outside = kind in ("overlapped", "expert")
    if kind == "overlapped":
        first.explicit_expert_comm = second.explicit_expert_comm = True  # as shared experts do
    assert first.explicit_expert_comm == outside
    model = torch.nn.Sequential()
    model.linear_fc1, model.linear_fc2, model.config = first, second, config
    lora.attach(model, Lora(rank=4, alpha=6.0, sequence_parallel_input_regather=kind == "re-gather"))
    assert model.linear_fc1.regather == (kind == "re-gather")
    for linear in (model.linear_fc1, model.linear_fc2):
        assert not linear.adapter.linear_b.weight.any()
        torch.nn.init.normal_(linear.adapter.linear_b.weight)  # zero would hide A

    whole_x, whole_grad = torch.randn(6, 2, 8, generator=torch.manual_seed(2)), torch.randn(6, 2, 8)
    own = slice(3 * rank, 3 * rank + 3) if sharded else slice(None)
    x = whole_x[own].clone().requires_grad_()
    given = tensor_parallel.gather_from_sequence_parallel_region(x) if outside else x
    y, _ = model.linear_fc2(model.linear_fc1(given)[0].tanh())
    if outside:
        y = tensor_parallel.reduce_scatter_to_sequence_parallel_region(y)
    y.backward(whole_grad[own])

    def whole(weight: torch.Tensor, dim: int) -> torch.Tensor:
        shards = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(shards, weight.detach().contiguous())
        return torch.cat(shards, dim)

    # By outputs: the first layer, all B, and A of the first layer. By inputs: the second layer and its A.
    a1, b1 = (linear.weight for linear in (model.linear_fc1.adapter.linear_a, model.linear_fc1.adapter.linear_b))
    a2, b2 = (linear.weight for linear in (model.linear_fc2.adapter.linear_a, model.linear_fc2.adapter.linear_b))
    dims = {a1: 0, b1: 0, a2: 1, b2: 0}
    matrices = [whole(weight, dim).requires_grad_() for weight, dim in dims.items()]
    reference_x = whole_x.clone().requires_grad_()
    hidden = reference_x @ whole(first.weight, 0).t() + 1.5 * reference_x @ matrices[0].t() @ matrices[1].t()
    hidden = hidden.tanh()
    reference = hidden @ whole(second.weight, 1).t() + 1.5 * hidden @ matrices[2].t() @ matrices[3].t()
    reference.backward(whole_grad)
    torch.testing.assert_close(y, reference[own])
    torch.testing.assert_close(x.grad, reference_x.grad[own])
    for (weight, dim), matrix in zip(dims.items(), matrices, strict=True):
        torch.testing.assert_close(whole(weight.grad, dim), matrix.grad)
    assert first.weight.grad is None
    assert second.weight.grad is None


@pytest.mark.usefixtures("megatron_model")
def test_dropout_acts_on_the_adapters_input_in_training_alone(megatron_model) -> None:
    import torch

    live = megatron_model(RECIPE.but(dropout=0.5))
    adapter = live.chunks[0].module.module.decoder.layers[0].mlp.linear_fc1.adapter.cpu().float()
    for linear in (adapter.linear_a, adapter.linear_b):
        torch.nn.init.ones_(linear.weight)
    ones = torch.ones(64, 1, RECIPE.model.hidden_size)
    everything = RECIPE.model.hidden_size * RECIPE.lora.rank * RECIPE.lora.alpha / RECIPE.lora.rank
    assert (adapter.eval()(ones) == everything).all()
    kept = adapter.train()(ones)[:, 0, 0] / everything / 2  # what is kept counts double
    assert 0.4 < kept.mean() < 0.6
    assert kept.unique().numel() > 1
