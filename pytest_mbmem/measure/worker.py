"""The process that measures one rank: forked from the server, with torch and Megatron loaded and CUDA untouched."""

from __future__ import annotations

import dataclasses
import dis
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .. import graph_settings
from ..errors import Refused, UserError
from ..garbage import no_collections
from ..history.maps import segments_at_peak
from ..measurement import Adapter, Effect, Failure, FailureKind, PhaseFigures, RankMeasurement, as_plain
from ..megatron import (
    cuda_graphs,
    effective,
    jit_fusion,
    joint,
    lora,
    offload,
    process,
    stand_ins,
    te_equivalents,
    te_layers,
)
from ..megatron.model import LiveModel, live_model
from ..recipe import Recipe
from ..virtual_gpu import routing
from ..virtual_gpu.counters import driver_is_loaded
from ..virtual_gpu.reads import UnansweredRead
from . import allocator, effects, peers, place
from .counting import counting
from .history import PhaseRecorder, bytes_moved
from .on_gpu import Disturbed, OnGpu
from .oom_worker import Observer
from .recording import MAX_EVENTS, Recording, can_record
from .retention import trace_model
from .snapshot_files import write_snapshot


def measure_rank(
    recipe: dict[str, Any],
    rank: int,
    coordinates: dict[str, int],
    stands_for: int,
    record: bool = True,
    snapshot: str | None = None,
    real: dict[str, Any] | None = None,
    job: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build rank `rank` and train the recipe's steps: a `RankMeasurement`, a `Failure` or None, and assumptions.

    `real`: arguments of `OnGpu`, for a real GPU. `job`: where the other ranks are (see `peers.join`); None: alone.

    With `record`, the allocator's history tells what the peaks are made of. It is left in the file `snapshot`, in
    PyTorch's format; raises `OSError` if it cannot be written.
    """
    if driver_is_loaded():
        torch.set_num_threads(1)  # kernels run on no core
    recorder = PhaseRecorder()
    failure = None
    moved: list[dict[str, int]] = []  # in each step
    adapters: tuple[Adapter, ...] = ()
    found: tuple[Effect, ...] = ()
    parsed = Recipe.from_dict(recipe, "recipe")
    settings = parsed.memory.alloc_conf
    believed: tuple[str, ...] = ()
    recording = None
    observer = Observer()
    on_gpu = OnGpu.of(real) if real is not None else None

    def begin(step: int, phase: str) -> None:
        place.say(f"step {step} of {parsed.training.steps}, {phase}" if step else phase)
        if recording is not None:
            recording.begin(step, phase)
        if on_gpu is not None:
            on_gpu.begin(step, phase)
        recorder.begin(step, phase)

    try:
        _start_cuda(recipe)
        believed = allocator.assumptions(settings)
        observer.attach()
        recording = Recording(full=snapshot is not None) if record and can_record() else None
        if snapshot is not None and recording is None:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_EVENTS)
        begin(0, "build")
        with refusals(parsed.megatron):
            model = live_model(parsed, rank, virtual=driver_is_loaded(), initialize=peers.join(job))
            allocator.check_settings(settings)
            adapters = lora.adapters(model.chunks, parsed.lora) if parsed.lora else ()
            found = effective.effects(model)
            for _ in range(parsed.training.steps):
                before = bytes_moved()
                if on_gpu is None:
                    model.step(begin)
                else:
                    on_gpu.step(model, begin)
                moved.append({way: count - before[way] for way, count in bytes_moved().items()})
    except torch.OutOfMemoryError as error:
        step, phase = recorder.current or (None, None)
        failure = Failure("out of memory", rank, str(error), step, phase, observer.shortage)
    except Refused as error:
        return {"rank": None, "failure": dataclasses.asdict(Failure("refused", rank, str(error))), "assumptions": ()}
    except (Disturbed, UnansweredRead) as error:
        kind: FailureKind = "disturbed" if isinstance(error, Disturbed) else "unanswered read"
        failure = Failure(kind, rank, str(error), *(recorder.current or (None, None)))
    recorder.end()
    figures = {**recorder.results(), "adapters": adapters, "effects": found}
    if recording is not None:
        with no_collections():  # a walk over all events, which are gone when this ends
            figures |= _told(recording, figures["phases"])
            if snapshot is None:
                del recording.snapshot
    if snapshot is not None:
        write_snapshot(recording.snapshot if recording is not None else torch.cuda.memory._snapshot(), Path(snapshot))
    if on_gpu is not None:
        on_gpu.look_at_memory()
        figures |= on_gpu.fields()
        if failure is None and figures.get("skipped_steps") == parsed.training.steps:
            message = "the optimizer skipped every step, so that it never made its state and the peak lacks it"
            failure = Failure("skipped step", rank, message)
        if failure is None:
            place.say("the steps that are timed")
            figures["step_times"], failure = _timed(on_gpu, model, rank)
    if job is not None and failure is None:
        joint.leave()
    if moved:
        figures |= {"moved_bytes": moved[-1], "moved_in_step_1": moved[0].get("to host")}
    result = RankMeasurement(rank=rank, coordinates=coordinates, stands_for=stands_for, **figures)
    return {
        "rank": as_plain(result),
        "failure": failure and dataclasses.asdict(failure),
        "assumptions": (*assumptions(parsed), *believed, *(on_gpu.assumptions if on_gpu is not None else ())),
    }


def _told(recording: Recording, phases: Sequence[PhaseFigures]) -> dict[str, Any]:
    """What the allocator's history tells: fields of a `RankMeasurement`."""
    history = recording.stop()
    largest, owner = history.largest
    return {
        "composition": history.composition(phases),
        "largest_allocation": largest,
        "largest_owner": owner,
        "segments_at_peak": segments_at_peak(history),
    }


def _timed(on_gpu: OnGpu, model: LiveModel, rank: int) -> tuple[tuple[float, ...], Failure | None]:
    """The timed steps, which come after the run whose memory is measured, and what goes wrong in them."""
    try:
        return on_gpu.time_steps(model), None
    except torch.OutOfMemoryError as error:
        return (), Failure("out of memory", rank, f"in the steps that are timed: {error}")
    except Disturbed as error:
        return (), Failure("disturbed", rank, str(error))


def assumptions(recipe: Recipe) -> tuple[str, ...]:
    """What a measurement of the recipe states."""
    virtual = driver_is_loaded()
    of_kernels: tuple[str, ...] = ()
    if virtual:
        of_kernels = (*stand_ins.assumptions(recipe), jit_fusion.assumption(recipe))
        of_kernels += (*te_layers.assumptions(recipe), *routing.assumptions(recipe))
    if te_equivalents.are_used(recipe.training):
        of_kernels += (te_equivalents.ASSUMPTION,)
    return (*of_kernels, *offload.assumptions(recipe, virtual), *cuda_graphs.assumptions(recipe, virtual))


def _start_cuda(recipe: dict[str, Any]) -> None:
    """Start CUDA, where PyTorch reads its allocator's settings."""
    settings = recipe.get("memory", {}).get("alloc_conf", "")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.memory_stats()
    except (RuntimeError, ValueError) as error:
        if not settings:
            raise
        reason = str(error).splitlines()[0]
        raise Refused(f"memory.alloc_conf: PyTorch refuses {settings!r}: {reason}") from None
    allocator.check_settings(settings)


def _build(recipe: dict[str, Any], rank: int) -> LiveModel:
    return live_model(Recipe.from_dict(recipe, "recipe"), rank, virtual=driver_is_loaded())


@contextmanager
def refusals(added: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Around building and training a model: raise `Refused` for what Megatron or this package refuses there.

    Some settings pass Megatron's checks and meet an assertion of its in the middle of a step. With settings that a
    recipe has added by Megatron's names (`Recipe.megatron`), every error in Megatron's code is its answer to them.
    """
    try:
        yield
    except UserError as error:
        raise Refused(str(error)) from None
    except (torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError):
        raise  # of the device or of another rank
    except Exception as error:
        if (refuser := _refuser(error)) is not None:
            reason = process.why_no_attention(str(error)) or type(error).__name__
            raise Refused(f"{refuser} refuses it: {reason}") from None
        if not added or not _is_megatrons(error):
            raise
        if isinstance(error, _REFUSALS):
            raise Refused(f"Megatron Core refuses it: {str(error) or type(error).__name__}") from None
        names, kind = ", ".join(sorted(added)), type(error).__name__
        raise Refused(f"Megatron Core fails with {names} added: {kind}: {error}") from error


_REFUSALS = (AssertionError, ImportError, NotImplementedError, ValueError)

_REFUSERS = {"megatron.core": "Megatron Core", "transformer_engine": "Transformer Engine"}


def _refuser(error: Exception) -> str | None:
    """Who does not take the settings, if a line of one of `_REFUSERS` says so by raising the error; None otherwise."""
    module, _ = places(error)[-1]
    name = next((name for prefix, name in _REFUSERS.items() if module.startswith(prefix)), None)
    if isinstance(error, _REFUSALS):
        return name
    # torch's errors are RuntimeErrors as well, and those of its C++ have no frame of their own
    return name if isinstance(error, RuntimeError) and _is_raised_in_python(error) else None


def _is_raised_in_python(error: BaseException) -> bool:
    """Whether the innermost frame that an error came through raises it itself, rather than a call into C."""
    step = error.__traceback__
    assert step is not None
    while step.tb_next is not None:
        step = step.tb_next
    return dis.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"


def places(error: BaseException) -> list[tuple[str, int]]:
    """Module and line of each frame that an error came through, the one that raised it last."""
    return [(str(f.f_globals.get("__name__")), line) for f, line in traceback.walk_tb(error.__traceback__)]


def _is_megatrons(error: BaseException) -> bool:
    """Whether an error comes from Megatron's code, or from a library that it called."""
    ours_and_its = [name for name, _ in places(error) if name.startswith(("pytest_mbmem.", "megatron.core"))]
    return bool(ours_and_its) and ours_and_its[-1].startswith("megatron.core")


def trace_rank(recipe: dict[str, Any], rank: int, steps: int) -> dict[str, Any]:
    """Build rank `rank` and see what stays over `steps` steps beyond the first two.

    Returns {"trace": a `growth.Trace` as plain data, "failure": None, "message": ""}, or why there is none.
    """
    torch.set_num_threads(1)  # kernels run on no core
    try:
        _start_cuda(recipe)
        with refusals(recipe.get("megatron")):
            model = _build(recipe, rank)
            for _ in range(graph_settings.captured_after(model.recipe)):
                model.step()
            trace = trace_model(model, steps)
    except torch.OutOfMemoryError as error:
        return {"trace": None, "failure": "out of memory", "message": str(error)}
    except Refused as error:
        return {"trace": None, "failure": "refused", "message": str(error)}
    except UnansweredRead as error:
        return {"trace": None, "failure": "unanswered read", "message": str(error)}
    return {"trace": dataclasses.asdict(trace), "failure": None, "message": ""}


def probe_rank(recipe: dict[str, Any], rank: int) -> tuple[int, int] | None:
    """What tells whether a setting has an effect on rank `rank` (see `effects.fingerprint`); None if it cannot run."""
    measured = measure_rank(recipe, rank, {}, 1, record=False)
    return None if measured["failure"] else effects.fingerprint(RankMeasurement.from_json(measured["rank"]))


def count_rank(recipe: dict[str, Any], rank: int) -> dict[str, Any]:
    """FLOPs and collective bytes of one step of rank `rank`.

    The first step is like every other one in these, and nothing is captured in it. A failure that `measure_rank` tells
    leaves them unknown (an empty dict).
    """
    torch.set_num_threads(1)
    try:
        with refusals(recipe.get("megatron")):
            without = graph_settings.without_graphs(Recipe.from_dict(recipe, "recipe"))
            model = _build(without.to_dict(), rank)
            with counting() as counted:
                model.step()
    except (torch.OutOfMemoryError, Refused, UnansweredRead):
        return {}
    return {"flops_per_step": counted.flops, "collective_bytes": counted.collective_bytes}
