"""How fast the plugin is, against the speeds it aims at. Prints a table; never a verdict.

make bench
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mbmem import Model, Parallelism, Recipe, Training, preset
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.measure.launch import Launcher, recipe_environment
from pytest_mbmem.measurement import RankMeasurement, SegmentMap
from pytest_mbmem.report import html
from pytest_mbmem.report.results import Judged, Measured, Results, TestResult
from pytest_mbmem.virtual_gpu.build import ensure_driver
from pytest_mbmem.virtual_gpu.gpus import load_gpus

if TYPE_CHECKING:
    from playwright.sync_api import Browser

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


def cpu_seconds(recipe: dict[str, Any], rank: int, record: bool | None) -> float:
    """In a worker: the processor's time of measuring a rank, with the history or without; None: of counting FLOPs."""
    from pytest_mbmem.measure.worker import count_rank, measure_rank

    start = time.process_time()  # without what importing this file takes
    if record is None:
        count_rank(recipe, rank)
    else:
        measure_rank(recipe, rank, {}, 1, record=record)
    return time.process_time() - start


def history(launcher: Launcher) -> None:
    """What recording and attributing the allocator's history adds to a measurement with its counting of FLOPs.

    The processor's time, in turns: what else the machine does decides less on it than on the time that passes.
    """

    def run(recipe: Recipe, ranks: range, record: bool | None) -> float:
        calls = [("run:cpu_seconds", {"recipe": recipe.to_dict(), "rank": rank, "record": record}) for rank in ranks]
        results = launcher.call_all(calls, recipe_environment(recipe), launcher.timeout)
        if failed := next((result for result in results if result.failure is not None), None):
            raise RuntimeError(failed.message)
        return float(sum(result.value for result in results))

    stages = SMALL.but(dp=1, pp=2, global_batch_size=16)
    large = LLAMA_70B.but(steps=2, alloc_conf="expandable_segments:True")
    for name, recipe, ranks, times in (
        ("12 layers", SMALL, range(1), 9),
        ("12 layers on two stages", stages, range(2), 9),
        ("a rank of Llama 3 70B", large, range(1), 3),
    ):
        turns = [[run(recipe, ranks, record) for record in (None, False, True)] for _ in range(times)]
        counting = statistics.median(turn[0] for turn in turns)
        plain = statistics.median(turn[1] for turn in turns)
        added = statistics.median(turn[2] - turn[1] for turn in turns)
        row(f"history and owners, of a measurement of {name}", f"{added / (plain + counting):+.0%}", "+20%")


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


def made_results(launcher: Launcher, tests: int) -> Results:
    """As many tests as asked for, each with the 12 ranks of a real measurement and histories of its own."""
    recipe = SMALL.but(dp=1, pp=12, global_batch_size=48)
    measurement = launcher.measure(recipe)
    chance, results = random.Random(0), Results({"device": measurement.device.key})
    for number in range(tests):
        test = f"tests/test_models.py::test_model[{number}]"
        ranks = tuple(_varied(rank, chance) for rank in measurement.ranks)
        measured = Measured(test, None, dataclasses.replace(measurement, ranks=ranks))
        measured.judged.append(Judged(judge(PeakGate(limit=2**40), measured.measurement, None, test)))
        results.tests[test] = TestResult(test, measured=[measured])
    return results


def _varied(rank: RankMeasurement, chance: random.Random) -> RankMeasurement:
    """With other sizes of each owner and category, as no two recipes have the same."""
    held = rank.composition
    assert held is not None

    def share() -> int:
        return chance.randrange(700_000, 1_300_000)

    def varied(rows: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        shares = [share() for _ in rows[0]]
        return tuple(tuple(size * part // 1_000_000 for size, part in zip(row, shares, strict=True)) for row in rows)

    sizes = varied([sizes for _, *sizes in held.timeline])
    timeline = tuple((point[0], *row) for point, row in zip(held.timeline, sizes, strict=True))
    at_peaks = varied(held.at_peaks)
    phases = tuple(
        dataclasses.replace(figures, peak={**figures.peak, "allocated": sum(row)})
        for figures, row in zip(rank.phases, at_peaks, strict=True)
    )
    composition = dataclasses.replace(held, at_peaks=at_peaks, timeline=timeline)
    segments = tuple(_segment(segment.blocks, segment.small, share()) for segment in rank.segments_at_peak)
    return dataclasses.replace(rank, phases=phases, composition=composition, segments_at_peak=segments)


def _segment(blocks: Iterable[tuple[int, int]], small: bool, share: int) -> SegmentMap:
    sized = tuple((size * share // 1_000_000, category) for size, category in blocks)
    return SegmentMap(sum(size for size, _ in sized), small, sized)


def html_report(launcher: Launcher) -> None:
    """Writing the page of 200 tests, its size, and opening it in Chromium; without one, its size alone."""
    results = made_results(launcher, 200)
    start = time.perf_counter()
    text = html.page(results)
    row("writing the HTML report of 200 tests of 12 ranks", f"{time.perf_counter() - start:.1f} s", "-")
    row("its size", f"{len(text.encode()) / 1e6:.2f} MB", "5 MB")
    path = os.environ.get("MBMEM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        print("opening it: no Chromium found")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "report.html")
        file.write_text(text, encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        opening, drawing = zip(*(_open(browser, file) for _ in range(5)), strict=True)
        browser.close()
    row("opening it in Chromium", f"{statistics.median(opening):.2f} s", "2 s")
    row("from there to the first plot of a test", f"{statistics.median(drawing):.2f} s", "-")


def _open(browser: Browser, file: Path) -> tuple[float, float]:
    """Seconds until the page is loaded and can be used, and then until a test's first plot is there."""
    context = browser.new_context(offline=True)
    page = context.new_page()
    opening = seconds(lambda: page.goto(file.as_uri()))
    opening += seconds(lambda: page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"))

    def draw() -> None:
        page.locator("section summary").first.click()
        page.locator(".plot[data-drawn]").first.wait_for()

    drawing = seconds(draw)
    context.close()
    return opening, drawing


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
    html_report(launcher)
    launcher.close()
    demo = [sys.executable, str(Path(__file__).parents[1] / "examples" / "demo.py")]
    cost = seconds(lambda: subprocess.run(demo, check=True, capture_output=True))
    row("make demo, after installation", f"{cost:.0f} s", "90 s")
    print(f"\non {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
