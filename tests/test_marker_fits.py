"""The `fits` marker: verdicts that a user sees, by which runs they were reached, reports, and mistakes.

With the made-up launcher PyTorch reserves twice the peak, and can do with 1.5 times the peak (see fake_launcher.py).
An H100 has 79.11 GiB, of which 0.5 GiB are the CUDA context and 0.125 GiB NCCL's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.fits import FitGate, FitJudgement, judge_own, judge_recipe
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.units import parse_bytes
from pytest_mbmem.virtual_gpu.gpus import Gpu, load_gpus

MIB, GIB = 2**20, 2**30
H100 = load_gpus()["h100-80gb"]

RECIPES = """
    import pytest
    from pytest_mbmem import Recipe

    def of(gib):  # so many GiB of peak allocated
        return Recipe.from_yaml("recipe.yaml").but(seq_length=gib * 1024)
"""


@pytest.fixture
def runs(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for every measurement."""
    path = project.path / "log"
    path.touch()
    monkeypatch.setenv("FAKE_LOG", str(path))
    return path


def write(project: pytest.Pytester, tests: str) -> None:
    project.makepyfile(RECIPES + tests)


def test_a_recipe_whose_reserve_leaves_room_fits_without_another_run(project: pytest.Pytester, runs: Path) -> None:
    write(
        project,
        """
    @pytest.mark.fits(headroom="4 GiB")
    def test_it(mbmem):
        mbmem.measure(of(30))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_it h100-80gb * <= 74.49 GiB * 60.00 GiB * 0 * build * fits",
            "note: *::test_it: fits h100-80gb with 14.49 GiB left beside 640.00 MiB outside PyTorch and 4.00 GiB of "
            "headroom",
        ]
    )
    assert len(runs.read_text().splitlines()) == 1


def test_a_reserve_that_takes_the_headroom_is_tried_with_less_memory(project: pytest.Pytester, runs: Path) -> None:
    write(
        project,
        """
    @pytest.mark.fits("h100-80gb", headroom="4 GiB")
    def test_it(mbmem):
        mbmem.measure(of(39))  # reserves 78 GiB, needs 58.5
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "note: *::test_it: fits h100-80gb when PyTorch empties its cache beside 640.00 MiB outside PyTorch and *",
            "note: *::test_it: with the whole GPU PyTorch reserves 78.00 GiB, more than there is beside the rest; with "
            "less it emptied its cache 1 times and reserved 74.49 GiB",
        ]
    )
    assert len(runs.read_text().splitlines()) == 2


def test_a_reserve_that_starves_the_rest_is_named_with_remedies(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits(headroom="25 GiB")
    def test_it(mbmem):
        mbmem.measure(of(39), name="big")
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "STARVED: 'big' fits NVIDIA H100 80GB HBM3 alone, but PyTorch's reserve leaves too little for the rest",
            "",
            "  capacity       79.11 GiB (* bytes) of h100-80gb",
            "  outside       640.00 MiB (671088640 bytes), estimated: CUDA context 512.00 MiB, NCCL 128.00 MiB (tp)",
            "  headroom       25.00 GiB (26843545600 bytes)",
            "  for PyTorch    53.49 GiB (* bytes)",
            "  allocated      39.00 GiB (* bytes) at its peak, with the whole GPU",
            "  reserved       78.00 GiB (* bytes) at its peak, with the whole GPU",
            "  rank         0",
            "  failed in    step-2/backward",
            "",
            "  CUDA out of memory. Tried to allocate 1.00 GiB.",
            "",
            "What gives unused memory back, the documents' remedy first:",
            '  - memory.alloc_conf "expandable_segments:True" lets free pieces join',
            '  - memory.alloc_conf "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95" *',
            "  - torch.cuda.empty_cache() *",
            "*::test_it@big h100-80gb * <= 53.49 GiB * 78.00 GiB * starved",
        ]
    )
    result.stdout.no_fnmatch_line("*fits.py*")


def test_live_bytes_that_leave_too_little_are_out_of_memory(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits(headroom="45 GiB")
    def test_it(mbmem):
        mbmem.measure(of(39))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "OUT OF MEMORY: the recipe fits NVIDIA H100 80GB HBM3 alone, but its live bytes leave 5.51 GiB too little "
            "for the rest",
            "*::test_it h100-80gb * out of memory",
        ]
    )
    result.stdout.no_fnmatch_line("*What gives unused memory back*")


