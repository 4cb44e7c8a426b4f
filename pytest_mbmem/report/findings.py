"""Findings of the diagnosis as text, and what a test measured as the evidence that they are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..diagnosis import Action, Case, Finding, Subject, diagnose
from ..growth import GrowthSummary
from ..measurement import Measurement
from ..sweep import Sweep
from ..texts import printable
from .results import Measured

if TYPE_CHECKING:
    import pytest

TITLE = "diagnosis"
"""Of the section in a failure's text."""

FINDINGS = "mbmem_findings"
"""The property of a test for the rules that found something."""

_MOST_LINES = 8
"""Of one finding."""

_MOST_FINDINGS = 4
"""In a failure's text; the others are in the JSON and the HTML report."""

_MOST_EVIDENCE = 2


def found(
    measured: Sequence[Measured],
    sweeps: Iterable[Sweep] = (),
    growths: Iterable[GrowthSummary] = (),
    refused: Iterable[str] = (),
) -> list[Finding]:
    """What the rules find in all that a test measured; `refused` are constraints that its recipes break, by id."""
    comparisons = [row.comparison for sweep in sweeps for row in sweep if row.comparison is not None]
    return diagnose(Case(tuple(map(_subject, measured)), tuple(comparisons), tuple(growths), tuple(refused)))


def found_in(measurement: Measurement) -> list[Finding]:
    """The same of one that was measured by itself."""
    return diagnose(Case((Subject(measurement),)))


def _subject(measured: Measured) -> Subject:
    return Subject(
        measured.measurement,
        measured.name or "",
        tuple(judged.judgement for judged in measured.judged),
        tuple(measured.savings),
        tuple(measured.fits),
        tuple(measured.fragmentations),
        tuple(judged.judgement for judged in measured.throughputs),
    )


def say(properties: list[tuple[str, object]], report: pytest.TestReport, findings: Sequence[Finding]) -> None:
    """Put the rules' names among a test's JUnit properties, and the findings into the text of its failure."""
    properties[:] = [p for p in properties if p[0] != FINDINGS] + [(FINDINGS, rules_text(findings))]
    if not report.failed:
        return
    text = "\n".join(findings_lines(findings))
    add_section = getattr(report.longrepr, "addsection", None)
    if add_section is not None:
        add_section(TITLE, text)
    else:  # a text, of a test whose worker ended early
        report.sections.append((TITLE, text))


def rules_text(findings: Sequence[Finding]) -> str:
    """Their rules, as a property has them."""
    return "; ".join(finding.rule for finding in findings)


def say_of_worker(reports: Sequence[pytest.TestReport]) -> None:
    """The same of a test that ran whole in a worker, whose reports are as they came from there."""
    for report in reports:
        data = getattr(report, "mbmem", None)
        if report.when != "call" or not data:
            continue
        measured = [Measured.from_json(m, report.nodeid) for m in data.get("measurements", ())]
        sweeps = [Sweep.from_json(s, report.nodeid) for s in data.get("sweeps", ())]
        growths = [GrowthSummary.from_json(g, report.nodeid) for g in data.get("growths", ())]
        if findings := found(measured, sweeps, growths, data.get("refused", ())):
            data["findings"] = [dataclasses.asdict(finding) for finding in findings]
            properties: list[tuple[str, object]] = list(reports[-1].user_properties)
            say(properties, report, findings)
            for one in reports:  # of which pytest takes those of the last one
                one.user_properties = properties


def findings_lines(findings: Sequence[Finding]) -> list[str]:
    """The first few of them, the most important first, with a blank line between two."""
    lines: list[str] = []
    for finding in findings[:_MOST_FINDINGS]:
        lines += [*([""] if lines else []), *finding_lines(finding)]
    if len(findings) > _MOST_FINDINGS:
        rules = ", ".join(finding.rule for finding in findings[_MOST_FINDINGS:])
        lines += ["", f"and in the JSON and HTML reports: {printable(rules)}"]
    return lines


def finding_lines(finding: Finding) -> list[str]:
    """What was seen, why, how to confirm it, and what to try at which cost, in at most eight lines."""
    facts = [("evidence", text) for text in finding.evidence[:_MOST_EVIDENCE]]
    facts += [("cause", finding.cause), ("confirm", finding.confirm)]
    room = _MOST_LINES - len(facts) - 2  # its first line, and the source
    facts += [("try", text) for text in _actions(finding.actions, room)]
    facts.append(("source", finding.source))
    lines = [f"{finding.rule}: {finding.symptom}"]
    before = ""
    for name, text in facts:
        lines.append(f"  {name if name != before else '':<8}  {text}")
        before = name
    return [printable(line) for line in lines]


def _actions(actions: Sequence[Action], room: int) -> Iterator[str]:
    for number, action in enumerate(actions[:room], 1):
        cost = f" (cost: {action.cost})" if action.cost else ""
        left = len(actions) - room
        more = f"; and {left} more" if number == room and left > 0 else ""
        yield f"{f'{number}. ' if len(actions) > 1 else ''}{action.what}{cost}{more}"
