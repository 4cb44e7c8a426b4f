"""A recipe as live Megatron Core objects: model chunks, data-parallel wrappers, optimizer, and one training step."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank

from ..recipe import Recipe
from ..virtual_gpu import assumptions
from ..virtual_gpu.reads import answered_reads
from . import (
    configs,
    cuda_graphs,
    jit_fusion,
    layers,
    lora,
    offload,
    process,
    recompute,
    solo,
    stand_ins,
    te_equivalents,
    te_layers,
)

OnPhase = Callable[[int, str], None]
"""Called with the step (from 1) and the phase that begins."""

Batch = dict[str, torch.Tensor | None]
"""The tensors of one microbatch by name: tokens, labels, loss_mask, attention_mask, position_ids."""


def _ignore_phase(step: int, phase: str) -> None:
    pass


@dataclass
class LiveModel:
    """One rank's part of a recipe, built and ready to train.

    `chunks` are the model chunks of this rank's pipeline stage in their DistributedDataParallel wrappers, first chunk
    first; `optimizer` is Megatron's mixed-precision optimizer over them. `load` gives the next microbatch of a chunk;
    None: one without values, for devices that compute nothing with it. `on_losses` is called before the optimizer's
    part with what Megatron's loss function reports: one mapping a microbatch (none on other stages than the last).
    """

    recipe: Recipe
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    graphs: cuda_graphs.Graphs
    steps_done: int = 0
    load: Callable[[Recipe, DistributedDataParallel], Batch] | None = None
    on_losses: Callable[[list[dict[str, torch.Tensor]]], None] | None = None

    @answered_reads()
    def step(self, on_phase: OnPhase = _ignore_phase) -> tuple[bool, float | None, int | None]:
        """One training step over the recipe's microbatches through Megatron's own schedule.

        Phases reported: forward (the step's beginning included) and backward of each microbatch, grad-sync,
        optimizer. Each lasts until the next begins, so that what the schedule receives in between belongs to the phase
        before. Returns what the optimizer does: whether parameters were updated, the gradients' norm, zeros counted.
        """
        training = self.recipe.training
        load = self.load or _batch
        self.steps_done += 1
        on_phase(self.steps_done, "forward")
        with cuda_graphs.capturable(), self._reporting(partial(on_phase, self.steps_done)):
            self.graphs.before_step(self.steps_done - 1)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            batches = self.graphs.batches(load)
            reduced = self.graphs.forward_backward(
                forward_step_func=partial(_forward_step, self.recipe, load),
                data_iterator=batches if len(self.chunks) > 1 else batches[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=self.recipe.num_microbatches,
                seq_length=training.seq_length,
                micro_batch_size=training.micro_batch_size,
                forward_only=False,
            )
            if self.on_losses is not None:
                self.on_losses(reduced)
            del reduced
            on_phase(self.steps_done, "optimizer")
            return self.optimizer.step()  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _reporting(self, on_phase: Callable[[str], None]) -> Iterator[None]:
        """Report the schedule's phases: its functions are looked up by name in the module (core 0.16)."""
        originals = {name: getattr(schedules, name) for name in ("forward_step", "backward_step")}

        def announced(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                on_phase(phase)
                return function(*args, **kwargs)

            return call

        schedules.forward_step = announced("forward", originals["forward_step"])
        schedules.backward_step = announced("backward", originals["backward_step"])
        self.config.finalize_model_grads_func = announced("grad-sync", finalize_model_grads)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(schedules, name, function)

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return bool(self.chunks)

    def close(self) -> None:
        """Free the model and leave Megatron's and torch's process groups. A second call does nothing."""
        if not self.is_open:
            return
        for layer in [m for chunk in self.chunks for m in chunk.modules() if isinstance(m, MoELayer)]:
            # It keeps the last microbatch's graph, which holds the model by its hooks: a cycle that gc cannot see.
            layer.token_dispatcher = None
        layers.forget_logged_losses()
        self.graphs.forget()
        self.chunks.clear()
        self.config.no_sync_func = self.config.grad_sync_func = self.config.param_sync_func = None
        self.config.finalize_model_grads_func = self.config.grad_scale_func = None
        del self.optimizer
        offload.forget_modules()
        te_equivalents.forget_workspaces()
        process.leave()
        _leave_groups()
        gc.collect()
        torch.cuda.empty_cache()


def _leave_groups() -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    dist.destroy_process_group()


@answered_reads()
def live_model(
    recipe: Recipe,
    rank: int = 0,
    *,
    virtual: bool = True,
    initialize: Callable[[Recipe, int], None] = solo.initialize,
) -> LiveModel:
    """Build rank `rank` of the recipe's job on the current CUDA device: alone (see `solo`) or as `initialize` says."""
    jit_fusion.use(recipe, virtual)
    if virtual:
        stand_ins.install()
        offload.leave_out_host_values()
    offload.install()
    torch.use_deterministic_algorithms(recipe.training.deterministic)
    recompute.install()
    config = configs.transformer_config(recipe)
    if te_equivalents.are_used(config):
        te_equivalents.check(virtual)
    if virtual and recipe.model.moe is not None:
        assumptions.install(config, recipe.model.moe.overload)
    initialize(recipe, rank)
    try:
        process.enter(config, virtual)
        model = _build(recipe, config, virtual)
        if not virtual:
            _set_loss_scale(model.optimizer)
            model.load = DeviceBatches()
        return model
    except BaseException:
        process.leave()
        _leave_groups()
        raise


def _build(recipe: Recipe, config: TransformerConfig, virtual: bool) -> LiveModel:
    if te_equivalents.are_used(config):
        te_equivalents.hold_workspaces(config)
    chunks = _build_chunks(recipe, config)
    optimizer = get_megatron_optimizer(configs.optimizer_config(recipe), chunks, use_gloo_process_groups=False)
    if virtual:
        stand_ins.fuse(optimizer)
    if recipe.memory.optimizer_cpu_offload:
        # Built twice; the first is a reference cycle, with copies of parameters until Python happens to collect it.
        gc.collect()
    config.grad_scale_func = optimizer.scale_loss
    _overlap(recipe, config, chunks)
    return LiveModel(recipe, config, chunks, optimizer, cuda_graphs.Graphs(recipe, config, chunks, optimizer))


LOSS_SCALE = 2.0**10
"""That fp16 begins with. From Megatron's 2**32 the optimizer would skip some twenty steps until it is found, and
make no state meanwhile."""


def _set_loss_scale(optimizer: MegatronOptimizer) -> None:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        scaler = getattr(part, "grad_scaler", None)
        if scaler is not None:
            scaler.load_state_dict(scaler.state_dict() | {"scale": torch.tensor([LOSS_SCALE])})


def _build_chunks(recipe: Recipe, config: TransformerConfig) -> list[DistributedDataParallel]:
    chunks = []
    specs = te_layers if te_layers.are_used(config) else layers
    for chunk in range(recipe.parallelism.vpp or 1):
        vp_stage = chunk if recipe.parallelism.vpp else None
        model = GPTModel(
            config,
            specs.block_spec(config, vp_stage),
            vocab_size=recipe.model.padded_vocab_size(recipe.parallelism.tp),
            max_sequence_length=recipe.model.max_position_embeddings or recipe.training.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            share_embeddings_and_output_weights=recipe.model.share_embeddings_and_output_weights,
            position_embedding_type=recipe.model.position_embedding_type,
            rotary_percent=recipe.model.rotary_percent,
            rotary_base=recipe.model.rotary_base,
            mtp_block_spec=specs.mtp_spec(config, vp_stage),
            vp_stage=vp_stage,
        )
        te_equivalents.keep_from_labels(model)
        if recipe.lora is not None:
            lora.attach(model, recipe.lora)
        chunks.append(model.cuda())
    if config.fp16 or config.bf16:
        chunks = [Float16Module(config, model) for model in chunks]
    with cuda_graphs.ddp_stream(recipe):
        return [
            DistributedDataParallel(config, configs.ddp_config(recipe), model, disable_bucketing=index > 0)
            for index, model in enumerate(chunks)
        ]


def _overlap(recipe: Recipe, config: TransformerConfig, chunks: list[DistributedDataParallel]) -> None:
    """Hand the schedule the wrappers' hooks for overlapped communication, as Megatron-LM's training loop does."""

    def one_or_all(functions: list[Any]) -> Any:
        return functions if len(functions) > 1 else functions[0]

    if recipe.parallelism.overlap_grad_reduce:
        config.no_sync_func = one_or_all([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:  # aligned over pipeline stages, Megatron-LM's default with interleaving
            config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    if recipe.parallelism.overlap_param_gather and len(chunks) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in chunks]


# core 0.17 and later ask which kind of context parallelism it is
_HYBRID_CP = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
_on_this_cp_rank = partial(get_batch_on_this_cp_rank, **_HYBRID_CP)


def _forward_step(
    recipe: Recipe,
    load: Callable[[Recipe, DistributedDataParallel], Batch],
    data_iterator: Iterator[Batch] | None,
    model: DistributedDataParallel,
) -> tuple[torch.Tensor, Any]:
    loaded = load(recipe, model) if data_iterator is None else next(data_iterator)
    batch = _on_this_cp_rank(loaded, cp_group=parallel_state.get_context_parallel_group())
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(_loss, batch["loss_mask"])


def _batch(recipe: Recipe, model: DistributedDataParallel) -> Batch:
    """The tensors of one microbatch that this rank holds in Megatron-LM's training loop.

    The first tensor-parallel rank loads all of them; the others receive those that their pipeline stage needs. Stages
    in the middle have none; one with multi-token prediction, which embeds tokens and has losses, needs all of them. The
    attention mask is built by the data loader, except for flash attention.
    """
    batch, sequence = recipe.training.micro_batch_size, recipe.training.seq_length
    stage = {"ignore_virtual": False, "vp_stage": get_attr_wrapped_model(model, "vp_stage")}
    mtp = get_attr_wrapped_model(model, "mtp_process")
    first = mtp or parallel_state.is_pipeline_first_stage(**stage)
    last = mtp or parallel_state.is_pipeline_last_stage(**stage)
    loads = parallel_state.get_tensor_model_parallel_rank() == 0 and (first or last)
    with_mask = recipe.training.attention_backend != "flash" and (first or last)

    def integers() -> torch.Tensor:
        return torch.zeros((batch, sequence), dtype=torch.long, device="cuda")

    return {
        "tokens": integers() if loads or first else None,
        "labels": integers() if loads or last else None,
        "loss_mask": torch.ones((batch, sequence), device="cuda") if loads or last else None,
        "attention_mask": torch.zeros((batch, 1, sequence, sequence), dtype=torch.bool, device="cuda")
        if with_mask
        else None,
        "position_ids": integers() if loads or first else None,
    }


def random_text(recipe: Recipe, number: int) -> torch.Tensor:
    """Random tokens on the host, [micro batch, sequence + 1]: those of microbatch `number`, from 1, of this sample's
    ranks."""
    sharer = parallel_state.get_data_parallel_rank(with_context_parallel=False)
    generator = torch.Generator().manual_seed(number * 1000 + sharer)
    shape = (recipe.training.micro_batch_size, recipe.training.seq_length + 1)
    return torch.randint(recipe.model.vocab_size, shape, generator=generator)


class DeviceBatches:
    """What `_batch` gives, with values: random tokens, the same for all ranks that share a sample."""

    def __init__(self) -> None:
        self._loaded: Counter[int] = Counter()

    def __call__(self, recipe: Recipe, model: DistributedDataParallel) -> Batch:
        """The tensors of the next microbatch that this rank holds, filled in place: nothing else is allocated."""
        self._loaded[id(model)] += 1
        batch = _batch(recipe, model)
        text = random_text(recipe, self._loaded[id(model)])
        length = recipe.training.seq_length
        values = {
            "tokens": text[:, :-1],
            "labels": text[:, 1:],
            "position_ids": torch.arange(length),
            "attention_mask": torch.ones((length, length), dtype=torch.bool).triu(1),
        }
        for name, value in values.items():
            tensor = batch[name]
            if tensor is not None:
                tensor.copy_(value.expand_as(tensor))
        return batch


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Masked sum of the token losses, the number of tokens, and what is reported, as in Megatron-LM's GPT training."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}
