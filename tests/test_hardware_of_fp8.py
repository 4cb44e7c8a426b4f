"""Which GPU an FP8 or FP4 recipe is refused for, whether or not Transformer Engine is installed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_mbmem import megatron_settings
from pytest_mbmem.errors import UserError
from pytest_mbmem.recipe import Model, Recipe, Training
from pytest_mbmem.te import hardware
from pytest_mbmem.virtual_gpu.gpus import load_gpus

RECIPE = Recipe(
    model=Model(num_layers=1, hidden_size=64, num_attention_heads=4),
    training=Training(transformer_impl="transformer_engine"),
)
GPUS = ("a100-80gb", "l4-24gb", "h100-80gb", "b200-180gb")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine."""
    monkeypatch.setattr(megatron_settings, "versions_of", lambda packages: dict.fromkeys(packages, "2.20.2"))


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"fp8": "hybrid"}, "l4-24gb"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "l4-24gb"),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, "l4-24gb"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "h100-80gb"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, "b200-180gb"),
        ({"fp4": "e2m1"}, "b200-180gb"),
        ({"fp8_recipe": "mxfp8"}, "a100-80gb"),
        ({"fp8": "hybrid", "fp8_recipe": "custom"}, "a100-80gb"),
    ],
    ids=["default", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4", "off", "custom"],
)
def test_the_first_gpu_that_can(settings: dict[str, Any], first: str) -> None:
    recipe, gpus = RECIPE.but(megatron=settings), load_gpus()
    for key in GPUS[: GPUS.index(first)]:
        with pytest.raises(UserError, match=rf"^megatron\.fp._recipe: '\w+' needs compute capability .*, and {key} "):
            hardware.check(recipe, gpus[key])
        hardware.check(recipe.but(transformer_impl="local"), gpus[key])
    for key in GPUS[GPUS.index(first) :]:
        hardware.check(recipe, gpus[key])


def test_mxfp8_ends_before_compute_capability_12() -> None:
    newer = dataclasses.replace(load_gpus()["b200-180gb"], compute_capability=(12, 0))
    with pytest.raises(UserError, match=r"needs compute capability 10\.0 and below 12\.0, .* has 12\.0$"):
        hardware.check(RECIPE.but(megatron={"fp8": "e4m3", "fp8_recipe": "mxfp8"}), newer)
    hardware.check(RECIPE.but(megatron={"fp8": "e4m3", "fp8_recipe": "blockwise"}), newer)
