"""What the plugin does to a session: header, table, JUnit properties, xdist, and nothing where it has no business."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest
from runs_again import runs_again

MIB = 2**20

GATED = """
    import pytest

    @pytest.mark.peak_memory(limit="100 MiB")
    def test_fits(mbmem):
        mbmem.measure("recipe.yaml")
"""


def test_the_header_names_device_versions_and_baselines_where_the_plugin_is_in_use(project: pytest.Pytester) -> None:
    project.makepyfile("def test_x(): pass")
    project.runpytest().stdout.no_fnmatch_line("mbmem *:*")
    project.path.joinpath("baselines").mkdir()
    header = [
        "mbmem device: virtual-h100-80gb, a virtual NVIDIA H100 80GB HBM3",
        "mbmem versions: python 3.*, torch 2.*, megatron-core 0.*",
        "mbmem baselines: *baselines/virtual-h100-80gb",
    ]
    project.runpytest().stdout.fnmatch_lines(header)


def test_a_session_without_measuring_tests_loads_almost_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_loaded():
            ours = {name.removeprefix("pytest_mbmem.") for name in sys.modules if name.startswith("pytest_mbmem.")}
            assert ours == {"errors", "fixtures", "options", "plugin", "session"}
            assert not {"torch", "megatron", "yaml"} & set(sys.modules)
        """
    )
    # without other plugins, which import what they like
    others = ["-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:randomly"]
    pytester.runpytest_subprocess(*others).assert_outcomes(passed=1)


def test_importing_the_package_imports_no_part_of_it() -> None:
    code = "import sys, pytest_mbmem; print([n for n in sys.modules if n.startswith(('pytest_mbmem.', 'torch'))])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_public_names_are_there_when_asked_for() -> None:
    import pytest_mbmem

    for name in pytest_mbmem.__all__:
        assert getattr(pytest_mbmem, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Recipee'"):
        pytest_mbmem.Recipee  # noqa: B018


def test_an_unmarked_test_that_measures_is_listed_and_not_judged(project: pytest.Pytester) -> None:
    project.makepyfile("def test_x(mbmem): mbmem.measure('recipe.yaml')")
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_x * - * 64.00 MiB * - * 0 * build * -"])


def test_no_line_of_the_table_is_wider_than_the_terminal(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "test_with_a_name_" + "that_goes_on_" * 9 + "to_the_end"
    project.makepyfile(GATED.replace("test_fits", name))
    for width in (120, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        table = [line for line in project.runpytest().stdout.lines if line.endswith("  pass")]
        assert len(table) == 1
        assert len(table[0]) <= width
        assert "to_the_end" in table[0]


def test_a_session_without_measuring_tests_has_no_table(project: pytest.Pytester) -> None:
    project.makepyfile("def test_x(): pass")
    project.runpytest().stdout.no_fnmatch_line("*= memory =*")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_figures_are_junit_properties(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="100 MiB")
        @pytest.mark.peak_memory(limit="120 MiB", metric="reserved")
        def test_x(mbmem, request):
            request.node.user_properties.append(("of_the_test", "kept"))
            mbmem.measure("recipe.yaml")
        """
    )
    arguments = ["-n", workers, "--junitxml=j.xml", "-o", "junit_family=xunit2", "-W", "error"]
    result = project.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1, warnings=0)
    found = ElementTree.parse(project.path / "j.xml").iterfind(".//testcase/properties/property")
    figures = {p.get("name"): p.get("value") for p in found}
    assert len(figures.pop("mbmem_recipe_digest") or "") == 16
    assert figures == {
        "of_the_test": "kept",
        "mbmem_test": "test_it.py::test_x",
        "mbmem_device": "virtual-h100-80gb",
        "mbmem_peak_allocated_bytes": str(64 * MIB),
        "mbmem_peak_reserved_bytes": str(128 * MIB),
        "mbmem_peak_allocated_bytes_by_rank": f"0:{64 * MIB} 1:{32 * MIB}",
        "mbmem_host_peak_bytes": "0",
        "mbmem_flops_per_step": "1000",
        "mbmem_worst_rank": "0",
        "mbmem_phase": "build",
        "mbmem_verdict": "pass",
        "mbmem_measured_bytes": str(64 * MIB),
        "mbmem_limit_bytes": str(100 * MIB),
        "mbmem_verdict@reserved": "regression",
        "mbmem_measured_bytes@reserved": str(128 * MIB),
        "mbmem_limit_bytes@reserved": str(120 * MIB),
    }


def test_the_controller_prints_the_table_of_all_xdist_workers(project: pytest.Pytester) -> None:
    tests = GATED.replace(
        "def test_fits(mbmem)", "@pytest.mark.parametrize('n', range(4))\n    def test_fits(mbmem, n)"
    )
    project.makepyfile(tests)
    result = project.runpytest_subprocess("-n", "2")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines_random([f"*::test_fits[[]{n}[]] * 64.00 MiB * pass" for n in range(4)])
    assert result.stdout.str().count("= memory =") == 1


def test_collect_only_measures_and_writes_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(GATED)
    result = project.runpytest("--collect-only", "--mbmem-json=o.json", "--mbmem-update=all")
    result.stdout.fnmatch_lines(["*Function test_fits*"])
    assert not project.path.joinpath("o.json").exists()
    assert not project.path.joinpath("baselines").exists()


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only"])
def test_tests_are_not_run_where_only_their_setup_is_asked_for(project: pytest.Pytester, option: str) -> None:
    project.makepyfile(
        "import pytest\n@pytest.mark.peak_memory\ndef test_x(): assert False\ndef test_y(mbmem): assert False"
    )
    result = project.runpytest(option)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*test_it.py::test_x*", "*SETUP*mbmem*", "*test_it.py::test_y*"])


def test_a_test_that_runs_again_is_listed_once_with_its_last_figures(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pytest-rerunfailures does it."""
    runs_again(project, monkeypatch)
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="100 MiB")
        @pytest.mark.peak_memory(metric="reserved")
        def test_fits(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest("--mbmem-update=new")
    rows = [line for line in result.stdout.lines if "test_fits " in line and " pass" in line]
    assert len(rows) == 1
    assert "64.00 MiB" in rows[0]
    assert "peak: 134217728" in project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml").read_text()


def test_reports_carry_differences_beyond_two_gib_to_xdists_controller(pytestconfig: pytest.Config) -> None:
    """execnet refuses whole numbers below -2**31."""
    dumps = pytest.importorskip("execnet").gateway_base.dumps_internal
    report = pytest.TestReport(
        "t.py::test",
        ("t.py", 0, "test"),
        {},
        "passed",
        None,
        "call",
        user_properties=[("mbmem_saved_bytes", -(2**33)), ("someone's", 5)],
        mbmem={"change": -(2**33)},
    )
    data = pytestconfig.hook.pytest_report_to_serializable(config=pytestconfig, report=report)
    assert dumps(data)
    received = pytestconfig.hook.pytest_report_from_serializable(config=pytestconfig, data=data)
    assert received.mbmem == {"change": -(2**33)}
    assert received.user_properties == [("mbmem_saved_bytes", str(-(2**33))), ("someone's", 5)]
