"""The figures of two runs, which of them are worse, and the rules of --fail-on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report import json, junit_file
from pytest_mbmem.report.compared import Compared, broken_rules
from pytest_mbmem.report.fail_on import Rule
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.run_figures import File

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
Tests = dict[str, Measured]


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Compared]:
    """Of what the tests of two runs measured, by name."""

    def make(base: Tests, head: Tests, text: Callable[[Results], str] = json.text) -> Compared:
        paths = []
        for name, tests in (("base", base), ("head", head)):
            found = {f"t.py::{test}": TestResult(f"t.py::{test}", measured=[m]) for test, m in tests.items()}
            paths.append(tmp_path / f"{name}.{'json' if text is json.text else 'xml'}")
            paths[-1].write_text(text(Results({}, found)))
        return Compared.of(*map(File.load, paths))

    return make


Compare = Callable[..., Compared]


def verdicts(compared: Compared) -> dict[tuple[str, str], str]:
    return {(row.label.removeprefix("t.py::"), row.metric): row.verdict for row in compared.rows}


@pytest.mark.parametrize("text", [json.text, junit_file.text])
def test_each_figure_of_a_test_in_both_is_judged_as_by_its_gate(measured: Make, compare: Compare, text: object) -> None:
    compared = compare({"a": measured(GIB)}, {"a": measured(GIB + 8 * MIB)}, text)
    assert [row.metric for row in compared.rows] == ["allocated", "reserved", "counted-flops"]
    assert [row.verdict for row in compared.rows] == ["worse", "same", "same"]
    assert compared.rows[0].change == pytest.approx(8 / 1024)
    assert compared.summary == "3 figures of 1 test: 1 worse, 2 same"


def test_the_gates_own_tolerance_and_slack_decide(measured: Make, compare: Compare) -> None:
    loose = measured(GIB + 8 * MIB, gate=PeakGate(tolerance=0.1), baseline=GIB)
    assert verdicts(compare({"a": measured(GIB)}, {"a": loose}))["a", "allocated"] == "same"
    strict = measured(GIB - 2, gate=PeakGate(tolerance=0.0, slack=1), baseline=GIB)
    assert verdicts(compare({"a": measured(GIB)}, {"a": strict}))["a", "allocated"] == "better"


def test_a_phase_that_one_run_gates_is_compared_in_both(measured: Make, compare: Compare) -> None:
    gated = measured(GIB, gate=PeakGate(metric="reserved", phase="build"), baseline=GIB)
    assert verdicts(compare({"a": measured(GIB)}, {"a": gated}))["a", "reserved@build"] == "same"


def test_tests_that_one_run_has_alone_or_could_not_measure(measured: Make, failed: Make, compare: Compare) -> None:
    broken = failed("out of memory", "no")
    base = {"gone": measured(GIB), "breaks": measured(GIB), "mended": broken, "still": broken}
    head = {"new": measured(GIB), "breaks": broken, "mended": measured(GIB), "still": broken}
    compared = compare(base, head)
    assert verdicts(compared) == {
        ("gone", "allocated"): "gone",
        ("new", "allocated"): "new",
        ("breaks", "-"): "failed",
        ("mended", "-"): "fixed",
        ("still", "-"): "same",
    }
    cells = {row.label: row.cells()[3:5] for row in compared.rows}
    assert cells["t.py::breaks"] == ["-", "out of memory"]
    assert "1 failed, 1 gone" in compared.summary


@pytest.mark.parametrize(
    ("rule", "grows", "broken"),
    [
        ("allocated:1%", 10 * MIB, False),
        ("allocated:1%", 11 * MIB, True),
        ("allocated:10 MiB", 10 * MIB, False),
        ("allocated:10 MiB", 10 * MIB + 1, True),
        ("allocated:0%", 1, True),
        ("allocated:0%", -GIB // 2, False),
        ("reserved:10 MiB", 11 * MIB, True),
        ("allocated@backward:0%", 1, True),
        ("counted-flops:0%", 11 * MIB, False),
        ("missing", 11 * MIB, False),
    ],
)
def test_a_rule_is_broken_by_more_than_it_allows(
    measured: Make, compare: Compare, rule: str, grows: int, broken: bool
) -> None:
    gate = PeakGate(phase="backward", limit=GIB)
    compared = compare({"a": measured(GIB, gate=gate)}, {"a": measured(GIB + grows, gate=gate)})
    found = broken_rules(compared.rows, [Rule.parse(rule)])
    assert bool(found) is broken
    assert all(line.startswith(f"--fail-on {rule}: t.py::a ") for line in found)


def test_a_missing_test_breaks_its_rule_and_a_failed_one_every_rule(
    measured: Make, failed: Make, compare: Compare
) -> None:
    compared = compare({"a": measured(GIB), "b": measured(GIB)}, {"b": failed("died", "no")})
    (missing,) = broken_rules(compared.rows, [Rule.parse("missing")])
    assert missing == "--fail-on missing: t.py::a allocated: 1.00 GiB -> - (gone)"
    (broken,) = broken_rules(compared.rows, [Rule.parse("reserved:50%")])
    assert broken == "--fail-on reserved:50%: t.py::b: died"


def test_throughput_falls_as_the_time_of_a_step_rises() -> None:
    rule = Rule.parse("throughput:50%")
    assert not rule.is_broken(100, 200)
    assert rule.is_broken(100, 201)
    assert rule.is_about("solo-throughput")


def test_a_rule_on_a_figure_that_no_test_has_is_a_mistake(measured: Make, compare: Compare) -> None:
    compared = compare({"a": measured(GIB)}, {"a": measured(GIB)})
    message = "throughput:5%: no test has this figure in both runs; they have allocated, reserved, counted-flops"
    with pytest.raises(UserError, match=message):
        broken_rules(compared.rows, [Rule.parse("throughput:5%")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no rule; write a metric and how much worse"),
        ("allocated", "'allocated' is no rule"),
        ("memory:1%", "'memory:1%' is no rule"),
        ("throughput@backward:1%", "is no rule"),
        ("allocated@lunch:1%", "'lunch' is not one of"),
        ("allocated:1", "'1' is not a size"),
        ("allocated:-1%", "'-1%' is not a fraction"),
        ("throughput:5 MiB", "throughput is no size"),
        ("throughput:100%", "cannot fall by more than 100%"),
        ("counted-flops:5", "is not a percentage"),
    ],
)
def test_what_is_no_rule_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        Rule.parse(text)
    assert str(error.value).startswith("--fail-on: ")
    assert message in str(error.value)
