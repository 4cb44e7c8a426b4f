"""Memory regression gates for Megatron Core training recipes. PYTEST_DONT_REWRITE

The names below are imported when first used, so that `import pytest_mbmem` costs a test session nothing. (The word in
capitals tells pytest to leave the package's own assertions alone.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .compare import Comparison
    from .errors import (
        IncompatibleSettings,
        MeasurementFailed,
        NoEffect,
        NotOnHost,
        OutOfMemory,
        ParityFailed,
        Refused,
        UserError,
    )
    from .labels import offload_labels, recompute_labels
    from .measurement import Measurement
    from .models import PRESETS, preset
    from .recipe import Lora, Memory, Mla, Model, Moe, Optimizer, Parallelism, Recipe, Training
    from .sweep import Sweep

_HOMES = {
    "Comparison": "compare",
    "IncompatibleSettings": "errors",
    "MeasurementFailed": "errors",
    "NoEffect": "errors",
    "NotOnHost": "errors",
    "OutOfMemory": "errors",
    "ParityFailed": "errors",
    "Refused": "errors",
    "UserError": "errors",
    "offload_labels": "labels",
    "recompute_labels": "labels",
    "Measurement": "measurement",
    "PRESETS": "models",
    "preset": "models",
    "Lora": "recipe",
    "Memory": "recipe",
    "Mla": "recipe",
    "Model": "recipe",
    "Moe": "recipe",
    "Optimizer": "recipe",
    "Parallelism": "recipe",
    "Recipe": "recipe",
    "Training": "recipe",
    "Sweep": "sweep",
}

__all__ = [
    "PRESETS",
    "Comparison",
    "IncompatibleSettings",
    "Lora",
    "Measurement",
    "MeasurementFailed",
    "Memory",
    "Mla",
    "Model",
    "Moe",
    "NoEffect",
    "NotOnHost",
    "Optimizer",
    "OutOfMemory",
    "Parallelism",
    "ParityFailed",
    "Recipe",
    "Refused",
    "Sweep",
    "Training",
    "UserError",
    "offload_labels",
    "preset",
    "recompute_labels",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
