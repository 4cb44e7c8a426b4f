"""Measurements as a run yields them, made by hand, with their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_mbmem.baseline_file import Entry, Figure
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.report.results import Judged, Measured, Results, TestResult

MIB, GIB = 2**20, 2**30
H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=True)


def make_measured(
    *peaks: int,
    baseline: int | None = None,
    gate: PeakGate | None = None,
    old_recipe: Mapping[str, Any] | None = None,
    accepted: bool = False,
    name: str | None = None,
    key: str = "test_llama",
    **fields: Any,
) -> Measured:
    """One rank for each peak allocated, reached in step-2/backward, judged by `gate` against `baseline` bytes.

    `old_recipe` is the one that the baseline was recorded with, if it was another.
    """
    recipe = {"model": {"hidden_size": 64}}
    ranks = tuple(
        RankMeasurement(
            number,
            {"tp": 0, "pp": number},
            stands_for=4,
            phases=(
                PhaseFigures(0, "build", *[{"allocated": MIB, "reserved": 2 * MIB}] * 2),
                PhaseFigures(2, "backward", *[{"allocated": peak, "reserved": peak + 2 * MIB}] * 2),
            ),
            flops_per_step=5 * 10**12,
            collective_bytes={"tp": 3 * MIB},
        )
        for number, peak in enumerate(peaks)
    )
    fields = {"recipe": recipe, "recipe_digest": "now", "world_size": 8, "environment": {"torch": "2.14.1"}, **fields}
    measurement = Measurement(H100, ranks, **fields)
    measured = Measured(key + (f"@{name}" if name else ""), name, measurement)
    if gate is not None:
        entry = None
        if baseline is not None:
            figure = Figure(
                value=baseline,
                rank=0,
                phase="step-2/backward",
                ranks=dict.fromkeys(range(len(peaks)), baseline),
                first=baseline,
                environment=measurement.environment,
            )
            digest = "now" if old_recipe is None else "before"
            entry = Entry(digest, old_recipe or recipe, {gate.metric_id: figure})
        measured.judged.append(Judged(judge(gate, measurement, entry, measured.key), accepted))
    return measured


@pytest.fixture
def measured() -> Callable[..., Measured]:
    """Makes a measurement, see `make_measured`."""
    return make_measured


@pytest.fixture
def failed() -> Callable[..., Measured]:
    """Makes a judged measurement that ended with a failure."""

    def make(kind: Any, message: str) -> Measured:
        failure = Failure(kind, 0, message, 1, "forward")
        return make_measured(GIB, gate=PeakGate(), baseline=GIB, failure=failure)

    return make


@pytest.fixture
def results() -> Callable[..., Results]:
    """Makes the results of a run from node ids and what each measured."""

    def make(tests: Mapping[str, list[Measured]]) -> Results:
        header = {"device": "virtual-h100-80gb"}
        return Results(header, {nodeid: TestResult(nodeid, "passed", 1.5, m) for nodeid, m in tests.items()})

    return make
