"""Equivalents, for memory, of Transformer Engine's attention and matrix multiplications where it is not installed.

For recipes with `training.transformer_impl: transformer_engine` on a virtual GPU. The layers themselves are Megatron's
local ones: a norm and a linear apart hold what Transformer Engine's fused pair holds, and no label of recompute or
offload reaches such a norm. Three things differ there:

- one workspace for all its matrix multiplications: 32 MiB and 1 KiB from compute capability 9.0 on, 4 MiB before it
  (the size that `get_cublas_workspace_size_bytes` of transformer_engine.pytorch gives), and one for each of the four
  streams that grouped experts multiply on;
- unfused attention takes fresh memory for the input of its scores, where Megatron's own keeps a buffer for the job;
- attention makes queries, keys and values contiguous unless they are packed as one of its layouts. Of grouped queries
  the keys and values, and with rotary positions the values, would keep the whole projection alive as views of it;
  copies do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from ..errors import UserError
from ..recipe import Training
from . import layers

ASSUMPTION = "Transformer Engine's attention and matrix multiplications: equivalents for memory"

_workspaces: list[torch.Tensor] = []

_LABELS = {
    "input_layernorm": ("recompute_input_layernorm", "offload_attn_norm"),
    "pre_mlp_layernorm": ("recompute_pre_mlp_layernorm", "offload_mlp_norm"),
}
"""A layer's norm -> what the layer does with it where that is asked for."""


def are_used(asked: TransformerConfig | Training) -> bool:
    """Whether the model asks for Transformer Engine where it is not installed."""
    return asked.transformer_impl == "transformer_engine" and not HAVE_TE


def check(virtual: bool) -> None:
    """Raise `UserError` where an equivalent for memory would have to compute."""
    if not virtual:
        problem = "'transformer_engine' needs Transformer Engine on a real GPU and on the host; equivalents exist for"
        raise UserError(f"training.transformer_impl: {problem} a virtual GPU only")


def norms_in_linears(layer: TransformerLayer) -> tuple[str, ...]:
    """The layer's norms that Transformer Engine has in the linear after them; none where its own layers are used."""
    if not are_used(layer.config):
        return ()
    latent, experts = layer.config.multi_latent_attention, isinstance(layer.mlp, MoELayer)
    return ("input_layernorm",) * (not latent) + ("pre_mlp_layernorm",) * (not experts)


def keep_from_labels(model: torch.nn.Module) -> None:
    """Have recompute and offload by label leave these norms alone."""
    for layer in model.modules():
        if isinstance(layer, TransformerLayer):
            for norm in norms_in_linears(layer):
                for action in _LABELS[norm]:
                    setattr(layer, action, False)


_GROUPED_STREAMS = 4
"""`get_num_cublas_streams` of Transformer Engine (2.10 to 2.20)."""


def hold_workspaces(config: TransformerConfig) -> None:
    """Allocate what the model needs of them on the current device, if it is not there."""
    wanted = 1 + (_GROUPED_STREAMS if config.moe_grouped_gemm else 0)
    size = 32 * 2**20 + 1024 if torch.cuda.get_device_capability() >= (9, 0) else 4 * 2**20
    while len(_workspaces) < wanted:
        _workspaces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


def forget_workspaces() -> None:
    """Free them."""
    _workspaces.clear()


class _FreshMemory:
    """In place of Megatron's `GlobalMemoryBuffer`."""

    @staticmethod
    def get_tensor(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")


@contextmanager
def _without_global_buffer() -> Iterator[None]:
    # The local attention asks for its buffer by this name (core 0.16 and 0.19).
    original = parallel_state.get_global_memory_buffer
    parallel_state.get_global_memory_buffer = _FreshMemory
    try:
        yield
    finally:
        parallel_state.get_global_memory_buffer = original


def _in_layout(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values as they are where they are equal parts of one projection, otherwise contiguous."""
    packed = len({(part.untyped_storage().data_ptr(), part.shape) for part in parts}) == 1
    return parts if packed else tuple(part.contiguous() for part in parts)


class UnfusedAttention(layers.UnfusedAttention):
    """Unfused attention on contiguous parts, without a buffer that outlives it."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As Megatron's own."""
        with _without_global_buffer():
            result: torch.Tensor = super().forward(*_in_layout(query, key, value), *args, **kwargs)
        return result


class FlashAttention(layers.FlashAttention):
    """Fused attention on contiguous parts."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As the one without Transformer Engine."""
        return super().forward(*_in_layout(query, key, value), *args, **kwargs)
