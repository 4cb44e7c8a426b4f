"""The parts of Megatron's layer specification that pip's megatron-core lacks without Apex and Transformer Engine."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn.attention import SDPBackend, sdpa_kernel


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
        """From [sequence, batch, heads (or query groups), channels] to [sequence, batch, heads * channels]."""
        if self.cp_group.size() == 1:
            context = self._attend(query, key, value)
        else:
            context = self._attend_over_chunks(query, key, value)
        return context.flatten(2)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        dropout = self.dropout if self.training else 0.0
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
        return context.permute(2, 0, 1, 3).contiguous()

    def _attend_over_chunks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        size, rank = self.cp_group.size(), self.cp_group.rank()
        chunk = query.size(0) // 2
        shards = [_GatherSequence.apply(t, self.cp_group).view(size, 2, chunk, *t.shape[1:]) for t in (key, value)]
        # shard i holds chunks i and 2 * size - 1 - i: back into the order of the sequence
        key, value = (torch.cat([s[:, 0].flatten(0, 1), s[:, 1].flip(0).flatten(0, 1)]) for s in shards)
        ends = [(rank + 1) * chunk, (2 * size - rank) * chunk]
        halves = [self._attend(q, key[:end], value[:end]) for q, end in zip(query.split(chunk), ends, strict=True)]
        return torch.cat(halves)


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk: Megatron's local specification with the parts above."""
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = TorchNorm
    layer.submodules.pre_mlp_layernorm = TorchNorm
    attention = layer.submodules.self_attention.submodules
    for norm in ("q_layernorm", "k_layernorm"):
        if getattr(attention, norm) is not IdentityOp:
            setattr(attention, norm, TorchNorm)
    if config.attention_backend is AttnBackend.flash:
        attention.core_attention = FlashAttention
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=TorchNorm)
