"""conftest.py of the projects in which the plugin's hooks are tested: a launcher that makes its figures up.

The peak of rank 0 is as many MiB as the recipe's seq_length (plus FAKE_EXTRA_MIB), rank 1 has half of it, and a recipe
named after a failure fails. So a test chooses the verdict without a device.

Each label of recompute_modules takes 16 MiB off rank 0 and adds 5% of the FLOPs, but "moe" changes no figure,
"shared_experts" adds 8 MiB, and "layernorm" takes 8 MiB off rank 1 alone. Each label of offload_modules takes 8 MiB off
rank 0, which move to the host and back. Every recipe that is measured is a line of the file that FAKE_LOG names.

With FAKE_STEP_MS the device is a real GPU, and these are the milliseconds of rank 0's cold step and of its timed steps.
Rank 1 takes half of them. FAKE_MODE is "solo" or "joint", and FAKE_MODEL_FLOPS are those of each rank.

PyTorch reserves twice the peak if it can, and runs out of memory on a GPU that has less than 1.5 times the peak for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
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
        virtual = "FAKE_STEP_MS" not in os.environ
        key = f"virtual-{self.gpu.key}" if virtual else self.gpu.key
        return Device(key=key, name=self.gpu.name, capacity=self.gpu.capacity, virtual=virtual)

    def measure_many(self, recipes: Sequence[Recipe], *, ranks: Any = "distinct") -> list[Measurement]:
        return [self.measure(recipe, ranks=ranks) for recipe in recipes]

    def measure(
        self, recipe: Recipe, *, ranks: Any = "distinct", count_flops: bool = True, check_effects: bool = True
    ) -> Measurement:
        if "FAKE_LOG" in os.environ:
            with Path(os.environ["FAKE_LOG"]).open("a") as log:
                log.write(f"{recipe.digest} {ranks}\n")
        peak = (recipe.training.seq_length + int(os.environ.get("FAKE_EXTRA_MIB", "0"))) * MIB
        recompute, offload = recipe.memory.recompute_modules or (), recipe.memory.offload_modules
        effects = {"moe": 0, "shared_experts": -8 * MIB, "layernorm": 0}
        saved = sum(effects.get(label, 16 * MIB) for label in recompute) + 8 * MIB * len(offload)
        moved = {"to host": 8 * MIB, "to device": 8 * MIB} if offload else {}
        costs: dict[str, Any] = {
            "flops_per_step": 1000 + 50 * len([label for label in recompute if label != "moe"]),
            "collective_bytes": {"tp": MIB},
            "moved_bytes": {way: size * len(offload) for way, size in moved.items()},
            "host_peak": 8 * MIB * len(offload),
        }
        if not count_flops:
            costs |= {"flops_per_step": None, "collective_bytes": {}}
        failure = None
        if recipe.name in FAILURES:
            kind, message = FAILURES[recipe.name]
            failure = Failure(kind, 1, message, 1, "forward")
        elif peak * 3 // 2 > self.gpu.usable:
            failure = Failure("out of memory", 0, "CUDA out of memory. Tried to allocate 1.00 GiB.", 2, "backward")
        return Measurement(
            device=self.device,
            mode=os.environ.get("FAKE_MODE", "solo"),
            ranks=(
                _rank(0, peak - saved, self.gpu.usable, costs),
                _rank(1, peak // 2 - 8 * MIB * ("layernorm" in recompute), self.gpu.usable, costs),
            ),
            recipe=recipe.to_dict(),
            recipe_digest=recipe.digest,
            world_size=2,
            environment={"torch": "2.14.1"},
            failure=failure,
        )

    def on(self, gpu: Any) -> FakeLauncher:
        return FakeLauncher(gpu, timeout=self.timeout)

    def close(self) -> None:
        pass

    leave = close


def _rank(number: int, peak: int, usable: int, costs: dict[str, Any]) -> RankMeasurement:
    reserved = min(2 * peak, usable)
    costs = {**costs, "allocation_retries": int(reserved < 2 * peak)}
    if times := [float(time) / 1000 / (1 + number) for time in os.environ.get("FAKE_STEP_MS", "").split()]:
        costs |= {"cold_step": times[0], "step_times": tuple(times[1:])}
        costs["model_flops"] = int(float(os.environ["FAKE_MODEL_FLOPS"])) if "FAKE_MODEL_FLOPS" in os.environ else None
    figures: dict[Any, int] = {"allocated": peak, "reserved": reserved, "active": peak, "inactive_split": 0}
    phases = (PhaseFigures(0, "build", figures, figures), PhaseFigures(2, "backward", figures, figures))
    place = {"tp": 0, "pp": number}
    return RankMeasurement(rank=number, coordinates=place, stands_for=1, phases=phases[number:], **costs)


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(launch, "Launcher", FakeLauncher)
    config.add_cleanup(patch.undo)
