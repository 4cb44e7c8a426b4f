"""The figures of tests over several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.measurement import Device
from pytest_mbmem.report import json, junit_file, pages
from pytest_mbmem.report.junit import properties
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.trend import NOTE, Point, Series, lines_of, read_series, series_of, sparkline

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
NODEID = "tests/test_x.py::TestY::test_z[a]"


def run(*measured: Measured, day: int = 1, revision: str = "") -> Results:
    test = TestResult(NODEID, "passed", 1.0, list(measured))
    return Results({"device": "virtual-h100-80gb, X"}, {NODEID: test}, f"2026-01-{day:02}T00:00:00Z", revision)


def pytests_file(results: Results) -> str:
    """As pytest's --junitxml writes the properties of its tests."""
    cases = "".join(
        '<testcase classname="tests.test_x.TestY" name="test_z[a]"><properties>'
        + "".join(f'<property name="{name}" value="{value}"/>' for name, value in properties(test.measured))
        + "</properties></testcase>"
        for test in results.tests.values()
    )
    return f'<testsuites><testsuite name="pytest" timestamp="{results.started}">{cases}</testsuite></testsuites>'


def points(series: list[Series], metric: str, label: str = NODEID) -> list[tuple[str, int]]:
    (found,) = [one for one in series if (one.label, one.metric) == (label, metric)]
    return [(point.run, point.value) for point in found.points]


def test_all_kinds_of_files_are_read_in_time(tmp_path: Path, measured: Make) -> None:
    third, second, first = (tmp_path / name for name in ("a.json", "b.xml", "c.xml"))
    third.write_text(json.text(run(measured(3 * GIB), day=3, revision="c0ffee" * 6)))
    second.write_text(junit_file.text(run(measured(2 * GIB, gate=PeakGate(limit=GIB)), day=2, revision="bbb")))
    first.write_text(pytests_file(run(measured(GIB), day=1)))
    for paths in ([third, second, first], [tmp_path]):
        series = read_series(paths)
        assert points(series, "allocated") == [("c.xml", GIB), ("bbb", 2 * GIB), ("c0ffeec0ff", 3 * GIB)]
        assert points(series, "reserved")[-1] == ("c0ffeec0ff", 3 * GIB + 2 * MIB)
        assert {one.device for one in series} == {"virtual-h100-80gb"}
        assert {one.points[0].started for one in series} == {"2026-01-01T00:00:00Z"}


def test_gates_of_a_phase_are_series_of_their_own_and_so_are_names_and_devices(tmp_path: Path, measured: Make) -> None:
    one = measured(GIB, gate=PeakGate(phase="build"), baseline=GIB, name="twin")
    other = measured(GIB)
    device = Device("real", "R", 80 * GIB, virtual=False)
    other.measurement = dataclasses.replace(other.measurement, device=device)
    for name, text in (("a.json", json.text(run(one, other))), ("b.xml", junit_file.text(run(one, other)))):
        (tmp_path / name).write_text(text)
        series = read_series([tmp_path / name])
        assert {(s.label, s.device, s.metric): s.values for s in series} == {
            (NODEID, "real", "allocated"): [GIB],
            (NODEID, "real", "reserved"): [GIB + 2 * MIB],
            (NODEID, "real", "counted-flops"): [5 * 10**12],
            (f"{NODEID}@twin", "virtual-h100-80gb", "allocated"): [GIB],
            (f"{NODEID}@twin", "virtual-h100-80gb", "allocated@build"): [MIB],
            (f"{NODEID}@twin", "virtual-h100-80gb", "reserved"): [GIB + 2 * MIB],
            (f"{NODEID}@twin", "virtual-h100-80gb", "counted-flops"): [5 * 10**12],
        }


