"""The `throughput` marker: verdicts that a user sees, updates, reports, and mistakes.

The made-up launcher is a real GPU with FAKE_STEP_MS (see fake_launcher.py), and a virtual one without.
"""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from pytest_mbmem.cli import main
from pytest_mbmem.session import RUN
from pytest_mbmem.throughput import Timing

GATED = """
    import pytest

    @pytest.mark.throughput
    def test_x(mbmem):
        mbmem.measure("recipe.yaml")
"""

STEADY = "120 40 41 40 42 40 41 40"  # the cold step first; 32 tokens a GPU in 40 ms are 800 a second
SLOW = "120 50 51 50 52 50 51 50"


def on_real_gpu(monkeypatch: pytest.MonkeyPatch, steps: str = STEADY, flops: str = "1e11", mode: str = "joint") -> None:
    for name, value in {"FAKE_STEP_MS": steps, "FAKE_MODEL_FLOPS": flops, "FAKE_MODE": mode}.items():
        monkeypatch.setenv(name, value)


def figures(project: pytest.Pytester, device: str) -> dict[str, dict[str, object]]:
    text = project.path.joinpath(f"baselines/{device}/test_it.yaml").read_text()
    found: dict[str, dict[str, object]] = yaml.safe_load(text)["tests"]["test_x"]["metrics"]
    return found


@pytest.fixture
def gated(project: pytest.Pytester) -> pytest.Pytester:
    project.makepyfile(GATED)
    return project


@pytest.fixture
def recorded(gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """With a baseline of 40 ms a step on a real GPU."""
    on_real_gpu(monkeypatch)
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    return gated


# A real GPU -----------------------------------------------------------------------------------------------------------


def test_a_minimum_fails_with_the_figures(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(GATED.replace("throughput", "throughput('3 TFLOP/s')"))
    on_real_gpu(monkeypatch)
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: throughput is 2.50 TFLOP/s per GPU, less than the minimum allows",
            "",
            "  step          40.00 ms, the median of 7",
            "  spread        1.00 ms, between the quartiles",
            "  cold step     120.00 ms",
            "  throughput    800.00 tokens/s and 2.50 TFLOP/s per GPU",
            "  mode          joint",
            "  minimum       3.00 TFLOP/s per GPU",
            "  allowed       2.91 TFLOP/s (34.33 ms a step): tolerance 0.00%, or the steps' spread where that is more",
            "  slowest rank  0 (tp=0 pp=0), stands for 1 rank of 2",
            "  device        h100-80gb, capacity 79.11 GiB",
            "*::test_x throughput * >= 3.00 TFLOP/s * 2.50 TFLOP/s * - * 0 * - * regression",
        ]
    )
    result.stdout.no_fnmatch_line("*--mbmem-update*")  # a minimum is no baseline
    project.makepyfile(GATED.replace("throughput", "throughput('2.5 TFLOP/s')"))
    project.runpytest().assert_outcomes(passed=1)


def test_a_minimum_with_a_tolerance_gives_one_verdict_and_no_baseline(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_real_gpu(monkeypatch)  # 2.5 TFLOP/s; 1 ms of spread are 2.5%
    project.makepyfile(GATED.replace("throughput", "throughput(minimum='2.6 TFLOP/s', tolerance='5%')"))
    result = project.runpytest("--mbmem-update=all", "--junitxml=r.xml")
    result.assert_outcomes(passed=1)
    assert [line.split()[-1] for line in result.outlines if "::test_x throughput " in line] == ["pass"]
    result.stdout.fnmatch_lines(["note: *::test_x: less than the minimum, but within its tolerance of 5.00%"])
    names = [p.get("name") for p in ElementTree.parse("r.xml").iter("property")]
    assert [n for n in names if n is not None and n.startswith("mbmem_throughput")] == [
        "mbmem_throughput_verdict@FLOP/s"
    ]
    project.makepyfile(GATED.replace("throughput", "throughput(minimum='2.8 TFLOP/s', tolerance='5%')"))
    result = project.runpytest("--mbmem-update=all")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: throughput is 2.50 TFLOP/s per GPU, less than the minimum allows",
            "  minimum       2.80 TFLOP/s per GPU",
            "  allowed       2.66 TFLOP/s (37.59 ms a step): tolerance 5.00%, or the steps' spread where that is more",
        ]
    )
    result.stdout.no_fnmatch_line("*MISSING*")
    result.stdout.no_fnmatch_line("  baseline *")
    assert not project.path.joinpath("baselines").exists()


