"""The virtual GPU against the tables of NVIDIA's two documents on memory tuning and activation recompute.

What counts is the difference between a row and the control of its table, and the order of the rows; the peaks stand
beside. Rows that are `slow` run with MBMEM_DOCUMENTS=all alone.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from merged_recipes import merged

from pytest_mbmem import incompatibilities
from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

DATA = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
TABLES: dict[str, dict[str, Any]] = DATA["tables"]
PAGE = Path(__file__).parents[2] / "docs" / "documents.md"
GB = 10**9
RELATIVE, ABSOLUTE = 0.1, 0.1
"""A difference may be off by this part of the measured one, or by this many GB, whichever is more."""

MISSES_TE = importlib.util.find_spec("transformer_engine") is None and not os.environ.get("MBMEM_REQUIRE_TE")
needs_te = pytest.mark.skipif(MISSES_TE, reason="Transformer Engine is not installed ('make te' does it)")
ALL = os.environ.get("MBMEM_DOCUMENTS") == "all"

Peaks = Callable[[str, str], float]
"""Table and row -> peak of the row's rank in GB."""


def recipe_of(table: str, row: str) -> Recipe:
    data = TABLES[table]
    return Recipe.from_dict(merged(data["common"], data["rows"][row].get("recipe", {})), f"{table}: {row}")


def row_params(*, compared: bool) -> list[Any]:
    """Each row, or each that is compared with a control, by the names of its table and itself."""
    params = []
    for table, data in TABLES.items():
        for row, values in data["rows"].items():
            if compared and "against" not in values:
                continue
            slow = data.get("slow", False) or values.get("slow", False)
            marks = [pytest.mark.skipif(slow and not ALL, reason="slow; MBMEM_DOCUMENTS=all runs it")]
            params.append(pytest.param(table, row, marks=marks, id=f"{table}-{row}".replace(" ", "_")))
    return params


@pytest.fixture(scope="module")
def peak() -> Iterator[Peaks]:
    """The peak of a row, measured once."""
    launcher = Launcher(load_gpus()["h100-80gb"], timeout=600)

    @functools.cache
    def measured(table: str, row: str) -> float:
        measurement = launcher.measure(recipe_of(table, row), ranks=[0], count_flops=False, check_effects=False)
        assert measurement.failure is None, measurement.failure
        return round(measurement.peak() / GB, 3)  # as printed, so that differences are those of the page's figures

    yield measured
    launcher.close()


def check_page(request: pytest.FixtureRequest, text: str) -> None:
    request.node.user_properties.append(("document_row", text))
    assert text in PAGE.read_text(), f"the table of {PAGE.name} is not what was measured"


def peak_line(row: str, values: Mapping[str, Any], peak: float) -> str:
    measured = values["measured_gb"]
    return f"| {row} | {measured} | {peak:.3f} | {peak / measured - 1:+.1%} |"


def difference_line(row: str, against: str, measured: float, virtual: float, within: bool) -> str:
    verdict = "within" if within else "**misses**"
    figures = " | ".join(f"{round(gb, 3) + 0.0:+.3f}" for gb in (measured, virtual, virtual - measured))  # no -0.000
    return f"| {row} against {against} | {figures} | {verdict} |"


@needs_te
@pytest.mark.parametrize(("table", "row"), row_params(compared=False))
def test_the_peak_is_the_one_on_the_page(table: str, row: str, peak: Peaks, request: pytest.FixtureRequest) -> None:
    check_page(request, peak_line(row, TABLES[table]["rows"][row], peak(table, row)))


@needs_te
@pytest.mark.parametrize(("table", "row"), row_params(compared=True))
def test_the_difference_to_the_control_is_the_measured_one_or_stated_to_miss(
    table: str, row: str, peak: Peaks, request: pytest.FixtureRequest
) -> None:
    rows = TABLES[table]["rows"]
    against = rows[row]["against"]
    measured = rows[row]["measured_gb"] - rows[against]["measured_gb"]
    virtual = peak(table, row) - peak(table, against)
    within = abs(virtual - measured) <= max(RELATIVE * abs(measured), ABSOLUTE)
    assert within != rows[row].get("misses", False)
    check_page(request, difference_line(row, against, measured, virtual, within))


@needs_te
@pytest.mark.parametrize(
    "table",
    [
        pytest.param(
            table, marks=pytest.mark.skipif(data.get("slow", False) and not ALL, reason="slow; MBMEM_DOCUMENTS=all")
        )
        for table, data in TABLES.items()
    ],
)
def test_rows_that_differ_by_more_than_the_tolerance_are_in_the_measured_order(table: str, peak: Peaks) -> None:
    measured = {row: v["measured_gb"] for row, v in TABLES[table]["rows"].items() if not v.get("slow", False)}
    apart = [pair for pair in itertools.permutations(measured, 2) if measured[pair[0]] - measured[pair[1]] > ABSOLUTE]
    wrong = {(more, less) for more, less in apart if peak(table, more) <= peak(table, less)}
    assert wrong == {tuple(pair) for pair in TABLES[table].get("misordered", [])}


@pytest.mark.parametrize("case", DATA["refused"], ids=lambda case: case["name"])
def test_what_cannot_be_measured_is_refused_by_name(case: dict[str, Any]) -> None:
    recipe = Recipe.from_dict(case["recipe"], case["name"])
    try:
        incompatibilities.check(recipe)
        found = "\n".join(recipe.not_yet())
    except UserError as error:
        found = str(error)
    for words in case["says"]:
        assert words in found
    assert case["row"] in " ".join(PAGE.read_text().split())
