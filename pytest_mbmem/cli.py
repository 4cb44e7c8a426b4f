"""The command `mbmem`: measure or check a recipe, show the results of a test run, list the virtual GPUs."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import cli_estimate, cli_reports
from .cli_files import check_outputs, write
from .errors import IncompatibleSettings, MeasurementFailed, TooFewGpus, UserError
from .options import DEFAULT_GPU, DEFAULT_TIMEOUT, choose_gpu, choose_ranks_mode, seconds

if TYPE_CHECKING:
    from .measure.launch import Launcher
    from .measure.ranks import Ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, 1 for a measurement that failed or a recipe that is refused, 2 for a mistake of the user."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal has no characters for
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except (UserError, TooFewGpus) as error:
        print(f"mbmem: error: {error}", file=sys.stderr)
        return 2
    except MeasurementFailed as error:
        print(f"mbmem: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `mbmem ... | head`; what is left must not be written at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mbmem", description="Peak GPU memory of Megatron Core recipes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    measure = commands.add_parser("measure", help="measure a recipe on a virtual GPU, or on real ones")
    measure.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    measure.add_argument("--virtual-gpu", metavar="NAME", help=f"default: {DEFAULT_GPU}")
    measure.add_argument("--gpu", action="store_true", help="on the GPUs of this machine, and on a virtual twin")
    measure.add_argument(
        "--mode",
        metavar="MODE",
        help="with --gpu: joint (all ranks at once), solo (one at a time), or auto (joint if there are GPUs enough; "
        "the default)",
    )
    measure.add_argument("--gpus", type=Path, metavar="FILE", help="YAML file with more virtual GPUs")
    measure.add_argument(
        "--ranks",
        metavar="RANKS",
        default="distinct",
        help='"distinct" (one of each kind; the default), "all", or "0,3"',
    )
    measure.add_argument(
        "--timeout",
        metavar="SECONDS",
        default=str(DEFAULT_TIMEOUT),
        help="time limit of one rank (default: %(default)s)",
    )
    measure.add_argument("--json", type=Path, metavar="FILE", help="write the measurement as JSON")
    measure.set_defaults(run=_measure)

    check = commands.add_parser("check", help="say which documented constraints a recipe breaks, before anything runs")
    check.add_argument("recipes", type=Path, nargs="+", metavar="RECIPE.yaml")
    check.add_argument("--megatron-core", metavar="VERSION", help="judge as for this version (default: the installed)")
    check.set_defaults(run=_check)

    cli_estimate.add(commands)

    explain = commands.add_parser("explain", help="show what is known of a documented constraint")
    explain.add_argument("id", nargs="?", metavar="ID", help="of the constraint; without it, all are listed")
    explain.set_defaults(run=_explain)

    report = commands.add_parser("report", help="show the results of a test run")
    report.add_argument("results", type=Path, metavar="RESULTS.json", help="what pytest --mbmem-json=FILE wrote")
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page to be read in a browser")
    report.add_argument(
        "--earlier",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="JUnit or --mbmem-json file of an earlier run, or a folder of them, for the trend; may be repeated",
    )
    report.set_defaults(run=_report)

    cli_reports.add(commands)

    snapshot = commands.add_parser("snapshot", help="show what PyTorch's memory snapshot of a run says")
    snapshot.add_argument("file", type=Path, metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    snapshot.add_argument("--device", metavar="N", help="which GPU, where the run used several")
    snapshot.add_argument("--top", metavar="N", default="20", help="owners to show (default: %(default)s; 0 for all)")
    snapshot.add_argument("--json", type=Path, metavar="FILE", help="write the summary as JSON")
    snapshot.set_defaults(run=_snapshot)

    replay = commands.add_parser("replay", help="say whether the run of a memory snapshot would have fitted")
    replay.add_argument("file", type=Path, metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote")
    replay.add_argument("--device", metavar="N", help="which GPU, where the run used several")
    replay.add_argument(
        "--alloc-conf",
        action="append",
        metavar="SETTINGS",
        help="settings of PyTorch's allocator, as in expandable_segments:True; give it again to compare",
    )
    replay.add_argument("--capacity", metavar="SIZE", help='of the whole GPU, as in "80 GiB"')
    replay.add_argument("--virtual-gpu", metavar="NAME", help=f"GPU to replay on (default: {DEFAULT_GPU})")
    replay.add_argument("--gpus", type=Path, metavar="FILE", help="YAML file with more virtual GPUs")
    replay.add_argument(
        "--timeout",
        metavar="SECONDS",
        default=str(DEFAULT_TIMEOUT),
        help="time limit of one replay (default: %(default)s)",
    )
    replay.set_defaults(run=_replay)

    gpus = commands.add_parser("gpus", help="list the virtual GPUs")
    gpus.add_argument("--gpus", type=Path, metavar="FILE", help="YAML file with more virtual GPUs")
    gpus.set_defaults(run=_gpus)
    return parser


def _measure(arguments: argparse.Namespace) -> int:
    from . import progress
    from .recipe import Recipe
    from .report.terminal import measurement_lines

    check_outputs({"--json": arguments.json}, [path for path in (arguments.recipe, arguments.gpus) if path is not None])
    ranks, timeout = _ranks(arguments.ranks), seconds(arguments.timeout, "--timeout")
    recipe = Recipe.from_yaml(arguments.recipe)
    launcher = _launcher(arguments, timeout)
    launcher.progress = progress.on_terminal(sys.stderr, str(arguments.recipe))
    try:
        measurement = launcher.measure(recipe, ranks=ranks)
        if measurement.can_be_explained:
            measurement = launcher.explain(measurement)
    finally:
        launcher.close()
    print("\n".join(measurement_lines(measurement)))
    if arguments.json is not None:
        write(arguments.json, json.dumps(measurement.to_json(), indent=1) + "\n")
    return 0 if measurement.failure is None else 1


def _launcher(arguments: argparse.Namespace, timeout: float) -> Launcher:
    """On the virtual GPU, or on the real ones, that the arguments of `mbmem measure` name."""
    from .measure import launch
    from .virtual_gpu.gpus import load_gpus

    if not arguments.gpu:
        if arguments.mode is not None:
            raise UserError("--mode: on a virtual GPU every rank is measured alone; it is for --gpu")
        gpu = choose_gpu(arguments.virtual_gpu or DEFAULT_GPU, arguments.gpus, "--virtual-gpu")
        return launch.Launcher(gpu, timeout=timeout)
    if arguments.virtual_gpu is not None:
        raise UserError("--virtual-gpu: with --gpu the virtual twin is of the real GPU; leave one out")
    from .measure.gpu_launch import GpuLauncher
    from .measure.nvml import machine

    mode = choose_ranks_mode(arguments.mode or "auto", "--mode")
    return GpuLauncher(machine(), load_gpus(arguments.gpus), timeout=timeout, mode=mode)


def _check(arguments: argparse.Namespace) -> int:
    from .incompatibilities import check, installed
    from .incompatibilities.explain import accepted_text, notes_text, unknown_text
    from .recipe import Recipe

    other_version = arguments.megatron_core is not None
    other = {"megatron-core": _megatron_version(arguments.megatron_core)} if other_version else {}
    versions = {**installed(), **other}
    status = 0
    for path in arguments.recipes:
        try:
            recipe = Recipe.from_yaml(path)
        except UserError as error:  # the others are judged all the same
            print(f"mbmem: error: {error}", file=sys.stderr)
            status = 2
            continue
        unknown = unknown_text(recipe) if "megatron-core" in versions and not other_version else ""
        try:
            check(recipe, versions=versions)
            said = accepted_text(recipe, versions)
        except IncompatibleSettings as error:
            said = f"{error}\n"
            status = max(status, 1)
        if unknown:
            status = max(status, 1)
        print("\n".join(filter(None, (said, unknown, notes_text(recipe, versions)))), end="\n\n")
    return status


def _megatron_version(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text))
    except InvalidVersion:
        raise UserError(f"--megatron-core: {text!r} is not a version, as in 0.16.1") from None


def _explain(arguments: argparse.Namespace) -> int:
    from .incompatibilities import catalog
    from .incompatibilities.explain import entry_text, list_text

    print(list_text(catalog()) if arguments.id is None else entry_text(catalog()[arguments.id]))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from .report import html
    from .report.json import load
    from .report.run_figures import files_of
    from .report.terminal import summary_lines
    from .report.trend import read_series

    if arguments.earlier and arguments.html is None:
        raise UserError("--earlier: nothing shows it; give --html FILE too, or see `mbmem trend`")
    check_outputs({"--html": arguments.html}, [arguments.results, *files_of(arguments.earlier)])
    results, earlier = load(arguments.results), read_series(arguments.earlier) if arguments.earlier else ()
    lines = summary_lines(results, shutil.get_terminal_size().columns)
    print("\n".join(lines) if lines else f"{arguments.results}: no test measured anything")
    if arguments.html is not None:
        write(arguments.html, html.page(results, earlier))
    return 0


def _gpus(arguments: argparse.Namespace) -> int:
    from .report.text import table
    from .units import format_bytes
    from .virtual_gpu.gpus import load_gpus

    cells = [["name", "shows as", "capacity", "context", "NCCL a group", "compute capability", "SMs"]]
    for gpu in load_gpus(arguments.gpus).values():
        capability = ".".join(map(str, gpu.compute_capability))
        sizes = map(format_bytes, (gpu.capacity, gpu.context_bytes, gpu.nccl_per_communicator))
        cells.append([gpu.key, gpu.name, *sizes, capability, str(gpu.sm_count)])
    print("\n".join(table(cells, right={"capacity", "context", "NCCL a group", "compute capability", "SMs"})))
    return 0


def _snapshot(arguments: argparse.Namespace) -> int:
    from .history.snapshot import read_snapshot
    from .history.summary import Summary
    from .report.snapshots import summary_lines

    check_outputs({"--json": arguments.json}, [arguments.file])
    device, top = _whole(arguments.device, "--device"), _whole(arguments.top, "--top")
    summary = Summary.of(read_snapshot(arguments.file, device))
    print("\n".join(summary_lines(summary, top or 0)))
    if arguments.json is not None:
        write(arguments.json, json.dumps(summary.to_json(), indent=1) + "\n")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from .history.snapshot import read_snapshot
    from .measure.launch import Launcher
    from .measure.replay_runs import limit_of, replay_snapshot
    from .report.snapshots import replay_lines

    gpu = choose_gpu(arguments.virtual_gpu or DEFAULT_GPU, arguments.gpus, "--virtual-gpu")
    named = arguments.virtual_gpu is not None
    timeout = seconds(arguments.timeout, "--timeout")
    limit = limit_of(arguments.capacity, gpu, named=named)
    snapshot = read_snapshot(arguments.file, _whole(arguments.device, "--device"))
    launcher = Launcher(gpu, timeout=timeout)
    try:
        replays = replay_snapshot(launcher, snapshot, arguments.alloc_conf, limit)
    finally:
        launcher.close()
    print("\n".join(replay_lines(replays)))
    return 0 if replays.changed[-1].result.failed is None else 1


def _whole(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"{option}: {text!r} is not a whole number of 0 or more")
    return int(text)


def _ranks(text: str) -> Ranks:
    if text == "distinct":
        return "distinct"
    if text == "all":
        return "all"
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UserError(f"--ranks: {text!r} is not distinct, all, or numbers of ranks as in 0,3")
    return [int(number) for number in text.split(",")]
