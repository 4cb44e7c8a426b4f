"""The page in Chromium, without a network: it filters, opens, draws, and nothing goes wrong or leaves the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from made_pages import FINDING, with_history
from playwright.sync_api import Browser, Page, sync_playwright

from pytest_mbmem import Recipe
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Owner
from pytest_mbmem.report.compared import Compared, Row
from pytest_mbmem.report.html import page
from pytest_mbmem.report.pages import compare_page, trend_page
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.trend import Point, Series
from pytest_mbmem.sweep import Sweep

MIB = 2**20
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
EVIL = "<img src=x onerror=alert(1)>&lt;b&gt;</script><!--\u2028%{y}$x$"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests here."""
    path = os.environ.get("MBMEM_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        reason = "no Chromium: install it (apt-get install chromium) or set MBMEM_CHROMIUM"
        if os.environ.get("MBMEM_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Open(Protocol):
    def __call__(self, text: str, *, width: int = 1200, **context: Any) -> Page: ...


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a page; fails at the end if there was an error, a dialog, or a request for anything but the page."""
    contexts, wrong = [], []

    def open_page(text: str, *, width: int = 1200, **context: Any) -> Page:
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        contexts.append(browser.new_context(offline=True, viewport={"width": width, "height": 800}, **context))
        contexts[-1].set_default_timeout(120_000)
        shown = contexts[-1].new_page()
        shown.on("console", lambda message: wrong.append(f"console: {message.text}"))
        shown.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        shown.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
        shown.on("request", lambda request: wrong.append(request.url) if request.url != file.as_uri() else None)
        shown.goto(file.as_uri())
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def made(measured: Make, results: MakeResults) -> Results:
    """A regression with all that a page draws, a test that passes, and a sweep."""
    found = results(
        {
            "t.py::test_worse": [with_history(measured(201 * MIB, 101 * MIB, gate=PeakGate(), baseline=101 * MIB))],
            "t.py::test_good": [with_history(measured(101 * MIB, gate=PeakGate(limit=120 * MIB)))],
            "t.py::test_sweep": [],
        }
    )
    worse = found.tests["t.py::test_worse"]
    worse.outcome, worse.failure, worse.findings = "failed", "assert regression\n" * 20, [FINDING]
    control, full = (with_history(measured(size * MIB)).measurement for size in (301, 101))
    sweep = Sweep.of(("control", control), [("full", full, {})], "allocated", None, None)
    found.tests["t.py::test_sweep"].sweeps = [sweep]
    found.started = "2026-01-03T00:00:00Z"
    return found


EARLIER = [
    Series(
        "t.py::test_worse",
        "virtual-h100-80gb",
        "allocated",
        (Point("one", "2026-01-01T00:00:00Z", 100 * MIB), Point("two", "2026-01-02T00:00:00Z", 101 * MIB)),
    )
]


def visible_rows(shown: Page) -> list[str]:
    return [row.locator("th").inner_text() for row in shown.locator("#results tbody tr:visible").all()]


def draw_all(shown: Page) -> None:
    """Open everything and scroll through it, as lazy plots are drawn in view."""
    shown.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    for place in shown.locator(".plot").all():
        place.scroll_into_view_if_needed()
    shown.wait_for_function("document.querySelectorAll('.plot:not([data-drawn])').length === 0")


def test_buttons_and_text_filter_rows_and_tests(made: Results, opened: Open) -> None:
    shown = opened(page(made))
    assert visible_rows(shown) == list(made.tests)
    shown.get_by_role("button", name="regression").click()
    assert visible_rows(shown) == ["t.py::test_worse"]
    assert shown.locator("section:visible h2").all_inner_texts() == ["t.py::test_worse"]
    shown.get_by_role("button", name="all").click()
    shown.get_by_label("Find").fill("GOOD")
    assert visible_rows(shown) == ["t.py::test_good"]
    assert shown.locator("section:visible h2").all_inner_texts() == ["t.py::test_good"]
    shown.get_by_label("Find").fill("nothing")
    assert shown.get_by_text("No test is left").is_visible()


def test_a_columns_head_sorts_by_size_and_not_by_text(measured: Make, results: MakeResults, opened: Open) -> None:
    tests = {f"test_{size}": [measured(size * MIB, gate=PeakGate(limit=MIB))] for size in (90, 2000, 300)}
    shown = opened(page(results(tests)))
    shown.get_by_role("button", name="measured").click()
    assert visible_rows(shown) == ["test_90", "test_300", "test_2000"]
    shown.get_by_role("button", name="measured").click()
    assert visible_rows(shown) == ["test_2000", "test_300", "test_90"]


def test_a_link_opens_its_test_and_only_then_its_plots_are_drawn(made: Results, opened: Open) -> None:
    made.tests["t.py::test_worse"].outcome = "passed"  # nothing is open at first
    shown = opened(page(made))
    assert shown.locator(".main-svg").count() == 0
    assert not shown.evaluate("'Plotly' in window")
    shown.locator("#results a", has_text="test_sweep").click()
    section = shown.locator("section", has_text="test_sweep")
    section.locator(".plot[data-drawn] .main-svg").first.wait_for()
    assert shown.locator(".plot[data-drawn]").count() == 1
    assert section.locator(".legend").inner_text().split() == ["parameters", "activations", "rounding"]


def test_plots_hold_the_figures(made: Results, opened: Open) -> None:
    shown = opened(page(made, EARLIER))
    draw_all(shown)
    drawn = shown.evaluate(
        """[...document.querySelectorAll("section:first-of-type .plot")].map((place) =>
             [place.className.split(" ")[1], place.data.map((trace) => [trace.name, trace.x, trace.y])])"""
    )
    traces = {kind: {name: (x, y) for name, x, y in found} for kind, found in drawn}
    assert traces["timeline"]["activations"] == ([0, 1, 2, 3, 4], [0, 0, 85, 170, 0])
    assert traces["timeline"]["peak"] == ([3], [201])
    assert traces["segments"]["free"] == ([10, 40, 1], [0, 0, 1])
    assert traces["trend"]["allocated"] == ([0, 1, 2], [100, 101, 201])


def said_at_the_peak(shown: Page) -> str:
    """What the first timeline shows when the pointer is on its peak, without spaces."""
    place = shown.locator(".plot.timeline").first
    place.evaluate("(place) => place.scrollIntoView({ block: 'center' })")
    place.locator(".scatterlayer .point").last.hover(force=True)
    label = place.locator(".hovertext")
    label.wait_for()
    return "".join((label.text_content() or "").split())


@pytest.mark.parametrize("width", [360, 1200])
def test_the_peak_names_its_owners_on_hover(made: Results, opened: Open, width: int) -> None:
    many = [Owner("activations", f"decoder.layers.*.{'part.' * 9}{n}", f"{'folder/' * 9}{n}.py") for n in range(9)]
    (worse,) = made.tests["t.py::test_worse"].measured
    with_history(worse, *many)
    shown = opened(page(made), width=width)
    draw_all(shown)
    assert "peak 201.00 MiB" in (shown.locator(".plot.timeline .annotation").first.text_content() or "")
    said = said_at_the_peak(shown)
    assert said.startswith("peak201.00MiBinstep-2/backward162.00MiBactivations")
    assert "part.8" in said


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light")])
def test_nothing_is_wider_than_the_screen(made: Results, opened: Open, width: int, scheme: str) -> None:
    made.tests["long"] = TestResult(f"t.py::test_{'a' * 300}")
    shown = opened(page(made, EARLIER), width=width, color_scheme=scheme)
    draw_all(shown)
    assert shown.evaluate("document.documentElement.scrollWidth") == width
    colors = shown.locator(".plot.timeline .xtitle").first.evaluate(
        "(title) => [getComputedStyle(title).fill, getComputedStyle(document.body).color]"
    )
    assert len(set(colors)) == 1


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_of_several_runs_scroll_in_their_tables(opened: Open, width: int) -> None:
    name, size = f"t.py::test_{'a' * 100}", 1024 * MIB
    points = tuple(Point(str(run), "", size + run * MIB) for run in range(3))
    row = Row(name, "virtual-h100-80gb", "reserved@optimizer", size, 2 * size, "worse", None, None)
    series = Series(name, "virtual-h100-80gb", "reserved@optimizer", points)
    for text in (trend_page([series]), compare_page(Compared("b" * 200, "head.json", (row,)))):
        shown = opened(text, width=width)
        assert shown.evaluate("document.documentElement.scrollWidth") == width
        (box,) = shown.locator(".wide").all()
        assert box.evaluate("(box) => box.scrollWidth > box.clientWidth") is (width == 390)
        assert (shown.locator("th[scope=row]").bounding_box() or {})["width"] > 150
        lines = "(cell) => { const all = document.createRange(); all.selectNodeContents(cell); return new Set("
        lines += "[...all.getClientRects()].map((line) => line.top)).size; }"
        assert {cell.evaluate(lines) for cell in shown.locator("td:not(:has(svg))").all()} == {1}
        head = shown.get_by_role("columnheader", name="test", exact=True)
        assert head.evaluate(lines) == 1


def test_names_are_shown_as_they_are(measured: Make, results: MakeResults, opened: Open) -> None:
    one = with_history(measured(101 * MIB, name=EVIL), Owner("activations", EVIL, EVIL))
    found = results({EVIL: [one]})
    rows = [(EVIL, one.measurement, {})]
    found.tests[EVIL].sweeps = [Sweep.of((EVIL[1:], one.measurement), rows, "allocated", None, EVIL)]
    earlier = [Series(f"{EVIL}@{EVIL}", "virtual-h100-80gb", "allocated", (Point(EVIL, EVIL, 1),))]
    shown = opened(page(found, earlier))
    draw_all(shown)
    assert shown.locator("img").count() == 0
    assert shown.locator("h2").text_content() == EVIL
    assert "".join(EVIL.split()) in said_at_the_peak(shown)


@pytest.mark.parametrize("missing", ["scripts", "DecompressionStream"])
def test_without_what_plots_need_the_page_says_so(
    made: Results, browser: Browser, tmp_path: Path, missing: str
) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(made), encoding="utf-8")
    context = browser.new_context(offline=True, java_script_enabled=missing != "scripts")
    context.add_init_script("delete window.DecompressionStream")
    shown = context.new_page()
    shown.goto(file.as_uri())
    assert shown.get_by_text("This browser draws no plots").is_visible()
    assert shown.locator(".plot:visible").count() == 0
    assert shown.locator("section").first.get_by_text("Peak of each measured rank").is_visible()
    context.close()


def test_what_was_really_measured_is_drawn(launcher: Launcher, small_recipe: Recipe, opened: Open) -> None:
    measurement = launcher.measure(small_recipe.but(pp=2))
    one = Measured("test_real", None, measurement)
    found = Results({}, {"t.py::test_real": TestResult("t.py::test_real", measured=[one])})
    shown = opened(page(found))
    draw_all(shown)
    kinds = [(place.get_attribute("class") or "").split()[1] for place in shown.locator(".plot").all()]
    assert kinds[0] == "timeline"
    (highest,) = shown.evaluate("document.querySelector('.timeline').data.find(({ name }) => name === 'peak').y")
    unit = shown.evaluate("document.querySelector('.timeline').layout.yaxis.ticksuffix").strip()
    assert highest * {"KiB": 2**10, "MiB": MIB}[unit] == pytest.approx(measurement.peak(), abs=1)
