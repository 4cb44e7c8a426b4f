"""The command `mbmem estimate`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_files import check_outputs, write
from .errors import MeasurementFailed, UserError
from .options import DEFAULT_GPU, DEFAULT_TIMEOUT, choose_gpu, seconds

if TYPE_CHECKING:
    from .estimate import Estimate
    from .measurement import Measurement
    from .recipe import Recipe
    from .report.estimates import Room, Side
    from .virtual_gpu.gpus import Gpu


def add(commands: Any) -> None:
    """Declare it."""
    parser = commands.add_parser("estimate", help="estimate a recipe's memory in closed form, before anything runs")
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("--virtual-gpu", metavar="NAME", help=f"GPU that it shall fit (default: {DEFAULT_GPU})")
    parser.add_argument("--gpus", type=Path, metavar="FILE", help="YAML file with more virtual GPUs")
    parser.add_argument("--measure", action="store_true", help="measure it on the virtual GPU too, and compare")
    parser.add_argument(
        "--real", type=Path, metavar="FILE", help="compare with what `mbmem measure --gpu --json` wrote, and its GPU"
    )
    parser.add_argument(
        "--timeout",
        metavar="SECONDS",
        help=f"with --measure: time limit of one rank (default: {DEFAULT_TIMEOUT:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the estimate as JSON")
    parser.set_defaults(run=_estimate)


def _estimate(arguments: argparse.Namespace) -> int:
    from .estimate import estimate
    from .recipe import Recipe
    from .report.estimates import Side, estimate_lines

    inputs = (arguments.recipe, arguments.real, arguments.gpus)
    check_outputs({"--json": arguments.json}, [path for path in inputs if path is not None])
    timeout = DEFAULT_TIMEOUT
    if arguments.timeout is not None:
        timeout = seconds(arguments.timeout, "--timeout")
        if not arguments.measure:
            raise UserError("--timeout: nothing is measured without --measure; leave it out")
    gpu = choose_gpu(arguments.virtual_gpu or DEFAULT_GPU, arguments.gpus, "--virtual-gpu")
    recipe = Recipe.from_yaml(arguments.recipe)
    found = estimate(recipe)
    real = _load(arguments.real, recipe) if arguments.real is not None else None
    virtual = _measure(gpu, recipe, timeout) if arguments.measure else real.twin if real is not None else None
    pairs = [("virtual", virtual), ("real", real)]
    sides = [side for name, m in pairs if m is not None and (side := Side.of(name, m, found)) is not None]
    named = arguments.virtual_gpu is not None
    room = _room_of_real(real, sides) if real is not None and not named else _room(gpu, recipe)
    print("\n".join(estimate_lines(found, room, sides)))
    if arguments.json is not None:
        write(arguments.json, json.dumps(_plain(found, room, sides), indent=1) + "\n")
    return 1 if found.exceeds(room.size) else 0


def _measure(gpu: Gpu, recipe: Recipe, timeout: float) -> Measurement:
    """The recipe's ranks that can differ, so that the estimate's choice of a rank is judged too."""
    from .compare import how
    from .measure.launch import Launcher

    launcher = Launcher(gpu, timeout=timeout)
    try:
        measurement = launcher.measure(recipe, count_flops=False, check_effects=False)
    finally:
        launcher.close()
    failure = measurement.failure
    if failure is not None:
        raise MeasurementFailed(f"--measure: {how(failure)}; leave it out to estimate alone")
    return measurement


def _load(path: Path, recipe: Recipe) -> Measurement:
    """A measurement of this recipe on a real GPU."""
    from .measurement import Measurement
    from .recipe import Recipe
    from .report.rows import worst_of

    measurement = Measurement.load(path)
    if measurement.device.virtual:
        raise UserError(
            f"--real: {path} is of {measurement.device.key}, which is virtual; `mbmem measure --gpu` is real"
        )
    if measurement.recipe is None:
        raise UserError(f"--real: {path} is of a test without a recipe")
    differences = recipe.differences(Recipe.from_dict(measurement.recipe, str(path)))
    if differences:
        said = ", ".join(f"{key} {here!r} here and {there!r} there" for key, (here, there) in differences.items())
        raise UserError(f"--real: {path} is of another recipe: {said}")
    if measurement.failure is not None or worst_of(measurement) is None:
        raise UserError(f"--real: {path} is of a run that did not come to its end, and has no peak to compare with")
    return measurement


def _room(gpu: Gpu, recipe: Recipe) -> Room:
    from . import outside
    from .estimate import communicators
    from .report.estimates import Room

    return Room(gpu.key, gpu.capacity, outside.estimate(gpu, dict.fromkeys(communicators(recipe), 0)))


def _room_of_real(real: Measurement, sides: list[Side]) -> Room:
    from .report.estimates import Room

    (side,) = (side for side in sides if side.name == "real")
    held = side.rank.outside
    if not held and side.rank.device_used is not None:
        held = {"what NVML counts beside PyTorch": max(0, side.rank.device_used - side.rank.peak("reserved"))}
    return Room(real.device.key, real.device.capacity, held)


def _plain(found: Estimate, room: Room, sides: list[Side]) -> dict[str, Any]:
    return {
        **found.to_json(),
        "gpu": {"name": room.gpu, "capacity": room.capacity, "outside": dict(room.outside), "for_pytorch": room.size},
        "exceeds": found.exceeds(room.size),
        "measured": {side.name: side.to_json() for side in sides},
    }
