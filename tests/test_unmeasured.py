"""Settings that Megatron takes and that would be measured wrongly here."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Recipe
from pytest_mbmem.unmeasured import _NOT_MEASURED, _OFF, reasons

RECIPE = Recipe(model=Model(num_layers=4, hidden_size=64, num_attention_heads=4))
NAMES = [name for names in _NOT_MEASURED.values() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_cannot_be_measured_is_named_with_its_reason(name: str) -> None:
    (reason,) = RECIPE.but(megatron={name: "local"}).not_yet()
    assert reason.startswith(f"megatron.{name}: ")


@pytest.mark.parametrize(("name", "off"), [(name, off) for name in NAMES for off in (None, False, *_OFF.get(name, ()))])
def test_a_setting_that_asks_for_nothing_can_be_measured(name: str, off: object) -> None:
    assert RECIPE.but(megatron={name: off}).not_yet() == []


def test_settings_with_the_same_reason_are_named_together() -> None:
    recipe = RECIPE.but(megatron={"fp8": "hybrid", "fp8_param": True, "nccl_ub": True, "init_method_std": 0.1})
    together, alone = reasons(recipe)
    assert together.startswith("megatron.fp8, megatron.fp8_param: Transformer Engine's modules")
    assert alone.startswith("megatron.nccl_ub: ")
