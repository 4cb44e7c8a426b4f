"""The page: well-formed, complete, and nothing from outside gets into its markup."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from pytest_mbmem.gates import PeakGate
from pytest_mbmem.growth import Growth, Holder, RankGrowth, Trace
from pytest_mbmem.report.html import page
from pytest_mbmem.report.results import Measured, Results
from pytest_mbmem.sweep import Sweep

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]

WITHOUT_END = {"meta", "br", "img", "input", "link"}


class Page(HTMLParser):
    """Elements and text; fails on an end tag that does not close the innermost open element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def mixed(measured: Make, failed: Make, results: MakeResults) -> Results:
    return results(
        {
            "t.py::test_pass": [measured(GIB, GIB // 2, gate=PeakGate(), baseline=GIB, assumptions=("quick copies",))],
            "t.py::test_regression": [measured(2 * GIB, gate=PeakGate(), baseline=GIB)],
            "t.py::test_limit": [measured(GIB, gate=PeakGate(limit=2 * GIB))],
            "t.py::test_oom": [failed("out of memory", "CUDA out of memory.")],
            "t.py::test_ungated": [measured(GIB), measured(GIB, name="control")],
            "t.py::test_skipped": [],
        }
    )


def test_the_page_is_well_formed_and_shows_every_test(mixed: Results) -> None:
    text = Page(page(mixed)).text
    for test in mixed.tests:
        assert test in text
    for part in ("virtual-h100-80gb", "CUDA out of memory.", "quick copies", "5.00 TFLOP", "tp 3.00 MiB", "2.14.1"):
        assert part in text


def test_a_row_stands_for_each_verdict_and_can_be_filtered(mixed: Results) -> None:
    parsed = Page(page(mixed))
    verdicts = [row["data-verdict"] for row in parsed.all("tr") if "data-verdict" in row]
    assert verdicts == ["pass", "regression", "pass", "out of memory", "-", "-"]
    assert {button["data-show"] for button in parsed.all("button")} == {"", *verdicts}


def test_every_link_leads_to_a_section(mixed: Results) -> None:
    parsed = Page(page(mixed))
    sections = {f"#{section['id']}" for section in parsed.all("section")}
    links = {link["href"] for link in parsed.all("a")}
    assert len(links) == 5
    assert links < sections


def test_the_page_loads_nothing(mixed: Results) -> None:
    text = page(mixed)
    assert not any(attributes.keys() & {"src", "srcset"} for _, attributes in Page(text).elements)
    assert not Page(text).all("link")
    assert "http" not in text
    assert "url(" not in text


def test_a_bar_is_as_long_as_its_share_of_the_longest(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(100 * MIB, 50 * MIB)]})))
    allocated = [rect["width"] for rect in parsed.all("rect") if rect["class"] == "allocated"]
    first, second = (float((width or "").rstrip("%")) for width in allocated[:2])
    assert first == pytest.approx(2 * second, abs=0.02)
    assert 90 < first < 100


def test_a_baseline_is_a_line_across_the_bars_of_its_metric(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(100 * MIB, gate=PeakGate(), baseline=100 * MIB)]})))
    (of_rank,) = (rect["width"] for rect in parsed.all("rect")[:1])
    lines = parsed.all("line")
    assert {line["class"] for line in lines} == {"baseline"}  # the capacity is far beyond the edge
    assert {line["x1"] for line in lines} == {of_rank}
    assert len(lines) == 3  # one rank and two phases, of peak allocated alone
    assert "capacity 80.00 GiB (beyond the right edge)" in parsed.text


def test_the_capacity_is_drawn_where_peaks_come_near_it(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(70 * GIB)]})))
    assert {line["class"] for line in parsed.all("line")} == {"capacity"}


def test_of_many_ranks_the_highest_are_drawn(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(*(n * MIB for n in range(1, 101)))]})))
    assert "the highest 32 of 100" in parsed.text
    assert "rank 68 " in parsed.text
    assert "rank 67 " not in parsed.text


EVIL = "<script>alert(1)</script>\"'&<!--ROWS-->\udcff"


def test_nothing_from_outside_becomes_markup(measured: Make, failed: Make, results: MakeResults) -> None:
    one = measured(
        GIB,
        gate=PeakGate(limit=1),
        name=EVIL,
        recipe={EVIL: EVIL},
        recipe_digest=EVIL,
        environment={EVIL: EVIL},
        assumptions=(EVIL,),
    )
    run = results({EVIL: [one, failed("error", EVIL)]})
    run.header = {EVIL: EVIL}
    text = page(run)
    text.encode("utf-8")
    harmless = Page(page(results({"t": [measured(GIB, gate=PeakGate(limit=1), name="a"), failed("error", "b")]})))
    assert len(Page(text).all("script")) == len(harmless.all("script"))
    assert "alert(1)" in Page(text).text
    assert text.count("<!--") == 0


def test_a_run_without_measurements_is_a_page_too(results: MakeResults) -> None:
    assert "all 0" in Page(page(results({}))).text


def test_host_memory_and_moved_bytes_are_columns_where_a_rank_has_them(measured: Make, results: MakeResults) -> None:
    plain = measured(GIB, GIB)
    assert "host memory" not in Page(page(results({"t": [plain]}))).text
    first, second = plain.measurement.ranks
    first = dataclasses.replace(first, host_peak=3 * MIB, moved_bytes={"to host": 2 * MIB})
    plain.measurement = dataclasses.replace(plain.measurement, ranks=(first, second), notes=("an adapter is idle",))
    text = Page(page(results({"t": [plain]}))).text
    assert "host memory moved to host a step" in text
    assert "tp 3.00 MiB 3.00 MiB 2.00 MiB 1 tp=0 pp=1" in text
    assert "tp 3.00 MiB - -" in text
    assert "an adapter is idle" in text


def test_a_sweep_shows_what_each_rank_saves(measured: Make, results: MakeResults) -> None:
    rows = [(name, measured(GIB, GIB // 2).measurement, {}) for name in ("a", "b")]
    found = results({"t": []})
    found.tests["t"].sweeps = [Sweep.of(("c", measured(GIB, GIB).measurement), rows, "allocated", None, None)]
    text = Page(page(found)).text
    assert (
        "setting rank control measured saved a 0 1.00 GiB 1.00 GiB +0 B a 1 1.00 GiB 512.00 MiB +512.00 MiB b" in text
    )


def test_each_finding_of_growth_is_a_line(results: MakeResults) -> None:
    run = Trace(resting=(0, MIB, 2 * MIB, 3 * MIB), freed_by_gc=MIB, grown=(Holder("decoder.<b>", MIB, 1),))
    found = results({"t": []})
    found.tests["t"].growths = [Growth((RankGrowth(3, run),)).summary()]
    parsed = Page(page(found))
    assert "growth memory growth: rank 3 grows by 1.00 MiB a step" in parsed.text
    assert "held by decoder.<b> 1 tensor, 1.00 MiB" in parsed.text
    assert len(parsed.all("li")) == 2
