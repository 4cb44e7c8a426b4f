"""The command `mbmem estimate`, and the estimate that `mbmem measure` shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.estimate import estimate
from pytest_mbmem.measure import launch
from pytest_mbmem.measurement import Composition, Device, Failure, Measurement, Owner, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report.estimates import measurement_line
from pytest_mbmem.report.terminal import measurement_lines

MIB, GIB = 2**20, 2**30


@pytest.fixture
def recipe(small_recipe: Recipe) -> Recipe:
    return small_recipe.but(pp=2, tp=2)


@pytest.fixture
def recipe_file(tmp_path: Path, recipe: Recipe) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml(), encoding="utf-8")
    return path


def measured(recipe: Recipe, *, over: int = 0, virtual: bool = True, **changes: Any) -> Measurement:
    """Two ranks; the last stage's has what is estimated, so much more of activations, and workspaces of 64 MiB."""
    found = estimate(recipe)
    kinds = found.by_kind
    held = {
        Owner("parameters"): kinds["parameters"],
        Owner("main gradients"): kinds["gradients"] - 100,
        Owner("gradients"): 100,
        Owner("optimizer state"): kinds["optimizer state"],
        Owner("logits"): 1000,
        Owner("activations"): kinds["activations"] - 3000 + over,
        Owner("workspaces", line="megatron/core/utils.py:628 (get_tensor)"): 2000,
        Owner("workspaces"): 64 * MIB,
    }
    peak = sum(held.values())
    sizes = {"allocated": peak, "reserved": peak + MIB}
    composition = Composition(tuple(held), (tuple(held.values()),))
    phases = (PhaseFigures(2, "forward", sizes, sizes),)
    outside = {"CUDA context": 512 * MIB}
    last = RankMeasurement(2, {"tp": 0, "pp": 1}, 2, phases, composition=composition, outside=outside)
    less = {"allocated": MIB, "reserved": MIB}
    first = RankMeasurement(0, {"tp": 0, "pp": 0}, 2, (PhaseFigures(2, "forward", less, less),))
    device = Device("virtual-x" if virtual else "x-24gb", "X", 24 * GIB, virtual=virtual)
    made = Measurement(device, (first, last), recipe.to_dict(), recipe.digest, recipe.world_size)
    return dataclasses.replace(made, **changes)


def save(measurement: Measurement, path: Path) -> Path:
    path.write_text(json.dumps(measurement.to_json()), encoding="utf-8")
    return path


