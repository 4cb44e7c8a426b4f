"""The report of --mbmem-junit: a suite for the run, and a case for each verdict.

A test's cases have its class name and name as pytest writes them, and behind the name what the case is about: "test_a
allocated", "test_a@twin reserved@optimizer", "test_a fits h100-80gb". One with the plain name is there where something
else than a gate decided: the test failed otherwise, was skipped, or measured nothing. The first case has the test's
time. A broken measurement is an error, and what a gate finds a failure. A test that is expected to fail is skipped, and
one that failed before it passed has its earlier failures as interim results ("flakyFailure").
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, Skipped
from junitparser.xunit2 import FlakyFailure, RerunFailure, TestCase

from ..compare import how
from ..growth import GrowthSummary
from ..measurement import Measurement
from . import junit, junit_xml
from .comparisons import saving_failure_text
from .findings import findings_lines
from .fits import fit_failure_text, fragmentation_failure_text
from .junit_xml import xml_text
from .oom import message_lines
from .results import DISAGREE, Measured, Results, TestResult
from .terminal import failure_text
from .text import headline
from .throughput import throughput_failure_text

SUITE = "pytest-mbmem"

RUN = "mbmem_run"
"""The property of a suite or a case for when its run began and ended, as an ISO 8601 interval."""

DEVICE = "mbmem_device"
"""The property of a suite or a case for the key of what was measured on."""

REVISION = "mbmem_revision"
"""The property of a suite for the revision of the code under test."""

_BROKEN = ("invalid", "refused", "error", "died", "timeout", "lost peer", "disturbed", "unanswered read")
"""Verdicts and kinds of failures that say nothing about memory."""

_MOST_ATTACHMENTS = 20
"""Files of a test's folders that are named one by one."""


@dataclass(frozen=True)
class _Case:
    """A testcase before it is written."""

    label: str  # behind the test's name; empty for the test itself
    properties: junit.Properties = field(default_factory=list)
    problem: str = ""  # why it fails; empty if it does not
    broken: bool = False  # the problem is the measurement's


def text(results: Results, ended: datetime | None = None) -> str:
    """The whole file. `ended` tells readers which of two runs began after the other was over."""
    return junit_xml.text(junit_xml.file_of([_suite(results, ended)], SUITE))


def _suite(results: Results, ended: datetime | None) -> Any:
    started = junit_xml.time_of(results.started)
    properties = [(f"mbmem_header_{name}".replace(" ", "_"), value) for name, value in results.header.items()]
    if "device" in results.header:
        properties.insert(0, (DEVICE, results.header["device"].partition(",")[0]))
    if started is not None and ended is not None:
        properties.append((RUN, f"{started.isoformat()}/{ended.astimezone(timezone.utc).isoformat()}"))
    if results.revision:
        properties.append((REVISION, results.revision))
    cases = [case for test in results.tests.values() for case in _elements(test)]
    suite = junit_xml.suite(SUITE, properties, cases)
    suite.hostname = xml_text(platform.node())
    if started is not None:
        suite.timestamp = started.isoformat()
    return suite


def _elements(test: TestResult) -> Iterator[Any]:
    """The testcases of a test."""
    classname, name = junit_xml.address(test.id)
    seen: Counter[str] = Counter()
    for number, case in enumerate(_cases(test)):
        label = xml_text(case.label)
        seen[label] += 1
        label += f" #{seen[label]}" if seen[label] > 1 else ""
        behind = label if label.startswith("@") else f" {label}" if label else ""
        element = TestCase(name + behind, classname, round(test.duration, 3) if number == 0 else 0.0)
        properties = [(junit.TEST, test.id), *case.properties]
        properties += [("mbmem_outcome", test.outcome)] if test.outcome == "xpassed" else []
        artifacts = test.artifacts if number == 0 or case.problem else []
        properties += [("mbmem_artifact", path) for path in artifacts]
        for key, value in properties:
            element.add_property(xml_text(key), xml_text(value))
        result = _result(test, case)
        if result is not None:
            element.result = result
        if number == 0:
            for failure in dict.fromkeys(test.earlier):
                element.add_interim_result(_interim(failure, flaky=result is None))
        if attached := _attachments(artifacts):
            element.system_out = xml_text("\n".join(attached))
        yield element


def _result(test: TestResult, case: _Case) -> Any:
    """Failure, error or skip of a case; None where it passed."""
    if not case.problem and (case.label or test.outcome not in ("skipped", "xfailed")):
        return None
    message = xml_text(headline(case.problem)) or test.outcome
    if test.outcome == "xfailed":
        result = Skipped(f"expected to fail: {message}", "pytest.xfail")
    elif test.outcome == "skipped" and not case.label:
        result = Skipped(message, "pytest.skip")
    else:
        result = (Error if case.broken else Failure)(message, "mbmem.broken" if case.broken else "mbmem.gate")
    result.text = xml_text(case.problem)
    return result


def _interim(failure: str, *, flaky: bool) -> Any:
    interim = (FlakyFailure if flaky else RerunFailure)(xml_text(headline(failure)), "mbmem.earlier")
    interim.stack_trace = xml_text(failure)
    return interim


