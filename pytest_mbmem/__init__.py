"""Memory regression gates for Megatron Core training recipes. PYTEST_DONT_REWRITE

The names below are imported when first used, so that `import pytest_mbmem` costs a test session nothing. (The word in
capitals tells pytest to leave the package's own assertions alone.)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .errors import MeasurementFailed, OutOfMemory, UserError
    from .measurement import Measurement
    from .models import PRESETS, preset
    from .recipe import Memory, Model, Optimizer, Parallelism, Recipe, Training

_HOMES = {
    "MeasurementFailed": "errors",
    "OutOfMemory": "errors",
    "UserError": "errors",
    "Measurement": "measurement",
    "PRESETS": "models",
    "preset": "models",
    "Memory": "recipe",
    "Model": "recipe",
    "Optimizer": "recipe",
    "Parallelism": "recipe",
    "Recipe": "recipe",
    "Training": "recipe",
}

__all__ = [
    "PRESETS",
    "Measurement",
    "MeasurementFailed",
    "Memory",
    "Model",
    "Optimizer",
    "OutOfMemory",
    "Parallelism",
    "Recipe",
    "Training",
    "UserError",
    "preset",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
