"""Improvements to record, the history of a baseline, and what is said of loose rules. With known-bad figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_mbmem.baseline_file import Entry, Figure, dump, parse
from pytest_mbmem.baselines import Baselines, Record, apply_updates
from pytest_mbmem.drift import Accepted, history_of
from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.measurement import PhaseFigures
from pytest_mbmem.report.ratchet import drift_text, history_lines, improvement_lines, improvements
from pytest_mbmem.report.results import Judged, Measured, Results
from pytest_mbmem.report.terminal import failure_text
from pytest_mbmem.throughput import ThroughputGate
from pytest_mbmem.throughput import judge as judge_steps
from pytest_mbmem.units import format_bytes

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]


# History in the file --------------------------------------------------------------------------------------------------


def record(measured: Measured) -> Record:
    return Record.of("test_x.py", "test_a", PeakGate(), measured.measurement)


def stored(folder: Path) -> Figure:
    entry = Baselines(folder, "virtual-h100-80gb").get("test_x.py", "test_a")
    assert entry is not None
    return entry.figures["allocated"]


def test_ten_times_three_percent_are_all_in_the_file_with_their_reasons(tmp_path: Path, measured: Make) -> None:
    peak = GIB
    apply_updates(tmp_path, [record(measured(peak))], "new")
    peaks = [peak]
    for number in range(10):
        peak = peak * 103 // 100
        peaks.append(peak)
        apply_updates(tmp_path, [record(measured(peak))], "changed", f"feature {number}: \N{SNOWMAN}")
    figure = stored(tmp_path)
    reasons = [None, *(f"feature {number}: \N{SNOWMAN}" for number in range(10))]
    found = history_of(figure)
    assert [(one.update, one.value, one.reason) for one in found] == list(zip(range(11), peaks, reasons, strict=True))
    assert (figure.first, figure.updates) == (GIB, 10)
    text = "\n".join(history_lines(found, peak * 103 // 100, format_bytes))
    assert text.startswith("the baseline's history, +38.42% since the first:")
    assert text.count("+3.00%") == 10  # one is not shown, and what is measured now is
    assert "1 more" in text
    assert "feature 9: " in text


def test_an_equal_peak_and_another_recipe_do_not_lengthen_the_history(tmp_path: Path, measured: Make) -> None:
    for peak, reason in ((GIB, None), (2 * GIB, "why"), (2 * GIB, "again")):
        apply_updates(tmp_path, [record(measured(peak))], "all", reason)
    assert history_of(stored(tmp_path)) == (Accepted(0, GIB), Accepted(1, 2 * GIB, "why"))
    apply_updates(tmp_path, [record(measured(3 * GIB, recipe_digest="another"))], "all")
    assert history_of(stored(tmp_path)) == (Accepted(0, 3 * GIB),)


def test_a_file_of_an_older_version_keeps_what_it_knows(tmp_path: Path, measured: Make) -> None:
    old = Figure(2 * GIB, 0, "step-2/backward", {0: 2 * GIB}, first=GIB, updates=3, reason="last")
    assert history_of(old) == (Accepted(0, GIB), Accepted(3, 2 * GIB, "last"))
    path = tmp_path / "virtual-h100-80gb" / "test_x.yaml"
    path.parent.mkdir()
    path.write_text(dump(replace(parse("format: 1\nenvironments: {}\ntests: {}\n", path), entries=entry(old))))
    assert "earlier" not in path.read_text()
    apply_updates(tmp_path, [record(measured(3 * GIB))], "all", "now")
    found = history_of(stored(tmp_path))
    assert found == (Accepted(0, GIB), Accepted(3, 2 * GIB, "last"), Accepted(4, 3 * GIB, "now"))
    assert [line.split() for line in history_lines(found, 3 * GIB, format_bytes)[2:4]] == [
        ["2.00", "GiB", "after", "values", "that", "were", "not", "kept:", "last"],
        ["3.00", "GiB", "+50.00%", "now"],
    ]


def entry(figure: Figure) -> dict[str, Entry]:
    return {"test_a": Entry("now", {"model": {"hidden_size": 64}}, {"allocated": figure})}


CHANGED = Figure(
    3 * GIB, 0, "build", {0: 3 * GIB}, GIB, 2, {"torch": "2"}, "c", (Accepted(0, GIB), Accepted(1, 2 * GIB, "b"))
)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("0: [1073741824", "0: [5", "the value before all changes is 5; allowed: first, 1073741824"),
        ("1: [2147483648", "2: [2147483648", "earlier: '2'; allowed: whole numbers below updates, 2, in their order"),
        ("0: [1073741824", "-1: [1073741824", "earlier: '-1'; allowed: whole numbers below updates, 2"),
        ('[2147483648, "b"]', "[2147483648]", "1 is a list; allowed: a list of 2"),
        ('[2147483648, "b"]', '[0, "b"]', "1 is '0'; allowed: a whole number, 1 or more"),
        ('[2147483648, "b"]', "[2147483648, 5]", "1 is '5'; allowed: a text"),
    ],
)
def test_a_damaged_history_is_refused_with_its_line(before: str, after: str, message: str) -> None:
    text = dump(replace(parse("format: 1\nenvironments: {}\ntests: {}\n", Path("b.yaml")), entries=entry(CHANGED)))
    assert parse(text, Path("b.yaml")).entries["test_a"].figures["allocated"] == CHANGED
    assert yaml.safe_load(text)["tests"]["test_a"]["metrics"]["allocated"]["earlier"] == {
        0: [GIB, None],
        1: [2 * GIB, "b"],
    }
    assert text.count(before) == 1
    with pytest.raises(UserError) as caught:
        parse(text.replace(before, after), Path("b.yaml"))
    assert str(caught.value).startswith("b.yaml:")
    assert message in str(caught.value)


# History in reports ---------------------------------------------------------------------------------------------------


def judged_by(measured: Measured, figure: Figure, gate: PeakGate | None = None) -> Measured:
    gate = gate or PeakGate()
    measured.judged = [Judged(judge(gate, measured.measurement, entry(figure)["test_a"], measured.key))]
    return measured


def test_a_regression_shows_every_accepted_peak_and_why(measured: Make) -> None:
    one = judged_by(measured(6 * GIB), CHANGED)
    text = failure_text("t.py::test_a", one, one.judged[0].judgement, None)
    assert (
        "the baseline's history, +500.00% since the first:\n"
        "    1.00 GiB            the first\n"
        "    2.00 GiB  +100.00%  b\n"
        "    3.00 GiB   +50.00%  c\n"
        "    6.00 GiB  +100.00%  measured now\n"
    ) in text


def test_a_hostile_reason_cannot_steer_the_terminal() -> None:
    lines = history_lines((Accepted(0, GIB, "\x1b[2J\nx"),), GIB, format_bytes)
    assert all(line.isprintable() for line in lines)


def test_a_baseline_that_was_never_changed_has_no_history() -> None:
    assert history_lines((Accepted(0, GIB),), 2 * GIB, format_bytes) == []
    assert drift_text((Accepted(0, GIB),), 2 * GIB, format_bytes) == ""
    assert history_lines((), 0, format_bytes) == []


def test_history_is_in_the_json_file_and_comes_back(measured: Make, results: MakeResults) -> None:
    made = results({"t.py::test_a": [judged_by(measured(6 * GIB), CHANGED)]})
    data = made.to_json()
    (judgement,) = data["tests"][0]["measurements"][0]["judgements"]
    assert judgement["history"][1] == {"update": 1, "value": 2 * GIB, "reason": "b"}
    again = Results.from_json(data, "x")
    assert again.tests["t.py::test_a"].measured[0].judged[0].judgement.history == history_of(CHANGED)
    del judgement["history"]  # a file of an older version
    assert Results.from_json(data, "x").tests["t.py::test_a"].measured[0].judged[0].judgement.history == ()


# Improvements ---------------------------------------------------------------------------------------------------------


def test_an_improvement_says_how_much_since_when_and_why(measured: Make, results: MakeResults) -> None:
    (found,) = improvements(results({"t.py::test_a": [judged_by(measured(GIB // 2), CHANGED)]}))
    assert str(found) == (
        't.py::test_a: 3.00 GiB -> 512.00 MiB (-83.33%); -50.00% since the first 1.00 GiB, changed 2 times ("b", "c")'
    )


def test_only_what_is_better_passed_and_is_not_recorded_is_listed(measured: Make, results: MakeResults) -> None:
    def made(peak: int, accepted: bool = False) -> list[Measured]:
        return [measured(peak, gate=PeakGate(), baseline=GIB, accepted=accepted)]

    tests = {"better": made(GIB // 2), "recorded": made(GIB // 2, accepted=True), "within": made(GIB - MIB)}
    tests |= {"worse": made(2 * GIB), "failed": made(GIB // 2)}
    of_run = results(tests)
    of_run.tests["failed"].outcome = "failed"
    assert [found.test for found in improvements(of_run)] == ["better"]
    assert improvement_lines([], "pytest") == []


def test_a_faster_step_is_an_improvement_too(measured: Make, results: MakeResults) -> None:
    one = measured(GIB)
    figures = {name: Figure(value, 0, "", {}, value) for name, value in (("counted-flops", 10**13), ("moved-bytes", 0))}
    figures["collective-bytes"] = replace(figures["moved-bytes"], value=3 * MIB, first=3 * MIB)
    judgements = judge_steps(ThroughputGate(), one.measurement, Entry("now", None, figures), "test_a")
    one.throughputs = [Judged(judgement) for judgement in judgements]
    (found,) = improvements(results({"t.py::test_a": [one]}))
    assert str(found) == "t.py::test_a counted-flops: 10.00 TFLOP -> 5.00 TFLOP (-50.00%)"


MANY = """
    import pytest

    @pytest.mark.peak_memory
    @pytest.mark.parametrize("n", range({count}))
    def test_a(mbmem, n): mbmem.measure("../recipe.yaml")