def test_a_minimum_and_a_baseline_take_two_markers(recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    both = GATED.replace(
        "@pytest.mark.throughput", "@pytest.mark.throughput('2.5 TFLOP/s')\n    @pytest.mark.throughput"
    )
    recorded.makepyfile(both)
    result = recorded.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*::test_x throughput * 800.00 tokens/s * pass", "*::test_x throughput * >= 2.50 * pass"]
    )
    monkeypatch.setenv("FAKE_STEP_MS", SLOW)
    result = recorded.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["REGRESSION: throughput is *the baseline allows *", "REGRESSION: *less than the minimum *"]
    )


def test_solo_ranks_say_what_is_not_in_their_figure(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(GATED.replace("throughput", "throughput('800 tokens/s')"))
    on_real_gpu(monkeypatch, mode="solo")
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_x solo-throughput * >= 800.00 tokens/s  800.00 tokens/s * pass",
            "note: *::test_x: a step takes 40.00 ms (median of 7, spread 1.00 ms; the cold step 120.00 ms): 800.00 "
            "tokens/s and 2.50 TFLOP/s per GPU, without communication and pipeline bubbles (solo)",
        ]
    )


def test_without_a_baseline_the_failure_has_the_text_to_paste(
    gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_real_gpu(monkeypatch)
    result = gated.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "MISSING: throughput has no baseline on h100-80gb",
            "  step          40.00 ms, the median of 7",
            "To record it:",
            "  pytest test_it.py::test_x --mbmem-update=new",
            "or paste into *baselines/h100-80gb/test_it.yaml, as the whole file:",
            "*step_ns: 40000000  # 40.00 ms",
            "*spread_ns: 1000000  # 1.00 ms",
        ]
    )
    lines = result.outlines
    start, end = (
        lines.index(next(line for line in lines if line.startswith("# Accepted"))),
        lines.index("        environment: e1"),
    )
    path = gated.path / "baselines/h100-80gb/test_it.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(lines[start : end + 1]) + "\n")
    gated.runpytest().assert_outcomes(passed=1)


def test_a_slower_step_is_a_regression_and_a_faster_one_an_improvement(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded.runpytest().assert_outcomes(passed=1)
    monkeypatch.setenv("FAKE_STEP_MS", SLOW)
    result = recorded.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: throughput is 640.00 tokens/s, the baseline allows at least 760.00 tokens/s",
            "  baseline      800.00 tokens/s (40.00 ms a step)",
            "  allowed       760.00 tokens/s (42.11 ms a step): tolerance 5.00%, or the steps' spread where *",
            "  change        -20.00%",
            "If it is worth the time, accept it and say why:",
            '  pytest test_it.py::test_x --mbmem-update=changed --mbmem-reason "..."',
            "*::test_x throughput * 800.00 tokens/s  640.00 tokens/s  -20.00% * regression",
        ]
    )
    monkeypatch.setenv("FAKE_STEP_MS", STEADY.replace("4", "3"))
    result = recorded.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_x throughput * +33.33% * improvement"])


def test_a_regression_within_the_noise_passes_and_says_that_little_is_tested(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_MS", "120 35 60 45 50 30 52 48")  # median 48, quartiles 40 and 51
    result = recorded.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_x throughput * -16.67% * pass",
            "note: *the step times spread by 27.50%, more than the tolerance of 5.00%: a smaller *",
        ]
    )


def test_an_update_accepts_less_throughput_with_a_reason_alone(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_MS", SLOW)
    recorded.runpytest("--mbmem-update=changed").assert_outcomes(failed=1)
    assert figures(recorded, "h100-80gb")["throughput"]["step_ns"] == 40 * 10**6
    result = recorded.runpytest("--mbmem-update=changed", "--mbmem-reason=wider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*::test_x throughput * accepted", "  test_x throughput: regression, 40.00 ms -> 50.00 ms"]
    )
    found = figures(recorded, "h100-80gb")["throughput"]
    assert (found["step_ns"], found["first"], found["updates"], found["reason"]) == (50 * 10**6, 40 * 10**6, 1, "wider")


def test_a_changed_recipe_is_stale(recorded: pytest.Pytester) -> None:
    recipe = recorded.path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("seq_length: 64", "seq_length: 128"))
    result = recorded.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "STALE: the baseline of throughput is of another recipe",
            "  baseline      40.00 ms (of the other recipe)",
            "  - the recipe changed since the baseline was recorded: training.seq_length: 64 -> 128",
            "  pytest test_it.py::test_x --mbmem-update=changed",
        ]
    )


