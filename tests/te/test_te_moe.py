"""Mixtures of experts of Transformer Engine's own modules: what their experts receive and hold."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.virtual_gpu import routing

TOKENS, LAYERS, HIDDEN = 128, 2, 64
RECIPE = Recipe(
    model=Model(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        vocab_size=1000,
        activation="swiglu",
        moe=Moe(num_moe_experts=8, moe_grouped_gemm=True),
    ),
    parallelism=Parallelism(dp=4, ep=4),
    training=Training(seq_length=TOKENS, steps=2, transformer_impl="transformer_engine", attention_backend="unfused"),
)
FUSED = {"megatron": {"moe_permute_fusion": True}}
FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
PADDED = {**FP8, "moe_router_padding_for_quantization": True}


def inputs_of(live: Any, kind: str) -> list[tuple[int, list[int] | None]]:
    """Filled as the model runs: rows of each input of Transformer Engine's modules of this class among the experts,
    and, of grouped ones, how many are each expert's."""
    import transformer_engine.pytorch as te

    found: list[tuple[int, list[int] | None]] = []

    def note(module: object, arguments: tuple[Any, ...]) -> None:
        found.append((arguments[0].size(0), list(map(int, arguments[1])) if len(arguments) > 1 else None))

    for chunk in live.chunks:
        for name, module in chunk.named_modules():
            if ".experts." in name and isinstance(module, getattr(te, kind)):
                module.register_forward_pre_hook(note)
    return found


def received(recipe: Recipe, rank: int) -> list[int]:
    """Rows of each expert of that rank, as the assumption states them."""
    split = recipe.parallelism
    share = routing.shares(recipe)[rank // split.expert_tp % split.ep]
    return [count * split.ep * split.expert_tp for count in share]


SETTINGS: dict[str, dict[str, Any]] = {
    "top 2": {},
    "top 1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "top 6": {"moe_router_topk": 6},
    "overload": {"overload": 1.5},
    "tp": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "etp 1": {"tp": 2, "dp": 2, "sequence_parallel": True, "etp": 1},
    "one rank": {"dp": 1, "ep": 1},
    "shared experts beside": {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "padded to capacity": {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True},
    "all-gather": {"moe_token_dispatcher_type": "allgather"},
    "router fusion": {"megatron": {"moe_router_fusion": True}, "moe_aux_loss_coeff": 0.01},
    "fused": FUSED,
    "fused all-gather": {**FUSED, "moe_token_dispatcher_type": "allgather", "overload": 1.5},
    "fused tp": {**FUSED, "dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "fused top 6": {**FUSED, "moe_router_topk": 6},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_grouped_linears_receive_what_is_stated(megatron_model: Any, settings: str) -> None:
    recipe = RECIPE.but(**SETTINGS[settings])
    rank = recipe.world_size - 1
    live = megatron_model(recipe, rank=rank)
    inputs = inputs_of(live, "GroupedLinear")
    live.step()
    counts = received(recipe, rank)
    assert min(counts) > 0
    assert inputs == [(sum(counts), counts)] * (2 * LAYERS)


def test_a_fused_permutation_holds_maps_of_the_tokens_and_a_benchmarks_buffer(megatron_model: Any) -> None:
    import torch

    peaks = []
    for recipe in (RECIPE, RECIPE.but(**FUSED)):
        live = megatron_model(recipe)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            live.step()
            peaks.append(torch.cuda.max_memory_allocated())
        live.close()
    first, second, first_fused, second_fused = peaks
    maps = TOKENS * (2 * 8 + 1) * 4 + TOKENS * 2 * 8  # int32 from tokens to rows, int64 from rows to sorted rows
    assert abs(second_fused - second) <= LAYERS * maps
    assert 2**28 * 0.9 < first_fused - first <= 2**28 + LAYERS * maps  # Triton's, while it times its kernels


PADDING = {"router": PADDED, "router, fused": {**PADDED, "moe_permute_fusion": True}, "experts": FP8}


@pytest.mark.parametrize("padding", PADDING)
def test_products_in_fp8_take_rows_of_whole_sixteens(megatron_model: Any, padding: str) -> None:
    # 48 tokens, each for one of 8 experts: 6 rows an expert from each of four ranks
    plain = RECIPE.but(seq_length=48, moe_router_topk=1, moe_router_pre_softmax=True)
    recipe = plain.but(megatron=PADDING[padding])
    live = megatron_model(recipe)
    inputs = inputs_of(live, "GroupedLinear")
    live.step()
    # the router pads what each rank sends to an expert, the experts what they have received
    rows = 4 * 16 if padding.startswith("router") else 32
    assert received(plain, 0) == [4 * 6] * 2
    assert received(recipe, 0) == [rows if padding.startswith("router") else 4 * 6] * 2
    assert inputs == [(2 * rows, [rows] * 2)] * (2 * LAYERS)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_sequential_experts_are_transformer_engines_linears(megatron_model: Any, dispatcher: str) -> None:
    recipe = RECIPE.but(moe_grouped_gemm=False, overload=1.5, moe_token_dispatcher_type=dispatcher)
    live = megatron_model(recipe)
    inputs = inputs_of(live, "Linear")
    live.step()
    counts = received(recipe, 0)
    assert inputs == [(count, None) for count in counts for _ in range(2)] * LAYERS


@pytest.mark.parametrize("settings", ["top 2", "fused", "fused all-gather"])
def test_a_count_without_an_answer_fails(megatron_model: Any, monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    from pytest_mbmem.virtual_gpu import assumptions
    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(RECIPE.but(**SETTINGS[settings]))
    monkeypatch.setattr(assumptions, "answer_read", lambda *_: None)
    with pytest.raises(UnansweredRead, match=r"megatron/core/transformer/moe/\w+\.py:\d+ "):
        live.step()


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_the_equivalent_without_transformer_engine_holds_as_much(frozen: bool) -> None:
    import torch
    import transformer_engine.pytorch as te

    from pytest_mbmem.megatron.experts import _GroupedMatmul

    splits = [256] * 4
    module = te.GroupedLinear(4, 512, 1024, bias=False, params_dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(4, 1024, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for parameter in (*module.parameters(), weight):
        parameter.requires_grad_(not frozen)

    def held(product: Any) -> tuple[int, int]:
        """Bytes that stay after forward, and those of the tokens' gradient."""
        leaf = torch.empty(1024, 512, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        tokens = leaf * 1
        output = product(tokens)
        of_tokens = torch.autograd.graph.get_gradient_edge(tokens)
        del tokens  # stays if backward needs it
        forward = torch.cuda.memory_allocated() - before
        gradient = torch.autograd.grad(output, of_tokens, torch.empty_like(output))
        return forward, gradient[0].nbytes

    products = [lambda x: module(x, splits), lambda x: _GroupedMatmul.apply(x, weight, splits)]
    for product in products:
        held(product)  # makes the workspaces
    real, equivalent = map(held, products)
    output, tokens, ends = 1024 * 1024 * 2, 1024 * 512 * 2, 512
    assert real == (output + (0 if frozen else tokens), tokens)
    assert equivalent == (real[0] + ends, real[1])
