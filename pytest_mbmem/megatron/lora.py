"""LoRA: frozen weights and low-rank adapters beside them, made of Megatron's parallel layers as in Megatron Bridge.

An adapter adds `alpha / rank * B(A(dropout(x)))` to the output of its linear layer. A is shared out over the
tensor-parallel ranks as the linear layer is: by its outputs where that one is column-parallel, by its inputs where it
is row-parallel. B is always shared out by its outputs. A starts random (Xavier), B zero.

Under sequence parallelism a column-parallel layer's input is gathered for A, whose weight gradient needs it: the whole
input is retained until backward. With input re-gather only the rank's own shard is, and backward gathers again
(Megatron's `LinearWithGradAccumulationAndAsyncCommunication`, through its global memory buffer).

Transformer Engine's linears have the same adapters. One with its norm in it returns the norm's output beside its own,
which is what A takes. Without re-gather it returns it gathered, and retains its own shard of it as well, although a
frozen weight needs none (`return_layernorm_output` of transformer_engine.pytorch.LayerNormLinear, 2.20). So do the
equivalents for memory where it is not installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer import TransformerConfig

from ..measurement import Adapter
from ..recipe import Lora
from . import te_equivalents
from .experts import GroupedLinear

TargetLinear: TypeAlias = ColumnParallelLinear | RowParallelLinear | GroupedLinear


def _of_te(*names: str) -> tuple[type, ...]:
    """Megatron's classes over Transformer Engine's, which exist where that is installed."""
    return tuple(getattr(te_extension, name) for name in names) if te_extension.HAVE_TE else ()


_TE_WITH_NORM = _of_te("TELayerNormColumnParallelLinear")
_TE_GROUPED = _of_te("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear")
_TE_ROW = _of_te("TERowParallelLinear", "TERowParallelGroupedLinear")
_TE_LINEARS = (*_TE_WITH_NORM, *_TE_GROUPED, *_TE_ROW, *_of_te("TEColumnParallelLinear"))

_ATTENTION = {"linear_qkv", "linear_proj"}
_TRAINED_BEFORE = {
    "layernorm": set[str](),
    "mla_up_proj": set[str](),
    "mlp": _ATTENTION,
    "moe": _ATTENTION,
    "shared_experts": _ATTENTION,
    "moe_act": {*_ATTENTION, "linear_fc1"},
}
"""Label of selective recompute, whose checkpoint needs an input that requires gradients -> the targets whose adapters
give it one in a model's first layer. Labels that are not here have none that is known."""


def attach(model: torch.nn.Module, lora: Lora) -> None:
    """Freeze the model and put an adapter beside each linear layer that `lora.targets` names, in experts too.

    Before the model is wrapped: what is frozen gets neither gradient buffers nor optimizer state.
    """
    model.requires_grad_(False)
    adapted = set()
    for name, module in list(model.named_modules()):
        parent, _, target = name.rpartition(".")
        if target in lora.targets and isinstance(module, (TargetLinear, *_TE_LINEARS)):
            setattr(model.get_submodule(parent), target, LoraLinear(name, module, lora))
            adapted.add(target)
    if _needs_input_gradient(model.config, adapted):
        model.decoder.register_forward_pre_hook(_with_input_gradient, with_kwargs=True)  # type: ignore[union-attr]


def _needs_input_gradient(config: TransformerConfig, adapted: set[str]) -> bool:
    """Whether a checkpoint's inputs may require no gradients, since the embedding is frozen.

    Its backward does not run then, so that adapters in it silently get no gradients; a checkpoint that discards its
    output even fails. Megatron Bridge does the same for full recompute.
    """
    if config.recompute_granularity == "full":
        return True
    labels = config.recompute_modules if config.recompute_granularity == "selective" else ()
    # The core attention has no adapter that could miss gradients.
    return any(not _TRAINED_BEFORE.get(label, set()) & adapted for label in labels if label != "core_attn")


