"""The process that measures one rank: forked from the server, with torch and Megatron loaded and CUDA untouched."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..measurement import Failure, RankMeasurement
from ..megatron import stand_ins
from ..megatron.model import live_model
from ..recipe import Recipe
from .counting import counting
from .history import PhaseRecorder


def measure_rank(
    recipe: dict[str, Any], rank: int, coordinates: dict[str, int], stands_for: int, virtual: bool
) -> dict[str, Any]:
    """Build rank `rank` and train the recipe's steps: a `RankMeasurement`, a `Failure` or None, and assumptions."""
    torch.set_num_threads(1)  # kernels run on no core
    recorder = PhaseRecorder()
    failure = None
    try:
        _start_cuda(recipe)
        recorder.begin(0, "build")
        model = live_model(Recipe.from_dict(recipe, "recipe"), rank, virtual=virtual)
        for _ in range(model.recipe.training.steps):
            model.step(recorder.begin)
    except torch.OutOfMemoryError as error:
        step, phase = recorder.current or (None, None)
        failure = Failure("out of memory", rank, str(error), step, phase)
    except _RefusedSettings as error:
        return {"rank": None, "failure": dataclasses.asdict(Failure("error", rank, str(error))), "assumptions": ()}
    recorder.end()
    result = RankMeasurement(rank=rank, coordinates=coordinates, stands_for=stands_for, **recorder.results())
    return {
        "rank": dataclasses.asdict(result),
        "failure": failure and dataclasses.asdict(failure),
        "assumptions": stand_ins.ASSUMPTIONS if virtual else (),
    }


class _RefusedSettings(Exception):
    """PyTorch does not take the recipe's allocator settings."""


def _start_cuda(recipe: dict[str, Any]) -> None:
    """Start CUDA, where PyTorch reads its allocator's settings."""
    settings = recipe.get("memory", {}).get("alloc_conf", "")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.memory_stats()
    except (RuntimeError, ValueError) as error:
        if not settings:
            raise
        reason = str(error).splitlines()[0]
        raise _RefusedSettings(f"memory.alloc_conf: PyTorch refuses {settings!r}: {reason}") from None


def count_rank(recipe: dict[str, Any], rank: int, virtual: bool) -> dict[str, Any]:
    """FLOPs, collective bytes and the largest single allocation of one step of rank `rank`.

    The first step is like every other one in these. An out-of-memory error leaves them unknown (an empty dict).
    """
    torch.set_num_threads(1)
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=5_000_000)
    try:
        model = live_model(Recipe.from_dict(recipe, "recipe"), rank, virtual=virtual)
        with counting() as counted:
            model.step()
    except torch.OutOfMemoryError:
        return {}
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    return {
        "flops_per_step": counted.flops,
        "collective_bytes": counted.collective_bytes,
        "largest_allocation": max(event["size"] for event in trace if event["action"] == "alloc"),
    }
