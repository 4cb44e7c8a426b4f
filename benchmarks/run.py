"""How fast the plugin is, against the speeds it aims at. Prints a table; never a verdict.

make bench
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_mbmem import Model, Parallelism, Recipe, Training, preset
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.virtual_gpu.build import ensure_driver
from pytest_mbmem.virtual_gpu.gpus import load_gpus

SMALL = Recipe(
    model=Model(num_layers=12, hidden_size=512, num_attention_heads=8),
    parallelism=Parallelism(dp=8),
    training=Training(seq_length=1024, micro_batch_size=4),
)
LLAMA_70B = Recipe(
    model=preset("llama3-70b"),
    parallelism=Parallelism(tp=4, sequence_parallel=True, pp=4, vpp=5, dp=2, distributed_optimizer=True),
    training=Training(seq_length=4096, global_batch_size=32, attention_backend="flash"),
)


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def row(what: str, measured: str, aim: str) -> None:
    print(f"{what:<72} {measured:>16}   aim: {aim}", flush=True)


def pytest_run(folder: str, *arguments: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments, folder]
    return seconds(lambda: subprocess.run(command, cwd=folder, check=True, capture_output=True))


def unmarked_tests() -> None:
    """1,000 tests without the plugin and with it, in turns, so that the machine's drift hits both."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_many.py").write_text("".join(f"def test_{i}():\n    pass\n" for i in range(1000)))
        runs = [(pytest_run(folder, "-p", "no:mbmem"), pytest_run(folder)) for _ in range(11)]
        without, with_plugin = (statistics.median(times) for times in zip(*runs, strict=True))
        row("1,000 unmarked tests with the plugin, against without", f"{with_plugin / without - 1:+.1%}", "+1%")


def plugin_import() -> None:
    program = "import time; t = time.perf_counter(); import pytest_mbmem.plugin; print(time.perf_counter() - t)"
    program = f"import pytest; {program}"
    times = [float(subprocess.check_output([sys.executable, "-c", program])) for _ in range(5)]
    row("importing the plugin", f"{min(times) * 1000:.0f} ms", "50 ms")


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        row("building the driver, once per torch", f"{seconds(lambda: ensure_driver(Path(cache))):.1f} s", "10 s")
    plugin_import()
    unmarked_tests()
    launcher = Launcher(load_gpus()["h100-80gb"])
    row("first measurement of a session", f"{seconds(lambda: launcher.measure(SMALL)):.1f} s", "-")
    times = [seconds(lambda: launcher.measure(SMALL)) for _ in range(5)]
    row("12 layers, hidden 512, 3 steps, from call to measurement", f"{statistics.median(times):.2f} s", "1 s")
    for dp in (1, 16, 256, 12500):
        recipe = LLAMA_70B.but(num_layers=20, vpp=None, tp=4, pp=2, dp=dp, global_batch_size=2 * dp)
        cost = seconds(lambda recipe=recipe: launcher.measure(recipe, ranks=[0], count_flops=False))
        row(f"one rank of a job of {recipe.world_size:,}", f"{cost:.2f} s", "flat")
    cost = seconds(lambda: launcher.measure(LLAMA_70B))
    row("Llama 3 70B, TP4 PP4 VPP5 DP2, batch 32 x 4096, distinct ranks, 3 steps", f"{cost:.1f} s", "45 s on 2 cores")
    launcher.close()
    demo = [sys.executable, str(Path(__file__).parents[1] / "examples" / "demo.py")]
    cost = seconds(lambda: subprocess.run(demo, check=True, capture_output=True))
    row("make demo, after installation", f"{cost:.0f} s", "90 s")
    print(f"\non {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
