"""How far a long measurement is, for a person who waits: a line on a terminal, or now and then one in a log.

`Progress` belongs to a process that measures. Its launcher tells it which calls it makes, and while it waits for their
answers asks it once a second to show what there is. There is no thread. A `Display` decides what is seen of it, and
when. Knows neither pytest nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from .measure import place
from .texts import printable

INTERVAL = 1.0
"""Seconds between two looks."""

QUIET = 30.0
"""Seconds of a test's measurements before the first line in a log, and between two of them."""

_MEASURES = "pytest_mbmem.measure.worker:measure_rank"
_MOST_PLACES = 2
_MOST_TESTS = 2

Clock = Callable[[], float]
"""Seconds, as `time.monotonic`, which is the same in all processes of a machine."""


@dataclass(frozen=True)
class Status:
    """What one process measures now."""

    test: str  # or whatever else asked for it
    since: float  # by the clock
    ranks: int = 0  # that are measured in these calls
    ranks_done: int = 0
    others: int = 0  # calls that measure no rank, but count, probe, or repeat
    others_done: int = 0
    places: tuple[str, ...] = ()  # of ranks that run, as in "rank 2 in step 3 of 4, forward"

    def text(self, now: float) -> str:
        """In one line, of which the end can be missed."""
        parts = [f"{self.ranks_done} of {self.ranks} ranks measured"] if self.ranks else []
        if self.others > 1 and self.ranks_done == self.ranks:
            parts.append(f"{self.others_done} of {self.others} other runs done")
        parts += self.places[:_MOST_PLACES]
        parts.append(_duration(now - self.since))
        return f"{', '.join(parts)}: {self.test}" if self.test else ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def overview(statuses: Sequence[Status], now: float, tests: str = "") -> str:
    """Of all processes that measure, those that have taken longest first; `tests` says how many tests are done."""
    longest = sorted(statuses, key=lambda status: status.since)
    shown = [status.text(now) for status in longest[:_MOST_TESTS]]
    more = [f"and {len(longest) - _MOST_TESTS} more"] if len(longest) > _MOST_TESTS else []
    return "; ".join(filter(None, (tests, *shown, *more)))


# What is seen of it ---------------------------------------------------------------------------------------------------


class Display(Protocol):
    """Where progress is shown."""

    def show(self, statuses: Sequence[Status], now: float) -> None:
        """Called once a second while something is measured."""

    def hide(self) -> None:
        """Nothing is measured any more, or somebody else is about to write. May be called again and again."""


class Log:
    """For a file or a pipe: nothing of what is over soon, then a line now and then.

    Args:
        write_line: writes a line of its own.
        text: makes it.
    """

    def __init__(
        self, write_line: Callable[[str], object], text: Callable[[Sequence[Status], float], str] = overview
    ) -> None:
        self._write_line, self._text = write_line, text
        self._last: float | None = None

    def show(self, statuses: Sequence[Status], now: float) -> None:
        """Write a line if it is time for one."""
        is_long = any(now - status.since >= QUIET for status in statuses)
        if is_long and (self._last is None or now - self._last >= QUIET):
            self._last = now
            self._write_line(f"mbmem: {printable(self._text(statuses, now))}")

    def hide(self) -> None:
        """What is written stays."""


