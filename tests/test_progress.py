"""How far long measurements are: what is shown of them, where, and when. No test waits for a clock."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem import progress
from pytest_mbmem.measure import place
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.progress import Line, Log, Notes, Progress, Status, on_terminal, overview
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report.live import Controller, Tally, Terminal

MEASURE = "pytest_mbmem.measure.worker:measure_rank"


class Shown:
    """A display that remembers."""

    def __init__(self) -> None:
        self.seen: list[Status | None] = []

    def show(self, statuses: Sequence[Status], now: float) -> None:
        self.seen += statuses

    def hide(self) -> None:
        self.seen.append(None)


# Texts ----------------------------------------------------------------------------------------------------------------


def test_a_status_says_tests_ranks_steps_and_time() -> None:
    status = Status("t.py::test_a", 10.0, ranks=8, ranks_done=2, places=("rank 2 in step 3 of 4, forward",))
    assert overview([status], 22.9, "3 of 12 tests done") == (
        "3 of 12 tests done; 2 of 8 ranks measured, rank 2 in step 3 of 4, forward, 12 s: t.py::test_a"
    )


def test_other_runs_are_named_when_the_ranks_are_done() -> None:
    status = Status("", 0.0, ranks=2, ranks_done=2, others=5, others_done=1)
    assert status.text(125.0) == "2 of 2 ranks measured, 1 of 5 other runs done, 2 min 05 s"
    assert Status("t", 0.0, others=1).text(1.0) == "1 s: t"


def test_of_many_processes_those_that_take_longest_are_named() -> None:
    statuses = [Status(name, since) for name, since in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0))]
    assert overview(statuses, 5.0) == "4 s: a; 3 s: b; and 2 more"


# A log ----------------------------------------------------------------------------------------------------------------


def test_a_log_gets_nothing_of_what_is_over_soon_and_then_a_line_in_30_seconds() -> None:
    lines: list[str] = []
    log = Log(lines.append)
    at = []
    for second in range(200):
        before = len(lines)
        log.show([Status("test_a", 5.0 if second < 120 else 120.0)], float(second))
        at += [second] * (len(lines) - before)
    assert at == [35, 65, 95, 150, 180]
    assert lines[0] == "mbmem: 30 s: test_a"
    log.hide()
    assert len(lines) == 5


def test_a_hostile_name_is_one_line() -> None:
    lines: list[str] = []
    Log(lines.append).show([Status("a\n\x1b[2J\r", 0.0)], 30.0)
    assert lines == ["mbmem: 30 s: a??[2J?"]


# A terminal -----------------------------------------------------------------------------------------------------------


class Screen:
    """What a terminal of so many columns shows of what is written (ECMA-48, as far as it is used here)."""

    def __init__(self, columns: int = 40, rows: int = 3) -> None:
        self.columns, self.rows = columns, rows
        self.lines = [""]
        self.row = self.at = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[(\d*)([A-Z])|(\n)|(\r)|([^\x1b\n\r]+)", text):
            number, code, newline, back, plain = part
            if code == "A":
                self.row = max(0, self.row - int(number))
            elif code == "C":
                self.at = min(self.columns - 1, self.at + int(number))
            elif code == "K":
                assert number == "2"
                self.lines[self.row] = ""
            elif newline:
                self.row, self.at = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif back:
                self.at = 0
            else:
                assert self.at + len(plain) <= self.columns, "the line wraps"
                line = self.lines[self.row].ljust(self.at)
                self.lines[self.row] = line[: self.at] + plain + line[self.at + len(plain) :]
                self.at += len(plain)

    def text(self) -> list[str]:
        return "\n".join(self.lines).rstrip("\n").split("\n")


@pytest.mark.parametrize("begun", ["", "test_it.py ..", "x" * 39])
def test_a_line_is_written_over_and_leaves_no_trace(begun: str) -> None:
    screen = Screen()
    screen.write(f"before\n{begun}")
    line = Line(screen.write, lambda: screen.columns, lambda: len(begun))
    for second, name in enumerate(("a long name of a test that does not fit", "short")):
        line.show([Status(name, 0.0)], float(second))
        shown = ["before", *([begun] if begun else []), f"{second} s: {name}"]
        assert screen.text() == [text if len(text) < 40 else f"{text[:36]}..." for text in shown]
        assert (screen.lines[screen.row], screen.at) == (begun or screen.lines[1], len(begun))
    line.hide()
    assert screen.text() == ["before", begun] if begun else ["before"]
    screen.write("F")
    assert screen.text() == ["before", f"{begun}F"]
    written = screen.text()
    line.hide()  # nothing is there to hide
    assert screen.text() == written


def test_nothing_is_shown_where_the_cursor_may_be_in_either_of_two_lines() -> None:
    screen = Screen()
    Line(screen.write, lambda: 40, lambda: 80).show([Status("a", 0.0)], 1.0)
    assert screen.text() == [""]


def test_wide_characters_take_two_columns() -> None:
    written: list[str] = []
    Line(written.append, lambda: 20).show([Status("\u6e2c" * 30, 0.0)], 1.0)
    assert written == ["\r\x1b[2K1 s: " + "\u6e2c" * 5 + "...\r"]


def test_a_command_shows_it_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert on_terminal(io.StringIO(), "r.yaml") is None
    assert on_terminal(Tty(), "r.yaml") is not None
    monkeypatch.setenv("TERM", "dumb")
    assert on_terminal(Tty(), "r.yaml") is None


# The launcher ---------------------------------------------------------------------------------------------------------


def calls(*ranks: int) -> list[dict[str, Any]]:
    measured = [{"target": MEASURE, "arguments": {"rank": rank}} for rank in ranks]
    return [*measured, {"target": "pytest_mbmem.measure.worker:count_rank", "arguments": {"rank": 0}}]


def test_calls_are_followed_from_their_begin_to_their_end() -> None:
    shown, now = Shown(), iter([5.0, 7.0, 8.0])
    followed = Progress(shown, clock=lambda: next(now))
    followed.begin("t.py::test_a")
    requests = calls(3, 5)
    with followed.following(requests) as following:
        following.began(0)
        following.began(1)
        Path(requests[0]["place"]).write_bytes(b"step 1 of 2, forward".ljust(place.SIZE))
        following.look()
        following.ended(0)
        following.began(2)
        following.look()
        folder = Path(requests[0]["place"]).parent
    first, second, hidden = shown.seen
    assert first == Status("t.py::test_a", 5.0, 2, 0, 1, 0, ("rank 3 in step 1 of 2, forward", "rank 5 starts"))
    assert second == Status("t.py::test_a", 5.0, 2, 1, 1, 0, ("rank 5 starts",))
    assert hidden is None
    assert not folder.exists()
    assert "place" not in requests[2]


def test_what_goes_wrong_leaves_nothing_behind() -> None:
    shown = Shown()
    requests = calls(0)
    following = Progress(shown).following(requests)
    following.__enter__().began(0)
    assert Path(requests[0]["place"]).exists()
    assert not following.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert shown.seen == [None]
    assert not Path(requests[0]["place"]).parent.exists()


def test_a_real_worker_says_where_it_is(
    launcher: Launcher, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at as often as can be, and the last look is when the worker has ended."""
    said: list[str] = []

    class Looking(Progress):
        def _show(self, calls: progress.Calls) -> None:
            said.extend(calls.status()["places"])

    monkeypatch.setattr("pytest_mbmem.measure.workers.INTERVAL", 0.001)
    monkeypatch.setattr(launcher, "progress", Looking(Shown()))
    assert launcher.measure(small_recipe, count_flops=False).failure is None
    assert {"rank 0 starts", "rank 0 in build"} <= set(said)
    assert set(said) - {"rank 0 starts", "rank 0 in build"} <= {
        f"rank 0 in step {step} of 2, {phase}"
        for step in (1, 2)
        for phase in ("forward", "backward", "grad-sync", "optimizer")
    }


