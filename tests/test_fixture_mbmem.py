"""`mbmem.measure`: what it takes, what it gives, and how it fails."""

from __future__ import annotations

import pytest


def name_recipe(project: pytest.Pytester, name: str) -> None:
    with project.path.joinpath("recipe.yaml").open("a") as recipe:
        recipe.write(f"name: {name}\n")


def test_a_recipe_is_given_as_object_mapping_or_path_beside_the_test(project: pytest.Pytester) -> None:
    folder = project.mkdir("sub")
    project.path.joinpath("recipe.yaml").rename(folder / "recipe.yaml")
    folder.joinpath("test_forms.py").write_text(
        """
from pathlib import Path
from pytest_mbmem import Model, Recipe, Training

SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}

def test_forms(mbmem):
    forms = [
        Recipe(model=Model(**SHAPE), training=Training(seq_length=64)),
        {"model": SHAPE, "training": {"seq_length": 64}},
        "recipe.yaml",
        Path("recipe.yaml"),
    ]
    assert {mbmem.measure(form).recipe_digest for form in forms} == {forms[0].digest}
"""
    )
    project.runpytest().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("'nowhere.yaml'", "*nowhere.yaml: *"),
        ("{'modell': {}}", "test_it.py::test_x: recipe: *modell*"),
        ("42", "*mbmem.measure(42): allowed are a Recipe, the path of a YAML file, or a mapping*"),
        ("'recipe.yaml', name=''", "*mbmem.measure(name=''): allowed is text without '@'"),
        ("'recipe.yaml', name='a@b'", "*mbmem.measure(name='a@b'): allowed is text without '@'"),
        ("'recipe.yaml', name=3", "*mbmem.measure(name=3): allowed is text without '@'"),
    ],
)
def test_a_mistake_is_said_in_one_message(project: pytest.Pytester, call: str, message: str) -> None:
    project.makepyfile(f"def test_x(mbmem):\n    mbmem.measure({call})")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*_ test_x _*", message])
    result.stdout.no_fnmatch_line("*fixtures.py:*")
    result.stdout.no_fnmatch_line("*session.py:*")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("oom", "OutOfMemory", "out of memory on rank 1 in step-1/forward (NVIDIA H100*): CUDA out of memory. Tried*"),
        ("dies", "MeasurementFailed", "died on rank 1 in step-1/forward (*): the worker was killed by SIGKILL"),
        ("hangs", "MeasurementFailed", "timeout on rank 1 in step-1/forward (*): no result within 600 s"),
        ("raises", "MeasurementFailed", "the worker raised an error on rank 1 in step-1/forward (*): Traceback*"),
    ],
    ids=["oom", "dies", "hangs", "raises"],
)
def test_a_measurement_that_fails_raises_at_the_users_line(
    project: pytest.Pytester, name: str, error: str, message: str
) -> None:
    name_recipe(project, name)
    project.makepyfile("def test_x(mbmem):\n    mbmem.measure('recipe.yaml')")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([">*mbmem.measure('recipe.yaml')", f"E *{error}: {message}"])
    result.stdout.no_fnmatch_line("*fixtures.py:*")
    result.stdout.no_fnmatch_line("*session.py:*")


def test_a_failure_can_be_expected(project: pytest.Pytester) -> None:
    name_recipe(project, "oom")
    project.makepyfile(
        """
        import pytest
        from pytest_mbmem.errors import OutOfMemory

        def test_raises(mbmem):
            with pytest.raises(mbmem.OutOfMemory, match="Tried to allocate 2.00 GiB") as caught:
                mbmem.measure("recipe.yaml")
            assert caught.type is OutOfMemory

        def test_may_fail(mbmem):
            failure = mbmem.measure("recipe.yaml", may_fail=True).failure
            assert (failure.kind, failure.rank, failure.name) == ("out of memory", 1, "step-1/forward")

        @pytest.mark.xfail(raises=OutOfMemory, strict=True)
        def test_xfail(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(passed=2, xfailed=1)
    result.stdout.fnmatch_lines(["*::test_may_fail * out of memory * 1 * step-1/forward * -"])


def test_a_second_measurement_against_a_baseline_needs_a_name(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.peak_memory

        def test_without(mbmem):
            mbmem.measure("recipe.yaml")
            mbmem.measure("recipe.yaml")

        def test_same(mbmem):
            mbmem.measure("recipe.yaml", name="a")
            mbmem.measure("recipe.yaml", name="a")

        def test_with(mbmem):
            mbmem.measure("recipe.yaml")
            mbmem.measure("recipe.yaml", name="a")

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_limit(mbmem):
            mbmem.measure("recipe.yaml")
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest("--mbmem-update=new")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines_random(
        ["*test_without: a second measurement without a name; *", "*test_same: a second measurement named 'a'; *"]
    )
    result.stdout.fnmatch_lines(["*::test_with@a * accepted"])
    stored = project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml").read_text()
    assert "\n  test_with:" in stored
    assert "\n  test_with@a:" in stored
    assert "test_same" not in stored
    result = project.runpytest("-k", "test_with and not without")
    result.assert_outcomes(passed=1, deselected=3)


def test_the_device_is_known_without_measuring(project: pytest.Pytester) -> None:
    project.makepyfile("def test_x(mbmem): assert mbmem.device.key == 'virtual-h100-80gb' and mbmem.device.virtual")
    project.runpytest().assert_outcomes(passed=1)


def test_mbmem_may_come_by_another_fixture_or_by_name(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.fixture
        def measured(mbmem):
            return mbmem.measure("recipe.yaml")

        @pytest.mark.peak_memory(limit="1 MiB")
        def test_by_fixture(measured): pass

        @pytest.mark.usefixtures("measured")
        @pytest.mark.peak_memory(limit="1 MiB")
        class TestIt:
            def test_by_mark(self): pass

        def test_by_name(request):
            request.getfixturevalue("mbmem").measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(["*::test_by_name * 64.00 MiB * -"])


def test_mbmem_belongs_to_one_test(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="module")
        def measured(mbmem): pass

        def test_x(measured): pass
        """
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*ScopeMismatch*mbmem*"])
