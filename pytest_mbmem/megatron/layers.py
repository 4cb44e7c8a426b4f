"""The parts of Megatron's layer specification that pip's megatron-core lacks without Apex and Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec_for_backend
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import experts, offload


class TorchNorm:
    """torch's LayerNorm or RMSNorm as Megatron builds norms, sequence parallelism included.

    Megatron's own wrapper (`WrappedTorchNorm`, core 0.16) refuses sequence parallelism; all it needs is that the
    parameters are marked, so that their gradients are reduced over the tensor-parallel ranks.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:  # type: ignore[misc]
        norm_class = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = norm_class(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence over a group; gradients are summed back to their shard."""

    @staticmethod
    def forward(ctx, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.group = group
        full = shard.new_empty((shard.size(0) * group.size(), *shard.shape[1:]))
        dist.all_gather_into_tensor(full, shard.contiguous(), group=group)
        return full

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        shard = grad.new_empty((grad.size(0) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(shard, grad.contiguous(), group=ctx.group)
        return shard, None


class FlashAttention(MegatronModule):
    """Causal core attention through PyTorch's flash kernel, for any context-parallel size.

    Under context parallelism each rank holds two chunks of the sequence, the i-th and the i-th from the end, so that
    causal work is balanced (Megatron's order of the shards). Keys and values are gathered (Transformer Engine's
    "all_gather" communication type) and each chunk attends to the keys up to its own end.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale
        self.cp_group = (pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])).cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """From [sequence, batch, heads (or query groups), channels] to [sequence, batch, heads * channels].

        Values may have fewer channels than queries and keys, as in multi-latent attention.
        """
        if self.cp_group.size() == 1:
            context = self._attend(query, key, value)
        else:
            context = self._attend_over_chunks(query, key, value)
        return context.flatten(2)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        channels = v.size(3)
        if channels != q.size(3):
            # PyTorch's flash kernel takes one head size. Kernels for such heads (cuDNN, FlashAttention 3) need neither
            # the padded values nor the result's unused channels, which are kept for backward here.
            v = F.pad(v, (0, q.size(3) - channels))
        dropout = self.dropout if self.training else 0.0
        offload.move_whole(q, k, v)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), get_cuda_rng_tracker().fork():
            if q.size(2) == k.size(2):
                grouped = q.size(1) != k.size(1)
                context = F.scaled_dot_product_attention(
                    q, k, v, dropout_p=dropout, is_causal=True, scale=self.scale, enable_gqa=grouped
                )
            else:
                # The queries are the last of the keys' positions. torch offers that mask as a tensor subclass
                # (torch.nn.attention.bias), which cannot be made under a dispatch mode; this is what it calls.
                context = torch.ops.aten._scaled_dot_product_flash_attention(
                    q, k, v, dropout, True, False, scale=self.scale
                )[0]
        return context[..., :channels].permute(2, 0, 1, 3).contiguous()

    def _attend_over_chunks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        chunk = query.size(0) // 2
        shards = [_GatherSequence.apply(t, self.cp_group).view(size, 2, chunk, *t.shape[1:]) for t in (key, value)]
        # shard i holds chunks i and 2 * size - 1 - i: back into the order of the sequence
        key, value = (torch.cat([s[:, 0].flatten(0, 1), s[:, 1].flip(0).flatten(0, 1)]) for s in shards)
        ends = [(rank + 1) * chunk, (2 * size - rank) * chunk]
        halves = [self._attend(q, key[:end], value[:end]) for q, end in zip(query.split(chunk), ends, strict=True)]
        return torch.cat(halves)


class UnfusedAttention(DotProductAttention):
    """Megatron's own core attention, for values with fewer channels than queries and keys too."""

    def __init__(self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class DuplicatedLinear(MegatronModule):
    """A linear that every tensor-parallel rank has whole, as Transformer Engine's with parallel mode "duplicated".

    It takes this rank's part of the sequence, so with sequence parallelism its gradients are summed over the ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        parallel_mode: str,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert parallel_mode == "duplicated"
        assert not bias
        weight = torch.empty(output_size, input_size, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                init_method(self.weight)
        self.weight.allreduce = True  # type: ignore[attr-defined]
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """From [sequence, batch, in] to [sequence, batch, out]."""
        return F.linear(hidden, self.weight), None

    def backward_dw(self) -> None:
        """Nothing: weight gradients are never delayed here."""


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's MLA with norms and linears apart.

    Core 0.19 puts the norms of low-rank vectors into Transformer Engine's linears by itself, and one on the queries'
    input where they have no low rank; the modules of its own specification, as in core 0.16, are taken here.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class Backend(experts.Backend):
    """Where Megatron's specifications take their modules from: its local ones, with norms and experts from here."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        """Which norm."""
        return TorchNorm


def layer_spec(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    """One transformer layer, dense or with experts: Megatron's local specification with the parts above."""
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention
    parts = attention.submodules
    for norm in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if getattr(parts, norm, IdentityOp) is not IdentityOp:
            setattr(parts, norm, TorchNorm)
    if config.multi_latent_attention:
        attention.module = LatentAttention
        parts.linear_q_down_proj = parts.linear_kv_down_proj = DuplicatedLinear
        parts.core_attention = UnfusedAttention
    if config.attention_backend is AttnBackend.flash:
        parts.core_attention = FlashAttention
    if config.transformer_impl == "transformer_engine":
        from . import te_equivalents  # which has subclasses of what is here

        flash = config.attention_backend is AttnBackend.flash
        parts.core_attention = te_equivalents.FlashAttention if flash else te_equivalents.UnfusedAttention
    if has_experts:
        layer.submodules.mlp = get_moe_module_spec_for_backend(
            Backend(), num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
    return layer


def _layer_specs(config: TransformerConfig) -> list[ModuleSpec]:
    """All layers of the model."""
    frequency = config.moe_layer_freq
    if config.num_moe_experts is None:
        pattern = [0] * config.num_layers
    elif isinstance(frequency, int):
        pattern = [int(layer % frequency == 0) for layer in range(config.num_layers)]
    else:
        pattern = frequency
    kinds = {kind: layer_spec(config, has_experts=bool(kind)) for kind in set(pattern)}
    return [kinds[kind] for kind in pattern]


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk of this rank's pipeline stage. May be empty."""
    # Megatron's MLA knows a linear that is not split by this name; Transformer Engine's is not used (core 0.16).
    multi_latent_attention.TELinear = DuplicatedLinear
    layers = _layer_specs(config)
    if config.pipeline_model_parallel_layout is not None:
        own = config.pipeline_model_parallel_layout.get_layer_id_list(vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        own = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    return TransformerBlockSubmodules(layer_specs=[layers[i] for i in own], layer_norm=TorchNorm)


def mtp_spec(config: TransformerConfig, vp_stage: int | None) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token prediction layers of one model chunk, of the last layer's make; None where there are none."""
    if config.mtp_num_layers is None:
        return None
    return get_gpt_mtp_block_spec_for_backend(config, _layer_specs(config)[-1], Backend(), vp_stage=vp_stage)


def forget_logged_losses() -> None:
    """Empty what Megatron collects for its logs, on the device and sized by the first model of the process."""
    MTPLossLoggingHelper.tracker.clear()
    losses = getattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", None)  # core 0.16
    (moe_utils.get_moe_metrics_tracker().metrics if losses is None else losses).clear()
