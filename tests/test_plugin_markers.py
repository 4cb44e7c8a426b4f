"""The `peak_memory` marker: verdicts that a user sees, precedence, and mistakes."""

from __future__ import annotations

import pytest

MIB = 2**20

GATED = """
    import pytest

    @pytest.mark.peak_memory(limit="100 MiB")
    def test_fits(mbmem):
        mbmem.measure("recipe.yaml")
"""


def add_to_recipe(project: pytest.Pytester, line: str) -> None:
    with project.path.joinpath("recipe.yaml").open("a") as recipe:
        recipe.write(f"{line}\n")


def test_a_peak_below_the_limit_passes(project: pytest.Pytester) -> None:
    project.makepyfile(GATED)
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_fits * <= 100.00 MiB * 64.00 MiB * 0 * build * pass"])


def test_a_peak_above_the_limit_fails_with_the_verdict_first(project: pytest.Pytester) -> None:
    project.makepyfile(GATED.replace("100 MiB", "60 MiB"))
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_fits _*",
            "REGRESSION: peak allocated is 4.00 MiB over the limit",
            "",
            "  measured      64.00 MiB (67108864 bytes)",
            "  limit         60.00 MiB (62914560 bytes)",
            "  worst rank  0 (tp=0 pp=0), stands for 1 rank of 2",
            "  phase       build",
            "  device      virtual-h100-80gb, capacity 79.11 GiB",
            "FAILED *::test_fits - Failed: REGRESSION: peak allocated is 4.00 MiB over the limit",
        ]
    )
    result.stdout.no_fnmatch_line("*session.py*")


def test_a_phase_is_judged_by_itself(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="40 MiB", phase="step-2/backward")
        def test_backward(mbmem):
            mbmem.measure("recipe.yaml", name="small")

        @pytest.mark.peak_memory(limit="1 MiB", phase="optimizer")
        def test_no_such_phase(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: peak allocated in step-2/backward of 'small' is 24.00 MiB over the limit",
            "phase='optimizer' selects nothing that rank 0 went through; it has: build, step-2/backward",
        ]
    )


WRONG_ARGUMENTS = [
    ("limt='1 GiB'", "*peak_memory() has no argument 'limt'; did you mean 'limit'?*"),
    ("limit='1 GiBB'", "*peak_memory(limit=...): '1 GiBB' is not a size*"),
    ("limit='0 B'", "*peak_memory(limit=...): '0 B' is not more than 0 bytes"),
    ("metric='resident'", "*peak_memory(metric=...): 'resident' is not one of allocated, reserved"),
    ("phase='bakward'", "*peak_memory(): phase='bakward' is not one of*"),
    ("phase=2", "*peak_memory(phase=...): 2 is not a text*"),
    ("tolerance=3", "*peak_memory(tolerance=...): 3*"),
    ("tolerance='100%'", "*peak_memory(tolerance=...): '100%' would let the peak double*"),
    ("slack='2'", "*peak_memory(slack=...): '2' is not a size*"),
    ("limit='1 GiB', tolerance='1%'", "*a limit is absolute; remove tolerance*"),
    ("1, 2", "*takes one positional argument at most*"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS, ids=[a for a, _ in WRONG_ARGUMENTS])
def test_a_wrong_marker_is_an_error_of_collecting(project: pytest.Pytester, arguments: str, message: str) -> None:
    project.makepyfile(f"import pytest\n@pytest.mark.peak_memory({arguments})\ndef test_x(mbmem): pass")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting*", message, "*1 error*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_every_wrong_marker_of_a_module_is_named(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limt=1)
        def test_one(mbmem): pass

        @pytest.mark.peak_memory(slak=1)
        def test_two(): pass
        """
    )
    project.runpytest().stdout.fnmatch_lines(["test_it.py::test_one: *'limt'*", "test_it.py::test_two: *'slak'*"])


def test_a_wrong_marker_is_an_error_with_xdist_too(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.peak_memory(limt=1)\ndef test_x(mbmem): pass")
    result = project.runpytest_subprocess("-n", "2")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["*ERROR collecting*", "*has no argument 'limt'*"])


def test_a_marker_that_a_conftest_adds_counts(project: pytest.Pytester) -> None:
    with project.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write("\ndef pytest_collection_modifyitems(items):\n")
        conftest.write("    items[0].add_marker(pytest.mark.peak_memory(limit='1 MiB'))\n")
        conftest.write("    items[1].add_marker(pytest.mark.peak_memory(limt=1))\n")
    project.makepyfile(
        "def test_x(mbmem): mbmem.measure('recipe.yaml')\ndef test_y(mbmem): mbmem.measure('recipe.yaml')"
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines_random(
        ["REGRESSION: * over the limit", "test_it.py::test_y: peak_memory() has no argument 'limt'*"]
    )


def test_a_test_cannot_use_both_fixtures(project: pytest.Pytester) -> None:
    project.makepyfile("def test_x(mbmem, megatron_model): pass")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*test_x: uses mbmem, * and megatron_model, *; use one of them"])


def test_markers_of_module_and_class_hold_for_every_test_and_the_closest_one_wins(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 MiB")

        def test_module(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.mark.peak_memory(limit="70 MiB")
        @pytest.mark.peak_memory(limit="100 MiB", metric="reserved")
        class TestClass:
            def test_class(self, mbmem):
                mbmem.measure("recipe.yaml")

            @pytest.mark.peak_memory(limit="200 MiB", metric="reserved")
            @pytest.mark.parametrize("n", [1, 2])
            def test_own(self, mbmem, n):
                mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest("-rA")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "REGRESSION: peak allocated is 63.00 MiB over the limit",
            "REGRESSION: peak reserved is 28.00 MiB over the limit",
            "*::TestClass::test_class * <= 70.00 MiB * pass",
            "*::TestClass::test_class reserved * <= 100.00 MiB * regression",
            "PASSED *::TestClass::test_own[[]1[]]",
        ]
    )


def test_several_gates_that_fail_are_all_told(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="60 MiB")
        @pytest.mark.peak_memory(metric="reserved")
        def test_x(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(
        ["REGRESSION: peak allocated is 4.00 MiB over the limit", "MISSING: peak reserved has no baseline on *"]
    )


def test_a_failed_gate_meets_xfail(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.xfail(reason="known")
        @pytest.mark.peak_memory(limit="1 MiB")
        def test_expected(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.mark.xfail(strict=True, reason="known")
        @pytest.mark.peak_memory(limit="100 MiB")
        def test_unexpected(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.mark.xfail(raises=KeyError)
        @pytest.mark.peak_memory(limit="1 MiB")
        def test_for_another_reason(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(xfailed=1, failed=2)
    result.stdout.fnmatch_lines(["[[]XPASS(strict)[]] known", "*::test_expected * regression"])


def test_a_skipped_test_is_not_judged(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 MiB")

        @pytest.mark.skip
        def test_by_mark(mbmem):
            mbmem.measure("recipe.yaml")

        def test_by_itself(mbmem):
            mbmem.measure("recipe.yaml")
            pytest.skip("not today")
        """
    )
    project.runpytest().assert_outcomes(skipped=2)


