"""FLOPs and collective bytes of models with experts."""

from __future__ import annotations

import functools

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import RankMeasurement
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training

TOKENS, TOPK, HIDDEN, FFN, EXPERTS = 128, 2, 64, 96, 8
RECIPE = Recipe(
    model=Model(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        vocab_size=1000,
        ffn_hidden_size=FFN,
        moe=Moe(num_moe_experts=EXPERTS, moe_router_topk=TOPK),
    ),
    parallelism=Parallelism(dp=4, ep=4),
    training=Training(seq_length=TOKENS, steps=1),
)
BF16, FP32 = 2, 4


@functools.cache
def counted(launcher: Launcher, recipe: Recipe, rank: int = 0) -> RankMeasurement:
    measurement = launcher.measure(recipe, ranks=[rank], check_effects=False)
    assert measurement.failure is None, measurement.failure
    return measurement.ranks[0]


def test_all_to_all_counts_under_the_expert_parallel_group(launcher: Launcher) -> None:
    sent = TOKENS * TOPK
    hidden, probabilities = sent * HIDDEN * BF16, sent * BF16
    # there and back, forward and backward; the probabilities go there alone
    assert counted(launcher, RECIPE).collective_bytes["ep"] == 4 * hidden + 2 * probabilities


def test_an_overloaded_rank_receives_more_than_it_sends(launcher: Launcher) -> None:
    balanced = counted(launcher, RECIPE).collective_bytes["ep"]
    overloaded = RECIPE.but(overload=1.5)
    assert counted(launcher, overloaded, rank=0).collective_bytes["ep"] == 1.5 * balanced
    assert counted(launcher, overloaded, rank=1).collective_bytes["ep"] == balanced  # the larger side: it sends that


def test_every_collective_of_a_model_with_experts_has_its_group(launcher: Launcher) -> None:
    split = {"tp": 2, "sequence_parallel": True, "etp": 2, "ep": 2, "dp": 4, "pp": 2, "num_layers": 2}
    recipe = RECIPE.but(**split, distributed_optimizer=True, moe_aux_loss_coeff=0.01)
    found = counted(launcher, recipe).collective_bytes
    assert {"tp", "pp", "dp", "ep", "etp", "etp-ep", "edp", "tp-cp", "world"} <= set(found)
    assert "other" not in found
    gathered = counted(launcher, recipe.but(moe_token_dispatcher_type="allgather")).collective_bytes
    assert "ep" not in gathered
    assert gathered["etp-ep"] > found["etp-ep"]


def expert_flops(rows: int) -> int:
    """Forward, input gradient and weight gradient of two products."""
    return 3 * 2 * 2 * rows * HIDDEN * FFN


@pytest.mark.parametrize("grouped", [False, True])
def test_flops_grow_with_the_tokens_that_experts_receive(launcher: Launcher, grouped: bool) -> None:
    recipe = RECIPE.but(moe_grouped_gemm=grouped)
    rows = TOKENS * TOPK
    flops = [counted(launcher, recipe.but(overload=overload)).flops_per_step for overload in (1.0, 1.5)]
    assert flops[1] - flops[0] == expert_flops(rows // 2)


def test_grouped_experts_compute_what_one_after_the_other_do(launcher: Launcher) -> None:
    one_by_one, grouped = (counted(launcher, RECIPE.but(moe_grouped_gemm=g)).flops_per_step for g in (False, True))
    assert one_by_one == grouped


@pytest.mark.usefixtures("megatron_model")  # in a worker, where torch sees the virtual GPU
def test_a_grouped_product_counts_each_row_once() -> None:
    import torch
    import torch.nn.functional as F
    from torch.utils.flop_counter import FlopCounterMode

    from pytest_mbmem.measure.counting import _grouped_mm_flops

    def flops(*operands: torch.Tensor, offsets: list[int] | None = None) -> int:
        offs = None if offsets is None else torch.tensor(offsets, device="cuda", dtype=torch.int32)
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops}) as counter:
            F.grouped_mm(*operands, offs=offs)
        return counter.get_total_flops()

    def matrix(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

    rows, inner, columns, groups = 48, 64, 32, 3
    cut = [8, 32, 48]
    stack = matrix(groups, columns, inner).transpose(1, 2)
    assert flops(matrix(rows, inner), stack, offsets=cut) == 2 * rows * inner * columns
    assert flops(matrix(rows, inner).t(), matrix(rows, columns), offsets=cut) == 2 * rows * inner * columns
    assert flops(matrix(groups, rows, inner), stack) == 2 * groups * rows * inner * columns
