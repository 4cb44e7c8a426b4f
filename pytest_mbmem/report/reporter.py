"""Gathers the tests' results in the process that reports, updates the baselines at the end, and has reports written."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..diagnosis import Finding
from ..errors import TOO_FEW_GPUS, UserError
from ..files import write_report
from ..growth import GrowthSummary
from ..measurement import read_plain
from ..sweep import Sweep
from .results import Measured, Results, TestResult

if TYPE_CHECKING:
    from ..baselines import Change, Orphan, Record
    from ..session import Run


class Reporter:
    """The hooks of the process that reports: the only one, or xdist's controller."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._results = Results(run.header(), started=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
        self._records: dict[str, list[Record]] = {}
        self._changes: list[Change] = []
        self._orphans: list[Orphan] = []
        self._problems: list[str] = []
        self._written: list[str] = []
        self._elsewhere: list[tuple[int, str, str]] = []  # what failed in other processes of a torchrun
        self._lacked_gpus = 0  # tests that were skipped for it
        self._begun: set[str] = set()  # tests that are set up, and have no result yet
        self._places: dict[str, tuple[str, int | None]] = {}  # file and line of each test
        self._improved: list[str] = []  # lines on improvements to record
        self._commands: list[str] = []  # for GitHub Actions
        self._warnings: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the test measured. A test that is run again replaces its first run."""
        if report.skipped and TOO_FEW_GPUS in report.longreprtext:
            self._lacked_gpus += 1
        data: dict[str, Any] | None = getattr(report, "mbmem", None)
        if data is None:
            if (
                str(report.when) == "???" and report.nodeid in self._begun
            ):  # xdist's, of a process that crashed in a test
                self._not_ended(report.nodeid, str(report.longrepr))
            return
        from ..baselines import Record

        if report.when == "setup":
            before = self._results.tests.get(report.nodeid)
            earlier = [*before.earlier, *filter(None, [before.failure])] if before is not None else []
            self._results.tests[report.nodeid] = TestResult(report.nodeid, earlier=earlier)
        result = self._results.tests.setdefault(report.nodeid, TestResult(report.nodeid))
        result.duration += report.duration
        self._places[report.nodeid] = report.location[:2]
        result.outcome = _outcome(report, result.outcome)
        if report.outcome != "passed":  # "rerun" is what pytest-rerunfailures makes of a failure
            result.failure = "\n\n".join(filter(None, (result.failure, _text(report))))
        if report.when == "setup" and report.passed:
            self._begun.add(report.nodeid)
        else:
            self._begun.discard(report.nodeid)
        if report.when == "call":
            result.measured = [Measured.from_json(m, report.nodeid) for m in data.get("measurements", [])]
            result.sweeps = [Sweep.from_json(s, report.nodeid) for s in data.get("sweeps", [])]
            result.growths = [GrowthSummary.from_json(g, report.nodeid) for g in data.get("growths", [])]
            result.proofs = data.get("proofs", [])
            result.findings = [read_plain(Finding, f, report.nodeid) for f in data.get("findings", [])]
            self._records[report.nodeid] = [Record.from_json(r) for r in data.get("records", [])]
        if report.failed:  # in its teardown, where the call was well
            self._records.pop(report.nodeid, None)

    def _not_ended(self, nodeid: str, why: str) -> None:
        result = self._results.tests[nodeid]
        result.outcome, result.failure = "error", why
        self._begun.discard(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Update baselines and write reports; what goes wrong there fails the session."""
        if session.config.option.collectonly:
            return
        for nodeid in sorted(self._begun):
            self._not_ended(nodeid, "the session ended before this test did")
        try:
            self._elsewhere = self._run.failed_elsewhere({})
        except UserError as error:
            self._problems.append(str(error))
        for rank, test, text in self._elsewhere:
            result = self._results.tests.setdefault(test, TestResult(test))
            result.outcome = "error" if result.outcome == "error" else "failed"
            result.failure = "\n\n".join(filter(None, (result.failure, f"rank {rank}: {text}")))
        if self._elsewhere and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        for step in (self._update, self._find_orphans, self._write_reports, self._tell_ci):
            try:
                step()
            except UserError as error:
                self._problems.append(str(error))
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _update(self) -> None:
        options = self._run.options
        if options.update is None:
            return
        from ..baselines import apply_updates

        records = [record for records in self._records.values() for record in records]
        self._changes = apply_updates(options.baselines, records, options.update, options.reason)  # type: ignore[arg-type]

    def _find_orphans(self) -> None:
        if not self._all_tests_were_selected():
            return
        from ..baselines import clean_nodeid, orphans

        seen: dict[str, set[str]] = {}
        for nodeid in self._run.collected.nodeids:
            module, key = clean_nodeid(nodeid)
            seen.setdefault(module, set()).add(key)
        folder, device = self._run.options.baselines, self._run.device.key
        for orphan in orphans(folder, device, seen):
            path = orphan.path.relative_to(folder / device).with_suffix(".py")
            # A module that exists and was not collected (outside of testpaths, or it fails to import) keeps its own.
            if path.as_posix() in seen or not (self._run.config.rootpath / path).exists():
                self._orphans.append(orphan)

    def _all_tests_were_selected(self) -> bool:
        """Whether this session collected what `pytest` in the rootdir does, and deselected nothing."""
        config = self._run.config
        paths = [config.invocation_params.dir / argument for argument in config.args]
        everything = config.args_source is config.ArgsSource.TESTPATHS or config.rootpath in paths
        # --lf drops tests without telling pytest_deselected.
        return everything and self._run.collected.complete and not config.getoption("lf", False)

    def _write_reports(self) -> None:
        options = self._run.options
        if options.json is not None or options.html is not None or options.junit is not None:
            from .revision import revision_of

            self._results.revision = revision_of(self._run.config.rootpath)
        if options.junit is not None:
            from . import junit_file

            self._write(options.junit, junit_file.text(self._results, datetime.now(timezone.utc)))
        if options.json is not None:
            from . import json

            self._write(options.json, json.text(self._results))
        if options.metrics is not None:
            from . import gitlab

            self._write(options.metrics, gitlab.metrics(self._results))
        if options.html is not None:
            from . import html

            self._write(options.html, html.page(self._results, options.earlier))

    def _tell_ci(self) -> None:
        """List improvements, and where this runs in GitHub Actions tell it what failed."""
        from . import ratchet

        config, options = self._run.config, self._run.options
        found = ratchet.improvements(self._results)
        update = ratchet.update_command([one.test for one in found], config)
        self._improved = ratchet.improvement_lines(found, update)
        if not (options.ci and self._results.tests):
            return
        from . import github

        if github.is_here():
            if not config.pluginmanager.hasplugin(github.OTHER_ANNOTATOR):
                self._commands = github.errors(self._results, self._places, config.rootpath)
            self._commands += github.notices(found, update)
            self._warnings += filter(None, [github.write_summary(self._results, found, update)])

    def _write(self, path: Path, text: str) -> None:
        write_report(path, text)
        self._written.append(f"report: {path}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The table of what was measured, and what happened to the baselines."""
        lines = list(self._summary(terminalreporter._tw.fullwidth))
        if lines:
            terminalreporter.section("memory")
            for line in lines:
                terminalreporter.write_line(line)
        for rank, test, text in self._elsewhere:
            terminalreporter.section(f"rank {rank}: {test} failed", sep="_", red=True)
            terminalreporter.write_line(text)
        for problem in self._problems:
            terminalreporter.write_line(f"mbmem: error: {problem}", red=True)
        for warning in self._warnings:
            terminalreporter.write_line(f"mbmem: warning: {warning}", yellow=True)
        for command in self._commands:
            terminalreporter.write_line(command)

    def _summary(self, width: int) -> Iterator[str]:
        from . import terminal

        yield from terminal.summary_lines(self._results, width)
        yield from terminal.changes_lines(self._changes)
        yield from self._improved
        yield from self._not_accepted()
        yield from terminal.orphan_lines(self._orphans)
        if self._lacked_gpus:
            tests = "1 test was" if self._lacked_gpus == 1 else f"{self._lacked_gpus} tests were"
            yield f"{tests} skipped: {TOO_FEW_GPUS}; --mbmem-require-gpus makes that a failure"
        yield from self._written

    def _not_accepted(self) -> Iterator[str]:
        """What --mbmem-update does not write, because nobody said why it rose."""
        options = self._run.options
        if options.update not in ("changed", "all") or options.reason is not None:
            return
        measured = [one for test in self._results.tests.values() for one in test.measured]
        verdicts: list[str] = [
            j.judgement.verdict for one in measured for j in one.judged if j.judgement.gate.limit is None
        ]
        steps = [j.judgement for one in measured for j in one.throughputs]
        verdicts += [step.verdict for step in steps if step.against_minimum is None]
        if rose := verdicts.count("regression"):
            yield f"baselines not written, because nobody said why they rise (--mbmem-reason): {rose}"


def _text(report: pytest.TestReport) -> str:
    """What failed, or why the test was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return reason.removeprefix("Skipped: ")


def _outcome(report: pytest.TestReport, before: str) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    if report.failed:
        return "failed" if report.when == "call" else "error"
    return "skipped" if report.skipped else before
