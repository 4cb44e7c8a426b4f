"""The terminal of a process of torchrun that is not the first: nothing but a line for each test that fails there."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest._io import TerminalWriter


class OtherRank:
    """Hooks for one session."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionstart(self, session: pytest.Session) -> Generator[None, object, object]:
        """Send all that pytest reports to nowhere, from its header on."""
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
            reporter._tw = TerminalWriter(nowhere)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self._failed.append(f"{report.nodeid}: {_last_line(report)}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self._failed.append(f"{report.nodeid}: {_last_line(report)}")

    def pytest_sessionfinish(self) -> None:
        """Name what failed: it may have failed on this rank alone."""
        for line in self._failed:
            print(f"[rank {self._rank}] FAILED {line}", file=sys.__stderr__, flush=True)


def _last_line(report: pytest.TestReport | pytest.CollectReport) -> str:
    lines = report.longreprtext.strip().splitlines()
    return lines[-1].strip() if lines else ""
