"""Host runs, the worker's side: the ranks of a job in processes of their own, what they compute, and its comparison.

Forked from the server like every worker, with torch and Megatron loaded.
"""

from __future__ import annotations

import collections
import math
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Refused
from ..megatron import host
from ..megatron.model import LiveModel
from ..recipe import Recipe
from .worker import refusals

_FORK = multiprocessing.get_context("fork")


# What the launcher calls ----------------------------------------------------------------------------------------------


def train(recipe: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Train the recipe's steps on all its ranks: {"steps": fields of a `HostStep` each, "failure": see `_together`}."""
    with tempfile.TemporaryDirectory(prefix="mbmem-host-") as folder:
        results = _together(Path(folder), {"run": recipe}, _train_rank, timeout)
        if "failure" in results:
            return {"steps": [], **results}
        ranks = results["run"]
    return {"steps": [_merged(of_ranks) for of_ranks in zip(*ranks, strict=True)], "failure": None}


def _merged(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One step of all ranks."""
    loss = _mean([step["loss"] for step in ranks if step["loss"] is not None])
    norm = ranks[0]["grad_norm"]
    not_finite = [step["not_finite"] for step in ranks if step["not_finite"]]
    if norm is not None and not math.isfinite(norm):
        norm, not_finite = None, ["the norm of all gradients", *not_finite]
    if not math.isfinite(loss):
        not_finite.insert(0, "the loss")
    return {
        "loss": loss if math.isfinite(loss) else None,
        "grad_norm": norm,
        "skipped": any(step["skipped"] for step in ranks),
        "not_finite": not_finite[0] if not_finite else "",
    }


def parity(control: dict[str, Any], candidate: dict[str, Any], timeout: float) -> dict[str, Any]:
    """One step of both, compared: {"rows": the fields of a `ParityRow` each, "failure": see `_together`}."""
    with tempfile.TemporaryDirectory(prefix="mbmem-host-") as folder:
        recipes = {"control": control, "candidate": candidate}
        results = _together(Path(folder), recipes, _record_rank, timeout)
        if "failure" in results:
            return {"rows": [], **results}
        pairs = [(torch.load(a), torch.load(b)) for a, b in zip(results["control"], results["candidate"], strict=True)]
        values = [(a["values"], b["values"]) for a, b in pairs]
        return {"rows": compare(values, [a["expected"] | b["expected"] for a, b in pairs]), "failure": None}


# Ranks ----------------------------------------------------------------------------------------------------------------


def _together(
    folder: Path, recipes: Mapping[str, dict[str, Any]], function: Callable[..., Any], timeout: float
) -> dict[str, Any]:
    """Run the function for every rank of every recipe, all at the same time: name -> results by rank.

    Or {"failure": {"run", "kind", "rank", "message"}} of the rank that failed first; the others are ended.
    """
    running: dict[Any, Any] = {}
    for name, recipe in recipes.items():
        for rank in range(Recipe.from_dict(recipe, "recipe").world_size):
            place = folder / f"{name}-{rank}"
            arguments = (function, recipe, rank, folder / f"{name}-store", place, timeout)
            process = _FORK.Process(target=_rank, args=arguments)
            process.start()
            running[process.sentinel] = (name, rank, place, process)
    results: dict[str, dict[int, Any]] = {name: {} for name in recipes}
    try:
        while running:
            for sentinel in wait(list(running)):
                name, rank, place, process = running.pop(sentinel)
                process.join()
                answer = pickle.loads(place.read_bytes()) if place.exists() else {"failure": _died(process.exitcode)}
                if "failure" in answer:
                    return {"failure": {"run": name, "rank": rank, **answer["failure"]}}
                results[name][rank] = answer["value"]
    finally:
        for *_, process in running.values():
            process.kill()
            process.join()
    return {name: [of_ranks[rank] for rank in sorted(of_ranks)] for name, of_ranks in results.items()}


def _died(code: int | None) -> dict[str, str]:
    cause = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
    return {"kind": "died", "message": f"the process of this rank {cause}"}


def _rank(
    function: Callable[..., Any], recipe: dict[str, Any], rank: int, store: Path, place: Path, timeout: float
) -> None:
    """In the process of one rank: leave {"value"} or {"failure"} in the file `place`."""
    try:
        torch.set_num_threads(1)  # the sums of a matrix multiplication in one order, and ranks side by side
        host.install()
        with refusals(recipe.get("megatron")):  # some settings are refused in the middle of a step
            model = host.host_model(Recipe.from_dict(recipe, "recipe"), rank, store, timeout)
            answer = {"value": function(model, place)}
        dist.barrier()  # a rank that is done stays until the others have received all it sent
    except Refused as error:
        answer = {"failure": {"kind": "refused", "message": str(error)}}
    except BaseException:
        answer = {"failure": {"kind": "error", "message": traceback.format_exc()}}
        time.sleep(_is_lost(answer["failure"]["message"]))
    part = place.with_suffix(".part")
    part.write_bytes(pickle.dumps(answer))
    part.rename(place)


def _is_lost(message: str) -> float:
    """Seconds by which a rank that only lost its peers lets the one with the cause report first."""
    return 1.0 if "gloo" in message.lower() else 0.0


# A training run -------------------------------------------------------------------------------------------------------


def _train_rank(model: LiveModel, _: Path) -> list[dict[str, Any]]:
    """Train; what came out of each step on this rank."""
    outputs: list[torch.Tensor] = []  # the loss of each token
    for chunk in model.chunks:
        if _unwrapped(chunk).post_process:
            chunk.register_forward_hook(lambda module, arguments, output: outputs.append(output.detach()))
    steps = []
    for _step in range(model.recipe.training.steps):
        outputs.clear()
        not_finite: list[str] = []

        def before_the_optimizer(step: int, phase: str, found: list[str] = not_finite) -> None:
            if phase == "optimizer":
                found += (f"the gradient of {n}" for n, p in trainable(model) if not _main_grad(p).isfinite().all())

        updated, norm, _zeros = model.step(before_the_optimizer)
        not_finite += (f"parameter {n}" for n, p in trainable(model) if not p.isfinite().all())
        loss = _mean([float(o.float().mean()) for o in outputs]) if outputs else None
        steps.append(
            {
                "loss": loss,
                "grad_norm": None if norm is None else float(norm),
                "skipped": not updated,
                "not_finite": not_finite[0] if not_finite else "",
            }
        )
    return steps


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def trainable(model: LiveModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with gradients, by the name that Megatron gives them; chunks after the first in front of it."""
    for number, chunk in enumerate(model.chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield (f"chunk {number}: " if number else "") + name.replace("module.", ""), parameter


def _main_grad(parameter: Any) -> torch.Tensor:
    """Accumulated over the microbatches by Megatron's data-parallel wrapper."""
    gradient: torch.Tensor = parameter.main_grad
    return gradient


# A recorded step ------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """All that one rank computed in a step: kind -> name -> values as fp32."""

    values: dict[str, dict[str, torch.Tensor]] = field(default_factory=lambda: collections.defaultdict(dict))
    expected: set[str] = field(default_factory=lambda: {"output"})  # kinds of which this rank must have some
    backwards: int = 0  # backward passes that began: one for each microbatch of each model chunk

    def add(self, kind: str, name: str, values: torch.Tensor) -> None:
        """Keep a copy; what comes again under the same name is added to it."""
        values = values.detach().float().clone()
        before = self.values[kind].get(name)
        self.values[kind][name] = values if before is None else before + values

    def add_in_backward(self, kind: str, name: str) -> Callable[[torch.Tensor], None]:
        """A hook of a tensor that keeps its gradient, by the backward pass in which it comes."""
        return lambda gradient: self.add(kind, f"{name}, backward {self.backwards}", gradient)


def _record_rank(live: LiveModel, place: Path) -> Path:
    """One step; the file with its `Record`."""
    fill_zeros(live)
    for group in live.optimizer.param_groups:
        group["lr"] = _LR
        if "eps" in group:
            group["eps"] = _EPS
    record = Record()
    for number, chunk in enumerate(live.chunks):
        chunk.register_forward_hook(_keeping_outputs(record, number))
        model = _unwrapped(chunk)
        # Nothing takes the gradient of a frozen embedding's output; recompute may compute it all the same.
        unused = 1 if model.pre_process and not any(p.requires_grad for p in model.embedding.parameters()) else 0
        for layer in model.decoder.layers[unused:]:
            record.expected.add("input gradient")
            layer.register_forward_pre_hook(_keeping_input_gradients(record), with_kwargs=True)
    before = {name: parameter.detach().float().clone() for name, parameter in trainable(live)}
    record.expected.update({"weight gradient", "main_grad", "parameter update"} if before else ())
    for name, parameter in trainable(live):
        parameter.register_hook(record.add_in_backward("weight gradient", name))  # type: ignore[no-untyped-call]

    def on_phase(step: int, phase: str) -> None:
        if phase == "backward":
            record.backwards += 1
        elif phase == "optimizer":  # gradients are accumulated over the microbatches and reduced over the ranks
            for name, parameter in trainable(live):
                record.add("main_grad", name, _main_grad(parameter))

    live.step(on_phase)
    for name, parameter in trainable(live):
        record.add("parameter update", name, parameter.detach().float() - before[name])
    file = place.with_suffix(".values")
    torch.save({"expected": record.expected, "values": dict(record.values)}, file)
    return file


_LR = 1e6
"""So large that an update drowns the parameter: the difference of a bf16 parameter after the step and before it is then
as exact as bf16 is, where an update of a usual size would be lost in the parameter's own rounding."""


_EPS = 1e-3
"""Of Adam, whose first update has the full size for any gradient far above it: with Megatron's 1e-8, rounding alone can
turn the updates of the smallest gradients round."""


def fill_zeros(model: LiveModel) -> None:
    """Give trainable parameters that start at zero random values, the same for the same name.

    LoRA's B starts at zero, which makes the gradient of A zero: nothing could be found wrong with it.
    """
    for name, parameter in trainable(model):
        if not parameter.any():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            with torch.no_grad():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.optimizer.reload_model_params()


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _keeping_outputs(record: Record, number: int) -> Callable[..., None]:
    calls = iter(range(1, 1_000_000))

    def hook(module: torch.nn.Module, arguments: Any, output: torch.Tensor) -> None:
        what = "loss of each token" if output.dim() == 2 else "hidden states"
        record.add("output", f"{what}, chunk {number}, microbatch {next(calls)}", output)

    return hook


def _keeping_input_gradients(record: Record) -> Callable[..., None]:
    def hook(layer: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        hidden: Any = keywords["hidden_states"] if "hidden_states" in keywords else arguments[0]
        # A checkpoint runs its layers first without gradients and in backward with them.
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(record.add_in_backward("input gradient", f"layer {layer.layer_number}"))

    return hook


# Comparison -----------------------------------------------------------------------------------------------------------

_Values = dict[str, dict[str, torch.Tensor]]


def compare(pairs: list[tuple[_Values, _Values]], expected: Sequence[set[str]]) -> list[dict[str, Any]]:
    """One row for each kind of value: the worst relative error over all ranks and names, and what it is of.

    The error of a tensor is its largest absolute difference over the control's largest absolute value. A tensor that
    one side lacks, that differs in shape or that holds a value that is not finite has an infinite error. So has a rank
    where neither side has a value of a kind that is `expected` of it.
    """
    kinds = dict.fromkeys([kind for pair in pairs for side in pair for kind in side])
    kinds |= dict.fromkeys(sorted(kind for of_rank in expected for kind in of_rank))
    return [
        _row(kind, [(a.get(kind, {}), b.get(kind, {})) for a, b in pairs], [kind in of_rank for of_rank in expected])
        for kind in kinds
    ]


def _row(
    kind: str, pairs: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]], expected: Sequence[bool]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": kind,
        "tensors": 0,
        "equal": 0,
        "zero": 0,
        "error": -1.0,
        "name": "",
        "rank": 0,
        "remark": "",
    }
    for rank, (control, candidate) in enumerate(pairs):
        if expected[rank] and not control and not candidate and row["error"] < math.inf:
            row.update(error=math.inf, name=f"any {kind}", rank=rank, remark="neither side has it")
        for name in dict.fromkeys((*control, *candidate)):
            error, remark = _error(control.get(name), candidate.get(name))
            row["tensors"] += 1
            row["equal"] += error == 0
            row["zero"] += error == 0 and not control[name].any()
            if error > row["error"]:
                row.update(error=error, name=name, rank=rank, remark=remark)
    return row


def _error(control: torch.Tensor | None, candidate: torch.Tensor | None) -> tuple[float, str]:
    if control is None or candidate is None:
        return math.inf, f"only the {'candidate' if control is None else 'control'} has it"
    if control.shape != candidate.shape:
        return math.inf, f"shape {list(control.shape)} in the control, {list(candidate.shape)} in the candidate"
    for side, values in {"control": control, "candidate": candidate}.items():
        if not values.isfinite().all():
            return math.inf, f"not finite in the {side}"
    difference, largest = float((candidate - control).abs().max()), float(control.abs().max())
    if difference == 0:
        return 0.0, ""
    return (difference / largest, "") if largest else (math.inf, "zero in the control alone")
