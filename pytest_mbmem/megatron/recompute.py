"""Activation recompute: what Megatron's own code lacks without Transformer Engine, and settings that it cannot run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.tensor_parallel import random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build

from ..errors import UserError


class _NoFp8:
    """Transformer Engine's FP8 state where there is no Transformer Engine."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _no_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def install() -> None:
    """Let output-discarding checkpoints (layernorm, moe_act, mla_up_proj) run without Transformer Engine.

    `CheckpointWithoutOutput` asks Transformer Engine for its FP8 state whatever the precision (core 0.16).
    """
    for name, value in {
        "FP8GlobalStateManager": _NoFp8,
        "activation_recompute_forward": _no_context,
        "fp8_autocast": _no_context,
    }.items():
        if not hasattr(random, name):
            setattr(random, name, value)


def check(config: TransformerConfig) -> None:
    """Raise `UserError` for settings that pass Megatron's own checks and then hang in the middle of a step."""
    selective = config.recompute_granularity == "selective"
    if selective and "mlp" in config.recompute_modules and config.add_bias_linear:
        # The checkpoint returns the MLP's bias, a leaf, whose gradient function becomes the checkpoint itself: the
        # backward calls itself without end (core 0.16 and 0.19, layers without Transformer Engine).
        raise UserError(
            "memory.recompute_modules: 'mlp' is not possible with model.add_bias_linear true: the backward of the "
            "checkpoint, which also returns the bias, calls itself without end; set add_bias_linear to false"
        )
    groups = config.recompute_granularity == "full" and config.recompute_method == "uniform"
    if groups and config.recompute_num_layers < 1:  # it takes so many layers at a time until none is left
        raise UserError(
            f"memory.recompute_num_layers: {config.recompute_num_layers} with recompute_method 'uniform' never ends; "
            "write 1 or more, the layers of a group"
        )


@contextmanager
def explained(config: TransformerConfig) -> Iterator[None]:
    """Give Megatron's failure of uniform recompute in groups that do not divide a chunk's layers its reason.

    Core 0.16 reads beyond the last layer then; core 0.19 makes the last group smaller. Raises `UserError`.
    """
    try:
        yield
    except IndexError:
        group = config.recompute_num_layers
        if config.recompute_granularity != "full" or config.recompute_method != "uniform" or group is None:
            raise
        chunks = range(config.virtual_pipeline_model_parallel_size or 1)
        for layers in {get_num_layers_to_build(config, vp_stage=chunk) for chunk in chunks}:
            if layers % group:
                raise UserError(
                    f"memory.recompute_num_layers: {group} does not divide the {layers} layers of a model chunk on "
                    "this pipeline stage; with recompute_method 'uniform' this Megatron Core reads beyond the last one"
                ) from None
        raise


_DEEPEST = 50
"""Backwards of checkpoints within each other, of which Megatron has a few. From 60 on torch starts threads for them."""


def end_recursion() -> None:
    """Have the backward of a checkpoint that calls itself without end (see `check`) raise `RecursionError`."""
    original, depth = random.CheckpointFunction.backward, 0

    def backward(*args: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            if depth > _DEEPEST:
                raise RecursionError("maximum recursion depth exceeded: the backward of a checkpoint calls itself")
            return original(*args)
        finally:
            depth -= 1

    random.CheckpointFunction.backward = staticmethod(backward)
