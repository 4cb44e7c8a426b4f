"""What GitHub Actions is told at the end of a session: annotations of failed tests, and a step summary in Markdown.

Annotations are workflow commands, lines that pytest prints and GitHub reads:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..files import append_to
from ..texts import printable
from .markdown import code, fenced, plain, size, table
from .ratchet import Improvement
from .results import DISAGREE, Measured, Results, TestResult
from .rows import Row, rows_of
from .text import headline

OTHER_ANNOTATOR = "pytest_github_actions_annotate_failures"
"""A plugin that annotates failed tests itself."""

MOST_ERRORS = 10
"""GitHub shows no more errors of a step."""

ROOM = 2**20
"""Bytes of a step's summary; GitHub shows nothing of a longer one."""

_MOST_SENTENCES = 3  # of a test's annotation, each about a verdict
_MOST_GROWN = 3  # lines of what grew
_LONGEST_TITLE = 200
_LONGEST_MESSAGE = 2000
_LONGEST_FAILURE = 20_000
_NUMBERS = ("baseline", "measured", "change", "rank")

Place = tuple[str, int | None]
"""A test's file, relative to the rootdir, and its line, from 0; None where it has none."""


def is_here() -> bool:
    """Whether this process runs in GitHub Actions."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


# What failed ----------------------------------------------------------------------------------------------------------


def failed_tests(results: Results) -> list[TestResult]:
    """Those that failed in their last run."""
    return [test for test in results.tests.values() if test.has_failed]


def said_by_gates(test: TestResult) -> dict[str, str]:
    """What each gate that fails the test says, and its verdict; of a test that failed otherwise what pytest says."""
    said = [one for measured in test.measured for one in _of_measured(measured)]
    said += [(growth.headline, "growth") for growth in test.growths if not growth.passed]
    said += [(proof["headline"], proof["verdict"]) for proof in test.proofs if proof["verdict"] == DISAGREE]
    said = said or [(headline(test.failure) or f"the test ended with: {test.outcome}", test.outcome)]
    return dict(said)


def _of_measured(measured: Measured) -> Iterator[tuple[str, str]]:
    name = f"{measured.name}: " if measured.name else ""
    for judged in measured.judged:
        if not judged.passed:
            yield f"{name}{judged.judgement.explain()}", judged.judgement.verdict
    for saving in measured.savings:
        if not saving.passed:
            what = saving.comparison.explain() if saving.comparison is not None else "; ".join(saving.notes[:1])
            yield f"{name}{saving.verdict} (asked for: {saving.rule.asked}): {what}", saving.verdict
    for stated in measured.stated:
        if not stated.passed:
            yield f"{name}{stated.explain()}", stated.verdict
    for steps in measured.throughputs:
        if not steps.passed:
            yield f"{name}{steps.judgement.explain()}", steps.judgement.verdict


def _grown(test: TestResult) -> list[str]:
    """The first lines of what grew in the first gate that knows."""
    growths = (judged.judgement.growth for measured in test.measured for judged in measured.judged if not judged.passed)
    growth = next((growth for growth in growths if growth is not None and growth.changes), None)
    return [] if growth is None else growth.lines()[: _MOST_GROWN + 1]


def _next_actions(test: TestResult) -> list[str]:
    """What the first finding says to do first."""
    return [f"next: {action.what}" for finding in test.findings[:1] for action in finding.actions[:1]]


# Annotations ----------------------------------------------------------------------------------------------------------


def errors(results: Results, places: Mapping[str, Place], rootdir: Path) -> list[str]:
    """A command for each failed test, as many as GitHub shows. Files are written from the root of the workspace."""
    return [_error(test, places.get(test.id), rootdir) for test in failed_tests(results)[:MOST_ERRORS]]


def _error(test: TestResult, place: Place | None, rootdir: Path) -> str:
    by_gates = said_by_gates(test)
    said = list(by_gates)
    more = [f"and {len(said) - _MOST_SENTENCES} more verdicts"] if len(said) > _MOST_SENTENCES else []
    lines = [*said[:_MOST_SENTENCES], *more, *_grown(test), *_next_actions(test)]
    name = test.id.partition("::")[2] or test.id
    properties = {**_location(place, rootdir), "title": f"mbmem {by_gates[said[0]]}: {name}"[:_LONGEST_TITLE]}
    return command("error", "\n".join(lines)[:_LONGEST_MESSAGE], properties)


def _location(place: Place | None, rootdir: Path) -> dict[str, str]:
    """Of a file in the workspace: GitHub knows no others."""
    if place is None:
        return {}
    file, line = place
    path, workspace = (rootdir / file).resolve(), Path(os.environ.get("GITHUB_WORKSPACE") or rootdir).resolve()
    if not path.is_relative_to(workspace):
        return {}
    where = {"file": path.relative_to(workspace).as_posix()}
    return where if line is None else {**where, "line": str(line + 1)}


def notices(found: Sequence[Improvement], update: str) -> list[str]:
    """One command for all improvements; `update` records them."""
    if not found:
        return []
    lines = [str(improvement) for improvement in found[:MOST_ERRORS]]
    lines += [f"and {len(found) - MOST_ERRORS} more"] if len(found) > MOST_ERRORS else []
    message = "\n".join([*lines, f"to record: {update}"])[:_LONGEST_MESSAGE]
    return [command("notice", message, {"title": f"mbmem: improvements to record: {len(found)}"})]


def command(name: str, message: str, properties: Mapping[str, str]) -> str:
    """A workflow command on one line. Escapes as GitHub's own toolkit does (actions/toolkit, core/src/command.ts)."""
    values = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{name} {values}::{_data(message)}" if values else f"::{name}::{_data(message)}"


