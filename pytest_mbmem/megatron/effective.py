"""Which memory settings of a recipe have something in the built model that acts on them, and why the others do not.

Looks at the modules themselves: Megatron's keep what they do as attributes, of the same names in core 0.16 to 0.19. Of
a label that is not known here nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..measurement import Effect
from . import offload, te_equivalents

if TYPE_CHECKING:
    from .model import LiveModel


def effects(model: LiveModel) -> tuple[Effect, ...]:
    """What became of each memory setting that the model's recipe asks for, named as `measure.effects.probes` does."""
    built = _Built([module for chunk in model.chunks for module in chunk.modules()])
    return (*_recompute(model, built), *_offload(model, built))


@dataclass(frozen=True)
class _Built:
    """All modules of a rank's model chunks."""

    modules: list[Any]

    def of(self, kind: type) -> list[Any]:
        return [module for module in self.modules if isinstance(module, kind)]

    @property
    def layers(self) -> str:
        """How many there are, as in "the 2 layers"."""
        count = len(self.of(TransformerLayer))
        return f"the {count} layers" if count != 1 else "the only layer"


# --- labels ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Label:
    """A label of selective recompute or of offload by module."""

    is_there: Callable[[Any], bool]  # whether a module is one that it could act on
    attributes: tuple[str, ...]  # of a module in which one of them is true, it acts
    missing: Callable[[_Built], str]  # why no module is such a one

    def effect(self, setting: str, built: _Built, hint: str = "") -> Effect:
        there = [module for module in built.modules if self.is_there(module)]
        acting = sum(any(getattr(module, name, False) for name in self.attributes) for module in there)
        if acting:
            return Effect(setting, True, acting, hint)
        off = f"Megatron turned it off in the {len(there)} modules that could do it"
        return Effect(setting, False, 0, off if there else self.missing(built))


def _has(*names: str) -> Callable[[Any], bool]:
    """Of a layer that has one of these modules, and not in the linear after it."""
    return lambda module: (
        isinstance(module, TransformerLayer)
        and any(
            not isinstance(getattr(module, name), IdentityOp)
            for name in set(names) - set(te_equivalents.norms_in_linears(module))
        )
    )


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda module: isinstance(module, kind)


def _knows(attribute: str) -> Callable[[Any], bool]:
    return lambda module: hasattr(module, attribute)


def _lacks(what: str) -> Callable[[_Built], str]:
    return lambda built: f"{what} in {built.layers}"


def _no_shared_expert(built: _Built) -> str:
    return _lacks("no shared expert beside the experts" if built.of(MoELayer) else "no experts")(built)


def _not_grouped(built: _Built) -> str:
    return _lacks("no grouped experts (moe_grouped_gemm)" if built.of(MoELayer) else "no experts")(built)


_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_FUSED = _lacks("no norm that is a module of its own")

_RECOMPUTE = {
    "core_attn": _Label(_is(Attention), ("checkpoint_core_attention",), _lacks("no attention")),
    "layernorm": _Label(_has(*_NORMS), ("recompute_input_layernorm", "recompute_pre_mlp_layernorm"), _FUSED),
    "mlp": _Label(
        lambda m: isinstance(m, TransformerLayer) and not isinstance(m.mlp, MoELayer | IdentityOp),
        ("recompute_mlp",),
        lambda built: _lacks("only experts and no dense MLP" if built.of(MoELayer) else "no dense MLP")(built),
    ),
    # of the layer around it where the router has a CUDA graph of its own
    "moe": _Label(
        lambda m: isinstance(m, MoELayer) or getattr(m, "moe_layer_recompute", False),
        ("moe_layer_recompute",),
        _lacks("no experts"),
    ),
    "shared_experts": _Label(
        lambda m: isinstance(m, MoELayer) and m.use_shared_expert,
        ("shared_experts_recompute",),
        _no_shared_expert,
    ),
    "moe_act": _Label(_knows("activation_recompute"), ("activation_recompute",), _not_grouped),
    "mla_up_proj": _Label(_knows("recompute_up_proj"), ("recompute_up_proj",), _lacks("no multi-latent attention")),
    "gdn_norm_out": _Label(_knows("recompute_norm_out"), ("recompute_norm_out",), _lacks("no gated delta net")),
}

