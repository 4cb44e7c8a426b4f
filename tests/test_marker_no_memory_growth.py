"""The `no_memory_growth` marker: what it runs, what a user reads, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest

from pytest_mbmem.errors import MeasurementFailed
from pytest_mbmem.growth import Growth, GrowthRule, Holder, RankGrowth, Trace
from pytest_mbmem.measure import growth_runs
from pytest_mbmem.recipe import Recipe

MARKED = """
    import pytest

    @pytest.mark.no_memory_growth
    def test_x(mbmem):
        mbmem.measure("recipe.yaml")
"""


class FakeRuns:
    """Stands in for `measure_growth`: what it was called with, and growth by as much as hidden_dropout says, in MiB."""

    def __init__(self) -> None:
        self.calls: list[tuple[GrowthRule, list[int], str]] = []

    def __call__(
        self, launcher: object, recipe: Recipe, rule: GrowthRule, ranks: Iterable[int] = (), name: str = ""
    ) -> Growth:
        self.calls.append((rule, list(ranks), name))
        if recipe.name == "dies in growth":
            raise MeasurementFailed("memory growth: rank 0: died: the worker was killed by SIGKILL")
        leak = round(recipe.model.hidden_dropout * 2**20)
        run = Trace(resting=tuple(step * leak for step in range(6)), grown=(Holder("decoder.cache", leak, 1),))
        return Growth((RankGrowth(0, run),), rule.slack, name)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    """Makes the runs of this marker up, where measuring is made up too."""
    fake = FakeRuns()
    monkeypatch.setattr(growth_runs, "measure_growth", fake)
    return fake


@pytest.fixture
def fake_runs(project: pytest.Pytester, runs: FakeRuns) -> pytest.Pytester:
    return project


def add_to_recipe(project: pytest.Pytester, text: str) -> None:
    file = project.path / "recipe.yaml"
    file.write_text(file.read_text().replace("vocab_size: 1000", f"vocab_size: 1000, {text}"))


def test_what_does_not_grow_passes(fake_runs: pytest.Pytester) -> None:
    fake_runs.makepyfile(MARKED)
    fake_runs.runpytest().assert_outcomes(passed=1)


def test_what_grows_fails_with_who_holds_it(fake_runs: pytest.Pytester) -> None:
    add_to_recipe(fake_runs, "hidden_dropout: 0.5")
    fake_runs.makepyfile(MARKED)
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_x _*",
            "MEMORY GROWTH: rank 0 grows by 512.00 KiB a step",
            "  at rest, 5 steps: 0 -> 524288 -> * bytes",
            "  held by decoder.cache",
            "    1 tensor, 512.00 KiB",
            "slack 4.00 KiB",
            "FAILED *::test_x - Failed: MEMORY GROWTH: rank 0 grows by 512.00 KiB a step",
        ]
    )
    result.stdout.no_fnmatch_line("*session.py*")


def test_the_verdict_is_a_note_of_the_measurement(fake_runs: pytest.Pytester) -> None:
    add_to_recipe(fake_runs, "hidden_dropout: 0.5")
    fake_runs.makepyfile(MARKED)
    fake_runs.runpytest("--mbmem-json=out.json")
    data = json.loads((fake_runs.path / "out.json").read_text())
    (measured,) = data["tests"][0]["measurements"]
    assert measured["measurement"]["notes"] == ["memory growth: rank 0 grows by 512.00 KiB a step"]
    (growth,) = data["tests"][0]["growths"]
    assert (growth["passed"], growth["per_step"]) == (False, 512 * 1024)
    assert [finding["holders"][0]["path"] for finding in growth["findings"]] == ["decoder.cache"]


def test_every_measurement_runs_by_the_closest_marker_on_the_ranks_it_has(
    fake_runs: pytest.Pytester, runs: FakeRuns
) -> None:
    fake_runs.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.no_memory_growth(steps=9)

        @pytest.mark.no_memory_growth(steps=7, slack="1 MiB", microbatches=(4, 16))
        def test_two(mbmem):
            mbmem.measure("recipe.yaml")
            mbmem.measure("recipe.yaml", name="second")

        def test_one(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    fake_runs.runpytest().assert_outcomes(passed=2)
    rules = [(rule.steps, rule.slack, rule.microbatches) for rule, _, _ in runs.calls]
    assert rules == [(7, 2**20, (4, 16)), (7, 2**20, (4, 16)), (9, 4096, None)]
    assert [call[1:] for call in runs.calls] == [([0, 1], ""), ([0, 1], "second"), ([0, 1], "")]


def test_peaks_are_gated_as_well(fake_runs: pytest.Pytester) -> None:
    add_to_recipe(fake_runs, "hidden_dropout: 0.5")
    fake_runs.makepyfile(MARKED.replace("def test_x", "@pytest.mark.peak_memory(limit='1 MiB')\n    def test_x"))
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["REGRESSION: peak allocated is * over the limit", "MEMORY GROWTH: rank 0 grows by *"])


def test_a_run_that_fails_fails_the_test(fake_runs: pytest.Pytester) -> None:
    with fake_runs.path.joinpath("recipe.yaml").open("a") as recipe:
        recipe.write("name: dies in growth\n")
    fake_runs.makepyfile(MARKED)
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["memory growth: rank 0: died: the worker was killed by SIGKILL"])


def test_a_measurement_that_failed_cannot_be_judged(fake_runs: pytest.Pytester) -> None:
    with fake_runs.path.joinpath("recipe.yaml").open("a") as recipe:
        recipe.write("name: oom\n")
    fake_runs.makepyfile(MARKED.replace('"recipe.yaml"', '"recipe.yaml", may_fail=True'))
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["memory growth cannot be judged: out of memory"])


def test_a_failing_body_is_not_judged(fake_runs: pytest.Pytester) -> None:
    add_to_recipe(fake_runs, "hidden_dropout: 0.5")
    fake_runs.makepyfile(MARKED + "        assert 1 == 2\n")
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert 1 == 2"])
    result.stdout.no_fnmatch_line("*MEMORY GROWTH*")


def test_a_test_that_measures_nothing_fails(fake_runs: pytest.Pytester) -> None:
    fake_runs.makepyfile("import pytest\n@pytest.mark.no_memory_growth\ndef test_x(mbmem): pass")
    result = fake_runs.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["nothing was measured: *test_x has the no_memory_growth marker, but never called mbmem.measure()"]
    )


WRONG = [
    ("step=5", "mbmem", "*no_memory_growth() has no argument 'step'; did you mean 'steps'?*"),
    ("steps=3", "mbmem", "*no_memory_growth(steps=...): 3 is not a whole number from 5 to 1000"),
    ("slack=-1", "mbmem", "*no_memory_growth(slack=...): -1 is not a size*"),
    ("microbatches=(4, 4)", "mbmem", "*no_memory_growth(microbatches=...): (4, 4) is not two whole numbers*"),
    ("control='nowhere.yaml'", "mbmem", "*nowhere.yaml*"),
    ("control={'tpp': 2}", "mbmem", "*no_memory_growth(control=...): 'tpp' is not a field of a recipe; did you mean*"),
    ("control=3", "mbmem", "*no_memory_growth(control=...)(3): allowed are a Recipe, the path of a YAML file*"),
    ("5", "mbmem", "*no_memory_growth() takes no positional argument*"),
    ("steps=6", "", "*no_memory_growth(steps=...) is about recipes that the test measures with mbmem*"),
]


@pytest.mark.parametrize(("arguments", "fixture", "message"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_marker_is_an_error_of_collecting(
    project: pytest.Pytester, arguments: str, fixture: str, message: str
) -> None:
    project.makepyfile(f"import pytest\n@pytest.mark.no_memory_growth({arguments})\ndef test_x({fixture}): pass")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting*", message, "*1 error*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_the_marker_is_registered(project: pytest.Pytester) -> None:
    project.runpytest("--markers").stdout.fnmatch_lines(["@pytest.mark.no_memory_growth(*, control=None, steps=5,*"])


# On the virtual GPU --------------------------------------------------------------------------------------------------


def test_recipes_are_run(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.no_memory_growth(microbatches=(2, 4))
        def test_sound(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.mark.no_memory_growth(slack=511, microbatches=(2, 4))
        def test_the_reported_loss_of_a_microbatch_is_more_than_nothing(mbmem):
            mbmem.measure("recipe.yaml")

        def test_a_figure(mbmem):
            growth = mbmem.growth("recipe.yaml", steps=5, microbatches=(2, 4), slack="1 KiB", ranks=[0])
            assert growth.passed, growth.explain()
            assert (growth.per_step, growth.per_microbatch) == (0, 512)

        def test_a_mistake(mbmem):
            mbmem.growth("recipe.yaml", steps=1)
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "MEMORY GROWTH: rank 0 takes 512 B more with every microbatch of a step",
            "  the peak is * bytes with 2 microbatches and * with 4",
            "*test_a_mistake: mbmem.growth(steps=...): 1 is not a whole number from 5 to 1000",
        ]
    )


def test_a_whole_test_is_judged_by_what_it_leaves(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        pytestmark = pytest.mark.no_memory_growth
        CACHE = []

        class Wrapper:
            def __init__(self, model):
                self.model, self.forward = model, self.call

            def call(self):
                return self.model

        def train(model):
            import torch
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.ones(8, 256, device="cuda")).sum().backward()
            optimizer.step()
            return optimizer

        def a_model():
            import torch
            return torch.nn.Linear(256, 256, device="cuda")

        @pytest.fixture
        def model():
            return a_model()

        def test_sound():
            train(a_model())

        def test_of_a_fixture(model):
            model.optimizer = train(model)

        def test_megatron(megatron_model):
            megatron_model("recipe.yaml").step()

        def test_touches_no_device():
            pass

        def test_needs_gc():
            wrapper = Wrapper(a_model())
            del wrapper

        def test_collects_itself():
            import gc
            wrapper = Wrapper(a_model())
            del wrapper
            gc.collect()

        def test_needs_gc_before_it_watches():
            from pytest_mbmem import growth
            wrapper = Wrapper(a_model())
            del wrapper
            assert growth.watch(lambda: None).passed

        def test_leaves_something():
            CACHE.append(a_model())

        @pytest.mark.no_memory_growth(slack="1 MiB")
        def test_leaves_what_it_may():
            CACHE.append(a_model())
        """
    )
    result = real_project.runpytest("-rA")
    result.assert_outcomes(passed=6, failed=3)
    result.stdout.fnmatch_lines(
        [
            "*_ test_needs_gc _*",
            "MEMORY GROWTH: rank 0 needs a garbage collection to free 257.00 KiB",
            "  reference cycles through Wrapper: *",
            "*_ test_needs_gc_before_it_watches _*",
            "MEMORY GROWTH: rank 0 needs a garbage collection to free 257.00 KiB",
            "*_ test_leaves_something _*",
            "MEMORY GROWTH: rank 0 still has 257.00 KiB that the test allocated",
            "  held by test_it.CACHE[[]*[]].weight",
            "    1 tensor, 256.00 KiB, 256x256 float32, made at test_it.py:* (a_model)",
            "  held by test_it.CACHE[[]*[]].bias",
        ]
    )


def test_a_watched_step_is_judged_by_the_marker_only(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest
        from pytest_mbmem import growth

        def leak():
            import torch
            kept = []
            growth.watch(lambda: kept.append(torch.empty(2048, device="cuda")), name="the leak")

        @pytest.mark.no_memory_growth
        def test_marked():
            leak()

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_not_marked():
            leak()

        def test_here():
            leak()
        """
    )
    result = real_project.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "MEMORY GROWTH: rank 0 grows by 8.00 KiB a step",
            "  held by the watched step, its variable kept[[]*[]]",
            "of 'the leak', slack 4.00 KiB",
            "*growth.watch() needs the device of a worker: give the test the marker no_memory_growth or *",
        ]
    )
