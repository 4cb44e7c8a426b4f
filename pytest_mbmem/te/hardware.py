"""Which hardware Transformer Engine's recipes of FP8 and FP4 need: its own rules, asked before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError
from ..megatron_settings import has_te_layers

if TYPE_CHECKING:
    from ..recipe import Recipe
    from ..virtual_gpu.gpus import Gpu

_NEEDS: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "fp8_recipe delayed": ((8, 9), None),
    "fp8_recipe tensorwise": ((8, 9), None),
    "fp8_recipe blockwise": ((9, 0), None),
    "fp8_recipe mxfp8": ((10, 0), (12, 0)),
    "fp4_recipe nvfp4": ((10, 0), None),
}
"""Megatron's setting and its value -> the compute capability from which on it is possible, and from which on not.

check_fp8_support and its like in transformer_engine/pytorch/quantization.py (2.20; fp8.py before 2.9).
"""

_DEFAULT = {"fp8_recipe": "delayed", "fp4_recipe": "nvfp4"}
"""Of Megatron's TransformerConfig."""


def check(recipe: Recipe, gpu: Gpu) -> None:
    """Raise `UserError` for an FP8 or FP4 recipe that the GPU has no hardware for."""
    if not has_te_layers(recipe):
        return
    for name, default in _DEFAULT.items():
        if not recipe.megatron.get(name.removesuffix("_recipe")):
            continue
        asked = recipe.megatron.get(name) or default
        first, end = _NEEDS.get(f"{name} {asked}", ((0, 0), None))
        if gpu.compute_capability < first or (end is not None and gpu.compute_capability >= end):
            limit = f"and below {_text(end)}" if end else "or higher"
            raise UserError(
                f"megatron.{name}: {asked!r} needs compute capability {_text(first)} {limit}, and {gpu.key} "
                f"({gpu.name}) has {_text(gpu.compute_capability)}"
            )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