def test_other_gpus_are_measured_on_and_judged_each(project: pytest.Pytester, runs: Path) -> None:
    write(
        project,
        """
    @pytest.mark.fits("a100-40gb", "h200-141gb", headroom="1 GiB")
    @pytest.mark.fits("h200-141gb", headroom="200 MiB")
    @pytest.mark.fits()
    def test_it(mbmem):
        mbmem.measure(of(30))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "OUT OF MEMORY: the recipe does not fit NVIDIA A100-SXM4-40GB",
            "  capacity     39.39 GiB (* bytes) of a100-40gb",
            "*::test_it h100-80gb * <= 78.49 GiB * 60.00 GiB * fits",
            "*::test_it h200-141gb * <= 138.99 GiB * 60.00 GiB * fits",  # the closest marker's headroom
            "*::test_it a100-40gb * out of memory *step-2/backward * out of memory",
        ]
    )
    assert len(runs.read_text().splitlines()) == 3


def test_a_gpu_that_is_too_small_for_the_session_is_no_matter_where_another_is_named(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits("h200-141gb")
    def test_other(mbmem):
        assert mbmem.measure(of(60)).failure.kind == "out of memory"

    @pytest.mark.fits("h200-141gb", "h100-80gb")
    def test_this_too(mbmem):
        mbmem.measure(of(60))
""",
    )
    result = project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_other h200-141gb * 120.00 GiB * fits",
            "FAILED *::test_this_too - *OutOfMemory: out of memory on rank 0*",
        ]
    )


def test_a_recipe_that_fails_otherwise_cannot_be_judged(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits
    def test_it(mbmem):
        mbmem.measure(of(1).but(name="raises"), may_fail=True)
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["INVALID: whether the recipe fits NVIDIA H100 80GB HBM3 could not be measured", "*ValueError: oh no"]
    )


def test_own_assumptions_of_a_gpu_count(project: pytest.Pytester) -> None:
    entries = "h100-80gb: {like: h100-80gb, nccl_per_communicator: 3 GiB}", "ours: {like: h100-80gb, capacity: 64 GiB}"
    project.path.joinpath("gpus.yaml").write_text("\n".join(entries))
    write(
        project,
        """
    @pytest.mark.fits("ours", "h100-80gb")
    def test_it(mbmem):
        mbmem.measure(of(30))
""",
    )
    result = project.runpytest("--mbmem-gpus=gpus.yaml")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_it ours * <= 63.38 GiB *", "*::test_it h100-80gb * <= 75.61 GiB *"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "'h101-80gb'",
            "fits('h101-80gb'): there is no virtual GPU of that name; did you mean 'h100-80gb'? known are *",
        ),
        ("80", "fits(80): there is no virtual GPU of that name; known are a100-40gb, *"),
        ("['h100-80gb']", "fits(['h100-80gb']): there is no virtual GPU of that name; known are a100-40gb, *"),
        ("headroom='4'", "fits(headroom=...): '4' is not a size; *"),
        (
            "headroom='80 GiB'",
            "fits(headroom=...): '80 GiB' leaves nothing of h100-80gb, where PyTorch can have 78.61 GiB",
        ),
        ("'a100-40gb', headroom='40 GiB'", "fits(headroom=...): '40 GiB' leaves nothing of a100-40gb, *"),
        (
            "head_room=1",
            "fits() has no argument 'head_room'; did you mean 'headroom'? allowed: names of GPUs, and headroom",
        ),
    ],
)
@pytest.mark.parametrize("host", [(), ("--mbmem-host",)])
def test_mistakes_are_errors_of_the_module(
    project: pytest.Pytester, arguments: str, message: str, host: tuple[str, ...]
) -> None:
    write(
        project,
        f"""
    @pytest.mark.fits({arguments})
    def test_it(mbmem):
        mbmem.measure(of(1))
""",
    )
    result = project.runpytest(*host)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it.py::test_it: {message.replace('[', '[[]')}"])


