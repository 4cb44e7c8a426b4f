"""Experts without Transformer Engine: grouped linears with real numbers, their memory, and what MoE layers offer."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Moe, Recipe, Training

RECIPE = Recipe(
    model=Model(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        vocab_size=1024,
        activation="swiglu",
        normalization="RMSNorm",
        moe=Moe(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=64),
    ),
    training=Training(seq_length=128, global_batch_size=4),
)
GROUPED = RECIPE.but(moe_grouped_gemm=True)


def experts_of(live):
    return live.chunks[0].module.module.decoder.layers[0].mlp.experts


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 8], [0, 0, 0]], ids=["some-empty", "one-only", "no-tokens"])
def test_a_grouped_product_is_that_of_each_expert(sizes: list[int]) -> None:
    torch = pytest.importorskip("torch")
    from pytest_mbmem.megatron.experts import _GroupedMatmul

    torch.manual_seed(1)
    tokens = torch.randn(sum(sizes), 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(3, 6, 4, dtype=torch.double, requires_grad=True)
    result = _GroupedMatmul.apply(tokens, weight, sizes)
    expected = torch.cat([rows @ expert.t() for rows, expert in zip(tokens.split(sizes), weight, strict=True)])
    torch.testing.assert_close(result, expected)
    upstream = torch.randn_like(result)
    for mine, its in zip(
        torch.autograd.grad(result, (tokens, weight), upstream),
        torch.autograd.grad(expected, (tokens, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, its)


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("precision", ["bfloat16", "float16"], ids=["one-kernel", "one-kernel-an-expert"])
def test_a_grouped_product_holds_its_results_alone(precision: str) -> None:
    torch = pytest.importorskip("torch")
    from pytest_mbmem.megatron import experts

    dtype = getattr(torch, precision)
    tokens = torch.empty(1024, 512, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.empty(4, 256, 512, dtype=dtype, device="cuda", requires_grad=True)
    assert experts._has_grouped_kernel(tokens, weight) == (dtype is torch.bfloat16)  # an H100

    def product():
        return experts._GroupedMatmul.apply(tokens, weight, [256] * 4)

    upstream = torch.empty(1024, 256, dtype=dtype, device="cuda")
    first = torch.autograd.grad(product(), (tokens, weight), upstream)  # allocates workspaces too
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = product()
    ends = 512 if dtype is torch.bfloat16 else 0  # where the experts' tokens end, for the kernel
    assert torch.cuda.memory_allocated() - before == 1024 * 256 * 2 + ends
    grads = torch.autograd.grad(result, (tokens, weight), upstream)
    held = (1024 * 256 + 1024 * 512 + 4 * 256 * 512) * 2
    assert torch.cuda.memory_allocated() - before == held
    slack = 1024**2  # what the kernel of all groups works with
    assert held <= torch.cuda.max_memory_allocated() - before <= held + ends + slack
    assert [g.shape for g in grads] == [g.shape for g in first] == [tokens.shape, weight.shape]


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_tokens_are_kept_for_the_gradient_of_weights_alone(frozen: bool) -> None:
    torch = pytest.importorskip("torch")
    from pytest_mbmem.megatron import experts

    leaf = torch.empty(1024, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.empty(4, 256, 512, dtype=torch.bfloat16, device="cuda", requires_grad=not frozen)
    before = torch.cuda.memory_allocated()
    tokens = leaf * 1
    result = experts._GroupedMatmul.apply(tokens, weight, [256] * 4)
    del tokens
    kept = torch.cuda.memory_allocated() - before
    ends = 512
    assert kept == result.nbytes + ends + (0 if frozen else leaf.nbytes)
    (gradient,) = torch.autograd.grad(result, leaf, torch.empty_like(result))
    assert gradient.shape == leaf.shape


@pytest.mark.parametrize("recipe", [RECIPE, GROUPED], ids=["sequential", "grouped"])
def test_experts_have_the_parameters_of_their_recipe(megatron_model, recipe: Recipe) -> None:
    live = megatron_model(recipe)
    assert sum(p.numel() for p in live.chunks[0].parameters()) == recipe.model.num_parameters
    assert sum(p.numel() for p in experts_of(live).parameters()) == 4 * 3 * 128 * 64


@pytest.mark.parametrize("recipe", [RECIPE, GROUPED], ids=["sequential", "grouped"])
def test_expert_parallel_ranks_share_the_experts_out(megatron_model, recipe: Recipe) -> None:
    live = megatron_model(recipe.but(dp=2, ep=2))
    assert sum(p.numel() for p in experts_of(live).parameters()) == 2 * 3 * 128 * 64
    # Their gradients are reduced apart from the others, over the ranks that hold the same experts.
    assert {p.allreduce for p in experts_of(live).parameters()} == {False}
    assert sum(b.grad_data.numel() for b in live.chunks[0].expert_parallel_buffers) == 2 * 2 * 3 * 128 * 64


@pytest.mark.parametrize("etp", [1, 2])
def test_the_experts_own_tensor_parallelism_splits_their_inner_size(megatron_model, etp: int) -> None:
    live = megatron_model(GROUPED.but(tp=2, sequence_parallel=True, etp=etp, vocab_size=1024))
    experts = experts_of(live)
    assert experts.linear_fc1.weight.shape == (4, 2 * 64 // etp, 128)
    assert experts.linear_fc2.weight.shape == (4, 128, 64 // etp)
    assert [linear.weight.partition_dim for linear in (experts.linear_fc1, experts.linear_fc2)] == [1, 2]


def test_sequential_and_grouped_experts_hold_the_same(megatron_model) -> None:
    import torch

    held = []
    for recipe in (RECIPE, GROUPED):
        live = megatron_model(recipe.but(global_batch_size=1))
        live.step()
        held.append(torch.cuda.memory_allocated())
        live.close()
    # The step counters of torch's Adam: 512 bytes for each of three weights and experts of two layers, or for two.
    assert held[0] - held[1] == pytest.approx((2 * 4 - 2) * 2 * 512, abs=64 * 1024)


def test_recomputing_the_activation_of_experts_keeps_less(megatron_model) -> None:
    import torch

    recipe = GROUPED.but(moe_ffn_hidden_size=4096, seq_length=1024, global_batch_size=1)
    recompute = recipe.but(recompute_granularity="selective", recompute_modules=("moe_act",))
    kept = []
    for each in (recipe, recompute):
        live = megatron_model(each)
        live.step()
        held = {}
        live.step(lambda step, phase, held=held: held.setdefault(phase, torch.cuda.memory_allocated()))
        kept.append(held["backward"] - held["forward"])
        live.close()
    activations = 2 * (1024 * 2) * 4096 * 2  # of two layers' tokens, in bf16
    assert kept[0] - kept[1] == activations


def test_the_gradient_norm_is_answered(megatron_model) -> None:
    # The router's weights come from the host: what they leave behind would be read as the norm.
    live = megatron_model(RECIPE)
    assert [live.step()[:2] for _ in range(2)] == [(True, 0.0)] * 2


def test_closing_frees_what_dispatchers_keep(megatron_model) -> None:
    import torch

    live = megatron_model(RECIPE.but(seq_length=1024, moe_aux_loss_coeff=0.01))
    live.step()
    before = torch.cuda.memory_allocated()
    live.close()
    workspaces = 2 * (32 * 2**20 + 2**20)  # cuBLAS keeps them
    assert torch.cuda.memory_allocated() <= workspaces < before


def test_models_of_other_depths_may_follow(megatron_model) -> None:
    for layers in (2, 4):  # Megatron collects losses in tensors of the first model's size
        live = megatron_model(RECIPE.but(num_layers=layers, moe_aux_loss_coeff=0.01, mtp_num_layers=layers))
        live.step()
        live.close()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe_grouped_gemm": True},
        {"moe_grouped_gemm": True, "activation": "gelu"},
        {"moe_grouped_gemm": True, "precision": "fp32"},
        {"moe_grouped_gemm": True, "precision": "fp16", "moe_ffn_hidden_size": 60},
        {"activation": "gelu", "add_bias_linear": True},
        {"add_bias_linear": True, "moe_layer_freq": 2},
        {"moe_shared_expert_intermediate_size": 64},
        {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
        {"moe_token_dispatcher_type": "allgather"},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": "none"},
        {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.01},
        {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"},
        {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_dtype": "fp32"},
        {"moe_router_dtype": "fp64", "moe_router_pre_softmax": True},
        {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"tp": 2, "sequence_parallel": True, "etp": 1, "ep": 2, "moe_grouped_gemm": True},
        {"tp": 2, "sequence_parallel": True, "dp": 2, "ep": 2, "distributed_optimizer": True},
        {"cp": 2, "ep": 2, "attention_backend": "flash", "moe_grouped_gemm": True},
        {"deterministic": True, "moe_grouped_gemm": True},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_every_setting_of_experts_trains_two_steps(megatron_model, changes) -> None:
    live = megatron_model(RECIPE.but(**changes))
    assert all(live.step()[0] for _ in range(2))
