"""Virtual against real, and `mbmem compare`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Device, Failure, HostStep, Measurement, Metric, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report import html
from pytest_mbmem.report import json as json_report
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.terminal import measurement_lines, summary_lines
from pytest_mbmem.report.twins import peaks, phases, twin_lines

MIB = 2**20
REAL = Device("nvidia-l4-24gb", "NVIDIA L4", 24 * 2**30, virtual=False)
VIRTUAL = Device("virtual-l4-24gb", "NVIDIA L4", 24 * 2**30, virtual=True)
RECIPE: dict[str, Any] = {"model": {"hidden_size": 64}, "training": {"seq_length": 128}}


def rank(number: int, forward: int, optimizer: int, **fields: Any) -> RankMeasurement:
    """Peaks in MiB of two phases; PyTorch reserves 2 MiB more."""
    sizes: list[dict[Metric, int]] = [
        {"allocated": size * MIB, "reserved": (size + 2) * MIB} for size in (forward, optimizer)
    ]
    figures = (
        PhaseFigures(1, "forward", sizes[0], sizes[0]),
        PhaseFigures(2, "optimizer", sizes[1], sizes[1]),
    )
    return RankMeasurement(number, {"pp": number}, 1, figures, **fields)


def measurement(device: Device, *ranks: RankMeasurement, **fields: Any) -> Measurement:
    given: dict[str, Any] = {"recipe": RECIPE, "recipe_digest": "d1", "environment": {"torch": "2.14.1"}}
    return Measurement(device, ranks, world_size=2, **{**given, **fields})


def with_twin(**fields: Any) -> Measurement:
    """The virtual GPU has 4 MiB less at the peak of rank 0, 30 MiB more in its forward, and rank 1 to the byte."""
    twin = measurement(VIRTUAL, rank(0, 90, 96, outside={"CUDA context": 500 * MIB}), rank(1, 10, 20))
    real = measurement(REAL, rank(0, 60, 100, device_used=702 * MIB), rank(1, 10, 20))
    return replace(real, twin=twin, **fields)


def results(**measured: Measurement) -> Results:
    tests = {
        f"test_it.py::{name}": TestResult(f"test_it.py::{name}", measured=[Measured(name, None, m)])
        for name, m in measured.items()
    }
    return Results({}, tests)


def write(path: Path, data: Mapping[str, Any] | Results) -> Path:
    path.write_text(json.dumps(data.to_json() if isinstance(data, Results) else data), encoding="utf-8")
    return path


def test_a_difference_is_what_the_virtual_gpu_shows_too_much() -> None:
    real = with_twin()
    assert real.twin is not None
    assert [(d.rank, d.metric, d.phase, d.size) for d in peaks(real, real.twin)] == [
        (0, "allocated", "step-2/optimizer", -4 * MIB),
        (0, "reserved", "step-2/optimizer", -4 * MIB),
        (0, "device-used", "", (98 + 500 - 702) * MIB),
        (1, "allocated", "step-2/optimizer", 0),
        (1, "reserved", "step-2/optimizer", 0),
    ]
    assert {(d.rank, d.phase): d.size for d in phases(real, real.twin) if d.metric == "allocated"} == {
        (0, "step-1/forward"): 30 * MIB,
        (0, "step-2/optimizer"): -4 * MIB,
        (1, "step-1/forward"): 0,
        (1, "step-2/optimizer"): 0,
    }


def test_a_figure_of_nothing_has_no_share() -> None:
    (difference, *_) = peaks(measurement(REAL, rank(0, 0, 0)), measurement(VIRTUAL, rank(0, 0, 1)))
    assert difference.share is None
    assert difference.cells()[-2:] == ["+1.00 MiB", "-"]


def test_twin_lines_have_a_row_for_each_rank_and_metric_and_the_worst_differences() -> None:
    assert twin_lines(with_twin()) == [
        "virtual against real (virtual-l4-24gb):",
        "rank  metric       phase                   real     virtual   difference        %",
        "   0  allocated    step-2/optimizer  100.00 MiB   96.00 MiB    -4.00 MiB   -4.00%",
        "   0  reserved     step-2/optimizer  102.00 MiB   98.00 MiB    -4.00 MiB   -3.92%",
        "   0  device-used  -                 702.00 MiB  598.00 MiB  -104.00 MiB  -14.81%",
        "   1  allocated    step-2/optimizer   20.00 MiB   20.00 MiB         +0 B   +0.00%",
        "   1  reserved     step-2/optimizer   22.00 MiB   22.00 MiB         +0 B   +0.00%",
        "worst difference of a peak: device-used of rank 0: -14.81%, -104.00 MiB",
        "worst difference of a phase: allocated of rank 0 in step-1/forward: +50.00%, +30.00 MiB",
        "device-used of the virtual GPU: peak reserved, and the estimate of what is beside PyTorch",
    ]


def test_a_peak_in_another_phase_names_both() -> None:
    real = replace(measurement(REAL, rank(0, 60, 100)), twin=measurement(VIRTUAL, rank(0, 120, 100)))
    assert real.twin is not None
    assert peaks(real, real.twin)[0].phase == "step-2/optimizer, step-1/forward"


def test_the_twin_is_in_all_reports_of_a_measurement() -> None:
    one = with_twin()
    lines = twin_lines(one)
    shown = measurement_lines(one)
    assert shown[shown.index(lines[0]) : shown.index(lines[-1]) + 1] == lines
    page = html.page(results(test_a=one))
    assert "<h3>Virtual against real (virtual-l4-24gb)</h3>" in page
    assert "<td>-104.00 MiB<td>-14.81%" in page
    without = html.page(results(test_a=replace(one, twin=None)))
    assert "Virtual against real" not in without


def test_the_summary_has_the_worst_rank_of_each_test_and_the_worst_of_all() -> None:
    exact = with_twin()
    assert exact.twin is not None
    exact = replace(exact, ranks=exact.twin.ranks)
    text = "\n".join(summary_lines(results(test_a=with_twin(), test_b=exact), 120))
    section = text.partition("virtual against real:\n")[2].splitlines()
    assert [line.split()[:3] for line in section[1:6]] == [
        ["test_it.py::test_a", "0", "allocated"],
        ["test_it.py::test_a", "0", "reserved"],
        ["test_it.py::test_a", "0", "device-used"],
        ["test_it.py::test_b", "0", "allocated"],
        ["test_it.py::test_b", "0", "reserved"],
    ]
    assert section[6] == ("test_it.py::test_a: worst difference of a peak: device-used of rank 0: -14.81%, -104.00 MiB")
    assert section[7:] == ["device-used of the virtual GPU: peak reserved, and the estimate of what is beside PyTorch"]
    assert "virtual against real" not in "\n".join(summary_lines(results(test_a=replace(exact, twin=None)), 120))


OUT_OF_MEMORY = Failure("out of memory", 1, "CUDA out of memory.\nTried <b>", 2, "backward")


def test_a_twin_that_failed_says_why_and_no_cut_short_figures_are_compared() -> None:
    real = with_twin()
    assert real.twin is not None
    failed = replace(real, twin=replace(real.twin, failure=OUT_OF_MEMORY))
    expected = [
        "the virtual GPU failed: out of memory on rank 1 in step-2/backward: CUDA out of memory.",
        "the real GPU ran through, with a peak of 100.00 MiB allocated",
    ]
    assert twin_lines(failed)[1:] == expected
    summary = summary_lines(results(test_a=failed), 120)
    assert summary[-2:] == [f"test_it.py::test_a: {line}" for line in expected]


def test_a_real_failure_with_a_twin_that_passed_is_said() -> None:
    failure = Failure("error", 1, "Traceback (most recent call last):\n  ...\nNcclError: oh no")
    assert twin_lines(with_twin(failure=failure))[1:] == [
        "the real GPU failed: error on rank 1: NcclError: oh no",
        "the virtual GPU ran through, with a peak of 96.00 MiB allocated",
    ]


def test_where_both_failed_both_are_said() -> None:
    real = with_twin(failure=replace(OUT_OF_MEMORY, rank=0))
    assert real.twin is not None
    lines = twin_lines(replace(real, twin=replace(real.twin, failure=OUT_OF_MEMORY)))
    assert [line.partition(":")[0] for line in lines[1:]] == ["the real GPU failed", "the virtual GPU failed"]


def test_a_setting_without_effect_ran_and_is_compared() -> None:
    lines = twin_lines(with_twin(failure=Failure("no effect", 0, "recompute changes nothing")))
    assert any(line.startswith("worst difference of a peak") for line in lines)
    assert "the real GPU failed: no effect on rank 0: recompute changes nothing" in lines


def test_ranks_and_phases_that_one_side_lacks_are_named() -> None:
    more = replace(rank(0, 60, 100), phases=(*rank(0, 60, 100).phases, replace(rank(0, 1, 1).phases[0], step=3)))
    real = measurement(REAL, more, rank(2, 1, 1), rank(3, 1, 1))
    lines = twin_lines(replace(real, twin=measurement(VIRTUAL, rank(0, 60, 100), rank(1, 1, 1))))
    assert lines[-3:] == [
        "only the real GPU has ranks 2, 3",
        "only the virtual GPU has rank 1",
        "only the real GPU has steady/forward of step 3",
    ]


def test_html_escapes_what_a_twin_says() -> None:
    device = replace(VIRTUAL, key="<i>key")
    failure = Failure("error", 0, "<script>alert(1)</script>")
    page = html.page(results(test_a=replace(with_twin(), twin=measurement(device, failure=failure))))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<i>key" not in page


# mbmem compare --------------------------------------------------------------------------------------------------------


def compared(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main(["compare", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_compare_shows_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = with_twin()
    assert real.twin is not None
    one = write(tmp_path / "real.json", results(test_a=real, test_gone=real))
    other = write(tmp_path / "virtual.json", results(test_a=real.twin, test_new=real.twin))
    lines = compared(capsys, one, other)
    assert lines[:3] == [
        f"A: {one}: nvidia-l4-24gb, NVIDIA L4 (real)",
        f"B: {other}: virtual-l4-24gb, NVIDIA L4 (virtual)",
        "",
    ]
    assert [" ".join(line.split()) for line in lines[3:5]] == [
        "measurement rank metric phase A B difference %",
        "test_it.py::test_a 0 allocated step-2/optimizer 100.00 MiB 96.00 MiB -4.00 MiB -4.00%",
    ]
    assert lines[9:] == [
        "test_it.py::test_a: device-used of B: peak reserved, and the estimate of what is beside PyTorch",
        "only A has test_it.py::test_gone",
        "only B has test_it.py::test_new",
    ]
    assert "step-1/forward" not in "\n".join(lines)
    every = compared(capsys, "--phases", one, other)
    assert any("step-1/forward" in line and "+50.00%" in line for line in every)
    assert [line.split()[1:3] for line in every[4:13]] == [
        *[["0", "allocated"], ["0", "reserved"]] * 2,
        ["0", "device-used"],
        *[["1", "allocated"], ["1", "reserved"]] * 2,
    ]


def test_compare_of_what_the_launcher_measured(
    launcher: Launcher, small_recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = small_recipe.but(seq_length=256)
    files = [
        write(tmp_path / f"{recipe.training.seq_length}.json", launcher.measure(recipe, count_flops=False).to_json())
        for recipe in (small_recipe, longer)
    ]
    lines = compared(capsys, *files)
    assert lines[0].endswith("(virtual)")
    assert any(line.endswith(": the recipe differs: training.seq_length: 128 -> 256") for line in lines)
    (allocated,) = [line for line in lines if " allocated " in line]
    assert " +" in allocated
    assert any("+0.00%" in line for line in compared(capsys, files[0], files[0]))


@pytest.mark.parametrize("swapped", [False, True])
def test_a_single_measurement_finds_the_tests_of_its_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], swapped: bool
) -> None:
    single = write(tmp_path / "one.json", measurement(VIRTUAL, rank(0, 60, 110)).to_json())
    other = measurement(REAL, rank(0, 1, 1), recipe_digest="other")
    tests = write(tmp_path / "tests.json", results(test_a=measurement(REAL, rank(0, 60, 100)), test_b=other))
    lines = compared(capsys, *((tests, single) if swapped else (single, tests)))
    sizes = ["100.00", "MiB", "110.00", "MiB", "+10.00", "MiB"] if swapped else ["110.00", "MiB", "100.00", "MiB"]
    (line,) = [line.split() for line in lines if "allocated" in line]
    assert line[0] == "test_it.py::test_a"
    assert line[4 : 4 + len(sizes)] == sizes
    assert not [line for line in lines if line.startswith("only")]


def test_compare_names_what_else_differs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = RECIPE | {"training": {"seq_length": 256}}
    one = measurement(REAL, rank(0, 1, 1), mode="joint", environment={"torch": "2.14.1", "nccl": "2.27"})
    other = measurement(VIRTUAL, rank(0, 1, 1), recipe=changed, recipe_digest="d2", environment={"torch": "2.13.0"})
    files = [
        write(tmp_path / f"{name}.json", results(test_a=m, test_b=m)) for name, m in (("one", one), ("other", other))
    ]
    lines = compared(capsys, *files)
    assert lines[-3:] == [
        "test_it.py::test_a and 1 more: the recipe differs: training.seq_length: 128 -> 256",
        "test_it.py::test_a and 1 more: A has joint ranks, B solo ones",
        "test_it.py::test_a and 1 more: the environment differs: torch 2.14.1 -> 2.13.0, nccl 2.27 -> (not recorded)",
    ]


@pytest.mark.parametrize(
    ("one", "other", "note"),
    [
        pytest.param({"recipe": None, "recipe_digest": None}, {}, "only B has a recipe", id="no recipe"),
        pytest.param(
            {"recipe_digest": "d0"},
            {},
            "the recipe is written alike, but means something else: a default of it differs",
            id="default",
        ),
        pytest.param(
            {"failure": OUT_OF_MEMORY},
            {},
            "A failed: out of memory on rank 1 in step-2/backward, so there is nothing to compare",
            id="failed",
        ),
        pytest.param(
            {}, {"steps": (HostStep(1.0, 1.0, False),)}, "B ran on the host, where memory is not measured", id="host"
        ),
    ],
)
def test_compare_says_why_there_are_no_figures_or_other_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], one: dict[str, Any], other: dict[str, Any], note: str
) -> None:
    ranks = () if "steps" in other else (rank(0, 1, 1),)
    files = [
        write(tmp_path / "one.json", results(test_a=measurement(REAL, rank(0, 1, 1), **one))),
        write(tmp_path / "other.json", results(test_a=measurement(VIRTUAL, *ranks, **other))),
    ]
    lines = compared(capsys, *files)
    assert f"test_it.py::test_a: {note}" in lines
    assert any(" allocated " in line for line in lines) == ("failure" not in one and "steps" not in other)


def test_measurements_of_a_test_with_equal_names_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = results(test_a=measurement(REAL, rank(0, 1, 1)))
    several.tests["test_it.py::test_a"].measured.append(Measured("test_a", None, measurement(REAL, rank(0, 5, 5))))
    file = write(tmp_path / "one.json", several)
    lines = [line for line in compared(capsys, file, file) if " allocated " in line]
    assert ["test_it.py::test_a 2" in line for line in lines] == [False, True]
    assert ["5.00 MiB" in line for line in lines] == [False, True]


def no_file(folder: Path) -> Path:
    return folder / "gone.json"


def damaged(folder: Path) -> Path:
    path = folder / "damaged.json"
    path.write_text('{"tests": ', encoding="utf-8")
    return path


def other_json(folder: Path) -> Path:
    return write(folder / "other.json", {"coverage": 1, "files": 2})


def a_list(folder: Path) -> Path:
    path = folder / "list.json"
    path.write_text("[1, 2]", encoding="utf-8")
    return path


def other_schema(folder: Path) -> Path:
    return write(folder / "old.json", measurement(REAL, rank(0, 1, 1)).to_json() | {"schema": 0})


def damaged_test(folder: Path) -> Path:
    data = results(test_a=measurement(REAL, rank(0, 1, 1))).to_json()
    data["tests"][0]["measurements"][0]["measurement"]["ranks"][0]["rank"] = "zero"
    return write(folder / "damaged-test.json", data)


def other_tests(folder: Path) -> Path:
    return write(folder / "tests.json", results(test_z=measurement(REAL, rank(0, 1, 1))))


def no_tests(folder: Path) -> Path:
    return write(folder / "none.json", Results())


def other_recipe(folder: Path) -> Path:
    return write(folder / "single.json", measurement(REAL, rank(0, 1, 1), recipe_digest="d9").to_json())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_file, "{path}: cannot be read (No such file or directory)"),
        (damaged, "{path}: cannot be read as JSON (Expecting value: line 1 column 11 (char 10))"),
        (other_json, "{path}: neither what `mbmem measure --json` writes nor what `pytest --mbmem-json` writes "),
        (
            a_list,
            "{path}: neither what `mbmem measure --json` writes nor what `pytest --mbmem-json` writes (found l",
        ),
        (other_schema, "{path}: not a measurement of schema 1 (found 0)"),
        (damaged_test, "{path}: test_it.py::test_a.ranks[0].rank: 'zero' is not a whole number"),
        (no_tests, "{path}: no test measured anything, so there is nothing to compare"),
        (
            other_tests,
            "{first} and {path} have nothing in common: no test measured something in both; A has test_it.py::test_a, "
            "test_it.py::test_b, B has test_it.py::test_z",
        ),
        (other_recipe, "{first} and {path} have nothing in common: no test measured recipe d9"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    good = measurement(REAL, rank(0, 1, 1))
    first, path = write(tmp_path / "good.json", results(test_a=good, test_b=good)), make(tmp_path)
    assert main(["compare", str(first), str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"mbmem: error: {message.format(path=path, first=first)}")


def test_a_name_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = replace(REAL, name="L4\x1b[2J")
    file = write(tmp_path / "one.json", measurement(device, rank(0, 1, 1)).to_json())
    assert "\x1b" not in "\n".join(compared(capsys, file, file))


def test_a_file_with_results_is_read_as_the_reports_read_it(tmp_path: Path) -> None:
    one = results(test_a=with_twin())
    path = tmp_path / "results.json"
    path.write_text(json_report.text(one), encoding="utf-8")
    assert json_report.load(path) == one