def test_nothing_on_the_device_is_no_fit() -> None:
    rank = RankMeasurement(0, {}, 1, (PhaseFigures(0, "test", {"allocated": 0, "reserved": 0}, {}),))
    gpu = load_gpus()["h100-80gb"]
    judgement = judge_own(FitGate(gpu), Measurement(Device("virtual-h100-80gb", gpu.name, gpu.capacity, True), (rank,)))
    assert (judgement.verdict, judgement.notes) == ("invalid", ("nothing was allocated on the device",))
    assert not judgement.passed


def test_a_test_in_a_worker_has_the_sessions_gpu(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits("a100-40gb")
    def test_it():
        pass
""",
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_it: fits('a100-40gb'): a test that runs whole in a worker is judged on the GPU of this session, "
            "h100-80gb; leave the name out, or give the recipe to mbmem.measure()"
        ]
    )


def test_something_must_be_measured(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits
    def test_it(mbmem):
        pass

    @pytest.mark.fits
    @pytest.mark.peak_memory
    def test_said_once(mbmem):
        pass

    @pytest.mark.fits
    @pytest.mark.no_memory_growth
    def test_in_a_worker():
        pass
""",
    )
    result = project.runpytest("-k", "not worker")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*changes the peak that fits judges; give each marker a test of its own"])


def test_nothing_measured_is_said_once(project: pytest.Pytester) -> None:
    write(
        project,
        """
    @pytest.mark.fits
    def test_it(mbmem):
        pass

    @pytest.mark.fits
    @pytest.mark.peak_memory
    @pytest.mark.no_memory_growth
    def test_more(mbmem):
        pass
""",
    )
    result = project.runpytest()
    result.assert_outcomes(failed=2)
    lines = [line for line in result.outlines if line.startswith("nothing was measured: ")]
    assert len(lines) == 2
    assert lines[0].endswith("::test_it has the fits marker, but never called mbmem.measure()")


