"""What NVIDIA's documents advise for a recipe that runs out of memory, in their order, as changes of the recipe.

The order is that of "Quick Decision" and "Failure Diagnosis" in Megatron Bridge's memory tuning guide; what to
recompute is from its activation recompute guide. The costs in throughput are quoted from there: they were measured on
other recipes and say what to expect, not what it will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from .errors import IncompatibleSettings, UserError
from .oom import Remedy
from .recipe import Recipe

EXPANDABLE = "expandable segments"
REGATHER = "LoRA input re-gather"

COSTS: Mapping[str, str] = {
    EXPANDABLE: "no cost in throughput",
    REGATHER: "-0.3% to -6.7% throughput in three recipes",
    "core_attn": "replays attention; may save little with flash attention",
    "mla_up_proj": "+5.2% step time on Moonlight 16B",
    "moe_act": "+2.0% step time on Moonlight 16B",
    "layernorm": "+8.6% step time beside moe_act on Moonlight 16B, +3.1% beside moe on Nemotron 3 Nano",
    "mlp": "-16% throughput on Llama 3 70B",
    "moe": "replays routing, communication and experts",
    "shared_experts": "replays the shared experts",
    "full recompute": "the largest replay of all",
    "distributed optimizer": "about 1 to 2%",
    "PP": "moderate (-6% on Llama 3 70B if DP is halved)",
    "TP": "last resort: -28% on Llama 3 70B",
}
"""What each costs, by its name or by the label that is recomputed. A split's is with what the recipe must have more."""


def remedies(recipe: Recipe, *, expandable_segments: bool) -> list[Remedy]:
    """Those that the recipe does not have yet; `expandable_segments` says whether its allocator uses these.

    A change that is impossible for the recipe has the reason in its note.
    """
    return [_checked(recipe, remedy) for remedy in _remedies(recipe, expandable_segments)]


def recompute(recipe: Recipe, label: str) -> Remedy | None:
    """Recompute of one label more, with a note where the recipe cannot have it; None where it is recomputed already."""
    return next((_checked(recipe, remedy) for remedy in _recompute(recipe, label)), None)


def with_expandable_segments(alloc_conf: str) -> str:
    """The allocator's settings with expandable segments on: of two pairs PyTorch takes the later one."""
    before = alloc_conf.rstrip(", ")
    return f"{before},expandable_segments:True" if before else "expandable_segments:True"


def _remedies(recipe: Recipe, expandable_segments: bool) -> Iterator[Remedy]:
    split, memory, model = recipe.parallelism, recipe.memory, recipe.model
    if not expandable_segments:
        conf = with_expandable_segments(memory.alloc_conf)
        yield Remedy(EXPANDABLE, COSTS[EXPANDABLE], {"alloc_conf": conf})
    lora = recipe.lora
    if lora is not None and split.sequence_parallel and not lora.sequence_parallel_input_regather:
        yield Remedy(REGATHER, COSTS[REGATHER], {"sequence_parallel_input_regather": True})
    moe = model.moe
    experts = moe.layer_pattern(model.num_layers) if moe is not None else ()
    if model.mla is not None:
        yield from _recompute(recipe, "mla_up_proj")
    else:
        yield from _recompute(recipe, "core_attn")
    if moe is not None and moe.moe_grouped_gemm:
        yield from _recompute(recipe, "moe_act")
    if split.dp > 1 and not split.distributed_optimizer:
        yield Remedy("distributed optimizer", COSTS["distributed optimizer"], {"distributed_optimizer": True})
    yield _more_stages(recipe)
    if not all(experts) or not experts:
        yield from _recompute(recipe, "mlp")
    if any(experts):
        yield from _recompute(recipe, "moe")
    if memory.recompute_granularity != "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield Remedy("full recompute", COSTS["full recompute"], full)
    yield _more_tensor_parallelism(recipe)


def _recompute(recipe: Recipe, label: str) -> Iterator[Remedy]:
    """Selective recompute of one label more, if it is not recomputed yet."""
    if recipe.memory.recompute_granularity == "full":
        return
    now = recomputed(recipe)
    if label not in now:
        changes = {"recompute_granularity": "selective", "recompute_modules": [*now, label]}
        yield Remedy(f"recompute {label}", COSTS[label], changes)


def recomputed(recipe: Recipe) -> tuple[str, ...]:
    """The labels that the recipe recomputes; with full recompute there are none."""
    memory = recipe.memory
    if memory.recompute_granularity != "selective":
        return ()
    return memory.recompute_modules if memory.recompute_modules is not None else ("core_attn",)


def _more_stages(recipe: Recipe) -> Remedy:
    """Twice as many pipeline stages: the data parallelism stays, so that it takes twice the GPUs."""
    split = recipe.parallelism
    cost = f"{COSTS['PP']}; {recipe.world_size * 2} GPUs instead of {recipe.world_size}"
    return Remedy(f"PP {split.pp} -> {split.pp * 2}, keeping DP", cost, {"pp": split.pp * 2})


def _more_tensor_parallelism(recipe: Recipe) -> Remedy:
    """Twice the tensor parallelism on the same GPUs, or on twice as many where data parallelism cannot be halved."""
    split = recipe.parallelism
    changes: dict[str, Any] = {"tp": split.tp * 2}
    name, cost = f"TP {split.tp} -> {split.tp * 2}", COSTS["TP"]
    if split.dp % 2 == 0:
        name += f", DP {split.dp} -> {split.dp // 2}"
        changes["dp"] = split.dp // 2
    else:
        cost += f"; {recipe.world_size * 2} GPUs instead of {recipe.world_size}"
    return Remedy(name, cost, changes)


def _checked(recipe: Recipe, remedy: Remedy) -> Remedy:
    """The remedy, with a note where the recipe cannot be changed so."""
    from . import incompatibilities

    try:
        changed = recipe.but(**remedy.changes)
        incompatibilities.check(changed)
    except IncompatibleSettings as error:
        return replace(remedy, note=f"not possible: {', '.join(error.ids)} (see mbmem explain)")
    except UserError as error:
        return replace(remedy, note=f"not possible: {error}")
    reasons = changed.not_yet()
    return replace(remedy, note=f"cannot be measured: {'; '.join(reasons)}") if reasons else remedy