def test_times_that_are_not_there_are_invalid(gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    on_real_gpu(monkeypatch, steps="120")
    result = gated.runpytest("--mbmem-update=all")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["INVALID: throughput could not be measured", "  - no step was timed on rank 0"])
    assert not gated.path.joinpath("baselines").exists()


def test_two_measurements_need_names_for_their_baselines(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_real_gpu(monkeypatch)
    project.makepyfile(GATED + "        mbmem.measure('recipe.yaml')\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*a second measurement without a name*"])


# A virtual GPU --------------------------------------------------------------------------------------------------------


def test_on_a_virtual_gpu_counts_are_gated_and_no_time_is_shown(
    gated: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = gated.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "MISSING: counted FLOPs of a step have no baseline on virtual-h100-80gb",
            "  measured    1.00 kFLOP (1000 flops)",
            "MISSING: collective bytes of a step have no baseline on virtual-h100-80gb",
            "MISSING: moved bytes of a step have no baseline on virtual-h100-80gb",
        ]
    )
    assert result.outlines.count("To record it:") == 1
    result = gated.runpytest("--mbmem-update=new")
    result.assert_outcomes(passed=1)
    result.stdout.no_re_match_line(r".*[0-9] (s|ms|us|tokens/s|.FLOP/s)\b(?!.*(passed|call))")
    assert {name: f.get("flops", f.get("bytes")) for name, f in figures(gated, "virtual-h100-80gb").items()} == {
        "counted-flops": 1000,
        "collective-bytes": 2**20,
        "moved-bytes": 0,
    }
    recipe = gated.path / "baselines/virtual-h100-80gb/test_it.yaml"
    recipe.write_text(recipe.read_text().replace("1000  # 1.00 kFLOP", "950  # 0.95 kFLOP"))
    result = gated.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: counted FLOPs of a step are 1.00 kFLOP, the baseline allows at most 997.00 FLOP",
            "  measured    1.00 kFLOP (1000 flops)",
            "  baseline    950.00 FLOP (950 flops)",
            "  allowed     997.00 FLOP (997 flops): tolerance 5.00%",
            "  worst rank  0 (tp=0 pp=0), stands for 1 rank of 2",
            "*::test_x counted-flops * 950.00 FLOP * 1.00 kFLOP * +5.26% * regression",
            "*::test_x collective-bytes * 1.00 MiB * +0.00% * pass",
            "*::test_x moved-bytes * 0 B * 0 B * pass",
        ]
    )


def test_on_a_virtual_gpu_a_minimum_passes_and_says_so(project: pytest.Pytester) -> None:
    project.makepyfile(GATED.replace("throughput", "throughput(minimum='400 TFLOP/s')"))
    result = project.runpytest("--mbmem-update=new")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_x throughput * >= 400.00 TFLOP/s * - * not gated",
            "note: *::test_x: a virtual GPU has no time, so the minimum of 400.00 TFLOP/s is judged with --mbmem-gpu *",
        ]
    )
    assert not project.path.joinpath("baselines").exists()


@pytest.mark.parametrize("markers", ["'400 TFLOP/s', tolerance='5%'", "'400 TFLOP/s')\n    @pytest.mark.throughput("])
def test_on_a_virtual_gpu_a_minimum_with_a_baselines_tolerance_gates_the_counts(
    project: pytest.Pytester, markers: str
) -> None:
    project.makepyfile(GATED.replace("throughput", f"throughput({markers})"))
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["MISSING: counted FLOPs of a step have no baseline on virtual-h100-80gb"])
    result.stdout.fnmatch_lines(["To record it:", "  pytest test_it.py::test_x --mbmem-update=new"])
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    assert set(figures(project, "virtual-h100-80gb")) == {"counted-flops", "collective-bytes", "moved-bytes"}
    result = project.runpytest("--junitxml=r.xml")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_x counted-flops * +0.00% * pass"])
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_throughput_measured@counted-flops"] == "1000"


def test_of_markers_that_gate_the_same_counts_the_closest_one_decides(project: pytest.Pytester) -> None:
    markers = "throughput('1 TFLOP/s', tolerance='1%')\n    @pytest.mark.throughput"
    project.makepyfile(GATED.replace("throughput", markers))
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    rows = [line for line in result.outlines if "::test_x counted-flops" in line and line.endswith("pass")]
    assert len(rows) == 1


