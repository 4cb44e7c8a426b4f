"""The commands `mbmem trend`, `mbmem compare --figures` and `mbmem junit`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.measurement import Device, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.report import json as json_report
from pytest_mbmem.report import junit_file
from pytest_mbmem.report.results import Measured, Results, TestResult

GIB = 2**30
XML = "<testsuite name='pytest' timestamp='2026-01-31T12:0{minute}:00' time='1'>{cases}</testsuite>"


def results(peaks: Mapping[str, int], day: int = 1) -> Results:
    tests = {}
    for name, peak in peaks.items():
        sizes = {"allocated": peak, "reserved": 8 * GIB}
        rank = RankMeasurement(0, {}, 1, (PhaseFigures(0, "test", sizes, sizes),))
        measurement = Measurement(Device("virtual-x", "X", 16 * GIB, virtual=True), (rank,))
        test = TestResult(f"t.py::{name}", measured=[Measured(name, None, measurement)])
        tests[test.id] = test
    return Results({}, tests, f"2026-01-{day:02}T00:00:00Z")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Of three days; the middle one is a JUnit file."""
    paths = [tmp_path / "1.json", tmp_path / "2.xml", tmp_path / "3.json"]
    paths[0].write_text(json_report.text(results({"test_a": GIB, "test_b": GIB})))
    paths[1].write_text(junit_file.text(results({"test_a": GIB, "test_b": 2 * GIB}, day=2)))
    paths[2].write_text(json_report.text(results({"test_a": 4 * GIB}, day=3)))
    return paths


def mbmem(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, list[str], str]:
    status = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_trend_shows_and_writes_what_it_read(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [tmp_path / name for name in ("out.html", "out.md", "out.txt")]
    options = "--html", out[0], "--markdown", out[1], "--json", out[2], "--metric", "allocated"
    status, lines, err = mbmem(capsys, "trend", *runs, *options)
    assert (status, err) == (0, "")
    assert [line.split()[:6] for line in lines[1:3]] == [
        ["t.py::test_a", "virtual-x", "allocated", "3", "1.00", "GiB"],
        ["t.py::test_b", "virtual-x", "allocated", "2", "1.00", "GiB"],
    ]
    assert out[0].read_text().count("<circle") == 5
    assert out[1].read_text().count("| allocated |") == 2
    assert [[p["value"] for p in series["points"]] for series in json.loads(out[2].read_text())] == [
        [GIB, GIB, 4 * GIB],
        [GIB, 2 * GIB],
    ]


def test_compare_reads_a_pipe_as_well(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.write(writing, runs[0].read_bytes())
    os.close(writing)
    status, lines, err = mbmem(capsys, "compare", f"/dev/fd/{reading}", runs[2], "--figures")
    os.close(reading)
    assert (status, err) == (0, "")
    assert lines[-1] == "3 figures of 2 tests: 1 worse, 1 gone, 1 same"


def test_trend_fails_on_what_got_worse_since_the_run_before(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mbmem(capsys, "trend", *runs, "--fail-on", "reserved:0%")[0] == 0
    status, lines, _ = mbmem(capsys, "trend", *runs, "--fail-on", "allocated:2 GiB")
    assert status == 1
    assert lines[-1] == "--fail-on allocated:2 GiB: t.py::test_a allocated: 1.00 GiB -> 4.00 GiB (+300.00%)"


@pytest.mark.parametrize("revision", ["", "c0ffee"])
def test_the_files_that_a_run_left_are_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], revision: str
) -> None:
    """pytest's own file says no revision, and another start."""
    for day, peak in enumerate((GIB, GIB, 2 * GIB), 1):
        run = results({"test_a": peak}, day)
        run.revision = revision and f"{day}{revision}"
        (tmp_path / f"results{day}.json").write_text(json_report.text(run))
        (tmp_path / f"junit{day}.xml").write_text(junit_file.text(run))
        pytests = (
            "<testsuite timestamp='2026-01-{day:02}T00:00:02Z'><testcase classname='t' name='test_a'/></testsuite>"
        )
        (tmp_path / f"pytest{day}.xml").write_text(pytests.format(day=day))
        assert mbmem(capsys, "junit", "add", tmp_path / f"results{day}.json", tmp_path / f"pytest{day}.xml")[0] == 0
    out = tmp_path / "out.txt"
    status, lines, _ = mbmem(capsys, "trend", tmp_path, "--fail-on", "allocated:1%", "--json", out)
    assert status == 1
    assert "--fail-on allocated:1%: t.py::test_a allocated: 1.00 GiB -> 2.00 GiB (+100.00%)" in lines
    for series in json.loads(out.read_text()):
        runs = [point["run"] for point in series["points"]]
        assert runs == [f"{day}{revision}" if revision else f"results{day}.json" for day in (1, 2, 3)]


@pytest.mark.parametrize(
    ("second", "revision", "peak", "runs"),
    [("1", "", GIB, 1), ("0", "", GIB, 2), ("?", "", GIB, 2), ("3", "", 2 * GIB, 2), ("3", "other", GIB, 2)],
)
def test_what_differs_in_time_revision_or_figure_is_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str, revision: str, peak: int, runs: int
) -> None:
    first, other = results({"test_a": peak}), results({"test_a": GIB})
    first.started, other.started = f"2026-01-01T00:00:0{second}Z", "2026-01-01T00:00:03Z"
    first.revision, other.revision = revision, "one" if revision else ""
    (tmp_path / "a.json").write_text(json_report.text(first))
    (tmp_path / "b.xml").write_text(junit_file.text(other))
    _, lines, _ = mbmem(capsys, "trend", tmp_path, "--metric", "allocated")
    assert lines[1].split()[:4] == ["t.py::test_a", "virtual-x", "allocated", str(runs)]