def test_the_host_does_not_judge(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        """
        import pytest

        @pytest.mark.fits("l4-24gb", headroom="20 GiB")
        @pytest.mark.fragmentation(limit="0.01%")
        def test_it(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = host_project.runpytest("--mbmem-host")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::test_it * loss * not gated"])


def test_reports_have_the_verdict(project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        project,
        """
    @pytest.mark.fits("h100-80gb", "a100-40gb", headroom="4 GiB")
    def test_it(mbmem):
        mbmem.measure(of(30))
""",
    )
    arguments = ["--mbmem-json=r.json", "--mbmem-html=r.html", "--junitxml=r.xml"]
    result = project.runpytest(*arguments)
    result.assert_outcomes(failed=1)
    (measured,) = json.loads(Path("r.json").read_text())["tests"][0]["measurements"]
    here, there = measured["fits"]
    assert (here["verdict"], here["passed"], here["outside"]) == ("fits", True, {"CUDA context": 2**29, "NCCL": 2**27})
    assert here["left"] == H100.capacity - 2**29 - 2**27 - 4 * GIB - 60 * GIB
    assert (there["verdict"], there["failure"]["kind"], there["left"]) == ("out of memory", "out of memory", None)
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_fits_verdict@a100-40gb"] == "out of memory"
    assert properties["mbmem_fits_verdict@h100-80gb"] == "fits"
    assert properties["mbmem_fits_left_bytes@h100-80gb"] == str(here["left"])
    assert properties["mbmem_fits_outside_bytes@h100-80gb"] == str(2**29 + 2**27)
    page = Path("r.html").read_text()
    assert "fits h100-80gb with 14.49 GiB left beside 640.00 MiB outside PyTorch" in page
    capsys.readouterr()
    assert main(["report", "r.json"]) == 0
    assert "fits h100-80gb with 14.49 GiB left" in capsys.readouterr().out


# Judging --------------------------------------------------------------------------------------------------------------


def own(allocated: int, reserved: int, **fields: object) -> Measurement:
    figures = {"allocated": allocated, "reserved": reserved}
    rank = RankMeasurement(0, {}, 1, (PhaseFigures(0, "test", figures, figures),))
    return Measurement(Device("virtual-h100-80gb", H100.name, H100.capacity, True), (rank,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allocated", "reserved", "verdict"),
    [
        (60 * GIB, H100.usable - 4 * GIB, "fits"),
        (60 * GIB, H100.usable - 4 * GIB + 1, "starved"),
        (H100.usable - 4 * GIB, H100.usable, "starved"),
        (H100.usable - 4 * GIB + 1, H100.usable, "out of memory"),
    ],
)
def test_a_whole_test_is_judged_by_its_own_figures_to_the_byte(allocated: int, reserved: int, verdict: str) -> None:
    judgement = judge_own(FitGate(H100, 4 * GIB), own(allocated, reserved))
    assert judgement.verdict == verdict
    assert any("NCCL's memory is not in it" in note for note in judgement.notes)
    assert FitJudgement.from_json(json.loads(json.dumps(judgement.to_json())), "t") == judgement


class MadeUp:
    """Stands in for `Launcher`: each rank has GiB of peak allocated, of need and of peak reserved, and its groups.

    It fails on a GPU that has less than it needs; groups None: its collectives cannot be counted.
    """

    def __init__(self, ranks: Sequence[tuple[int, int, int, int | None]], gpu: Gpu = H100) -> None:
        self.given, self.gpu = ranks, gpu
        self.runs: list[tuple[list[int], bool]] = []  # ranks, and whether they were counted

    @property
    def device(self) -> Device:
        return Device(self.gpu.key, self.gpu.name, self.gpu.capacity, True)

    def on(self, gpu: Gpu) -> MadeUp:
        other = MadeUp(self.given, gpu)
        other.runs = self.runs
        return other

    def measure(
        self, recipe: Recipe, *, ranks: Any = "distinct", count_flops: bool = True, check_effects: bool = True
    ) -> Measurement:
        numbers = list(range(len(self.given)) if ranks == "distinct" else ranks)
        self.runs.append((numbers, count_flops))
        found, failures = [], []
        for number in numbers:
            allocated, need, reserved, groups = self.given[number]
            peaks = {"allocated": allocated * GIB, "reserved": reserved * GIB}
            counts: dict[str, Any] = {}
            if count_flops and groups is not None:
                counts = {"flops_per_step": 1, "collective_bytes": {str(n): 1 for n in range(groups)}}
            figures = PhaseFigures(1, "forward", peaks, peaks)  # type: ignore[arg-type]
            found.append(RankMeasurement(number, {"pp": number}, 1, (figures,), **counts))
            if need * GIB > self.gpu.usable:
                failures.append(Failure("out of memory", number, f"rank {number} ran out", 1, "forward"))
        return Measurement(self.device, tuple(found), recipe.to_dict(), failure=failures[0] if failures else None)

    def judged(self, recipe: Recipe, headroom: int, gpu: Gpu = H100) -> FitJudgement:
        recipe = recipe.but(pp=2)
        measured = self.measure(recipe)
        self.runs.clear()
        return judge_recipe(FitGate(gpu, headroom * GIB), measured, "distinct", cast(Launcher, self))


def test_starved_is_not_said_where_the_live_bytes_of_another_rank_do_not_fit(small_recipe: Recipe) -> None:
    """With 40 GiB of headroom 38 are left: the first rank that fails has fewer alive, the second has more."""
    launcher = MadeUp([(30, 45, 60, 1), (50, 52, 60, 1)])
    judgement = launcher.judged(small_recipe, 40)
    assert (judgement.verdict, judgement.rank) == ("out of memory", 1)
    assert judgement.failure is not None
    assert judgement.failure.message == "rank 1 ran out"
    assert launcher.runs == [([1], False)]
    assert launcher.judged(small_recipe, 25).verdict == "fits"  # 53 are left
    assert launcher.judged(small_recipe, 27).verdict == "starved"  # 51 are left


def test_the_rank_for_which_nothing_is_left_is_named(small_recipe: Recipe) -> None:
    judgement = MadeUp([(1, 1, 1, 0), (1, 1, 1, 100)]).judged(small_recipe, 70)
    assert (judgement.verdict, judgement.rank) == ("out of memory", 1)
    assert judgement.failure is not None
    assert (judgement.failure.rank, judgement.failure.message) == (
        1,
        "headroom and memory outside PyTorch leave nothing of the GPU",
    )


@pytest.mark.parametrize(("second", "counted"), [(1, False), (None, True)])
def test_all_ranks_are_counted_where_one_is_not_known(small_recipe: Recipe, second: int | None, counted: bool) -> None:
    launcher = MadeUp([(1, 1, 2, 1), (1, 1, 1, second)])
    judgement = launcher.judged(small_recipe, 1, load_gpus()["h200-141gb"])
    assert launcher.runs == [([0, 1], counted)]
    note = "NCCL's memory is not in it: the collectives of a step were not counted on rank 1"
    assert judgement.rank == 0
    assert judgement.notes == ((note,) if counted else ())


def test_a_whole_test_in_a_worker(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.fits(headroom="4 GiB")
        def test_fits():
            import torch
            torch.empty(2**30, dtype=torch.uint8, device="cuda")

        @pytest.mark.fits(headroom="70 GiB")
        def test_starved():
            import torch
            for size in (4, 5, 6):
                torch.empty(size * 2**30, dtype=torch.uint8, device="cuda")
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "STARVED: the test fits NVIDIA H100 80GB HBM3 alone, but *",
            "  outside       512.00 MiB (536870912 bytes), estimated: CUDA context 512.00 MiB",
            "*::test_fits h100-80gb * <= 74.61 GiB * 1.00 GiB * fits",
            "*::test_starved h100-80gb * <= 8.61 GiB * 15.00 GiB * starved",
        ]
    )


# On the virtual GPU ---------------------------------------------------------------------------------------------------


def test_what_a_smaller_gpu_runs_fits_and_a_byte_less_does_not(launcher: Launcher, small_recipe: Recipe) -> None:
    """The bound that bisection finds is that of PyTorch's allocator on the virtual GPU, run by hand."""
    recipe = small_recipe.but(hidden_size=1024, seq_length=1024, num_layers=4, tp=2, sequence_parallel=True)
    measured = launcher.measure(recipe)
    (rank,) = measured.ranks
    beside = H100.context_bytes + len(rank.collective_bytes) * H100.nccl_per_communicator
    most = H100.capacity - beside - rank.peak("reserved")

    def judged(headroom: int) -> FitJudgement:
        return judge_recipe(FitGate(H100, headroom), measured, "distinct", launcher)

    assert (judged(most).verdict, judged(most).left) == ("fits", 0)
    tight = judged(H100.capacity - beside - rank.peak())
    assert tight.verdict == "starved"
    assert tight.failure is not None
    assert tight.failure.message.startswith("CUDA out of memory")
    assert judged(H100.capacity - beside - rank.peak() + 1).verdict == "out of memory"
    assert judged(H100.usable - 1).verdict == "out of memory"

    # Settings that allow PyTorch a fraction of the GPU, of which there is more than enough, change nothing.
    limited = launcher.measure(recipe.but(alloc_conf="per_process_memory_fraction:0.02"), check_effects=False)
    with_less = judge_recipe(FitGate(H100, most + 2 * MIB), limited, "distinct", launcher)
    assert with_less.left == -2 * MIB
    assert with_less.verdict == "fits"
    assert with_less.notes[0].endswith("with less it emptied its cache 1 times and reserved 694.00 MiB")


def test_another_gpu_is_that_gpu(launcher: Launcher, small_recipe: Recipe) -> None:
    l4 = load_gpus()["l4-24gb"]
    measured = launcher.measure(small_recipe)
    judgement = judge_recipe(FitGate(l4), measured, "distinct", launcher)
    alone = launcher.on(l4).measure(small_recipe, count_flops=False)
    assert alone.device.capacity == l4.capacity == judgement.rule.capacity
    assert (judgement.verdict, judgement.reserved) == ("fits", alone.peak("reserved"))
    assert judgement.reserved != measured.peak("reserved")  # workspaces depend on the architecture
    assert judgement.outside == {"CUDA context": parse_bytes("512 MiB", "t"), "NCCL": 0}


def test_too_large_for_another_gpu_is_explained(launcher: Launcher, small_recipe: Recipe) -> None:
    l4 = load_gpus()["l4-24gb"]
    recipe = small_recipe.but(hidden_size=8192, num_attention_heads=64, num_layers=8, vocab_size=32000)
    judgement = judge_recipe(FitGate(l4), launcher.measure(recipe, count_flops=False), "distinct", launcher)
    assert judgement.verdict == "out of memory"
    assert judgement.failure is not None
    assert judgement.failure.shortage is not None
    assert judgement.failure.shortage.limit == l4.capacity
    assert judgement.failure.shortage.verdict == "capacity"
