"""The fixtures `mbmem` and `megatron_model`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import pytest

from .errors import IncompatibleSettings, MeasurementFailed, OutOfMemory, Refused, UserError
from .session import PLAN, RECORD, RUN, Plan, TestRecord

if TYPE_CHECKING:
    from pathlib import Path

    from .compare import Comparison
    from .comparing import Given
    from .growth import Growth
    from .measure.host import Parity, Precision
    from .measurement import Device, Measurement
    from .megatron.model import LiveModel
    from .oom import Shortage
    from .recipe import Recipe
    from .refusals import Proof
    from .sweep import Sweep


def _as_failure(error: UserError | Refused, unproved: pytest.Item | None = None) -> BaseException:
    """A user's mistake as a test's failure, without a traceback; a refused recipe stays an error to be caught.

    `unproved` is the test of a call that the incompatible marker does not turn into a proof.
    """
    if isinstance(error, IncompatibleSettings):
        plan = unproved.stash.get(PLAN, None) if unproved is not None else None
        if plan is not None and plan.incompatible is not None:
            hint = "The incompatible marker proves what mbmem.measure and mbmem.refuses are given, and nothing else."
            return IncompatibleSettings(f"{error}\n\n{hint}", error.ids)
        return error
    return pytest.fail.Exception(str(error), pytrace=False)


class Mbmem:
    """What the `mbmem` fixture gives a test."""

    OutOfMemory = OutOfMemory

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._run = item.config.stash[RUN]

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep what is raised on the test's record, as the test may catch it."""
        try:
            yield
        except Exception as error:
            self._item.stash.setdefault(RECORD, TestRecord()).errors.append(error)
            raise

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
            IncompatibleSettings: the recipe breaks documented constraints; nothing was started.
            OutOfMemory: the recipe does not fit the device; the message is PyTorch's.
            MeasurementFailed: a worker raised, died or ran out of time.
        """
        __tracebackhide__ = True
        try:
            with self._noted():
                return self._run.measure(self._item, recipe, name, ranks, may_fail)
        except UserError as error:
            raise _as_failure(error) from None

    def refuses(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        id: str | None = None,
        *,
        ranks: Literal["distinct", "all"] | Sequence[int] = "distinct",
    ) -> Proof:
        """Prove that the installed Megatron Core refuses the recipe as documented, this package's checks set aside.

        Its configurations are made, and if it accepts them, the model is built and trained, until something is raised.
        Returns the proof if that is the error of the documentation: its type, and the start of its message. The test
        fails with both texts if it is another or none ("documentation and code disagree"), and is skipped, with the
        reason, where this environment cannot decide.

        Args:
            recipe: as for `measure`. It must break the constraint.
            id: of the constraint ("cpu-offload-with-pp"; `mbmem explain` lists them). None: the marker's.
            ranks: as for `measure`; one after another until something is raised.
        """
        __tracebackhide__ = True
        try:
            with self._noted():
                return self._run.refuses(self._item, recipe, id, ranks)
        except UserError as error:
            raise _as_failure(error) from None

    def explain(self, failed: Measurement | MeasurementFailed) -> Shortage:
        """Say why a recipe ran out of memory, and what would help.

        The failing rank runs again on a device without limit, and its allocations are replayed through PyTorch's
        allocator with expandable segments: that they fit then is what makes it fragmentation (`verdict`). Remedies are
        measured in the order of NVIDIA's documents. A test that fails by `OutOfMemory` says all this by itself.

        Args:
            failed: the error that `measure` raised, or what it returned with `may_fail`.

        The result's `explain()` is a text; its `diagnosis` has the evidence and the remedies with their figures.
        """
        __tracebackhide__ = True
        try:
            return self._run.explain(failed)
        except UserError as error:
            raise _as_failure(error) from None

    def compare(
        self,
        control: Given,
        candidate: Given,
        *,
        settings: Sequence[str] | None = None,
        name: str | None = None,
        ranks: Literal["distinct", "all"] | Sequence[int] = "distinct",
        metric: Literal["allocated", "reserved"] | None = None,
        phase: str | None = None,
    ) -> Comparison:
        """Measure a control and a candidate, and say what the settings that differ save and what they cost.

        `mbmem.compare(recipe, {"recompute_granularity": "selective"})` compares a recipe with itself but for the
        settings that are named. Nothing raises when a measurement fails or nothing is saved: the result's `verdict`
        says so, and only its figures raise `MeasurementFailed` where there are none. No gate and no baseline judges
        what is measured here. A recipe is measured once in a session for all comparisons and sweeps.

        Args:
            control: a recipe as `measure` takes it, or the settings that it has instead of the candidate's.
            candidate: the same, or the settings that it has instead of the control's.
            settings: all that may differ, each a field ("tp"), its key ("parallelism.tp") or a part ("memory"). None:
                the settings that were given as changes; between two whole recipes memory settings, which are `memory`
                and LoRA's input re-gather.
            name: of the candidate, in reports.
            ranks: as in `measure`, of both.
            metric: "allocated" (live bytes) or "reserved" (what the caching allocator holds). None: "reserved" where
                `alloc_conf` alone differs, which hardly changes what is allocated, else "allocated".
            phase: compare the peaks of one phase or step, as in "optimizer" or "step-2/backward". None: the whole run.

        A test fails at once, with the settings listed, if others differ or none does.
        """
        __tracebackhide__ = True
        try:
            sweep = self._run.comparing.compare(self._item, control, candidate, settings, name, ranks, metric, phase)
        except UserError as error:
            raise _as_failure(error, self._item) from None
        self._keep(sweep)
        comparison = sweep.rows[0].comparison
        assert comparison is not None
        return comparison

    def sweep(
        self,
        recipe: Given,
        settings: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
        *,
        control: str | None = None,
        name: str | None = None,
        ranks: Literal["distinct", "all"] | Sequence[int] = "distinct",
        metric: Literal["allocated", "reserved"] | None = None,
        phase: str | None = None,
    ) -> Sweep:
        """Measure a recipe with several settings and compare each with one control.

        The result prints as a table, iterates over its rows, and `sweep["core_attn"]` is one of them, with `.verdict`,
        `.comparison`, `.measurement` and `.unbeaten`. A row that fails keeps its failure as its verdict. A recipe is
        measured once in a session, so the cases of a parametrised test can share a sweep:

            SETTINGS = {
                "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
                "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            }

            @pytest.mark.parametrize("setting", SETTINGS)
            def test_recompute(mbmem, setting):
                row = mbmem.sweep(RECIPE, SETTINGS)[setting]
                assert row.verdict == "saving", row.explain()

        Args:
            recipe: as `measure` takes it.
            settings: name of a row -> the settings that it changes, as in `Recipe.but`; or a list of such changes.
            control: the row that the others are compared with. None: the recipe itself, as a row named "control".
            name: of the sweep, in reports.
            ranks, metric, phase: as in `compare`.

        No gate and no baseline judges what is measured here. A test fails at once for a setting that is impossible,
        changes nothing or makes the same recipe as another.
        """
        __tracebackhide__ = True
        try:
            sweep = self._run.comparing.sweep(self._item, recipe, settings, control, name, ranks, metric, phase)
        except UserError as error:
            raise _as_failure(error, self._item) from None
        self._keep(sweep)
        return sweep

    def _keep(self, sweep: Sweep) -> None:
        """For the reports; the same one of a test's several calls once."""
        sweeps = self._item.stash.setdefault(RECORD, TestRecord()).sweeps
        if sweep not in sweeps:
            sweeps.append(sweep)

    def parity(self, control: Given, candidate: Given, *, precisions: Sequence[Precision] | None = None) -> Parity:
        """Compare a candidate's numbers with its control's: real ones, on the CPU, both shrunk alike.

        One step of two microbatches on all ranks of the shrunk recipe (at most two of each kind of parallelism):
        outputs, input gradients, weight gradients, accumulated and reduced main gradients, and parameter updates.
        Parameters that start at zero (LoRA's B) get random values, so that there is a gradient to compare. Dropout may
        be on: recompute must replay it.

        Args:
            control: a recipe as `measure` takes it.
            candidate: the same but for memory settings, which are `memory` and LoRA's input re-gather; or just the
                settings that it has instead of the control's, as in {"recompute_granularity": "selective"}.
            precisions: "fp32", where what is more than rounding must be a fault, and "bf16", what training uses. None:
                both, without one that the recipe cannot have (fp32 with context parallelism), as the table then says.

        Returns the table of errors (`print(parity.table())`). Raises:
            ParityFailed: an AssertionError that names the worst tensor of each kind beyond its tolerance.
            Refused: Megatron Core does not take the settings.
            MeasurementFailed: a rank raised, died or ran out of time.

        A test fails at once, with the settings listed, if others differ or none does.
        """
        __tracebackhide__ = True
        try:
            return self._run.parity(self._item, control, candidate, precisions)
        except UserError as error:
            raise _as_failure(error, self._item) from None

    def growth(
        self,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        *,
        steps: int | None = None,
        control: Recipe | Mapping[str, Any] | str | Path | None = None,
        microbatches: tuple[int, int] | None = None,
        slack: int | str | None = None,
        ranks: Literal["distinct", "all"] | Sequence[int] = "distinct",
    ) -> Growth:
        """Train the recipe for several steps on the device and see whether memory grows or stays.

        The marker `no_memory_growth` does this with everything that a test measures, and fails it; here the result is
        the test's: `assert growth.passed, growth.explain()`.

        Args:
            recipe: as for `measure`.
            steps: how many count, 5 (the default) or more; the first two of a run do not.
            control: what may stay after backward is what stays in this one, which differs in memory settings alone;
                a mapping without "model" is the settings that it has instead of the recipe's. None: the recipe without
                recompute and activation offload, if it has any.
            microbatches: two numbers of them, the smaller first, between which memory must be the same. None: enough
                to fill the pipeline, and twice as many.
            slack: bytes that are not a finding, or text as in "1 MiB"; 4 KiB where none is given.
            ranks: as for `measure`.

        Raises:
            OutOfMemory: a run does not fit the device.
            Refused: Megatron Core does not take the settings.
            MeasurementFailed: a worker raised, died or ran out of time.
        """
        __tracebackhide__ = True
        arguments = {"steps": steps, "control": control, "microbatches": microbatches, "slack": slack}
        try:
            return self._run.growth(self._item, recipe, arguments, ranks)
        except UserError as error:
            raise _as_failure(error, self._item) from None


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
            parsed = run.recipe(request.node, recipe, "megatron_model")
            plan = request.node.stash.get(PLAN, None)
            built.append(worker.build(parsed, rank, checked=plan is None or plan.incompatible is None))
        except (UserError, Refused) as error:
            raise _as_failure(error) from None
        return built[-1]

    yield build
    for model in built:
        model.close()
