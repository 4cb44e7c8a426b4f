"""Times, rates and losses in the text of a measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_mbmem.measurement import Device, Measurement
from pytest_mbmem.report import html
from pytest_mbmem.report.results import Measured, Results
from pytest_mbmem.report.terminal import measurement_lines

MIB, GIB = 2**20, 2**30
REAL = Device("nvidia-h100-80gb-hbm3", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=False)


def on_real_gpu(measured: Measured, **fields: Any) -> Measurement:
    measurement = measured.measurement
    ranks = tuple(replace(rank, **fields) for rank in measurement.ranks)
    return replace(measurement, device=REAL, ranks=ranks, recipe=None, mode="joint")


def test_a_real_measurement_has_times_and_the_devices_memory(measured: Callable[..., Measured]) -> None:
    one = on_real_gpu(
        measured(GIB, GIB // 2),
        step_times=(0.05, 0.05, 0.06),
        cold_step=0.9,
        model_flops=5 * 10**12,
        device_used=3 * GIB,
        losses=(5.5, 5.4),
        skipped_steps=0,
    )
    lines = measurement_lines(one)
    head, first, _ = next(lines[i : i + 3] for i, line in enumerate(lines) if line.startswith("rank  coordinates"))
    assert head.split("FLOPs a step")[1].split() == ["device", "used", "cold", "step", "step"]
    assert first.endswith("3.00 GiB  900.00 ms  50.00 ms")
    assert (
        "a step takes 50.00 ms (median of 3, spread 5.00 ms; the cold step 900.00 ms): 100.00 TFLOP/s per GPU" in lines
    )
    assert not any("loss" in line or "skipped" in line for line in lines)


def test_losses_that_are_not_finite_and_skipped_steps_are_named(measured: Callable[..., Measured]) -> None:
    lines = measurement_lines(on_real_gpu(measured(GIB), losses=(None, 5.4, None), skipped_steps=2))
    assert "rank 0: the loss is not finite in 2 of 3 steps" in lines
    assert "rank 0: steps that the optimizer skipped: 2" in lines
    assert not any("a step takes" in line or "no step time" in line for line in lines)  # nothing was timed


def test_times_that_cannot_be_trusted_say_why(measured: Callable[..., Measured]) -> None:
    assert "no step time: a single step was timed on rank 0" in measurement_lines(
        on_real_gpu(measured(GIB), step_times=(0.05,))
    )


def test_a_virtual_gpu_has_no_time(measured: Callable[..., Measured], results: Callable[..., Results]) -> None:
    one = measured(GIB)
    text = "\n".join(measurement_lines(one.measurement)) + html.page(results({"test_x.py::test_x": [one]}))
    for word in (" ms", "cold step", "tokens/s", "FLOP/s", "device used", "a step takes"):
        assert word not in text


def test_the_page_shows_the_times_of_what_no_marker_judges(
    measured: Callable[..., Measured], results: Callable[..., Results]
) -> None:
    one = measured(GIB)
    one.measurement = on_real_gpu(one, step_times=(0.05, 0.05), losses=(None,))
    page = html.page(results({"test_x.py::test_x": [one]}))
    assert "<li>a step takes 50.00 ms (median of 2, spread 0.00 us)</li>" in page
    assert "<li>rank 0: the loss is not finite in 1 of 1 steps</li>" in page
