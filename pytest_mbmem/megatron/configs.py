"""A recipe's settings in Megatron Core's own configuration classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from ..recipe import Recipe

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """The model's configuration. Whatever the recipe does not name is as in Megatron-LM's training script."""
    model, parallelism, training = recipe.model, recipe.parallelism, recipe.training
    dtype = _DTYPES[training.precision]
    swiglu = model.activation == "swiglu"
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        add_bias_linear=model.add_bias_linear,
        add_qkv_bias=model.add_qkv_bias,
        gated_linear_unit=swiglu,
        activation_func=F.silu if swiglu else F.gelu,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        tensor_model_parallel_size=parallelism.tp,
        sequence_parallel=parallelism.sequence_parallel,
        pipeline_model_parallel_size=parallelism.pp,
        virtual_pipeline_model_parallel_size=parallelism.vpp,
        context_parallel_size=parallelism.cp,
        expert_model_parallel_size=parallelism.ep,
        expert_tensor_parallel_size=parallelism.etp,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=training.deterministic,
        attention_backend=AttnBackend[training.attention_backend],
        masked_softmax_fusion=training.masked_softmax_fusion,
        bias_activation_fusion=swiglu or model.add_bias_linear,  # Megatron fuses GELU only together with its bias
        bias_dropout_fusion=True,
        apply_rope_fusion=False,  # the fused kernel is Transformer Engine's
        gradient_accumulation_fusion=False,  # the fused kernel is Apex's
        persist_layer_norm=False,  # likewise
        overlap_p2p_comm=parallelism.vpp is not None,  # as in Megatron-LM: overlapped when interleaved
        batch_p2p_comm=parallelism.vpp is None,
        deallocate_pipeline_outputs=True,
    )


def ddp_config(recipe: Recipe) -> DistributedDataParallelConfig:
    """Gradient buffers and their reduction."""
    parallelism = recipe.parallelism
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=recipe.training.main_grads == "fp32",
        overlap_grad_reduce=parallelism.overlap_grad_reduce,
        overlap_param_gather=parallelism.overlap_param_gather,
        use_distributed_optimizer=parallelism.distributed_optimizer,
    )


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """The optimizer and its mixed-precision wrapper."""
    optimizer, training, parallelism = recipe.optimizer, recipe.training, recipe.parallelism
    return OptimizerConfig(
        optimizer=optimizer.kind,
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        params_dtype=_DTYPES[training.precision],
        use_distributed_optimizer=parallelism.distributed_optimizer,
        overlap_param_gather=parallelism.overlap_param_gather,
    )
