"""How many tokens the experts of a model receive, where no kernel routes them: the assumption itself, in numbers.

Every rank sends the same number of its tokens to each expert. Balanced: as equal as whole numbers allow. With an
overload the first expert-parallel rank receives that many times its balanced share, and the others share the rest
equally. The experts of one rank share equally. What a division leaves over goes to the first ones, one each, so that
the first rank receives most in either case. Tokens are conserved. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from ..recipe import Recipe

_PADDING = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
"""Megatron's settings that pad what each rank sends to an expert to the sizes that products in FP8 or FP4 need."""

SINKHORN_ITERATIONS = 2
"""From the second on, every iteration holds the same. How many there are depends on values that nobody computes."""


def tokens_sent(
    tokens: int, topk: int, experts: int, ep: int, *, overload: float = 1.0, capacity: int | None = None
) -> list[int]:
    """The number of tokens that each rank sends to each expert.

    Args:
        tokens: that one rank holds; each is sent to `topk` different experts.
        experts: of the whole layer, a multiple of `ep`, which is the number of expert-parallel ranks. The first of
            these has the first `experts / ep` of them.
        overload: how many times its balanced share the first expert-parallel rank receives.
        capacity: tokens that an expert takes from each rank; the rest is dropped. None: no limit.
    """
    local = experts // ep
    copies = tokens * topk
    # a fraction, because 8192 * 1.1 / 4 in floating point may lie above the whole number it is
    first = ceil(copies * Fraction(str(overload)) / ep)
    first = min(first, tokens * min(topk, local))  # where the largest overload, as a float, is a little too large
    ranks = [first, *_evenly(copies - first, ep - 1)]
    counts = [count for rank in ranks for count in _evenly(rank, local)]
    return counts if capacity is None else [min(count, capacity) for count in counts]


def padded(sent: Sequence[int], tokens: int, multiple: int) -> list[int]:
    """`sent` with more of the rank's `tokens` for each expert, up to a multiple (Megatron's `pad_routing_map`)."""
    return [min(tokens, -(-count // multiple) * multiple) for count in sent]


def _evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]


@functools.lru_cache(maxsize=16)
def shares(recipe: Recipe) -> Sequence[tuple[int, ...]]:
    """What each rank sends to the experts of each expert-parallel rank, which gets that from all ranks alike.

    The first has most, and those with equal shares hold the same. One empty share for a model without experts.
    """
    moe, split, training = recipe.model.moe, recipe.parallelism, recipe.training
    if moe is None:
        return ((),)
    tokens = training.micro_batch_size * training.seq_length // split.cp // split.tp
    sent = tokens_sent(tokens, moe.moe_router_topk, moe.num_moe_experts, split.ep, overload=moe.overload)
    if moe.moe_expert_capacity_factor is not None:
        limit = capacity(tokens * moe.moe_router_topk, moe.num_moe_experts, moe.moe_expert_capacity_factor)
        sent = [limit if moe.moe_pad_expert_input_to_capacity else min(count, limit) for count in sent]
    if any(recipe.megatron.get(name) for name in _PADDING) and not moe.moe_pad_expert_input_to_capacity:
        sent = padded(sent, tokens, _multiple(recipe))
    local = moe.num_moe_experts // split.ep
    return tuple(tuple(sent[first : first + local]) for first in range(0, len(sent), local))


def _multiple(recipe: Recipe) -> int:
    """Rows that products in the recipe's FP8, else FP4, need (core 0.16's `get_align_size_for_quantization`)."""
    if not recipe.megatron.get("fp8"):
        return 128
    return 32 if recipe.megatron.get("fp8_recipe") == "mxfp8" else 16


def capacity(copies: int, experts: int, factor: float) -> int:
    """Tokens that an expert takes from each rank, of the `copies` that the rank sends (Megatron's `get_capacity`)."""
    return ceil(copies / experts * factor)


def assumptions(recipe: Recipe) -> tuple[str, ...]:
    """What a measurement of the recipe on a virtual GPU states; nothing for a model without experts."""
    moe = recipe.model.moe
    if moe is None or not any(moe.layer_pattern(recipe.model.num_layers)):
        return ()
    stated = ["routing: balanced, each expert receives the same number of tokens"]
    if moe.overload > 1:
        first = f"the first expert-parallel rank receives {moe.overload:g} times its share of the tokens"
        stated = [f"routing: {first}, the others share the rest equally"]
    if moe.moe_router_load_balancing_type == "sinkhorn":
        stated.append(f"sinkhorn balancing ends after {SINKHORN_ITERATIONS} iterations, and more hold no more memory")
    if recipe.megatron.get("moe_permute_fusion"):
        stated.append(
            "fused permutation: of each kernel's configurations, which Triton times in the first step, the first"
        )
    return tuple(stated)
