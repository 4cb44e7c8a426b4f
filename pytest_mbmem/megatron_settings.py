"""A recipe in Megatron Core's own words: flat settings by the names of its configuration classes, as plain values.

Knows neither torch nor Megatron: a type of numbers is "bf16", "fp16" or "fp32", an enumeration's member its name, a
function its name. `megatron/configs.py` makes Megatron's objects of the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .installed import versions_of

if TYPE_CHECKING:
    from .recipe import Model, Recipe


def _same(part: str, *names: str) -> dict[str, str]:
    """Fields of a part of the recipe that have Megatron's names."""
    return {name: f"{part}.{name}" for name in names}


# Megatron's name -> the recipe's key with the same value
_TRANSFORMER = {
    **_same("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    **_same("model", "kv_channels", "normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias"),
    **_same("model", "attention_dropout", "hidden_dropout", "mtp_num_layers"),
    "tensor_model_parallel_size": "parallelism.tp",
    "sequence_parallel": "parallelism.sequence_parallel",
    "pipeline_model_parallel_size": "parallelism.pp",
    "virtual_pipeline_model_parallel_size": "parallelism.vpp",
    "context_parallel_size": "parallelism.cp",
    "expert_model_parallel_size": "parallelism.ep",
    "expert_tensor_parallel_size": "parallelism.etp",
    **_same("parallelism", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    **_same("parallelism", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    **_same("parallelism", "pipeline_model_parallel_layout"),
    "params_dtype": "training.precision",
    "pipeline_dtype": "training.precision",
    "deterministic_mode": "training.deterministic",
    **_same("training", "transformer_impl", "attention_backend", "masked_softmax_fusion", "cross_entropy_loss_fusion"),
    **_same("memory", "recompute_granularity", "recompute_modules", "recompute_method", "recompute_num_layers"),
    **_same("memory", "distribute_saved_activations", "cpu_offloading", "cpu_offloading_num_layers"),
    **_same("memory", "cpu_offloading_activations", "cpu_offloading_weights"),
    **_same("memory", "offload_modules", "min_offloaded_tensor_size"),
}
_MOE = {
    **_same("model.moe", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
    **_same("model.moe", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap", "moe_grouped_gemm"),
    **_same("model.moe", "moe_token_dispatcher_type", "moe_token_drop_policy", "moe_expert_capacity_factor"),
    **_same("model.moe", "moe_pad_expert_input_to_capacity", "moe_router_load_balancing_type", "moe_router_dtype"),
    **_same("model.moe", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_score_function"),
    **_same("model.moe", "moe_router_pre_softmax", "moe_router_enable_expert_bias"),
}
_MLA = {
    **_same("model", "rotary_base", "rotary_percent"),
    **_same("model.mla", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
}
_DDP = {
    **_same("parallelism", "overlap_grad_reduce", "overlap_param_gather"),
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
}
_OPTIMIZER = {
    "optimizer": "optimizer.kind",
    **_same("optimizer", "lr", "weight_decay", "clip_grad"),
    "params_dtype": "training.precision",
    "use_distributed_optimizer": "parallelism.distributed_optimizer",
    **_same("parallelism", "overlap_param_gather"),
    **_same("memory", "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
}
_LORA = {
    f"lora_{name}": f"lora.{name}"
    for name in ("rank", "alpha", "dropout", "targets", "sequence_parallel_input_regather")
}

KEYS: Mapping[str, str] = {
    **_TRANSFORMER,
    **_MOE,
    **_MLA,
    **_DDP,
    **_OPTIMIZER,
    **_LORA,
    # settings that follow from a field
    "bf16": "training.precision",
    "fp16": "training.precision",
    "gated_linear_unit": "model.activation",
    "activation_func": "model.activation",
    "multi_latent_attention": "model.mla",
    "fine_grained_activation_offloading": "memory.offload_modules",
    "grad_reduce_in_fp32": "training.main_grads",
    # arguments of Megatron's model, and what is no setting of Megatron's
    "position_embedding_type": "model.position_embedding_type",
    **_same("training", "seq_length", "micro_batch_size", "global_batch_size"),
    "data_parallel_size": "parallelism.dp",
    "alloc_conf": "memory.alloc_conf",
    "NCCL_GRAPH_REGISTER": "environment.NCCL_GRAPH_REGISTER",
}
"""Megatron's name -> the recipe's own key, of every setting that the recipe has a field for."""


def transformer_settings(recipe: Recipe) -> dict[str, Any]:
    """What `TransformerConfig` is made with, `recipe.megatron` aside.

    Whatever the recipe does not name is as in Megatron-LM's training script.
    """
    model, parallelism = recipe.model, recipe.parallelism
    swiglu = model.activation == "swiglu"
    found = {
        **_values(recipe, _TRANSFORMER),
        **_precision(recipe),
        "gated_linear_unit": swiglu,
        "activation_func": "silu" if swiglu else "gelu",
        "pipeline_model_parallel_layout": parallelism.pipeline_model_parallel_layout or None,
        "cpu_offloading_num_layers": recipe.memory.cpu_offloading_num_layers or 0,
        "fine_grained_activation_offloading": bool(recipe.memory.offload_modules),
        "bias_activation_fusion": _fuses_activation(model),
        "bias_dropout_fusion": True,
        "apply_rope_fusion": _fuses_rope(recipe),
        "gradient_accumulation_fusion": False,  # the fused kernel is Apex's
        "persist_layer_norm": False,  # likewise
        "overlap_p2p_comm": parallelism.vpp is not None,  # as in Megatron-LM: overlapped when interleaved
        "batch_p2p_comm": parallelism.vpp is None,
        "deallocate_pipeline_outputs": True,
    }
    if model.moe is not None:
        found |= _values(recipe, _MOE)
    if model.mla is not None:
        found |= {**_values(recipe, _MLA), "multi_latent_attention": True, "rope_type": "rope"}
    return found


def ddp_settings(recipe: Recipe) -> dict[str, Any]:
    """What `DistributedDataParallelConfig` is made with, `recipe.megatron` aside."""
    return {**_values(recipe, _DDP), "grad_reduce_in_fp32": recipe.training.main_grads == "fp32"}


def optimizer_settings(recipe: Recipe) -> dict[str, Any]:
    """What `OptimizerConfig` is made with, `recipe.megatron` aside."""
    offload, fraction = recipe.memory.optimizer_cpu_offload, recipe.memory.optimizer_offload_fraction
    precision_aware = recipe.megatron.get("use_precision_aware_optimizer")
    return {
        **({"main_grads_dtype": recipe.training.main_grads} if precision_aware else {}),
        **_values(recipe, _OPTIMIZER),
        **_precision(recipe),
        "optimizer_offload_fraction": float(offload) if fraction is None else fraction,
        "use_torch_optimizer_for_cpu_offload": offload,
        # Megatron-LM's training script asks for it with offload; it needs the distributed optimizer.
        "use_precision_aware_optimizer": offload and recipe.parallelism.distributed_optimizer,
    }


def settings(recipe: Recipe) -> dict[str, Any]:
    """All that Megatron, PyTorch's allocator and NCCL are told: what a documented constraint may ask for.

    Settings of all configuration classes, `recipe.megatron` included; the batch; "alloc_conf", the text of the
    allocator's settings; "NCCL_GRAPH_REGISTER", "" if the recipe's environment does not have it; and with LoRA its
    fields, as in "lora_rank".
    """
    return {
        **transformer_settings(recipe),
        **ddp_settings(recipe),
        **optimizer_settings(recipe),
        **added(recipe),
        "seq_length": recipe.training.seq_length,
        "micro_batch_size": recipe.training.micro_batch_size,
        "global_batch_size": recipe.global_batch_size,
        "data_parallel_size": recipe.parallelism.dp,
        "alloc_conf": recipe.memory.alloc_conf,
        "NCCL_GRAPH_REGISTER": recipe.environment.get("NCCL_GRAPH_REGISTER", ""),
        **(_values(recipe, _LORA) if recipe.lora is not None else {}),
    }


_TOGETHER = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}
"""Parameters of few bits: a setting of the model -> that of its buffers. Megatron-LM's training script has one argument
for both."""


def added(recipe: Recipe) -> dict[str, Any]:
    """The settings of `recipe.megatron`, each a value of its own, and those that Megatron-LM sets with one of them."""
    found = {name: _plain(value) for name, value in recipe.megatron.items()}
    for one, other in _TOGETHER.items():
        if (one in found) != (other in found):
            found |= {one: found[one], other: found[one]} if one in found else {one: found[other]}
    return found


def _values(recipe: Recipe, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: _plain(attrgetter(key)(recipe)) for name, key in keys.items()}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _precision(recipe: Recipe) -> dict[str, bool]:
    return {name: recipe.training.precision == name for name in ("bf16", "fp16")}


def has_te_layers(recipe: Recipe) -> bool:
    """Whether the model is made of Transformer Engine's own layers: it asks for them, and they are installed."""
    return recipe.training.transformer_impl == "transformer_engine" and bool(versions_of(["transformer-engine"]))


def _fuses_rope(recipe: Recipe) -> bool:
    """Whether RoPE is Transformer Engine's kernel: Megatron-LM's default, which Megatron refuses with MLA's RoPE."""
    return has_te_layers(recipe) and recipe.model.position_embedding_type == "rope" and recipe.model.mla is None


def _fuses_activation(model: Model) -> bool:
    """Whether Megatron has the activation fused: GELU only with its bias, and in experts only SwiGLU without one."""
    swiglu = model.activation == "swiglu"
    return (swiglu or model.add_bias_linear) if model.moe is None else (swiglu and not model.add_bias_linear)
