"""The `memory_saving` marker: verdicts that a user sees, controls, reports, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pytest_mbmem.cli import main

MIB = 2**20

RECIPES = """
    import pytest
    from pytest_mbmem import Recipe

    PLAIN = Recipe.from_yaml("recipe.yaml").but(recompute_granularity="selective", recompute_modules=[])
    SAVING = PLAIN.but(recompute_modules=["core_attn"])
"""


def write(project: pytest.Pytester, tests: str) -> None:
    project.makepyfile(RECIPES + tests)


def test_a_saving_passes_and_is_explained_below_the_table(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(control={"recompute_modules": []}, at_least="10 MiB", max_slowdown="7%")
    def test_core_attn(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_core_attn saving * vs 64.00 MiB * 48.00 MiB * -25.00% * 0 * build * pass",
            "note: *::test_core_attn: saves 16.00 MiB (25.00%) of peak allocated: 64.00 MiB on rank 0 in build -> "
            "48.00 MiB on rank 0 in build, for +5.00% FLOPs (modelled, not measured)",
            "note: *::test_core_attn: the slowdown is modelled, not measured: *",
        ]
    )


def test_a_saving_that_is_too_small_fails_with_the_arithmetic(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(control={"recompute_modules": []}, at_least="30%")
    def test_core_attn(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_core_attn _*",
            "SAVES TOO LITTLE: peak allocated falls by 16.00 MiB, 3.20 MiB less than asked",
            "",
            "  control       64.00 MiB (67108864 bytes) on rank 0 in build",
            "  candidate     48.00 MiB (50331648 bytes) on rank 0 in build",
            "  saved         16.00 MiB (16777216 bytes), 25.00% of the control",
            "  asked for     19.20 MiB (20132660 bytes): 30.00% of the control",
            "  by rank     0: +16.00 MiB, 1: +0 B",
            "  more FLOPs  +5.00% (modelled, not measured)",
            "  control is  recompute_modules=[[]]",
            "  differs     memory.recompute_modules: [[]] -> [[]'core_attn'[]]",
            "  device      virtual-h100-80gb, capacity 79.11 GiB",
            "FAILED *::test_core_attn - Failed: SAVES TOO LITTLE: peak allocated falls by 16.00 MiB, 3.20 MiB less *",
        ]
    )
    result.stdout.no_fnmatch_line("*session.py*")


@pytest.mark.parametrize(
    ("modules", "arguments", "headline"),
    [
        (["moe"], "", "NO EFFECT: memory.recompute_modules saves nothing of peak allocated"),
        (["layernorm"], "", "NO EFFECT: memory.recompute_modules saves nothing of peak allocated"),
        (["shared_experts"], "", "COSTS MORE: peak allocated is 8.00 MiB above the control's"),
        (["a", "b"], ", max_slowdown='7%'", "TOO SLOW: 10.00% more FLOPs than the control, 7.00% are allowed"),
    ],
)
def test_what_is_no_saving_fails(project: pytest.Pytester, modules: list[str], arguments: str, headline: str) -> None:
    write(
        project,
        f"""
    @pytest.mark.memory_saving({{"recompute_modules": []}}{arguments})
    def test_x(mbmem):
        mbmem.measure(PLAIN.but(recompute_modules={modules}), name="it")
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([headline.replace("peak allocated", "peak allocated*")])
    if modules == ["layernorm"]:
        result.stdout.fnmatch_lines(["  - rank 1 saves 8.00 MiB, but it is not the worst one"])


def test_metric_and_phase_choose_what_is_compared(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN, metric="reserved", at_least="32 MiB")
    @pytest.mark.memory_saving(PLAIN, phase="backward", at_least="16 MiB")
    def test_both(mbmem):
        mbmem.measure(SAVING)

    @pytest.mark.memory_saving(PLAIN, phase="optimizer")
    def test_no_such_phase(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*_both saving allocated@backward * -25.00% * step-2/backward * pass",
            "*_both saving reserved * vs 128.00 MiB * 96.00 MiB * pass",
            "phase='optimizer' selects nothing that rank 0 went through; it has: build, step-2/backward",
        ]
    )


