"""What a transformer layer keeps for its backward, and what else lies beside it when most is held.

After Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), whose
sum for a layer (section 4) is of 16 bits, GELU and dropout: 34 bytes a token and channel, and 5 a score. Which tensors
these are differs by model and by version; the lists here follow the autograd nodes of Megatron Core 0.16:
`attention.py`, `dot_product_attention.py`, `multi_latent_attention.py`, `mlp.py`, `moe/`, `fusions/`.

Sizes are those of one rank and one microbatch: `tokens` of its part of the sequence, and `shard` of these where
sequence parallelism shares norms and residuals out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..recipe import Recipe
from ..virtual_gpu import routing
from . import states
from .terms import Term, total

_FUSED_MOST = 4096
"""Keys up to which Megatron Core's fused softmax kernels take scores (`FusedScaleMaskSoftmax.is_kernel_available`)."""


@dataclass(frozen=True)
class Kept:
    """A tensor that lives until backward."""

    part: str  # of the layer
    term: Term
    labels: tuple[str, ...] = ()  # of selective recompute, each of which frees it
    input_of: str = ""  # the linear whose weight gradient alone needs it
    with_label: str = ""  # of selective recompute, only with which it is kept


@dataclass(frozen=True)
class Shape:
    """The sizes of a recipe on one rank that everything here is made of."""

    recipe: Recipe

    @property
    def element(self) -> int:
        """Bytes of an activation's number."""
        return 4 if self.recipe.training.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Of a microbatch, in the rank's part of the sequence."""
        training = self.recipe.training
        return training.micro_batch_size * training.seq_length // self.recipe.parallelism.cp

    @property
    def tp(self) -> int:
        """Tensor parallel size."""
        return self.recipe.parallelism.tp

    @property
    def has_shards(self) -> bool:
        """Whether sequence parallelism shares norms and residuals out."""
        return self.recipe.parallelism.sequence_parallel and self.tp > 1

    @property
    def shard(self) -> int:
        """Tokens of norms and residuals."""
        return self.tokens // self.tp if self.has_shards else self.tokens

    @property
    def heads(self) -> int:
        """Of this rank."""
        return self.recipe.model.num_attention_heads // self.tp

    @property
    def groups(self) -> int:
        """Key/value heads of this rank."""
        return max(1, self.recipe.model.query_groups // self.tp)

    @property
    def scores(self) -> tuple[int, ...]:
        """Of unfused attention: microbatch, heads, queries, keys."""
        training = self.recipe.training
        return training.micro_batch_size, self.heads, training.seq_length, training.seq_length

    @property
    def is_flash(self) -> bool:
        """Whether scores are never stored; Transformer Engine's own choice does so in 16 bits."""
        backend = self.recipe.training.attention_backend
        return backend in ("flash", "fused") or (backend == "auto" and self.element == 2)

    @property
    def is_te(self) -> bool:
        """Whether layers are Transformer Engine's."""
        return self.recipe.training.transformer_impl == "transformer_engine"

    @property
    def has_fused_softmax(self) -> bool:
        """Whether one kernel scales, masks and normalizes scores; else they are kept in fp32 too."""
        training = self.recipe.training
        return (
            training.masked_softmax_fusion
            and self.element == 2
            and 16 < training.seq_length <= _FUSED_MOST
            and training.seq_length % 4 == 0
            and training.micro_batch_size * self.heads % 4 == 0
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """Of selective recompute."""
        memory = self.recipe.memory
        if memory.recompute_granularity != "selective":
            return ()
        return ("core_attn",) if memory.recompute_modules is None else memory.recompute_modules

    @property
    def is_recomputed_whole(self) -> bool:
        """Whether whole layers are."""
        return self.recipe.memory.recompute_granularity == "full"

    def of(self, name: str, *sizes: int, element: int | None = None) -> Term:
        """A tensor of activations."""
        return Term(name, self.element if element is None else element, sizes)

    @property
    def routed(self) -> int:
        """Tokens that the most loaded expert-parallel rank's experts receive, from all ranks that send to them."""
        split = self.recipe.parallelism
        return sum(routing.shares(self.recipe)[0]) * split.ep * split.expert_tp


def recomputed_input(shape: Shape) -> Term:
    """What a layer that is recomputed whole keeps: its input, or this rank's part of it."""
    if not shape.recipe.memory.distribute_saved_activations:
        return layer_input(shape)
    return shape.of("part of its input", shape.tokens, shape.recipe.model.hidden_size // shape.tp)


def layer_input(shape: Shape) -> Term:
    """What a layer begins with; of the first one the embedding's output, or what the stage before sent."""
    return shape.of("its input", shape.shard, shape.recipe.model.hidden_size)


def frozen_attention(shape: Shape) -> list[Kept]:
    """What a model's first layer does not keep: with LoRA and no adapter before it, no gradient goes through attention.

    Nothing if the recompute there needs an input that requires gradients, which the embedding's output then does.
    """
    lora, is_mla = shape.recipe.lora, shape.recipe.model.mla is not None
    if lora is None or ("linear_qkv" in lora.targets and not is_mla) or shape.is_recomputed_whole:
        return []
    if {"layernorm", "mla_up_proj"} & set(shape.labels):
        return []
    parts, has_experts = ("attention projections", "core attention"), states.layer_pattern(shape.recipe)[0] == 1
    kept = [one for one in layer(shape, has_experts=has_experts) if one.part in parts]
    return [one for one in kept if one.term.name != "context" or "linear_proj" not in lora.targets]


def layer(shape: Shape, *, has_experts: bool, recompute: bool = True) -> list[Kept]:
    """What one layer keeps beside its input, with the recipe's selective recompute or without any."""
    labels = shape.labels if recompute else ()
    kept = [
        *_norms(shape, has_experts=has_experts),
        *_attention(shape),
        *(_experts(shape) if has_experts else _mlp(shape)),
    ]
    kept += _adapters(shape, has_experts=has_experts)
    return [
        one
        for one in kept
        if not set(one.labels) & set(labels)
        and (not one.with_label or one.with_label in labels)
        and (not one.input_of or _learns(shape.recipe, one.input_of))
    ]


def _learns(recipe: Recipe, target: str) -> bool:
    """Whether a gradient needs the input of a linear: of its weight, or of an A without dropout before it."""
    return recipe.lora is None or (target in recipe.lora.targets and not recipe.lora.dropout)


def _stats(shape: Shape, name: str, rows: int) -> Term:
    values = 2 if shape.recipe.model.normalization == "LayerNorm" else 1
    return Term(f"statistics of {name}", 4, (rows, values))


def _gathers_for_adapter(shape: Shape, target: str) -> bool:
    """Whether LoRA's A keeps the gathered sequence in place of the rank's own shard."""
    lora = shape.recipe.lora
    if lora is None or target not in lora.targets or not shape.has_shards:
        return False
    return not lora.sequence_parallel_input_regather


def _norms(shape: Shape, *, has_experts: bool) -> Iterator[Kept]:
    """Two norms, and the sums that they and the next layer take; with dropout, masks of one byte.

    The router keeps its input, frozen or not (`RouterGatingLinearFunction`), and so does a linear of Transformer
    Engine's with its norm in it, if it has an adapter. Recompute of norms by label does not reach such a norm.
    """
    model, lora, part = shape.recipe.model, shape.recipe.lora, "norms and residuals"
    for name, target, in_linear in (
        ("norm before attention", "linear_qkv", shape.is_te and model.mla is None),
        ("norm before the MLP", "linear_fc1", shape.is_te and not has_experts),
    ):
        labels = () if in_linear else ("layernorm",)
        stays = lora is None or (has_experts and target == "linear_fc1") or (in_linear and target in lora.targets)
        if stays or not _gathers_for_adapter(shape, target):
            needed = "" if stays else target
            yield Kept(part, shape.of(name, shape.shard, model.hidden_size), labels, needed)
        yield Kept(part, _stats(shape, name, shape.shard), labels)
    yield Kept(part, shape.of("sum after attention", shape.shard, model.hidden_size))
    if model.hidden_dropout:
        yield Kept(part, Term("dropout masks", 1, (2, shape.shard, model.hidden_size)))


# Attention ------------------------------------------------------------------------------------------------------------


def _attention(shape: Shape) -> Iterator[Kept]:
    if shape.recipe.model.mla is not None:
        return _latent_attention(shape)
    return _grouped_attention(shape)


def _grouped_attention(shape: Shape) -> Iterator[Kept]:
    """Queries, keys and values are views of one projection, until rotary embedding or a copy replaces them."""
    model, tokens, cp = shape.recipe.model, shape.tokens, shape.recipe.parallelism.cp
    queries, keys = shape.heads * model.head_dim, shape.groups * model.head_dim
    is_split = model.query_groups >= shape.tp  # else Megatron gathers the projection of all ranks
    of_all = (model.num_attention_heads + 2 * model.query_groups) * model.head_dim
    projection = shape.of("queries, keys and values", tokens, queries + 2 * keys if is_split else of_all)
    rotary = model.position_embedding_type == "rope"
    grouped = shape.heads != shape.groups
    copied = grouped and shape.groups > 1  # the queries of several groups are no single view
    part, core = "attention projections", "core attention"
    inside = "core_attn"
    copies_values = shape.is_te and (grouped or rotary or model.qk_layernorm)  # parts of one projection no more

    if _keeps_projection(shape, is_view=not rotary and not copied, copies_values=copies_values):
        yield Kept(part, projection)
    elif inside in shape.labels:
        yield Kept(part, projection, with_label=inside)
    if model.qk_layernorm:
        if copied:
            yield Kept(part, shape.of("queries before their norm", tokens, queries))
        yield Kept(part, _stats(shape, "norms of queries and keys", tokens * (shape.heads + shape.groups)))
    if rotary or copied or model.qk_layernorm or (shape.is_te and shape.is_flash and grouped):
        yield Kept(part, shape.of("queries", tokens, queries))
    if rotary or model.qk_layernorm:
        if (not shape.is_flash and not grouped) or (shape.is_flash and cp == 1):
            yield Kept(part, shape.of("keys", tokens, keys))
        else:
            yield Kept(part, shape.of("keys", tokens, keys), with_label=inside)
    if rotary:
        rotated = int(model.head_dim * model.rotary_percent)
        yield Kept(part, shape.of("sines and cosines", 4, shape.recipe.training.seq_length // cp, rotated))
    if shape.is_flash:
        if copies_values and cp == 1:
            yield Kept(core, shape.of("values", tokens, keys), (inside,))
        if cp > 1:
            yield Kept(core, shape.of("gathered keys and values", tokens, cp, 2 * keys), (inside,))
            yield Kept(core, shape.of("context of each half", tokens, queries), (inside,))
        yield Kept(core, shape.of("context", tokens, queries))
        yield Kept(core, Term("log of the sum of each row", 4, (tokens, shape.heads)), (inside,))
        return
    if grouped:
        yield Kept(core, shape.of("repeated keys and values", 2, tokens, queries), (inside,))
    elif copies_values:
        yield Kept(core, shape.of("values", tokens, keys), (inside,))
    yield from _scores(shape)
    yield Kept(core, shape.of("context", tokens, queries), (), "linear_proj")


def _keeps_projection(shape: Shape, *, is_view: bool, copies_values: bool) -> bool:
    """Whether what queries, keys and values are views of stays; `is_view`: of the queries that the attention takes."""
    if shape.recipe.model.qk_layernorm:  # the keys' norm takes a view of it
        return True
    values_are_views = shape.recipe.parallelism.cp == 1 if shape.is_flash else shape.heads == shape.groups
    return not copies_values if values_are_views else is_view


def _scores(shape: Shape) -> Iterator[Kept]:
    """Of unfused attention (the paper's 5 a s^2 b: two bytes after the softmax, two and a mask's one after dropout)."""
    core, inside, dropout = "core attention", ("core_attn",), shape.recipe.model.attention_dropout
    if not shape.has_fused_softmax:
        yield Kept(core, Term("softmax in fp32", 4, shape.scores), inside)
    if shape.has_fused_softmax or (shape.element == 2 and not dropout):  # which keeps its mask, not its input
        yield Kept(core, shape.of("softmax", *shape.scores), inside)
    if dropout:
        yield Kept(core, shape.of("softmax after dropout", *shape.scores), inside)
        yield Kept(core, Term("dropout mask", 1, shape.scores), inside)


def _latent_attention(shape: Shape) -> Iterator[Kept]:
    """Multi-latent attention: low-rank vectors, and queries, keys and values made of them."""
    model, tokens = shape.recipe.model, shape.tokens
    mla = model.mla
    assert mla is not None
    channels = mla.qk_head_dim + mla.qk_pos_emb_head_dim
    part, core = "attention projections", "core attention"
    up, inside = ("mla_up_proj",), ("core_attn",)
    low = {"queries": mla.q_lora_rank or 0, "keys and values": mla.kv_lora_rank}
    latents = sum(low.values()) + mla.qk_pos_emb_head_dim
    yield Kept(part, shape.of("low-rank vectors", shape.shard, latents))
    if model.qk_layernorm:
        yield Kept(part, shape.of("normalized low-rank vectors", shape.shard, sum(low.values())))
        yield Kept(part, _stats(shape, "their norms", shape.shard * sum(1 for rank in low.values() if rank)))
    yield Kept(part, shape.of("queries", tokens, shape.heads, channels), up)
    cp = shape.recipe.parallelism.cp
    yield Kept(part, shape.of("keys", tokens, shape.heads, channels), up, with_label="core_attn" if cp > 1 else "")
    values = shape.of("values", tokens, shape.heads, mla.v_head_dim)
    positions = shape.recipe.training.seq_length // shape.recipe.parallelism.cp * mla.qk_pos_emb_head_dim
    yield Kept(part, shape.of("sines and cosines", 4, positions), up)
    yield Kept(part, Term("positions", 4, (positions,)), up)
    if not shape.is_flash:
        yield Kept(part, values, up)
        yield from _scores(shape)
        yield Kept(core, shape.of("context", tokens, shape.heads, mla.v_head_dim), (), "linear_proj")
        return
    is_padded, attended = mla.v_head_dim != channels, tokens
    yield Kept(part, values, up, with_label="core_attn" if is_padded or cp > 1 else "")
    if cp > 1:
        yield Kept(core, shape.of("gathered keys", tokens, cp, shape.heads, channels), inside)
        attended = tokens * (2 * cp + 1) // 2  # by the two halves of the rank's part together
        if not is_padded:
            yield Kept(core, shape.of("gathered values", tokens, cp, shape.heads, channels), inside)
            yield Kept(core, shape.of("context of each half", tokens, shape.heads, channels), inside)
    if is_padded:
        yield Kept(core, shape.of("padded values", attended, shape.heads, channels), inside)
        yield Kept(core, shape.of("padded context", tokens, shape.heads, channels), inside)
    yield Kept(core, shape.of("context", tokens, shape.heads, mla.v_head_dim))
    yield Kept(core, Term("log of the sum of each row", 4, (tokens, shape.heads)), inside)


# MLP and experts ------------------------------------------------------------------------------------------------------


def _inner(shape: Shape) -> int:
    return 2 if shape.recipe.model.activation == "swiglu" else 1


def _mlp(shape: Shape) -> Iterator[Kept]:
    size = shape.recipe.model.ffn_size // shape.tp
    yield from _linears(shape, "MLP", shape.tokens, size, ("mlp",), ("mlp",))


def _linears(
    shape: Shape, part: str, tokens: int, size: int, labels: tuple[str, ...], of_activation: tuple[str, ...]
) -> Iterator[Kept]:
    """What the first linear gives, which the activation keeps, and what the second takes."""
    model = shape.recipe.model
    yield Kept(part, shape.of("first linear", tokens, _inner(shape) * size), labels)
    if model.activation == "swiglu" and model.moe is not None and model.add_bias_linear:
        # Megatron does not fuse it: SiLU of a half, and its product with the other
        yield Kept(part, shape.of("SiLU", tokens, size), labels)
    yield Kept(part, shape.of("activation", tokens, size), of_activation, "linear_fc2")


def _experts(shape: Shape) -> Iterator[Kept]:
    model, split = shape.recipe.model, shape.recipe.parallelism
    moe = model.moe
    assert moe is not None
    whole = "moe"
    routed, part = shape.routed, "routed experts"
    topk, shard = moe.moe_router_topk, shape.shard
    # scores in fp32 and which experts they chose; then each copy's place and weight
    yield Kept("router", Term("scores and choices", 9, (shard, moe.num_moe_experts)), (whole,))
    yield Kept("router", Term("places and weights", 24, (shard, topk)), (whole,))
    yield Kept(part, shape.of("tokens of its experts", routed, model.hidden_size), (whole,), "linear_fc1")
    size = model.expert_ffn_size // split.expert_tp
    yield from _linears(shape, part, routed, size, (whole,), (whole, "moe_act"))
    if model.activation != "swiglu" or model.add_bias_linear:
        # times each token's weight, which the fused SwiGLU does at once
        yield Kept(part, shape.of("weighted activation", routed, size), (whole, "moe_act"))
    if moe.moe_shared_expert_intermediate_size:
        size = moe.moe_shared_expert_intermediate_size // shape.tp
        labels = (whole, "shared_experts")
        yield from _linears(shape, "shared experts", shape.tokens, size, labels, labels)


# LoRA -----------------------------------------------------------------------------------------------------------------


def _adapters(shape: Shape, *, has_experts: bool) -> Iterator[Kept]:
    """What adapters keep beside their linear's input, or in its place: dropout's result or the gathered sequence.

    Dropout is before the gathering, and keeps a mask of what is not gathered yet. And what A gives.
    """
    lora, model, part = shape.recipe.lora, shape.recipe.model, "adapters"
    if lora is None:
        return
    tokens = {target: shape.tokens for target in lora.targets if target != "linear_qkv" or model.mla is None}
    inputs = dict.fromkeys(("linear_qkv", "linear_fc1"), model.hidden_size)
    inputs["linear_proj"] = shape.heads * (model.mla.v_head_dim if model.mla is not None else model.head_dim)
    inputs["linear_fc2"] = model.ffn_size // shape.tp
    if has_experts:
        tokens |= {target: shape.routed for target in ("linear_fc1", "linear_fc2") if target in tokens}
        inputs["linear_fc2"] = model.expert_ffn_size // shape.recipe.parallelism.expert_tp
    for target, count in tokens.items():
        labels = _labels_of(target, has_experts=has_experts)
        is_column = target in ("linear_qkv", "linear_fc1") and not (has_experts and target == "linear_fc1")
        is_gathered = is_column and _gathers_for_adapter(shape, target)
        if is_gathered:
            yield Kept(part, shape.of(f"gathered input of {target}", count, inputs[target]), labels)
        if lora.dropout:
            own = shape.shard if is_column else count
            if not is_gathered:
                yield Kept(part, shape.of(f"{target} after dropout", own, inputs[target]), labels)
            yield Kept(part, Term(f"dropout mask of {target}", 1, (own, inputs[target])), labels)
        yield Kept(part, shape.of(f"A of {target}", count, lora.rank), labels)


def _labels_of(target: str, *, has_experts: bool) -> tuple[str, ...]:
    if target in ("linear_qkv", "linear_proj"):
        return ()
    return ("moe",) if has_experts else ("mlp",)


# What lies beside -----------------------------------------------------------------------------------------------------


def logits(shape: Shape) -> list[Term]:
    """Of the output layer and the loss.

    The logits, and the same in fp32, in which the vocabulary-parallel cross entropy works. Fused, its backward has
    fp32 probabilities, a copy of these, and their gradient in 16 bits (`fused_cross_entropy.py`).
    """
    model = shape.recipe.model
    sizes = (1 + (model.mtp_num_layers or 0), shape.tokens, model.padded_vocab_size(shape.tp) // shape.tp)
    if shape.recipe.training.cross_entropy_loss_fusion:
        return [Term("fp32 probabilities and a copy", 4, (2, *sizes)), Term("gradient", 2, sizes)]
    half = [shape.of("logits", *sizes)] if shape.element == 2 else []
    return [*half, Term("logits in fp32", 4, sizes)]


def score_gradients(shape: Shape) -> list[Term]:
    """Temporaries of unfused attention's backward, as large as its scores; nothing with flash attention.

    The fused softmax works on its gradient in place; that of PyTorch has three in fp32 (from 16 bits to fp32, of the
    softmax, of the mask), when the softmax in 16 bits is freed.
    """
    if shape.is_flash:
        return []
    if not shape.has_fused_softmax and shape.element == 4:
        return [Term("gradients of scores", 4, (3, *shape.scores))]
    if not shape.has_fused_softmax:
        third = Term("a third, less the softmax freed by then", 2, shape.scores)
        return [Term("gradients of scores in fp32", 4, (2, *shape.scores)), third]
    times = 2 if shape.recipe.model.attention_dropout else 1
    return [shape.of("gradients of scores", times, *shape.scores)]


@dataclass(frozen=True)
class Working:
    """What lies beside the kept tensors at a moment of the step, and what of these is freed by then."""

    name: str
    terms: Sequence[Term]
    weight: Term | None = None  # whose gradient autograd just made, before it is added to the gradient buffer
    expert: bool = False  # whether that is a routed expert's
    freed: int = 0

    @property
    def size(self) -> int:
        """Bytes that it adds; may be negative."""
        return total(self.terms) + (self.weight.size if self.weight else 0) - self.freed


def loss_moments(shape: Shape) -> Iterator[Working]:
    """The loss, and the backward of the output layer behind it."""
    model = shape.recipe.model
    yield Working("logits and loss", logits(shape))
    vocabulary = model.padded_vocab_size(shape.tp) // shape.tp
    terms = [shape.of("gradient of logits", shape.tokens, vocabulary)]
    terms.append(shape.of("gradient of its input", shape.tokens, model.hidden_size))
    yield Working("backward of the output layer", terms, _weight(shape, "output layer", vocabulary, model.hidden_size))


def mlp_moments(shape: Shape, *, has_experts: bool, freed: int = 0) -> Iterator[Working]:
    """The backward of an MLP or of experts: of the second linear, of the activation, of the first linear.

    Of experts the forward's end too, where their outputs go back in the order of tokens.

    `freed`: bytes of the activation and of the first linear, which the last of these no longer needs.
    """
    model, split = shape.recipe.model, shape.recipe.parallelism
    tokens, size, experts = shape.tokens, model.ffn_size // shape.tp, 1
    whole: list[Term] = []
    if has_experts:
        assert model.moe is not None
        tokens, size = shape.routed, model.expert_ffn_size // split.expert_tp
        experts = model.moe.num_moe_experts // split.ep
        outputs = shape.of("outputs of experts, in two orders", 2, tokens, model.hidden_size)
        yield Working("forward of experts", [outputs])
        if not model.moe.moe_grouped_gemm:  # one expert after the other
            whole = [shape.of("gradients of all tokens, in two orders", 2, tokens, model.hidden_size)]
            tokens, experts = -(-tokens // experts), 1
    inner, name, hidden = _inner(shape) * size, "backward of an MLP", model.hidden_size
    of_activation = shape.of("gradient of the activation", tokens, size)
    of_first = shape.of("gradient of the first linear", tokens, inner)
    of_input = shape.of("gradient of its input", tokens, hidden)
    second, first = (
        _weight(shape, name, experts, n, hidden) for name, n in (("second linear", size), ("first linear", inner))
    )
    yield Working(name, [*whole, of_activation], second, has_experts)
    yield Working(name, [*whole, of_activation, of_first])
    yield Working(name, [*whole, of_first, of_input], first, has_experts, freed)


def _weight(shape: Shape, name: str, *sizes: int) -> Term | None:
    """The gradient of a weight; frozen ones have none."""
    return shape.of(f"gradient of the {name}'s weight", *sizes) if shape.recipe.lora is None else None


def embedding_moment(shape: Shape, freed: int) -> Working:
    """The backward of the embedding, when the other microbatches in flight are still kept; `freed`: of its own."""
    model = shape.recipe.model
    vocabulary = model.padded_vocab_size(shape.tp) // shape.tp
    weight = _weight(shape, "embedding", vocabulary, model.hidden_size)
    return Working("backward of the embedding", [], weight, freed=freed)


def buffers(shape: Shape, in_flight: int) -> list[Term]:
    """What Megatron holds once and uses again in each layer (its global memory buffer), and the batch's masks.

    A frozen linear gathers the sequence anew each time (`linear_with_frozen_weight`).

    A mask stays until its microbatch's backward where recompute or PyTorch's softmax needs it.
    """
    found = []
    lora = shape.recipe.lora
    if shape.has_shards and (lora is None or lora.sequence_parallel_input_regather):
        found.append(shape.of("gathered sequence", shape.tokens, shape.recipe.model.hidden_size))
    if not shape.is_flash:
        if shape.recipe.training.transformer_impl == "local":
            found.append(shape.of("attention scores", *shape.scores))
        training = shape.recipe.training
        again = shape.is_recomputed_whole or "core_attn" in shape.labels or not shape.has_fused_softmax
        sizes = (in_flight if again else 1, training.micro_batch_size, training.seq_length, training.seq_length)
        found.append(Term("attention masks", 1, sizes))
    return found


def sum_of(kept: Iterable[Kept]) -> int:
    """Bytes of all."""
    return total(one.term for one in kept)
