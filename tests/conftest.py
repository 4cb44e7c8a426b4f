"""Shared by all rooms: a launcher on the virtual GPU, and a recipe that is measured in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training
from pytest_mbmem.virtual_gpu.gpus import load_gpus

pytest_plugins = ["pytester"]


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Real measurements on the default virtual GPU; one server for the whole session."""
    launcher = Launcher(load_gpus()["h100-80gb"], timeout=120)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def small_recipe() -> Recipe:
    """Two layers of 64 channels on one rank."""
    model = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000)
    return Recipe(model=model, parallelism=Parallelism(), training=Training(seq_length=128, steps=2))
