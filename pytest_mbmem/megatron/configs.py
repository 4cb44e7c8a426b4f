"""A recipe's settings in Megatron Core's own configuration classes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from ..megatron_settings import added, ddp_settings, optimizer_settings, transformer_settings
from ..recipe import Recipe
from ..validation import BadKey, nearest, show

_PLAIN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
}
"""Names of plain types, what a value of them may be in YAML, and that in words."""

_PLAIN_TYPE = re.compile(r"<class '(bool|int|float|str)'>|typing\.Optional\[(bool|int|float|str)\]")
"""A field's type in words, of which values are judged here; those of others are Megatron's to judge."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {str(dtype): dtype for dtype in _DTYPES.values()}  # "torch.bfloat16", ...
_MOMENTS = {**_DTYPES, "fp8": torch.uint8, "torch.uint8": torch.uint8}
"""What Adam's moments may be of; Megatron-LM's training script has bytes for fp8 too."""

_FUNCTIONS = {"gelu": F.gelu, "silu": F.silu}

_Config = TypeVar("_Config", TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """The model's configuration. Whatever the recipe does not name is as in Megatron-LM's training script.

    Needs no process groups. Raises what Megatron raises (ValueError, AssertionError) where it refuses the settings, and
    `UserError` for a setting of `recipe.megatron` that no class of the installed Megatron has.
    """
    _check_names(recipe)
    return _make(_transformer_class(recipe), transformer_settings(recipe), recipe)


def ddp_config(recipe: Recipe) -> DistributedDataParallelConfig:
    """Gradient buffers and their reduction."""
    return _make(DistributedDataParallelConfig, ddp_settings(recipe), recipe)


def optimizer_config(recipe: Recipe) -> OptimizerConfig:
    """The optimizer and its mixed-precision wrapper."""
    return _make(OptimizerConfig, optimizer_settings(recipe), recipe)


def _transformer_class(recipe: Recipe) -> Any:
    return TransformerConfig if recipe.model.mla is None else MLATransformerConfig


def _make(config: type[_Config], settings: Mapping[str, Any], recipe: Recipe) -> _Config:
    """An object of the class with these settings, and those of `recipe.megatron` that it has."""
    fields = _fields(config)
    more = {name: value for name, value in added(recipe).items() if name in fields}
    return config(**values(config, {**settings, **more}))


def values(config: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values as one of Megatron's configuration classes takes them; those of other names as they are."""
    fields = _fields(config)
    return {name: _value(name, value, fields.get(name, "")) for name, value in settings.items()}


def _fields(config: type) -> dict[str, str]:
    """The class's settings, and the type of each in words."""
    return {field.name: str(field.type) for field in dataclasses.fields(config) if field.init}


def _value(name: str, value: Any, kind: str) -> Any:
    """The value as Megatron takes it."""
    if value is None:
        return None
    if "torch.dtype" in kind:
        known = _MOMENTS if name in ("exp_avg_dtype", "exp_avg_sq_dtype") else _DTYPES
        dtype = known.get(value) if isinstance(value, str) else None
        if dtype is None:
            raise BadKey(f"megatron.{name}", f"{show(value)} is not one of {', '.join(known)}")
        return dtype
    if name == "attention_backend":
        return AttnBackend[value]
    return _FUNCTIONS[value] if name == "activation_func" else value


def known_settings(recipe: Recipe) -> dict[str, str]:
    """The settings of the classes that the installed Megatron has for the recipe, and the type of each in words."""
    classes = (_transformer_class(recipe), DistributedDataParallelConfig, OptimizerConfig)
    return {name: kind for config in classes for name, kind in _fields(config).items()}


def _check_names(recipe: Recipe) -> None:
    """Raise `UserError` for a name in `recipe.megatron` that is no setting, or one whose value a recipe cannot hold."""
    known = known_settings(recipe)
    for name in recipe.megatron:
        if name not in known:
            if name in _fields(MLATransformerConfig):
                raise BadKey(f"megatron.{name}", "needs a model with multi-latent attention (model.mla)")
            classes = "TransformerConfig, DistributedDataParallelConfig or OptimizerConfig"
            problem = f"no setting of {classes}{nearest(name, known)}"
            raise BadKey(f"megatron.{name}", f"{problem} (megatron-core {version('megatron-core')})")
        if any(word in known[name] for word in ("Callable", "ContextManager", "RecipeConfig")):
            raise BadKey(f"megatron.{name}", "takes an object of Python, which a recipe cannot hold")
        value, plain = recipe.megatron[name], _PLAIN_TYPE.fullmatch(known[name])
        if plain and value is not None:
            types, words = _PLAIN[plain[1] or plain[2]]
            if type(value) not in types:
                raise BadKey(f"megatron.{name}", f"{show(value)} is not {words}")
