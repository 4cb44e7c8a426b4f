"""--mbmem-junit: a suite for the run, and a case for each verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import junitparser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junit_shape import checked, properties

from pytest_mbmem.diagnosis import Action, Finding
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.growth import GrowthSummary
from pytest_mbmem.report.findings import finding_lines
from pytest_mbmem.report.junit_file import text
from pytest_mbmem.report.junit_xml import address
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.terminal import failure_text
from pytest_mbmem.sweep import Sweep

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
NODEID = "tests/deep/test_x.py::TestY::test_z[a::b-c/d]"


def cases(*tests: TestResult, **fields: str) -> dict[str, ElementTree.Element]:
    """By name, of a file that has the shape of one."""
    root = checked(text(Results({}, {test.id: test for test in tests}, **fields)))
    return {case.get("name", ""): case for case in root.iter("testcase")}


def test_a_run_is_a_suite_that_says_when_where_and_what() -> None:
    results = Results(
        {"device": "virtual-x, a virtual X", "versions": "torch 2.14.1"}, {}, "2026-01-31T12:00:00Z", "abcdef"
    )
    (suite,) = checked(text(results, datetime(2026, 1, 31, 12, 5, tzinfo=timezone.utc)))
    assert suite.get("timestamp") == "2026-01-31T12:00:00+00:00"
    assert suite.get("hostname")
    assert properties(suite) == {
        "mbmem_device": "virtual-x",
        "mbmem_header_device": "virtual-x, a virtual X",
        "mbmem_header_versions": "torch 2.14.1",
        "mbmem_run": "2026-01-31T12:00:00+00:00/2026-01-31T12:05:00+00:00",
        "mbmem_revision": "abcdef",
    }


def test_each_verdict_is_a_case_with_its_own_figures(measured: Make) -> None:
    one = measured(GIB, gate=PeakGate(), baseline=GIB // 2)
    one.judged += measured(GIB, gate=PeakGate(metric="reserved", phase="build"), baseline=4 * MIB).judged
    other = measured(GIB, name="twin")
    failure = failure_text(NODEID, one, one.judged[0].judgement, None)
    test = TestResult(NODEID, "failed", 1.5, [one, other], failure=failure)
    found = cases(test)
    name = "test_z[a::b-c/d]"
    assert list(found) == [f"{name} allocated", f"{name} reserved@build", f"{name}@twin measured"]
    assert {case.get("classname") for case in found.values()} == {"tests.deep.test_x.TestY"}
    assert [case.get("time") for case in found.values()] == ["1.5", "0.0", "0.0"]
    allocated, reserved, twin = map(properties, found.values())
    assert allocated["mbmem_test"] == NODEID
    assert (allocated["mbmem_verdict"], allocated["mbmem_baseline_bytes"]) == ("regression", str(GIB // 2))
    assert "mbmem_verdict@reserved@build" not in allocated
    assert reserved["mbmem_measured_bytes@reserved@build"] == str(2 * MIB)
    assert twin["mbmem_peak_allocated_bytes[twin]"] == str(GIB)


def test_a_failed_gate_has_its_whole_text_with_the_headline_as_message(measured: Make) -> None:
    one = measured(2 * GIB, gate=PeakGate(), baseline=GIB)
    headline = "REGRESSION: peak allocated is 1017.88 MiB over what the baseline allows"
    found = cases(TestResult("t.py::test_a", "failed", measured=[one], failure=f"{headline}\n..."))
    (failure,) = found["test_a allocated"].iterfind("failure")
    assert failure.get("message") == headline
    assert (failure.text or "").startswith(f"{headline}\n\n  measured       2.00 GiB")
    assert "--mbmem-update=changed" in (failure.text or "")


def test_the_headline_of_a_failure_in_a_worker_of_xdist_is_not_the_workers_name() -> None:
    found = cases(
        TestResult("t.py::test_a", "failed", failure="[gw0] linux -- Python 3.11 /bin/python\nit is too large")
    )
    (failure,) = found["test_a"].iterfind("failure")
    assert failure.get("message") == "it is too large"


def test_what_the_diagnosis_found_stands_in_the_first_failure(measured: Make) -> None:
    one = measured(2 * GIB, gate=PeakGate(), baseline=GIB)
    one.judged += one.judged
    finding = Finding("leak", "it grows", ("3 MiB a step",), "a list", "run longer", (Action("clear", "1%"),), "here")
    failure = failure_text("t.py::test_a", one, one.judged[0].judgement, None)
    test = TestResult("t.py::test_a", "failed", measured=[one], findings=[finding], failure=failure)
    first, second = (case.findtext("failure", "") for case in cases(test).values())
    assert first.endswith("\n\n" + "\n".join(finding_lines(finding)))
    assert "it grows" not in second


def test_a_broken_measurement_is_an_error_and_out_of_memory_a_failure(failed: Make) -> None:
    died = TestResult("t.py::test_died", "failed", measured=[failed("died", "killed")], failure="INVALID: peak")
    short = TestResult("t.py::test_oom", "failed", measured=[failed("out of memory", "no room")], failure="OUT OF MEM")
    found = cases(died, short)
    assert found["test_died allocated"].find("error") is not None
    assert found["test_oom allocated"].find("failure") is not None


def test_an_expected_failure_of_a_measurement_that_nothing_judges_passes(failed: Make) -> None:
    one = failed("out of memory", "no room")
    one.judged = []
    (case,) = cases(TestResult("t.py::test_a", "passed", measured=[one])).values()
    assert properties(case)["mbmem_failure"] == "out of memory"
    assert case.find("failure") is None


@pytest.mark.parametrize(
    ("outcome", "failure", "tag", "message"),
    [
        (
            "failed",
            "def test_a():\n>   assert 1 == 2\nE   assert 1 == 2\n\nt.py:2: AssertionError",
            "failure",
            "assert 1 == 2",
        ),
        ("error", "E   fixture broke", "error", "fixture broke"),
        ("skipped", "too few GPUs: 2 are needed", "skipped", "too few GPUs: 2 are needed"),
        ("xfailed", "E   assert False", "skipped", "expected to fail: assert False"),
    ],
)
def test_what_no_gate_decided_is_a_case_of_the_test_itself(
    measured: Make, outcome: str, failure: str, tag: str, message: str
) -> None:
    one = measured(GIB, gate=PeakGate(limit=2 * GIB))
    found = cases(TestResult("t.py::test_a", outcome, measured=[one], failure=failure))
    assert list(found) == ["test_a", "test_a allocated"]
    (result,) = found["test_a"].iterfind(tag)
    assert result.get("message") == message
    assert result.text == failure
    assert found["test_a allocated"].find(tag) is None


def test_an_expected_failure_of_a_gate_is_skipped(measured: Make) -> None:
    one = measured(2 * GIB, gate=PeakGate(limit=GIB))
    failure = "REGRESSION: peak allocated is 1.00 GiB over the limit"
    (case,) = cases(TestResult("t.py::test_a", "xfailed", measured=[one], failure=failure)).values()
    (skipped,) = case.iterfind("skipped")
    assert (skipped.get("type"), skipped.get("message")) == ("pytest.xfail", f"expected to fail: {failure}")


def test_a_test_that_passed_against_expectation_says_so() -> None:
    (case,) = cases(TestResult("t.py::test_a", "xpassed")).values()
    assert properties(case)["mbmem_outcome"] == "xpassed"
    assert case.find("failure") is None


def test_what_an_update_accepts_passes(measured: Make) -> None:
    one = measured(2 * GIB, gate=PeakGate(), baseline=GIB, accepted=True)
    (case,) = cases(TestResult("t.py::test_a", measured=[one])).values()
    assert properties(case)["mbmem_verdict"] == "regression"
    assert properties(case)["mbmem_accepted"] == "True"
    assert case.find("failure") is None


@pytest.mark.parametrize(("outcome", "tag"), [("passed", "flakyFailure"), ("failed", "rerunFailure")])
def test_earlier_failures_of_a_test_that_ran_again_are_interim_results(outcome: str, tag: str) -> None:
    test = TestResult("t.py::test_a", outcome, failure="E  last" if outcome == "failed" else "", earlier=["E  first"])
    (case,) = cases(test).values()
    (interim,) = case.iterfind(tag)
    assert interim.get("message") == "first"
    assert interim.findtext("stackTrace") == "E  first"


def test_growth_sweeps_and_proofs_are_cases(measured: Make) -> None:
    growth = GrowthSummary("", False, "grows by 1 MiB a step", MIB, MIB, 0, 0, 0)
    plain = measured(2 * GIB).measurement
    other = dataclasses.replace(plain, ranks=measured(GIB).measurement.ranks)
    sweep = Sweep.of(("c", plain), [("a", other, {})], "allocated", None, "layers")
    proofs = [
        {"id": "good", "verdict": "refused as documented", "headline": "good: refused as documented"},
        {"id": "bad", "verdict": "documentation and code disagree", "headline": "bad: not refused"},
    ]
    test = TestResult(
        "t.py::test_a", "failed", growths=[growth], sweeps=[sweep], proofs=proofs, failure="bad: not refused"
    )
    found = cases(test)
    assert list(found) == ["test_a growth", "test_a sweep layers", "test_a proof good", "test_a proof bad"]
    assert properties(found["test_a growth"])["mbmem_growth_per_step_bytes"] == str(MIB)
    assert found["test_a growth"].findtext("failure") == "grows by 1 MiB a step"
    assert properties(found["test_a sweep layers"])["mbmem_sweep_saved_bytes[layers: a]"] == str(GIB)
    assert found["test_a proof good"].find("failure") is None
    assert found["test_a proof bad"].find("failure") is not None


def test_artifacts_are_properties_and_attachments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Make
) -> None:
    folder = tmp_path / "left" / "test_a"
    folder.mkdir(parents=True)
    (folder / "failure.txt").touch()
    (folder / "a[1].txt").touch()  # no line can name it
    monkeypatch.setenv("CI_PROJECT_DIR", str(tmp_path))
    one = measured(2 * GIB, gate=PeakGate(limit=GIB))
    test = TestResult(
        "t.py::test_a", "failed", measured=[one], failure="REGRESSION: peak", artifacts=[str(folder), "/s.pickle"]
    )
    case = cases(test)["test_a allocated"]
    paths = [p.get("value") for p in case.iterfind("properties/property") if p.get("name") == "mbmem_artifact"]
    assert paths == [str(folder), "/s.pickle"]
    assert case.findtext("system-out") == "[[ATTACHMENT|left/test_a/failure.txt]]\n[[ATTACHMENT|/s.pickle]]"


def test_cases_of_the_same_name_are_numbered(measured: Make) -> None:
    found = cases(TestResult("t.py::test_a", measured=[measured(GIB), measured(GIB)]))
    assert list(found) == ["test_a measured", "test_a measured #2"]


def test_class_names_and_names_are_pytests() -> None:
    from _pytest.junitxml import mangle_test_address

    for nodeid in (NODEID, "t.py::test_a", "a/b.py::T::U::test_a[x.py]", "a.b/test_c.py::test_d"):
        *classes, name = mangle_test_address(nodeid)
        assert address(nodeid) == (".".join(classes), name)


@settings(max_examples=40)
@given(st.text(), st.text(), st.text())
def test_no_text_breaks_the_file(name: str, failure: str, path: str) -> None:
    test = TestResult(f"t.py::{name}", "failed", failure=failure, artifacts=[path], earlier=[failure])
    written = text(Results({name: failure}, {test.id: test}, revision=failure))
    root = checked(written) if name else ElementTree.fromstring(written)
    assert len(root.findall(".//testcase")) == 1
    (suite,) = junitparser.JUnitXml.fromstring(written.encode())
    assert suite.failures == 1