def _data(text: str) -> str:
    lines = (printable(line) for line in text.splitlines())
    return "%0A".join(line.replace("%", "%25") for line in lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# The step's summary ---------------------------------------------------------------------------------------------------


def write_summary(results: Results, found: Sequence[Improvement], update: str) -> str | None:
    """Append to the step's summary. Returns why that cannot be done, in one sentence; None if it was."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return "GITHUB_STEP_SUMMARY is not set, so that this step has no summary"
    path = Path(name)
    try:
        room = ROOM - path.stat().st_size
    except FileNotFoundError:
        room = ROOM
    except OSError as error:
        return f"GITHUB_STEP_SUMMARY: {path} cannot be written ({error.strerror or error})"
    text = summary(results, found, update, room)
    if not text:
        return f"GITHUB_STEP_SUMMARY: {path} is full, so that these results are not in it"
    try:
        append_to(path, text)
    except OSError as error:
        return f"GITHUB_STEP_SUMMARY: {path} cannot be written ({error.strerror or error})"
    return None


def summary(results: Results, found: Sequence[Improvement], update: str, room: int = ROOM) -> str:
    """The Markdown, at most `room` bytes of it, what failed before the table. Empty if there is no room at all."""
    tests, failed = results.tests, failed_tests(results)
    rows = [row for test in tests.values() for row in rows_of(test)]
    verdicts = Counter(row.verdict for row in rows if row.verdict != "-")
    head = [
        "",
        f"### Memory: {len(failed) or 'none'} of {len(tests)} tests that measure failed",
        "",
        f"{plain(results.header.get('device', ''))}; "
        + ", ".join(f"{plain(verdict)}: {count}" for verdict, count in verdicts.most_common()),
        "",
    ]
    if len(failed) > MOST_ERRORS:
        head[-1:] = ["", f"GitHub annotates {MOST_ERRORS} of {len(failed)} failed tests; all of them are below.", ""]
    room -= size(head) + 2 * size([_left_out(len(failed) + len(rows), "tests and verdicts")])
    if room < 0:
        return ""
    blocks = [_failed_block(test) for test in failed]
    lines, room = _as_many(blocks, room, "failed tests")
    improved = _improved_block(found, update)
    if improved and size(improved) <= room:
        lines += improved
        room -= size(improved)
    names = [field.name for field in dataclasses.fields(Row)]
    first, second, *rest = table(names, [_cells(row) for row in rows], right=_NUMBERS)
    table_head = ["", first, second]
    if rows and size(table_head) <= room:
        shown, room = _as_many([[line] for line in rest], room - size(table_head), "verdicts")
        lines += [*table_head, *shown, ""]
    return "\n".join([*head, *lines]) + "\n"


def _as_many(blocks: Sequence[list[str]], room: int, what: str) -> tuple[list[str], int]:
    """The lines of as many blocks as there is room for, and the room that is left."""
    lines: list[str] = []
    for number, block in enumerate(blocks):
        if size(block) > room:
            return [*lines, "", _left_out(len(blocks) - number, what), ""], room
        lines += block
        room -= size(block)
    return lines, room


def _left_out(count: int, what: str) -> str:
    return f"{count} more {what} are left out: a step's summary holds 1 MiB."


def _failed_block(test: TestResult) -> list[str]:
    lines = ["<details>", f"<summary>{code(test.id)}: {plain(next(iter(said_by_gates(test))))}</summary>", ""]
    for finding in test.findings:
        lines += [f"- **{plain(finding.symptom)}** {plain(finding.cause)}"]
        lines += [f"    - {plain(evidence)}" for evidence in finding.evidence]
        lines += [f"    - next: {plain(a.what)}{f' ({plain(a.cost)})' if a.cost else ''}" for a in finding.actions]
    failure = test.failure
    if len(failure) > _LONGEST_FAILURE:
        half = _LONGEST_FAILURE // 2
        failure = f"{failure[:half]}\n... {len(failure) - 2 * half} characters left out ...\n{failure[-half:]}"
    return [*lines, "", fenced(failure.splitlines()), "", "</details>", ""]


def _improved_block(found: Sequence[Improvement], update: str) -> list[str]:
    if not found:
        return []
    shown = [f"- {plain(str(improvement))}" for improvement in found[:50]]
    shown += [f"- and {len(found) - 50} more"] if len(found) > 50 else []
    return ["", "Improvements that the baselines do not have yet:", "", *shown, "", fenced([update]), ""]


def _cells(row: Row) -> list[str]:
    test, *others = dataclasses.astuple(row)
    return [code(test), *map(plain, others)]
