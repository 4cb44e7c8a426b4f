"""What a JUnit file must be, whoever reads it: the schemas of Jenkins (junit-10.xsd) and of Ant agree on this much."""

from __future__ import annotations

from xml.etree import ElementTree

_RESULTS = ("failure", "error", "skipped")
_IN_A_CASE = {*_RESULTS, "properties", "system-out", "system-err"}
_INTERIM = {"rerunFailure", "rerunError", "flakyFailure", "flakyError"}


def checked(text: str) -> ElementTree.Element:
    """The root of a file; fails if the file has not the shape, or counts wrong."""
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites"
    suites = list(root)
    for suite in suites:
        assert suite.tag == "testsuite"
        assert suite.get("name") is not None
        assert [child.tag for child in suite][1:].count("properties") == 0  # Ant: in front
        cases = suite.findall("testcase")
        found = dict.fromkeys((*_RESULTS, "passed"), 0)
        for case in cases:
            assert case.get("name")
            assert case.get("classname") is not None
            assert float(case.get("time", "none")) >= 0
            assert {child.tag for child in case} <= _IN_A_CASE | _INTERIM
            results = [child for child in case if child.tag in _RESULTS]
            assert len(results) <= 1
            assert all(result.get("message") is not None for result in results)
            found[results[0].tag if results else "passed"] += 1
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures") == str(found["failure"])
        assert suite.get("errors") == str(found["error"])
        assert suite.get("skipped") == str(found["skipped"])
        assert float(suite.get("time", "none")) == round(sum(float(case.get("time", "")) for case in cases), 3)
    for count in ("tests", "failures", "errors"):
        assert root.get(count) == str(sum(int(suite.get(count, "")) for suite in suites))
    return root


def properties(element: ElementTree.Element) -> dict[str, str]:
    """Of a case or a suite."""
    return {p.get("name", ""): p.get("value", "") for p in element.iterfind("properties/property")}
