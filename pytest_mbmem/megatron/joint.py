"""All ranks of a job at once, one process each: Megatron's own groups over NCCL."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ..recipe import Recipe
from ..virtual_gpu.counters import driver_is_loaded
from .solo import answer_gathered_objects, model_parallel


def initialize(recipe: Recipe, rank: int, *, store: Store, timeout: float) -> None:
    """Make this process rank `rank` of the recipe's job and set Megatron's parallel state up for it.

    The ranks find each other by the store. `timeout`: seconds that one collective may take.
    """
    if driver_is_loaded():
        answer_gathered_objects()
    torch.cuda.set_device(0)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=recipe.world_size, timeout=limit)
    model_parallel(recipe)


def leave() -> None:
    """Wait until all ranks are done: one that ends earlier takes what it sent with it."""
    dist.barrier(device_ids=[0])
