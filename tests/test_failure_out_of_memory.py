"""What a test that runs out of memory says, and when the reason is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure import oom
from pytest_mbmem.measurement import Measurement

# Does not fit 80 GB, whatever the allocator does.
RECIPE = """
import pytest
from pytest_mbmem import OutOfMemory, Model, Recipe, Training

MODEL = Model(num_layers=2, hidden_size=2048, num_attention_heads=16, vocab_size=64000)
TRAINING = Training(seq_length=8192, micro_batch_size=20, steps=1, attention_backend="flash")
RECIPE = Recipe(model=MODEL, training=TRAINING)
"""


@pytest.fixture
def explanations(monkeypatch: pytest.MonkeyPatch) -> list[Measurement]:
    """The measurements that were asked about."""
    asked: list[Measurement] = []
    original = oom.explained

    def explained(launcher: Any, measurement: Measurement) -> Measurement:
        asked.append(measurement)
        return original(launcher, measurement)

    monkeypatch.setattr(oom, "explained", explained)
    return asked


def test_a_test_that_runs_out_of_memory_says_why(
    real_project: pytest.Pytester, explanations: list[Measurement]
) -> None:
    real_project.makepyfile(
        RECIPE
        + """
def test_too_large(mbmem):
    mbmem.measure(RECIPE)
"""
    )
    result = real_project.runpytest_inprocess("--mbmem-json=out.json", "--mbmem-html=out.html")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E *OutOfMemory: OUT OF MEMORY by capacity: rank 0 asked for * in step-1/forward (*)",
            "E * asked for *",
            "E *capacity: expandable segments do not make it fit: * are needed and PyTorch can have 78.61 GiB",
            "E *Remedies in the order of NVIDIA's *",
            "E * full recompute * the largest replay of all",
            "E *out of memory on rank 0 in step-1/forward (NVIDIA H100 80GB HBM3): CUDA out of memory. Tried*",
        ]
    )
    assert len(explanations) == 1
    (test,) = json.loads((real_project.path / "out.json").read_text())["tests"]
    (measured,) = test["measurements"]
    assert measured["measurement"]["failure"]["shortage"]["diagnosis"]["verdict"] == "capacity"
    assert "capacity: expandable segments do not make it fit" in (real_project.path / "out.html").read_text()


def test_the_reason_is_not_looked_for_where_it_is_expected(
    real_project: pytest.Pytester, explanations: list[Measurement]
) -> None:
    real_project.makepyfile(
        RECIPE
        + """
def test_raises(mbmem):
    with pytest.raises(OutOfMemory, match="CUDA out of memory"):
        mbmem.measure(RECIPE)

def test_may_fail(mbmem):
    assert mbmem.measure(RECIPE, may_fail=True).failure.shortage.requested > 0

@pytest.mark.xfail(raises=OutOfMemory, strict=True)
def test_xfail(mbmem):
    mbmem.measure(RECIPE)
"""
    )
    real_project.runpytest_inprocess().assert_outcomes(passed=2, xfailed=1)
    assert explanations == []


def test_a_test_asks(real_project: pytest.Pytester, explanations: list[Measurement]) -> None:
    real_project.makepyfile(
        RECIPE
        + """
def test_by_the_error(mbmem):
    with pytest.raises(OutOfMemory) as caught:
        mbmem.measure(RECIPE)
    shortage = mbmem.explain(caught.value)
    assert shortage.verdict == "capacity", shortage.explain()
    assert shortage.diagnosis.remedy("full recompute").fits
    assert "Remedies in the order of" in shortage.explain()

def test_by_the_measurement(mbmem):
    assert mbmem.explain(mbmem.measure(RECIPE, may_fail=True)).verdict == "capacity"

def test_of_one_that_fits(mbmem):
    mbmem.explain(mbmem.measure(RECIPE.but(micro_batch_size=1)))

def test_of_something_else(mbmem):
    mbmem.explain("no")
"""
    )
    result = real_project.runpytest_inprocess()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "the measurement did not fail; only one that ran out of memory can be explained",
            "mbmem.explain('no'): allowed are a measurement and the OutOfMemory that mbmem.measure raises",
        ]
    )


def test_gates_say_why(real_project: pytest.Pytester, explanations: list[Measurement]) -> None:
    real_project.makepyfile(
        RECIPE
        + """
@pytest.mark.peak_memory(limit="20 GiB")
def test_peak(mbmem):
    mbmem.measure(RECIPE, may_fail=True)

@pytest.mark.fragmentation("10%")
def test_fragmentation(mbmem):
    mbmem.measure(RECIPE, may_fail=True)

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

@pytest.mark.memory_saving(control=FULL)
def test_saving(mbmem):
    mbmem.measure(RECIPE, may_fail=True)

@pytest.mark.memory_saving(control=dict.fromkeys(FULL), at_least="1 GiB")
def test_control(mbmem):
    mbmem.measure(RECIPE.but(**FULL))