@pytest.mark.parametrize("name", ["oom", "raises"])
def test_a_control_that_does_not_run_says_so(project: pytest.Pytester, name: str) -> None:
    write(
        project,
        f"""
    @pytest.mark.memory_saving(PLAIN.but(name="{name}"), at_least="1 MiB")
    def test_x(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    kind = {"oom": "out of memory", "raises": "error"}[name]
    result.stdout.fnmatch_lines(
        [
            f"INVALID: the control itself does not run ({kind}), so nothing is compared",
            f"  control     {kind} on rank 1 in step-1/forward: *",
            f"*::test_x saving * vs {kind} * 48.00 MiB * invalid",
        ]
    )


def test_a_recipe_that_fits_where_its_control_does_not_passes_unless_a_number_is_asked_for(
    project: pytest.Pytester,
) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN.but(name="oom"))
    def test_x(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*::test_x saving * vs out of memory * fits", "note: *::test_x: fits where the control does not: *"]
    )


def test_a_candidate_that_fails_is_not_compared(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(project.path / "log"))
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    def test_may_fail(mbmem):
        mbmem.measure(SAVING.but(name="oom"), may_fail=True)

    @pytest.mark.memory_saving(PLAIN)
    def test_raises(mbmem):
        mbmem.measure(SAVING.but(name="oom"))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "OUT OF MEMORY: the recipe does not fit NVIDIA H100 80GB HBM3",
            "E *OutOfMemory: out of memory on rank 1*",
            "*::test_may_fail saving * out of memory",
        ]
    )
    assert len((project.path / "log").read_text().splitlines()) == 2  # the candidate of each


def test_the_control_is_measured_once_a_session_and_as_the_candidate(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_LOG", str(project.path / "log"))
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    @pytest.mark.parametrize("module", ["a", "b", "c"])
    def test_x(mbmem, module):
        mbmem.measure(PLAIN.but(recompute_modules=[module]))

    @pytest.mark.memory_saving(PLAIN)
    def test_all_ranks(mbmem):
        mbmem.measure(SAVING, ranks="all")
""",
    )
    project.runpytest().assert_outcomes(passed=4)
    log = (project.path / "log").read_text().splitlines()
    assert sorted(line.split()[1] for line in log) == ["all"] * 2 + ["distinct"] * 4
    assert len(set(log)) == len(log)


def test_a_control_that_died_is_tried_again(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(project.path / "log"))
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN.but(name="dies"))
    @pytest.mark.parametrize("n", [1, 2])
    def test_x(mbmem, n):
        mbmem.measure(SAVING)
""",
    )
    project.runpytest().assert_outcomes(failed=2)
    assert len((project.path / "log").read_text().splitlines()) == 4


def test_it_works_beside_peak_memory_and_all_markers_are_judged(project: pytest.Pytester) -> None:
    write(
        project,
        """
    pytestmark = [pytest.mark.memory_saving(PLAIN, at_least="20 MiB"), pytest.mark.peak_memory(limit="40 MiB")]

    def test_module(mbmem):
        mbmem.measure(SAVING)

    @pytest.mark.memory_saving(PLAIN, max_slowdown="1%")
    @pytest.mark.peak_memory(limit="50 MiB")
    def test_own(mbmem):
        mbmem.measure(PLAIN.but(recompute_modules=["a", "b"]))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: peak allocated is 8.00 MiB over the limit",
            "SAVES TOO LITTLE: peak allocated falls by 16.00 MiB, 4.00 MiB less than asked",
            "TOO SLOW: 10.00% more FLOPs than the control, 1.00% are allowed",
            "*test_own saving * -50.00% * too slow",
            "*test_own saving * -50.00% * pass",
        ]
    )


def test_controls_of_one_name_are_two_controls_and_equal_rules_one(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN.but(name="same"), at_least="10 MiB")
    @pytest.mark.memory_saving(PLAIN.but(name="same"), at_least="10 MiB")
    @pytest.mark.memory_saving(PLAIN.but(name="same", recompute_modules=["moe", "mlp"]), at_least="10 MiB")
    def test_x(mbmem):
        mbmem.measure(SAVING)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines_random(["*test_x saving *-25.00%* pass", "*test_x saving * no effect"])
    assert sum("test_x saving" in line for line in result.outlines) == 2


def test_a_control_that_is_not_matched_hides_no_other_failure(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    @pytest.mark.memory_saving({"recompute_modules": ["shared_experts"]}, at_least="1 GiB")
    @pytest.mark.peak_memory(limit="40 MiB")
    def test_x(mbmem):
        mbmem.measure(PLAIN)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: peak allocated is 24.00 MiB over the limit",
            "SAVES TOO LITTLE: peak allocated falls by 8.00 MiB, 1016.00 MiB less than asked",
            "*control and candidate are the same recipe*",
        ]
    )


def test_a_slowdown_by_moved_bytes_cannot_be_judged(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving({"offload_modules": []}, max_slowdown="1%")
    def test_x(mbmem):
        mbmem.measure(PLAIN.but(offload_modules=["core_attn"]))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "INVALID: peak allocated is compared with its control, but the slowdown cannot be judged",
            "  - max_slowdown: a slowdown by communicated or moved bytes cannot be judged without a real GPU; FLOPs "
            "stay the same, for +8.00 MiB moved to host, +8.00 MiB moved to device, +8.00 MiB of pinned host memory",
            "*::test_x saving * invalid",
        ]
    )


