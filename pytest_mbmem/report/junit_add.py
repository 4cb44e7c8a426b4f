"""The figures of --mbmem-json as properties of the cases in a JUnit file that pytest wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..baselines import clean_nodeid
from ..errors import UserError
from . import json, junit, junit_xml
from .findings import FINDINGS, rules_text
from .junit_xml import address, xml_text
from .results import TestResult

_PREFIX = "mbmem_"


@dataclass(frozen=True)
class Added:
    """The file with the properties, and which tests it has no case for."""

    xml: Any  # a `JUnitXml`
    tests: int  # that have a case
    without: list[str]  # node ids


def add(results: Path, junit_file: Path) -> Added:
    """Give each test's case its properties; those that it had from here before are replaced.

    Raises `UserError` for a file that is missing, damaged or something else, and if no test has a case.
    """
    tests = json.load(results).tests
    xml = junit_xml.read(junit_file)
    cases: dict[tuple[str, str], list[Any]] = {}
    for _, case in junit_xml.cases_of(xml):
        cases.setdefault((case.classname or "", case.name), []).append(case)
    without = []
    for test in tests.values():
        found = _cases(test.id, cases)
        for case in found:
            _replace(case, test)
        if not found:
            without.append(test.id)
    if len(without) == len(tests):
        what = f"no case for {', '.join(without[:3])}" if without else f"nothing to get: {results} has no tests"
        raise UserError(f"{junit_file}: {what}{' and others' if len(without) > 3 else ''}")
    return Added(xml, len(tests) - len(without), without)


def _cases(nodeid: str, cases: dict[tuple[str, str], list[Any]]) -> list[Any]:
    """By class name and name; one of them may be of another run, without pytest-xdist's groups in its names."""
    exact = cases.get(address(nodeid)) or cases.get(address("::".join(clean_nodeid(nodeid))))
    if exact:
        return exact
    classname, name = address(nodeid)  # --junit-prefix stands in front of class names
    prefixed = [key for key in cases if key[1] == name and key[0].endswith(f".{classname}")]
    return cases[prefixed[0]] if len(prefixed) == 1 else []


def _replace(case: Any, test: TestResult) -> None:
    for old in list(case.properties()):
        if (old.name or "").startswith(_PREFIX):
            case.remove_property(old)
    found = junit.properties(test.measured, test.sweeps, test.growths, nodeid=test.id) or [(junit.TEST, test.id)]
    for proof in test.proofs:
        found += junit.of_proof(proof["id"], proof["verdict"], proof["headline"])
    found += [(FINDINGS, rules_text(test.findings))] if test.findings else []
    found += [("mbmem_artifact", path) for path in test.artifacts]
    for name, value in found:
        case.add_property(xml_text(name), xml_text(value))