def test_step_times_are_nanoseconds_in_all_kinds_of_files(tmp_path: Path, measured: Make) -> None:
    one = measured(GIB, recipe=None)
    ranks = tuple(dataclasses.replace(r, step_times=(0.05, 0.05), cold_step=0.1) for r in one.measurement.ranks)
    device = Device("real", "R", 80 * GIB, virtual=False)
    one.measurement = dataclasses.replace(one.measurement, ranks=ranks, device=device)
    for name, text in (("a.json", json.text(run(one))), ("b.xml", junit_file.text(run(one)))):
        (tmp_path / name).write_text(text)
        assert [s.values for s in read_series([tmp_path / name]) if s.metric == "solo-throughput"] == [[50_000_000]]


def test_what_has_no_figures_has_no_point(tmp_path: Path, failed: Make) -> None:
    for name, text in (
        ("a.json", json.text(run(failed("out of memory", "no")))),
        ("b.xml", junit_file.text(run(failed("out of memory", "no")))),
        ("c.xml", "<testsuite><testcase name='a'/></testsuite>"),
        ("d.xml", "<testsuite><testcase name='a'><properties><property name='mbmem_device' value='x'/>"
         "<property name='mbmem_peak_allocated_bytes' value='many'/></properties></testcase></testsuite>"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        assert read_series([tmp_path / name]) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.json", None, "cannot be read (No such file or directory)"),
        ("a.json", "{", "cannot be read as JSON"),
        ("a.json", "{}", "nor what `pytest --mbmem-json` writes (found [])"),
        ("a.xml", "<x/>", "not a JUnit file"),
        ("a.xml", "", "cannot be read as XML"),
    ],
)
def test_a_file_that_is_no_run_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read_series([tmp_path / name])
    assert str(error.value).startswith(f"{tmp_path / name}: ")
    assert message in str(error.value)


def test_a_run_that_left_files_of_both_kinds_is_one_point(tmp_path: Path, measured: Make) -> None:
    for name, text in (("a.json", json.text), ("a.xml", junit_file.text)):
        (tmp_path / name).write_text(text(run(measured(GIB), revision="first")))
    assert points(read_series([tmp_path]), "allocated") == [("first", GIB)]


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no file in this folder is called \*\.json or \*\.xml"):
        read_series([tmp_path])


def test_this_run_is_the_last_point(tmp_path: Path, measured: Make) -> None:
    (tmp_path / "a.json").write_text(json.text(run(measured(GIB), revision="first")))
    earlier = read_series([tmp_path])
    gone = Series("other", "x", "allocated", (Point("a", "", 1),))
    now = run(measured(2 * GIB), measured(GIB, name="new"), day=2, revision="second")
    series = series_of(now, [*earlier, gone])
    assert points(series, "allocated") == [("first", GIB), ("second", 2 * GIB)]
    assert points(series, "allocated", f"{NODEID}@new") == [("second", GIB)]
    assert gone in series
    assert series_of(now, series) == series  # its own file among the earlier ones


def test_the_table_tells_changes_and_draws_them(measured: Make) -> None:
    values = [100 * MIB, 90 * MIB, 120 * MIB]
    series = Series(NODEID, "x", "allocated", tuple(Point(str(n), "", value) for n, value in enumerate(values)))
    assert (series.since_previous, series.since_first) == (pytest.approx(1 / 3), pytest.approx(0.2))
    head, row, note = lines_of([series])
    assert row.split()[2:] == ["allocated", "3", "100.00", "MiB", "120.00", "MiB", "+33.33%", "+20.00%", "90.00", "MiB",
                               "120.00", "MiB", "\u2583\u2581\u2588"]  # fmt: skip
    assert head.split()[0] == "test"
    assert note == NOTE


def test_sparklines_show_the_latest_values() -> None:
    assert sparkline([5]) == "\u2581"
    assert sparkline(list(range(100))) == sparkline(list(range(80, 100)))
    assert sparkline([0, 0]) == "\u2581\u2581"


def test_the_page_draws_a_point_for_each_run_and_escapes_names() -> None:
    hostile = Series("<script>", "x", "allocated", (Point("<b>", "", 1), Point("b", "", 0), Point("c", "", 7)))
    page = pages.trend_page([hostile])
    assert page.count("<circle") == 3
    assert "<script>" not in page
    assert "<b>" not in page
    assert "http" not in page
