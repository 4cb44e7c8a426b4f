"""Findings as text: short, in order, safe; and on the reports of a test."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.diagnosis import Action, Finding
from pytest_mbmem.report.findings import finding_lines, findings_lines, say

FINDING = Finding(
    "fragmentation",
    "rank 0 asked for 2.00 GiB",
    ("6.00 GiB were free", "they fit with expandable segments"),
    "pieces that cannot be joined",
    "mbmem replay SNAPSHOT",
    (Action("expandable segments", "no cost"), Action("second"), Action("third", "much")),
    "the guide",
)


def test_a_finding_says_what_why_how_to_confirm_and_what_to_try() -> None:
    assert finding_lines(FINDING) == [
        "fragmentation: rank 0 asked for 2.00 GiB",
        "  evidence  6.00 GiB were free",
        "            they fit with expandable segments",
        "  cause     pieces that cannot be joined",
        "  confirm   mbmem replay SNAPSHOT",
        "  try       1. expandable segments (cost: no cost)",
        "            2. second; and 1 more",
        "  source    the guide",
    ]


def test_a_single_action_has_no_number() -> None:
    assert "  try       expandable segments (cost: no cost)" in finding_lines(
        replace(FINDING, actions=FINDING.actions[:1])
    )


texts = st.text(max_size=20)
findings = st.builds(
    Finding,
    texts,
    texts,
    st.lists(texts, max_size=5).map(tuple),
    texts,
    texts,
    st.lists(st.builds(Action, texts, texts), max_size=5).map(tuple),
    texts,
)


@given(st.lists(findings, max_size=8))
def test_whatever_was_found_the_text_is_short_and_steers_no_terminal(found: list[Finding]) -> None:
    assert all(len(finding_lines(finding)) <= 8 for finding in found)
    lines = findings_lines(found)
    assert len(lines) <= 4 * 9 + 1
    assert all(line.isprintable() for line in lines)


def test_the_most_important_come_first_and_the_others_are_named() -> None:
    found = [replace(FINDING, rule=f"rule {number}") for number in range(6)]
    lines = findings_lines(found)
    assert [line for line in lines if line.startswith("rule")] == [
        f"rule {number}: rank 0 asked for 2.00 GiB" for number in range(4)
    ]
    assert lines[-1] == "and in the JSON and HTML reports: rule 4, rule 5"


def report(outcome: str, longrepr: object) -> pytest.TestReport:
    return pytest.TestReport("t.py::t", ("t.py", 1, "t"), {}, outcome, longrepr, "call")  # type: ignore[arg-type]


def test_a_failure_without_a_traceback_has_them_in_a_section_and_a_pass_has_none() -> None:
    properties: list[tuple[str, object]] = [("mbmem_findings", "of an earlier run"), ("other", 1)]
    failed, passed = report("failed", "text"), report("passed", None)
    say(properties, failed, [FINDING])
    say(properties, passed, [FINDING, replace(FINDING, rule="capacity")])
    assert properties == [("other", 1), ("mbmem_findings", "fragmentation; capacity")]
    assert failed.sections == [("diagnosis", "\n".join(finding_lines(FINDING)))]
    assert passed.sections == []
