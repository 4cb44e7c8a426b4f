"""--mbmem-update and --mbmem-reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

MIB = 2**20

GATED = """
    import pytest

    @pytest.mark.peak_memory
    def test_x(mbmem):
        mbmem.measure("recipe.yaml")
"""


@pytest.fixture
def gated(project: pytest.Pytester) -> pytest.Pytester:
    project.makepyfile(GATED)
    return project


@pytest.fixture
def recorded(gated: pytest.Pytester) -> pytest.Pytester:
    """With a baseline of 64 MiB."""
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    return gated


def file_of(project: pytest.Pytester) -> Path:
    return project.path / "baselines/virtual-h100-80gb/test_it.yaml"


def figure(project: pytest.Pytester) -> dict[str, object]:
    figures = yaml.safe_load(file_of(project).read_text())["tests"]["test_x"]["metrics"]["allocated"]
    return {name: figures.get(name) for name in ("peak", "first", "updates", "reason")}


def set_seq_length(project: pytest.Pytester, length: int) -> None:
    recipe = project.path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seq_length: 64", f"seq_length: {length}"))


def test_without_it_nothing_is_written(gated: pytest.Pytester) -> None:
    gated.runpytest().assert_outcomes(failed=1)
    assert not gated.path.joinpath("baselines").exists()


def test_new_records_what_is_missing(gated: pytest.Pytester) -> None:
    result = gated.runpytest("--mbmem-update=new")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_x * accepted",
            "baselines written: *baselines/virtual-h100-80gb/test_it.yaml",
            "  test_x: new, 64.00 MiB",
        ]
    )
    assert figure(gated)["peak"] == 64 * MIB


def test_new_leaves_regressions_failing(recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    recorded.runpytest("--mbmem-update=new").assert_outcomes(failed=1)
    assert figure(recorded)["peak"] == 64 * MIB


def test_a_regression_says_how_it_can_be_accepted(recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    result = recorded.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: peak allocated is 8.68 MiB over what the baseline allows",
            "  measured *74.00 MiB (77594624 bytes)",
            "  baseline *64.00 MiB (67108864 bytes)",
            "  allowed *65.32 MiB (68492984 bytes): tolerance 0.50%, slack 1.00 MiB",
            "  change *+15.6*%, +10.00 MiB",
            '  pytest test_it.py::test_x --mbmem-update=changed --mbmem-reason "..."',
        ]
    )


def test_changed_is_the_default_and_records_a_regression_with_its_reason(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    result = recorded.runpytest("--mbmem-update", "--mbmem-reason=wider head")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*::test_x * 64.00 MiB * 74.00 MiB * +15.6*% * accepted", "  test_x: regression, 64.00 MiB -> 74.00 MiB"]
    )
    assert figure(recorded) == {"peak": 74 * MIB, "first": 64 * MIB, "updates": 1, "reason": "wider head"}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_regression_without_a_reason_fails_and_leaves_other_updates_alone(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    recorded.makepyfile(GATED + "\n    @pytest.mark.peak_memory\n    def test_y(mbmem): mbmem.measure('recipe.yaml')\n")
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    result = recorded.runpytest_subprocess("--mbmem-update=changed", "-n", workers)
    result.assert_outcomes(passed=1, failed=1)
    unsaid = "baselines not written, because nobody said why they rise (--mbmem-reason): 1"
    result.stdout.fnmatch_lines(["REGRESSION: *", "*--mbmem-reason*", "*test_y: new*", unsaid])
    assert figure(recorded)["peak"] == 64 * MIB
    recorded.runpytest("--mbmem-update=changed", "--mbmem-reason=because").assert_outcomes(passed=2)
    assert figure(recorded)["peak"] == 74 * MIB


def test_a_small_rise_without_a_reason_is_refused_as_a_whole(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_of(recorded).read_text()
    monkeypatch.setenv("FAKE_EXTRA_MIB", "1")
    result = recorded.runpytest("--mbmem-update=all")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["mbmem: error: *test_x*give --mbmem-reason * No baseline was changed"])
    assert file_of(recorded).read_text() == before


def test_a_changed_recipe_is_stale_and_not_a_regression(recorded: pytest.Pytester) -> None:
    set_seq_length(recorded, 128)
    result = recorded.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "STALE: the baseline of peak allocated is of another recipe",
            "  - the recipe changed *: training.seq_length: 64 -> 128",
            "  pytest test_it.py::test_x --mbmem-update=changed",
        ]
    )
    recorded.runpytest("--mbmem-update=new").assert_outcomes(failed=1)
    recorded.runpytest("--mbmem-update=changed").assert_outcomes(passed=1)
    assert figure(recorded) == {"peak": 128 * MIB, "first": 128 * MIB, "updates": 0, "reason": None}


def test_an_improvement_passes_and_can_be_kept_without_a_reason(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXTRA_MIB", "-20")
    result = recorded.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_x * 44.00 MiB * -31.25% * improvement"])
    recorded.runpytest("--mbmem-update=changed").assert_outcomes(passed=1)
    assert figure(recorded)["peak"] == 44 * MIB


def test_all_refreshes_what_changed_within_the_tolerance(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_EXTRA_MIB", "1")
    recorded.runpytest("--mbmem-update=changed").assert_outcomes(passed=1)
    assert figure(recorded)["peak"] == 64 * MIB
    recorded.runpytest("--mbmem-update=all", "--mbmem-reason=new torch").assert_outcomes(passed=1)
    assert figure(recorded)["peak"] == 65 * MIB


def test_an_update_that_changes_nothing_leaves_the_file_alone(recorded: pytest.Pytester) -> None:
    before = file_of(recorded).stat().st_mtime_ns
    result = recorded.runpytest("--mbmem-update=all")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("baselines written*")
    assert file_of(recorded).stat().st_mtime_ns == before


def test_all_replaces_a_damaged_file_with_a_reason_and_changed_does_not(recorded: pytest.Pytester) -> None:
    file_of(recorded).write_text("format: 1\n")
    for arguments in (["--mbmem-update=changed"], ["--mbmem-update=new"], ["--mbmem-update=all"]):
        assert recorded.runpytest(*arguments).ret == pytest.ExitCode.TESTS_FAILED
        assert file_of(recorded).read_text() == "format: 1\n"
    recorded.runpytest("--mbmem-update=all", "--mbmem-reason=damaged").assert_outcomes(passed=1)
    assert figure(recorded)["peak"] == 64 * MIB


def test_a_test_that_fails_otherwise_is_not_recorded(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory

        def test_body(mbmem):
            mbmem.measure("recipe.yaml")
            assert False

        @pytest.mark.peak_memory(limit="1 MiB", metric="reserved")
        def test_other_gate(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.fixture
        def broken():
            yield
            assert False

        def test_teardown(mbmem, broken):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest("--mbmem-update=all")
    result.assert_outcomes(failed=2, passed=1, errors=1)
    assert not project.path.joinpath("baselines").exists()


def test_only_tests_that_run_are_updated(recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.makepyfile(GATED + "\n    @pytest.mark.peak_memory\n    def test_y(mbmem): mbmem.measure('recipe.yaml')\n")
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    arguments = ["--mbmem-update=all", "--mbmem-reason=x", "-k", "test_y"]
    recorded.runpytest(*arguments).assert_outcomes(passed=1, deselected=1)
    assert figure(recorded)["peak"] == 64 * MIB
    assert "test_y" in file_of(recorded).read_text()


def test_under_xdist_every_test_is_written_once(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory
        @pytest.mark.parametrize("n", range(24))
        def test_x(mbmem, n):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest_subprocess("--mbmem-update=new", "-n", "2")
    result.assert_outcomes(passed=24)
    assert result.stdout.str().count("baselines written:") == 1
    assert set(yaml.safe_load(file_of(project).read_text())["tests"]) == {f"test_x[{n}]" for n in range(24)}


def test_keys_are_the_same_with_and_without_xdist(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory
        @pytest.mark.parametrize("n", ["a@b", "c"])
        def test_x(mbmem, n):
            mbmem.measure("recipe.yaml")

        @pytest.mark.peak_memory
        def test_y(mbmem):
            mbmem.measure("recipe.yaml", name="named")
        """
    )
    with project.path.joinpath("conftest.py").open("a") as conftest:  # the mark belongs to xdist, which may be off
        conftest.write("\n    config.addinivalue_line('markers', 'xdist_group(name)')\n")
        conftest.write("\ndef pytest_itemcollected(item):\n    item.add_marker(pytest.mark.xdist_group('g'))\n")
    grouped = ["-n", "2", "--dist", "loadgroup"]
    project.runpytest_subprocess("--mbmem-update=new", *grouped).assert_outcomes(passed=3)
    tests = yaml.safe_load(file_of(project).read_text())["tests"]
    assert set(tests) == {"test_x[a@b]", "test_x[c]", "test_y@named"}
    result = project.runpytest("-p", "no:xdist")
    result.assert_outcomes(passed=3)
    result.stdout.no_fnmatch_line("*without a test*")
    again = project.runpytest_subprocess(*grouped)
    again.assert_outcomes(passed=3)
    again.stdout.no_fnmatch_line("*without a test*")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--mbmem-update", "sub/"],
            "*--mbmem-update: 'sub/' is not one of new, changed, all; * --mbmem-update=changed sub/",
        ),
        (["--mbmem-update=everything"], "*--mbmem-update: 'everything' is not one of new, changed, all*"),
        (["--mbmem-reason=x"], "*--mbmem-reason: nothing is updated; give --mbmem-update too"),
        (["--mbmem-update", "--mbmem-reason= "], "*--mbmem-reason: the reason is empty"),
    ],
)
def test_wrong_values_are_refused_before_anything_runs(
    gated: pytest.Pytester, arguments: list[str], message: str
) -> None:
    result = gated.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert not gated.path.joinpath("baselines").exists()
