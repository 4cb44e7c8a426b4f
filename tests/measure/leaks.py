"""Faults of a training loop, for the workers of test_retention.py: each trains a rank with something that holds on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pytest_mbmem.measure import worker
from pytest_mbmem.megatron import model

Trace = dict[str, Any]


def loss_with_its_graph(**arguments: Any) -> Trace:
    """The reported loss of each microbatch is not detached."""
    original = model._loss

    def loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        value, tokens, _ = original(loss_mask, output)
        return value, tokens, {"lm loss": value}

    model._loss = loss
    return worker.trace_rank(**arguments)


def after_building(fault: Callable[[model.LiveModel], None], arguments: dict[str, Any]) -> Trace:
    """Train a model that the fault was put into."""
    build = worker._build

    def faulty(*args: Any) -> model.LiveModel:
        live = build(*args)
        fault(live)
        return live

    worker._build = faulty
    return worker.trace_rank(**arguments)


def layers_of(live: model.LiveModel) -> Any:
    return live.chunks[0].module.module.decoder.layers


def _history_of_outputs(live: model.LiveModel) -> None:
    for layer in layers_of(live):
        layer.history = []
        layer.register_forward_hook(lambda module, inputs, output: module.history.append(output[0].detach()[:1]))


def view_of_each_step(**arguments: Any) -> Trace:
    """Every layer keeps a view of its output, step after step."""
    return after_building(_history_of_outputs, arguments)


def _last_outputs(live: model.LiveModel) -> None:
    for layer in layers_of(live):
        layer.register_forward_hook(lambda module, inputs, output: setattr(module, "last", {"output": output[0]}))


def last_output(**arguments: Any) -> Trace:
    """Every layer keeps its last output, which is replaced in the next step."""
    return after_building(_last_outputs, arguments)


class Ring:
    """Refers to itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.me = tensor, self


def _rings(live: model.LiveModel) -> None:
    layers_of(live)[0].register_forward_hook(lambda module, inputs, output: Ring(output[0].detach()) and None)


def cycle_of_each_step(**arguments: Any) -> Trace:
    """A reference cycle that only gc frees, in every step."""
    return after_building(_rings, arguments)


def state_in_step_two(**arguments: Any) -> Trace:
    """Step 2 makes a buffer of 1 MiB that stays, as an optimizer does that keeps something from its second step on."""
    step = model.LiveModel.step

    def stepping(live: model.LiveModel, *args: Any) -> Any:
        result = step(live, *args)
        if live.steps_done == 2:
            live.optimizer.late = torch.empty(2**20, dtype=torch.uint8, device="cuda")
        return result

    model.LiveModel.step = stepping  # type: ignore[method-assign]
    return worker.trace_rank(**arguments)


def with_gc_on_a_timer(**arguments: Any) -> Trace:
    """The same cycle, while Python's own collection would run at every allocation."""
    gc.set_threshold(1, 1, 1)
    return after_building(partial(_rings), arguments)
