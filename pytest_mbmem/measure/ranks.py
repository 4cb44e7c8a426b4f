"""Which ranks of a job can differ in memory, and how many each of them stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import UserError
from ..recipe import Recipe
from ..virtual_gpu import routing

Ranks = Literal["distinct", "all"] | Sequence[int]

Work = tuple[int, bool]
"""What a rank computes and sends depends on this alone: its pipeline stage, and whether its experts receive most."""


@dataclass(frozen=True)
class Rank:
    """One rank to measure.

    `coordinates` are those of Megatron's order: tp fastest, then cp, dp, pp. A model with experts cuts the same ranks
    of a stage once more, for its experts: etp fastest, then ep. "etp" is given where its size is not that of tp.
    """

    rank: int
    coordinates: dict[str, int]
    stands_for: int = 1
    is_hot: bool = True
    """Whether no rank of its stage has experts that receive more tokens."""

    @property
    def work(self) -> Work:
        """Ranks with equal work compute and send the same."""
        return self.coordinates["pp"], self.is_hot


def at(recipe: Recipe, rank: int, stands_for: int = 1) -> Rank:
    """The rank of that number."""
    split = recipe.parallelism
    coordinates, rest = {}, rank
    for name in ("tp", "cp", "dp", "pp"):
        coordinates[name] = rest % getattr(split, name)
        rest //= getattr(split, name)
    if recipe.model.moe is not None:
        if split.expert_tp != split.tp:
            coordinates["etp"] = rank % split.expert_tp
        coordinates["ep"] = rank // split.expert_tp % split.ep
    shares = routing.shares(recipe)
    return Rank(rank, coordinates, stands_for, is_hot=shares[coordinates.get("ep", 0)] == shares[0])


def chosen(recipe: Recipe, ranks: Ranks) -> list[Rank]:
    """The ranks to measure, lowest first.

    "distinct" takes one rank of each pipeline stage, the one with tensor, context and data coordinate 0. The others of
    its stage hold the same: tensor shards are equal (the vocabulary is padded for that) and coordinate 0 alone loads
    the whole batch. With a distributed optimizer the last data coordinate is taken as well, whose shard holds the
    padding. The shards between have as many elements as the first, but cut the parameters elsewhere, and each piece is
    rounded up by the allocator: a rank stands for others that may differ by some MiB (up to 3 in the cases tried).

    Experts are sharded over fewer ranks than the rest, so that more ranks hold one of their last shards. Where not all
    ranks receive the same number of tokens (`routing.shares`), one of those that receive most is taken and one of the
    others, which may differ among themselves by a token for each sending rank and expert.

    Raises `UserError` for a rank outside the job, one named twice, or none.
    """
    check(recipe, ranks)
    if ranks == "distinct":
        return _distinct(recipe)
    return [at(recipe, rank) for rank in (range(recipe.world_size) if ranks == "all" else sorted(ranks))]


def check(recipe: Recipe, ranks: Ranks) -> None:
    """Raise `UserError` for a rank outside the job, one named twice, or none. Any recipe has a size, if not ranks."""
    if ranks in ("all", "distinct"):
        return
    if isinstance(ranks, str) or not ranks or any(isinstance(r, bool) or not isinstance(r, int) for r in ranks):
        raise UserError(f'ranks={ranks!r}: allowed are "distinct", "all", or a list of rank numbers')
    world = recipe.world_size
    for rank in ranks:
        if not 0 <= rank < world:
            raise UserError(f"ranks: {rank} is not in the job, whose ranks are 0 to {world - 1}")
    if len(set(ranks)) != len(ranks):
        raise UserError(f"ranks={list(ranks)!r} names a rank twice")


def _distinct(recipe: Recipe) -> list[Rank]:
    split = recipe.parallelism
    per_stage = recipe.world_size // split.pp
    shares = routing.shares(recipe)
    # ranks that hold the same shard of the optimizer's state
    sharers = {split.tp}
    if recipe.model.moe is not None:
        sharers.add(split.expert_tp * split.ep)
    if not split.distributed_optimizer:
        sharers = set()
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank in range(per_stage):  # of the first stage; those of the others are the same
        is_hot = shares[rank // split.expert_tp % split.ep] == shares[0]
        holds_last = (per_stage - same <= rank for same in sorted(sharers) if same < per_stage)
        alike.setdefault((is_hot, *holds_last), []).append(rank)
    # the one of each that loads the batch, where there is one
    representatives = {min(ranks, key=lambda rank: (rank % split.tp, rank)): len(ranks) for ranks in alike.values()}
    return [
        at(recipe, stage * per_stage + rank, representatives[rank])
        for stage in range(split.pp)
        for rank in sorted(representatives)
    ]
