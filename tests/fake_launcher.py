"""conftest.py of the projects in which the plugin's hooks are tested: a launcher that makes its figures up.

The peak of rank 0 is as many MiB as the recipe's seq_length (plus FAKE_EXTRA_MIB), rank 1 has half of it, and a recipe
named after a failure fails. So a test chooses the verdict without a device.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from pytest_mbmem.measure import launch
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Recipe

MIB = 2**20
FAILURES: dict[str, Any] = {
    "oom": ("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB."),
    "dies": ("died", "the worker was killed by SIGKILL"),
    "hangs": ("timeout", "no result within 600 s"),
    "raises": ("error", "Traceback (most recent call last):\nValueError: oh no"),
}


class FakeLauncher:
    """Stands in for `Launcher`."""

    def __init__(self, gpu: Any, *, count: int = 1, timeout: float = 600.0) -> None:
        self.gpu, self.timeout = gpu, timeout

    @property
    def device(self) -> Device:
        return Device(key=f"virtual-{self.gpu.key}", name=self.gpu.name, capacity=self.gpu.capacity, virtual=True)

    def measure(self, recipe: Recipe, *, ranks: Any = "distinct", count_flops: bool = True) -> Measurement:
        peak = (recipe.training.seq_length + int(os.environ.get("FAKE_EXTRA_MIB", "0"))) * MIB
        failure = None
        if recipe.name in FAILURES:
            kind, message = FAILURES[recipe.name]
            failure = Failure(kind, 1, message, 1, "forward")
        return Measurement(
            device=self.device,
            ranks=(_rank(0, peak), _rank(1, peak // 2)),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=2,
            environment={"torch": "2.14.1"},
            failure=failure,
        )

    def close(self) -> None:
        pass


def _rank(number: int, peak: int) -> RankMeasurement:
    figures: dict[Any, int] = {"allocated": peak, "reserved": 2 * peak, "active": peak, "inactive_split": 0}
    phases = (PhaseFigures(0, "build", figures, figures), PhaseFigures(2, "backward", figures, figures))
    return RankMeasurement(rank=number, coordinates={"tp": 0, "pp": number}, stands_for=1, phases=phases[number:])


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(launch, "Launcher", FakeLauncher)
    config.add_cleanup(patch.undo)
