"""--mbmem-junit and --mbmem-earlier."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs_again import runs_again

from pytest_mbmem.report.run_figures import File

TESTS = """
    import pytest

    @pytest.mark.peak_memory(limit="100 MiB")
    @pytest.mark.parametrize("text", ["<b>&"])
    def test_fits(mbmem, text):
        mbmem.measure("recipe.yaml")

    @pytest.mark.peak_memory(limit="60 MiB")
    def test_too_large(mbmem):
        mbmem.measure("recipe.yaml")

    @pytest.mark.skip(reason="not today")
    @pytest.mark.peak_memory
    def test_skipped(mbmem): pass

    def test_unrelated(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_writes_a_case_for_each_verdict(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile(TESTS)
    result = project.runpytest_subprocess("--mbmem-junit=j.xml", "--junitxml=p.xml", "-n", workers)
    result.assert_outcomes(passed=2, failed=1, skipped=1)
    result.stdout.fnmatch_lines([f"report: {project.path}/j.xml"])
    (suite,) = ElementTree.parse(project.path / "j.xml").getroot()
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["3", "1", "0", "1"]
    cases = {case.get("name", ""): case for case in suite.iter("testcase")}
    assert set(cases) == {"test_fits[<b>&] allocated", "test_too_large allocated", "test_skipped"}
    (failure,) = cases["test_too_large allocated"].iterfind("failure")
    assert failure.get("message") == "REGRESSION: peak allocated is 4.00 MiB over the limit"
    (skipped,) = cases["test_skipped"].iterfind("skipped")
    assert skipped.get("message") == "not today"
    (pytests,) = ElementTree.parse(project.path / "p.xml").getroot()
    assert {case.get("classname") for case in pytests.iter("testcase")} == {"test_it"}
    assert {case.get("classname") for case in cases.values()} == {"test_it"}
    for name in ("j.xml", "p.xml"):
        assert {one.label: one.figures["allocated"] for one in File.load(project.path / name).tested} == {
            "test_it.py::test_fits[<b>&]": 64 * 2**20,
            "test_it.py::test_too_large": 64 * 2**20,
        }


def test_a_test_that_passes_when_it_runs_again_is_flaky(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest-rerunfailures does it."""
    runs_again(project, monkeypatch)
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="100 MiB")
        def test_fits(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    project.runpytest("--mbmem-junit=j.xml")
    (case,) = ElementTree.parse(project.path / "j.xml").iter("testcase")
    assert case.find("failure") is None
    (flaky,) = case.iterfind("flakyFailure")
    assert flaky.get("message") == "REGRESSION: peak allocated is 14.00 MiB over the limit"


def test_the_revision_is_that_of_the_ci_or_of_git(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def revision() -> str:
        project.runpytest("--mbmem-json=o.json")
        return str(json.loads(project.path.joinpath("o.json").read_text())["revision"])

    for variable in ("GITHUB_SHA", "CI_COMMIT_SHA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(project.path.parent))
    project.makepyfile("def test_x(): pass")
    assert revision() == ""
    monkeypatch.setenv("CI_COMMIT_SHA", "b" * 40)
    assert revision() == "b" * 40
    monkeypatch.setenv("GITHUB_SHA", "a" * 40)
    assert revision() == "a" * 40


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_names_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_mbmem.report.revision import revision_of

    for variable in ("GITHUB_SHA", "CI_COMMIT_SHA"):
        monkeypatch.delenv(variable, raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert revision_of(tmp_path) == ""
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=x"], check=True)
    assert len(revision_of(tmp_path)) == 40


def test_earlier_runs_are_read_before_anything_runs(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    project.runpytest("--mbmem-junit=1.xml")
    project.path.joinpath("damaged.xml").write_text("<testsuite")
    for arguments, message in (
        (["--mbmem-earlier=1.xml"], "--mbmem-earlier: nothing shows it; give --mbmem-html=FILE too"),
        (
            ["--mbmem-earlier=damaged.xml", "--mbmem-html=o.html"],
            "--mbmem-earlier: */damaged.xml: cannot be read",
        ),
        (["--mbmem-earlier=", "--mbmem-html=o.html"], "--mbmem-earlier: the path is empty"),
    ):
        result = project.runpytest(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {message}*"])
    assert not project.path.joinpath("o.html").exists()


@pytest.mark.parametrize("other", ["--mbmem-json", "--junitxml"])
def test_files_must_differ(project: pytest.Pytester, other: str) -> None:
    result = project.runpytest("--mbmem-junit=o", f"{other}=./o")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{other}* name the same file: */o"])


def test_a_test_whose_worker_crashed_has_not_passed(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist's report of the crash has nothing of this package, but the test's setup was reported before."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.path / "summary.md"))
    project.makepyfile(
        """
        import os
        import signal

        def test_a(mbmem): mbmem.measure("recipe.yaml")

        def test_crashes(mbmem):
            mbmem.measure("recipe.yaml")
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    result = project.runpytest_subprocess("--mbmem-junit=j.xml", "-n", "1")
    result.stdout.fnmatch_lines(["::error file=test_it.py,*title=mbmem error%3A test_crashes::worker 'gw0' crashed *"])
    (case,) = (c for c in ElementTree.parse(project.path / "j.xml").iter("testcase") if c.get("name") == "test_crashes")
    (error,) = case.iterfind("error")
    assert error.get("message") == "worker 'gw0' crashed while running 'test_it.py::test_crashes'"
    assert "1 of 2 tests that measure failed" in project.path.joinpath("summary.md").read_text()


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "pytest.exit('enough')"])
def test_a_test_that_was_interrupted_has_not_passed(project: pytest.Pytester, end: str) -> None:
    project.makepyfile(
        f"""
        import pytest

        def test_a(mbmem): mbmem.measure("recipe.yaml")

        def test_ends(mbmem):
            mbmem.measure("recipe.yaml")
            {end}

        def test_never(mbmem): mbmem.measure("recipe.yaml")
        """
    )
    project.runpytest_subprocess("--mbmem-junit=j.xml")
    cases = {case.get("name"): case for case in ElementTree.parse(project.path / "j.xml").iter("testcase")}
    assert set(cases) == {"test_a measured", "test_ends"}
    (error,) = cases["test_ends"].iterfind("error")
    assert error.get("message") == "the session ended before this test did"


def test_an_earlier_run_is_not_written_over(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    project.runpytest("--mbmem-json=o.json")
    before = project.path.joinpath("o.json").read_text()
    result = project.runpytest("--mbmem-html=o.json", "--mbmem-earlier=o.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-html: */o.json is read, and would be lost; name another file"])
    assert project.path.joinpath("o.json").read_text() == before


@pytest.mark.parametrize("option", ["--mbmem-html", "--mbmem-junit", "--mbmem-metrics"])
def test_a_name_that_no_file_can_have_is_refused_before_anything_runs(project: pytest.Pytester, option: str) -> None:
    result = project.runpytest(f"{option}={'n' * 300}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option}: * cannot be written (File name too long)"])
