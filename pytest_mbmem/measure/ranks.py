"""Which ranks of a job can differ in memory, and how many each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError
from ..recipe import Parallelism, Recipe

Ranks = Literal["distinct", "all"] | Sequence[int]


@dataclass(frozen=True)
class Rank:
    """One rank to measure: its coordinates in Megatron's order (tp fastest, then cp, dp, pp)."""

    rank: int
    coordinates: dict[str, int]
    stands_for: int = 1


def at(parallelism: Parallelism, rank: int, stands_for: int = 1) -> Rank:
    """The rank of that number."""
    coordinates, rest = {}, rank
    for name in ("tp", "cp", "dp", "pp"):
        coordinates[name] = rest % getattr(parallelism, name)
        rest //= getattr(parallelism, name)
    return Rank(rank, coordinates, stands_for)


def chosen(recipe: Recipe, ranks: Ranks) -> list[Rank]:
    """The ranks to measure, lowest first.

    "distinct" takes one rank of each pipeline stage, the one with tensor, context and data coordinate 0. The others of
    its stage hold the same: tensor shards are equal (the vocabulary is padded for that) and coordinate 0 alone loads
    the whole batch. With a distributed optimizer the last data coordinate is taken as well, whose shard holds the
    padding. The shards between have as many elements as the first, but cut the parameters elsewhere, and each piece is
    rounded up by the allocator: a rank stands for others that may differ by some MiB (up to 3 in the cases tried).

    Raises `UserError` for a rank outside the job, one named twice, or none.
    """
    parallelism, world = recipe.parallelism, recipe.world_size
    if ranks == "all":
        return [at(parallelism, rank) for rank in range(world)]
    if ranks == "distinct":
        return _distinct(parallelism)
    if isinstance(ranks, str) or not ranks or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
        raise UserError(f'ranks={ranks!r}: allowed are "distinct", "all", or a list of rank numbers')
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"ranks: {rank} is not in the job, whose ranks are 0 to {world - 1}")
    if len(set(ranks)) != len(ranks):
        raise UserError(f"ranks={list(ranks)!r} names a rank twice")
    return [at(parallelism, rank) for rank in sorted(ranks)]


def _distinct(parallelism: Parallelism) -> list[Rank]:
    per_stage = parallelism.world_size // parallelism.pp
    shards = parallelism.dp * parallelism.cp
    result = []
    for stage in range(parallelism.pp):
        first = stage * per_stage
        if parallelism.distributed_optimizer and shards > 1:
            last = parallelism.tp  # ranks that share the last shard
            result.append(at(parallelism, first, per_stage - last))
            result.append(at(parallelism, first + per_stage - last, last))
        else:
            result.append(at(parallelism, first, per_stage))
    return result