"""
    )
    result = real_project.runpytest_inprocess()
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*_ test_peak _*",
            "OUT OF MEMORY by capacity: rank 0 asked for * in step-1/forward (*)",
            "capacity: expandable segments do not make it fit: *",
            "*_ test_fragmentation _*",
            "OUT OF MEMORY: the recipe does not fit *",
            "capacity: expandable segments do not make it fit: *",
            "*_ test_saving _*",
            "OUT OF MEMORY by capacity: rank 0 asked for * in step-1/forward (*)",
            "capacity: expandable segments do not make it fit: *",
            "*_ test_control _*",
            "INVALID: the control itself does not run (out of memory), so nothing is compared",
            "capacity: expandable segments do not make it fit: *",
        ]
    )


def test_why_there_is_no_reason_is_said(real_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(launcher: Any, measurement: Measurement) -> Measurement:
        raise UserError("no room for a second run")

    monkeypatch.setattr(oom, "explained", explained)
    real_project.makepyfile(
        RECIPE
        + """
def test_error(mbmem):
    mbmem.measure(RECIPE)

@pytest.mark.peak_memory(limit="20 GiB")
def test_gate(mbmem):
    mbmem.measure(RECIPE, may_fail=True)
"""
    )
    result = real_project.runpytest_inprocess()
    result.assert_outcomes(failed=2)
    reason = "*unknown: the run could not be repeated: no room for a second run"
    result.stdout.fnmatch_lines(["*_ test_error _*", reason, "*_ test_gate _*", reason])


# Tests that run whole in a worker -------------------------------------------------------------------------------------


def test_whole_tests_are_told_by_their_history(
    real_project: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_project.makepyfile(
        """
        import ctypes
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="75 GiB")

        def make(gib):
            import torch
            return torch.empty(gib * 2**30, dtype=torch.uint8, device="cuda")

        def test_fragmentation():
            large = [make(10) for _ in range(7)]
            del large[::2]
            keep = [make(6) for _ in range(4)]  # one in each gap
            wide = [make(8) for _ in range(2)]

        def test_capacity():
            large = [make(30) for _ in range(3)]

        def test_starved():
            first = make(1)
            pointer = ctypes.c_void_p()
            assert ctypes.CDLL(None).cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(40 * 2**30)) == 0
            large = make(50)

        @pytest.mark.xfail
        def test_expected():
            large = [make(30) for _ in range(3)]

        def test_again_and_smaller():
            import torch
            first = [make(30)]
            for _ in range(3):
                with pytest.raises(torch.OutOfMemoryError):
                    make(70)
            large = [make(30) for _ in range(2)]

        def test_raised_later():
            import torch
            with pytest.raises(torch.OutOfMemoryError) as error:
                make(90)
            with pytest.raises(torch.OutOfMemoryError):
                make(100)
            raise error.value

        def test_raised_by_another():
            import torch
            with pytest.raises(torch.OutOfMemoryError):
                make(90)
            raise torch.OutOfMemoryError("of a library's own")
        """
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = real_project.runpytest_inprocess("-p", "no:randomly", "-p", "no:tmpdir", "--mbmem-json=out.json")
    result.assert_outcomes(failed=6, xfailed=1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("mbmem-test")] == []
    known = "up to the failed request (what comes after it is not known)"
    result.stdout.fnmatch_lines(
        [
            "*- mbmem: out of memory -*",
            "OUT OF MEMORY by fragmentation: rank 0 asked for 8.00 GiB in test",
            "  by *test_it.py:* (make)",
            f"fragmentation: the same allocations fit with expandable segments {known}*",
            "OUT OF MEMORY by capacity: rank 0 asked for 30.00 GiB in test",
            "capacity: expandable segments do not make it fit: 90.00 GiB are needed *",
            "OUT OF MEMORY, starved by memory outside PyTorch: rank 0 asked for 50.00 GiB in test",
            f"starved: the same allocations fit a device on which nothing outside PyTorch holds memory {known}",
        ]
    )
    tests = json.loads((real_project.path / "out.json").read_text())["tests"]
    shortages = [test["measurements"][0]["measurement"]["failure"]["shortage"] for test in tests]
    assert [(s and s["requested"] >> 30, s and s["diagnosis"] and s["diagnosis"]["verdict"]) for s in shortages] == [
        (8, "fragmentation"),
        (30, "capacity"),
        (50, "starved"),
        (30, None),  # nobody reads it
        (30, "capacity"),
        (90, "capacity"),
        (None, None),  # the allocator saw no such failure
    ]
    of_the_last = shortages[4]["diagnosis"]["trials"]
    assert [(trial["under"], trial["fits"]) for trial in of_the_last] == [
        ("without limit", True),
        ("as recorded", False),
        ("expandable segments", False),
    ]
    assert [trial["failed_request"] and trial["failed_request"] >> 30 for trial in of_the_last] == [None, 30, 30]


def test_without_a_history_nothing_is_replayed(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.no_memory_growth
        def test_too_large():
            import torch
            torch.empty(90 * 2**30, dtype=torch.uint8, device="cuda")
        """
    )
    result = real_project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "OUT OF MEMORY, cause not found: rank 0 asked for 90.00 GiB in test",
            "unknown: the allocator's history was not recorded (torch 2.14 and later do, without no_memory_growth)",
        ]
    )
    result.stdout.no_fnmatch_line("*its allocations replayed*")
