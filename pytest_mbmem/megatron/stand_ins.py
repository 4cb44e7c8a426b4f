"""Kernels that GPU containers have and pip does not, replaced by equal-sized ones. Virtual GPU only.

Each allocates what the original allocates and leaves the arithmetic out, which a virtual GPU would not do anyway.

- The three fused softmax extensions that Megatron looks for by name (`FusedScaleMaskSoftmax`). Without them Megatron
  keeps fp32 scores. One result of the scores' size forward, gradients in place backward, as in their CUDA sources
  (Megatron-LM and Apex, `csrc/megatron/*softmax*`).
- The multi-tensor L2 norm of Transformer Engine and Apex (one fp32 value on the device), used for gradient clipping.
- The fused Adam and SGD of Transformer Engine and Apex: torch's own with `fused=True`, which like them hold their state
  and no temporaries. Known deviation: torch's Adam keeps a step counter of 512 bytes a parameter on the device.
- Bias-GELU and SwiGLU, that of experts with its token weights too, which torch.compile fuses into one kernel
  (`jit_fuser` in core 0.16): one result, no temporaries. Run eagerly they leave holes in the allocator's cache that
  move the resting figure by up to 2 MiB, and those of experts take several times their result in fp32.
- The gradient of Megatron's fused cross entropy: compiled, it works on a copy of the fp32 probabilities, which run
  eagerly it changes in place (the code that torch.compile 2.14 generates has this copy, and so has the published peak).
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import megatron.core.optimizer.clip_grads as clip_grads
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions import fused_bias_gelu, fused_bias_swiglu, fused_cross_entropy
from megatron.core.optimizer import optimizer

from ..virtual_gpu.answers import answer_read, exactly_taken

ASSUMPTIONS = (
    "stand-ins of equal size: fused softmax, bias-GELU, SwiGLU and multi-tensor L2 norm, torch's fused Adam and SGD",
    "gradients are finite: no step is skipped",
    "copies and collectives complete at once",
)
"""What every measurement on a virtual GPU states."""

_SOFTMAX_EXTENSIONS = (
    "scaled_upper_triang_masked_softmax_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
)


def _softmax_extension(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.forward = lambda scores, *_: torch.empty_like(scores)  # type: ignore[attr-defined]
    module.backward = lambda grad, *_: grad  # type: ignore[attr-defined]
    module.get_batch_per_block = lambda *_: 1  # type: ignore[attr-defined]
    return module


def _multi_tensor_l2_norm(
    op: object, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *_: object
) -> tuple[torch.Tensor, None]:
    return torch.zeros(1, device="cuda", dtype=torch.float), None


def _half_width(y: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return y.new_empty((*y.shape[:-1], y.size(-1) // 2))


def _weighted_swiglu_back(
    grad: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(y), torch.empty_like(weights)


def _cross_entropy_gradient(softmax: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(softmax)
    return torch.empty_like(copy, dtype=torch.bfloat16)  # whatever the precision, as in core 0.16


def _answering_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's gradient norm with its read from the device answered: what memory held before may be no number."""

    def get_grad_norm_fp32(*args: Any, **kwargs: Any) -> Any:
        with exactly_taken("get_grad_norm_fp32"):
            answer_read(bytes(torch.float.itemsize))
            return original(*args, **kwargs)

    return get_grad_norm_fp32


@functools.cache
def install() -> None:
    """Put the stand-ins where Megatron looks for the originals. Once per process."""
    for name in _SOFTMAX_EXTENSIONS:
        sys.modules[name] = _softmax_extension(name)
    if not HAVE_TE:
        clip_grads.multi_tensor_applier = _multi_tensor_l2_norm
    fused_bias_gelu.bias_gelu = lambda bias, y: torch.empty_like(y)
    fused_bias_gelu.bias_gelu_back = lambda grad, bias, y: torch.empty_like(y)
    fused_bias_swiglu.swiglu = fused_bias_swiglu.bias_swiglu = fused_bias_swiglu.weighted_swiglu = _half_width
    fused_bias_swiglu.swiglu_back = fused_bias_swiglu.bias_swiglu_back = lambda grad, y, *_: torch.empty_like(y)
    fused_bias_swiglu.weighted_swiglu_back = _weighted_swiglu_back
    fused_cross_entropy.calculate_gradients = _cross_entropy_gradient
    optimizer.get_grad_norm_fp32 = _answering_norm(optimizer.get_grad_norm_fp32)


def fuse(megatron_optimizer: Any) -> None:
    """Have torch's optimizers inside of Megatron's take the path of one fused kernel, before their first step."""
    for part in getattr(megatron_optimizer, "chained_optimizers", [megatron_optimizer]):
        if part.optimizer is not None and "foreach" in part.optimizer.defaults:  # torch's, not Transformer Engine's
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)