_OFFLOAD = {
    "attn_norm": _Label(_has("input_layernorm"), ("offload_attn_norm",), _FUSED),
    "mlp_norm": _Label(_has("pre_mlp_layernorm"), ("offload_mlp_norm",), _FUSED),
    "qkv_linear": _Label(_is(Attention), ("offload_qkv_linear",), _lacks("no attention")),
    "core_attn": _Label(_is(Attention), ("offload_core_attention",), _lacks("no attention")),
    "attn_proj": _Label(_is(Attention), ("offload_attn_proj",), _lacks("no attention")),
    **{
        label: _Label(_knows(f"offload_{label}"), (f"offload_{label}",), _not_grouped)
        for label in ("expert_fc1", "moe_act", "fused_group_mlp")
    },
}


# --- settings --------------------------------------------------------------------------------------------------------


def _recompute(model: LiveModel, built: _Built) -> Iterator[Effect]:
    memory = model.recipe.memory
    if memory.recompute_granularity == "full":
        yield from _full_recompute(model, built)
    if memory.recompute_granularity != "selective":
        return
    if memory.recompute_modules is None:
        yield _RECOMPUTE["core_attn"].effect("memory.recompute_granularity 'selective' (core_attn)", built)
    for label in memory.recompute_modules or ():
        if label in _RECOMPUTE:
            yield _RECOMPUTE[label].effect(f"memory.recompute_modules {label!r}", built)


def _full_recompute(model: LiveModel, built: _Built) -> Iterator[Effect]:
    config = model.config
    asked = config.recompute_num_layers
    chunks = [len(block.layers) for block in built.of(TransformerBlock)]
    is_block = config.recompute_method == "block"
    recomputed = sum(max(0, min(asked, layers)) if is_block else layers for layers in chunks)
    if not is_block:
        recomputed += len(built.of(MultiTokenPredictionLayer))  # none with "block", of which Megatron warns
    setting = "memory.recompute_granularity 'full'"
    if not recomputed:
        reason = f"recompute_num_layers {asked}: no layer is recomputed" if sum(chunks) else "no transformer layer"
        yield Effect(setting, False, 0, reason)
    else:
        yield Effect(setting, True, recomputed)
        largest = max(chunks, default=0)
        what = "the stage has" if len(chunks) == 1 else "the largest model chunk of the stage has"
        reason = f"{what} {largest} layer{'s' * (largest != 1)}, so it comes to {largest}" if asked > largest else ""
        if largest:
            yield Effect(f"memory.recompute_num_layers {asked}", not reason, min(asked, largest), reason)
    if config.distribute_saved_activations:
        shared = recomputed if config.tensor_model_parallel_size > 1 else 0
        alone = "no other tensor-parallel rank" if recomputed else "no layer is recomputed"
        yield Effect("memory.distribute_saved_activations", shared > 0, shared, "" if shared else alone)


def _offload(model: LiveModel, built: _Built) -> Iterator[Effect]:
    memory, config = model.recipe.memory, model.config
    if config.cpu_offloading:
        layers = sum(min(config.cpu_offloading_num_layers, len(block.layers)) for block in built.of(TransformerBlock))
        older = offload.is_older_context()
        stay = f"tensors of fewer than {offload.FEWEST_ELEMENTS} elements stay"
        if older:
            stay = "tensors that Transformer Engine does not mark stay"
        none = f"cpu_offloading_num_layers {config.cpu_offloading_num_layers}: no layer is offloaded"
        yield Effect("memory.cpu_offloading", layers > 0, layers, stay if layers else none)
        if getattr(config, "cpu_offloading_double_buffering", False):
            gone = "" if older else "only Transformer Engine's older layer offload has it (NVTE_CPU_OFFLOAD_V1=1)"
            yield Effect("megatron.cpu_offloading_double_buffering", older, layers if older else 0, gone)
    smallest = memory.min_offloaded_tensor_size
    stay = f"tensors of fewer than {smallest} elements (min_offloaded_tensor_size) stay" if smallest > 1 else ""
    recomputed = any(attention.checkpoint_core_attention for attention in built.of(Attention))
    for label in memory.offload_modules:
        if label in _OFFLOAD:
            hint = "its tensors are recomputed (recompute_modules)" if recomputed and label == "core_attn" else stay
            yield _OFFLOAD[label].effect(f"memory.offload_modules {label!r}", built, hint)
    if memory.optimizer_cpu_offload:
        parts = [part.optimizer for part in getattr(model.optimizer, "chained_optimizers", [model.optimizer])]
        on_host = sum(len(p.gpu_params_map_cpu_copy) for p in parts if isinstance(p, HybridDeviceOptimizer))
        yield Effect(
            "memory.optimizer_cpu_offload", on_host > 0, on_host, "" if on_host else "no parameter on the host"
        )
