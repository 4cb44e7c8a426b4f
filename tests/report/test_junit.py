"""Figures as JUnit properties."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report.junit import properties
from pytest_mbmem.report.results import Measured
from pytest_mbmem.sweep import Sweep

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]


def test_a_judged_measurement_has_its_figures_in_bytes(measured: Make) -> None:
    assert properties([measured(GIB, 2 * GIB, gate=PeakGate(), baseline=GIB)]) == [
        ("mbmem_device", "virtual-h100-80gb"),
        ("mbmem_recipe_digest", "now"),
        ("mbmem_peak_allocated_bytes", 2 * GIB),
        ("mbmem_peak_reserved_bytes", 2 * GIB + 2 * MIB),
        ("mbmem_worst_rank", 1),
        ("mbmem_phase", "step-2/backward"),
        ("mbmem_peak_allocated_bytes_by_rank", f"0:{GIB} 1:{2 * GIB}"),
        ("mbmem_flops_per_step", 5 * 10**12),
        ("mbmem_verdict", "regression"),
        ("mbmem_measured_bytes", 2 * GIB),
        ("mbmem_baseline_bytes", GIB),
    ]


def test_a_limit_is_not_called_a_baseline(measured: Make) -> None:
    names = dict(properties([measured(GIB, gate=PeakGate(limit=5))]))
    assert names["mbmem_limit_bytes"] == 5
    assert "mbmem_baseline_bytes" not in names


def test_what_is_not_known_is_left_out(measured: Make, failed: Make) -> None:
    missing = dict(properties([measured(GIB, gate=PeakGate(), recipe_digest=None)]))
    assert not {"mbmem_baseline_bytes", "mbmem_recipe_digest"} & missing.keys()
    out_of_memory = dict(properties([failed("out of memory", "no room")]))
    assert out_of_memory["mbmem_failure"] == out_of_memory["mbmem_verdict"] == "out of memory"
    assert "mbmem_peak_allocated_bytes" not in out_of_memory


def test_no_two_properties_of_a_test_share_a_name(measured: Make) -> None:
    first = measured(GIB, gate=PeakGate(), baseline=GIB)
    first.judged += measured(GIB, gate=PeakGate(metric="reserved", phase="build"), baseline=GIB).judged
    names = [name for name, _ in properties([first, measured(GIB, gate=PeakGate(), name="control")])]
    assert len(set(names)) == len(names)
    assert {"mbmem_verdict", "mbmem_verdict@reserved@build", "mbmem_verdict[control]"} <= set(names)


def test_traffic_and_host_memory_are_there_where_a_job_has_them(measured: Make) -> None:
    plain = measured(2 * GIB).measurement
    changes: dict[str, Any] = {"moved_bytes": {"to host": 5}, "host_peak": 7, "collective_bytes": {"tp": 3 * MIB + 2}}
    ranks = tuple(dataclasses.replace(r, **changes) for r in measured(GIB).measurement.ranks)
    other = dataclasses.replace(plain, ranks=ranks)
    found = dict(
        properties([Measured("k", None, other)], [Sweep.of(("c", plain), [("a", other, {})], "allocated", None, None)])
    )
    assert (found["mbmem_moved_to_host_bytes"], found["mbmem_host_peak_bytes"]) == (5, 7)
    assert found["mbmem_sweep_extra_tp_collective_bytes[a]"] == 2
    assert found["mbmem_sweep_extra_moved_to_host_bytes[a]"] == 5
    assert found["mbmem_sweep_slowdown[a]"] == 0
    assert found["mbmem_sweep_saved_bytes_by_rank[a]"] == f"0:{GIB}"
    assert found["mbmem_sweep_measured_phase[a]"] == "step-2/backward"
