"""Progress of long measurements in a pytest session: where it is shown, and when something else is written there.

In the process that has the terminal it is shown by the launcher, which waits meanwhile, in the thread that runs the
tests. With pytest-xdist the processes that measure have no terminal: each keeps a file, and the controller looks at the
files from a thread that writes only while the controller itself writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .. import progress
from ..progress import INTERVAL, Clock, Display, Line, Log, Notes, Progress, Status

if TYPE_CHECKING:
    from _pytest.capture import CaptureManager

INPUT = "mbmem_progress"
"""What xdist's workers call the folder of the files in their input."""


def begin(config: pytest.Config) -> Progress | None:
    """Of the session of a process that measures; None where nobody would see it, and in xdist's controller."""
    if config.pluginmanager.hasplugin("dsession"):
        return None
    if hasattr(config, "workerinput"):
        folder = config.workerinput.get(INPUT)
        if folder is None:
            return None
        following = Following(Notes(Path(folder) / f"{config.workerinput['workerid']}.json"), Tally())
    else:
        tally = Tally()
        display = display_of(config, tally)
        if display is None:
            return None
        following = Following(display, tally)
    config.pluginmanager.register(following, "mbmem-progress")
    return following.progress


def display_of(config: pytest.Config, tally: Tally, *, in_controller: bool = False) -> Display | None:
    """What the session's terminal can show; None without one, and with -qq."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or config.option.verbose <= -2:
        return None
    capture = None if in_controller else config.pluginmanager.get_plugin("capturemanager")
    terminal = Terminal(reporter, capture)

    def text(statuses: Sequence[Status], now: float) -> str:
        return progress.overview(statuses, now, str(tally))

    # Where a test can print, nobody knows which column the cursor is in.
    knows_column = in_controller or config.getoption("capture", "no") == "fd"
    if terminal.can_rewrite and knows_column:
        return Line(terminal.write, terminal.width, terminal.column, text)
    return Log(terminal.write_line, text)


class Tally:
    """How many tests are done, of all."""

    def __init__(self) -> None:
        self.all = 0
        self.done: set[str] = set()

    def __str__(self) -> str:
        return f"{len(self.done)} of {self.all} tests done" if self.all else ""


class Terminal:
    """pytest's terminal, also while what tests print is captured."""

    def __init__(self, reporter: Any, capture: CaptureManager | None) -> None:
        self._reporter, self._capture = reporter, capture

    @property
    def can_rewrite(self) -> bool:
        """Whether it shows one line after another in the same place. Another plugin's reporter has its own ways."""
        plain = type(self._reporter).__module__ == "_pytest.terminal"
        return plain and self._reporter.isatty and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"

    def width(self) -> int:
        """Columns."""
        return int(self._reporter._tw.fullwidth)

    def column(self) -> int:
        """Where the cursor is in the line that pytest has begun."""
        return int(self._reporter._tw.width_of_current_line)

    def write(self, text: str) -> None:
        """Write what pytest does not take into account."""
        stream = self._reporter._tw._file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with self._uncaptured():
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()

    def write_line(self, text: str) -> None:
        """Write a line of its own. pytest goes on with its letters behind it, or with -v names the test again."""
        reporter = self._reporter
        with self._uncaptured():
            begun = reporter.currentfspath if reporter.verbosity <= 0 else None
            if self.column():
                reporter._tw.line()
            reporter.currentfspath = None
            reporter.write_line(text)
            reporter.flush()
            reporter.currentfspath = begun

    def _uncaptured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._capture is None else self._capture.global_and_fixture_disabled()


class Following:
    """The hooks of a process that measures."""

    def __init__(self, display: Display, tally: Tally, clock: Clock = time.monotonic) -> None:
        self.progress = Progress(display, clock=clock)
        self._tally = tally

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Know how many tests there are."""
        self._tally.all = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Know which test measures."""
        self.progress.begin(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Know how many tests are done."""
        self._tally.done.add(nodeid)


class Controller:
    """In xdist's controller: shows what the workers' files say.

    Args:
        display: where.
        tally: of all workers' tests.
        clock: see `Clock`.
    """

    def __init__(self, display: Display, tally: Tally, clock: Clock = time.monotonic) -> None:
        self._display, self._tally, self._clock = display, tally, clock
        self._lock = threading.RLock()  # of the terminal
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mbmem-progress", daemon=True)
        self.folder = Path(tempfile.mkdtemp(prefix="mbmem-progress-"))

    @classmethod
    def of(cls, config: pytest.Config) -> Controller | None:
        """Registered and running; None where nobody would see it."""
        tally = Tally()
        display = display_of(config, tally, in_controller=True)
        if display is None:
            return None
        controller = cls(display, tally)
        config.pluginmanager.register(controller, "mbmem-progress-of-workers")
        config.add_cleanup(controller.end)
        controller._thread.start()
        return controller

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            with contextlib.suppress(OSError, ValueError):  # a terminal that has gone away
                self.look()

    def look(self) -> None:
        """Show what there is."""
        statuses = Notes.read(self.folder)
        with self._lock:
            if self._over.is_set():
                return
            if statuses:
                self._display.show(statuses, self._clock())
            else:
                self._display.hide()

    def end(self) -> None:
        """Show nothing any more."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._display.hide()
        shutil.rmtree(self.folder, ignore_errors=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where its file is to be."""
        node.workerinput[INPUT] = str(self.folder)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Know how many tests there are."""
        self._tally.all = max(self._tally.all, len(ids))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logstart(self) -> Generator[None, object, object]:
        """pytest may write."""
        with self._lock:
            self._display.hide()
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self) -> Generator[None, object, object]:
        """pytest may write."""
        with self._lock:
            self._display.hide()
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> Generator[None, object, object]:
        """pytest may write, and one more test is done."""
        with self._lock:
            self._display.hide()
            self._tally.done.add(nodeid)
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True, optionalhook=True)
    def pytest_testnodedown(self) -> Generator[None, object, object]:
        """pytest-xdist may write."""
        with self._lock:
            self._display.hide()
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Leave the terminal to the reports."""
        self.end()
