"""The virtual GPU against peak memory that NVIDIA measured on H100s and A100s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

DATA = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text())
README = Path(__file__).parents[2] / "README.md"
MIB = 2**20
TOLERANCE = 0.003


@pytest.fixture(scope="module")
def launchers() -> Iterator[dict[str, Launcher]]:
    launchers = {key: Launcher(load_gpus()[key], timeout=120) for key in ("a100-80gb", "h100-80gb")}
    yield launchers
    for launcher in launchers.values():
        launcher.close()


@pytest.mark.parametrize("row", DATA["rows"], ids=lambda row: row["case"])
def test_peaks_are_within_three_permille_of_the_published_and_in_the_readme(
    row: dict[str, Any], launchers: dict[str, Launcher], request: pytest.FixtureRequest
) -> None:
    recipe = Recipe.from_dict({**DATA["common"], "parallelism": row["parallelism"]}, row["case"])
    last_rank = recipe.world_size - 1
    measurement = launchers[row["gpu"]].measure(recipe, ranks=[last_rank], count_flops=False)
    assert measurement.failure is None
    (rank,) = measurement.ranks
    virtual = {
        "after_step": rank.phases[-1].resting["allocated"] / MIB,
        "step_1_peak": max(p.peak["allocated"] for p in rank.phases if p.step <= 1) / MIB,
        "last_peak": rank.peak() / MIB,
    }
    published = row["measured_mib"]
    errors = {name: virtual[name] / published[name] - 1 for name in published}
    line = " / ".join(f"{published[name]:.2f}" for name in published)
    line += " | " + " / ".join(f"{virtual[name]:.2f}" for name in published)
    line += " | " + " / ".join(f"{errors[name]:+.2%}" for name in published)
    line = f"| {row['case']} ({row['gpu']}) | {line} |"
    request.node.user_properties.append(("published_row", line))
    assert {name: error for name, error in errors.items() if abs(error) > TOLERANCE} == {}
    assert line in README.read_text(), "the README's table is not what was measured"
