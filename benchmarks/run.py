"""How fast the plugin is, against the speeds it aims at. Prints a table; never a verdict.

make bench
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pytest_mbmem import Model, Parallelism, Recipe, Training, preset
from pytest_mbmem.measure.launch import Launcher, recipe_environment
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


def history(launcher: Launcher) -> None:
    """What recording and attributing the allocator's history adds to a measurement with its counting of FLOPs."""
    worker = "pytest_mbmem.measure.worker"

    def run(recipe: Recipe, record: bool) -> float:
        rank = {"recipe": recipe.to_dict(), "rank": 0}
        measure = {**rank, "coordinates": {}, "stands_for": 1, "record": record}
        calls = [(f"{worker}:measure_rank", measure), (f"{worker}:count_rank", rank)]
        return seconds(lambda: launcher.call_all(calls, recipe_environment(recipe), launcher.timeout))

    large = LLAMA_70B.but(steps=2, alloc_conf="expandable_segments:True")
    for name, recipe, times in (("12 layers", SMALL, 9), ("a rank of Llama 3 70B", large, 3)):
        turns = [(run(recipe, False), run(recipe, True)) for _ in range(times)]
        without, with_history = (statistics.median(t) for t in zip(*turns, strict=True))
        row(f"history and owners, of a measurement of {name}", f"{with_history / without - 1:+.0%}", "+30%")


def leave_a_million_events(file: str) -> None:
    """In a worker: the snapshot of a run that allocates and frees at random, 20 calls deep."""
    import torch

    allocate, free = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=2_000_000)
    chance, live, events = random.Random(0), list[int](), 0

    def deep(calls: int, size: int) -> int:
        return allocate(size, 0) if calls == 0 else deep(calls - 1, size)

    while events < 1_000_000:
        if len(live) > 1000 or (live and chance.random() < 0.49):
            free(live.pop(chance.randrange(len(live))))
            events += 2
        else:
            live.append(deep(20, int(2 ** chance.uniform(8, 27))))
            events += 1
    torch.cuda.memory._dump_snapshot(file)


def snapshots(launcher: Launcher) -> None:
    """The commands on a million events, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "snapshot.pickle"))
        made = launcher.call("run:leave_a_million_events", {"file": file})
        if made.failure is not None:
            raise RuntimeError(made.message)
        expandable = ["--alloc-conf", "expandable_segments:True"]
        for command, aim in ((["snapshot", file], "20 s"), (["replay", file, *expandable], "60 s for each replay")):
            program = "import sys; from pytest_mbmem.cli import main; sys.exit(main())"
            start = time.perf_counter()
            process = subprocess.Popen([sys.executable, "-c", program, *command], stdout=subprocess.DEVNULL)
            _, _, usage = os.wait4(process.pid, 0)
            taken = f"{time.perf_counter() - start:.0f} s, {usage.ru_maxrss / 2**20:.2f} GiB"
            row(f"mbmem {command[0]} of 1,000,000 events", taken, f"{aim}, 2 GB")


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
    history(launcher)
    snapshots(launcher)
    launcher.close()
    demo = [sys.executable, str(Path(__file__).parents[1] / "examples" / "demo.py")]
    cost = seconds(lambda: subprocess.run(demo, check=True, capture_output=True))
    row("make demo, after installation", f"{cost:.0f} s", "90 s")
    print(f"\non {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
