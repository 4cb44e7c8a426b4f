"""Figures of --mbmem-json in the file that pytest wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from junit_shape import properties

from pytest_mbmem.diagnosis import Finding
from pytest_mbmem.errors import UserError
from pytest_mbmem.growth import GrowthSummary
from pytest_mbmem.report import json
from pytest_mbmem.report.junit_add import add
from pytest_mbmem.report.junit_xml import text
from pytest_mbmem.report.results import Measured, Results, TestResult

GIB = 2**30
Make = Callable[..., Measured]

PYTEST = """<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest" tests="3">
<testcase classname="tests.test_x.TestY" name="test_a[1]" time="0.1"><properties><property name="own" value="1" />
<property name="mbmem_verdict" value="of before" />
<property name="mbmem_findings" value="leak" /></properties><failure message="no">E  no
  more</failure></testcase><testcase classname="PREFIX.t" name="test_b" time="0.1" />
<testcase classname="t" name="test_c" time="0.1" /></testsuite></testsuites>"""


def files(tmp_path: Path, *tests: TestResult) -> tuple[Path, Path]:
    results, pytests = tmp_path / "r.json", tmp_path / "p.xml"
    results.write_text(json.text(Results({}, {test.id: test for test in tests})))
    pytests.write_text(PYTEST)
    return results, pytests


def test_each_tests_case_gets_its_figures_and_keeps_all_else(tmp_path: Path, measured: Make) -> None:
    finding = Finding("leak", "it grows", (), "a list", "run longer", (), "here")
    growth = GrowthSummary("", True, "no growth", 0, 0, 0, 0, 0)
    first = TestResult("tests/test_x.py::TestY::test_a[1]", measured=[measured(GIB)], artifacts=["left"])
    first.findings, first.growths = [finding], [growth]
    second = TestResult("t.py::test_b", measured=[measured(2 * GIB)])
    added = add(*files(tmp_path, first, second, TestResult("t.py::test_d")))
    assert (added.tests, added.without) == (2, ["t.py::test_d"])
    written = text(added.xml)
    cases = list(ElementTree.fromstring(written).iter("testcase"))
    found = properties(cases[0])
    assert (found["own"], found["mbmem_peak_allocated_bytes"], found["mbmem_artifact"]) == ("1", str(GIB), "left")
    assert (found["mbmem_findings"], found["mbmem_growth_verdict"]) == ("leak", "pass")
    assert "mbmem_verdict" not in found
    assert cases[0].findtext("failure") == "E  no\n  more"
    assert properties(cases[1])["mbmem_peak_allocated_bytes"] == str(2 * GIB)
    assert properties(cases[2]) == {}


def test_adding_again_changes_nothing(tmp_path: Path, measured: Make) -> None:
    results, pytests = files(tmp_path, TestResult("t.py::test_c@group", measured=[measured(GIB)]))
    once = text(add(results, pytests).xml)
    pytests.write_text(once)
    assert text(add(results, pytests).xml) == once


def test_files_of_different_runs_are_a_mistake(tmp_path: Path) -> None:
    results, pytests = files(tmp_path, TestResult("t.py::test_d"))
    with pytest.raises(UserError, match=r"p\.xml: no case for t\.py::test_d"):
        add(results, pytests)
    results, pytests = files(tmp_path)
    with pytest.raises(UserError, match=r"nothing to get: .*r\.json has no tests"):
        add(results, pytests)