def test_the_control_is_neither_gated_nor_has_it_a_baseline(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    @pytest.mark.peak_memory
    def test_x(mbmem):
        mbmem.measure(SAVING)
""",
    )
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    stored = project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml").read_text()
    assert stored.count("peak:") == 1
    assert f"peak: {48 * MIB}" in stored


WRONG = [
    ("PLAIN, at_lest='1 GiB'", "*memory_saving() has no argument 'at_lest'; did you mean 'at_least'?*"),
    ("", "*memory_saving() needs a control: *"),
    ("{'recompute_module': []}", "*'recompute_module' is not a field of a recipe; did you mean 'recompute_modules'?*"),
    ("'nowhere.yaml'", "*nowhere.yaml: *"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[a for a, _ in WRONG])
def test_a_wrong_marker_is_an_error_of_collecting(project: pytest.Pytester, arguments: str, message: str) -> None:
    write(project, f"\n    @pytest.mark.memory_saving({arguments})\n    def test_x(mbmem): pass\n")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR collecting*", message, "*1 error*"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_a_marked_test_must_ask_for_mbmem(project: pytest.Pytester) -> None:
    write(project, "\n    @pytest.mark.memory_saving(PLAIN)\n    def test_x(): pass\n")
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["test_it.py::test_x: the memory_saving marker * name mbmem among its arguments *"])


def test_a_marked_test_must_measure(project: pytest.Pytester) -> None:
    write(project, "\n    @pytest.mark.memory_saving(PLAIN)\n    def test_x(mbmem): mbmem.compare(PLAIN, SAVING)\n")
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured: *test_x has the memory_saving marker, but never called*"])


def test_a_control_that_is_not_matched_fails_the_test_with_the_differences(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    def test_x(mbmem):
        mbmem.measure(SAVING.but(seq_length=128))

    @pytest.mark.memory_saving(PLAIN)
    def test_same(mbmem):
        mbmem.measure(PLAIN)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "*test_x: memory_saving(control=*): control and candidate differ in more than memory settings: "
            "training.seq_length: 64 -> 128*",
            "*test_same: memory_saving(control=*): control and candidate are the same recipe*",
        ]
    )


def test_a_failing_body_is_not_compared(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_LOG", str(project.path / "log"))
    write(
        project,
        """
    @pytest.mark.memory_saving(PLAIN)
    def test_x(mbmem):
        assert mbmem.measure(SAVING).peak() == 1
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E * assert 50331648 == 1"])
    assert len((project.path / "log").read_text().splitlines()) == 1


@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_report_has_the_comparison(
    project: pytest.Pytester, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    write(
        project,
        """
    @pytest.mark.memory_saving({"recompute_modules": ["moe"]}, at_least="20 MiB")
    @pytest.mark.memory_saving(PLAIN, at_least="10 MiB")
    def test_x(mbmem):
        mbmem.measure(SAVING)
""",
    )
    files = ["--mbmem-json=o.json", "--mbmem-html=o.html", "--junitxml=j.xml", "-o", "junit_family=xunit2"]
    project.runpytest_subprocess("-n", workers, *files).assert_outcomes(failed=1)
    data = json.loads((project.path / "o.json").read_text())
    (measured,) = data["tests"][0]["measurements"]
    first, second = measured["savings"]
    assert (first["verdict"], first["needed"], first["comparison"]["saving"]) == ("pass", 10 * MIB, 16 * MIB)
    assert [rank["saving"] for rank in first["comparison"]["ranks"]] == [16 * MIB, 0]
    assert (second["verdict"], second["rule"]["control"]) == ("saves too little", "recompute_modules=moe")
    found = ElementTree.parse(project.path / "j.xml").iterfind(".//testcase/properties/property")
    figures = {p.get("name"): p.get("value") for p in found}
    assert figures["mbmem_saving_verdict"] == "pass"
    assert figures["mbmem_saving_saved_bytes"] == figures["mbmem_saving_saved_bytes#2"] == str(16 * MIB)
    assert figures["mbmem_saving_extra_flops"] == "50"
    assert figures["mbmem_saving_slowdown"] == "0.05"
    assert figures["mbmem_saving_saved_bytes_by_rank"] == f"0:{16 * MIB} 1:0"
    assert figures["mbmem_saving_control_phase"] == "build"
    assert figures["mbmem_saving_verdict#2"] == "saves too little"
    page = Path(project.path / "o.html").read_text()
    assert "asked for: 20.00 MiB; the control is recompute_modules=moe" in page
    assert "saves 16.00 MiB (25.00%)" in page
    assert "<td>0<td>64.00 MiB<td>48.00 MiB<td>+16.00 MiB<" in page
    assert main(["report", str(project.path / "o.json")]) == 0
    assert "test_x saving" in capsys.readouterr().out
