"""Activation recompute: what Megatron's own code lacks without Transformer Engine, and an end where it finds none."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.tensor_parallel import random


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


_DEEPEST = 50
"""Backwards of checkpoints within each other, of which Megatron has a few. From 60 on torch starts threads for them."""


def end_recursion() -> None:
    """Have the backward of a checkpoint that calls itself without end raise `RecursionError`, from now on.

    That of an MLP with bias does, without Transformer Engine: it returns the bias, a leaf, whose gradient function
    becomes the checkpoint itself (core 0.16 and 0.19).
    """
    original, depth = random.CheckpointFunction.backward, 0
    if original.__module__ == __name__:  # done before
        return

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