class Line:
    """For a terminal: one line that is written over, and erased in the end.

    It stands below the line that the cursor is in, if that one has begun, and the cursor goes back to where it was.

    Args:
        write: writes a text as it is, at once.
        width: columns of the terminal.
        column: of the cursor.
        text: makes the line.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        width: Callable[[], int],
        column: Callable[[], int] = lambda: 0,
        text: Callable[[Sequence[Status], float], str] = overview,
    ) -> None:
        self._write, self._width, self._column, self._text = write, width, column, text
        self._shown = False

    def show(self, statuses: Sequence[Status], now: float) -> None:
        """Write the line, or write over it."""
        width = self._width()
        if self._column() and self._column() % width == 0:  # between two lines, where no terminal is like another
            return
        self._write(self._placed(_shortened(printable(self._text(statuses, now)), width - 1)))
        self._shown = True

    def hide(self) -> None:
        """Erase the line."""
        if self._shown:
            self._write(self._placed(""))
            self._shown = False

    def _placed(self, text: str) -> str:
        """The text in place of the line, with what moves the cursor there and back (ECMA-48: EL, CUU, CUF)."""
        column = self._column() % self._width()
        if not column:
            return f"\r\x1b[2K{text}\r"
        return f"\n\r\x1b[2K{text}\r\x1b[1A\x1b[{column}C"


class Notes:
    """For another process: a file that says what this one measures.

    Args:
        path: of the file, in a folder that need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def show(self, statuses: Sequence[Status], now: float) -> None:
        """Write the file anew."""
        part = self._path.with_suffix(".part")
        with contextlib.suppress(OSError):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps([asdict(status) for status in statuses]), encoding="utf-8")
            part.replace(self._path)

    def hide(self) -> None:
        """Remove it."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    @staticmethod
    def read(folder: Path) -> list[Status]:
        """What all processes with a file in the folder measure."""
        found: list[Status] = []
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                statuses = json.loads(path.read_text(encoding="utf-8"))
                found += [Status(**{**status, "places": tuple(status["places"])}) for status in statuses]
        return found


def _shortened(text: str, columns: int) -> str:
    """As much as fits; characters of East Asia take two columns."""
    widths = [2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text]
    if sum(widths) <= columns:
        return text
    kept, room = "", columns - 3
    for character, width in zip(text, widths, strict=True):
        room -= width
        if room < 0:
            break
        kept += character
    return f"{kept}..."


# What there is to see -------------------------------------------------------------------------------------------------


class Progress:
    """Of one process that measures.

    Args:
        display: where it is shown.
        test: what the next measurements are for; may be set.
        clock: see `Clock`.
    """

    def __init__(self, display: Display, test: str = "", clock: Clock = time.monotonic) -> None:
        self._display, self._clock = display, clock
        self._since: float | None = None
        self._test = test

    def begin(self, test: str) -> None:
        """The next measurements are for this test."""
        self._test, self._since = test, None

    @contextlib.contextmanager
    def following(self, requests: Sequence[dict[str, Any]]) -> Iterator[Calls]:
        """Around calls that are made together. Adds to a request where its worker says where it is."""
        if self._since is None:
            self._since = self._clock()
        folder = Path(tempfile.mkdtemp(prefix="mbmem-places-"))
        calls = Calls(requests, folder, self._show)
        try:
            yield calls
        finally:
            self._display.hide()
            shutil.rmtree(folder, ignore_errors=True)

    def _show(self, calls: Calls) -> None:
        now = self._clock()
        status = Status(self._test, self._since if self._since is not None else now, **calls.status())
        self._display.show([status], now)


class Calls:
    """Calls that are made together, by their place among the requests."""

    def __init__(self, requests: Sequence[dict[str, Any]], folder: Path, show: Callable[[Calls], None]) -> None:
        self._show = show
        self._running: set[int] = set()
        self._done: set[int] = set()
        self._requests = requests
        self._files: dict[int, Path] = {}  # of those that measure a rank
        for index, request in enumerate(requests):
            if request["target"] == _MEASURES:
                self._files[index] = folder / str(index)
                request["place"] = str(self._files[index])

    def began(self, index: int) -> None:
        """A call is about to be made."""
        if index in self._files:
            place.make(self._files[index])
        self._running.add(index)

    def ended(self, index: int) -> None:
        """A call is answered."""
        self._running.discard(index)
        self._done.add(index)

    def look(self) -> None:
        """Show how far they are."""
        self._show(self)

    def status(self) -> dict[str, Any]:
        """Fields of a `Status`."""
        places = []
        for index in sorted(self._running & self._files.keys()):
            rank, where = self._requests[index]["arguments"].get("rank"), place.read(self._files[index])
            places.append(f"rank {rank} in {where}" if where else f"rank {rank} starts")
        ranks_done = len(self._done & self._files.keys())
        return {
            "ranks": len(self._files),
            "ranks_done": ranks_done,
            "others": len(self._requests) - len(self._files),
            "others_done": len(self._done) - ranks_done,
            "places": tuple(places),
        }


def on_terminal(stream: TextIO, name: str) -> Progress | None:
    """Progress of a command, on its stream if that is a terminal. The stream's line must not have begun."""
    if not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None

    def write(text: str) -> None:
        stream.write(text)
        stream.flush()

    return Progress(Line(write, lambda: shutil.get_terminal_size().columns), name)
