"""Experts without Transformer Engine: Megatron's own modules for sequential and grouped ones, with linears from here.

Megatron's `TEGroupedMLP` needs Transformer Engine only for its two linears. Those here hold their experts' weights in
one parameter and take the tokens in the order of the experts. Memory is that of Transformer Engine's: one output, one
input gradient, one gradient a weight, and no copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import experts, moe_utils
from megatron.core.utils import divide

if not hasattr(moe_utils, "te_general_gemm"):
    # The router asks whether Transformer Engine's kernel is None, and without it the name is missing (core 0.16).
    moe_utils.te_general_gemm = None


def _has_grouped_kernel(tokens: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether PyTorch has one kernel for all groups: bfloat16, rows of whole 16 bytes, compute capability 9 or more.

    Elsewhere PyTorch itself reads the group sizes back from the device and multiplies group by group.
    """
    return (
        tokens.is_cuda
        and tokens.dtype is torch.bfloat16
        and tokens.size(0) > 0
        and all(size % 8 == 0 for size in weight.shape[1:])
        and torch.cuda.get_device_capability(tokens.device) >= (9, 0)
    )


class _GroupedMatmul(torch.autograd.Function):
    """Each group of rows times the transposed weight of its expert.

    `tokens` is [tokens, in], ordered by expert; `weight` [experts, out, in]; `sizes` the rows of each expert, which may
    be 0. Returns [tokens, out].
    """

    @staticmethod
    def forward(ctx, tokens: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.sizes = sizes
        ends = None
        if _has_grouped_kernel(tokens, weight):
            ends = torch.tensor(sizes).cumsum(0).to(tokens.device, torch.int32)
            output = F.grouped_mm(tokens, weight.transpose(1, 2), offs=ends)
        else:
            output = tokens.new_empty(tokens.size(0), weight.size(1))
            for rows, expert, out in zip(tokens.split(sizes), weight, output.split(sizes), strict=True):
                torch.mm(rows, expert.t(), out=out)
        # Tokens are kept for the weights' gradient alone, as Transformer Engine does: none where weights are frozen.
        ctx.save_for_backward(tokens if weight.requires_grad else None, weight, ends)
        return output

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:  # type: ignore[no-untyped-def]
        tokens, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        token_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            if ends is not None:
                token_grad = F.grouped_mm(grad, weight, offs=ends)
            else:
                token_grad = grad.new_empty(grad.size(0), weight.size(2))
                for rows, expert, out in zip(grad.split(ctx.sizes), weight, token_grad.split(ctx.sizes), strict=True):
                    torch.mm(rows, expert, out=out)
        if ctx.needs_input_grad[1]:
            if ends is not None:
                weight_grad = F.grouped_mm(grad.t(), tokens, offs=ends)
            else:
                weight_grad = torch.empty_like(weight)
                for rows, inputs, out in zip(grad.split(ctx.sizes), tokens.split(ctx.sizes), weight_grad, strict=True):
                    torch.mm(rows.t(), inputs, out=out)  # zeros for an expert without tokens
        return token_grad, weight_grad, None


class GroupedLinear(MegatronModule):
    """One linear layer of each of a rank's experts, as Megatron builds those of `TEGroupedMLP`.

    `weight` is [experts, out, in] with `partition_dim` (1 or 2) split over the experts' tensor-parallel ranks; the
    token dispatcher does all communication. There is no bias.
    """

    partition_dim: int

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        pg_collection: ProcessGroupCollection,
        tp_comm_buffer_name: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        assert is_expert
        assert not bias
        shape = [num_gemms, output_size, input_size]
        shape[self.partition_dim] = divide(shape[self.partition_dim], pg_collection.expt_tp.size())
        weight = torch.empty(shape, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(self.weight)
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=self.partition_dim, stride=1)
        self.weight.allreduce = not _reduces_over_expert_ranks(config)  # type: ignore[attr-defined]
        # Fine-grained offload sets it where the input may not be saved in another type; here it never is.
        self.save_original_input = True

    def forward(self, tokens: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, None]:
        """From [tokens, in], ordered by expert, to [tokens, out]; `sizes` are the tokens of each expert."""
        return _GroupedMatmul.apply(tokens, self.weight, sizes), None

    def backward_dw(self) -> None:
        """Nothing: weight gradients are never delayed here."""


class ColumnParallelGroupedLinear(GroupedLinear):
    """The first linear of the experts: each tensor-parallel rank has a share of the outputs."""

    partition_dim = 1


class RowParallelGroupedLinear(GroupedLinear):
    """The second linear of the experts: each tensor-parallel rank has a share of the inputs."""

    partition_dim = 2


class ExpertRowParallelLinear(RowParallelLinear):
    """The second linear of one expert, which leaves all communication to the token dispatcher.

    Where neither tensor nor expert parallelism splits the experts, Megatron's own communicates over one rank, and the
    view that this returns cannot take the bias that Megatron then adds in place (core 0.16).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


def _reduces_over_expert_ranks(config: TransformerConfig) -> bool:
    """Whether experts' gradients are reduced in groups of their own, by the rule of the installed Megatron."""
    by_tensor_parallel_size = hasattr(transformer_engine, "_set_expert_parameter_attributes")  # core 0.19, not 0.16
    other_size = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
    return config.expert_model_parallel_size > 1 or (by_tensor_parallel_size and other_size)


class Backend(LocalSpecProvider):
    """Megatron's local modules, and where its specifications ask for experts those from here."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False) -> Any:
        """Which module has the experts, and its linears."""
        if moe_use_grouped_gemm:
            module = experts.TEGroupedMLP
            linears = {"linear_fc1": ColumnParallelGroupedLinear, "linear_fc2": RowParallelGroupedLinear}
        else:
            module = experts.SequentialMLP
            linears = {"linear_fc1": ColumnParallelLinear, "linear_fc2": ExpertRowParallelLinear}
        if not hasattr(experts, "GroupedMLPSubmodules"):  # core 0.16
            return module, MLPSubmodules(**linears)
        parts = experts.GroupedMLPSubmodules if moe_use_grouped_gemm else MLPSubmodules
        return partial(module, submodules=parts(**linears))
