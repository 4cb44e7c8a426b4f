"""The page: well-formed, complete, and nothing from outside gets into its markup."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest
from made_pages import FINDING, with_history

from pytest_mbmem.baseline_file import Entry, Figure
from pytest_mbmem.compare import Comparison
from pytest_mbmem.estimate import estimate
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.growth import Growth, Holder, RankGrowth, Trace
from pytest_mbmem.measurement import Owner
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report.html import page
from pytest_mbmem.report.results import Judged, Measured, Results
from pytest_mbmem.report.trend import Point, Series
from pytest_mbmem.savings import SavingRule, judge_saving
from pytest_mbmem.split import compact, split_of
from pytest_mbmem.sweep import Sweep
from pytest_mbmem.units import format_bytes

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]

WITHOUT_END = {"meta", "br", "img", "input", "link"}
ENDED_BY = {
    "td": {"td", "th", "tr", "tbody"},
    "th": {"td", "th", "tr", "tbody"},
    "tr": {"tr", "tbody"},
    "thead": {"tbody"},
}
"""Elements that need no end tag: they end with their parent, or where one of these begins (HTML, section 13.1.2.4)."""


class Page(HTMLParser):
    """Elements and text; fails on an end tag that does not close the innermost open element that needs one."""

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
        while self.open and tag in ENDED_BY.get(self.open[-1], ()):
            self.open.pop()
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open[-1] != tag and self.open[-1] in (*ENDED_BY, "tbody"):
            self.open.pop()
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
    assert verdicts == ["pass", "regression", "pass", "out of memory", "-", "-", "-"]
    assert {button["data-show"] for button in parsed.all("button")} == {"", *verdicts}


def test_every_link_leads_to_a_section(mixed: Results) -> None:
    parsed = Page(page(mixed))
    sections = {f"#{section['id']}" for section in parsed.all("section")}
    links = {link["href"] for link in parsed.all("a")}
    assert len(links) == 6
    assert links == sections


def test_the_page_loads_nothing(mixed: Results) -> None:
    text = page(mixed)
    assert not any(attributes.keys() & {"src", "srcset"} for _, attributes in Page(text).elements)
    assert not Page(text).all("link")
    assert "http" not in text
    assert "url(" not in text


def test_a_bar_is_as_long_as_its_share_of_the_longest(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(100 * MIB, 50 * MIB)]})))
    first, second = lengths(parsed, "allocated")[2:]  # of ranks, behind those of two phases
    assert first == pytest.approx(2 * second, abs=0.02)
    assert 90 < first < 100


def test_a_baseline_is_a_line_across_the_bars_of_its_metric(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(100 * MIB, gate=PeakGate(), baseline=100 * MIB)]})))
    of_phase, of_rank = lengths(parsed, "allocated")[1:]
    assert of_phase == of_rank
    for line in lines_across(parsed):
        assert line == f"--of-allocated:linear-gradient(var(--baseline) 0 0) {of_rank:.2f}%/2px 100% no-repeat;"
    assert len(lines_across(parsed)) == 2  # of ranks and of phases; the capacity is far beyond the edge
    assert "capacity 80.00 GiB (beyond the right edge)" in parsed.text


def test_the_capacity_is_drawn_where_peaks_come_near_it(measured: Make, results: MakeResults) -> None:
    for line in lines_across(Page(page(results({"t": [measured(70 * GIB)]})))):
        assert re.findall(r"--of-(\w+):linear-gradient\(var\(--(\w+)\)", line) == [
            ("allocated", "capacity"),
            ("reserved", "capacity"),
        ]


def lengths(parsed: Page, metric: str) -> list[float]:
    """Of the bars of a metric, in percent of the longest that there can be."""
    styles = [bar["style"] or "" for bar in parsed.all("i") if bar["class"] == metric]
    return [float(style.removeprefix("--size:").rstrip("%")) for style in styles]


def lines_across(parsed: Page) -> list[str]:
    return [table["style"] or "" for table in parsed.all("table") if table.get("class") == "bars"]


def test_of_many_ranks_the_highest_are_drawn(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [measured(*(n * MIB for n in range(1, 101)))]})))
    assert "the highest 32 of 100" in parsed.text
    assert "rank 68 " in parsed.text
    assert "rank 67 " not in parsed.text


EVIL = "<script>alert(1)</script>\"'&<!--ROWS-->\udcff"


def test_nothing_from_outside_becomes_markup(measured: Make, failed: Make, results: MakeResults) -> None:
    evil = Owner("activations", EVIL, EVIL, 2, EVIL)
    one = measured(
        GIB,
        gate=PeakGate(limit=1),
        name=EVIL,
        recipe={EVIL: EVIL},
        recipe_digest=EVIL,
        environment={EVIL: EVIL},
        assumptions=(EVIL,),
    )
    run = results({EVIL: [with_history(one, evil), failed("error", EVIL)]})
    run.header = {EVIL: EVIL}
    test = run.tests[EVIL]
    test.outcome, test.failure, test.artifacts, test.earlier = "failed", EVIL, [EVIL], [EVIL]
    action = dataclasses.replace(FINDING.actions[0], what=EVIL, cost=EVIL)
    test.findings = [
        dataclasses.replace(
            FINDING,
            **dict.fromkeys(("rule", "symptom", "cause", "confirm", "source"), EVIL),
            evidence=(EVIL,),
            actions=(action,),
        )
    ]
    row = (EVIL, measured(GIB).measurement, {})
    test.sweeps = [Sweep.of((EVIL, measured(GIB).measurement), [row], "allocated", None, EVIL)]
    label = f"{EVIL}@{EVIL}"
    points = (Point(EVIL, EVIL, 1), Point(EVIL, EVIL * 2, 2))
    text = page(run, [Series(label, "virtual-h100-80gb", "allocated", points)])
    text.encode("utf-8")
    assert len(Page(text).all("script")) == 3  # the plots' data, plotly, and the page's own
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
    assert "rank coordinates host memory moved to host a step 0 tp=0 pp=0 3.00 MiB 2.00 MiB 1 tp=0 pp=1 - -" in text
    assert "an adapter is idle" in text


def test_what_is_the_same_of_every_rank_is_said_once(measured: Make, results: MakeResults) -> None:
    text = Page(page(results({"t": [measured(GIB, GIB // 2)]}))).text
    assert "rank coordinates allocated reserved 0 tp=0 pp=0 1.00 GiB" in text
    assert "The same of every rank: stands for 4;" in text
    assert text.count("5.00 TFLOP") == 1


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


def test_a_page_with_nothing_to_draw_carries_no_library(mixed: Results, measured: Make, results: MakeResults) -> None:
    assert len(page(mixed)) < 100_000
    drawn = page(results({"t": [with_history(measured(101 * MIB))]}))
    assert 1_500_000 < len(drawn) < 2_500_000


def test_each_plot_has_a_place_words_and_tables(measured: Make, results: MakeResults) -> None:
    parsed = Page(page(results({"t": [with_history(measured(101 * MIB))]})))
    places = [place for place in parsed.all("div") if "data-plot" in place]
    assert [place["class"] for place in places] == ["plot timeline", "plot segments"]
    assert [place["data-plot"] for place in places] == ["0", "1"]
    assert all(place["role"] == "img" and place["aria-label"] for place in places)
    for part in (
        "Areas are bytes as they were asked for; the peak has 1.00 MiB more, of rounding",
        "70.00 MiB activations decoder.layers.*.mlp \u00d7 4 mlp.py:7",
        "step-2/backward 101.00 MiB 103.00 MiB 30.00 MiB 70.00 MiB 1.00 MiB",
        "102.00 MiB in 2 segments: 51.00 MiB in blocks and 51.00 MiB free, at most 40.00 MiB of them in one piece",
        "larger ones 1 100.00 MiB 50.00 MiB",
    ):
        assert part in parsed.text


def test_a_regression_shows_what_grew_the_most_first(measured: Make, results: MakeResults) -> None:
    before, now = (with_history(measured(size * MIB)) for size in (101, 301))
    (was,) = before.measurement.ranks
    split = split_of(was)
    assert split is not None
    figure = Figure(101 * MIB, 0, "step-2/backward", {0: 101 * MIB}, 101 * MIB, {}, split=compact(split))
    gate = PeakGate()
    now.judged.append(Judged(judge(gate, now.measurement, Entry("now", {}, {gate.metric_id: figure}), "t")))
    found = results({"t": [now]})
    found.tests["t"].outcome = "failed"
    text = Page(page(found)).text
    assert "Against the baseline: +200.00 MiB +200.00 MiB activations decoder.layers.*.mlp \u00d7 4, mlp.py:7" in text


def test_a_limit_that_is_broken_shows_the_largest_parts(measured: Make, results: MakeResults) -> None:
    over = with_history(measured(101 * MIB))
    over.judged.append(Judged(judge(PeakGate(limit=MIB), over.measurement, None, "t")))
    text = Page(page(results({"t": [over]}))).text
    assert "The peak is made of (101.00 MiB) 70.00 MiB activations decoder.layers.*.mlp" in text


def test_a_saving_is_drawn_and_its_change_is_a_table(measured: Make, results: MakeResults) -> None:
    control, one = (with_history(measured(size * MIB)) for size in (301, 101))
    comparison = Comparison(control.measurement, one.measurement, {"memory.x": (1, 2)})
    one.savings = [judge_saving(SavingRule("x=1"), comparison)]
    parsed = Page(page(results({"t": [one]})))
    assert next(place["class"] for place in parsed.all("div") if "data-plot" in place) == "plot peaks"
    assert "control 30.00 MiB 270.00 MiB 1.00 MiB measured 30.00 MiB 70.00 MiB 1.00 MiB" in parsed.text
    assert "Peak allocated: -200.00 MiB -200.00 MiB activations decoder.layers.*.mlp" in parsed.text


def test_a_sweep_is_a_row_of_the_table_and_is_drawn(measured: Make, results: MakeResults) -> None:
    control, one = (with_history(measured(size * MIB)).measurement for size in (301, 101))
    found = results({"t": []})
    found.tests["t"].sweeps = [Sweep.of(("c", control), [("full", one, {})], "allocated", None, None)]
    parsed = Page(page(found))
    assert "t virtual-h100-80gb - 1 setting - - - -" in parsed.text
    assert "Change from c to full" in parsed.text
    assert [place["class"] for place in parsed.all("div") if "data-plot" in place] == ["plot peaks"]


def test_a_finding_is_a_card_with_its_actions_in_order(measured: Make, results: MakeResults) -> None:
    found = results({"t": [measured(GIB)]})
    found.tests["t"].findings = [FINDING]
    parsed = Page(page(found))
    assert len(parsed.all("article")) == 1
    assert (
        "memory is reserved that no block can use 52.00 MiB of 102.00 MiB are free Likely cause: blocks of changing "
        "sizes To make sure: look at the segments at the peak Next: set expandable_segments:True (0.00% of a step) fix "
        "the sequence length fragmentation; a document"
    ) in parsed.text


def test_a_failed_test_is_open_says_so_and_has_its_text(measured: Make, results: MakeResults) -> None:
    found = results({"t": [measured(GIB, gate=PeakGate(), baseline=GIB)], "u": []})
    test = found.tests["t"]
    test.outcome, test.failure, test.artifacts = "failed", "assert 1 == 2", ["artifacts/t"]
    parsed = Page(page(found))
    assert [row["data-verdict"] for row in parsed.all("tr") if "data-verdict" in row] == ["pass", "failed", "-"]
    assert [details for details in parsed.all("details") if "open" in details] == [{"open": None}]
    assert "What failed assert 1 == 2" in parsed.text
    assert "artifacts/t" in parsed.text


def test_the_trend_is_shown_where_there_are_earlier_figures(measured: Make, results: MakeResults) -> None:
    found = results({"t": [measured(3 * MIB, gate=PeakGate(), baseline=3 * MIB)]})
    found.started, found.revision = "2026-01-02T00:00:00Z", "abcdef"
    earlier = [Series("t", "virtual-h100-80gb", "allocated", (Point("one", "2026-01-01T00:00:00Z", 2 * MIB),))]
    parsed = Page(page(found, earlier))
    assert "trend" in " ".join(place["class"] or "" for place in parsed.all("div") if "data-plot" in place)
    assert "one 2026-01-01T00:00:00Z 2.00 MiB" in parsed.text
    assert "2026-01-02T00:00:00Z 3.00 MiB" in parsed.text
    assert "Trend" not in Page(page(found)).text


def test_the_estimate_stands_beside_the_measured_peak(
    measured: Make, results: MakeResults, small_recipe: Recipe
) -> None:
    one = with_history(measured(101 * MIB, recipe=small_recipe.to_dict()))
    text = Page(page(results({"t": [one]}))).text
    size = estimate(small_recipe).total
    assert f"Estimate of {format_bytes(size)} beside the measured peak" in text
    assert f"peak allocated estimate (rank 0) virtual (rank 0) all {format_bytes(size)} 101.00 MiB parameters" in text
    assert "not in the estimate - 1.00 MiB" in text


def test_without_a_recipe_that_the_formula_takes_there_is_no_estimate(measured: Make, results: MakeResults) -> None:
    assert "Estimate" not in Page(page(results({"t": [measured(GIB)]}))).text
