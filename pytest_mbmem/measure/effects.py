"""Memory settings that were asked for and change nothing.

A setting has an effect on a rank if the rank does otherwise without it: the number of calls for memory up to the end of
the first step, or of an offload the bytes that it moves in that step, are compared between the recipe and the same
recipe without that one setting. So nothing needs to be known of how Megatron applies it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ..errors import UserError
from ..measurement import Failure, RankMeasurement
from ..recipe import Memory, Recipe


def probes(recipe: Recipe) -> dict[str, Recipe]:
    """Each memory setting that should change something -> one step of the recipe without it."""
    found = {}
    for name, changes in _settings(recipe.memory):
        with contextlib.suppress(UserError):  # one that another setting needs cannot be left out alone
            found[name] = recipe.but(**{**changes, "steps": 1})
    return found


def requested(recipe: Recipe) -> list[str]:
    """What is expected to change something: the settings of `probes`, and LoRA's input re-gather."""
    regather = recipe.lora is not None and recipe.lora.sequence_parallel_input_regather
    return [*probes(recipe), *(["lora.sequence_parallel_input_regather"] if regather else [])]


def _settings(memory: Memory) -> Iterator[tuple[str, dict[str, object]]]:
    if memory.recompute_granularity == "full":
        yield "memory.recompute_granularity 'full'", {"recompute_granularity": None}
    elif memory.recompute_granularity == "selective" and memory.recompute_modules is None:
        yield "memory.recompute_granularity 'selective' (core_attn)", {"recompute_granularity": None}
    for label in memory.recompute_modules or ():
        rest = tuple(other for other in memory.recompute_modules or () if other != label)
        yield f"memory.recompute_modules {label!r}", {"recompute_modules": rest}
    if memory.distribute_saved_activations:
        yield "memory.distribute_saved_activations", {"distribute_saved_activations": False}
    if memory.cpu_offloading:
        yield "memory.cpu_offloading", {"cpu_offloading": False}
    for label in memory.offload_modules:
        rest = tuple(other for other in memory.offload_modules if other != label)
        yield f"memory.offload_modules {label!r}", {"offload_modules": rest}
    if memory.optimizer_cpu_offload:
        yield "memory.optimizer_cpu_offload", {"optimizer_cpu_offload": False}


def fingerprint(rank: RankMeasurement) -> tuple[int, int]:
    """Calls for memory up to the end of step 1, and bytes moved to the host in it."""
    assert rank.allocations is not None
    return rank.allocations, rank.moved_in_step_1 or 0


def failures(
    ranks: Sequence[RankMeasurement], without: Mapping[str, Mapping[int, tuple[int, int] | None]]
) -> list[Failure]:
    """One for the settings that left every probed rank as it was; `without` has each rank's fingerprint by setting.

    None stands for a rank that could not run without the setting: so it has an effect. An offload has one if it moves
    anything: Megatron may allocate for it and then find every tensor too small.
    """
    now = {rank.rank: fingerprint(rank) for rank in ranks}

    def changes(name: str, rank: int, before: tuple[int, int] | None) -> bool:
        if before is None or rank not in now:
            return before is None
        return now[rank][1] > before[1] if "offload" in name else now[rank][0] != before[0]

    idle = [name for name, found in without.items() if not any(changes(name, r, f) for r, f in found.items())]
    if not idle:
        return []
    where = "the measured ranks" if len(ranks) > 1 else f"rank {ranks[0].rank}"
    verb = "do" if len(ranks) > 1 else "does"
    message = f"{', '.join(idle)}: without it {where} {verb} exactly the same; the model has nothing for it to act on"
    return [Failure("no effect", ranks[0].rank, message)]
