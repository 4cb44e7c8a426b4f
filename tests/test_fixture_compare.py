"""`mbmem.compare` and `mbmem.sweep`: what they take, what they give, and what reports show of them."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_mbmem.cli import main

MIB = 2**20

RECIPES = """
    import pytest
    from pytest_mbmem import MeasurementFailed, Recipe

    PLAIN = Recipe.from_yaml("recipe.yaml").but(recompute_granularity="selective", recompute_modules=[])
    SAVING = PLAIN.but(recompute_modules=["core_attn"])
    SETTINGS = {
        "core_attn": {"recompute_modules": ["core_attn"]},
        "both": {"recompute_modules": ["core_attn", "mlp"]},
        "nothing": {"recompute_modules": ["moe"]},
        "offload": {"offload_modules": ["core_attn"]},
        "oom": {"recompute_modules": ["mlp"], "name": "oom"},
    }
"""


def write(project: pytest.Pytester, tests: str) -> None:
    project.makepyfile(RECIPES + tests)


def count(project: pytest.Pytester) -> int:
    return len((project.path / "log").read_text().splitlines())


@pytest.fixture(autouse=True)
def log(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(project.path / "log"))


# compare --------------------------------------------------------------------------------------------------------------


def test_recipes_are_compared_in_every_form(project: pytest.Pytester) -> None:
    project.path.joinpath("saving.yaml").write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 1000}\n"
        "training: {seq_length: 64}\n"
        "memory: {recompute_granularity: selective, recompute_modules: [core_attn]}\n"
    )
    write(
        project,
        """
    @pytest.mark.parametrize(
        ("control", "candidate"),
        [
            (PLAIN, SAVING),
            (PLAIN.to_dict(), "saving.yaml"),
            (PLAIN, {"recompute_modules": ["core_attn"]}),
            ({"recompute_modules": []}, SAVING),
        ],
    )
    def test_x(mbmem, control, candidate):
        comparison = mbmem.compare(control, candidate)
        assert comparison.verdict == "saving"
        assert (comparison.saving, comparison.saving_fraction) == (16 * 2**20, 0.25)
        assert comparison.differences == {"memory.recompute_modules": ([], ["core_attn"])}
        assert comparison.slowdown == 0.05
        assert [rank.saving for rank in comparison.ranks] == [16 * 2**20, 0]
        assert comparison.control.peak() == comparison.before
""",
    )
    project.runpytest().assert_outcomes(passed=4)
    assert count(project) == 2  # once a session


def test_other_settings_must_be_named(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_unnamed(mbmem):
        mbmem.compare(PLAIN, SAVING.but(seq_length=128))

    def test_named(mbmem):
        assert mbmem.compare(PLAIN, SAVING.but(seq_length=128), settings=["memory", "seq_length"]).saving < 0

    def test_changes_are_named(mbmem):
        assert mbmem.compare(PLAIN, {"seq_length": 32}).saving == 32 * 2**20

    def test_changes_may_not_differ_more_than_the_settings(mbmem):
        mbmem.compare(PLAIN, {"seq_length": 32}, settings=["memory"])
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "test_it.py::test_unnamed: mbmem.compare(): control and candidate differ in more than memory settings: "
            "training.seq_length: 64 -> 128 (control -> candidate). *",
            "test_it.py::test_changes_may_not*: mbmem.compare(): * in more than memory: training.seq_length: 64 -> 32*",
        ]
    )


def test_metric_and_phase_choose_what_is_compared(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_x(mbmem):
        assert mbmem.compare(PLAIN, SAVING, metric="reserved", phase="backward").saving == 32 * 2**20
""",
    )
    project.runpytest().assert_outcomes(passed=1)


