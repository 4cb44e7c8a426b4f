"""Pipeline layouts as conditions of the catalogue read them."""

from __future__ import annotations

import pytest

from pytest_mbmem.incompatibilities.expression import layout_layers, layout_stages, stage_layers


@pytest.mark.parametrize(
    ("layout", "stages", "layers", "mtp"),
    [
        ("Et*2|t*2L", 2, 4, 0),
        ("Ettt|(tt|)*29,m|L", 32, 61, 1),
        ("E|t|mL", 3, 1, 1),
        ([["embedding", "decoder"], ["decoder", "mtp", "loss"]], 2, 2, 1),
    ],
)
def test_stages_and_layers_are_counted_as_megatron_does(
    layout: str | list[list[str]], stages: int, layers: int, mtp: int
) -> None:
    assert layout_stages(layout) == stages
    assert layout_layers(layout, "t") == layers
    assert layout_layers(layout, "m") == mtp


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("Et|tttL", [1, 3]),
        ("E|(t|)*3mL", [0, 1, 1, 1, 0]),
        ([["Embedding", " decoder"], ["decoder", "decoder", "loss"]], [1, 2]),
    ],
)
def test_layers_of_each_stage(layout: str | list[list[str]], layers: list[int]) -> None:
    assert stage_layers(layout, "t") == layers
