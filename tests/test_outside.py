"""Memory outside PyTorch: estimated, shown apart, in no peak."""

from __future__ import annotations

from dataclasses import replace

from pytest_mbmem import outside
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report.html import page
from pytest_mbmem.report.results import Measured, Results, TestResult
from pytest_mbmem.report.terminal import measurement_lines
from pytest_mbmem.virtual_gpu.gpus import load_gpus

MIB = 2**20
H100 = load_gpus()["h100-80gb"]


def test_nccl_is_estimated_by_the_process_groups_of_a_step() -> None:
    assert outside.estimate(H100, {}) == {"CUDA context": 512 * MIB, "NCCL": 0}
    assert outside.estimate(H100, {"tp": 1, "dp": 10**9}) == {"CUDA context": 512 * MIB, "NCCL": 256 * MIB}
    assert outside.estimate(H100, None) == {"CUDA context": 512 * MIB}


def test_each_measured_rank_has_its_own(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(pp=2, tp=2, sequence_parallel=True, num_layers=4)
    measurement = launcher.measure(recipe)
    assert len(measurement.ranks) == 2
    for rank in measurement.ranks:
        assert {"tp", "pp"} <= rank.collective_bytes.keys()
        nccl = len(rank.collective_bytes) * H100.nccl_per_communicator
        assert rank.outside == {"CUDA context": H100.context_bytes, "NCCL": nccl}
    assert outside.assumption(H100) in measurement.assumptions


def test_it_is_in_no_peak(launcher: Launcher, small_recipe: Recipe) -> None:
    doubled = replace(H100, nccl_per_communicator=10 * H100.nccl_per_communicator)
    recipe = small_recipe.but(tp=2, sequence_parallel=True)
    plain, other = launcher.measure(recipe), launcher.on(doubled).measure(recipe)
    assert plain.ranks[0].outside["NCCL"] * 10 == other.ranks[0].outside["NCCL"] > 0
    assert plain.ranks[0].phases == other.ranks[0].phases


def test_collectives_that_were_not_counted_are_no_zero(launcher: Launcher, small_recipe: Recipe) -> None:
    (rank,) = launcher.measure(small_recipe, count_flops=False).ranks
    assert rank.outside == {"CUDA context": H100.context_bytes}
    assert outside.counted(rank) is None


def test_reports_show_it_apart(launcher: Launcher, small_recipe: Recipe) -> None:
    measurement = launcher.measure(small_recipe.but(tp=2, sequence_parallel=True))
    (rank,) = measurement.ranks
    shown = (
        f"CUDA context 512.00 MiB, NCCL {128 * len(rank.collective_bytes)}.00 MiB ({', '.join(rank.collective_bytes)})"
    )
    lines = measurement_lines(measurement)
    assert f"outside PyTorch: {shown}" in lines
    assert any(
        line.startswith("assumed: memory outside PyTorch is an estimate, in no peak: 512.00 MiB") for line in lines
    )
    results = Results({}, {"t": TestResult("t", measured=[Measured("t", None, measurement)])})
    assert f"<td>{shown}<" in page(results)
    assert measurement.to_json()["ranks"][0]["outside"] == rank.outside


def test_only_what_is_known_is_written() -> None:
    assert outside.text({}, []) == ""
    assert outside.text({"CUDA context": MIB}, []) == "CUDA context 1.00 MiB"
