"""Prints the documents' tables against the virtual GPU at the end of the run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    lines = [value for report in reports for name, value in report.user_properties if name == "document_row"]
    if lines:
        terminalreporter.section("documents against the virtual GPU, GB: peaks, and differences to the control")
        for line in lines:
            terminalreporter.write_line(line)
