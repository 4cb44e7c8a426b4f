"""Tests that run again when they fail, as pytest-rerunfailures has them."""

from __future__ import annotations

import pytest

_HOOK = """
def pytest_runtest_protocol(item, nextitem):
    from _pytest.runner import runtestprotocol
    for last in (False, True):
        os.environ["FAKE_EXTRA_MIB"] = "{extra}" if last else "50"
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if not last and report.failed:
                report.outcome = "rerun"
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def runs_again(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, extra: int = 0) -> None:
    """Have each test of a project with made-up figures run twice: with 50 MiB more, and then with `extra` MiB."""
    monkeypatch.setenv("FAKE_EXTRA_MIB", "0")  # which the hook sets
    with project.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write(_HOOK.format(extra=extra))
