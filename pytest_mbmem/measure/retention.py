"""What stays allocated: a recipe's rank, or any training step, run several times and looked into afterwards.

In a worker. The steps that are measured run as in a measurement, with nothing recorded. Only then a few more run with
the allocator's history on, to name who holds what stayed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from ..errors import UserError
from ..garbage import no_collections
from ..growth import Holder, Trace, slope
from ..megatron.model import LiveModel
from ..validation import show
from .holders import Collected, Recording, collect, holders_of, without

_WARM_UP = 2
"""Steps before the first figure: the first one makes the optimizer's state, the second one is the first with it."""


def trace_model(model: LiveModel, steps: int) -> Trace:
    """Train a live model `steps` steps beyond the first two, and a few more to name holders."""
    retained: list[int] = []
    kept: list[tuple[Holder, ...]] = []
    freed: list[int] = []

    def note_retained(step: int, phase: str) -> None:
        if phase == "grad-sync":
            retained.append(torch.cuda.memory_allocated())

    roots = {**_named_chunks(model), "optimizer": model.optimizer}
    with _after_a_collection():
        resting, peak = _figures(lambda: model.step(note_retained), steps)
        retained = retained[_WARM_UP - 1 :]
        collected = collect()
        grown = _grown(model.step, roots) if slope(resting) or slope(retained) else ()
        with recording() as history:

            def note_kept(step: int, phase: str) -> None:
                if phase == "grad-sync":
                    kept.append(holders_of(history.alive(), roots))
                    freed.append(collect().bytes)

            model.step(note_kept)
    return Trace(
        resting=resting,
        retained=tuple(retained),
        peak=peak,
        freed_by_gc=collected.bytes,
        cycles=tuple(collected.cycles),
        kept=kept[0],
        kept_freed_by_gc=freed[0],
        grown=grown,
    )


def watch(
    step: Callable[..., object], steps: int, modules: Any, microbatches: tuple[int, int] | None
) -> tuple[Trace, dict[int, Trace]]:
    """The traces of any training step; with `microbatches`, `step` is called with their number.

    Raises `UserError` for modules that have no names.
    """
    roots = {**_named(modules), "the watched step": step}
    if microbatches is None:
        return trace_step(step, steps, roots), {}
    few, many = microbatches
    run = trace_step(partial(step, few), steps, roots, with_kept=True)
    return run, {few: run, many: trace_step(partial(step, many), 1, roots, with_kept=True)}


def trace_step(step: Callable[[], object], steps: int, roots: Mapping[str, Any], *, with_kept: bool = False) -> Trace:
    """Call any step `steps` times beyond the first two, and a few times more where holders are to be named."""
    kept: tuple[Holder, ...] = ()
    with _after_a_collection():
        resting, peak = _figures(step, steps)
        collected = collect()
        grown = _grown(step, roots) if slope(resting) else ()
        if with_kept:
            with recording() as history:
                step()
                kept = holders_of(history.alive(), roots)
    return Trace(
        resting=resting,
        peak=peak,
        freed_by_gc=collected.bytes,
        cycles=tuple(collected.cycles),
        kept=kept,
        grown=grown,
    )


class Body:
    """What a test's body leaves on the device, from the making of this to `end`.

    Python's automatic garbage collection is off in between. CUDA is not started.
    """

    current: Body | None = None

    def __init__(self) -> None:
        self._was_on = gc.isenabled()
        gc.collect()
        gc.disable()
        self._history = Recording()
        self._early: list[Collected] = []
        Body.current = self

    def note(self, collected: Collected) -> None:
        """Count what something inside of the body had to collect."""
        self._early.append(collected)

    def close(self) -> None:
        """Let go of everything. A second call does nothing."""
        if Body.current is not self:
            return
        Body.current = None
        self._history.stop()
        if self._was_on:
            gc.enable()

    def end(self, fixtures: Mapping[str, Any], *, with_model: bool) -> Trace:
        """What a collection frees now, and what is left then: without cuBLAS's workspaces and what fixtures hold.

        With a live model that its own fixture will close, what is left is not told.
        """
        collections = [*self._early, collect()]
        left: int | None = None
        kept: tuple[Holder, ...] = ()
        if not with_model and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch._C._cuda_clearCublasWorkspaces()
            blocks = without(self._history.alive(), fixtures)
            left = sum(block.size for block in blocks)
            kept = holders_of(blocks, {})
        self.close()
        return Trace(
            freed_by_gc=sum(c.bytes for c in collections),
            left=left,
            cycles=tuple(dict.fromkeys(name for c in collections for name in c.cycles)),
            kept=kept,
        )


def _figures(step: Callable[[], object], steps: int) -> tuple[tuple[int, ...], int]:
    """Allocated bytes after the warm-up and after each step that counts, and the highest in between."""
    for _ in range(_WARM_UP):
        step()
    torch.cuda.reset_peak_memory_stats()
    resting = [torch.cuda.memory_allocated()]
    for _ in range(steps):
        step()
        resting.append(torch.cuda.memory_allocated())
    return tuple(resting), torch.cuda.max_memory_allocated()


def _grown(step: Callable[[], object], roots: Mapping[str, Any]) -> tuple[Holder, ...]:
    """Who holds what one step made when the next one is done."""
    with recording() as history:
        step()
        end = history.mark()
        step()
        return holders_of(history.alive(end), roots)


def _named_chunks(model: LiveModel) -> dict[str, Any]:
    """The model chunks without their wrappers, under the names that their parameters have; then the wrappers."""
    bare: list[Any] = []
    for chunk in model.chunks:
        module: Any = chunk
        while isinstance(getattr(module, "module", None), torch.nn.Module):
            module = module.module
        bare.append(module)
    names = [""] if len(bare) == 1 else [f"chunk {index}: " for index in range(len(bare))]
    wrappers = {f"its wrapper {index}": chunk for index, chunk in enumerate(model.chunks)}
    return {**dict(zip(names, bare, strict=True)), **wrappers}


def _named(modules: Any) -> dict[str, Any]:
    """Objects to look into, by the name to show."""
    if modules is None:
        return {}
    if isinstance(modules, LiveModel):
        return {**_named_chunks(modules), "optimizer": modules.optimizer}
    if isinstance(modules, torch.nn.Module):
        return {"": modules}
    if isinstance(modules, Mapping) and all(isinstance(name, str) for name in modules):
        return dict(modules)
    raise UserError(
        f"growth.watch(modules=...): {show(modules)} is neither a module, nor a model of megatron_model, nor a mapping "
        "of names to objects"
    )


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """The allocator's history, for as long as it is needed."""
    history = Recording()
    try:
        yield history
    finally:
        history.stop()


@contextlib.contextmanager
def _after_a_collection() -> Iterator[None]:
    """Collect now and not again in here: figures do not depend on when that would be, and what needs it shows."""
    collected = collect()
    if Body.current is not None:
        Body.current.note(collected)
    with no_collections():
        yield
