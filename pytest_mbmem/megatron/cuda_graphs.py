"""CUDA graphs of Megatron's own, captured and replayed when its training loop does it (core 0.16).

- local: each layer, or the named parts of it, by Megatron's schedules at the end of step 1.
- local, scope full_iteration: forward and backward of the whole step, at the beginning of step `warmup + 1`.
- transformer_engine: the layers for each microbatch in flight, by Transformer Engine's `make_graphed_callables` at the
  beginning of step `warmup + 1`.

The graphs' private pools are PyTorch's own allocator's. A virtual GPU keeps which stream captures, and no kernel.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from .. import graph_settings
from ..errors import UserError
from ..history.owners import line_of
from ..recipe import Recipe
from ..validation import BadKey

_DRIVERS = (
    "CUDA graphs: what the driver takes for the graphs themselves is not known and left out of device-used memory"
)
_POOLS = (
    "CUDA graphs: their private pools are reserved memory; what only replays use of them is not allocated in PyTorch's "
    "figures, on a real GPU neither: compare reserved memory"
)

Load = Callable[[Recipe, DistributedDataParallel], dict[str, torch.Tensor | None]]


def assumptions(recipe: Recipe, virtual: bool) -> tuple[str, ...]:
    """What a measurement of the recipe states."""
    if graph_settings.implementation(recipe) == "none":
        return ()
    return (_DRIVERS, _POOLS) if virtual else (_POOLS,)


class Graphs:
    """The graphs of one live model; those of a model without any do nothing."""

    def __init__(
        self,
        recipe: Recipe,
        config: TransformerConfig,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
    ) -> None:
        self._recipe, self._chunks = recipe, chunks
        self._implementation = graph_settings.implementation(recipe)
        self._helper: Any = None
        self._whole: Any = None
        if self._implementation == "none":
            return
        layers, whole = _of_megatron()
        if self._implementation == "transformer_engine":
            sizes = recipe.training.seq_length, recipe.training.micro_batch_size
            self._helper = layers.TECudaGraphHelper(chunks, config, *sizes, [optimizer])
        elif "full_iteration" in graph_settings.scope(recipe):
            self._whole = whole.FullCudaGraphWrapper(get_forward_backward_func(), config.cuda_graph_warmup_steps)

    def before_step(self, steps_done: int) -> None:
        """Capture what is captured before the step that follows on so many."""
        if self._helper is None or steps_done != graph_settings.captured_after(self._recipe):
            return
        # The hooks gather parameters; in a graph they would do it at every replay of every microbatch.
        hooked = [chunk for chunk in self._chunks if chunk.use_forward_hook]
        for chunk in hooked:
            chunk.disable_forward_pre_hook(param_sync=False)
        with self._microbatches():
            self._helper.create_cudagraphs()
        for chunk in hooked:
            chunk.enable_forward_pre_hook()
        if hooked:
            self._helper.cuda_graph_set_manual_hooks()

    @contextlib.contextmanager
    def _microbatches(self) -> Iterator[None]:
        """Megatron's global number of microbatches, which its training script sets at the start."""
        batch = self._recipe.global_batch_size, self._recipe.training.micro_batch_size, self._recipe.parallelism.dp
        num_microbatches_calculator.init_num_microbatches_calculator(
            parallel_state.get_data_parallel_rank(), None, *batch
        )
        try:
            yield
        finally:
            num_microbatches_calculator.unset_num_microbatches_calculator()

    @property
    def forward_backward(self) -> Callable[..., Any]:
        """Megatron's schedule, in a graph where it is captured as a whole."""
        return self._whole or get_forward_backward_func()  # type: ignore[no-any-return]

    def batches(self, load: Load) -> list[Iterator[dict[str, Any]] | None]:
        """For each model chunk the batches that are copied into a whole step's graph; None: loaded where needed.

        As in Megatron-LM the first tensor-parallel rank of the first and the last stage loads them.
        """
        if self._whole is None or parallel_state.get_tensor_model_parallel_rank() > 0:
            return [None] * len(self._chunks)
        return [self._host_batches(load, chunk) if _reads_batches(chunk) else None for chunk in self._chunks]

    def _host_batches(self, load: Load, chunk: DistributedDataParallel) -> Iterator[dict[str, Any]]:
        while True:
            yield _on_host(load(self._recipe, chunk))

    def forget(self) -> None:
        """Free the graphs and what Megatron keeps of them in its classes."""
        if self._implementation == "none":
            return
        layers, whole = _of_megatron()
        if self._helper is not None:
            if self._helper.graphs_created():
                self._helper.delete_cuda_graphs()
        elif self._whole is None:
            layers.delete_cuda_graphs()
            pool = layers._CudagraphGlobalRecord.tensor_reuse_pool
            for kept in (pool.tensor_strong_refs, pool.tensor_strong_refs_dataptrs, pool.pool):
                kept.clear()
            for manager in _instances(self._chunks, layers.CudaGraphManager):
                for runner in manager.cudagraph_runners:  # its outputs hold the model by their hooks
                    runner.fwd_graph_outputs = runner.fwd_graph_output_surface = None
                    runner.fwd_graph = runner.bwd_graph = None
                manager.cudagraph_runners.clear()
        for stage in ("training", "validation"):
            whole.FullCudaGraphWrapper.curr_iteration[stage] = 0
            whole.FullCudaGraphWrapper.cuda_graph[stage] = whole.FullCudaGraphWrapper.result[stage] = None
            whole.StaticBufferLoader.static_buffers[stage] = []
        torch.cuda.set_stream(torch.cuda.default_stream())  # Megatron chose another one to capture from
        self._helper = self._whole = None
        self._chunks = []