def test_nobody_watches_a_worker_unless_it_is_shown(launcher: Launcher) -> None:
    assert launcher.progress is None
    result = launcher.call("pytest_mbmem.measure.place:is_watched", {})
    assert result.value is False


def test_the_last_thing_said_is_read_whole(tmp_path: Path) -> None:
    """In another process: a worker says it once for all."""
    file = tmp_path / "place"
    place.make(file)
    assert place.read(file) == ""
    code = (
        "import sys; from pytest_mbmem.measure import place; place.watched_in(sys.argv[1])\n"
        "for n in range(1000): place.say(f'step {n} of 1000, forward'); place.say('x' * 100); place.say('\\u00fc end')"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert place.read(file) == "? end"
    assert place.read(tmp_path / "gone") == ""


# Sessions -------------------------------------------------------------------------------------------------------------

SLOW = """
import time
from pytest_mbmem.progress import INTERVAL, QUIET, Progress

class Slow(FakeLauncher):
    # Each measurement takes a minute of a clock that only it moves.
    progress = None

    def measure(self, recipe, **arguments):
        if self.progress is not None:
            clock = [0.0]
            self.progress._clock = lambda: clock[0]
            with self.progress.following([{"target": "a:b", "arguments": {}}]) as calls:
                for _ in range(61):
                    calls.look()
                    clock[0] += 1
        return super().measure(recipe, **arguments)

FakeLauncher.__mbmem_slow__ = Slow
"""


@pytest.fixture
def slow_project(project: pytest.Pytester) -> pytest.Pytester:
    """A project in which each measurement takes a minute, which passes at once."""
    text = (project.path / "conftest.py").read_text()
    text = text.replace('"Launcher", FakeLauncher', '"Launcher", Slow')
    project.makeconftest(text.replace("def _rank(", f"{SLOW}\n\ndef _rank("))
    project.makepyfile(
        """
        import pytest

        def test_first(): pass

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_slow(mbmem):
            print("out of the test")
            mbmem.measure("recipe.yaml")

        def test_last(): pass
        """
    )
    return project


LINES = [
    "mbmem: 1 of 3 tests done; 30 s: test_it.py::test_slow",
    "mbmem: 1 of 3 tests done; 1 min 00 s: test_it.py::test_slow",
]


@pytest.mark.parametrize(
    ("options", "around"),
    [
        ([], ["test_it.py .", *LINES, ".. *[[]100%[]]"]),
        (["-s"], ["test_it.py .out of the test", "", *LINES, ".."]),
        (["-v"], ["test_it.py::test_slow ", *LINES, "", "test_it.py::test_slow PASSED *"]),
        (["-q"], [".", *LINES, ".. *[[]100%[]]"]),
    ],
)
def test_a_log_has_whole_lines(slow_project: pytest.Pytester, options: list[str], around: list[str]) -> None:
    result = slow_project.runpytest(*options)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(around, consecutive=True)


@pytest.mark.parametrize("options", [["-qq"], ["-p", "no:terminal"]])
def test_nothing_is_shown_where_nothing_should_be(slow_project: pytest.Pytester, options: list[str]) -> None:
    result = slow_project.runpytest(*options)
    assert result.ret == pytest.ExitCode.OK
    assert "mbmem: " not in result.stdout.str()


@pytest.mark.parametrize("option", ["", "-v"])
def test_a_terminal_shows_after_the_run_what_it_shows_without_progress(
    slow_project: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
) -> None:
    monkeypatch.setattr(Terminal, "can_rewrite", property(lambda self: True))
    monkeypatch.setenv("COLUMNS", "200")  # the line of the rootdir fits

    def shown() -> tuple[str, list[str]]:
        capsys.readouterr()
        slow_project.runpytest_inprocess("--capture=fd", *filter(None, [option])).assert_outcomes(passed=3)
        text = capsys.readouterr().out  # pytester's own result has lost where lines are written over
        screen = Screen(columns=200)
        screen.write(text)
        return text, [re.sub(r" in [\d.]+s =+", "", line) for line in screen.text()]

    text, lines = shown()
    assert "1 of 3 tests done; 59 s: test_it.py::test_slow" in text
    monkeypatch.setattr(Terminal, "can_rewrite", property(lambda self: False))
    monkeypatch.setattr(progress, "QUIET", 1e9)
    assert lines == shown()[1]


# pytest-xdist ---------------------------------------------------------------------------------------------------------


def test_a_worker_of_xdist_leaves_a_note_while_it_measures(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    notes = Notes(folder / "gw0.json")
    status = Status("t.py::test_a", 3.0, 8, 2, places=("rank 2 in build",))
    notes.show([status], 9.0)
    Notes(folder / "gw1.json").show([Status("b", 1.0)], 9.0)
    assert Notes.read(folder) == [status, Status("b", 1.0)]
    (folder / "gw2.json").write_text("[{")
    (folder / "gw3.json").write_text('[{"places": []}]')
    assert Notes.read(folder) == [status, Status("b", 1.0)]
    notes.hide()
    notes.hide()
    assert Notes.read(folder) == [Status("b", 1.0)]
    assert Notes.read(tmp_path / "nowhere") == []


def test_the_controller_shows_the_notes_and_hides_before_pytest_writes() -> None:
    shown = Shown()
    controller = Controller(shown, Tally(), clock=lambda: 9.0)
    status = Status("t.py::test_a", 3.0)
    Notes(controller.folder / "gw0.json").show([status], 0.0)
    controller.look()
    assert shown.seen == [status]
    hook = controller.pytest_runtest_logreport()
    next(hook)
    assert shown.seen == [status, None]
    blocked = threading.Thread(target=controller.look)
    blocked.start()
    assert shown.seen == [status, None]  # pytest is writing
    with pytest.raises(StopIteration):
        hook.send(None)
    blocked.join()
    assert shown.seen == [status, None, status]
    controller.pytest_sessionfinish()
    controller.look()
    assert shown.seen == [status, None, status, None]
    assert not controller.folder.exists()


def test_xdists_controller_logs_what_its_workers_measure(
    slow_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks are the real ones, but nothing counts as over soon, and the worker waits until its note was read."""
    conftest = (slow_project.path / "conftest.py").read_text()
    waits = """
                import pathlib, time
                while not pathlib.Path("seen").exists():
                    calls.look()
                    time.sleep(0.01)
"""
    conftest = conftest.replace("                for _ in range(61):", f"{waits}                for _ in range(0):")
    conftest = conftest.replace("            self.progress._clock = lambda: clock[0]\n", "")
    slow_project.makeconftest(
        conftest
        + """
from pytest_mbmem import progress
progress.QUIET = 0.0
original = progress.Log.show

def show(self, statuses, now):
    original(self, statuses, now)
    Path("seen").touch()

progress.Log.show = show
"""
    )
    result = slow_project.runpytest_subprocess("-n1")
    result.assert_outcomes(passed=3)
    lines = [line for line in result.outlines if line.startswith("mbmem: ") and "test_slow" in line]
    assert re.fullmatch(r"mbmem: \d of 3 tests done; \d+ s: test_it\.py::test_slow", lines[0])
    assert not [line for line in result.outlines if "mbmem: " in line and not line.startswith("mbmem")]


def test_no_thread_stays(slow_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    slow_project.runpytest_inprocess("-n1").assert_outcomes(passed=3)
    assert threading.active_count() == before
