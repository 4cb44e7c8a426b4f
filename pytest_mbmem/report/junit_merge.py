"""JUnit files of ranks, shards and reruns as one, with each case once.

A case is known by its suite's name, its class name and name, and the device it was measured on. Of its results that of
the last run counts, by the runs' times; results of files that do not say their time come before, in the order of the
files. Runs that overlap in time with the last one are the same run, as the ranks of a job are, and of the results of a
run the worst counts. The other results are noted: failures as interim results ("flakyFailure" of a case that passes
now, "rerunFailure" of one that does not), and all of them as properties with their times.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple

from junitparser import Error, Skipped
from junitparser.xunit2 import FlakyError, FlakyFailure, RerunError, RerunFailure

from ..errors import UserError
from ..validation import show
from . import junit_xml
from .junit_file import DEVICE, RUN
from .junit_xml import OUTCOMES, Outcome

RESULT = "mbmem_result"
"""The property of a case with several results for each of them: when its run began, and how it ended."""

_NO_TIME = datetime.min.replace(tzinfo=timezone.utc)

_OF_DEVICE = re.compile(re.escape(DEVICE) + r"(\[.*\])?", re.DOTALL)


class _Text(NamedTuple):
    """What a failure or an error says."""

    error: bool
    message: str
    type: str
    text: str


@dataclass(frozen=True)
class _Result:
    """A case of a file."""

    case: Any
    suite: str
    device: str | None
    began: datetime | None
    ended: datetime | None
    order: int  # of its file
    outcome: Outcome

    @property
    def start(self) -> datetime:
        return self.began or _NO_TIME

    @property
    def note(self) -> str:
        return f"{self.began.isoformat() if self.began else '-'} {self.outcome}"

    @property
    def texts(self) -> frozenset[_Text]:
        """Of its own failures and errors."""
        return frozenset(
            _Text(isinstance(result, Error), result.message or "", result.type or "", (result.text or "").strip())
            for result in self.case.result
            if not isinstance(result, Skipped)
        )

    @property
    def content(self) -> tuple[object, ...]:
        """All of it that can decide which of two results of a run is shown, whatever the order of files."""
        own = [pair for pair in junit_xml.properties_of(self.case) if pair[0] not in (RUN, RESULT, DEVICE)]
        return sorted(self.texts), own, self.case.time or 0.0, self.case.system_out or ""


def merge(paths: Sequence[Path], *, same_run: bool = False) -> Any:
    """The `JUnitXml` of all files; with `same_run` they are of one run, whatever their times say.

    Raises `UserError` naming the file for one that is missing, damaged or something else.
    """
    files = [junit_xml.read(path) for path in paths]
    found = [
        one for order, (path, xml) in enumerate(zip(paths, files, strict=True)) for one in _results(path, xml, order)
    ]
    cases: dict[tuple[str, str, str, str], list[_Result]] = {}
    for key, one in _by_device(found):
        cases.setdefault(key, []).append(one)
    suites: dict[str, list[Any]] = {suite.name or "": [] for xml in files for suite in junit_xml.suites_of(xml)}
    for (suite, _, _, device), results in sorted(cases.items(), key=lambda item: item[0]):
        suites[suite].append(_merged(results, device, same_run=same_run))
    made = [_suite(name, cases_of, files) for name, cases_of in sorted(suites.items())]
    return junit_xml.file_of(made, "merged")


def _results(path: Path, xml: Any, order: int) -> Iterable[_Result]:
    for suite, case in junit_xml.cases_of(xml):
        about, own = dict(junit_xml.properties_of(suite)), dict(junit_xml.properties_of(case))
        device = next((value for name, value in own.items() if _OF_DEVICE.fullmatch(name)), None) or about.get(DEVICE)
        began, ended = _interval(own.get(RUN) or about.get(RUN), suite, str(path))
        yield _Result(case, suite.name or "", device, began, ended, order, junit_xml.outcome_of(case))


def _interval(run: str | None, suite: Any, source: str) -> tuple[datetime | None, datetime | None]:
    """When the run began and ended."""
    if run is not None:
        began, ended = (junit_xml.time_of(part) for part in run.partition("/")[::2])
        if began is None or ended is None:
            raise UserError(f"{source}: property {RUN}: {show(run)} is not two times with a slash between them")
        return began, ended
    began = junit_xml.time_of(suite.timestamp)
    try:
        return began, None if began is None else began + timedelta(seconds=suite.time or 0)
    except (ValueError, OverflowError):
        raise UserError(f"{source}: the time of suite {show(suite.name)} is not a number of seconds") from None


def _by_device(found: Sequence[_Result]) -> Iterable[tuple[tuple[str, str, str, str], _Result]]:
    """What each case is known by. One that does not say its device is the same as that of the only known device."""
    devices: dict[tuple[str, str, str], set[str]] = {}

    def name(one: _Result) -> tuple[str, str, str]:
        return one.suite, one.case.classname or "", one.case.name

    for one in found:
        if one.device:
            devices.setdefault(name(one), set()).add(one.device)
    for one in found:
        known = devices.get(name(one), set())
        yield (*name(one), one.device or (next(iter(known)) if len(known) == 1 else "")), one


# A case ---------------------------------------------------------------------------------------------------------------


def _merged(results: Sequence[_Result], device: str, *, same_run: bool) -> Any:
    last = max(results, key=lambda one: (one.start, one.order))
    run = [one for one in results if same_run or _overlap(one, last)]
    shown = max(run, key=lambda one: (OUTCOMES.index(one.outcome), one.start, one.content))
    case = copy.deepcopy(shown.case)
    notes: set[str] = set()
    texts = {text for one in results for text in one.texts}
    for one in results:
        notes |= {value for name, value in junit_xml.properties_of(one.case) if name == RESULT} or {one.note}
        texts |= {_Text(_is_error(i), i.message or "", i.type or "", _said(i)) for i in one.case.interim_result}
    for old in list(case.properties()):
        if old.name in (RUN, RESULT):
            case.remove_property(old)
    if device and not any(_OF_DEVICE.fullmatch(name) for name, _ in junit_xml.properties_of(case)):
        case.add_property(DEVICE, device)
    if last.began is not None:
        ended = max(one.ended for one in run if one.ended is not None)
        case.add_property(RUN, f"{last.began.isoformat()}/{ended.isoformat()}")
    for note in sorted(notes) if len(notes) > 1 else ():
        case.add_property(RESULT, note)
    for before in case.interim_result:
        case.remove(before)
    for text in sorted(texts - shown.texts):
        case.add_interim_result(_interim(text, passed=shown.outcome == "passed"))
    return case


def _overlap(one: _Result, last: _Result) -> bool:
    """Whether a result is of the run that began last."""
    if last.began is None or one.ended is None:
        return one.began == last.began and one.order == last.order
    return one.began == last.began or one.ended > last.began


def _is_error(interim: Any) -> bool:
    return isinstance(interim, (FlakyError, RerunError))


def _said(interim: Any) -> str:
    return str(interim.stack_trace or interim.text or "").strip()


def _interim(text: _Text, *, passed: bool) -> Any:
    kinds = {(True, True): FlakyError, (True, False): FlakyFailure, (False, True): RerunError}
    interim = kinds.get((passed, text.error), RerunFailure)(text.message, text.type)
    interim.stack_trace = text.text
    return interim


# A suite --------------------------------------------------------------------------------------------------------------


def _suite(name: str, cases: Sequence[Any], files: Sequence[Any]) -> Any:
    """Its properties are those of all suites of that name, and it began when the first of them did."""
    alike = [suite for xml in files for suite in junit_xml.suites_of(xml) if (suite.name or "") == name]
    properties = {pair for suite in alike for pair in junit_xml.properties_of(suite) if pair[0] != RUN}
    merged = junit_xml.suite(name, sorted(properties), cases)
    times = {suite.timestamp: time for suite in alike if (time := junit_xml.time_of(suite.timestamp)) is not None}
    if times:
        merged.timestamp = min(times.values()).isoformat()
    hosts = {host for suite in alike if suite.hostname for host in suite.hostname.split(", ")}
    if hosts:
        merged.hostname = ", ".join(sorted(hosts))
    return merged
