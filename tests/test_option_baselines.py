"""--mbmem-baselines, mbmem_baselines, mbmem_tolerance, mbmem_slack, and baselines whose tests are gone."""

from __future__ import annotations

import pytest

GATED = "import pytest\n@pytest.mark.peak_memory\ndef {name}(mbmem): mbmem.measure('recipe.yaml')\n"


@pytest.fixture
def gated(project: pytest.Pytester) -> pytest.Pytester:
    project.path.joinpath("test_a.py").write_text(GATED.format(name="test_one") + GATED.format(name="test_two"))
    project.path.joinpath("test_b.py").write_text(GATED.format(name="test_three"))
    return project


def ini(project: pytest.Pytester, **keys: str) -> None:
    with project.path.joinpath("tox.ini").open("a") as file:
        file.writelines(f"{key} = {value}\n" for key, value in keys.items())


def test_the_folder_is_chosen_by_option_or_ini_key(gated: pytest.Pytester) -> None:
    ini(gated, mbmem_baselines="kept/by-ini")
    result = gated.runpytest("--mbmem-update=new")
    result.stdout.fnmatch_lines(["mbmem baselines: *kept/by-ini/virtual-h100-80gb"])
    assert gated.path.joinpath("kept/by-ini/virtual-h100-80gb/test_a.yaml").is_file()
    gated.runpytest("--mbmem-update=new", "--mbmem-baselines=other").assert_outcomes(passed=3)
    assert gated.path.joinpath("other/virtual-h100-80gb/test_b.yaml").is_file()


def test_an_option_is_relative_to_the_working_folder_and_an_ini_key_to_its_file(
    gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    ini(gated, mbmem_baselines="kept")
    monkeypatch.chdir(gated.mkdir("sub"))
    gated.runpytest("--mbmem-update=new", "..").assert_outcomes(passed=3)
    assert gated.path.joinpath("kept/virtual-h100-80gb/test_a.yaml").is_file()
    gated.runpytest("--mbmem-update=new", "--mbmem-baselines=kept", "..").assert_outcomes(passed=3)
    assert gated.path.joinpath("sub/kept/virtual-h100-80gb/test_a.yaml").is_file()


def test_the_file_of_a_module_in_a_folder_is_in_a_folder(project: pytest.Pytester) -> None:
    folder = project.mkdir("sub")
    project.path.joinpath("recipe.yaml").rename(folder / "recipe.yaml")
    folder.joinpath("test_a.py").write_text(GATED.format(name="test_one"))
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    assert project.path.joinpath("baselines/virtual-h100-80gb/sub/test_a.yaml").is_file()


@pytest.mark.parametrize(
    ("value", "message"), [("recipe.yaml", "*recipe.yaml is not a folder"), ("", "the path is empty")]
)
def test_a_wrong_folder_is_refused(gated: pytest.Pytester, value: str, message: str) -> None:
    result = gated.runpytest(f"--mbmem-baselines={value}", "--mbmem-update=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --mbmem-baselines: {message}"])
    assert not gated.path.joinpath("baselines").exists()


def test_tolerance_and_slack_of_the_ini_file_hold_where_a_marker_names_none(
    gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "8")
    gated.runpytest().assert_outcomes(failed=3)
    strict = GATED.format(name="test_three").replace("peak_memory", "peak_memory(tolerance='1%')")
    gated.path.joinpath("test_b.py").write_text(strict)
    ini(gated, mbmem_tolerance="10%", mbmem_slack="2 MiB")
    gated.runpytest().assert_outcomes(passed=2, failed=1)


def run(project: pytest.Pytester, arguments: list[str]) -> pytest.RunResult:
    return project.runpytest_subprocess(*arguments) if "-n" in arguments else project.runpytest(*arguments)


# Baselines without a test -----------------------------------------------------------------------------------------


ORPHANS = ["baselines without a test*", "  *baselines/virtual-h100-80gb/test_a.yaml:*: test_two"]


@pytest.fixture
def without_test_two(gated: pytest.Pytester) -> pytest.Pytester:
    """Three baselines were recorded, then test_two was removed."""
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    gated.path.joinpath("test_a.py").write_text(GATED.format(name="test_one"))
    return gated


@pytest.mark.parametrize("arguments", [[], ["."], ["-n", "2"]], ids=" ".join)
def test_a_baseline_without_a_test_is_named_when_all_tests_run(
    without_test_two: pytest.Pytester, arguments: list[str]
) -> None:
    result = run(without_test_two, arguments)
    assert result.ret == 0
    result.stdout.fnmatch_lines(ORPHANS)
    assert result.stdout.str().count("test_two") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["test_b.py"],
        ["test_a.py"],
        ["test_a.py::test_one", "test_b.py"],
        ["-k", "three"],
        ["-m", "not peak_memory"],
        ["--deselect", "test_a.py::test_one"],
        ["-n", "2", "-k", "one"],
        ["-n", "2", "test_a.py"],
        ["--ignore", "test_a.py"],
    ],
    ids=" ".join,
)
def test_a_baseline_is_not_missed_when_only_some_tests_run(
    without_test_two: pytest.Pytester, arguments: list[str]
) -> None:
    result = run(without_test_two, arguments)
    assert result.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    result.stdout.no_fnmatch_line("*without a test*")


def test_a_baseline_is_not_missed_when_only_failed_tests_run(gated: pytest.Pytester) -> None:
    gated.path.joinpath("tox.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    with gated.path.joinpath("test_a.py").open("a") as file:
        file.write("def test_bad(): assert False\n")
    gated.runpytest().assert_outcomes(passed=3, failed=1)
    result = gated.runpytest("--lf")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*without a test*")


def test_testpaths_count_as_all_tests(without_test_two: pytest.Pytester) -> None:
    without_test_two.path.joinpath("test_b.py").rename(without_test_two.mkdir("elsewhere") / "test_b.py")
    ini(without_test_two, testpaths="test_a.py")
    result = without_test_two.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([ORPHANS[0], ORPHANS[1], "  *test_b.yaml:*: test_three"])


def test_a_module_outside_of_testpaths_keeps_its_baselines(without_test_two: pytest.Pytester) -> None:
    ini(without_test_two, testpaths="test_a.py")
    result = without_test_two.runpytest()
    result.stdout.fnmatch_lines(ORPHANS)
    result.stdout.no_fnmatch_line("*test_three*")


def test_a_module_that_is_gone_is_named_and_so_is_the_last_one(gated: pytest.Pytester) -> None:
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    gated.path.joinpath("test_b.py").unlink()
    line = "  *baselines/virtual-h100-80gb/test_b.yaml:*: test_three"
    gated.runpytest("test_a.py").stdout.no_fnmatch_line("*without a test*")
    gated.runpytest().stdout.fnmatch_lines(["baselines without a test*", line])
    gated.path.joinpath("test_a.py").write_text("def test_plain(): pass\n")
    result = gated.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["baselines without a test*", "  *: test_one", "  *: test_two", line])


def test_a_named_measurement_belongs_to_its_test(gated: pytest.Pytester) -> None:
    gated.path.joinpath("test_b.py").write_text(
        "import pytest\n@pytest.mark.peak_memory\ndef test_three(mbmem): mbmem.measure('recipe.yaml', name='control')\n"
    )
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    gated.runpytest().stdout.no_fnmatch_line("*without a test*")


def test_nothing_is_missed_of_a_module_that_cannot_be_collected(gated: pytest.Pytester) -> None:
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=3)
    gated.path.joinpath("test_b.py").write_text("import nothing_of_that_name\n")
    result = gated.runpytest("--continue-on-collection-errors")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.no_fnmatch_line("*without a test*")
