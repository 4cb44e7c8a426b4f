"""A recipe's settings in Megatron Core's own configuration classes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from ..recipe import Memory, Model, Moe, Recipe
from ..validation import BadKey

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """The model's configuration. Whatever the recipe does not name is as in Megatron-LM's training script.

    Needs no process groups. Raises what Megatron raises (ValueError, AssertionError) where it refuses the settings.
    """
    model, parallelism, training = recipe.model, recipe.parallelism, recipe.training
    dtype = _DTYPES[training.precision]
    swiglu = model.activation == "swiglu"
    config_class = TransformerConfig if model.mla is None else MLATransformerConfig
    config = config_class(
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
        num_layers_in_first_pipeline_stage=parallelism.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallelism.num_layers_in_last_pipeline_stage,
        account_for_embedding_in_pipeline_split=parallelism.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallelism.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=parallelism.pipeline_model_parallel_layout or None,
        mtp_num_layers=model.mtp_num_layers,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=training.deterministic,
        transformer_impl=training.transformer_impl,
        attention_backend=AttnBackend[training.attention_backend],
        masked_softmax_fusion=training.masked_softmax_fusion,
        bias_activation_fusion=_fuses_activation(model),
        bias_dropout_fusion=True,
        apply_rope_fusion=False,  # the fused kernel is Transformer Engine's
        gradient_accumulation_fusion=False,  # the fused kernel is Apex's
        persist_layer_norm=False,  # likewise
        overlap_p2p_comm=parallelism.vpp is not None,  # as in Megatron-LM: overlapped when interleaved
        batch_p2p_comm=parallelism.vpp is None,
        deallocate_pipeline_outputs=True,
        cross_entropy_loss_fusion=training.cross_entropy_loss_fusion,
        **_moe(model.moe),
        **_mla(model),
        **_memory(recipe.memory),
    )
    chunks = config.virtual_pipeline_model_parallel_size
    if chunks != parallelism.vpp:  # of a layout, which Megatron takes the number from
        problem = f"is missing; the layout has {chunks} model chunks on each pipeline stage, write {chunks}"
        raise BadKey("parallelism.vpp", problem)
    return config


def _moe(moe: Moe | None) -> dict[str, Any]:
    if moe is None:
        return {}
    pattern = moe.moe_layer_freq
    return {
        "num_moe_experts": moe.num_moe_experts,
        "moe_router_topk": moe.moe_router_topk,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.moe_shared_expert_intermediate_size,
        "moe_layer_freq": pattern if isinstance(pattern, int) else list(pattern),
        "moe_token_dispatcher_type": moe.moe_token_dispatcher_type,
        "moe_grouped_gemm": moe.moe_grouped_gemm,
        "moe_expert_capacity_factor": moe.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": moe.moe_pad_expert_input_to_capacity,
        "moe_token_drop_policy": moe.moe_token_drop_policy,
        "moe_router_load_balancing_type": moe.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": moe.moe_aux_loss_coeff,
        "moe_z_loss_coeff": moe.moe_z_loss_coeff,
        "moe_router_score_function": moe.moe_router_score_function,
        "moe_router_pre_softmax": moe.moe_router_pre_softmax,
        "moe_router_enable_expert_bias": moe.moe_router_enable_expert_bias,
        "moe_router_dtype": moe.moe_router_dtype,
        "moe_shared_expert_overlap": moe.moe_shared_expert_overlap,
    }


def _fuses_activation(model: Model) -> bool:
    """Whether Megatron has the activation fused: GELU only with its bias, and in experts only SwiGLU without one."""
    swiglu = model.activation == "swiglu"
    return (swiglu or model.add_bias_linear) if model.moe is None else (swiglu and not model.add_bias_linear)


def _mla(model: Model) -> dict[str, Any]:
    mla = model.mla
    if mla is None:
        return {}
    return {
        "multi_latent_attention": True,
        "rope_type": "rope",
        "rotary_base": model.rotary_base,
        "rotary_percent": model.rotary_percent,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_head_dim,
        "qk_pos_emb_head_dim": mla.qk_pos_emb_head_dim,
        "v_head_dim": mla.v_head_dim,
    }


def _memory(memory: Memory) -> dict[str, Any]:
    modules = memory.recompute_modules
    return {
        "recompute_granularity": memory.recompute_granularity,
        "recompute_modules": None if modules is None else list(modules),
        "recompute_method": memory.recompute_method,
        "recompute_num_layers": memory.recompute_num_layers,
        "distribute_saved_activations": memory.distribute_saved_activations,
        "cpu_offloading": memory.cpu_offloading,
        "cpu_offloading_num_layers": memory.cpu_offloading_num_layers or 0,
        "cpu_offloading_activations": memory.cpu_offloading_activations,
        "cpu_offloading_weights": memory.cpu_offloading_weights,
        "fine_grained_activation_offloading": bool(memory.offload_modules),
        "offload_modules": list(memory.offload_modules),
        "min_offloaded_tensor_size": memory.min_offloaded_tensor_size,
    }


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
        optimizer_cpu_offload=recipe.memory.optimizer_cpu_offload,
        optimizer_offload_fraction=recipe.memory.optimizer_offload_fraction,
        overlap_cpu_optimizer_d2h_h2d=recipe.memory.overlap_cpu_optimizer_d2h_h2d,
        use_torch_optimizer_for_cpu_offload=recipe.memory.optimizer_cpu_offload,
        # Megatron-LM's training script asks for it with offload; it needs the distributed optimizer.
        use_precision_aware_optimizer=recipe.memory.optimizer_cpu_offload and parallelism.distributed_optimizer,
    )
