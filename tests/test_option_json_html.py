"""--mbmem-json and --mbmem-html: the files that a run leaves."""

from __future__ import annotations

import json

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.measurement import Measurement

TESTS = """
    import pytest

    @pytest.mark.peak_memory(limit="100 MiB")
    @pytest.mark.parametrize("text", ["<b>&"])
    def test_fits(mbmem, text):
        mbmem.measure("recipe.yaml")

    @pytest.mark.peak_memory(limit="60 MiB")
    def test_too_large(mbmem):
        mbmem.measure("recipe.yaml")

    def test_unrelated(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_json_holds_verdicts_and_measurements(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile(TESTS)
    result = project.runpytest_subprocess("--mbmem-json=o.json", "-n", workers)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines([f"report: {project.path}/o.json"])
    data = json.loads(project.path.joinpath("o.json").read_text())
    assert data["schema"] == 1
    assert data["header"]["device"] == "virtual-h100-80gb, a virtual NVIDIA H100 80GB HBM3"
    tests = {test["id"]: test for test in data["tests"]}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_it.py::test_fits[<b>&]": "passed",
        "test_it.py::test_too_large": "failed",
    }
    (measured,) = tests["test_it.py::test_too_large"]["measurements"]
    assert Measurement.from_json(measured["measurement"]).peak() == 64 * 2**20
    (judgement,) = measured["judgements"]
    assert (judgement["verdict"], judgement["passed"], judgement["rank"]) == ("regression", False, 0)
    assert "4.00 MiB over the limit" in judgement["explanation"]


def test_outcomes_are_those_of_pytest(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 GiB")

        @pytest.mark.skip
        def test_skipped(mbmem): pass

        @pytest.mark.xfail
        def test_xfailed(mbmem): assert False

        @pytest.mark.xfail
        def test_xpassed(mbmem): mbmem.measure("recipe.yaml")

        @pytest.fixture
        def broken(): assert False

        def test_error(broken, mbmem): pass

        @pytest.fixture
        def broken_later():
            yield
            assert False

        def test_teardown(broken_later, mbmem): mbmem.measure("recipe.yaml")
        """
    )
    project.runpytest("--mbmem-json=o.json")
    tests = json.loads(project.path.joinpath("o.json").read_text())["tests"]
    assert {test["id"].partition("::test_")[2]: test["outcome"] for test in tests} == {
        "skipped": "skipped",
        "xfailed": "xfailed",
        "xpassed": "xpassed",
        "error": "error",
        "teardown": "error",
    }


def test_html_is_one_page_that_needs_nothing_else(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    project.runpytest("--mbmem-html=o.html").assert_outcomes(passed=2, failed=1)
    page = project.path.joinpath("o.html").read_text()
    assert "test_fits[&lt;b&gt;&amp;]" in page
    assert "test_too_large" in page
    assert "regression" in page
    assert "<b>&" not in page
    assert "http" not in page


def test_the_page_that_mbmem_report_makes_of_the_json_file_is_the_same(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    project.runpytest("--mbmem-html=o.html", "--mbmem-json=o.json").assert_outcomes(passed=2, failed=1)
    assert main(["report", "o.json", "--html", "p.html"]) == 0
    assert project.path.joinpath("o.html").read_text() == project.path.joinpath("p.html").read_text()


def test_earlier_runs_make_a_trend(project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    project.makepyfile(TESTS)
    for name in ("a", "b"):
        project.runpytest("--mbmem-json", f"{name}.json")
    project.runpytest("--mbmem-html=o.html", "--mbmem-earlier=a.json", "--mbmem-earlier=b.json")
    assert main(["report", "b.json", "--html", "p.html", "--earlier", "a.json"]) == 0
    for page, runs in (("o.html", 3), ("p.html", 2)):
        assert (
            f'aria-label="Trend over {runs} runs: allocated from 64.00 MiB to'
            in project.path.joinpath(page).read_text()
        )
    assert main(["report", "b.json", "--earlier", "a.json"]) == 2
    assert "--earlier: nothing shows it" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--mbmem-json", "--mbmem-html"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere/o", "the folder * does not exist"),
        (".", "* is a folder; name a file"),
        ("", "the path is empty"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(
    project: pytest.Pytester, option: str, path: str, message: str
) -> None:
    project.makepyfile(TESTS)
    before = set(project.path.iterdir())
    result = project.runpytest(f"{option}={path}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option}: {message}"])
    assert {p for p in project.path.iterdir() if p.name != "__pycache__"} == before


def test_both_files_must_differ(project: pytest.Pytester) -> None:
    result = project.runpytest("--mbmem-json=o", "--mbmem-html=./o")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-json and --mbmem-html name the same file: */o"])


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_without_measurements_writes_an_empty_result(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile("def test_x(): pass")
    arguments = ["--mbmem-json=o.json", "--mbmem-html=o.html", "-n", workers]
    project.runpytest_subprocess(*arguments).assert_outcomes(passed=1)
    assert json.loads(project.path.joinpath("o.json").read_text())["tests"] == []
    assert project.path.joinpath("o.html").is_file()


def test_a_file_that_became_unwritable_makes_the_run_fail(project: pytest.Pytester) -> None:
    project.makepyfile("from pathlib import Path\ndef test_x(): Path('o.json').mkdir()")
    result = project.runpytest("--mbmem-json=o.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["mbmem: error: *o.json: cannot be written (*)"])


def test_a_run_that_stops_early_leaves_what_it_has(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS.replace("100 MiB", "10 MiB"))
    project.runpytest("-x", "--mbmem-json=o.json").assert_outcomes(failed=1)
    tests = json.loads(project.path.joinpath("o.json").read_text())["tests"]
    assert [test["id"] for test in tests] == ["test_it.py::test_fits[<b>&]"]