def test_a_marked_test_that_measures_nothing_fails(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.peak_memory\ndef test_x(mbmem): pass")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured: *test_x has the peak_memory marker, but never called*"])


def test_a_failing_body_is_reported_as_itself(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="10 MiB")
        def test_x(mbmem):
            assert mbmem.measure("recipe.yaml").peak() == 1
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert 67108864 == 1", "*::test_x * regression"])
    result.stdout.no_fnmatch_line("REGRESSION*")


@pytest.mark.parametrize(
    ("name", "headline", "verdict"),
    [
        ("oom", "OUT OF MEMORY: the recipe does not fit NVIDIA H100 80GB HBM3", "out of memory"),
        ("dies", "INVALID: peak allocated could not be measured", "invalid"),
        ("hangs", "INVALID: peak allocated could not be measured", "invalid"),
        ("raises", "INVALID: peak allocated could not be measured", "invalid"),
    ],
)
def test_a_measurement_that_failed_does_not_pass(
    project: pytest.Pytester, name: str, headline: str, verdict: str
) -> None:
    add_to_recipe(project, f"name: {name}")
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 GiB")

        def test_raises(mbmem):
            mbmem.measure("recipe.yaml")

        def test_may_fail(mbmem):
            mbmem.measure("recipe.yaml", may_fail=True)
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "*_ test_may_fail _*",
            headline,
            "  rank * 1 (tp=0 pp=1), stands for 1 rank of 2",
            "  phase * step-1/forward",
            f"*::test_raises * <= 1.00 GiB * 1 * step-1/forward * {verdict}",
            f"*::test_may_fail * <= 1.00 GiB * 1 * step-1/forward * {verdict}",
        ]
    )
    assert result.stdout.str().count(headline) == 2  # the failure and its line in the short summary


def test_a_damaged_baseline_file_fails_the_test_by_file_and_line(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.peak_memory\ndef test_x(mbmem): mbmem.measure('recipe.yaml')")
    file = project.path / "baselines/virtual-h100-80gb/test_it.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("<<<<<<< HEAD\nformat: 1\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*_ test_x _*", "*baselines/virtual-h100-80gb/test_it.yaml:1: *"])
    assert file.read_text() == "<<<<<<< HEAD\nformat: 1\n"


def test_the_lines_of_a_missing_baseline_can_be_pasted(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.peak_memory\ndef test_x(mbmem): mbmem.measure('recipe.yaml')")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "MISSING: peak allocated has no baseline on virtual-h100-80gb",
            "  pytest test_it.py::test_x --mbmem-update=new",
            "or paste into *baselines/virtual-h100-80gb/test_it.yaml, as the whole file:",
            "        peak: 67108864  # 64.00 MiB",
        ]
    )
    text = result.stdout.str()
    start = text.index("# Accepted peaks")
    file = project.path / "baselines/virtual-h100-80gb/test_it.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text[start : text.index("=====", start)])
    project.runpytest().assert_outcomes(passed=1)
