"""JUnit files as junitparser has them: read without trusting them, counted, and written as text.

The flavour is the one that pytest writes and Jenkins describes (junit-10.xsd of its xunit plugin), whose cases have
properties and whose interim results are `rerunFailure`, `flakyFailure` and the like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree
from xml.parsers import expat

from junitparser import JUnitXmlError
from junitparser.xunit2 import JUnitXml, TestCase, TestSuite

from ..errors import UserError
from ..files import read_bytes
from ..validation import show

Outcome = Literal["passed", "skipped", "failed", "error"]

OUTCOMES: tuple[Outcome, ...] = ("skipped", "passed", "failed", "error")
"""From what says least to what is worst."""

_DEEPEST = 50
"""Elements inside each other; JUnit has about six."""

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Refused(Exception):
    pass


def xml_text(text: object) -> str:
    """Without the characters that XML cannot hold; written like pytest does it, as in "#x1B"."""
    return _NOT_IN_XML.sub(lambda found: f"#x{ord(found[0]):0{2 if ord(found[0]) < 256 else 4}X}", str(text))


def address(nodeid: str) -> tuple[str, str]:
    """Class name and name of a test, as pytest writes them to its --junitxml."""
    path, bracket, parameters = nodeid.partition("[")
    module, *names = path.split("::")
    module = module.removesuffix(".py").replace("/", ".")
    *classes, name = names or [""]
    return xml_text(".".join([module, *classes])), xml_text(name + bracket + parameters)


# Reading --------------------------------------------------------------------------------------------------------------


def read(path: Path) -> Any:
    """The `JUnitXml` of a file. Raises `UserError` naming the file if it is missing, damaged or something else."""
    return parse(read_bytes(path), str(path))


def parse(content: bytes, source: str) -> Any:
    """The same of what is in a file that `source` names.

    A document type is refused, because with one a file can make a parser expand entities without end or open others.
    """
    try:
        _check(content)
        found = JUnitXml.fromstring(content)
    except _Refused as refused:
        raise UserError(f"{source}: {refused}") from None
    except JUnitXmlError:
        raise UserError(f"{source}: not a JUnit file: its first element is neither testsuites nor testsuite") from None
    except (expat.ExpatError, SyntaxError, ValueError, LookupError) as error:
        raise UserError(f"{source}: cannot be read as XML ({error})") from None
    for _, case in cases_of(found):
        if not case.name:
            raise UserError(f"{source}: not a JUnit file: a testcase of class {show(case.classname)} has no name")
        seconds_of(case, source)
    return found


def _check(data: bytes) -> None:
    """Raise for what must not reach a parser that builds trees, whichever one junitparser uses."""
    depth = 0

    def doctype(*_: object) -> None:
        raise _Refused("has a document type (<!DOCTYPE>), which JUnit files have none of; it is not read")

    def start(*_: object) -> None:
        nonlocal depth
        depth += 1
        if depth > _DEEPEST:
            raise _Refused(f"has elements more than {_DEEPEST} deep, so it is not a JUnit file")

    def end(*_: object) -> None:
        nonlocal depth
        depth -= 1

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.Parse(data, True)


def suites_of(xml: Any) -> Iterator[Any]:
    """Each suite; suites may hold suites."""
    waiting = list(xml)
    while waiting:
        suite = waiting.pop(0)
        yield suite
        waiting += suite.iterchildren(TestSuite)


def cases_of(xml: Any) -> Iterator[tuple[Any, Any]]:
    """Each case with the suite that it is directly in."""
    for suite in suites_of(xml):
        for case in suite.iterchildren(TestCase):
            yield suite, case


def properties_of(element: Any) -> list[tuple[str, str]]:
    """Name and value of each property of a suite or a case."""
    return [(p.name or "", p.value or "") for p in element.properties()]


def outcome_of(case: Any) -> Outcome:
    """The worst of its results."""
    if case.is_error:
        return "error"
    return "failed" if case.is_failure else "skipped" if case.is_skipped else "passed"


def seconds_of(case: Any, source: str = "") -> float:
    """What a case took. Raises `UserError` if that is no number."""
    try:
        time = float(case.time or 0)
    except ValueError:
        time = math.nan
    if not math.isfinite(time):
        raise UserError(f"{source}: the time of testcase {show(case.name)} is not a number of seconds")
    return time


def time_of(text: str | None) -> datetime | None:
    """A timestamp; one without a zone is taken as UTC. None for what is none."""
    try:
        time = datetime.fromisoformat(re.sub("Z$", "+00:00", text or ""))
        return time.astimezone(timezone.utc) if time.tzinfo else time.replace(tzinfo=timezone.utc)
    except (ValueError, OverflowError):  # in UTC it can be before the year 1
        return None


# Writing --------------------------------------------------------------------------------------------------------------


def suite(name: str, properties: Iterable[tuple[str, object]], cases: Iterable[Any]) -> Any:
    """A suite of these cases, with its counts. A case counts once, by its worst result."""
    made = TestSuite(name)
    for key, value in properties:
        made.add_property(xml_text(key), xml_text(value))
    listed = list(cases)
    counts = dict.fromkeys(OUTCOMES, 0)
    for case in listed:
        counts[outcome_of(case)] += 1
    made.tests, made.failures, made.errors = len(listed), counts["failed"], counts["error"]
    made.skipped, made.time = counts["skipped"], round(sum(map(seconds_of, listed)), 3)
    for case in listed:
        made.append(case)
    return made


def file_of(suites: Iterable[Any], name: str) -> Any:
    """The whole file, with the sums of its suites' counts."""
    xml = JUnitXml(name)
    listed = list(suites)
    for one in listed:
        xml.append(one)
    for count in ("tests", "failures", "errors"):
        setattr(xml, count, sum(getattr(one, count) for one in listed))
    xml.time = round(sum(one.time for one in listed), 3)
    return xml


def text(xml: Any) -> str:
    """The whole file, indented. What a case printed stays as it is."""
    root = ElementTree.fromstring(xml.tostring())
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"
