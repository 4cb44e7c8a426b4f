"""The functions that Megatron has torch.compile fuse (`jit_fuser`, core 0.16): in its place, compiled, or one by one.

Which, the recipe says (`training.jit_fusion`). Stand-ins allocate what the code that torch.compile 2.14 makes of a
function allocates, and are as quick as no kernel at all:

- Bias-GELU and SwiGLU, that of experts with its token weights too: one result, no temporaries. Run one by one they
  leave holes in the allocator's cache that move the resting figure by up to 2 MiB, and those of experts take several
  times their result in fp32.
- Megatron's fused cross entropy: a copy of the fp32 logits, forward where they become probabilities and backward where
  these become the gradient. Run one by one both are changed in place.

The others that Megatron marks, which take the same either way, run one by one beside them (the router's expert bias,
dropout with its bias).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu, fused_cross_entropy

from ..errors import UserError
from ..recipe import Recipe

_ASSUMED = "stand-ins of equal size for what torch.compile fuses: bias-GELU, SwiGLU, cross entropy"
_COMPILED = "torch.compile's kernels are not timed against each other: they come from its first choice"
_EAGER = "torch.compile is off: bias-GELU, SwiGLU and cross entropy run operator by operator"


def _half_width(y: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return y.new_empty((*y.shape[:-1], y.size(-1) // 2))


def _weighted_swiglu_back(
    grad: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


def _predicted_logits(logits: torch.Tensor, *args: Any) -> Any:
    result = _FUSED[fused_cross_entropy, "calculate_predicted_logits"](logits, *args)
    torch.empty_like(logits)
    return result


def _cross_entropy_gradient(softmax: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(softmax)
    return torch.empty_like(copy, dtype=torch.bfloat16)  # whatever the precision, as in core 0.16


_STAND_INS: Mapping[tuple[Any, str], Callable[..., Any]] = {
    (fused_bias_gelu, "bias_gelu"): lambda bias, y: torch.empty_like(y),
    (fused_bias_gelu, "bias_gelu_back"): lambda grad, bias, y: torch.empty_like(y),
    (fused_bias_swiglu, "swiglu"): _half_width,
    (fused_bias_swiglu, "bias_swiglu"): _half_width,
    (fused_bias_swiglu, "weighted_swiglu"): _half_width,
    (fused_bias_swiglu, "swiglu_back"): lambda grad, y: torch.empty_like(y),
    (fused_bias_swiglu, "bias_swiglu_back"): lambda grad, y, bias: torch.empty_like(y),
    (fused_bias_swiglu, "weighted_swiglu_back"): _weighted_swiglu_back,
    (fused_cross_entropy, "calculate_predicted_logits"): _predicted_logits,
    (fused_cross_entropy, "calculate_gradients"): _cross_entropy_gradient,
}
_FUSED = {place: getattr(*place) for place in _STAND_INS}
"""Megatron's own: compiled when they are first called, if torch.compile was on when this process was started."""


def use(recipe: Recipe, virtual: bool) -> None:
    """Have the models that are built from here on run those functions as the recipe says.

    A real GPU compiles them where a virtual one has stand-ins. Raises `UserError` for compiled ones in a process that
    was started without torch.compile.
    """
    how = recipe.training.jit_fusion
    can_compile = all(hasattr(function, "_torchdynamo_orig_callable") for function in _FUSED.values())
    if how == "compiled" and not can_compile:
        problem = "'compiled' is not possible here: torch.compile is off in this process; it runs in mbmem.measure"
        raise UserError(f"training.jit_fusion: {problem}")
    for place, stand_in in _STAND_INS.items():
        setattr(*place, stand_in if virtual and how == "stand-in" else _FUSED[place])
    if can_compile:
        torch.compiler.set_stance("force_eager" if how == "eager" else "default")
    if virtual and how == "compiled":
        _choose_without_timing()


@cache
def _choose_without_timing() -> None:
    """Where kernels take no time, there is nothing to choose by: trying them would only take memory (torch 2.14)."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    CachingAutotuner.bench = lambda self, launcher, *args, **kwargs: 0.0  # type: ignore[method-assign]


def assumption(recipe: Recipe) -> str:
    """What a measurement of the recipe on a virtual GPU states of them."""
    return {"stand-in": _ASSUMED, "compiled": _COMPILED, "eager": _EAGER}[recipe.training.jit_fusion]
