"""What GitHub Actions is told: annotations and the step's summary."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from runs_again import runs_again

from pytest_mbmem.diagnosis import Action, Finding
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report import github
from pytest_mbmem.report.github import OTHER_ANNOTATOR, command, errors, summary
from pytest_mbmem.report.ratchet import improvements
from pytest_mbmem.report.results import Measured, Results
from pytest_mbmem.split import Change, Part, PeakGrowth

MIB, GIB = 2**20, 2**30
NODEID = "tests/test_memory.py::test_llama[a,b]"
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]

FINDING = Finding(
    "moe", "it grew", ("1.00 GiB of a|b",), "a <b>cause</b>", "look", (Action("recompute `moe`", "7% of a step"),), "us"
)


def read_command(line: str) -> tuple[str, dict[str, str], str]:
    """A workflow command as GitHub's runner reads it."""
    found = re.fullmatch(r"::(\w+)(?: ([^\n]*?))?::(.*)", line)
    assert found is not None, line

    def plain(text: str) -> str:
        for code, character in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
            text = text.replace(code, character)
        return text

    properties = dict(pair.split("=", 1) for pair in (found[2] or "").split(",") if pair)
    return found[1], {key: plain(value) for key, value in properties.items()}, plain(found[3])


@pytest.fixture
def failed_results(measured: Make, results: MakeResults) -> Results:
    """One test that two gates fail, of which one knows what grew."""
    one = measured(GIB, 2 * GIB, gate=PeakGate(), baseline=GIB)
    part = Part("activations", GIB, "decoder.layers.*.mlp", "mlp.py (forward)", 4)
    judged = one.judged[0]
    judged.judgement = replace(judged.judgement, growth=PeakGrowth((Change(None, part),)))
    one.judged += measured(2 * GIB, gate=PeakGate(limit=GIB, metric="reserved")).judged
    made = results({NODEID: [one], "tests/test_memory.py::test_well": [measured(GIB, gate=PeakGate(), baseline=GIB)]})
    test = made.tests[NODEID]
    test.outcome, test.findings, test.failure = "failed", [FINDING], "REGRESSION: peak\n```\n</details>\n::error::x"
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A workspace, which begins above the rootdir."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    return tmp_path


def test_a_failed_test_is_one_error_that_says_all_there_is_to_know(failed_results: Results, here: Path) -> None:
    (line,) = errors(failed_results, {NODEID: ("tests/test_memory.py", 6)}, here / "project")
    name, properties, message = read_command(line)
    assert name == "error"
    assert properties == {
        "file": "project/tests/test_memory.py",
        "line": "7",
        "title": "mbmem regression: test_llama[a,b]",
    }
    lines = message.splitlines()
    assert lines[0].startswith("peak allocated 2.00 GiB on rank 1 in step-2/backward: +100.00% against the baseline of")
    assert lines[1].startswith("peak reserved 2.00 GiB on rank 0 in step-2/backward: ")
    assert lines[2] == "what grew (+1.00 GiB):"
    assert lines[3].split() == [
        "+1.00",
        "GiB",
        "activations",
        "decoder.layers.*.mlp",
        "\u00d7",
        "4",
        "mlp.py",
        "(forward)",
    ]
    assert lines[-1] == "next: recompute `moe`"


def test_what_several_gates_say_alike_is_said_once(failed: Make, results: MakeResults, here: Path) -> None:
    one = failed("out of memory", "no room")
    one.judged += failed("out of memory", "no room").judged
    made = results({NODEID: [one]})
    made.tests[NODEID].outcome = "failed"
    ((_, properties, message),) = map(read_command, errors(made, {}, here))
    assert message == "peak allocated: out of memory (rank 0 ended with: out of memory in step-1/forward)"
    assert properties == {"title": "mbmem out of memory: test_llama[a,b]"}


@pytest.mark.parametrize("path", ["../elsewhere/test_x.py", "/opt/test_x.py"])
def test_a_file_outside_of_the_workspace_is_not_named(failed_results: Results, here: Path, path: str) -> None:
    (line,) = errors(failed_results, {NODEID: (path, 6)}, here)
    assert set(read_command(line)[1]) == {"title"}


def test_a_test_that_failed_for_another_reason_says_what_was_raised(results: MakeResults, here: Path) -> None:
    made = results({NODEID: []})
    made.tests[NODEID].outcome = "failed"
    made.tests[
        NODEID
    ].failure = "[gw0] linux -- Python 3.11\n\n    def test_x():\n>       assert False\nE       assert False"
    ((_, properties, message),) = map(read_command, errors(made, {}, here))
    assert (properties["title"], message) == ("mbmem failed: test_llama[a,b]", "assert False")


