"""The virtual GPU against peak memory that NVIDIA measured on H100s and A100s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

DATA = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
ROWS = {row.get("name", row["case"]): row for row in DATA["rows"]}
PAGE = Path(__file__).parents[2] / "docs" / "virtual-against-real.md"
MIB = 2**20
TOLERANCE = 0.003
PAIR_TOLERANCE = 0.05

Figures = dict[str, float]  # "after_step", "step_1_peak", "last_peak" -> MiB


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}


@pytest.fixture(scope="module")
def virtual() -> Iterator[Callable[[str], Figures]]:
    """The figures of a row, measured once."""
    launchers = {key: Launcher(load_gpus()[key], timeout=120) for key in ("a100-80gb", "h100-80gb")}

    @functools.cache
    def figures(name: str) -> Figures:
        row = ROWS[name]
        recipe = Recipe.from_dict(merged(DATA["common"], row["recipe"]), name)
        measure = launchers[row["gpu"]].measure
        measurement = measure(recipe, ranks=[recipe.world_size - 1], count_flops=False, check_effects=False)
        assert measurement.failure is None
        (rank,) = measurement.ranks
        return {
            "after_step": rank.phases[-1].resting["allocated"] / MIB,
            "step_1_peak": max(p.peak["allocated"] for p in rank.phases if p.step <= 1) / MIB,
            "last_peak": rank.peak() / MIB,
        }

    yield figures
    for launcher in launchers.values():
        launcher.close()


def line(first: str, published: Figures, measured: Figures) -> str:
    columns = [f"{published[name]:.2f}" for name in published], [f"{measured[name]:.2f}" for name in published]
    errors = [f"{measured[name] / published[name] - 1:+.2%}" for name in published]
    return f"| {first} | {' | '.join(' / '.join(column) for column in (*columns, errors))} |"


def check_page(request: pytest.FixtureRequest, text: str) -> None:
    request.node.user_properties.append(("published_row", text))
    assert text in PAGE.read_text(), f"the table of {PAGE.name} is not what was measured"


@pytest.mark.parametrize("name", ROWS)
def test_peaks_are_within_tolerance_of_the_published_and_on_the_page(
    name: str, virtual: Callable[[str], Figures], request: pytest.FixtureRequest
) -> None:
    row, measured = ROWS[name], virtual(name)
    published = row["measured_mib"]
    tolerance = row.get("tolerance", TOLERANCE)
    tolerances = dict.fromkeys(published, tolerance) | {"after_step": row.get("after_step_tolerance", tolerance)}
    errors = {figure: measured[figure] / published[figure] - 1 for figure in published}
    assert {figure: error for figure, error in errors.items() if abs(error) > tolerances[figure]} == {}
    check_page(request, line(f"{row['case']} ({row['gpu']})", published, measured))


@pytest.mark.parametrize("pair", DATA["pairs"], ids=lambda pair: pair["setting"].replace(" ", "-"))
def test_what_a_setting_costs_is_within_five_percent_of_the_published_and_on_the_page(
    pair: dict[str, str], virtual: Callable[[str], Figures], request: pytest.FixtureRequest
) -> None:
    more, less = (virtual(pair[side]) for side in ("more", "less"))
    published_more, published_less = (ROWS[pair[side]]["measured_mib"] for side in ("more", "less"))
    peaks = ("step_1_peak", "last_peak")
    published = {peak: published_more[peak] - published_less[peak] for peak in peaks}
    measured = {peak: more[peak] - less[peak] for peak in peaks}
    assert measured == pytest.approx(published, rel=PAIR_TOLERANCE)
    check_page(request, line(pair["setting"], published, measured))
