"""The terminal of a process of torchrun that is not the first: nothing but a line for each test that fails there."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest._io import TerminalWriter

from ..errors import UserError

if TYPE_CHECKING:
    from ..session import Run


class OtherRank:
    """Hooks for one session."""

    def __init__(self, run: Run, rank: int) -> None:
        self._run, self._rank = run, rank
        self._failed: dict[str, str] = {}

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
            self._failed[report.nodeid] = report.longreprtext

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note what could not be collected."""
        if report.failed:
            self._failed[report.nodeid] = report.longreprtext

    def pytest_sessionfinish(self) -> None:
        """Name what failed, and tell the first rank, which reports it."""
        for test in self._failed:
            print(f"[rank {self._rank}] FAILED {test}", file=sys.__stderr__, flush=True)
        with suppress(UserError):
            self._run.failed_elsewhere(self._failed)
