"""How much memory a recipe needs on its most loaded GPU, in closed form: no GPU, no torch, nothing that runs.

Sources of the formulas:

- parameters, gradients and optimizer state: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
  Trillion Parameter Models" (arXiv 1910.02054, section 3), with fp32 gradients as Megatron-LM keeps them, and its
  theoretical memory usage (`megatron/training/theoretical_memory_usage.py`) for what the distributed optimizer shares;
- activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
  2205.05198), tensor by tensor as Megatron Core 0.16 keeps them (`closed_form.activations`);
- microbatches in flight: Narayanan et al. 2021 (`closed_form.stages`).

`NOT_IN_IT` says what is left out. It is the memory of live tensors in a step that has optimizer state, so the second
and later ones: what a measurement calls peak allocated. Beside those of the virtual GPU, in some hundred recipes,
parameters and gradient buffers are exact, and so is the optimizer's state but for step counters (and but for a share of
it that is offloaded, by whole parameters). Activations are within 3% where a step peaks at its loss, and up to a third
off where it peaks elsewhere and little is kept: receive and dispatch buffers then weigh, as do recomputed experts. The
whole is within 5% for peaks above 2 GiB, mostly below. Of smaller ones it lacks cuBLAS's workspaces of 64 MiB.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from . import incompatibilities
from .closed_form import activations, states
from .closed_form.activations import Kept, Shape, Working
from .closed_form.stages import Chunk, in_flight, stages
from .closed_form.states import Counted
from .closed_form.terms import Term, text, total
from .errors import UserError
from .recipe import Recipe

Category = Literal["dense and embedding", "routed experts", "activations"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

MOST = 100_000
"""Layers, and model chunks, of a recipe: more of them are a slip of the keyboard, and would take minutes."""

NOT_IN_IT = (
    "allocator fragmentation and rounding",
    "cuBLAS and other workspaces",
    "temporaries but those named",
    "NCCL and the CUDA context",
    "CUDA graphs",
    "receive and dispatch buffers",
    "padding of gradient buckets",
    "imbalance of tokens beyond the stated overload",
)
"""What an estimate does not contain."""

_ADAM, _SGD, _MAIN = 8, 4, 4
"""Bytes a parameter of fp32: Adam's two moments, SGD's momentum, a copy of parameters that are not fp32."""


@dataclass(frozen=True)
class Component:
    """A part of the estimate."""

    name: str  # "parameters", "core attention", ...
    category: Category
    size: int  # bytes
    formula: str  # with its numbers
    kind: Literal["parameters", "gradients", "optimizer state", "activations"]


@dataclass(frozen=True)
class Estimate:
    """Bytes on the rank that holds most."""

    components: tuple[Component, ...]
    rank: int
    coordinates: Mapping[str, int]  # as in `RankMeasurement`
    totals: tuple[int, ...]  # of each pipeline stage
    notes: tuple[str, ...] = ()  # what the formula cannot do for this recipe, and what it assumes

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(component.size for component in self.components)

    @property
    def largest(self) -> Component:
        """The component with most bytes."""
        return max(self.components, key=lambda component: component.size)

    @property
    def by_category(self) -> dict[Category, int]:
        """Bytes by category."""
        return {c: sum(part.size for part in self.components if part.category == c) for c in CATEGORIES}

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of parameters, gradients, optimizer state and activations, as measurements tell them apart."""
        found: dict[str, int] = {}
        for part in self.components:
            found[part.kind] = found.get(part.kind, 0) + part.size
        return found

    def exceeds(self, capacity: int) -> bool:
        """Whether it is more than these bytes."""
        return self.total > capacity

    def to_json(self) -> dict[str, Any]:
        """Plain data, and what follows from it."""
        return {
            **dataclasses.asdict(self),
            "total": self.total,
            "by_category": self.by_category,
            "largest": self.largest.name,
            "not_in_it": NOT_IN_IT,
        }


