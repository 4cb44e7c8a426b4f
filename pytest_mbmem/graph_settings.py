"""What a recipe asks of CUDA graphs, and which of it this version cannot measure honestly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .megatron_settings import has_te_layers

if TYPE_CHECKING:
    from .recipe import Recipe

WARMUP_STEPS = 3
"""Megatron's default of cuda_graph_warmup_steps."""


def implementation(recipe: Recipe) -> str:
    """Who captures: "none", "local" or "transformer_engine"; another text is Megatron's to refuse."""
    return str(recipe.megatron.get("cuda_graph_impl") or "none")


def scope(recipe: Recipe) -> tuple[str, ...]:
    """The parts of a layer that are captured; empty: all of it (Megatron's "full")."""
    value = recipe.megatron.get("cuda_graph_scope")
    names = value.split(",") if isinstance(value, str) else [str(name) for name in _listed(value)]
    return () if names == ["full"] else tuple(names)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def captured_after(recipe: Recipe) -> int:
    """The step after which Megatron-LM's training loop captures graphs; 0: before the first, or it captures none."""
    if implementation(recipe) == "none":
        return 0
    if implementation(recipe) == "local" and "full_iteration" not in scope(recipe):
        return 1
    warmup = recipe.megatron.get("cuda_graph_warmup_steps", WARMUP_STEPS)
    return warmup if isinstance(warmup, int) else WARMUP_STEPS


def settled_after(recipe: Recipe) -> int:
    """Steps after which each one holds the same memory: one of them captures the graphs, and one replays them."""
    return captured_after(recipe) + 2


def without_graphs(recipe: Recipe) -> Recipe:
    """The same recipe with nothing captured; it computes and communicates the same."""
    if implementation(recipe) == "none":
        return recipe
    return recipe.but(megatron={k: v for k, v in recipe.megatron.items() if not k.startswith("cuda_graph_")})


def reasons(recipe: Recipe) -> Iterator[str]:
    """Why this version cannot measure the recipe's graphs, each with its keys; none if it can."""
    if implementation(recipe) not in ("local", "transformer_engine"):
        return
    if recipe.training.transformer_impl == "transformer_engine" and not has_te_layers(recipe):
        yield (
            "megatron.cuda_graph_impl: Transformer Engine is not installed, and its layers' equivalents for memory "
            "allocate in another order, which a graph's private pool depends on"
        )
    if _captures_routing(recipe):
        yield (
            f"megatron.cuda_graph_scope: with {','.join(scope(recipe)) or 'full'} a layer of dropless experts reads "
            "the routing from what a graph computed, and no assumption states it there; capture attn alone (or attn "
            "and moe_router, with transformer_engine), or pad the experts to their capacity"
        )
    if recipe.training.steps < settled_after(recipe):
        captured = f"after step {captured_after(recipe)}" if captured_after(recipe) else "before step 1"
        yield (
            f"training.steps: {recipe.training.steps} are too few with megatron.cuda_graph_impl "
            f"{implementation(recipe)}: graphs are captured {captured}, and the memory with them has settled after "
            f"step {settled_after(recipe)}"
        )


def _captures_routing(recipe: Recipe) -> bool:
    """Whether a graph covers where a layer with experts counts its tokens, whose number is not known before."""
    moe = recipe.model.moe
    if moe is None or not any(moe.layer_pattern(recipe.model.num_layers)):
        return False
    if moe.moe_expert_capacity_factor is not None and moe.moe_pad_expert_input_to_capacity:
        return False
    counting = {"moe", "moe_preprocess", "full_iteration"}
    if implementation(recipe) == "local":
        counting.add("moe_router")  # for which Megatron captures moe_preprocess too
    return not scope(recipe) or bool(counting & set(scope(recipe)))
