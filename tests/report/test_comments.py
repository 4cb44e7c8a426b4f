"""Comments for pull requests."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from pytest_mbmem.measurement import Composition, Owner
from pytest_mbmem.report.comments import LARGEST, comparison, trend
from pytest_mbmem.report.compared import Compared, Row
from pytest_mbmem.report.results import Measured
from pytest_mbmem.report.run_figures import Tested
from pytest_mbmem.report.trend import Point, Series

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]


def row(label: str, after: int, verdict: str, base: Tested | None = None, head: Tested | None = None) -> Row:
    return Row(label, "x", "allocated", GIB, after, verdict, base, head)


def test_a_comment_begins_with_the_summary_and_lists_what_changed_the_worst_first() -> None:
    rows = (row("t.py::same", GIB, "same"), row("t.py::less", MIB, "better"), row("t.py::more", 2 * GIB, "worse"))
    lines = comparison(Compared("base.json", "head.json", rows)).splitlines()
    assert lines[0] == "\u274c **Memory:** 3 figures of 3 tests: 1 worse, 1 better, 1 same"
    assert lines[2] == "| test | device | metric | base | head | change | verdict |"
    assert [line.split(" | ")[-1] for line in lines[4:6]] == ["worse |", "better |"]
    assert "+100.00%" in lines[4]
    assert lines[6:] == ["", "Base <code>base&#46;json</code>, head <code>head&#46;json</code>."]


def test_a_comment_without_changes_has_no_table() -> None:
    text = comparison(Compared("a", "b", (row("t.py::same", GIB, "same"),)))
    assert text.startswith("\u2705 **Memory:** 1 figure of 1 test: 1 same\n")
    assert "|" not in text


def held(measured: Make, size: int) -> Tested:
    """A measurement whose peak is the activations of a decoder."""
    one = measured(size).measurement
    owner = Owner("activations", "decoder", "mlp.py:88 (forward)")
    rank = dataclasses.replace(one.ranks[0], composition=Composition((owner,), ((MIB,), (size,))))
    return Tested("t.py::a", "x", measurement=dataclasses.replace(one, ranks=(rank,)))


def test_what_grew_is_folded_below_the_table(measured: Make) -> None:
    sides = [held(measured, size) for size in (100 * MIB, 200 * MIB)]
    text = comparison(Compared("a", "b", (row("t.py::a", 2 * GIB, "worse", *sides),)))
    (details,) = re.findall("<details><summary>(.*)</summary>\n\n```\n(.*)\n```\n\n</details>", text, re.DOTALL)
    assert details[0].endswith("allocated: +100.00%")
    assert "+100.00 MiB  activations  decoder" in details[1]
    assert len(details[1].splitlines()) <= 12


def test_a_phase_that_the_head_did_not_go_through_has_nothing_to_fold(measured: Make) -> None:
    sides = [held(measured, size) for size in (100 * MIB, 200 * MIB)]
    gone = Row("t.py::a", "x", "allocated@optimizer", GIB, None, "gone", *sides)
    assert "allocated&#64;optimizer | 1.00 GiB | - | - | gone |" in comparison(Compared("a", "b", (gone,)))


def test_a_comment_holds_no_more_than_github_takes() -> None:
    rows = tuple(row("t.py::" + "x\u00e9" * 100 + str(number), 2 * GIB, "worse") for number in range(1000))
    text = comparison(Compared("a", "b", rows))
    assert LARGEST - 1500 < len(text.encode()) <= LARGEST
    shown = text.count("| worse |")
    assert f"{1000 - shown} more are left out" in text


def test_a_trend_is_a_table() -> None:
    series = Series("t.py::a|b", "x", "allocated", (Point("1", "", GIB), Point("2", "", 2 * GIB)))
    lines = trend([series]).splitlines()
    assert lines[4].count(" | ") == lines[2].count(" | ") == 10
    assert lines[4].endswith("| \u2581\u2588 |")
