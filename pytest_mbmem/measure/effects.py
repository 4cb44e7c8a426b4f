"""Memory settings that were asked for and change nothing: "requested, not effective", and why.

A setting has an effect on a rank if the rank does otherwise without it: the number of calls for memory up to the end of
the first step, or of an offload the bytes that it moves in that step, are compared between the recipe and the same
recipe without that one setting. So nothing needs to be known of how Megatron applies it. Why there is none is read off
the built model (see `megatron.effective`), which also judges what has no such probe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ..errors import UserError
from ..measurement import Failure, RankMeasurement
from ..recipe import Memory, Recipe
from . import adapters

Fingerprint = tuple[int, int]
"""Calls for memory up to the end of step 1, and bytes moved to the host in it."""

Probed = Mapping[str, Mapping[int, Fingerprint | None]]
"""By setting and rank, what the rank does without the setting; None: it cannot run without it."""


def probes(recipe: Recipe) -> dict[str, Recipe]:
    """Each memory setting that should change something -> one step of the recipe without it."""
    from .. import incompatibilities

    found = {}
    for name, changes in _settings(recipe.memory):
        with contextlib.suppress(UserError):  # one that another setting needs cannot be left out alone
            without = recipe.but(**{**changes, "steps": 1})
            incompatibilities.check(without)
            found[name] = without
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
        needing = ("attn_proj",) if label == "core_attn" else ()  # Megatron refuses it alone
        rest = tuple(other for other in memory.offload_modules if other not in (label, *needing))
        yield f"memory.offload_modules {label!r}", {"offload_modules": rest}
    if memory.optimizer_cpu_offload:
        yield "memory.optimizer_cpu_offload", {"optimizer_cpu_offload": False}


def fingerprint(rank: RankMeasurement) -> Fingerprint:
    """What tells whether a rank does otherwise without a setting."""
    assert rank.allocations is not None
    return rank.allocations, rank.moved_in_step_1 or 0


def not_effective(ranks: Sequence[RankMeasurement]) -> dict[str, str]:
    """Each setting that nothing in the built model of any of the ranks acts on -> why."""
    found: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        for effect in rank.effects:
            reason = "" if effect.effective else effect.reason
            found.setdefault(effect.setting, {}).setdefault(reason, []).append(rank.rank)
    return {
        setting: "; ".join(f"{reason} ({_where(ranks, on)})" for reason, on in reasons.items())
        for setting, reasons in found.items()
        if "" not in reasons
    }


def worded(reasons: Mapping[str, str]) -> list[str]:
    """The verdict on each setting, of which the reasons tell why it is not effective."""
    return [f"{name}: requested, not effective: {reason}" for name, reason in reasons.items()]


def failure(ranks: Sequence[RankMeasurement], without: Probed) -> Failure | None:
    """Of all settings that left every probed rank as it was, or that were not probed and have nothing to act on.

    A line of its message for each. A rank that could not run without a setting shows its effect. An offload has one if
    it moves anything: Megatron may allocate for it and then find every tensor too small.
    """
    unfounded = not_effective(ranks)
    idle = {name: unfounded.get(name) or _idle(ranks, name) for name in without if not _changes(ranks, without, name)}
    idle |= {name: reason for name, reason in unfounded.items() if not _was_probed(without, name)}
    if regather := adapters.not_regathered(ranks):
        idle["lora.sequence_parallel_input_regather"] = regather
    if not idle:
        return None
    return Failure("no effect", ranks[0].rank, "\n".join(worded(idle)))


def notes(ranks: Sequence[RankMeasurement], without: Probed) -> tuple[str, ...]:
    """On settings that nothing in the built model acts on and that change something all the same."""
    return tuple(
        f"{name}: {reason}; the ranks do otherwise without it all the same, so it counts as effective"
        for name, reason in not_effective(ranks).items()
        if _was_probed(without, name) and _changes(ranks, without, name)
    )


def _was_probed(without: Probed, name: str) -> bool:
    return any(found is not None for found in without.get(name, {}).values())


def _changes(ranks: Sequence[RankMeasurement], without: Probed, name: str) -> bool:
    now = {rank.rank: fingerprint(rank) for rank in ranks}

    def changes(rank: int, before: Fingerprint | None) -> bool:
        if before is None or rank not in now:
            return before is None
        return now[rank][1] > before[1] if "offload" in name else now[rank][0] != before[0]

    return any(changes(rank, before) for rank, before in without[name].items())


def _idle(ranks: Sequence[RankMeasurement], name: str) -> str:
    """Why a setting changes nothing although the model has something for it, or although that is not known."""
    several = len(ranks) > 1
    if "offload" in name:
        same = f"move{'s' * (not several)} no more to the host than without it"
    else:
        same = f"do{'es' * (not several)} exactly the same without it"
    same = f"{_where(ranks, [rank.rank for rank in ranks])} {same}"
    acting = [effect for rank in ranks for effect in rank.effects if effect.setting == name and effect.effective]
    if not acting:
        return same
    places = sum(effect.acting for effect in acting)
    reasons = dict.fromkeys(effect.reason for effect in acting if effect.reason)
    return "; ".join([f"the model has {places} place{'s' * (places != 1)} for it, but {same}", *reasons])


def _where(ranks: Sequence[RankMeasurement], some: Sequence[int]) -> str:
    if len(ranks) > 1 and len(some) == len(ranks):
        return "all measured ranks"
    return f"rank{'s' * (len(some) > 1)} {', '.join(map(str, some))}"