def test_no_more_errors_than_github_shows_and_the_summary_says_so(measured: Make, results: MakeResults) -> None:
    made = results({f"t.py::test_{n}": [measured(2 * GIB, gate=PeakGate(limit=GIB))] for n in range(12)})
    for test in made.tests.values():
        test.outcome = "failed"
    assert len(errors(made, {}, Path())) == 10
    text = summary(made, [], "")
    assert "GitHub annotates 10 of 12 failed tests; all of them are below." in text
    assert text.count("<details>") == 12


@pytest.mark.parametrize(
    ("message", "title"),
    [("100% of a\nb\r\nc", "a,b:c%"), ("::error file=x::y", "%0A"), ("\x1b[31m", "\n::warning::x")],
)
def test_nothing_in_a_text_ends_a_command_or_begins_another(message: str, title: str) -> None:
    line = command("error", message, {"title": title})
    assert line.isprintable()
    name, properties, text = read_command(line)
    assert (name, text) == ("error", message.replace("\r", "").replace("\x1b", "?"))
    assert properties == {"title": title}


# The summary ----------------------------------------------------------------------------------------------------------


def test_the_summary_has_verdicts_the_table_and_what_failed(failed_results: Results) -> None:
    lines = summary(failed_results, [], "").splitlines()
    assert lines[1] == "### Memory: 1 of 2 tests that measure failed"
    assert lines[3] == "virtual&#45;h100&#45;80gb; regression: 2, pass: 1"
    assert sum(line.startswith("| <code>") for line in lines) == 3
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "    - 1&#46;00 GiB of a&#124;b" in lines
    assert "    - next: recompute &#96;moe&#96; (7&#37; of a step)" in lines


def test_no_text_can_leave_its_place_in_the_summary(failed_results: Results) -> None:
    lines = summary(failed_results, [], "").splitlines()
    assert lines.count("</details>") == 2  # one of them is the failure's own
    begin, end = (n for n, line in enumerate(lines) if line == "````")
    assert lines[begin + 1 : end] == failed_results.tests[NODEID].failure.splitlines()
    outside = "\n".join(lines[:begin] + lines[end + 1 :])
    assert "<b>" not in outside
    assert not re.search(r"`|::", outside)


def test_a_summary_is_no_longer_than_its_room_and_says_what_is_left_out(measured: Make, results: MakeResults) -> None:
    tests = {f"t.py::test_{'x' * 50}_{n}": [measured(2 * GIB, gate=PeakGate(limit=GIB))] for n in range(300)}
    made = results(tests)
    for test in list(made.tests.values())[:100]:
        test.outcome, test.failure = "failed", "\N{SNOWMAN}" * 1000
    whole = len(summary(made, [], "").encode()) + 200
    for room in (whole, 200_000, 20_000, 1000, 100, 0, -5):
        text = summary(made, [], "", room)
        assert len(text.encode()) <= max(room, 0)
        assert ("are left out: a step's summary holds 1 MiB" in text) == (1000 <= room < whole)


# A session ------------------------------------------------------------------------------------------------------------

TESTS = """
    import pytest

    @pytest.mark.peak_memory(limit="1 MiB")
    def test_too_large(mbmem):
        mbmem.measure("recipe.yaml")

    @pytest.mark.peak_memory(limit="1 GiB")
    def test_fits(mbmem):
        mbmem.measure("recipe.yaml")
"""