def test_virtual_and_real_figures_share_no_file(recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKE_STEP_MS")
    recorded.runpytest().assert_outcomes(failed=1)
    recorded.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    assert set(figures(recorded, "h100-80gb")) == {"throughput"}
    assert "throughput" not in figures(recorded, "virtual-h100-80gb")


def test_the_counts_of_a_real_step_are_recorded_and_kept(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(GATED)
    real_project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    found = figures(real_project, "virtual-h100-80gb")
    # A multiply-add forward and two backward for each of 64 tokens: the output layer, its vocabulary padded, and in
    # both layers 12 matrices of hidden size by hidden size and attention's products with all 64 tokens.
    assert found["counted-flops"]["flops"] == 6 * 64 * (64 * 1024 + 2 * (12 * 64**2 + 2 * 64 * 64))
    assert found["collective-bytes"]["bytes"] == 0  # of one rank
    result = real_project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_x counted-flops * +0.00% * pass"])


# Beside other gates ---------------------------------------------------------------------------------------------------


def test_peaks_and_throughput_stand_in_one_entry(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile(
        GATED.replace("@pytest.mark.throughput", "@pytest.mark.peak_memory\n    @pytest.mark.throughput")
    )
    on_real_gpu(monkeypatch)
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    assert set(figures(project, "h100-80gb")) == {"allocated", "throughput"}
    monkeypatch.setenv("FAKE_EXTRA_MIB", "10")
    monkeypatch.setenv("FAKE_STEP_MS", SLOW)
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["REGRESSION: peak allocated is *", "REGRESSION: throughput is *"])
    project.makepyfile(GATED)
    monkeypatch.setenv("FAKE_STEP_MS", STEADY)
    project.runpytest("--mbmem-update=all").assert_outcomes(passed=1)
    assert set(figures(project, "h100-80gb")) == {"allocated", "throughput"}  # what did not run keeps its figure


def test_a_test_that_fails_otherwise_records_no_throughput(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_real_gpu(monkeypatch)
    project.makepyfile(GATED.replace("throughput", "throughput('9 TFLOP/s')\n    @pytest.mark.throughput"))
    result = project.runpytest("--mbmem-update=all")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*accepted*")
    assert not project.path.joinpath("baselines").exists()


def test_a_baseline_of_a_test_that_is_gone_is_named(recorded: pytest.Pytester) -> None:
    recorded.makepyfile(GATED.replace("test_x", "test_renamed"))
    result = recorded.runpytest("--mbmem-update=new")
    result.stdout.fnmatch_lines(["baselines without a test *", "  *baselines/h100-80gb/test_it.yaml:*: test_x"])


def test_the_closest_marker_decides(project: pytest.Pytester, request: pytest.FixtureRequest) -> None:
    item = project.getitem(
        """
        import pytest

        pytestmark = [
            pytest.mark.throughput("1 PFLOP/s", steps=50),
            pytest.mark.throughput("1 tokens/s"),
            pytest.mark.throughput(tolerance="2%"),
        ]

        @pytest.mark.throughput("1 TFLOP/s", tolerance="1%", steps=20)
        def test_it(mbmem): pass

        def test_plain(mbmem): pass
        """,
        "test_it",
    )
    plan = item.config.stash[RUN].plan(item)
    assert plan is not None
    found = {gate.judges: (str(gate.minimum), gate.tolerance, gate.counts) for gate in plan.throughputs}
    assert found == {
        "FLOP/s": ("1.00 TFLOP/s", 0.01, True),
        "tokens/s": ("1.00 tokens/s", 0, False),
        "baseline": ("None", 0.02, False),
    }
    assert plan.timing == Timing(steps=20, warmup=3)


def test_only_the_marker_asks_for_more_steps(project: pytest.Pytester) -> None:
    item = project.getitem("def test_it(mbmem): pass", "test_it")
    plan = item.config.stash[RUN].plan(item)
    assert plan is not None
    assert (plan.throughputs, plan.timing) == ((), None)


# Reports --------------------------------------------------------------------------------------------------------------


def test_reports_have_verdict_figures_and_spread(
    recorded: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_STEP_MS", SLOW)
    recorded.runpytest("--mbmem-json=r.json", "--mbmem-html=r.html", "--junitxml=r.xml").assert_outcomes(failed=1)
    (one,) = json.loads(Path("r.json").read_text())["tests"][0]["measurements"]
    (judged,) = one["throughputs"]
    assert (judged["verdict"], judged["passed"], judged["accepted"], judged["metric_id"]) == (
        "regression",
        False,
        False,
        "throughput",
    )
    assert (judged["measured"], judged["reference"], judged["spread"]) == (50 * 10**6, 40 * 10**6, 10**6)
    assert judged["throughput"]["cold"] == 120 * 10**6
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_throughput_verdict@throughput"] == "regression"
    assert properties["mbmem_step_seconds"] == "0.05"
    assert properties["mbmem_step_spread_seconds"] == "0.001"
    assert properties["mbmem_cold_step_seconds"] == "0.12"
    assert properties["mbmem_tokens_per_second_per_gpu"] == "640.0"
    assert properties["mbmem_model_flops_per_second_per_gpu"] == str(2e12)
    assert "-20.00% against the baseline of 800.00 tokens/s" in Path("r.html").read_text()
    capsys.readouterr()
    assert main(["report", "r.json"]) == 0
    assert "test_x throughput" in capsys.readouterr().out


def test_reports_of_a_virtual_gpu_have_counts_and_no_time(gated: pytest.Pytester) -> None:
    gated.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    gated.runpytest("--mbmem-json=r.json", "--mbmem-html=r.html", "--junitxml=r.xml").assert_outcomes(passed=1)
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_throughput_verdict@counted-flops"] == "pass"
    assert properties["mbmem_throughput_measured@counted-flops"] == "1000"
    assert properties["mbmem_throughput_baseline@collective-bytes"] == str(2**20)
    assert not [name for name in properties if name is not None and "second" in name]
    page = Path("r.html").read_text()
    assert "counted FLOPs of a step 1.00 kFLOP on rank 0: +0.00% against the baseline of 1.00 kFLOP" in page
    assert "tokens/s" not in page


def test_a_real_measurement_without_the_marker_shows_its_times(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile("def test_x(mbmem): mbmem.measure('recipe.yaml')")
    on_real_gpu(monkeypatch)
    project.runpytest("--mbmem-html=r.html").assert_outcomes(passed=1)
    page = Path("r.html").read_text()
    assert "a step takes 40.00 ms (median of 7, spread 1.00 ms; the cold step 120.00 ms)" in page
    assert "<td>20.00 ms<" in page  # of rank 1, in the table of ranks


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'400'", "throughput(minimum=...): '400' is not a rate; write a number above 0 with one of the units *"),
        ("steps=0", "throughput(steps=...): 0 is not a whole number from 3 to 1000"),
        ("slack='5%'", "throughput() has no argument 'slack'; *allowed: minimum, tolerance, steps, warmup"),
        ("'1 TFLOP/s', '5%'", "throughput() takes one positional argument at most, the minimum; *"),
    ],
)
def test_mistakes_are_errors_of_the_module(project: pytest.Pytester, arguments: str, message: str) -> None:
    project.makepyfile(GATED.replace("throughput", f"throughput({arguments})"))
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it.py::test_x: {message}"])


def test_a_test_that_runs_whole_in_a_worker_has_no_steps(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.throughput\ndef test_x(): pass\n")
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*::test_x: the throughput marker is about the steps of a recipe, and a test that runs whole in *"]
    )


def test_a_test_that_measures_nothing_fails(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.throughput\ndef test_x(mbmem): pass\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured: *::test_x has the throughput marker, but never called *"])


@pytest.mark.parametrize(("name", "verdict"), [("oom", "OUT OF MEMORY: the recipe"), ("dies", "INVALID: throughput")])
@pytest.mark.parametrize("real", [True, False])
def test_a_measurement_that_failed_fails_the_test(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, verdict: str, real: bool
) -> None:
    if real:
        on_real_gpu(monkeypatch)
    recipe = project.path / "recipe.yaml"
    recipe.write_text(f"name: {name}\n{recipe.read_text()}")
    project.makepyfile(GATED.replace("'recipe.yaml'", "").replace('"recipe.yaml"', '"recipe.yaml", may_fail=True'))
    result = project.runpytest("--mbmem-update=all")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"{verdict} *", "*::test_x throughput *"])
    assert not project.path.joinpath("baselines").exists()


def test_the_marker_is_documented(project: pytest.Pytester) -> None:
    project.runpytest("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.throughput(minimum=None, *steps=10, warmup=3): *"]
    )
