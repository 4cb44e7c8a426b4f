"""Comments for pull requests."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.measurement import Composition, Device, Owner
from pytest_mbmem.report import json
from pytest_mbmem.report.comments import LARGEST, comparison, trend
from pytest_mbmem.report.compared import Compared, Row
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.run_figures import File, Tested
from pytest_mbmem.report.trend import Point, Series
from pytest_mbmem.report.two_files import notes

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
REAL = Device("real", "R", 80 * GIB, virtual=False)


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


def test_broken_rules_stand_below_the_summary() -> None:
    compared = Compared("a", "b", (row("t.py::same", GIB, "same"),))
    lines = comparison(compared, broken=["--fail-on x: <b>|`"] * 2).splitlines()
    assert lines[0] == "\u274c **Memory:** 1 figure of 1 test: 1 same"
    assert lines[2:6] == ["**Rules are broken:**", "", "- &#45;&#45;fail&#45;on x&#58; &#60;b&#62;&#124;&#96;", ""]
    assert comparison(compared, broken=[]).splitlines()[2] == "No rule of --fail-on is broken."
    assert "rule" not in comparison(compared).lower()


def test_notes_stand_below_the_table_equal_ones_once() -> None:
    compared = Compared("a", "b", (row("t.py::more", 2 * GIB, "worse"),))
    lines = comparison(compared, ["the recipe differs", "<b>\n# x", "the recipe differs"]).splitlines()
    table_ends = max(index for index, line in enumerate(lines) if line.startswith("|"))
    assert lines[table_ends + 1 :] == [
        "", "- the recipe differs", "- &#60;b&#62; &#35; x", "", "Base <code>a</code>, head <code>b</code>."
    ]  # fmt: skip


def test_many_long_notes_and_broken_rules_fit_into_a_comment() -> None:
    rows = tuple(row(f"t.py::{number}", 2 * GIB, "worse") for number in range(1000))
    many = [f"{number}{chr(0x1F600) * 400}" for number in range(30)]
    text = comparison(Compared("a", "b", rows), many, many)
    assert len(text.encode()) <= LARGEST
    assert text.count("\n- and 20 more\n") == 2
    assert "| worse |" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"recipe": {"x": 1}, "recipe_digest": "1"}, "the recipe differs: "),
        ({"recipe": None, "recipe_digest": "1"}, "only base has a recipe"),
        ({"environment": {"torch": "0"}}, "the environment differs: torch"),
        ({"device": REAL, "mode": "joint"}, "base has solo ranks, head joint ones"),
        ({"ranks": ()}, "head has no measured rank"),
    ],
)
def test_notes_name_base_and_head(measured: Make, tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    files = []
    for name, changes in (("base", {}), ("head", changed)):
        one = measured(GIB)
        one.measurement = dataclasses.replace(one.measurement, **changes)
        path = tmp_path / f"{name}.json"
        path.write_text(json.text(Results({}, {"t.py::a": TestResult("t.py::a", measured=[one])})))
        files.append(File.load(path))
    found = notes(*files, ("base", "head"))
    assert any(note.startswith(f"t.py::a: {said}") for note in found), found
    assert notes(files[0], files[0], ("base", "head")) == []


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