@pytest.fixture
def on_github(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the step's summary; the project is the workspace."""
    summary_file = project.path / "summary.md"
    summary_file.write_text("of another tool\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.path))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary_file))
    project.makepyfile(TESTS)
    return summary_file


def commands_of(result: pytest.RunResult) -> list[tuple[str, dict[str, str], str]]:
    return [read_command(line) for line in result.outlines if line.startswith("::")]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_session_annotates_once_and_adds_to_the_summary(
    project: pytest.Pytester, on_github: Path, workers: str
) -> None:
    result = project.runpytest_subprocess("-n", workers)
    result.assert_outcomes(passed=1, failed=1)
    ((name, properties, message),) = commands_of(result)
    assert (name, properties) == (
        "error",
        {"file": "test_it.py", "line": "3", "title": "mbmem regression: test_too_large"},
    )
    assert message.startswith("peak allocated 64.00 MiB on rank 0 in build: 63.00 MiB over the limit")
    text = on_github.read_text()
    assert text.startswith("of another tool\n\n### Memory: 1 of 2 tests that measure failed\n")
    assert text.count("###") == 1


@pytest.mark.parametrize("off", ["--mbmem-ci=off", "ini", "elsewhere"])
def test_it_is_silent_where_it_should_be(
    project: pytest.Pytester, on_github: Path, monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    if off == "elsewhere":
        monkeypatch.delenv("GITHUB_ACTIONS")
    options = {"ini": ["-o", "mbmem_ci=off"], "elsewhere": []}.get(off, [off])
    result = project.runpytest(*options)
    assert commands_of(result) == []
    assert on_github.read_text() == "of another tool\n"


@pytest.mark.parametrize("option", [["--mbmem-ci=on"], ["-o", "mbmem_ci=on"]])
def test_another_mode_is_refused(project: pytest.Pytester, option: list[str]) -> None:
    result = project.runpytest(*option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *mbmem*ci: 'on' is not one of auto, off"])


def test_failed_tests_are_left_to_the_plugin_that_annotates_them(project: pytest.Pytester, on_github: Path) -> None:
    other = types.ModuleType(OTHER_ANNOTATOR)

    class Registers:
        def pytest_configure(self, config: pytest.Config) -> None:
            config.pluginmanager.register(other, OTHER_ANNOTATOR)

    result = project.runpytest(plugins=[Registers()])
    assert commands_of(result) == []
    assert "test&#95;too&#95;large" in on_github.read_text()


def test_a_test_that_passes_when_it_runs_again_leaves_no_error(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, on_github: Path
) -> None:
    """As pytest-rerunfailures runs it: reports of the first run have the outcome "rerun"."""
    runs_again(project, monkeypatch)
    project.makepyfile(
        """
        import pytest
        runs = []

        @pytest.mark.peak_memory(limit="65 MiB")
        @pytest.mark.parametrize("heals", [True, False])
        def test_x(mbmem, heals, monkeypatch):
            runs.append(heals)
            monkeypatch.setenv("FAKE_EXTRA_MIB", "0" if heals and runs.count(True) == 2 else "9")
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    assert [properties["title"] for _, properties, _ in commands_of(result)] == ["mbmem regression: test_x[False]"]
    assert "### Memory: 1 of 2 tests that measure failed" in on_github.read_text()


@pytest.mark.parametrize("place", ["nowhere/summary.md", ".", ""])
def test_a_summary_that_cannot_be_written_is_a_warning(
    project: pytest.Pytester, on_github: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", place and str(project.path / place))
    result = project.runpytest("-k", "fits")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.OK
    (warning,) = [line for line in result.outlines if "warning: " in line]
    assert warning.startswith("mbmem: warning: GITHUB_STEP_SUMMARY")


def test_a_full_summary_is_left_alone(project: pytest.Pytester, on_github: Path) -> None:
    full = "x" * github.ROOM
    on_github.write_text(full)
    project.runpytest().stdout.fnmatch_lines(["mbmem: warning: GITHUB_STEP_SUMMARY: * is full, *"])
    assert on_github.read_text() == full


def test_improvements_are_one_notice(
    project: pytest.Pytester, on_github: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(TESTS.replace('(limit="1 MiB")', "").replace('(limit="1 GiB")', ""))
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=2)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "-32")
    ((name, properties, message),) = commands_of(project.runpytest())
    assert (name, properties) == ("notice", {"title": "mbmem: improvements to record: 2"})
    assert message.splitlines() == [
        "test_it.py::test_too_large: 64.00 MiB -> 32.00 MiB (-50.00%)",
        "test_it.py::test_fits: 64.00 MiB -> 32.00 MiB (-50.00%)",
        "to record: pytest test_it.py::test_too_large test_it.py::test_fits --mbmem-update=changed",
    ]
    assert "test&#95;fits&#58; 64&#46;00 MiB &#45;&#62; 32&#46;00 MiB" in on_github.read_text()


def test_improvements_of_made_up_results_are_in_the_summary(measured: Make, results: MakeResults) -> None:
    made = results({"t.py::a": [measured(GIB, gate=PeakGate(), baseline=2 * GIB)]})
    text = summary(made, improvements(made), "pytest t.py::a --mbmem-update=changed")
    assert "### Memory: none of 1 tests that measure failed" in text
    assert "```\npytest t.py::a --mbmem-update=changed\n```" in text
