"""What a person reads when a test fails, and below all tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_mbmem.baselines import Change, Orphan
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report.results import Measured, Results
from pytest_mbmem.report.rows import format_flops
from pytest_mbmem.report.terminal import (
    changes_lines,
    failure_text,
    measurement_lines,
    orphan_lines,
    summary_lines,
)

MIB, GIB = 2**20, 2**30
NODEID = "tests/test_memory.py::test_llama"
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]


def text_of(measured: Measured, to_paste: str | None = None, nodeid: str = NODEID) -> str:
    return failure_text(nodeid, measured, measured.judged[0].judgement, to_paste)


def squeezed(line: str) -> str:
    return " ".join(line.split())


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_regression_begins_with_the_verdict_and_shows_the_figures_it_follows_from(measured: Make) -> None:
    gate = PeakGate(tolerance=0.01, slack=MIB)
    lines = text_of(measured(GIB, 1200 * MIB, gate=gate, baseline=1000 * MIB)).splitlines()
    assert lines == [
        "REGRESSION: peak allocated is 189.00 MiB over what the baseline allows",
        "",
        "  measured       1.17 GiB (1258291200 bytes)",
        "  baseline    1000.00 MiB (1048576000 bytes)",
        "  allowed     1011.00 MiB (1060110336 bytes): tolerance 1.00%, slack 1.00 MiB",
        "  change      +20.00%, +200.00 MiB",
        "  worst rank  1 (tp=0 pp=1), stands for 4 ranks of 8",
        "  phase       step-2/backward",
        "  device      virtual-h100-80gb, capacity 80.00 GiB",
        "",
        "If it is worth the memory, accept it and say why:",
        f'  pytest {NODEID} --mbmem-update=changed --mbmem-reason "..."',
    ]


def test_a_regression_against_a_limit_offers_no_update(measured: Make) -> None:
    text = text_of(measured(2 * GIB, gate=PeakGate(limit=GIB)))
    assert text.startswith("REGRESSION: peak allocated is 1.00 GiB over the limit\n")
    assert "  limit " in text
    assert "allowed" not in text
    assert "--mbmem-update" not in text


def test_a_missing_baseline_shows_what_to_run_and_what_to_paste(measured: Make) -> None:
    text = text_of(measured(GIB, gate=PeakGate()), to_paste="baselines/x.yaml, after line 3:\n  test_llama:\n")
    assert text.startswith("MISSING: peak allocated has no baseline on virtual-h100-80gb\n")
    assert f"  pytest {NODEID} --mbmem-update=new\n" in text
    assert text.endswith("or paste into baselines/x.yaml, after line 3:\n  test_llama:")


def test_a_stale_baseline_names_every_key_that_differs(measured: Make) -> None:
    old = {"model": {"hidden_size": 128}, "training": {"steps": 2}}
    text = text_of(measured(GIB, gate=PeakGate(), baseline=2 * GIB, old_recipe=old))
    assert text.startswith("STALE: the baseline of peak allocated is of another recipe\n")
    assert "      model.hidden_size: 128 -> 64\n      training.steps: 2 -> (not set)\n" in text
    assert "(of the other recipe)" in text
    assert f"  pytest {NODEID} --mbmem-update=changed" in text
    assert "--mbmem-reason" not in text


def test_out_of_memory_shows_pytorchs_message(failed: Make) -> None:
    message = "CUDA out of memory. Tried to allocate 3.00 GiB."
    text = text_of(failed("out of memory", message))
    assert text.startswith("OUT OF MEMORY: the recipe does not fit NVIDIA H100 80GB HBM3\n")
    assert "  rank      0 (tp=0 pp=0), stands for 4 ranks of 8\n  phase     step-1/forward\n" in text
    assert text.endswith(f"\n\n  {message}")


def test_an_invalid_measurement_shows_the_begin_and_the_end_of_the_workers_message(failed: Make) -> None:
    message = "\n".join(["Traceback:", *(f"line {n}" for n in range(100)), "ValueError: wrong"])
    text = text_of(failed("error", message))
    assert text.startswith("INVALID: peak allocated could not be measured\n")
    assert "  Traceback:\n" in text
    assert text.endswith("  ValueError: wrong")
    assert "... 82 lines left out ..." in text
    assert len(text.splitlines()) < 30


def test_a_peak_of_zero_says_why_it_is_invalid(measured: Make) -> None:
    text = text_of(measured(-MIB, gate=PeakGate(phase="backward"), baseline=GIB))
    assert "  - the peak is negative (-1048576 bytes)" in text


def test_the_metric_the_phase_and_the_name_of_the_measurement_are_in_the_verdict(measured: Make) -> None:
    gate = PeakGate(metric="reserved", phase="backward")
    assert text_of(measured(GIB, gate=gate, baseline=MIB, name="control")).startswith(
        "REGRESSION: peak reserved in backward of 'control' is "
    )


def test_a_note_is_a_bullet(measured: Make) -> None:
    gate = PeakGate(tolerance=0.0, slack=MIB)
    assert "  - tolerance and slack allow 1.00 MiB on top of " in text_of(measured(9 * MIB, gate=gate, baseline=MIB))


def test_the_command_can_be_pasted_whatever_the_tests_parameters(measured: Make) -> None:
    text = text_of(measured(GIB, gate=PeakGate()), nodeid="t.py::test_x[it's 1]@group")
    assert """pytest 't.py::test_x[it'"'"'s 1]' --mbmem-update=new""" in text


# The summary ----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_verdict(measured: Make, results: MakeResults) -> None:
    one = measured(GIB, gate=PeakGate(), baseline=GIB)
    one.judged += measured(GIB, gate=PeakGate(limit=2 * GIB, metric="reserved")).judged
    lines = summary_lines(results({"t.py::test_a": [one], "t.py::test_b": [measured(MIB, 2 * GIB)]}), 120)
    assert [squeezed(line) for line in lines] == [
        "test device baseline measured change rank phase verdict",
        "t.py::test_a virtual-h100-80gb 1.00 GiB 1.00 GiB +0.00% 0 step-2/backward pass",
        "t.py::test_a reserved virtual-h100-80gb <= 2.00 GiB 1.00 GiB - 0 step-2/backward pass",
        "t.py::test_b virtual-h100-80gb - 2.00 GiB - 1 step-2/backward -",
    ]


@pytest.mark.parametrize("width", [40, 80, 100, 120, 200])
@pytest.mark.parametrize("length", [8, 40, 300])
def test_the_table_fits_and_keeps_the_end_of_each_test(
    measured: Make, results: MakeResults, width: int, length: int
) -> None:
    rows = {f"{'x' * length}::test_{n}": [measured(1000 * MIB, gate=PeakGate(), baseline=n * GIB)] for n in (1, 2)}
    lines = [line for line in summary_lines(results(rows), width) if not line.startswith("note: ")]
    assert max(map(len, lines)) <= max(width, 80)
    assert all(f"::test_{n} " in line for n, line in enumerate(lines[1:3], 1))
    assert "virtual-h100-80gb" in "\n".join(lines)
    assert ("..." in lines[1]) == (f"{'x' * length}::test_1 " not in lines[1])


def test_columns_stand_below_each_other(measured: Make, results: MakeResults) -> None:
    tests = {f"t.py::test_{'x' * n}": [measured(n * MIB, gate=PeakGate(limit=GIB))] for n in (1, 7, 100)}
    lines = summary_lines(results(tests), 120)
    assert len({line.index("virtual-") for line in lines[1:]}) == 1
    assert len({line.index(" MiB") for line in lines[1:]}) == 1
    assert len({line.rindex("pass") for line in lines[1:]} | {lines[0].rindex("verdict")}) == 1


def test_what_an_update_accepts_is_not_shown_as_a_failure(measured: Make, results: MakeResults) -> None:
    accepted = measured(2 * GIB, gate=PeakGate(), baseline=GIB, accepted=True)
    assert summary_lines(results({"t.py::a": [accepted]}), 120)[1].endswith(" accepted")


def test_a_failure_without_a_gate_is_in_the_table(failed: Make, results: MakeResults) -> None:
    measured = failed("out of memory", "no room")
    measured.judged.clear()
    assert "  out of memory " in summary_lines(results({"t.py::a": [measured]}), 120)[1]


def test_notes_of_tests_that_pass_stand_below_the_table_once(measured: Make, results: MakeResults) -> None:
    loose = {f"t.py::test_{n}": [measured(MIB, gate=PeakGate(), baseline=4 * MIB)] for n in range(3)}
    lines = summary_lines(results(loose), 120)
    assert [line for line in lines if line.startswith("note: ")] == [
        "note: t.py::test_0 and 2 more: the baseline is loose: it is 4.0 times what was measured and would hide a "
        "regression of that size; refresh it"
    ]


def test_without_measurements_there_is_no_table(results: MakeResults) -> None:
    assert summary_lines(results({"t.py::test_skipped": []}), 120) == []


def test_a_damaged_name_cannot_steer_the_terminal(measured: Make, results: MakeResults) -> None:
    assert all(line.isprintable() for line in summary_lines(results({"t.py::\x1b[2J\n": [measured(GIB)]}), 120))


def test_written_baselines_are_listed_by_file() -> None:
    path = Path("baselines/gpu/test_x.yaml")
    changes = [
        Change(path, "test_a", "allocated", "new", None, GIB),
        Change(path, "test_b", "reserved", "regression", GIB, 2 * GIB),
    ]
    assert changes_lines(changes) == [
        f"baselines written: {path}",
        "  test_a: new, 1.00 GiB",
        "  test_b reserved: regression, 1.00 GiB -> 2.00 GiB",
    ]
    assert changes_lines([]) == []


def test_an_orphan_is_named_with_its_place() -> None:
    assert orphan_lines([Orphan(Path("b/test_x.yaml"), 7, "test_gone")])[1:] == ["  b/test_x.yaml:7: test_gone"]
    assert orphan_lines([]) == []


# A single measurement -------------------------------------------------------------------------------------------------


def test_a_measurement_is_shown_by_rank_and_by_phase_of_the_worst(measured: Make) -> None:
    lines = measurement_lines(measured(GIB, 2 * GIB).measurement)
    rows = [squeezed(line) for line in lines]
    assert "1 tp=0 pp=1 4 2.00 GiB 2.00 GiB step-2/backward 5.00 TFLOP" in rows
    phases = rows[lines.index("phases of rank 1:") + 2 :]
    assert phases[:2] == ["0 build 1.00 MiB 1.00 MiB 2.00 MiB", "2 backward 2.00 GiB 2.00 GiB 2.00 GiB"]
    assert "collectives in a step by group: tp 3.00 MiB" in lines


def test_a_failed_measurement_ends_with_its_failure(failed: Make) -> None:
    lines = measurement_lines(failed("timeout", "no result within 1 s").measurement)
    assert lines[-2:] == ["FAILED: timeout on rank 0 in step-1/forward", "  no result within 1 s"]


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (None, "-"),
        (0, "0.00 FLOP"),
        (999_999, "1.00 MFLOP"),
        (201_326_592, "201.33 MFLOP"),
        (5 * 10**21, "5000.00 EFLOP"),
    ],
)
def test_flops_are_written_in_the_largest_unit_they_fill(flops: int | None, text: str) -> None:
    assert format_flops(flops) == text


def test_notes_and_traffic_of_a_measurement_without_a_gate_are_shown(measured: Make, results: MakeResults) -> None:
    one = measured(GIB, GIB)
    first, second = one.measurement.ranks
    first = dataclasses.replace(first, host_peak=3 * MIB, moved_bytes={"to host": 2 * MIB})
    one.measurement = dataclasses.replace(one.measurement, ranks=(first, second), notes=("an adapter is idle",))
    assert summary_lines(results({"t.py::test_a": [one]}), 120)[-1] == "note: t.py::test_a: an adapter is idle"
    lines = measurement_lines(one.measurement)
    assert "note: an adapter is idle" in lines
    head = next(n for n, line in enumerate(lines) if line.startswith("rank "))
    assert lines[head].endswith("FLOPs a step  host memory  moved to host a step")
    assert lines[head + 1].split()[-4:] == ["3.00", "MiB", "2.00", "MiB"]
    assert lines[head + 2].split()[-2:] == ["-", "-"]
