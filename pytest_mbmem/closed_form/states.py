"""Parameters of a rank, exact to padding.

The shapes are those of Megatron Core's modules (`Model.num_parameters` counts the same for the whole model): a linear
is shared out over the tensor-parallel ranks, norms, routers and MLA's down-projections are on each of them, and experts
are shared out over expert-parallel and expert-tensor-parallel ranks, not over `tp`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..recipe import Recipe
from .stages import Chunk


@dataclass(frozen=True)
class Elements:
    """Numbers of parameters on a rank."""

    base: int = 0
    adapters: int = 0  # of LoRA, without which there are none

    def __add__(self, other: Elements) -> Elements:
        return Elements(self.base + other.base, self.adapters + other.adapters)

    def __mul__(self, times: int) -> Elements:
        return Elements(self.base * times, self.adapters * times)


@dataclass(frozen=True)
class Counted:
    """A part of a rank's parameters."""

    name: str  # "embedding", "attention", ...
    elements: Elements
    expert: bool = False


@dataclass(frozen=True)
class _Linear:
    """A linear of which each rank of the group that shares it has an equal part."""

    inputs: int
    outputs: int
    target: str = ""  # as LoRA names it
    bias: int = 0  # elements on this rank

    def on(self, recipe: Recipe, ranks: int) -> Elements:
        """Elements on a rank; A and B of an adapter are shared out like the linear."""
        lora = recipe.lora
        adapted = lora is not None and self.target in lora.targets
        adapters = lora.rank * (self.inputs + self.outputs) // ranks if lora is not None and adapted else 0
        return Elements(self.inputs * self.outputs // ranks + self.bias, adapters)


def parameters(recipe: Recipe, chunks: tuple[Chunk, ...]) -> list[Counted]:
    """Of a pipeline stage with these chunks, by part; parts of the same name come once for each kind of layer."""
    return [part for part in _parts(recipe, chunks) if part.elements != Elements()]


def _parts(recipe: Recipe, chunks: tuple[Chunk, ...]) -> Iterator[Counted]:
    model, tp = recipe.model, recipe.parallelism.tp
    words = model.padded_vocab_size(tp) // tp * model.hidden_size
    embeds = any(chunk.has_embedding for chunk in chunks)
    if embeds:
        yield Counted("embedding", Elements(words))
    if embeds and model.position_embedding_type == "learned_absolute":
        yield Counted("positions", Elements(recipe.max_position_embeddings * model.hidden_size))
    pattern = layer_pattern(recipe)
    layers = [pattern[layer] for chunk in chunks for layer in chunk.layers]
    predicting = sum(chunk.mtp for chunk in chunks)
    layers += [pattern[-1]] * predicting
    yield Counted("norms", Elements(_norm(recipe, model.hidden_size)) * (2 * len(layers)))
    yield Counted("attention", _attention(recipe) * len(layers))
    dense, sparse = layers.count(0), layers.count(1)
    if dense:
        yield Counted("MLP", _mlp(recipe, model.ffn_size, tp) * dense)
    if sparse and model.moe is not None:
        moe, split = model.moe, recipe.parallelism
        router = moe.num_moe_experts * (model.hidden_size + model.add_bias_linear)
        yield Counted("router", Elements(router) * sparse)
        if moe.moe_shared_expert_intermediate_size:
            shared = _mlp(recipe, moe.moe_shared_expert_intermediate_size, tp)
            yield Counted("shared experts", shared * sparse)
        own = moe.num_moe_experts // split.ep
        expert = _mlp(recipe, model.expert_ffn_size, split.expert_tp)
        # the experts of a rank that are one grouped product share one adapter
        adapters = expert.adapters * (1 if moe.moe_grouped_gemm else own)
        yield Counted("experts", Elements(expert.base * own, adapters) * sparse, expert=True)
    if predicting:
        joined = 2 * model.hidden_size * model.hidden_size // tp + 3 * _norm(recipe, model.hidden_size)
        yield Counted("multi-token prediction", Elements(joined * predicting))
    if any(chunk.output for chunk in chunks):
        yield Counted("final norm", Elements(_norm(recipe, model.hidden_size)))
        if not (model.share_embeddings_and_output_weights and embeds):
            yield Counted("output", Elements(words))


def layer_pattern(recipe: Recipe) -> tuple[int, ...]:
    """1 for each layer with experts, 0 for each dense one."""
    model = recipe.model
    return model.moe.layer_pattern(model.num_layers) if model.moe is not None else (0,) * model.num_layers


def _norm(recipe: Recipe, size: int) -> int:
    return 2 * size if recipe.model.normalization == "LayerNorm" else size


def _mlp(recipe: Recipe, size: int, ranks: int) -> Elements:
    model = recipe.model
    inner = size * (2 if model.activation == "swiglu" else 1)
    bias = model.add_bias_linear
    first = _Linear(model.hidden_size, inner, "linear_fc1", inner // ranks * bias)
    second = _Linear(size, model.hidden_size, "linear_fc2", model.hidden_size * bias)
    return first.on(recipe, ranks) + second.on(recipe, ranks)


def _attention(recipe: Recipe) -> Elements:
    model, tp = recipe.model, recipe.parallelism.tp
    hidden, heads, bias = model.hidden_size, model.num_attention_heads, model.add_bias_linear
    if model.mla is not None:
        mla = model.mla
        queries = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
        down = hidden * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
        up = queries * (mla.q_lora_rank or hidden) + mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
        norms = _norm(recipe, (mla.q_lora_rank or 0) + mla.kv_lora_rank) if model.qk_layernorm else 0
        projection = _Linear(heads * mla.v_head_dim, hidden, "linear_proj", hidden * bias).on(recipe, tp)
        return Elements(down + up // tp + norms) + projection
    outputs = (heads + 2 * model.query_groups) * model.head_dim
    qkv_bias = outputs // tp * (model.add_bias_linear or model.add_qkv_bias)
    norms = 2 * _norm(recipe, model.head_dim) if model.qk_layernorm else 0
    qkv = _Linear(hidden, outputs, "linear_qkv", qkv_bias).on(recipe, tp)
    projection = _Linear(heads * model.head_dim, hidden, "linear_proj", hidden * bias).on(recipe, tp)
    return Elements(norms) + qkv + projection
