"""Prints the table of published against virtual figures at the end of the run."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.getreports(outcome)]
    rows = [value for report in reports for name, value in report.user_properties if name == "published_row"]
    if rows:
        terminalreporter.section(
            "published figures against the virtual GPU, MiB: after a step / step-1 / step-2 / last peak"
        )
        for row in sorted(rows):
            terminalreporter.write_line(row)