def test_it_shows_components_formulas_what_is_not_in_it_and_what_is_left(
    recipe: Recipe, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "estimate.json"
    assert main(["estimate", str(recipe_file), "--json", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "most loaded: rank 2 (tp 0, cp 0, dp 0, pp 1), the stage with most of 2"
    found = estimate(recipe)
    for part in found.components:
        assert any(line.startswith(f"{part.name} ") and part.category in line for line in lines)
        assert any(line.startswith(f"{part.name}: ") for line in lines)
    assert any(line.startswith("not in it: allocator fragmentation") for line in lines)
    # NCCL's of tp, pp and of both together
    of = "the 78.24 GiB that h100-80gb has for PyTorch (79.11 GiB less CUDA context 512.00 MiB, NCCL 384.00 MiB)"
    assert lines[-2].startswith(f"fits into {of}, with ")
    data = json.loads(output.read_text(encoding="utf-8"))
    assert (data["total"], data["exceeds"], data["gpu"]["name"]) == (found.total, False, "h100-80gb")
    assert sum(part["size"] for part in data["components"]) == found.total
    assert data["measured"] == {}


def test_a_recipe_that_exceeds_the_gpu_ends_with_1_and_names_the_largest(
    tmp_path: Path, small_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    large = small_recipe.but(hidden_size=8192, num_attention_heads=64, num_layers=8)
    path = tmp_path / "large.yaml"
    path.write_text(large.to_yaml(), encoding="utf-8")
    assert main(["estimate", str(path), "--virtual-gpu", "l4-24gb"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("EXCEEDS the ")
    assert " that l4-24gb has for PyTorch " in last
    assert last.endswith("the largest component is optimizer state")
    assert main(["estimate", str(path), "--virtual-gpu", "b200-180gb"]) == 0


class Made:
    """In place of a launcher."""

    measurement: Measurement

    def __init__(self, *arguments: object, **options: object) -> None: ...

    def measure(self, recipe: Recipe, **options: object) -> Measurement:
        return self.measurement

    def close(self) -> None: ...


def test_measurements_are_shown_beside_it_by_kind(
    recipe: Recipe,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Made, "measurement", measured(recipe), raising=False)
    monkeypatch.setattr(launch, "Launcher", Made)
    real = save(measured(recipe, over=MIB, virtual=False), tmp_path / "real.json")
    output = tmp_path / "estimate.json"
    assert main(["estimate", str(recipe_file), "--measure", "--real", str(real), "--json", str(output)]) == 0
    out = capsys.readouterr().out
    rows = {line.split("  ")[0]: line for line in out.partition("peak allocated")[2].splitlines()}
    assert rows["gradients"].count("+0 B (+0.00%)") == 2
    assert "-1.00 MiB" in rows["activations"]
    assert rows["not in the estimate"].count("-64.00 MiB (-100.00%)") == 2
    assert "x-24gb has for PyTorch (24.00 GiB less CUDA context 512.00 MiB)" in out  # the real GPU's own figures
    sides = json.loads(output.read_text(encoding="utf-8"))["measured"]
    kinds = estimate(recipe).by_kind
    assert sides["virtual"]["by_kind"] == {**kinds, "not in the estimate": 64 * MIB}
    assert (sides["real"]["rank"], sides["real"]["peak"]) == (2, sum(kinds.values()) + 65 * MIB)


def test_a_measurement_that_fails_is_a_message_and_1(
    recipe: Recipe, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure("out of memory", 0, "...", 1, "forward")
    monkeypatch.setattr(Made, "measurement", measured(recipe, failure=failure), raising=False)
    monkeypatch.setattr(launch, "Launcher", Made)
    assert main(["estimate", str(recipe_file), "--measure"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "--measure: out of memory on rank 0 in step-1/forward; leave it out to estimate alone" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "none.yaml: cannot be read"),
        (["{refused}"], "incompatible settings"),
        (["{recipe}", "--virtual-gpu", "h1000"], "--virtual-gpu: there is no virtual GPU 'h1000'"),
        (["{recipe}", "--timeout", "0"], "--timeout: '0' is not a number of seconds above 0"),
        (["{recipe}", "--json", "none/x.json"], "--json: the folder none does not exist"),
        (["{recipe}", "--real", "none.json"], "none.json: cannot be read"),
        (["{recipe}", "--real", "{virtual}"], "is of virtual-x, which is virtual"),
        (["{recipe}", "--real", "{other}"], "is of another recipe: training.seq_length 128 here and 64 there"),
        (["{recipe}", "--real", "{failed}"], "is of a run that did not come to its end"),
    ],
)
def test_a_mistake_is_one_message_and_2(
    arguments: list[str],
    message: str,
    recipe: Recipe,
    recipe_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failure = Failure("timeout", 0, "")
    refused = tmp_path / "refused.yaml"
    refused.write_text(recipe.but(recompute_granularity="full").to_yaml(), encoding="utf-8")
    files = {
        "recipe": recipe_file,
        "refused": refused,
        "virtual": save(measured(recipe), tmp_path / "virtual.json"),
        "other": save(measured(recipe.but(seq_length=64), virtual=False), tmp_path / "other.json"),
        "failed": save(measured(recipe, virtual=False, failure=failure), tmp_path / "failed.json"),
    }
    assert main(["estimate", *(argument.format(**files) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mbmem: error: ")
    assert message in err


def test_measure_shows_the_estimate_beside_the_peak(recipe: Recipe) -> None:
    measurement = measured(recipe)
    line = measurement_line(measurement)
    share = 1 - estimate(recipe).total / measurement.peak()
    said = (
        f"(closed form, {share:.2%} below that rank's peak, of which 64.00 MiB are not in it: workspaces and rounding)"
    )
    assert line.endswith(f"allocated on rank 2 {said}")
    assert line in measurement_lines(measurement)
    assert measurement_line(dataclasses.replace(measurement, recipe=None)) == ""


def test_an_estimate_of_a_recipe_that_is_refused_now_says_so(recipe: Recipe) -> None:
    refused = recipe.but(recompute_granularity="full")
    line = measurement_line(dataclasses.replace(measured(recipe), recipe=refused.to_dict()))
    assert line.startswith("estimate: none: ")
    assert "incompatible settings" in line


def test_sizes_that_would_take_minutes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {num_layers: 1000000000000, hidden_size: 64, num_attention_heads: 4}\n")
    assert main(["estimate", str(path)]) == 2
    assert f"{path}: 1000000000000 layers in 1 model chunks: the estimate goes through each" in capsys.readouterr().err


def test_a_time_limit_without_a_measurement_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\n")
    assert main(["estimate", str(path), "--timeout", "5"]) == 2
    assert "--timeout: nothing is measured without --measure" in capsys.readouterr().err
