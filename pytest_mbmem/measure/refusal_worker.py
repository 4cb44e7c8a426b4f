"""What Megatron Core itself says to settings that this package refuses before anything runs. Runs in a worker.

An answer is {"raised": {"type", "message", "at", "where"} or None, "own": why this package could not ask, or ""}: `at`
is how far Megatron got (configuration, model, capture, run), `where` the module and line that raised.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from ..errors import Refused, UserError
from ..megatron import configs, offload, recompute
from ..megatron.model import live_model
from ..recipe import Recipe
from ..virtual_gpu.counters import driver_is_loaded
from .worker import places

_CLASSES: Mapping[str, Any] = {
    made.__name__: made
    for made in (
        TransformerConfig,
        MLATransformerConfig,
        ModelParallelConfig,
        DistributedDataParallelConfig,
        OptimizerConfig,
    )
}

_CAPTURE = ("megatron.core.transformer.cuda_graphs", "megatron.core.full_cuda_graph", "torch.cuda.graphs")
"""Modules that capture CUDA graphs."""


def construct(config: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Make one of Megatron's configuration classes; for a dtype stands its name."""
    made = _CLASSES[config]
    return _Progress().answer(lambda: made(**configs.values(made, arguments)))


def construct_all(examples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to several: the arguments of `construct` each."""
    return [construct(**example) for example in examples]


def configure(recipe: dict[str, Any]) -> dict[str, Any]:
    """Make the configurations of a recipe. Needs no GPU."""
    return _Progress().answer(lambda: _configure(Recipe.from_dict(recipe, "recipe")))


def attempt(recipe: dict[str, Any], rank: int) -> dict[str, Any]:
    """Make the recipe's configurations, build its rank `rank` and train the recipe's steps."""
    recompute.end_recursion()
    torch.set_num_threads(1)
    progress = _Progress()

    def run() -> None:
        parsed = Recipe.from_dict(recipe, "recipe")
        _configure(parsed)
        progress.at = "model"
        torch.cuda.init()  # type: ignore[no-untyped-call]
        model = live_model(parsed, rank, virtual=driver_is_loaded())
        progress.at = "run"
        for _ in range(parsed.training.steps):
            model.step()

    return progress.answer(run)


def message_of(error: BaseException) -> str:
    """The text of an exception; none if it holds tensors, whose values a virtual GPU does not have to be printed."""
    return "" if any(isinstance(argument, torch.Tensor) for argument in error.args) else str(error)


def passed_megatron(error: BaseException) -> bool:
    """Whether it went through Megatron's code, or is Python's for arguments that one of its classes does not have."""
    if any(module.startswith("megatron.") for module, _ in places(error)):
        return True
    called = re.match(r"(\w+)\.__init__\(\) ", message_of(error)) if isinstance(error, TypeError) else None
    return called is not None and any(
        name.startswith("megatron.") and called[1] in vars(module) for name, module in list(sys.modules.items())
    )


def _configure(recipe: Recipe) -> None:
    offload.install()  # as a run of the recipe has it
    for make in (configs.transformer_config, configs.ddp_config, configs.optimizer_config):
        make(recipe)


class _Progress:
    """How far Megatron got."""

    def __init__(self) -> None:
        self.at = "configuration"

    def answer(self, function: Callable[[], object]) -> dict[str, Any]:
        """What the function raised. What did not come from Megatron is raised again: a trial that broke."""
        try:
            function()
        except (UserError, Refused) as error:
            return {"raised": None, "own": str(error)}
        except Exception as error:
            if not passed_megatron(error):
                raise
            frames = places(error)
            captures = any(module.startswith(_CAPTURE) for module, _ in frames)
            raised = {
                "type": type(error).__name__,
                "message": message_of(error),
                "at": "capture" if captures and self.at == "run" else self.at,
                "where": "{}, line {}".format(*frames[-1]),
            }
            return {"raised": raised, "own": ""}
        return {"raised": None, "own": ""}
