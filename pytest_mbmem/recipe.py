"""What to run: model shape, parallelism, batch, precision, optimizer, memory settings, LoRA. From Python or from YAML.

Frozen dataclasses whose field names are Megatron Core's where it has one. A wrong type, a size that does not divide and
what this package itself cannot do are refused when the object is made, with the key, the value and what is allowed.
What Megatron Core refuses or ignores can be written; `incompatibilities.check` refuses it before anything is built.
Imports neither torch nor pytest; PyYAML only when YAML is read or written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from .alloc_conf import parse as parse_alloc_conf
from .errors import UserError
from .megatron_settings import KEYS
from .validation import Allowed, BadKey, Part, alternatives, check_multiple, did_you_mean, hints_of, show

_Dropout = Annotated[float, Allowed("from 0 to below 1", lambda x: 0 <= x < 1)]
_Share = Annotated[float, Allowed("above 0, up to 1", lambda x: 0 < x <= 1)]
_Amount = Annotated[float, Allowed("0 or more", lambda x: x >= 0)]
_Positive = Annotated[float, Allowed("above 0", lambda x: x > 0)]
_Overload = Annotated[float, Allowed("1 or more", lambda x: x >= 1)]
_AnyInt = Annotated[int, Allowed("from -2**63 + 1 to 2**63 - 1", lambda x: True)]

_RESERVED_ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "write it as memory.alloc_conf",
    "PYTORCH_ALLOC_CONF": "write it as memory.alloc_conf",
    **dict.fromkeys(
        ("LD_PRELOAD", "CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME", "TRITON_LIBCUDA_PATH"), "the virtual GPU sets it"
    ),
    "LD_LIBRARY_PATH": "it has no effect on a process that has started",
    "PYTHONPATH": "it has no effect on a process that has started",
    "CUDA_VISIBLE_DEVICES": "the device options choose the GPU",
    "TORCHDYNAMO_DISABLE": "write it as training.jit_fusion",
}


@dataclass(frozen=True, kw_only=True)
class Moe(Part):
    """Mixture of experts."""

    _prefix: ClassVar[str] = "model.moe."

    num_moe_experts: int
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    """Of one expert. None: the model's ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = None
    """Of all shared experts together. None: no shared expert."""
    moe_layer_freq: int | tuple[Literal[0, 1], ...] = 1
    """N: layers 0, N, 2N, … have experts; or one number per layer, 1 for experts and 0 for dense."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    moe_grouped_gemm: bool = False
    """All experts of a rank in one grouped matrix multiplication (PyTorch's own). False: one expert after the other."""
    moe_expert_capacity_factor: _Positive | None = None
    """Tokens that an expert takes, as a multiple of its balanced share; more are dropped. None: dropless."""
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_router_load_balancing_type: str = "aux_loss"
    """Of the installed Megatron Core's: "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"."""
    moe_aux_loss_coeff: _Amount = 0.0
    moe_z_loss_coeff: _Positive | None = None
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_shared_expert_overlap: bool = False
    overload: _Overload = 1.0
    """An assumption where kernels compute nothing: the first expert-parallel rank receives this many times its balanced
    share of the tokens, and the others share the rest equally. 1: all ranks and all their experts receive the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is not None:
            most = self.num_moe_experts / self.moe_router_topk
            if self.moe_expert_capacity_factor > most:
                problem = f"{self.moe_expert_capacity_factor:g} pads to more tokens than there are; at most {most:g}"
                raise BadKey("model.moe.moe_expert_capacity_factor", problem)

    def layer_pattern(self, num_layers: int) -> tuple[int, ...]:
        """1 for each layer with experts, 0 for each dense one."""
        if isinstance(self.moe_layer_freq, int):
            return tuple(int(layer % self.moe_layer_freq == 0) for layer in range(num_layers))
        return self.moe_layer_freq


@dataclass(frozen=True, kw_only=True)
class Mla(Part):
    """Multi-latent attention; the defaults are Megatron's."""

    _prefix: ClassVar[str] = "model.mla."

    q_lora_rank: int | None = 512
    """None: queries are projected without a low rank."""
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        check_multiple("model.mla.qk_pos_emb_head_dim", self.qk_pos_emb_head_dim, {"the two halves of RoPE": 2})


@dataclass(frozen=True, kw_only=True)
class Model(Part):
    """The shape of a GPT model."""

    _prefix: ClassVar[str] = "model."

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    """Key/value heads. None: as many as heads. Resolved: `query_groups`."""
    kv_channels: int | None = None
    """Size of one head. None: hidden_size / num_attention_heads. Resolved: `head_dim`."""
    ffn_hidden_size: int | None = None
    """None: 4 * hidden_size, with SwiGLU too. Resolved: `ffn_size`."""
    vocab_size: int = 50257
    """Unpadded."""
    make_vocab_size_divisible_by: int = 128
    max_position_embeddings: int | None = None
    """Rows of the learned position table. None: seq_length. Resolved: `Recipe.max_position_embeddings`."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    rotary_base: int = 10000
    rotary_percent: _Share = 1.0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    activation: Literal["gelu", "swiglu"] = "gelu"
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    share_embeddings_and_output_weights: bool = False
    attention_dropout: _Dropout = 0.0
    hidden_dropout: _Dropout = 0.0
    mtp_num_layers: int | None = None
    """Layers that predict further tokens ahead (multi-token prediction). None: no such layers."""
    moe: Moe | None = None
    mla: Mla | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_attention_heads
        if self.mla is not None:
            for name in ("num_query_groups", "kv_channels", "add_qkv_bias"):
                if getattr(self, name):
                    raise BadKey(f"model.{name}", f"{getattr(self, name)} has no meaning with model.mla; leave it out")
            if self.position_embedding_type != "rope":
                problem = f"{self.position_embedding_type!r} is not possible with model.mla, only 'rope'"
                raise BadKey("model.position_embedding_type", problem)
        else:
            check_multiple("model.num_attention_heads", heads, {"model.num_query_groups": self.query_groups})
            if self.kv_channels is None:
                check_multiple(
                    "model.hidden_size", self.hidden_size, {"model.num_attention_heads": heads}, "kv_channels unset"
                )
            # Megatron rotates two halves of these channels.
            rotated = int(self.head_dim * self.rotary_percent)
            if self.position_embedding_type == "rope" and (rotated % 2 or not rotated):
                problem = (
                    f"RoPE needs an even number of rotated channels, not {rotated} (rotary_percent of {self.head_dim})"
                )
                raise BadKey("model.kv_channels", problem)
        if self.moe is not None and not isinstance(self.moe.moe_layer_freq, int):
            length = len(self.moe.moe_layer_freq)
            if length != self.num_layers:
                problem = f"a pattern of {length} layers for model.num_layers {self.num_layers}"
                raise BadKey("model.moe.moe_layer_freq", problem)

    @property
    def query_groups(self) -> int:
        """Key/value heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Channels of one attention head (without MLA)."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner size of a dense MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Inner size of one expert; of a dense MLP when there are no experts."""
        return (self.moe and self.moe.moe_ffn_hidden_size) or self.ffn_size

    def padded_vocab_size(self, tp: int = 1) -> int:
        """Megatron-LM's rule: the next multiple of make_vocab_size_divisible_by * tp."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, with the unpadded vocabulary.

        A learned position table counts with max_position_embeddings rows. Raises `UserError` if that is not set.
        """
        hidden = self.hidden_size
        embedding = self.vocab_size * hidden
        positions = 0
        if self.position_embedding_type == "learned_absolute":
            if self.max_position_embeddings is None:
                raise BadKey("model.max_position_embeddings", "set it to count the parameters of learned positions")
            positions = self.max_position_embeddings * hidden
        norm = self._norm_parameters(hidden)
        pattern = self.moe.layer_pattern(self.num_layers) if self.moe else (0,) * self.num_layers
        layers = [self._layer_parameters(has_experts=kind == 1) for kind in pattern]
        # A layer of multi-token prediction is one of the last layer's make, with a projection of two inputs and norms
        # of both and of the result.
        mtp = (self.mtp_num_layers or 0) * (layers[-1] + 2 * hidden * hidden + 3 * norm)
        output = 0 if self.share_embeddings_and_output_weights else embedding
        return embedding + positions + sum(layers) + norm + mtp + output

    def _layer_parameters(self, *, has_experts: bool) -> int:
        layer = self._attention_parameters() + 2 * self._norm_parameters(self.hidden_size)
        if self.moe is None or not has_experts:
            return layer + self._mlp_parameters(self.ffn_size)
        router = self.hidden_size + self.add_bias_linear
        experts = self.moe.num_moe_experts * (router + self._mlp_parameters(self.expert_ffn_size))
        return layer + experts + self._mlp_parameters(self.moe.moe_shared_expert_intermediate_size or 0)

    def _norm_parameters(self, size: int) -> int:
        return 2 * size if self.normalization == "LayerNorm" else size

    def _mlp_parameters(self, size: int) -> int:
        if not size:
            return 0
        inputs = 2 if self.activation == "swiglu" else 1
        bias = inputs * size + self.hidden_size if self.add_bias_linear else 0
        return (inputs + 1) * self.hidden_size * size + bias

    def _attention_parameters(self) -> int:
        hidden, heads = self.hidden_size, self.num_attention_heads
        output_bias = hidden if self.add_bias_linear else 0
        if self.mla is not None:
            mla = self.mla
            query_size = heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
            query = query_size * (mla.q_lora_rank or hidden) + hidden * (mla.q_lora_rank or 0)
            key_value = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
            key_value += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
            # With MLA, qk_layernorm normalizes the low-rank vectors.
            norms = self._norm_parameters((mla.q_lora_rank or 0) + mla.kv_lora_rank) if self.qk_layernorm else 0
            return query + key_value + norms + heads * mla.v_head_dim * hidden + output_bias
        qkv_size = (heads + 2 * self.query_groups) * self.head_dim
        qkv_bias = qkv_size if self.add_bias_linear or self.add_qkv_bias else 0
        norms = 2 * self._norm_parameters(self.head_dim) if self.qk_layernorm else 0
        return qkv_size * hidden + qkv_bias + norms + heads * self.head_dim * hidden + output_bias

    def shrunk(self, layers: int | None = None, hidden: int | None = None) -> Model:
        """A smaller model of the same make: `layers` layers and hidden size `hidden` (None: as now).

        Head size, vocabulary and the number of experts stay; heads, key/value heads, MLP and expert sizes and the ranks
        of MLA keep their ratio to the hidden size, MLP sizes and ranks rounded to a multiple of 64. A pattern of dense
        and expert layers is thinned out evenly. Raises `UserError` if a size is larger than now, or if `hidden` is not
        a multiple of the head size.
        """
        changes: dict[str, Any] = {}
        moe = self.moe
        if layers is not None:
            _check_shrunk("layers", layers, self.num_layers)
            changes["num_layers"] = layers
            if moe is not None and not isinstance(moe.moe_layer_freq, int):
                pattern = tuple(moe.moe_layer_freq[i * self.num_layers // layers] for i in range(layers))
                moe = dataclasses.replace(moe, moe_layer_freq=pattern)
        if hidden is not None:
            _check_shrunk("hidden", hidden, self.hidden_size)
        if hidden is not None and hidden != self.hidden_size:

            def scaled(size: int | None) -> int | None:
                return None if size is None else max(1, round(size * hidden / self.hidden_size / 64)) * 64

            head_dim = self.mla.v_head_dim if self.mla else self.head_dim
            check_multiple("model.shrunk.hidden", hidden, {"the head size": head_dim})
            heads, rest = divmod(self.num_attention_heads * hidden, self.hidden_size)
            if rest or not heads:
                # No whole number keeps the ratio: a power of two can at least be split by tensor parallelism.
                heads = 1 << max(0, heads.bit_length() - 1)
            changes |= {"hidden_size": hidden, "num_attention_heads": heads}
            changes["ffn_hidden_size"] = scaled(self.ffn_hidden_size)
            if self.mla is not None:
                ranks: dict[str, Any] = {
                    "q_lora_rank": scaled(self.mla.q_lora_rank),
                    "kv_lora_rank": scaled(self.mla.kv_lora_rank),
                }
                changes["mla"] = dataclasses.replace(self.mla, **ranks)
            elif self.num_query_groups is not None:
                groups = max(1, heads * self.num_query_groups // self.num_attention_heads)
                changes["num_query_groups"] = next(g for g in range(groups, 0, -1) if heads % g == 0)
            if moe is not None:
                expert = scaled(moe.moe_ffn_hidden_size)
                shared = moe.moe_shared_expert_intermediate_size
                if shared and moe.moe_ffn_hidden_size and expert and shared % moe.moe_ffn_hidden_size == 0:
                    shared = shared // moe.moe_ffn_hidden_size * expert  # so many experts in one
                else:
                    shared = scaled(shared)
                sizes: dict[str, Any] = {"moe_ffn_hidden_size": expert, "moe_shared_expert_intermediate_size": shared}
                moe = dataclasses.replace(moe, **sizes)
        return dataclasses.replace(self, moe=moe, **changes)


_MOST_GROUPS = 1024
"""Of torch's grouped matrix product (2.14)."""


@dataclass(frozen=True, kw_only=True)
class Parallelism(Part):
    """How the job is split over GPUs."""

    _prefix: ClassVar[str] = "parallelism."

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    vpp: int | None = None
    """Model chunks per pipeline rank, 2 or more. None: no interleaving."""
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """Tensor parallel size of the experts. None: tp. Resolved: `expert_tp`."""
    dp: int = 1
    """Without context parallelism, as Megatron counts it."""
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    num_layers_in_first_pipeline_stage: _AnyInt | None = None
    """None: the layers that other settings leave, spread evenly."""
    num_layers_in_last_pipeline_stage: _AnyInt | None = None
    account_for_embedding_in_pipeline_split: bool = False
    """The embedding counts as a layer when layers are spread over the stages."""
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str = ""
    """Megatron's text for which layer goes where, as in "Et*3|(tt|)*29,m|L": E embedding, t transformer layer, m
    multi-token prediction, L loss, | the end of a stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vpp is not None and self.vpp < 2:
            raise BadKey("parallelism.vpp", f"{self.vpp} is not interleaved; write 2 or more, or leave it out")
        expert_ranks = self.expert_tp * self.ep
        if self.tp * self.cp * self.dp % expert_ranks:
            problem = (
                f"{self.ep} with parallelism.etp {self.expert_tp} makes groups of {expert_ranks} ranks; "
                f"tp * cp * dp ({self.tp * self.cp * self.dp}) is not a multiple of that"
            )
            raise BadKey("parallelism.ep", problem)

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        return self.etp or self.tp

    @property
    def world_size(self) -> int:
        """GPUs of the job."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, kw_only=True)
class Training(Part):
    """Batch, sequence length, precision and number of steps."""

    _prefix: ClassVar[str] = "training."

    micro_batch_size: int = 1
    global_batch_size: int | None = None
    """Samples per step of the whole job. None: micro_batch_size * dp. Resolved: `Recipe.global_batch_size`."""
    seq_length: int = 4096
    steps: int = 3
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    main_grads: Literal["fp32", "bf16"] = "fp32"
    """Type of the gradient buffer."""
    attention_backend: Literal["unfused", "flash", "fused", "auto"] = "unfused"
    """"fused" (cuDNN) and "auto" (its own choice) are Transformer Engine's."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Whose layers: Megatron's own or Transformer Engine's; where that is not installed, on a virtual GPU, equivalents
    for memory."""
    deterministic: bool = False
    masked_softmax_fusion: bool = True
    cross_entropy_loss_fusion: bool = False
    jit_fusion: Literal["stand-in", "compiled", "eager"] = "stand-in"
    """What runs of the functions that Megatron has torch.compile fuse: "compiled", as in a training job; "stand-in", on
    a virtual GPU functions of equal size, which need no compiling, and on a real one the same as "compiled"; "eager",
    the functions themselves, not fused (Megatron-LM's --disable-jit-fuser)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.main_grads == "bf16" and self.precision != "bf16":
            raise BadKey("training.main_grads", f"'bf16' needs training.precision 'bf16', not {self.precision!r}")
        if self.attention_backend in ("fused", "auto") and self.transformer_impl == "local":
            problem = f"{self.attention_backend!r} needs training.transformer_impl 'transformer_engine', not 'local'"
            raise BadKey("training.attention_backend", problem)
        if self.attention_backend in ("flash", "fused") and self.precision == "fp32":
            problem = f"{self.attention_backend!r} needs training.precision 'bf16' or 'fp16', not 'fp32'"
            raise BadKey("training.attention_backend", problem)


@dataclass(frozen=True, kw_only=True)
class Optimizer(Part):
    """The optimizer; its other settings are Megatron's defaults."""

    _prefix: ClassVar[str] = "optimizer."

    kind: Literal["adam", "sgd"] = "adam"
    lr: _Amount = 1e-4
    weight_decay: _Amount = 0.01
    clip_grad: _Amount = 1.0
    """Largest gradient norm; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class Memory(Part):
    """Memory settings."""

    _prefix: ClassVar[str] = "memory."

    alloc_conf: str = ""
    """Text of PYTORCH_CUDA_ALLOC_CONF, as in "expandable_segments:True". PyTorch itself judges names and ranges, and a
    setting that its allocator then does not have makes the measurement fail ("refused")."""
    recompute_granularity: str | None = None
    """"selective", "full"; None: nothing is recomputed."""
    recompute_modules: tuple[str, ...] | None = None
    """With "selective": labels of the installed Megatron Core, which refuses others. An empty list is a control that
    recomputes nothing. None: Megatron's default, core_attn."""
    recompute_method: str | None = None
    """With "full": "uniform" or "block"."""
    recompute_num_layers: _AnyInt | None = None
    """With "full": layers of a group ("uniform"), or layers of each model chunk that are recomputed ("block")."""
    distribute_saved_activations: bool = False
    cpu_offloading: bool = False
    """Activations (or weights) of whole layers wait in host memory for their backward."""
    cpu_offloading_num_layers: _AnyInt | None = None
    """None: 0, Megatron's default."""
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    offload_modules: tuple[str, ...] = ()
    """Modules whose inputs wait in host memory (Megatron's fine-grained activation offloading); labels of the installed
    Megatron Core, which refuses others."""
    min_offloaded_tensor_size: _AnyInt = 1024 * 1024
    """Elements below which a tensor is not offloaded by `offload_modules`."""
    optimizer_cpu_offload: bool = False
    """Optimizer state and step in host memory, for a fraction of the parameters."""
    optimizer_offload_fraction: _Share | None = None
    """None: 1, of all parameters."""
    overlap_cpu_optimizer_d2h_h2d: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_no_duplicates("memory.recompute_modules", self.recompute_modules or ())
        _check_no_duplicates("memory.offload_modules", self.offload_modules)
        try:
            settings = parse_alloc_conf(self.alloc_conf, "memory.alloc_conf")
        except UserError as error:
            raise BadKey("memory.alloc_conf", str(error).removeprefix("memory.alloc_conf: ")) from None
        if settings.get("backend", "native") != "native":
            problem = (
                f"{self.alloc_conf!r}: only the backend 'native' can be measured; PyTorch fixes it when it is loaded"
            )
            raise BadKey("memory.alloc_conf", problem)


DEPENDENTS: Mapping[str, tuple[str, ...]] = {
    "recompute_granularity": (
        "recompute_modules",
        "recompute_method",
        "recompute_num_layers",
        "distribute_saved_activations",
    ),
    "offload_modules": ("min_offloaded_tensor_size",),
    "cpu_offloading": ("cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights"),
    "optimizer_cpu_offload": ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
}
"""Memory settings, and those that have a meaning with a value of theirs alone."""


def _with_dependents(memory: Memory, changes: Mapping[str, object]) -> dict[str, object]:
    """The changes, and the defaults of what depends on a setting that they turn off or to another word, if absent."""
    defaults = {f.name: f.default for f in dataclasses.fields(Memory)}
    left = {
        dependent: defaults[dependent]
        for name, dependents in DEPENDENTS.items()
        if name in changes and getattr(memory, name) and changes[name] != getattr(memory, name)
        # fewer modules to offload are still some, of the same size
        if not changes[name] or isinstance(changes[name], str)
        for dependent in dependents
    }
    return {**left, **changes}


def _check_no_duplicates(key: str, labels: tuple[str, ...]) -> None:
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise BadKey(key, f"{list(labels)} names {', '.join(twice)} twice")


LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


@dataclass(frozen=True, kw_only=True)
class Lora(Part):
    """Low-rank adapters on frozen weights: only the adapters have gradients and optimizer state."""

    _prefix: ClassVar[str] = "lora."

    rank: int = 32
    alpha: _Positive = 32.0
    dropout: _Dropout = 0.0
    targets: tuple[LoraTarget, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    sequence_parallel_input_regather: bool = False
    """Keep only the own shard of the sequence for the gradient of LoRA A, and gather the input again in backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.targets:
            raise BadKey("lora.targets", "an empty list trains nothing")
        _check_no_duplicates("lora.targets", self.targets)


@dataclass(frozen=True, kw_only=True)
class Recipe(Part):
    """All that decides how much memory a training job takes. Equal digests mean: the same job, whatever its name."""

    model: Model
    parallelism: Parallelism = field(default_factory=Parallelism)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    memory: Memory = field(default_factory=Memory)
    lora: Lora | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment variables of the process that runs it, as in {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}."""
    megatron: Mapping[str, Any] = field(default_factory=dict)
    """More settings by Megatron Core's names, as in {"cuda_graph_impl": "local", "fp8": "hybrid"}: fields of its
    TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, each for every class that has it. Values are
    null, true or false, numbers, text and lists of these; types of numbers are "bf16", "fp16", "fp32", and "fp8" of the
    optimizer's state. A setting that the recipe has an own key for is refused."""
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.megatron:
            if name in KEYS:
                raise BadKey(f"megatron.{name}", f"the recipe has its own key for it; write it as {KEYS[name]}")
        for name in self.environment:
            if not re.fullmatch("[A-Z_][A-Z0-9_]*", name):
                problem = f"{name!r} is not a name of capital letters, digits and underscores"
                raise BadKey("environment", problem)
            reason = "the plugin's own" if name.startswith("MBMEM_") else _RESERVED_ENVIRONMENT.get(name)
            if reason:
                raise BadKey(f"environment.{name}", f"may not be set here: {reason}")
        self._check_split()
        self._check_lora()
        self._check_batch()
        self._check_main_grads()

    def _check_main_grads(self) -> None:
        names, now = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}, self.training.main_grads
        asked = self.megatron.get("main_grads_dtype", now)
        if asked not in (now, names[now]):
            problem = f"{show(asked)} differs from training.main_grads, {now!r}, which is the same buffer"
            raise BadKey("megatron.main_grads_dtype", problem)

    def _check_split(self) -> None:
        model, split = self.model, self.parallelism
        repeats = [int(number) for number in re.findall(r"\*(\d+)", split.pipeline_model_parallel_layout)]
        if any(number > model.num_layers for number in repeats):
            problem = f"repeats {max(repeats)} times, with model.num_layers {model.num_layers}"
            raise BadKey("parallelism.pipeline_model_parallel_layout", problem)
        channels = model.head_dim if model.mla is None else model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
        if self.training.attention_backend == "flash" and (channels % 8 or channels > 256):
            key = "model.kv_channels" if model.mla is None else "model.mla.qk_head_dim"
            raise BadKey(key, f"{channels} channels a head; flash attention takes multiples of 8 up to 256")
        if self.training.attention_backend == "flash" and model.mla is not None and model.mla.v_head_dim > channels:
            problem = (
                f"{model.mla.v_head_dim} is more than the {channels} channels of queries; flash attention takes less"
            )
            raise BadKey("model.mla.v_head_dim", problem)
        if model.moe is None:
            return
        moe = model.moe
        if moe.overload > 1:
            if split.ep == 1:
                problem = f"{moe.overload:g} needs parallelism.ep of 2 or more; a single rank receives all tokens"
                raise BadKey("model.moe.overload", problem)
            if moe.moe_expert_capacity_factor is not None:
                problem = f"{moe.overload:g} is not possible with moe_expert_capacity_factor, which drops what is more"
                raise BadKey("model.moe.overload", problem)
            # A token goes to topk different experts, and a rank has only so many.
            topk, local_experts = moe.moe_router_topk, moe.num_moe_experts // split.ep
            most = split.ep * min(topk, local_experts) / topk
            if moe.overload > most:
                problem = f"{moe.overload:g} is more than {most:g}, the most that {topk} of its experts a token allow"
                raise BadKey("model.moe.overload", problem)
            if moe.overload >= split.ep:
                problem = f"{moe.overload:g} leaves no token for the other ranks; allowed is less than {split.ep}"
                raise BadKey("model.moe.overload", problem)
        local = moe.num_moe_experts // split.ep
        if moe.moe_grouped_gemm and local > _MOST_GROUPS:
            problem = f"true with {local} experts a rank; PyTorch's grouped product takes {_MOST_GROUPS} at most"
            raise BadKey("model.moe.moe_grouped_gemm", problem)

    def _check_lora(self) -> None:
        if self.lora is None:
            return
        if self.model.mla is not None and self.lora.targets == ("linear_qkv",):
            raise BadKey("lora.targets", "['linear_qkv'] trains nothing: a model with model.mla has no such layer")
        # Column-parallel layers share A's outputs out over the ranks.
        if {"linear_qkv", "linear_fc1"} & set(self.lora.targets):
            check_multiple("lora.rank", self.lora.rank, {"parallelism.tp": self.parallelism.tp})
        if self.model.moe is not None and "linear_fc1" in self.lora.targets:
            check_multiple("lora.rank", self.lora.rank, {"parallelism.etp": self.parallelism.expert_tp})

    def _check_batch(self) -> None:
        split, training = self.parallelism, self.training
        samples = {"training.micro_batch_size": training.micro_batch_size, "parallelism.dp": split.dp}
        check_multiple("training.global_batch_size", self.global_batch_size, samples)
        if split.cp > 1:
            check_multiple(
                "training.seq_length", training.seq_length, {"parallelism.cp": split.cp, "two parts a rank": 2}
            )
        if (
            self.model.position_embedding_type == "learned_absolute"
            and training.seq_length > self.max_position_embeddings
        ):
            limit = f"model.max_position_embeddings ({self.max_position_embeddings})"
            raise BadKey("training.seq_length", f"{training.seq_length} is more than {limit}")

    @property
    def world_size(self) -> int:
        """GPUs of the job."""
        return self.parallelism.world_size

    @property
    def global_batch_size(self) -> int:
        """Samples per step of the whole job."""
        return self.training.global_batch_size or self.training.micro_batch_size * self.parallelism.dp

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on each data-parallel rank."""
        return self.global_batch_size // (self.training.micro_batch_size * self.parallelism.dp)

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence that the model takes."""
        return self.model.max_position_embeddings or self.training.seq_length

    def not_yet(self) -> list[str]:
        """Why this version cannot measure the recipe; empty if it can."""
        from .unmeasured import reasons

        return reasons(self)

    def but(self, **changes: object) -> Recipe:
        """The same recipe with other values, named without their part: `recipe.but(tp=2, seq_length=1024)`.

        Takes whole parts too (`model=...`); a field given beside its part is set in the new part. Fields of `moe`,
        `mla` and `lora` can be named where the recipe has them. Another `recompute_granularity`, `cpu_offloading=False`
        and `optimizer_cpu_offload=False` set what depends on the former value (see `DEPENDENTS`) back to its default,
        unless it is given too. Raises `UserError` for an unknown name or an impossible value.
        """
        names = setting_names()
        for name in changes:
            if name not in names:
                hint = did_you_mean(name, names) or "a setting of Megatron's without a field goes under megatron={...}"
                raise BadKey("but()", f"{name!r} is not a field of a recipe; {hint}".rstrip())
        memory = changes.get("memory", self.memory)
        if isinstance(memory, Memory):
            changes = _with_dependents(memory, changes)
        result = _replaced(self, changes)
        if changes:
            raise BadKey("but()", f"{', '.join(changes)}: the recipe has no such part")
        return typing.cast(Recipe, result)

    @property
    def digest(self) -> str:
        """16 hex digits of SHA-256 over what was chosen; the same in every process and in later versions.

        The name does not count, nor does a value that is what its field would be if left out, so that a field added
        later with a default leaves all digests as they are.
        """
        text = json.dumps(self._chosen(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __hash__(self) -> int:
        return hash(self.digest)

    def differences(self, other: Recipe) -> dict[str, tuple[object, object]]:
        """Dotted key -> (value here, value there) of all that was chosen differently; empty if the digests are equal.

        Values that were left out are shown as what they come to; None stands for a key that a recipe does not have.
        """
        mine, theirs = dict(self._resolved()), dict(other._resolved())
        keys = sorted(self._chosen().keys() | other._chosen().keys())
        # true and 1 are equal in Python, not in a digest
        return {k: (mine.get(k), theirs.get(k)) for k in keys if repr(mine.get(k)) != repr(theirs.get(k))}

    def _left_out(self) -> dict[str, object]:
        """What the fields whose default depends on other fields come to when they are left out."""
        model, training = self.model, self.training
        return {
            "model.num_query_groups": model.num_attention_heads,
            "model.kv_channels": model.hidden_size // model.num_attention_heads,
            "model.ffn_hidden_size": 4 * model.hidden_size,
            "model.max_position_embeddings": training.seq_length,
            "model.moe.moe_ffn_hidden_size": model.ffn_size,
            "parallelism.etp": self.parallelism.tp,
            "training.global_batch_size": training.micro_batch_size * self.parallelism.dp,
            "memory.cpu_offloading_num_layers": 0,
            "memory.optimizer_offload_fraction": 1.0,
        }

    def _resolved(self) -> Iterator[tuple[str, object]]:
        left_out = self._left_out()
        for key, value, _ in _leaves(self, ""):
            yield key, left_out.get(key) if value is None else value

    def _chosen(self) -> dict[str, object]:
        left_out = self._left_out()
        leaves = _leaves(self, "")
        return {k: v for k, v, default in leaves if v is not None and v != left_out.get(k, default) and k != "name"}

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads back, without what equals its default."""
        return _to_dict(self)

    def to_yaml(self) -> str:
        """Text that `from_yaml` reads back, without what equals its default."""
        from .strict_yaml import to_yaml

        return to_yaml(self.to_dict())

    @classmethod
    def from_dict(cls, data: object, source: str = "recipe") -> Recipe:
        """Make a recipe of nested mappings.

        `model` may be a preset's name, or a mapping with `preset` and perhaps `shrunk: {layers: …, hidden: …}`, whose
        other keys then override the preset's. Raises `UserError`, with `source` in front, for unknown keys, wrong types
        and impossible sizes.
        """
        return _from_dict(data, source, {})

    @classmethod
    def from_yaml(cls, path: str | Path) -> Recipe:
        """Read a recipe file; see `from_dict`. Errors name the line too, and a key given twice is one."""
        from .strict_yaml import read_yaml

        data, lines = read_yaml(path)
        recipe = _from_dict(data, str(path), lines)
        object.__setattr__(recipe, "_origin", (str(path), lines))
        return recipe

    @property
    def origin(self) -> tuple[str, Mapping[str, int]]:
        """What messages call it, and the lines of its keys: its file, if it is as it was read from one."""
        return getattr(self, "_origin", (f"recipe {self.name or self.digest}", {}))


def setting_names() -> list[str]:
    """The names that `Recipe.but` takes: fields of a recipe and of its parts."""
    parts = (Recipe, Model, Moe, Mla, Parallelism, Training, Optimizer, Memory, Lora)
    return [f.name for part in parts for f in dataclasses.fields(part)]


def _leaves(part: Part, prefix: str) -> Iterator[tuple[str, object, object]]:
    """Dotted key, value and default of every field down the tree."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if isinstance(value, Part):
            if f.default is None:
                yield f"{prefix}{f.name}", True, None  # having the part is a choice, even with all its defaults
            yield from _leaves(value, f"{prefix}{f.name}.")
        elif isinstance(value, Mapping):
            # None is no choice in a field, and one in `megatron`
            yield from ((f"{prefix}{f.name}.{k}", "null" if v is None else v, None) for k, v in value.items())
        else:
            yield f"{prefix}{f.name}", value, f.default


def _to_dict(part: Part) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if isinstance(value, Part):
            value = _to_dict(value)
        elif isinstance(value, Mapping):
            value = {k: list(v) if isinstance(v, tuple) else v for k, v in value.items()}
        elif value == f.default:
            continue
        elif isinstance(value, tuple):
            value = list(value)
        # An empty part is one of defaults only, except where None is the default.
        if value != {} or f.default is None:
            data[f.name] = value
    return data


def _replaced(part: Part, changes: dict[str, object]) -> Part:
    """The part with the fields that the changes name, its own or those of the parts in it; these leave the changes."""
    values = {f.name: changes.pop(f.name, getattr(part, f.name)) for f in dataclasses.fields(part)}
    values = {k: _replaced(v, changes) if isinstance(v, Part) else v for k, v in values.items()}
    return type(part)(**values)


def _check_shrunk(name: str, value: object, now: int) -> None:
    if type(value) is not int or not 1 <= value <= now:
        raise BadKey(f"model.shrunk.{name}", f"{show(value)} is not a whole number from 1 to {now}, the size now")


def _from_dict(data: object, source: str, lines: Mapping[str, int]) -> Recipe:
    try:
        return typing.cast(Recipe, _build(Recipe, data, ""))
    except BadKey as error:
        line = lines.get(error.key, lines.get(error.key.rpartition(".")[0]))
        raise UserError(f"{source}{f':{line}' if line else ''}: {error}") from None


def _build(cls: type[Part], data: object, prefix: str, base: object = None) -> object:
    """A part of the keys in the data; those that are absent are the base's, or else the defaults."""
    if not isinstance(data, Mapping):
        raise BadKey(prefix.rstrip(".") or "the whole", f"{show(data)} is not a mapping of keys to values")
    hints = hints_of(cls)
    if cls is Model:
        _check_keys(data, prefix, [*hints, "preset", "shrunk"])
        base, data = _preset(data)
    else:
        _check_keys(data, prefix, list(hints))
    values = {name: getattr(base, name) for name in hints} if base else {}
    for name, value in data.items():
        part = next((a for a in alternatives(hints[name]) if isinstance(a, type) and issubclass(a, Part)), None)
        if part is Model and isinstance(value, str):
            value = {"preset": value}
        if part is not None and not (value is None and type(None) in alternatives(hints[name])):
            value = _build(part, value, f"{prefix}{name}.", values.get(name))
        values[name] = value
    for f in dataclasses.fields(cls):
        if f.name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise BadKey(f"{prefix}{f.name}", "is missing")
    return cls(**values)


def _check_keys(data: Mapping[Any, object], prefix: str, allowed: list[str]) -> None:
    for key in data:
        if key not in allowed:
            shown = key if isinstance(key, str) and key.isprintable() else show(key)
            hint = did_you_mean(key, allowed)
            raise BadKey(f"{prefix}{shown}", f"unknown key; {hint}allowed: {', '.join(allowed)}")


def _preset(data: Mapping[str, object]) -> tuple[Model | None, Mapping[str, object]]:
    """The preset that the keys of a model name, shrunk if they say so, and the other keys."""
    others = {k: v for k, v in data.items() if k not in ("preset", "shrunk")}
    if "preset" not in data:
        if "shrunk" in data:
            raise BadKey("model.shrunk", "needs model.preset, the model to shrink")
        return None, others
    from .models import preset

    try:
        model = preset(data["preset"])
    except UserError as error:
        raise BadKey("model.preset", str(error)) from None
    sizes = data.get("shrunk", {})
    if not isinstance(sizes, Mapping):
        raise BadKey("model.shrunk", f"{show(sizes)} is not a mapping of layers and hidden")
    _check_keys(sizes, "model.shrunk.", ["layers", "hidden"])
    return model.shrunk(**sizes), others
