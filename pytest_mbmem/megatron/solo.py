"""One rank of a job in one process: Megatron's own groups over torch's "fake" process group.

The fake group answers every collective at once and moves nothing, so any rank of any world size runs alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.testing._internal.distributed.fake_pg import FakeStore

from .. import graph_settings
from ..recipe import Recipe
from . import te_layers

SEED = 1234
"""Of parameters and dropout, Megatron-LM's default."""


def _own_rank_group(self: parallel_state.RankGenerator, token: str) -> list[list[int]]:
    """The ranks that differ from this one only in the dimensions of `token`, as the only group."""
    rank = dist.get_rank()
    group, stride = [rank], 1
    for size, is_free in zip(self.ordered_size, self.get_mask(self.order, token), strict=True):
        if is_free:
            own = rank // stride % size
            group = [r + (i - own) * stride for i in range(size) for r in group]
        stride *= size
    return [sorted(group)]


def _same_object_from_all(object_list: list[object], obj: object, *_: object, **__: object) -> None:
    object_list[:] = [obj] * len(object_list)


def answer_gathered_objects() -> None:
    """Where collectives bring nothing, there would be no gathered objects: the ranks gather equal ones (torch 2.11+).

    Megatron gathers the names of parameter groups when it builds an optimizer.
    """
    dist.all_gather_object = _same_object_from_all  # type: ignore[assignment]


def initialize(recipe: Recipe, rank: int) -> None:
    """Make this process rank `rank` of the recipe's job and set Megatron's parallel state up for it."""
    answer_gathered_objects()
    # Megatron lists every group of the job; a solo rank needs its own, or 100,000 ranks cost minutes (core 0.16).
    parallel_state.RankGenerator.get_ranks = _own_rank_group
    dist.init_process_group("fake", rank=rank, world_size=recipe.world_size, store=FakeStore())
    torch.cuda.set_device(0)
    model_parallel(recipe)
    # Megatron collects this group from those of all ranks; with one optimizer instance it is the whole job.
    parallel_state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = dist.group.WORLD


def model_parallel(recipe: Recipe) -> None:
    """Megatron's own groups of the recipe and its random numbers, in an initialized job."""
    p = recipe.parallelism
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=p.tp,
        pipeline_model_parallel_size=p.pp,
        virtual_pipeline_model_parallel_size=p.vpp,
        context_parallel_size=p.cp,
        expert_model_parallel_size=p.ep,
        expert_tensor_parallel_size=p.etp,
        create_gloo_process_groups=False,
    )
    # as Megatron-LM's training script does
    graphs = graph_settings.implementation(recipe) != "none"
    of_te = graphs and te_layers.are_used(recipe.training)
    model_parallel_cuda_manual_seed(SEED, te_rng_tracker=of_te, use_cudagraphable_rng=graphs, force_reset_rng=True)
