"""What Megatron Core takes and this version cannot measure honestly: it would be without effect, or end in an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from . import graph_settings
from .megatron_settings import has_te_layers

if TYPE_CHECKING:
    from .recipe import Recipe

_OF_TE = "Transformer Engine's own modules do it: install it, and write training.transformer_impl: transformer_engine"

_OWN_CP = "context parallelism here gathers keys and values"

_NOT_MEASURED: Mapping[str, tuple[str, ...]] = {
    "it is an older name of cuda_graph_impl, which is measured": ("enable_cuda_graph", "external_cuda_graph"),
    "the optimizer's step is captured nowhere here, so that the memory of its pool would be missing": (
        "optimizer_cuda_graph",
    ),
    _OF_TE: (
        "fp8",
        "fp8_param",
        "fp8_param_gather",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "fp4",
        "fp4_param",
        "fp4_param_gather",
        "use_te_activation_func",
        "cpu_offloading_double_buffering",
    ),
    "the training loop reads the logits that it keeps after each step, and drops them": (
        "log_max_attention_logit",
        "qk_clip",
    ),
    "its buffers are shared between the ranks outside of PyTorch, which a rank that runs alone cannot do": (
        "tp_comm_overlap",
    ),
    "the layers here are Transformer Engine's modules, not its operations": ("use_transformer_engine_op_fuser",),
    "NCCL's registered buffers are outside of what a virtual GPU counts": ("nccl_ub",),
    "it needs a schedule plan of the model, which the training step here does not make": (
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "ep_overlap_early_attn_memory_release",
        "overlap_dispatch_backward_with_experts_wgrad",
    ),
    "the model is wrapped in Megatron's DistributedDataParallel alone": (
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "fsdp_double_buffer",
        "fsdp_manual_registration",
        "init_model_with_meta_device",
    ),
    "the process groups that it needs are not made here": (
        "num_distributed_optimizer_instances",
        "hierarchical_context_parallel_sizes",
        "hybrid_context_parallel",
        "max_seqlen_per_dp_cp_rank",
        "gtp_weight_remat_size",
        "expert_gtp_weight_remat_size",
        "pipeline_model_parallel_comm_backend",
    ),
    "the model is built of Megatron's plain GPT layers": (
        "experimental_attention_variant",
        "heterogeneous_block_specs",
        "is_hybrid_model",
        "use_kitchen",
        "use_kitchen_attention",
    ),
    "Megatron then sends sizes between the stages, and a rank that runs alone receives none": ("variable_seq_lengths",),
    _OWN_CP: ("cp_comm_type",),
    "the forward step here does not take what Megatron's schedule hands it then": (
        "num_microbatches_with_partial_activation_checkpoints",
    ),
    "PyTorch checks its random numbers, and a virtual GPU computes none": ("moe_input_jitter_eps",),
}
"""Why -> settings of `Recipe.megatron` that this holds for (tried with megatron-core 0.16.1)."""

_OFF: Mapping[str, tuple[object, ...]] = {
    "data_parallel_sharding_strategy": ("no_shard",),
    "outer_dp_sharding_strategy": ("no_shard",),
    "num_distributed_optimizer_instances": (1,),
    "gtp_weight_remat_size": (1,),
    "expert_gtp_weight_remat_size": (1,),
    "pipeline_model_parallel_comm_backend": ("nccl",),
    "cp_comm_type": ("all_gather",),
}
"""Values, beside null and false, with which a setting asks for nothing."""


_READ_ON_IMPORT = frozenset(
    ("NVTE_BACKWARD_OVERRIDE", "NVTE_NVFP4_DISABLE_RHT", "NVTE_NVFP4_ROW_SCALED_ACTIVATION", "NVTE_PLUGIN")
)
"""Variables of Transformer Engine 2.20 that change what it allocates, and that it reads when it is imported."""


def reasons(recipe: Recipe) -> list[str]:
    """Why this version cannot measure the recipe, each with its keys; empty if it can."""
    found = []
    split, backend = recipe.parallelism, recipe.training.attention_backend
    if split.cp > 1 and backend == "unfused":
        found.append("parallelism.cp with training.attention_backend unfused: unfused attention has no CP")
    layout = split.pipeline_model_parallel_layout
    if "m" in layout and "m" not in layout.rpartition("|")[2]:
        found.append(
            "parallelism.pipeline_model_parallel_layout with m before the last stage: Megatron then sends sizes "
            "between the stages, and a rank that runs alone receives none"
        )
    if split.cp > 1 and backend == "flash" and has_te_layers(recipe):
        found.append(
            "parallelism.cp with training.attention_backend flash of Transformer Engine: the parts of flash-attn that "
            "it calls then have no equivalent here; fused and auto can be measured"
        )
    for name in sorted(_READ_ON_IMPORT & set(recipe.environment)):
        found.append(f"environment.{name}: Transformer Engine reads it when it is loaded, which is not for each recipe")
    found += graph_settings.reasons(recipe)
    for why, names in _NOT_MEASURED.items():
        if why in (_OF_TE, _OWN_CP) and has_te_layers(recipe):
            continue
        asked = [f"megatron.{name}" for name in names if _is_asked_for(recipe, name)]
        if asked:
            found.append(f"{', '.join(asked)}: {why}")
    return found


def _is_asked_for(recipe: Recipe, name: str) -> bool:
    return recipe.megatron.get(name) not in (None, False, *_OFF.get(name, ()))