def _of_megatron() -> tuple[Any, Any]:
    """Megatron's modules with graphs of layers and of whole steps."""
    try:
        from megatron.core import full_cuda_graph
        from megatron.core.transformer import cuda_graphs
    except ImportError:
        problem = f"graphs are captured as megatron-core 0.16 does it, and {version('megatron-core')} is installed"
        raise BadKey("megatron.cuda_graph_impl", problem) from None
    return cuda_graphs, full_cuda_graph


def _instances(chunks: list[DistributedDataParallel], kind: type) -> list[Any]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, kind)]


@contextlib.contextmanager
def ddp_stream(recipe: Recipe) -> Iterator[None]:
    """Where a model that will be captured gets its data-parallel wrappers: on a stream of their own.

    They keep what accumulates gradients, with the stream that it was made on, and a graph cannot wait for the default
    stream. As in Megatron-LM's training script, which does it for every model.
    """
    if graph_settings.implementation(recipe) == "none":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _reads_batches(chunk: DistributedDataParallel) -> bool:
    stage = {"ignore_virtual": False, "vp_stage": get_attr_wrapped_model(chunk, "vp_stage")}
    ends = parallel_state.is_pipeline_first_stage(**stage) or parallel_state.is_pipeline_last_stage(**stage)
    return bool(ends or get_attr_wrapped_model(chunk, "mtp_process"))


def _on_host(batch: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    return {name: None if tensor is None else tensor.cpu() for name, tensor in batch.items()}


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    """Raise `UserError`, with the place in the code, for what cannot be captured within."""
    try:
        yield
    except torch.AcceleratorError as error:
        first: BaseException = error
        while first.__context__ is not None:  # ending the capture failed because of what was in it
            first = first.__context__
        if "captur" not in str(error):
            raise
        said = str(first) or type(first).__name__  # an assertion may say nothing
        problem = said.splitlines()[0].removeprefix("CUDA error: ")
        raise UserError(
            f"the CUDA graph cannot be captured: {line_of(_stack(first)) or 'in backward'}: {problem}; "
            "leave that part out of megatron.cuda_graph_scope"
        ) from error


def _stack(error: BaseException) -> list[dict[str, Any]]:
    """The calls that an error came through, innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return [{"filename": f.filename, "line": f.lineno, "name": f.name} for f in frames]
