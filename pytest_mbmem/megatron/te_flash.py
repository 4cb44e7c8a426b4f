"""flash-attn 2 for Transformer Engine where the package is not installed, for memory. Virtual GPU only.

PyTorch is built with FlashAttention 2's own sources, behind `aten::_flash_attention_forward` and its backward. They
take and allocate what the package's do: forward the output, an fp32 log-sum-exp for each query and head and two seeds;
backward the three gradients, fp32 sums of the queries' gradients and, of grouped queries, the keys' and values' for
each head. The package saves its inputs, the output, the log-sum-exp and the seeds in between (flash_attn_interface.py
of flash-attn 2.8).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from packaging.version import Version

VERSION = "2.8.3"
"""Of flash-attn, that it passes for: the newest that Transformer Engine 2.20 takes."""

ASSUMPTION = f"flash-attn {VERSION}: PyTorch's own build of FlashAttention 2 in its place"


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        lengths = (query.size(1), key.size(1))
        output, log_sum_exp, seeds, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, None, None, *lengths, options["dropout"], options["causal"], False, **options["window"]
        )
        ctx.save_for_backward(query, key, value, output, log_sum_exp, seeds)
        ctx.options, ctx.lengths = options, lengths
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[no-untyped-def]
        query, key, value, output, log_sum_exp, seeds = ctx.saved_tensors
        options = ctx.options
        gradients = torch.ops.aten._flash_attention_backward(
            *(grad, query, key, value, output, log_sum_exp, None, None, *ctx.lengths),
            *(options["dropout"], options["causal"], seeds, seeds.new_empty(0)),
            **options["window"],
        )
        return (*gradients, None)


def _flash_attn_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """From and to [batch, sequence, heads (or query groups), channels]; without soft cap and ALiBi.

    `deterministic` is PyTorch's own setting.
    """
    if softcap or alibi_slopes is not None:
        raise NotImplementedError("flash-attn's stand-in has neither a soft cap nor ALiBi")
    left, right = window_size
    window = {"scale": softmax_scale, "window_size_left": left, "window_size_right": right}
    options = {"dropout": dropout_p, "causal": causal, "window": window}
    return _FlashAttention.apply(query, key, value, options)  # type: ignore[no-any-return]


def is_missing() -> bool:
    """Whether the package was not there when Transformer Engine was imported."""
    return not _backends().fa_utils.is_installed or _backends().flash_attn_func is _flash_attn_func


@contextmanager
def stand_in() -> Iterator[None]:
    """Transformer Engine finds flash-attn 2 within."""
    backends = _backends()
    utils, function = backends.fa_utils, backends.flash_attn_func
    before = {name: value for name, value in vars(utils).items() if name.startswith(("is_installed", "version", "v2_"))}
    utils.version = Version(VERSION)
    utils.set_flash_attention_version()
    backends.flash_attn_func = _flash_attn_func
    try:
        yield
    finally:
        backends.flash_attn_func = function
        for name, value in before.items():
            setattr(utils, name, value)


def _backends() -> Any:
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    return backends