def test_files_of_one_kind_are_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json_report.text(results({"test_a": GIB})))
    _, lines, _ = mbmem(capsys, "trend", tmp_path, "--metric", "allocated")
    assert lines[1].split()[:4] == ["t.py::test_a", "virtual-x", "allocated", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--metric", "memory"], "--metric: no test has a figure 'memory'; they have allocated, reserved"),
        (["--fail-on", "missing"], "--fail-on: missing is for `mbmem compare`"),
        (["--fail-on", "throughput:1%"], "--fail-on: throughput:1%: no test has this figure in both runs"),
        (["--html", "x", "--json", "x"], "--html and --json name the same file: x"),
        (["--html", "no/x"], "--html: the folder no does not exist"),
        (["none.xml"], "none.xml: cannot be read (No such file or directory)"),
    ],
)
def test_mistakes_of_trend_are_said_once(
    runs: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, lines, err = mbmem(capsys, "trend", *runs, *arguments)
    assert (status, lines) == (2, [])
    assert err.startswith(f"mbmem: error: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.xml", "3.json"]


def test_compare_fails_on_what_got_worse(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, comment = tmp_path / "c.html", tmp_path / "c.md"
    compare = "compare", runs[0], runs[2], "--html", page, "--markdown", comment
    status, lines, err = mbmem(capsys, *compare, "--fail-on", "allocated:1%", "--fail-on", "missing")
    assert (status, err) == (1, "")
    assert "3 figures of 2 tests: 1 worse, 1 gone, 1 same" in lines
    assert [line for line in lines if line.startswith("--fail-on")] == [
        "--fail-on allocated:1%: t.py::test_a allocated: 1.00 GiB -> 4.00 GiB (+300.00%)",
        "--fail-on missing: t.py::test_b allocated: 1.00 GiB -> - (gone)",
    ]
    assert '<td class="worse">worse</td>' in page.read_text()
    assert comment.read_text().splitlines()[0].endswith("1 worse, 1 gone, 1 same")
    written = comment.read_text().replace("&#58;", ":").replace("&#46;", ".").replace("&#95;", "_")
    assert "**Rules are broken:**" in written
    assert "t.py::test_a allocated: 1.00 GiB" in written
    assert written.count("only base has t.py::test_b\n") == 1
    assert mbmem(capsys, *compare, "--fail-on", "allocated:300%")[0] == 2  # a share is 100% at most
    assert mbmem(capsys, *compare, "--fail-on", "allocated:3 GiB")[0] == 0
    assert comment.read_text().splitlines()[2] == "No rule of --fail-on is broken."


def test_compare_reads_junit_files_without_phases(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, err = mbmem(capsys, "compare", runs[1], runs[2])
    assert (status, err) == (0, "")
    assert lines[0].split() == ["test", "device", "metric", "base", "head", "change", "verdict"]
    status, lines, err = mbmem(capsys, "compare", runs[1], runs[2], "--phases")
    assert (status, lines) == (2, [])
    assert "--phases: " in err


def test_junit_merge_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / f"{minute}.xml" for minute in range(2)]
    cases = ["<testcase name='a'><failure message='no'/></testcase><testcase name='b'/>", "<testcase name='a'/>"]
    for minute, (path, case) in enumerate(zip(files, cases, strict=True)):
        path.write_text(XML.format(minute=minute, cases=case))
    status, lines, err = mbmem(capsys, "junit", "merge", "--out", tmp_path / "out.xml", *files)
    assert (status, err) == (0, "")
    assert lines == [f"written: {tmp_path / 'out.xml'}", "cases of 2 files: 2, failures: 0, errors: 0"]
    assert mbmem(capsys, "junit", "merge", "--out", files[0], *files, "--same-run")[1][1].endswith(
        "failures: 1, errors: 0"
    )


def test_junit_merge_of_a_damaged_file_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.xml").write_text("<testsuite")
    status, lines, err = mbmem(capsys, "junit", "merge", "--out", tmp_path / "out.xml", tmp_path / "a.xml")
    assert (status, lines) == (2, [])
    assert err.startswith(f"mbmem: error: {tmp_path / 'a.xml'}: cannot be read as XML")
    assert not (tmp_path / "out.xml").exists()


def test_junit_add_writes_to_the_file_or_beside_it(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytests, out = tmp_path / "p.xml", tmp_path / "out.xml"
    pytests.write_text("<testsuite name='pytest'><testcase classname='t' name='test_a'/></testsuite>")
    before = pytests.read_text()
    status, lines, err = mbmem(capsys, "junit", "add", runs[0], pytests, "--out", out)
    assert (status, err) == (0, "")
    assert lines[1:] == ["tests that got their figures: 1", f"no case in {pytests}: t.py::test_b"]
    assert pytests.read_text() == before
    assert mbmem(capsys, "junit", "add", runs[0], pytests)[0] == 0
    assert pytests.read_text() == out.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "{a}", "{b}", "--html", "{a}"],
        ["compare", "{a}", "{b}", "--markdown", "{b}"],
        ["trend", "{folder}", "--json", "{a}"],
        ["report", "{a}", "--html", "{link}"],
        ["report", "{a}", "--html", "{b}", "--earlier", "{b}"],
        ["junit", "add", "{a}", "{b}", "--out", "{a}"],
        ["estimate", "{a}", "--json", "{a}"],
        ["measure", "{a}", "--json", "{a}"],
        ["snapshot", "{a}", "--json", "{a}"],
    ],
)
def test_a_file_that_is_read_is_not_written_over(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (tmp_path / "link").symlink_to(runs[0])
    before = [path.read_text() for path in runs]
    places = {"a": runs[0], "b": runs[1], "folder": tmp_path, "link": tmp_path / "link"}
    status, lines, err = mbmem(capsys, *(argument.format(**places) for argument in arguments))
    assert (status, lines) == (2, [])
    assert err.endswith(" is read, and would be lost; name another file\n")
    assert [path.read_text() for path in runs] == before


def test_a_figure_that_nothing_has_is_refused(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    runs[0].write_text(runs[0].read_text().replace(str(GIB), "1" + "0" * 400))
    runs[1].write_text(runs[1].read_text().replace(f'"{GIB}"', f'"{"9" * 400}"'))
    status, lines, err = mbmem(capsys, "trend", runs[0])
    assert (status, lines) == (2, [])
    assert err.startswith(f"mbmem: error: {runs[0]}: t.py::test_a")
    assert err.endswith(" is not a whole number of 30 digits or less\n")
    status, lines, err = mbmem(capsys, "trend", runs[1], "--metric", "allocated")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in lines[1:-1]] == ["t.py::test_b"]


@pytest.mark.parametrize("option", ["--html", "--markdown"])
def test_a_name_that_no_file_can_have_is_one_message(
    runs: list[Path], capsys: pytest.CaptureFixture[str], option: str
) -> None:
    status, lines, err = mbmem(capsys, "trend", runs[0], option, "n" * 300)
    assert (status, lines) == (2, [])
    assert err == f"mbmem: error: {option}: {'n' * 300} cannot be written (File name too long)\n"
    assert mbmem(capsys, "trend", "n" * 300)[2].endswith(": cannot be read (File name too long)\n")


def test_a_time_before_the_year_1_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.xml"
    path.write_text("<testsuite name='s' timestamp='0001-01-01T00:00:00+14:00'><testcase name='a'/></testsuite>")
    assert mbmem(capsys, "junit", "merge", "--out", tmp_path / "out.xml", path)[0] == 0


def test_a_figure_that_was_0_is_worse_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "1.json", tmp_path / "2.json"]
    for day, (path, peak) in enumerate(zip(paths, (0, GIB), strict=True), 1):
        path.write_text(json_report.text(results({"test_a": peak}, day)))
    status, lines, _ = mbmem(capsys, "trend", *paths, "--fail-on", "allocated:1%")
    assert (status, lines[-1]) == (1, "--fail-on allocated:1%: t.py::test_a allocated: 0 B -> 1.00 GiB (worse)")