def _attachments(paths: Sequence[str]) -> list[str]:
    """Lines that GitLab and Jenkins read; the path of a folder stands for the files in it.

    GitLab looks in the project's folder, so a path in there is written from there. A path with brackets or bars cannot
    be written.
    """
    files = []
    for path in map(Path, paths):
        try:
            files += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        except OSError:
            files.append(path)
    root = os.environ.get("CI_PROJECT_DIR")
    shown = [str(file.relative_to(root) if root and file.is_relative_to(root) else file) for file in files]
    return [f"[[ATTACHMENT|{file}]]" for file in shown if not set("[]|\n\r") & set(file)][:_MOST_ATTACHMENTS]


# The cases of a test --------------------------------------------------------------------------------------------------


def _cases(test: TestResult) -> list[_Case]:
    """The test itself comes first where it has a case; what the diagnosis found is with the first problem."""
    cases = [case for measured in test.measured for case in _of_measured(test, measured)]
    cases += [_of_growth(growth) for growth in test.growths]
    for number, sweep in enumerate(test.sweeps, 1):
        name = sweep.name or ("" if number == 1 else str(number))
        cases.append(_Case(f"sweep {name}".strip(), junit.of_sweep(sweep, number)))
    for proof in test.proofs:
        properties = junit.of_proof(proof["id"], proof["verdict"], proof["headline"])
        problem = proof["headline"] if proof["verdict"] == DISAGREE else ""
        cases.append(_Case(f"proof {proof['id']}", properties, problem))
    if not cases or not _says_all(test, cases):
        problem = test.failure or (f"the test ended with: {test.outcome}" if test.has_failed else "")
        cases.insert(0, _Case("", problem=problem if test.outcome != "passed" else "", broken=test.outcome == "error"))
    first = next((number for number, case in enumerate(cases) if case.problem), None)
    if first is not None and test.findings:
        lines = [cases[first].problem, "", *findings_lines(test.findings)]
        cases[first] = replace(cases[first], problem="\n".join(lines))
    return cases


def _says_all(test: TestResult, cases: Sequence[_Case]) -> bool:
    """Whether the verdicts' cases tell how the test ended."""
    if test.outcome in ("error", "skipped"):
        return False
    if test.outcome in ("failed", "xfailed"):
        return any(case.problem and headline(case.problem) in test.failure for case in cases)
    return True


def _of_measured(test: TestResult, measured: Measured) -> Iterator[_Case]:
    name = f"@{measured.name} " if measured.name else ""
    measurement = measured.measurement
    about = list(junit.of_measurement(measurement))
    for judged in measured.judged:
        judgement = judged.judgement
        properties = [*about, *junit.of_peak(judged), ("accepted", judged.accepted or None)]
        problem = "" if judged.passed else failure_text(test.id, measured, judgement, None)
        yield _case(measured, f"{name}{judgement.gate.metric_id}", properties, problem, judgement.verdict)
    for saving, gate in zip(measured.savings, junit.saving_gates(measured), strict=True):
        properties = [*about, *junit.of_saving(saving, gate)]
        problem = "" if saving.passed else saving_failure_text(measured, saving)
        yield _case(measured, f"{name}saving {saving.rule.metric_id}", properties, problem, saving.verdict)
    for fit in measured.fits:
        problem = "" if fit.passed else fit_failure_text(measured, fit)
        yield _case(measured, f"{name}fits {fit.rule.gpu}", [*about, *junit.of_fit(fit)], problem, fit.verdict)
    for fragmentation in measured.fragmentations:
        properties = [*about, *junit.of_fragmentation(fragmentation)]
        problem = "" if fragmentation.passed else fragmentation_failure_text(measured, fragmentation)
        label = f"{name}{fragmentation.rule.metric_id}"
        yield _case(measured, label, properties, problem, fragmentation.verdict)
    for steps in measured.throughputs:
        properties = [*about, *junit.of_steps(steps.judgement), ("accepted", steps.accepted or None)]
        problem = "" if steps.passed else throughput_failure_text(test.id, measured, [steps.judgement], None)
        yield _case(measured, f"{name}{steps.judgement.metric_id}", properties, problem, steps.judgement.verdict)
    if not measured.is_judged:
        failure = measurement.failure
        expected = failure is None or test.outcome in ("passed", "xpassed")
        problem = "" if expected or failure is None else "\n".join(_failure_lines(measurement))
        yield _case(measured, f"{name}measured", about, problem, failure.kind if failure else "")


def _case(
    measured: Measured, label: str, properties: Sequence[tuple[str, object]], problem: str, verdict: str
) -> _Case:
    return _Case(label, junit.named(measured.name, properties), problem, verdict in _BROKEN)


def _failure_lines(measurement: Measurement) -> list[str]:
    failure = measurement.failure
    assert failure is not None
    return [how(failure), "", *message_lines(failure)]


def _of_growth(growth: GrowthSummary) -> _Case:
    lines = [line for finding in growth.findings for line in (*finding.lines(), "")]
    problem = "" if growth.passed else "\n".join(lines).rstrip() or growth.headline
    label = f"@{growth.name} growth" if growth.name else "growth"
    return _Case(label, junit.of_growth(growth), problem)
