"""The driver has what Transformer Engine's libraries and Triton's launcher ask for, and a real GPU gets its recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_stand_ins import share_server, stand_ins

from pytest_mbmem.measure.gpu_launch import GpuLauncher
from pytest_mbmem.measure.host import HostLauncher
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.nvml import machine
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.te.installation import find, shared_objects
from pytest_mbmem.virtual_gpu.build import ensure_driver
from pytest_mbmem.virtual_gpu.gpus import load_gpus

OPENED_BY_TORCH = "libcublasLt.so"
"""torch opens the real one by its path; that its functions come from the driver all the same is LD_PRELOAD's doing."""


def test_what_is_installed_can_be_used() -> None:
    found = find()
    assert found is not None
    assert found.problem is None


def test_nothing_is_undefined_and_no_real_library_is_taken(launcher_of: Callable[[str], Launcher]) -> None:
    libraries = [*shared_objects("libtransformer_engine"), *shared_objects("transformer_engine_torch")]
    assert len(libraries) == 2
    result = launcher_of("h100-80gb").call("te_kernels:load", {"libraries": [str(path) for path in libraries]})
    assert result.failure is None, result.message
    ours = {path.name: path for path in ensure_driver().libraries}
    loaded = {path for path in map(Path, result.value) if not path.name.startswith(OPENED_BY_TORCH)}
    assert set(libraries) <= loaded
    others = {path for path in loaded - set(ours.values()) if path.name in ours}
    assert others == set()


@pytest.mark.parametrize(("gpu", "target"), [("h100-80gb", "90"), ("a100-80gb", "80")])
def test_triton_compiles_for_the_virtual_gpu_and_launches(
    launcher_of: Callable[[str], Launcher], gpu: str, target: str
) -> None:
    result = launcher_of(gpu).call("te_kernels:launch", {})
    assert result.failure is None, result.message + result.output
    assert result.value == {"launches": 1, "target": target}


def test_a_real_gpu_measures_its_recipes(
    launcher_of: Callable[[str], Launcher], small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_server(monkeypatch, launcher_of("h100-80gb"))
    stand_ins(monkeypatch, gpu="h100-80gb", count=2, elapsed_ms=[500, 100])
    measurement = GpuLauncher(machine(), load_gpus(), timeout=300).measure(
        small_recipe.but(transformer_impl="transformer_engine", attention_backend="auto", tp=2)
    )
    assert (measurement.failure, measurement.mode) == (None, "joint")
    assert measurement.twin is not None
    assert [rank.peak() for rank in measurement.ranks] == [rank.peak() for rank in measurement.twin.ranks]
    assert "transformer-engine" in measurement.environment


def test_the_host_runs_as_if_it_were_not_installed(host_launcher: HostLauncher, small_recipe: Recipe) -> None:
    """Megatron would take its optimizer and its norm of the gradients, which need a GPU."""
    recipe = small_recipe.but(transformer_impl="transformer_engine", attention_backend="auto")
    measurement = host_launcher.measure(recipe)
    assert measurement.failure is None
    assert len(measurement.steps) == recipe.training.steps
