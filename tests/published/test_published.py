"""The virtual GPU against peak memory that NVIDIA measured on H100s and A100s.

With Transformer Engine where it is installed, elsewhere with equivalents for memory of its layers. The page has both;
each run checks what belongs to it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from merged_recipes import merged

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
DATA = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "virtual-against-real.md"
MIB = 2**20
TOLERANCE = 0.003
PAIR_TOLERANCE = 0.05

FIGURES = ("after_step", "step_1_peak", "step_2_peak", "last_peak")
PEAKS = FIGURES[1:]

Figures = dict[str, float]  # of FIGURES -> MiB; step 2 is not published of every row


def with_what_is_installed(row: dict[str, Any]) -> dict[str, Any]:
    return merged(row, row.get("with_te" if HAS_TE else "without_te", {}))


ROWS = {row.get("name", row["case"]): with_what_is_installed(row) for row in DATA["rows"]}


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

        def peak(last_step: int) -> float:
            return max(p.peak["allocated"] for p in rank.phases if p.step <= last_step) / MIB

        after_step = rank.phases[-1].resting["allocated"] / MIB
        return dict(zip(FIGURES, (after_step, peak(1), peak(2), peak(recipe.training.steps)), strict=True))

    yield figures
    for launcher in launchers.values():
        launcher.close()


def columns(names: Sequence[str], published: Figures, measured: Figures) -> list[str]:
    """As on the page: what was published, what was measured, and how far that is off."""
    given = [name for name in names if name in published]
    texts: tuple[dict[str, str], ...] = (
        {name: f"{published[name]:.2f}" for name in given},
        {name: f"{measured[name]:.2f}" for name in given},
        {name: f"{measured[name] / published[name] - 1:+.2%}" for name in given},
    )
    return [" / ".join(text.get(name, "-") for name in names) for text in texts]


def check_page(request: pytest.FixtureRequest, first: str, shown: Sequence[str]) -> None:
    """The row that begins so has these columns: the published, then two with Transformer Engine and two without."""
    request.node.user_properties.append(("published_row", " | ".join((first, *shown))))
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {first} | ")]
    published, *pairs = row.strip("| ").split(" | ")[1:]
    assert [published, *(pairs[:2] if HAS_TE else pairs[2:])] == list(shown)


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
    check_page(request, f"{row['case']} ({row['gpu']})", columns(FIGURES, published, measured))


@pytest.mark.parametrize("pair", DATA["pairs"], ids=lambda pair: pair["setting"].replace(" ", "-"))
def test_what_a_setting_costs_is_within_five_percent_of_the_published_and_on_the_page(
    pair: dict[str, str], virtual: Callable[[str], Figures], request: pytest.FixtureRequest
) -> None:
    more, less = (virtual(pair[side]) for side in ("more", "less"))
    published_more, published_less = (ROWS[pair[side]]["measured_mib"] for side in ("more", "less"))
    given = [peak for peak in PEAKS if peak in published_more and peak in published_less]
    published = {peak: published_more[peak] - published_less[peak] for peak in given}
    measured = {peak: more[peak] - less[peak] for peak in given}
    assert measured == pytest.approx(published, rel=PAIR_TOLERANCE)
    check_page(request, pair["setting"], columns(PEAKS, published, measured))
