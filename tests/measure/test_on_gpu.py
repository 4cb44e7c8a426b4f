"""Losses of a run whose numbers mean something; the rest of what only a real GPU has is in test_gpu_launch.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_mbmem.measure.host import HostLauncher, shrunk
from pytest_mbmem.recipe import Recipe


def test_the_loss_is_the_mean_over_all_microbatches(
    host_launcher: HostLauncher, small_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = shrunk(small_recipe.but(global_batch_size=2), microbatches=2)
    result = host_launcher.call(
        "gpu_losses:both", {"recipe": recipe.to_dict(), "folder": str(tmp_path), "spoil": False}
    )
    assert result.failure is None, result.message
    assert result.value["microbatches"] == 2
    assert result.value["kept"] == [pytest.approx(result.value["mean"], rel=1e-5)]


def test_a_loss_that_is_not_finite_is_none(host_launcher: HostLauncher, small_recipe: Recipe, tmp_path: Path) -> None:
    recipe = shrunk(small_recipe)
    arguments = {"recipe": recipe.to_dict(), "folder": str(tmp_path), "spoil": True}
    result = host_launcher.call("gpu_losses:both", arguments)
    assert result.failure is None, result.message
    assert result.value["kept"] == [None]


def test_real_gpus_train_on_random_text(host_launcher: HostLauncher, small_recipe: Recipe, tmp_path: Path) -> None:
    recipe = shrunk(small_recipe)
    result = host_launcher.call("gpu_losses:filled", {"recipe": recipe.to_dict(), "folder": str(tmp_path)})
    assert result.failure is None, result.message
    value, length = result.value, recipe.training.seq_length
    assert value["follows"]
    assert value["different"] > length // 2
    assert not value["again"]
    assert value["hidden"] == [[int(key > query) for key in range(length)] for query in range(length)]