def test_a_side_that_fails_is_a_verdict_and_raises_where_a_figure_is_asked_for(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_candidate(mbmem):
        assert mbmem.compare(PLAIN, SAVING.but(name="oom")).verdict == "out of memory"

    def test_control(mbmem):
        comparison = mbmem.compare(PLAIN.but(name="raises", vocab_size=2000), SAVING.but(vocab_size=2000))
        assert comparison.verdict == "invalid"
        assert comparison.explain().startswith("the control itself does not run: error on rank 1")

    def test_fits(mbmem):
        comparison = mbmem.compare(PLAIN.but(name="oom", vocab_size=3000), SAVING.but(vocab_size=3000))
        assert comparison.verdict == "fits"
        with pytest.raises(MeasurementFailed, match="fits where the control does not"):
            comparison.saving
""",
    )
    project.runpytest().assert_outcomes(passed=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("compare(PLAIN, PLAIN)", "*control and candidate are the same recipe, so there is nothing to compare"),
        ("compare({}, {})", "*control and candidate are changes of settings; one must be a whole recipe"),
        ("compare(PLAIN, {'tpp': 2})", "*'tpp' is not a field of a recipe; did you mean 'tp'?"),
        ("compare(PLAIN, {'tp': 3})", "*mbmem.compare(): incompatible settings: heads-not-divisible-by-tp, *"),
        ("compare(PLAIN, 3)", "*mbmem.compare(3): allowed are a Recipe, the path *"),
        ("compare(PLAIN, 'nowhere.yaml')", "*nowhere.yaml: *"),
        ("compare(PLAIN, SAVING, settings=['tpp'])", "*mbmem.compare(): 'tpp' is no setting of a recipe; *"),
        ("compare(PLAIN, SAVING, name='')", "*mbmem.compare(): name='' is not a text on one line"),
        ("compare(PLAIN, SAVING, metric='x')", "*mbmem.compare(): metric='x' is not one of allocated, reserved"),
        ("compare(PLAIN, SAVING, phase='x')", "*mbmem.compare(): phase='x' is not one of *"),
        ("compare(PLAIN, SAVING, phase='optimizer')", "phase='optimizer' selects nothing that rank 0 went through; *"),
        ("sweep(PLAIN, [])", "*mbmem.sweep(): [[][]] are no settings; *"),
        ("sweep(PLAIN, {'a': {'tp': 2}}, control='b')", "*mbmem.sweep(): control='b' is none of the settings: a"),
        ("sweep(PLAIN, {'a': {'recompute_modules': []}})", "*mbmem.sweep(): a: control and candidate are the same *"),
        ("sweep(PLAIN, SETTINGS, phase='x')", "*mbmem.sweep(): phase='x' is not one of *"),
    ],
)
def test_a_mistake_is_said_in_one_message(project: pytest.Pytester, call: str, message: str) -> None:
    write(project, f"\n    def test_x(mbmem):\n        mbmem.{call}\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*_ test_x _*", message])
    for internal in ("fixtures", "comparing", "session", "compare", "sweep"):
        result.stdout.no_fnmatch_line(f"*pytest_mbmem/{internal}.py:*")


# sweep ----------------------------------------------------------------------------------------------------------------


def test_a_sweep_is_a_table_of_settings_and_marks_what_nothing_beats(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_x(mbmem):
        sweep = mbmem.sweep(PLAIN, SETTINGS, name="recompute")
        assert [row.verdict for row in sweep] == ["saving", "saving", "no effect", "saving", "out of memory"]
        assert [row.name for row in sweep.best] == ["both", "core_attn", "offload", "control"]
        assert sweep["core_attn"].comparison.saving == 16 * 2**20
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_x, recompute:",
            "setting * peak allocated * saved * phase * more FLOPs * moved to host * verdict*",
            "control * 64.00 MiB * - * build * - * - * control * [*]",
            "core_attn * 48.00 MiB * 16.00 MiB (25.00%) * build * +5.00% * - * saving * [*]",
            "both * 32.00 MiB * 32.00 MiB (50.00%) * build * +10.00% * - * saving * [*]",
            "nothing * 64.00 MiB * 0 B (0.00%) * build * +0.00% * - * no effect",
            "offload * 56.00 MiB * 8.00 MiB (12.50%) * build * +0.00% * 8.00 MiB * saving * [*]",
            "oom * - * - * - * - * out of memory",
            "[*] no other row takes less memory, FLOPs, traffic or host memory without more of another",
            "oom: out of memory on rank 1 in step-1/forward: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ]
    )
    assert max(len(line) for line in result.stdout.lines if "MiB" in line and line.startswith("offload")) <= 120


def test_a_row_can_be_the_control(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_x(mbmem):
        sweep = mbmem.sweep(PLAIN, SETTINGS, control="both")
        assert (sweep.control.name, sweep["core_attn"].verdict) == ("both", "costs more")
        assert "control" not in [row.name for row in sweep]
""",
    )
    project.runpytest().assert_outcomes(passed=1)
    assert count(project) == 5