def estimate(recipe: Recipe) -> Estimate:
    """The closed-form estimate of the rank with most.

    It is one with tensor, context and data coordinate 0, of the pipeline stage whose sum is the largest (the earliest
    of equal ones), and among expert-parallel ranks the first, which receives most tokens. Shards of a distributed
    optimizer are equal but for padding.

    Raises `IncompatibleSettings` for a recipe whose settings exclude each other, `UserError` for one beyond `MOST`.
    """
    incompatibilities.check(recipe)
    layers, chunks = recipe.model.num_layers, recipe.parallelism.pp * (recipe.parallelism.vpp or 1)
    if max(layers, chunks) > MOST:
        raise UserError(
            f"{recipe.origin[0]}: {layers} layers in {chunks} model chunks: the estimate goes through each of them, "
            f"{MOST} at most"
        )
    of_stages = [_Stage(recipe, number, chunks) for number, chunks in enumerate(stages(recipe))]
    totals = tuple(stage.total for stage in of_stages)
    most = of_stages[totals.index(max(totals))]
    from .measure.ranks import at

    rank = at(recipe, most.number * (recipe.world_size // recipe.parallelism.pp))
    return Estimate(most.components, rank.rank, rank.coordinates, totals, tuple(_notes(recipe)))


def communicators(recipe: Recipe) -> tuple[str, ...]:
    """The process groups of more than one rank that a step uses, by the names that measurements give them.

    NCCL takes memory for each (see `outside`). What runs only once, as the broadcast of LoRA's adapters, is left out.
    """
    split, moe = recipe.parallelism, recipe.model.moe
    experts = split.expert_tp * split.ep if moe is not None else 1
    sizes = {
        "tp": split.tp,
        "cp": split.cp,
        "dp": split.cp * split.dp,
        "pp": split.pp,
        "embedding": split.pp if recipe.model.share_embeddings_and_output_weights else 1,
        "world" if split.distributed_optimizer else "model": (
            recipe.world_size if split.distributed_optimizer else split.tp * split.pp
        ),
    }
    if moe is not None:
        own = split.tp * split.cp * split.dp // experts
        sizes |= {
            "ep": split.ep,
            "etp": split.expert_tp,
            "edp": own,
            "etp-ep": experts,
            "etp-ep-pp": experts * split.pp,
        }
    return tuple(sorted(name for name, size in sizes.items() if size > 1))


def _sharers_of_experts(recipe: Recipe) -> int:
    """Ranks that a distributed optimizer shares the state of experts among: all that hold the same ones.

    Without expert parallelism Megatron Core 0.16 reduces their gradients with the others', whatever `etp` is
    (`allreduce` of a parameter in `tensor_parallel/layers.py`).
    """
    split = recipe.parallelism
    if split.ep == 1:
        return split.cp * split.dp
    return split.tp * split.cp * split.dp // (split.expert_tp * split.ep)


def _notes(recipe: Recipe) -> Iterator[str]:
    memory, moe = recipe.memory, recipe.model.moe
    yield from (f"cannot be measured: {why}" for why in recipe.not_yet())
    if memory.cpu_offloading or memory.offload_modules:
        yield "activations that wait in host memory are counted as if they stayed on the GPU: less is needed"
    if memory.optimizer_cpu_offload:
        yield "offloaded optimizer state: Megatron takes whole parameters up to the fraction, the formula the fraction"
    if recipe.megatron:
        names = ", ".join(sorted(recipe.megatron))
        yield f"settings by Megatron's own names are not in the formula: {names}"
    if recipe.megatron.get("fp8") or recipe.megatron.get("fp4"):
        yield "FP8 and FP4 are not counted: parameters and what linears keep are taken to be in training.precision"
    if recipe.parallelism.cp > 1 and recipe.training.attention_backend in ("fused", "auto"):
        yield "context parallelism is counted as if keys and values were gathered; Transformer Engine may do otherwise"
    if recipe.training.steps == 1:
        yield "the optimizer's state appears at the end of step 1; a run of one step peaks without it"
    if moe is not None:
        share = "receives its balanced share" if moe.overload == 1 else f"receives {moe.overload:g} times its share"
        yield f"the first expert-parallel rank {share} of the tokens"
        if moe.moe_token_dispatcher_type != "alltoall":
            yield f"what the {moe.moe_token_dispatcher_type} dispatcher holds of its own is not in the formula"


@dataclass(frozen=True)
class _Stage:
    """A pipeline stage, and what one of its ranks holds."""

    recipe: Recipe
    number: int
    chunks: tuple[Chunk, ...]

    @property
    def total(self) -> int:
        return sum(component.size for component in self.components)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        return tuple(c for c in (*self._states(), *self._activations()) if c.size)

    # Parameters, gradients, optimizer state

    def _states(self) -> Iterator[Component]:
        parts = states.parameters(self.recipe, self.chunks)
        yield from self._states_of([p for p in parts if not p.expert], "dense and embedding")
        yield from self._states_of([p for p in parts if p.expert], "routed experts")

    def _states_of(self, parts: Sequence[Counted], category: Category) -> Iterator[Component]:
        training, split = self.recipe.training, self.recipe.parallelism
        is_half = training.precision != "fp32"
        base = sum(part.elements.base for part in parts)
        adapters = sum(part.elements.adapters for part in parts)
        of = " + ".join(f"{part.name} {part.elements.base + part.elements.adapters}" for part in parts)
        width = 2 if is_half else 4
        yield Component("parameters", category, width * (base + adapters), f"{width} B x ({of})", "parameters")

        learned, what = (base, "parameters") if self.recipe.lora is None else (adapters, "parameters of adapters")
        width = 4 if training.main_grads == "fp32" else 2
        formula = f"{width} B x {learned} {what}"
        yield Component("gradients", category, width * learned, formula, "gradients")

        width = (_ADAM if self.recipe.optimizer.kind == "adam" else _SGD) + _MAIN * is_half
        size, formula = width * learned, f"{width} B x {learned} {what}"
        if split.distributed_optimizer:
            ranks = split.cp * split.dp if category == CATEGORIES[0] else _sharers_of_experts(self.recipe)
            size, formula = -(-size // ranks), f"{formula} / {ranks} ranks"
        memory = self.recipe.memory
        if memory.optimizer_cpu_offload:
            fraction = 1.0 if memory.optimizer_offload_fraction is None else memory.optimizer_offload_fraction
            size, formula = round(size * (1 - fraction)), f"{formula} x {1 - fraction:g} not offloaded"
        yield Component("optimizer state", category, size, formula, "optimizer state")

    # Activations

    @cached_property
    def _shape(self) -> Shape:
        return Shape(self.recipe)

    def _activations(self) -> Iterator[Component]:
        by_part: dict[str, list[tuple[int, str]]] = {}
        flights = in_flight(self.recipe, self.number, len(self.chunks))
        for chunk, flight in zip(self.chunks, flights, strict=True):
            for part, times, terms in self._kept(chunk):
                count = f"{times} x" if flight == 1 else f"{times} x {flight} microbatches in flight x"
                by_part.setdefault(part, []).append((times * flight * total(terms), f"{count} ({text(terms)})"))
        for part, pieces in by_part.items():
            yield _component(part, sum(size for size, _ in pieces), " + ".join(t for size, t in pieces if size))
        held = activations.buffers(self._shape, max(flights))
        yield _component("buffers", total(held), text(held))
        of_one = sum(times * total(terms) for _, times, terms in self._kept(self.chunks[0]))
        most = max(self._moments(of_one), key=lambda moment: moment.size, default=None)
        if most is not None:
            formula = " ".join(
                filter(None, [text(most.terms), f"- {most.freed} B freed by then" if most.freed else ""])
            )
            yield _component(most.name, total(most.terms) - most.freed, formula)
            if most.weight is not None:
                category = CATEGORIES[most.expert]
                yield Component("gradient of a weight", category, most.weight.size, most.weight.text, "gradients")

    def _kept(self, chunk: Chunk) -> Iterator[tuple[str, int, Sequence[Term]]]:
        """Part, how often (-1: once less), and what of, for one microbatch of a chunk."""
        shape, pattern = self._shape, states.layer_pattern(self.recipe)
        hidden = self.recipe.model.hidden_size
        kinds = [pattern[layer] for layer in chunk.layers]
        whole, inputs = self._recomputed(len(kinds))
        if inputs:
            yield "inputs of recomputed layers", inputs, [activations.recomputed_input(shape)]
        for kind in sorted(set(kinds[whole:])):
            yield from self._layers(kinds[whole:].count(kind), has_experts=kind == 1)
        if 0 in chunk.layers:
            for part, terms in _by_part(activations.frozen_attention(shape)).items():
                yield part, -1, terms
        if chunk.embedding and self.recipe.model.hidden_dropout:
            yield "embedding", 1, [Term("dropout mask", 1, (shape.shard, hidden))]
        if chunk.output:
            ends = [shape.of("last layer's output", shape.shard, hidden), shape.of("its norm", shape.shard, hidden)]
            yield "final norm", 1, ends
        if chunk.mtp:
            # embedding, both inputs side by side, their projection, and the results joined
            yield from self._layers(chunk.mtp, has_experts=pattern[-1] == 1, has_input=False)
            yield "multi-token prediction", chunk.mtp, [shape.of("inputs and results", 5, shape.shard, hidden)]
            yield "multi-token prediction", 1, [shape.of("joined result", shape.shard, hidden)]

    def _recomputed(self, layers: int) -> tuple[int, int]:
        """Layers of a chunk that are recomputed whole, and how many of their inputs are kept."""
        memory = self.recipe.memory
        if not self._shape.is_recomputed_whole:
            return 0, 0
        number = memory.recompute_num_layers or 1
        if memory.recompute_method == "block":
            return min(layers, number), min(layers, number)
        return layers, -(-layers // number)

    def _layers(
        self, count: int, *, has_experts: bool, has_input: bool = True
    ) -> Iterator[tuple[str, int, list[Term]]]:
        shape = self._shape
        if has_input:
            yield "norms and residuals", count, [activations.layer_input(shape)]
        for part, terms in _by_part(activations.layer(shape, has_experts=has_experts)).items():
            yield part, count, terms

    def _moments(self, of_one: int) -> Iterator[Working]:
        """The moments when most may be held beside what is kept; `of_one`: bytes kept of one microbatch of a chunk."""
        shape = self._shape
        if any(chunk.output for chunk in self.chunks):
            yield from activations.loss_moments(shape)
        pattern = states.layer_pattern(self.recipe)
        for kind in {pattern[layer] for chunk in self.chunks for layer in chunk.layers}:
            yield from self._backward(has_experts=kind == 1)
        if self.chunks[0].embedding:
            yield activations.embedding_moment(shape, of_one)

    def _backward(self, *, has_experts: bool) -> Iterator[Working]:
        """Of a layer, with what is recomputed for it."""
        shape, memory = self._shape, self.recipe.memory
        every = activations.layer(shape, has_experts=has_experts, recompute=False)
        kept = [] if shape.is_recomputed_whole else activations.layer(shape, has_experts=has_experts)
        again = [one for one in every if one not in kept]
        more: list[Term] = []
        if shape.is_recomputed_whole and memory.recompute_method == "uniform":
            group = min(memory.recompute_num_layers or 1, max(len(chunk.layers) for chunk in self.chunks))
            more = [Term("kept of a layer", activations.sum_of(every), (group - 1,))] if group > 1 else []
        of_mlp = [one.term for one in again if shape.is_recomputed_whole or one.part in _IN_MLP]
        inside = sum(o.term.size for o in every if o.term.name in ("first linear", "activation"))
        for moment in activations.mlp_moments(shape, has_experts=has_experts, freed=inside):
            yield replace(moment, terms=[*more, *of_mlp, *moment.terms])
        of_attention = [one.term for one in again if one.part not in _IN_MLP]
        freed = activations.sum_of(one for one in kept if one.part in _IN_MLP)
        terms = [*more, *of_attention, *activations.score_gradients(shape)]
        yield Working("backward of an attention", terms, freed=freed)


_IN_MLP = ("MLP", "routed experts", "shared experts", "router")
"""Parts of a layer whose backward comes before that of the attention."""


def _component(name: str, size: int, formula: str) -> Component:
    return Component(name, "activations", size, formula, "activations")


def _by_part(kept: Sequence[Kept]) -> dict[str, list[Term]]:
    found: dict[str, list[Term]] = {}
    for one in kept:
        found.setdefault(one.part, []).append(one.term)
    return found
