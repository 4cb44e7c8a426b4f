"""Tests of recipes with Transformer Engine's own modules. Where it is not installed they are skipped by name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.virtual_gpu.gpus import load_gpus

IS_INSTALLED = importlib.util.find_spec("transformer_engine") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if IS_INSTALLED or os.environ.get("MBMEM_REQUIRE_TE"):
        return
    for item in items:
        if "/tests/te/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="Transformer Engine is not installed ('make te' does it)"))


@pytest.fixture(scope="session")
def launcher_of() -> Iterator[Callable[[str], Launcher]]:
    """The launcher of a virtual GPU by its key, one for all tests: its server has loaded Transformer Engine once."""
    launchers: dict[str, Launcher] = {}

    def launcher(gpu: str = "h100-80gb") -> Launcher:
        if gpu not in launchers:
            launchers[gpu] = Launcher(load_gpus()[gpu], timeout=300)
        return launchers[gpu]

    yield launcher
    for each in launchers.values():
        each.close()