def test_cases_of_a_parametrised_test_share_a_sweep_and_its_table(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.fixture
    def sweep(mbmem):
        return mbmem.sweep(PLAIN, SETTINGS)

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_x(sweep, setting):
        assert sweep[setting].verdict == "saving", sweep[setting].explain()

    def test_compare(mbmem):
        mbmem.compare(PLAIN, SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=4, failed=2)
    assert count(project) == 6
    result.stdout.fnmatch_lines(
        [
            "E * AssertionError: no effect: no figure of any rank differs; memory.recompute_modules changed nothing *",
            "test_it.py::test_x[[]core_attn[]] and 4 more:",
            "test_it.py::test_compare:",
            "candidate * saving",
            "saves 16.00 MiB (25.00%) of peak allocated: *",
        ]
    )
    assert result.stdout.str().count("\nboth ") == 1


def test_a_list_of_changes_names_its_rows(project: pytest.Pytester) -> None:
    write(
        project,
        """
    def test_x(mbmem):
        sweep = mbmem.sweep(PLAIN, [{"recompute_modules": ["core_attn", "mlp"]}, {"seq_length": 32}])
        assert [row.name for row in sweep] == ["recompute_modules=core_attn+mlp", "seq_length=32"]
        print(sweep)
""",
    )
    result = project.runpytest("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["recompute_modules=core_attn+mlp * 32.00 MiB * saving*"])


def test_nothing_of_it_is_gated(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.peak_memory(limit="50 MiB")
    def test_x(mbmem):
        mbmem.measure(SAVING)
        mbmem.sweep(PLAIN, SETTINGS)
        mbmem.compare(PLAIN, SAVING)
""",
    )
    project.runpytest().assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_report_has_the_rows(project: pytest.Pytester, capsys: pytest.CaptureFixture[str], workers: str) -> None:
    write(
        project,
        """
    def test_x(mbmem):
        mbmem.sweep(PLAIN, SETTINGS, name="a <sweep>")
        mbmem.compare(PLAIN, SAVING)
""",
    )
    files = ["--mbmem-json=o.json", "--mbmem-html=o.html", "--junitxml=j.xml", "-o", "junit_family=xunit2"]
    result = project.runpytest_subprocess("-n", workers, *files)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["both * 32.00 MiB *"])
    (test,) = json.loads((project.path / "o.json").read_text())["tests"]
    sweep, comparison = test["sweeps"]
    assert [(row["name"], row["unbeaten"]) for row in sweep["rows"]][:3] == [
        ("core_attn", True),
        ("both", True),
        ("nothing", False),
    ]
    assert comparison["rows"][0]["comparison"]["saving"] == 16 * MIB
    found = ElementTree.parse(project.path / "j.xml").iterfind(".//testcase/properties/property")
    figures = {p.get("name"): p.get("value") for p in found}
    assert figures["mbmem_sweep_saved_bytes[a <sweep>: both]"] == str(32 * MIB)
    assert figures["mbmem_sweep_verdict[a <sweep>: oom]"] == "out of memory"
    assert figures["mbmem_sweep_saved_bytes[2: candidate]"] == str(16 * MIB)
    page = Path(project.path / "o.html").read_text()
    assert "a &lt;sweep&gt;" in page
    assert "<td>32.00 MiB (50.00%)<" in page
    assert main(["report", str(project.path / "o.json")]) == 0
    assert "test_it.py::test_x, a <sweep>:\n" in capsys.readouterr().out


def test_a_test_that_runs_again_shows_its_last_sweep(project: pytest.Pytester) -> None:
    with project.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write(
            """
def pytest_runtest_protocol(item, nextitem):
    from _pytest.runner import runtestprotocol
    for _ in range(2):
        runtestprotocol(item, nextitem=nextitem, log=True)
    return True
"""
        )
    write(project, "\n    def test_x(mbmem): mbmem.sweep(PLAIN, SETTINGS)\n")
    result = project.runpytest()
    assert result.stdout.str().count("\nboth ") == 1
