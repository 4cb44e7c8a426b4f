"""Comparisons as text: tables that fit, and why a memory_saving marker fails a test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from pytest_mbmem.compare import Comparison
from pytest_mbmem.report.comparisons import saving_failure_text, sweep_cells, sweep_lines
from pytest_mbmem.report.results import Measured
from pytest_mbmem.savings import SavingRule, judge_failed, judge_saving
from pytest_mbmem.sweep import Sweep

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
DIFFERENCES = {"memory.recompute_modules": ([], ["core_attn"]), "memory.alloc_conf": ("", "a:b")}


def without_flops(measured: Measured) -> Measured:
    ranks = tuple(dataclasses.replace(rank, flops_per_step=None) for rank in measured.measurement.ranks)
    return Measured("k", None, dataclasses.replace(measured.measurement, ranks=ranks))


def text_of(control: Measured, candidate: Measured, rule: SavingRule) -> str:
    comparison = Comparison(control.measurement, candidate.measurement, DIFFERENCES, rule.metric, rule.phase)
    return saving_failure_text(candidate, judge_saving(rule, comparison))


def test_every_setting_that_differs_is_listed(measured: Make) -> None:
    lines = text_of(measured(GIB), measured(GIB), SavingRule("recompute_modules=[]")).splitlines()
    assert lines[0] == "NO EFFECT: memory.recompute_modules and memory.alloc_conf saves nothing of peak allocated"
    assert lines[-3:] == [
        "  differs     memory.recompute_modules: [] -> ['core_attn']",
        "              memory.alloc_conf:  -> a:b",
        "  device      virtual-h100-80gb, capacity 80.00 GiB",
    ]
    assert "  asked for   any effect; up to 1.00 MiB is none" in lines


def test_of_many_ranks_the_first_are_listed(measured: Make) -> None:
    text = text_of(measured(*[GIB] * 12), measured(*[GIB] * 12), SavingRule("c"))
    assert "  by rank     0: +0 B, 1: +0 B, 2: +0 B, 3: +0 B, 4: +0 B, 5: +0 B, 6: +0 B, 7: +0 B, ...\n" in text


def test_a_name_and_a_phase_are_in_the_headline(measured: Make) -> None:
    candidate = measured(2 * GIB, name="wide")
    text = text_of(measured(GIB), candidate, SavingRule("c", phase="backward"))
    assert text.startswith("COSTS MORE: peak allocated in backward of 'wide' is 1.00 GiB above the control's\n")


def test_a_slowdown_that_is_not_known_says_so(measured: Make) -> None:
    text = text_of(without_flops(measured(GIB)), measured(MIB), SavingRule("c", max_slowdown=0.1))
    assert text.startswith("INVALID: peak allocated is compared with its control, but the slowdown cannot be judged\n")
    assert text.endswith("\n  - max_slowdown cannot be judged: FLOPs were not counted")


@pytest.mark.parametrize(
    ("kind", "headline"),
    [
        ("out of memory", "OUT OF MEMORY: the recipe does not fit NVIDIA H100 80GB HBM3"),
        ("refused", "REFUSED: peak allocated could not be measured"),
        ("no effect", "NO EFFECT: peak allocated could not be measured"),
        ("died", "INVALID: peak allocated could not be measured"),
    ],
)
def test_a_candidate_that_failed_shows_its_message(failed: Make, kind: str, headline: str) -> None:
    candidate = failed(kind, "first\nsecond")
    lines = saving_failure_text(candidate, judge_failed(SavingRule("c"), candidate.measurement)).splitlines()
    assert lines[0] == headline
    assert lines[2] == f"  candidate   {kind} on rank 0 in step-1/forward: first"
    assert lines[5:8] == ["", "  first", "  second"]


def test_a_table_gives_up_columns_until_it_fits(measured: Make) -> None:
    sweep = Sweep.of(
        ("control", measured(GIB).measurement), [("a", measured(MIB).measurement, DIFFERENCES)], "allocated", None, None
    )
    wide = sweep_cells(sweep)[0]
    both_peaks = ["setting", "peak allocated", "saved", "rank", "phase", "peak reserved"]
    assert wide == [*both_peaks, "FLOPs", "more FLOPs", "verdict"]
    narrow = sweep_lines(sweep, 80)[0].split("  ")
    assert [name.strip() for name in narrow if name] == [n for n in wide if n not in ("FLOPs", "rank", "phase")]
    assert len(sweep_lines(sweep, 80)[0]) <= 80
    assert "saved" in sweep_lines(sweep, 1)[0]


def test_equal_traffic_of_all_rows_is_no_column(measured: Make) -> None:
    def swept(more: int) -> list[str]:
        plain = measured(GIB).measurement
        ranks = tuple(dataclasses.replace(rank, collective_bytes={"tp": 3 * MIB + more}) for rank in plain.ranks)
        other = dataclasses.replace(plain, ranks=ranks)
        return sweep_cells(Sweep.of(("control", plain), [("a", other, DIFFERENCES)], "allocated", None, None))[0]

    assert "collectives" not in swept(0)
    assert "collectives" in swept(MIB)
