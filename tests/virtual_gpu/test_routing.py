"""The assumption about routing in numbers: who gets how many tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.virtual_gpu.routing import assumptions, shares, tokens_sent


def recipe(seq_length: int = 128, ep: int = 4, **moe: object) -> Recipe:
    experts = Moe(**{"num_moe_experts": 8, **moe})  # type: ignore[arg-type]
    model = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000, moe=experts)
    return Recipe(model=model, parallelism=Parallelism(dp=ep, ep=ep), training=Training(seq_length=seq_length))


def test_balanced_experts_receive_the_same() -> None:
    assert tokens_sent(128, 2, 8, 4) == [32] * 8


def test_the_first_rank_receives_the_overload_and_the_others_share_the_rest() -> None:
    assert tokens_sent(96, 2, 8, 4, overload=1.5) == [36, 36] + [20] * 6


def test_what_is_left_over_goes_to_the_first_ranks_and_to_their_first_experts() -> None:
    assert tokens_sent(5, 2, 8, 4) == [2, 1, 2, 1, 1, 1, 1, 1]
    assert tokens_sent(7, 1, 6, 3, overload=1.5) == [2, 2, 1, 1, 1, 0]


def test_a_share_that_is_a_whole_number_is_not_rounded_up() -> None:
    assert tokens_sent(10000, 1, 2, 2, overload=1.1) == [5500, 4500]  # 10000 * 1.1 / 2 is 5500.000000000001


def test_one_rank_receives_all() -> None:
    assert tokens_sent(128, 2, 4, 1) == [64] * 4


def test_a_full_overload_leaves_nothing() -> None:
    assert tokens_sent(128, 1, 4, 4, overload=4) == [128, 0, 0, 0]


def test_experts_take_no_more_than_their_capacity() -> None:
    assert tokens_sent(5, 2, 8, 4, capacity=1) == [1] * 8


@given(
    tokens=st.integers(1, 5000),
    local=st.integers(1, 4),
    ep=st.integers(2, 5),
    topk=st.integers(1, 8),
    overload=st.floats(1, 5, allow_nan=False),
)
def test_tokens_are_conserved_and_no_token_goes_to_an_expert_twice(
    tokens: int, local: int, ep: int, topk: int, overload: float
) -> None:
    experts = local * ep
    topk = min(topk, experts)
    overload = min(overload, ep * min(topk, local) / topk)  # the most that a recipe may ask for
    sent = tokens_sent(tokens, topk, experts, ep, overload=overload)
    assert sum(sent) == tokens * topk
    assert min(sent) >= 0
    assert max(sent) <= tokens
    ranks = [sum(sent[first : first + local]) for first in range(0, experts, local)]
    assert ranks[0] == max(ranks)
    assert -1e-6 <= ranks[0] - overload * tokens * topk / ep < 1 + 1e-6  # rounded up, but for what a float is off
    assert max(ranks[1:]) - min(ranks[1:]) <= 1


@given(tokens=st.integers(1, 5000), experts=st.sampled_from([2, 4, 12]), topk=st.integers(1, 2))
def test_an_overload_of_one_is_balanced(tokens: int, experts: int, topk: int) -> None:
    sent = tokens_sent(tokens, topk, experts, 2, overload=1.0)
    assert max(sent) - min(sent) <= 1


def test_shares_are_those_of_a_ranks_own_tokens() -> None:
    assert shares(recipe()) == ((32, 32),) * 4
    split = {"tp": 2, "sequence_parallel": True, "cp": 2, "attention_backend": "flash", "add_bias_linear": False}
    assert shares(recipe().but(**split)) == ((8, 8),) * 4
    assert shares(recipe(moe_expert_capacity_factor=2.0)) == ((32, 32),) * 4
    padded = recipe(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)
    assert shares(padded) == ((64, 64),) * 4
    assert shares(recipe(moe_expert_capacity_factor=0.5)) == ((16, 16),) * 4
    assert shares(Recipe(model=Model(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8))) == ((),)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({"fp8": "hybrid"}, 48),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 64),
        ({"fp4": "e2m1"}, 128),
        ({"fp4": "e2m1", "fp8_recipe": "mxfp8"}, 128),
    ],
    ids=["fp8", "mxfp8", "fp4", "fp4-with-a-recipe-of-fp8"],
)
@pytest.mark.parametrize("name", ["moe_router_padding_for_quantization", "moe_router_padding_for_fp8"])
def test_shares_are_padded_to_what_quantized_products_need(settings: dict[str, object], rows: int, name: str) -> None:
    plain = recipe(seq_length=132)
    assert shares(plain.but(megatron=settings)) == ((33, 33),) * 4
    assert shares(plain.but(megatron={**settings, name: True})) == ((rows, rows),) * 4
    few = recipe(seq_length=40).but(megatron={**settings, name: True})
    assert max(shares(few)[0]) <= 40  # no token goes to an expert twice


@pytest.mark.parametrize(
    ("moe", "text"),
    [
        ({}, ["routing: balanced, each expert receives the same number of tokens"]),
        (
            {"overload": 1.5},
            [
                "routing: the first expert-parallel rank receives 1.5 times its share of the tokens, "
                "the others share the rest equally"
            ],
        ),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            [
                "routing: balanced, each expert receives the same number of tokens",
                "sinkhorn balancing ends after 2 iterations, and more hold no more memory",
            ],
        ),
    ],
)
def test_a_measurement_says_what_is_assumed(moe: dict[str, object], text: list[str]) -> None:
    assert list(assumptions(recipe(**moe))) == text
