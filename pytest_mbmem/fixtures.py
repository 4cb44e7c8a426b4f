"""The fixtures `mbmem` and `megatron_model`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest

from .errors import OutOfMemory, UserError
from .session import PLAN, RUN, Plan

if TYPE_CHECKING:
    from pathlib import Path

    from .measurement import Device, Measurement
    from .megatron.model import LiveModel
    from .recipe import Recipe


class Mbmem:
    """What the `mbmem` fixture gives a test."""

    OutOfMemory = OutOfMemory

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._run = item.config.stash[RUN]

    @property
    def device(self) -> Device:
        """What is measured on."""
        return self._run.device

    def measure(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        *,
        name: str | None = None,
        ranks: Literal["distinct", "all"] | Sequence[int] = "distinct",
        may_fail: bool = False,
    ) -> Measurement:
        """Build and train the recipe on the device, one worker process a rank, and keep the figures for the gates.

        Args:
            recipe: a `Recipe`, or the path of a YAML file (relative to the test's own), or what such a file holds.
            name: tells several measurements of a test apart; each but the first needs one to have a baseline.
            ranks: "distinct" measures one of each kind of rank, "all" every one, or give their numbers.
            may_fail: return a measurement that failed, with the reason in its `failure`, instead of raising.

        Raises:
            OutOfMemory: the recipe does not fit the device; the message is PyTorch's.
            MeasurementFailed: a worker raised, died or ran out of time.
        """
        __tracebackhide__ = True
        try:
            return self._run.measure(self._item, recipe, name, ranks, may_fail)
        except UserError as error:
            pytest.fail(str(error), pytrace=False)


@pytest.fixture
def mbmem(request: pytest.FixtureRequest) -> Mbmem:
    """Measures recipes: `mbmem.measure(recipe)` returns the peaks of every rank and phase."""
    run = request.config.stash[RUN]
    if run.worker is not None:
        text = "mbmem: a marked test must name it among its arguments, or the test itself is measured"
        pytest.fail(text, pytrace=False)
    if PLAN not in request.node.stash:  # asked for by request.getfixturevalue()
        request.node.stash[PLAN] = Plan()
        run.register_hooks()
    return Mbmem(request.node)


@pytest.fixture
def megatron_model(request: pytest.FixtureRequest) -> Iterator[Callable[..., LiveModel]]:
    """Builds live Megatron Core models: `megatron_model(recipe, rank=0)`. The whole test runs in a worker."""
    run = request.config.stash[RUN]
    worker = run.worker
    if worker is None:  # only --setup-only and the like get here
        pytest.skip("megatron_model exists only where the whole test runs in a worker")
    built: list[LiveModel] = []

    def build(recipe: Recipe | Mapping[str, Any] | str | Path, rank: int = 0) -> LiveModel:
        __tracebackhide__ = True
        try:
            if any(model.is_open for model in built):
                raise UserError("megatron_model: one model at a time; call its close() before building the next")
            built.append(worker.build(run.recipe(request.node, recipe, "megatron_model"), rank))
        except UserError as error:
            pytest.fail(str(error), pytrace=False)
        return built[-1]

    yield build
    for model in built:
        model.close()