def _with_input_gradient(
    block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    hidden = kwargs.get("hidden_states")
    if hidden is not None and not hidden.requires_grad:
        kwargs = {**kwargs, "hidden_states": hidden.detach().requires_grad_()}
    return args, kwargs


@dataclass(frozen=True)
class _Shape:
    """What an adapter must know of its linear layer; sizes are those of all tensor-parallel ranks together."""

    input_size: int
    output_size: int
    row_parallel: bool
    expert: bool
    """Whether it belongs to a routed expert."""
    grouped: bool
    """Whether it is those of all experts of a rank, which then share one adapter (as in Megatron Bridge)."""
    communicates: bool
    """Whether it gathers or sums over the ranks itself. Experts, and shared experts that overlap with the token
    dispatcher, do not: inputs come gathered, and a row-parallel layer's outputs are summed later."""
    tp_group: dist.ProcessGroup
    has_norm: bool = False
    """Whether its norm is in it, so that it returns that one's output, gathered unless the adapter gathers again."""

    @classmethod
    def of(cls, base: Any, *, in_experts: bool) -> _Shape:
        if isinstance(base, _TE_LINEARS):
            return cls._of_te(base, in_experts)
        if isinstance(base, GroupedLinear):
            group = parallel_state.get_expert_tensor_parallel_group()
            sizes = list(base.weight.shape)
            sizes[base.partition_dim] *= group.size()
            return cls(sizes[2], sizes[1], base.partition_dim == 2, True, True, False, group)
        row_parallel = isinstance(base, RowParallelLinear)
        communicates = not base.explicit_expert_comm
        return cls(base.input_size, base.output_size, row_parallel, base.is_expert, False, communicates, base.tp_group)

    @classmethod
    def _of_te(cls, base: Any, in_experts: bool) -> _Shape:
        group, row_parallel = base._tp_group, isinstance(base, _TE_ROW)
        inputs, outputs = base.in_features, base.out_features  # of this rank
        return cls(
            inputs * group.size() if row_parallel else inputs,
            outputs if row_parallel else outputs * group.size(),
            row_parallel,
            expert=in_experts,
            grouped=isinstance(base, _TE_GROUPED),
            communicates=base.parallel_mode is not None,
            tp_group=group,
            has_norm=isinstance(base, _TE_WITH_NORM),
        )


class LoraLinear(torch.nn.Module):
    """A frozen linear layer and its adapter, in the linear layer's place.

    Attributes:
        regather: whether the adapter gathers its input again in backward.
        reason: why it does not although that was requested; "" otherwise.
    """

    def __init__(self, name: str, base: Any, lora: Lora) -> None:
        super().__init__()
        self.target = name.rpartition(".")[2]
        self.reason = ""
        shape, shared_expert = _Shape.of(base, in_experts=".experts." in name), ".shared_experts." in name
        if lora.sequence_parallel_input_regather:
            self.reason = regather_eligibility(
                base.config,
                self.target,
                row_parallel=shape.row_parallel,
                expert=shape.expert,
                shared_expert=shared_expert,
            )
        self.regather = lora.sequence_parallel_input_regather and not self.reason
        self.base = base
        self.has_norm = shape.has_norm
        has_norm_there = self.target in ("linear_qkv", "linear_fc1") and not shape.expert and not shared_expert
        self.keeps_input = has_norm_there and te_equivalents.are_used(base.config)
        if shape.has_norm:
            base.return_layernorm_output = True
            base.return_layernorm_output_gathered = base.sequence_parallel and not self.regather
        self.adapter = LoraAdapter(shape, base.config, lora, self.regather)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The linear layer's output plus the adapter's, and the linear layer's bias."""
        result = self.base(x, *args, **kwargs)
        if not self.has_norm:
            output, bias = result
        elif len(result) == 3:  # Transformer Engine itself returns the bias
            output, bias, x = result
        else:
            (output, x), bias = result
        if self.keeps_input:
            output = _Keeping.apply(output, x)
        return output + self.adapter(x), bias


class _Keeping(torch.autograd.Function):
    """The first tensor, in whose graph the second is kept until backward."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(kept)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class LoraAdapter(torch.nn.Module):
    """A and B of one linear layer, from its input to what is added to its output, both as this rank holds them."""

    def __init__(self, base: _Shape, config: TransformerConfig, lora: Lora, regather: bool = False) -> None:
        super().__init__()
        self.scale = lora.alpha / lora.rank
        self.dropout = torch.nn.Dropout(lora.dropout) if lora.dropout else torch.nn.Identity()
        self.tp_group = base.tp_group
        sharded_sequence = config.sequence_parallel and base.communicates and base.tp_group.size() > 1
        self.gathers_input = sharded_sequence and not (base.row_parallel or regather or base.has_norm)
        self.scatters_output = sharded_sequence and base.row_parallel
        self.is_summed_later = base.row_parallel and not base.communicates and base.tp_group.size() > 1

        config = copy(config)
        config.sequence_parallel = False
        options: dict[str, Any] = {"bias": False, "is_expert": base.expert, "tp_group": base.tp_group}
        options_a: dict[str, Any] = {"init_method": torch.nn.init.xavier_normal_, **options}
        if base.row_parallel:
            options_a |= {"config": config, "input_is_parallel": True, "skip_bias_add": True}
            self.linear_a = RowParallelLinear(base.input_size, lora.rank, **options_a)
        else:
            config_a = copy(config)
            config_a.sequence_parallel = regather
            gathered = sharded_sequence or not base.communicates  # that gather's backward sums the input's gradients
            options_a |= {"config": config_a, "gather_output": True, "disable_grad_reduce": gathered}
            self.linear_a = ColumnParallelLinear(base.input_size, lora.rank, **options_a)
        gathers_output = base.row_parallel and not self.is_summed_later
        options_b = {"init_method": torch.nn.init.zeros_, "config": config, "gather_output": gathers_output, **options}
        self.linear_b = ColumnParallelLinear(lora.rank, base.output_size, **options_b)
        # What lies between A and B is no expert's input or output, so it is communicated here.
        self.linear_a.explicit_expert_comm = self.linear_b.explicit_expert_comm = False
        if base.grouped:
            _share(self.parameters(), parallel_state.get_expert_model_parallel_group())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From the linear layer's input, [sequence, batch, in] or [tokens, in], to the addend, shaped as its output.

        Of a layer with its norm in it: from that norm's output, of the whole sequence where the layer has gathered it.
        """
        x = self.dropout(x)
        if self.gathers_input:
            x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        x, _ = self.linear_a(x)
        x, _ = self.linear_b(x)
        if self.is_summed_later:  # every rank has the whole and adds an equal part of it
            x = all_gather_last_dim_from_tensor_parallel_region(x, group=self.tp_group)
            return x * (self.scale / self.tp_group.size())
        if self.scatters_output:
            x = scatter_to_sequence_parallel_region(x, group=self.tp_group)
        return x * self.scale


def _share(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Keep parameters equal over the expert-parallel ranks: the first rank's values, and the sum of all gradients."""
    if group.size() == 1:
        return

    def summed(grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad, group=group)
        return grad

    for parameter in parameters:
        dist.broadcast(parameter.data, src=dist.get_process_group_ranks(group)[0], group=group)
        parameter.register_hook(summed)


def regather_eligibility(
    config: TransformerConfig,
    target: str,
    *,
    row_parallel: bool,
    expert: bool = False,
    shared_expert: bool = False,
) -> str:
    """Why the adapter of such a linear layer retains its whole input although re-gather is requested; "" if it doesn't.

    The rules of Megatron Bridge's `sequence_parallel_input_regather`, and fine-grained offload of the input.

    Args:
        config: of the model.
        target: last part of the layer's name, as in `Lora.targets`.
        row_parallel: whether its input is shared out by channels, else it is column-parallel.
        expert: whether it belongs to a routed expert.
        shared_expert: whether it belongs to a shared expert.
    """
    if expert:
        return "expert adapter: its input is what the token dispatcher sends, not a shard of the sequence"
    if row_parallel:
        return "row-parallel adapter: its input is shared out by channels and never gathered"
    if config.tensor_model_parallel_size == 1:
        return "tensor parallel size 1: the input is whole on every rank"
    if not config.sequence_parallel:
        return "sequence parallelism is off: the input is whole on every rank"
    if shared_expert and config.moe_shared_expert_overlap:
        return "moe_shared_expert_overlap: the token dispatcher gathers the input"
    if config.cuda_graph_impl not in (None, "none") or config.enable_cuda_graph or config.external_cuda_graph:
        return "CUDA graphs"
    if config.cpu_offloading and config.cpu_offloading_activations:
        return "CPU offload of activations"
    if config.fine_grained_activation_offloading and target == "linear_qkv" and "qkv_linear" in config.offload_modules:
        return "CPU offload of qkv_linear's input"
    if config.recompute_granularity == "full":
        return "full-layer recompute: nothing inside of a layer is retained"
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    for label in recomputed if target == "linear_fc1" else ():
        if label == "mlp" or (shared_expert and label in ("moe", "shared_experts")):
            return f"selective recompute of {label}: nothing inside of it is retained"
    return ""


def adapters(chunks: Iterable[torch.nn.Module], lora: Lora) -> tuple[Adapter, ...]:
    """The adapters of a rank's model chunks by target and by what became of input re-gather; no target is left out."""
    requested, targets = lora.sequence_parallel_input_regather, list[str](lora.targets)
    found = Counter(_found(chunks, lora))
    for target in set(targets) - {target for target, _, _ in found}:
        found[target, False, f"no module named {target} on this rank"] = 0
    ordered = sorted(found.items(), key=lambda entry: (targets.index(entry[0][0]), *entry[0]))
    return tuple(Adapter(target, count, requested, effective, why) for (target, effective, why), count in ordered)


def _found(chunks: Iterable[torch.nn.Module], lora: Lora) -> Iterator[tuple[str, bool, str]]:
    """Target, whether re-gather is effective, and the reason if it is not, of each adapter."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, LoraLinear):
                yield module.target, module.regather, module.reason