"""


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(2, "'tests/test_it.py::test_a[0]' 'tests/test_it.py::test_a[1]'"), (6, "tests/test_it.py")],
)
def test_the_command_records_the_improvements(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, count: int, chosen: str
) -> None:
    project.mkdir("tests").joinpath("test_it.py").write_text(MANY.replace("\n    ", "\n").format(count=count))
    project.runpytest("--mbmem-baselines=b", "--mbmem-update=new").assert_outcomes(passed=count)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "-32")
    result = project.runpytest("--mbmem-baselines=b")
    result.stdout.fnmatch_lines([f"{count} improvements are not in the baselines yet, *"])
    command = f"  pytest {chosen} --mbmem-baselines=b --mbmem-update=changed"
    assert command in result.outlines
    again = project.runpytest(*command.replace("'", "").split()[1:])
    again.assert_outcomes(passed=count)
    again.stdout.no_fnmatch_line("*not in the baselines*")
    project.runpytest("--mbmem-baselines=b").stdout.no_fnmatch_line("*not in the baselines*")


def test_the_command_is_for_the_folder_that_pytest_was_called_in(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.mkdir("tests").joinpath("test_it.py").write_text(MANY.replace("\n    ", "\n").format(count=1))
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "-32")
    monkeypatch.chdir(project.path / "tests")
    assert "  pytest '../tests/test_it.py::test_a[0]' --mbmem-update=changed" in project.runpytest().outlines


# Known-bad figures ----------------------------------------------------------------------------------------------------


def steps(worst: Mapping[int, int]) -> tuple[PhaseFigures, ...]:
    """Twenty steps that peak at 1 GiB in backward, or as `worst` says."""

    def of_phase(step: int, phase: Any, peak: int) -> PhaseFigures:
        figures: dict[Any, int] = {"allocated": peak, "reserved": peak}
        return PhaseFigures(step, phase, figures, figures)

    return tuple(
        of_phase(step, phase, peak)
        for step in range(1, 21)
        for phase, peak in (("forward", GIB // 2), ("backward", worst.get(step, GIB)))
    )


def of_steps(measured: Make, worst: Mapping[int, int], **fields: Any) -> Measured:
    one = measured(GIB, **fields)
    (rank,) = one.measurement.ranks
    one.measurement = replace(one.measurement, ranks=(replace(rank, phases=steps(worst)),))
    return one


BASE = Figure(GIB, 0, "step-1/backward", {0: GIB}, GIB, environment={"torch": "2.14.1"})
MORE = GIB * 14 // 10


@pytest.mark.parametrize("step", [1, 2, 3, 11, 20])
def test_one_step_of_twenty_with_two_fifths_more_memory_fails(measured: Make, step: int) -> None:
    verdicts = [judged_by(of_steps(measured, worst), BASE).judged[0].judgement for worst in ({}, {step: MORE})]
    assert [judgement.verdict for judgement in verdicts] == ["pass", "regression"]
    assert verdicts[1].phase == f"{'step-1' if step == 1 else 'step-2' if step == 2 else 'steady'}/backward"


def test_two_fifths_more_in_every_step_fail_where_time_or_counts_are_gated(measured: Make) -> None:
    one = measured(GIB)
    flops = one.measurement.flops_per_step
    assert flops is not None
    base = {"counted-flops": Figure(flops * 10 // 14, 0, "", {}, flops * 10 // 14)}
    (first, *_) = judge_steps(ThroughputGate(), one.measurement, Entry("now", None, base), "test_a")
    assert first.verdict == "regression"


@pytest.mark.parametrize("tolerance", [0.05, 0.51])
def test_a_tolerance_that_lets_anything_pass_is_named(measured: Make, tolerance: float) -> None:
    one = measured(GIB)
    base = {"counted-flops": Figure(5 * 10**12, 0, "", {}, 5 * 10**12)}
    (first, *_) = judge_steps(ThroughputGate(tolerance=tolerance), one.measurement, Entry("now", None, base), "a")
    said = [note for note in first.notes if "hardly tests anything" in note]
    assert said == (
        [
            "tolerance and spread allow 2.55 TFLOP on top of 5.00 TFLOP: the gate hardly tests anything; give it a "
            "smaller tolerance"
        ]
        if tolerance > 0.5
        else []
    )


SAVING = """
    import pytest

    RECIPE = {{"model": {{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}},
              "training": {{"seq_length": 64}},
              "memory": {{"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}}}}

    @pytest.mark.memory_saving({{"recompute_granularity": None, "recompute_modules": None}}, at_least="{at_least}")
    def test_a(mbmem): mbmem.measure(RECIPE)
"""


@pytest.mark.parametrize(
    ("at_least", "said"),
    [
        ("16 MiB", None),
        ("8 MiB", None),  # half of what is saved
        ("7 MiB", "at_least is loose: 16.00 MiB is saved, 2.3 times the 7.00 MiB that is asked for, *"),
        ("5%", "at_least is loose: 16.00 MiB is saved, 5.0 times the 3.20 MiB that is asked for, *"),
        ("512 KiB", "at_least is no more than 1.00 MiB, which another order of allocations alone *"),
    ],
)
def test_a_saving_that_asks_for_little_of_what_is_saved_is_named(
    project: pytest.Pytester, at_least: str, said: str | None
) -> None:
    project.makepyfile(SAVING.format(at_least=at_least))
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    if said is None:
        result.stdout.no_fnmatch_line("*at_least is*")
    else:
        result.stdout.fnmatch_lines([f"note: test_it.py::test_a: {said}"])
