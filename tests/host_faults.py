"""Faults put into Megatron in the worker before a host run, which parity and host runs must find.

Each takes the place of the function of the same arguments in pytest_mbmem.measure.host_worker. Both sides of a parity
run with the fault; it is the candidate's setting alone that meets it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.tensor_parallel import random

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure import host_worker
from pytest_mbmem.megatron import lora, offload
from pytest_mbmem.megatron import model as megatron_model
from pytest_mbmem.megatron.model import LiveModel


def replays_other_dropout(**arguments: Any) -> Any:
    """Recompute draws new random numbers."""
    random._set_all_rng_states = lambda *states: None
    return host_worker.parity(**arguments)


def replays_other_dropout_in_tensor_parallel_regions(**arguments: Any) -> Any:
    """Recompute restores the generator and forgets the tracked states, which dropout inside of attention uses."""
    original = random._set_all_rng_states

    def forget_tracked(cpu: Any, cuda: Any, tracked: Any) -> None:
        original(cpu, cuda, random.get_cuda_rng_tracker().get_states())

    random._set_all_rng_states = forget_tracked
    return host_worker.parity(**arguments)


def doubles_the_gradient_of_a(**arguments: Any) -> Any:
    """LoRA's re-gather counts the gradient of A on two ranks."""
    build = lora.LoraAdapter.__init__

    def init(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        if self.linear_a.sequence_parallel:
            self.linear_a.weight.register_hook(lambda gradient: 2 * gradient)

    lora.LoraAdapter.__init__ = init
    return host_worker.parity(**arguments)


def keeps_the_last_microbatch_only(**arguments: Any) -> Any:
    """With recompute, gradients replace those of the microbatch before instead of adding to them."""
    make = DistributedDataParallel._make_backward_post_hook

    def make_hook(self: Any, parameter: Any) -> Any:
        hook = make(self, parameter)

        def replace(*given: Any) -> Any:
            if self.config.recompute_granularity is not None:
                parameter.main_grad.zero_()
            return hook(*given)

        return replace

    DistributedDataParallel._make_backward_post_hook = make_hook
    return host_worker.parity(**arguments)


def brings_zeros_back(**arguments: Any) -> Any:
    """Offloaded activations come back empty."""
    start = offload._Layer.start_offload

    def start_offload(self: Any) -> None:
        start(self)
        for tensor in self.host:
            tensor.zero_()

    offload._Layer.start_offload = start_offload
    return host_worker.parity(**arguments)


def loses_gradients(**arguments: Any) -> Any:
    """No parameter has a gradient on either side."""
    record = host_worker.Record.add

    def add(self: Any, kind: str, name: str, values: torch.Tensor) -> None:
        record(self, kind, name, torch.zeros_like(values) if kind == "main_grad" else values)

    host_worker.Record.add = add
    return host_worker.parity(**arguments)


def skips_the_update(**arguments: Any) -> Any:
    """The offloaded optimizer leaves the parameters as they are."""
    HybridDeviceOptimizer.step = lambda self, closure=None: None
    return host_worker.parity(**arguments)


def updates_with_the_wrong_sign(**arguments: Any) -> Any:
    """The offloaded optimizer adds what it should subtract."""
    copy_gradients = HybridDeviceOptimizer._set_sub_optimizer_grads

    def copy_and_negate(self: Any) -> None:
        copy_gradients(self)
        for gradient in self.cpu_copy_map_grad.values():
            gradient.neg_()

    HybridDeviceOptimizer._set_sub_optimizer_grads = copy_and_negate
    return host_worker.parity(**arguments)


def records_no_input_gradients(**arguments: Any) -> Any:
    """The hooks of layer inputs are never called, on either side."""
    record = host_worker.Record.add

    def add(self: Any, kind: str, name: str, values: torch.Tensor) -> None:
        if kind != "input gradient":
            record(self, kind, name, values)

    host_worker.Record.add = add
    return host_worker.parity(**arguments)


def records_no_outputs_on_rank_1(**arguments: Any) -> Any:
    """The last pipeline stage shows no losses, on either side."""
    record = host_worker.Record.add

    def add(self: Any, kind: str, name: str, values: torch.Tensor) -> None:
        if kind != "output" or torch.distributed.get_rank() != 1:
            record(self, kind, name, values)

    host_worker.Record.add = add
    return host_worker.parity(**arguments)


def begins_with_megatrons_loss_scale(**arguments: Any) -> Any:
    """The scaled gradients of the first steps overflow fp16."""
    megatron_model.LOSS_SCALE = 2.0**32
    return host_worker.train(**arguments)


def refuses_the_second_step(**arguments: Any) -> Any:
    """A setting that the package refuses in the middle of training."""
    step = LiveModel.step

    def step_or_refuse(self: LiveModel, *given: Any) -> Any:
        if self.steps_done == 1:
            raise UserError("memory.recompute_num_layers: 2 does not divide the 3 layers")
        return step(self, *given)

    LiveModel.step = step_or_refuse
    return host_worker.train(**arguments)


def meets_an_assertion_in_the_second_step(**arguments: Any) -> Any:
    """Megatron asserts something in the middle of training."""
    step = LiveModel.step

    def step_or_assert(self: LiveModel, *given: Any) -> Any:
        if self.steps_done == 1:
            parallel_state._CONTEXT_PARALLEL_GROUP = None
        return step(self, *given)

    LiveModel.step = step_or_assert
    return host_worker.train(**arguments)


def skips_steps(**arguments: Any) -> Any:
    """The optimizer finds an infinite gradient."""
    ChainedOptimizer.step = lambda self: (False, None, None)
    return host_worker.train(**arguments)


def loses_a_rank(**arguments: Any) -> Any:
    """Rank 1 ends in its second step; rank 0 waits for it."""
    step = LiveModel.step

    def step_or_die(self: LiveModel, *given: Any) -> Any:
        if self.steps_done == 1 and torch.distributed.get_rank() == 1:
            os._exit(3)
        return step(self, *given)

    LiveModel.step = step_or_die
    return host_worker.train(**arguments)
