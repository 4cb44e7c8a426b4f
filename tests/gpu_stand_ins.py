"""Virtual GPUs that stand in for real ones, in forks of a server that is there already."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_mbmem.measure import gpu_launch, nvml
from pytest_mbmem.measure.gpu_launch import GpuLauncher
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.workers import CallResult


def share_server(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> None:
    """Have every `GpuLauncher` and its twin make their calls in forks of the launcher's server."""

    def answers(own: GpuLauncher, requests: Sequence[dict[str, Any]], jobs: int) -> list[CallResult]:
        seen = {name: value for name, value in own.command_environment().items() if name.startswith("MBMEM_")}
        requests = [{**request, "environment": {**seen, **request["environment"]}} for request in requests]
        return launcher._answers(requests, jobs)

    monkeypatch.setattr(GpuLauncher, "_answers", answers)
    monkeypatch.setattr(gpu_launch, "Launcher", lambda gpu, *, timeout: launcher.on(gpu))
    monkeypatch.setattr(launcher, "close", lambda: None)  # at the end of a session in there


def stand_ins(monkeypatch: pytest.MonkeyPatch, **description: object) -> None:
    """Describe the GPUs that stand in for real ones (see virtual_gpu/stand_in.py)."""
    nvml._initialised.cache_clear()  # another test may have taken the variables of the last ones from this process
    monkeypatch.setenv("MBMEM_TEST_STAND_INS", json.dumps(description))
