"""Kernels that GPU containers have and pip does not, replaced by equal-sized ones. Virtual GPU only.

Each allocates what the original allocates and leaves the arithmetic out, which a virtual GPU would not do anyway.

- The three fused softmax extensions that Megatron looks for by name (`FusedScaleMaskSoftmax`). Without them Megatron
  keeps fp32 scores. One result of the scores' size forward, gradients in place backward, as in their CUDA sources
  (Megatron-LM and Apex, `csrc/megatron/*softmax*`).
- The multi-tensor L2 norm of Transformer Engine and Apex (one fp32 value on the device), used for gradient clipping.
- The fused Adam and SGD of Transformer Engine and Apex: torch's own with `fused=True`, which like them hold their state
  and no temporaries. Known deviation: torch's Adam keeps a step counter of 512 bytes a parameter on the device.
- Apex's `fused_weight_gradient_mlp_cuda`, with which Megatron's own linears add to gradients in place: nothing.

What torch.compile would fuse is in `jit_fusion`.
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
from megatron.core.optimizer import optimizer
from megatron.core.tensor_parallel import layers

from ..megatron_settings import has_te_layers
from ..recipe import Recipe
from ..virtual_gpu.answers import answer_read, exactly_taken

ASSUMPTIONS = (
    "gradients are finite: no step is skipped",
    "copies and collectives complete at once",
)
"""What every measurement on a virtual GPU states."""

_SOFTMAX, _OPTIMIZER = ("fused softmax",), ("multi-tensor L2 norm", "torch's fused Adam and SGD")
"""What stands in where Transformer Engine's layers are not used, and where it is not installed."""

_FUSED_GRADIENTS = "gradient_accumulation_fusion: Apex's kernel allocates nothing"

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


def _answering_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """One of Megatron's figures of the gradients with its read from the device answered: what memory held before may
    be no number."""

    @functools.wraps(original)
    def figure(*args: Any, **kwargs: Any) -> Any:
        with exactly_taken(original.__name__):
            answer_read(bytes(torch.float.itemsize))
            return original(*args, **kwargs)

    return figure


def _finding_no_inf(original: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """fp16's check of the gradients with its read from the device answered: none is infinite."""

    def unscale_main_grads_and_check_for_nan(self: Any) -> bool:
        with exactly_taken("_unscale_main_grads_and_check_for_nan"):
            answer_read(bytes(self.found_inf.nbytes), self.found_inf.data_ptr())
            return original(self)

    return unscale_main_grads_and_check_for_nan


def _gradient_accumulation() -> types.ModuleType:
    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = lambda *_: None  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = lambda *_: None  # type: ignore[attr-defined]
    return module


def assumptions(recipe: Recipe) -> tuple[str, ...]:
    """What a measurement of the recipe on a virtual GPU states."""
    fused = recipe.megatron.get("gradient_accumulation_fusion")
    parts = (() if has_te_layers(recipe) else _SOFTMAX) + (() if HAVE_TE else _OPTIMIZER)
    equal = (f"stand-ins of equal size: {', '.join(parts)}",) if parts else ()
    return (*equal, *ASSUMPTIONS, _FUSED_GRADIENTS) if fused else (*equal, *ASSUMPTIONS)


def _answering_signs(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """The signs of NVFP4's Hadamard transform as bits, which are a constant of Transformer Engine's, not a result."""
    from transformer_engine.pytorch.tensor import nvfp4_tensor

    def get_sign_from_vector(vector: torch.Tensor) -> int:
        bits = original(nvfp4_tensor.get_wgrad_sign_vector(device="cpu"))
        with exactly_taken("get_sign_from_vector"):
            answer_read(bits.to_bytes(torch.long.itemsize, sys.byteorder))
            return original(vector)

    return get_sign_from_vector


@functools.cache
def install() -> None:
    """Put the stand-ins where Megatron looks for the originals. Once per process."""
    for name in _SOFTMAX_EXTENSIONS:
        sys.modules[name] = _softmax_extension(name)
    if not HAVE_TE:
        clip_grads.multi_tensor_applier = _multi_tensor_l2_norm
    else:
        from transformer_engine.pytorch.tensor import nvfp4_tensor

        nvfp4_tensor.get_sign_from_vector = _answering_signs(nvfp4_tensor.get_sign_from_vector)
    for name in ("get_grad_norm_fp32", "count_zeros_fp32"):
        setattr(optimizer, name, _answering_one(getattr(optimizer, name)))
    mixed: Any = optimizer.MixedPrecisionOptimizer
    mixed._unscale_main_grads_and_check_for_nan = _finding_no_inf(mixed._unscale_main_grads_and_check_for_nan)
    if not layers._grad_accum_fusion_available:  # which looked for it when it was imported
        layers.fused_weight_gradient_mlp_cuda = _gradient_accumulation()
        sys.modules["fused_weight_gradient_mlp_cuda"] = layers.fused_weight_gradient_mlp_cuda
        layers._grad_accum_fusion_available = True


def fuse(megatron_optimizer: Any) -> None:
    """Have torch's optimizers inside of Megatron's take the path of one fused kernel, before their first step."""
    for part in getattr(megatron_optimizer, "chained_optimizers", [megatron_optimizer]):
        if part.optimizer is not None and "foreach" in part.optimizer.defaults:  # torch's, not Transformer Engine's
            for group in part.optimizer.param_groups:
                group.update(fused=True, foreach=False)
