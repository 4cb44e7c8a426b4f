"""What one pytest process measures with, and what it knows about each test: plans, measurements, judgements.

`MeasuringTests` has the hooks that run for every test. It is registered when the first test that measures is found, so
that a session without one pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

from .errors import (
    IncompatibleSettings,
    MeasurementFailed,
    NoEffect,
    NotOnHost,
    OutOfMemory,
    ParityFailed,
    Refused,
    TooFewGpus,
    UserError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .artifacts import Artifacts
    from .baseline_file import Entry
    from .baselines import Baselines, Record
    from .comparing import Comparing, Given
    from .diagnosis import Finding
    from .fits import FitGate
    from .fragmentation import FragmentationRule
    from .gates import Judgement, PeakGate
    from .growth import Growth, GrowthRule, GrowthSummary
    from .incompatibilities import Entry as Constraint
    from .item import Watch, Worker
    from .leftovers import Leftovers
    from .measure.host import HostLauncher, Parity, Precision
    from .measure.launch import Launcher
    from .measure.retention import Body
    from .measure.workers import Workers
    from .measurement import Device, Failure, Measurement
    from .oom import Shortage
    from .options import Options
    from .progress import Progress
    from .recipe import Recipe
    from .refusals import Proof
    from .report.reporter import Reporter
    from .report.results import Measured
    from .savings import SavingGate
    from .snapshots import Snapshots
    from .sweep import Sweep
    from .throughput import ThroughputGate, ThroughputJudgement, Timing
    from .virtual_gpu.gpus import Gpu

MARKER = "peak_memory"
SAVING_MARKER = "memory_saving"
FITS_MARKER = "fits"
FRAGMENTATION_MARKER = "fragmentation"
THROUGHPUT_MARKER = "throughput"
INCOMPATIBLE_MARKER = "incompatible"
MARKERS = (
    MARKER,
    SAVING_MARKER,
    FITS_MARKER,
    FRAGMENTATION_MARKER,
    THROUGHPUT_MARKER,
    "no_memory_growth",
    INCOMPATIBLE_MARKER,
)


@dataclass
class Plan:
    """How a test is to be measured, decided when it is collected."""

    gates: tuple[PeakGate, ...] = ()
    savings: tuple[SavingGate, ...] = ()
    fits: tuple[FitGate, ...] = ()
    fragmentations: tuple[FragmentationRule, ...] = ()
    throughputs: tuple[ThroughputGate, ...] = ()
    timing: Timing | None = None  # as the throughput marker asks for; None: there is none
    growth: GrowthRule | None = None
    incompatible: Constraint | None = None  # what Megatron Core must refuse
    in_worker: bool = False  # the whole test runs in a worker
    mistake: str | None = None

    @property
    def peaks(self) -> dict[str, bool]:
        """Whether each marker that judges peaks is there."""
        judged = (self.gates, self.fits, self.fragmentations)
        return dict(zip((MARKER, FITS_MARKER, FRAGMENTATION_MARKER), map(bool, judged), strict=True))

    @property
    def measures(self) -> list[str]:
        """The markers that need something measured."""
        others = {SAVING_MARKER: bool(self.savings), THROUGHPUT_MARKER: bool(self.throughputs)}
        return [name for name, there in {**self.peaks, **others}.items() if there]

    @property
    def has_baseline(self) -> bool:
        """Whether a gate compares what the test measures with a baseline, on a virtual or on a real GPU."""
        of_steps = (gate.needs_baseline(virtual) for gate in self.throughputs for virtual in (True, False))
        return any(gate.limit is None for gate in self.gates) or any(of_steps)


@dataclass
class TestRecord:
    """What one run of a test measured."""

    __test__ = False

    measured: list[Measured] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)  # of mbmem.compare and mbmem.sweep, which no gate judges
    growths: list[GrowthSummary] = field(default_factory=list)  # of the no_memory_growth marker
    records: list[Record] = field(default_factory=list)  # what --mbmem-update may write
    proofs: list[Proof] = field(default_factory=list)  # of refusals
    errors: list[Exception] = field(default_factory=list)  # of measuring and proving, which the test may have caught
    refused: list[str] = field(default_factory=list)  # for which of its constraints the test failed, by id
    findings: list[Finding] = field(default_factory=list)  # of the diagnosis, when all is judged

    def withdraw(self) -> None:
        """Update nothing: the test fails."""
        self.records.clear()
        for measured in self.measured:
            for judged in measured.judged:
                judged.accepted = False
            for steps in measured.throughputs:
                steps.accepted = False

    def to_json(self) -> dict[str, Any]:
        """What travels on the test's report, plain data."""
        return {
            "measurements": [m.to_json() for m in self.measured],
            "sweeps": [s.to_json() for s in self.sweeps],
            "growths": [g.to_json() for g in self.growths],
            "records": [r.to_json() for r in self.records],
            "proofs": [p.summary() for p in self.proofs],
            "refused": self.refused,
            "findings": [asdict(f) for f in self.findings],
        }

    def diagnose(self) -> None:
        """Find out what the evidence says."""
        if self.measured or self.sweeps or self.growths or self.refused:
            from .report.findings import found

            self.findings = found(self.measured, self.sweeps, self.growths, self.refused)

    def lacks(self, what: str, item: pytest.Item, marker: str, calls: str = "mbmem.measure()") -> str:
        """Why nothing was measured, or tried, for a test with the marker."""
        text = f"nothing was {what}: {item.nodeid} has the {marker} marker"
        if not self.errors:
            return f"{text}, but never called {calls}"
        if all(isinstance(error, IncompatibleSettings) for error in self.errors):
            ids = [id for error in self.errors if isinstance(error, IncompatibleSettings) for id in error.ids]
            return f"{text}, and every recipe was refused: {', '.join(dict.fromkeys(ids))}"
        return f"{text}, and {calls} failed: {self.errors[-1]}"


PLAN = pytest.StashKey["Plan | None"]()
RECORD = pytest.StashKey[TestRecord]()
RUN = pytest.StashKey["Run"]()


@dataclass
class Collected:
    """What this session collected, and whether none of it was deselected."""

    nodeids: set[str] = field(default_factory=set)
    complete: bool = True

    def add(self, nodeids: Iterable[str]) -> None:
        """More collected tests."""
        self.nodeids.update(nodeids)


class Run:
    """The measuring side of one pytest process: launcher, device and baselines, each made when first needed.

    With `worker`, this process is itself the worker that one whole test runs in.
    """

    def __init__(self, config: pytest.Config, options: Options, worker: Worker | None = None) -> None:
        self.config = config
        self.options = options
        self.worker = worker
        self.collected = Collected()
        self.reporter: Reporter | None = None
        self._hooks_registered = False

    @cached_property
    def launcher(self) -> Launcher:
        """Of this session, closed at its end."""
        from .measure import launch

        if self.options.host:
            raise NotOnHost("--mbmem-host: memory is not measured, and the test asks for it")
        launcher: Launcher
        if self.options.machine is not None:
            from .measure.gpu_launch import GpuLauncher

            launcher = GpuLauncher(
                self.options.machine,
                self.gpus,
                timeout=self.options.timeout,
                mode=self.options.ranks,
                torchrun=self.options.torchrun,
                occupied=self.leftovers.check,
            )
        else:
            launcher = launch.Launcher(self.options.gpu, timeout=self.options.timeout)
        self._show_progress_of(launcher)
        self.config.add_cleanup(launcher.leave)
        return launcher

    @cached_property
    def host_launcher(self) -> HostLauncher:
        """Of this session, for real numbers on the CPU; closed at its end."""
        from .measure.host import HostLauncher

        launcher = HostLauncher(timeout=self.options.timeout)
        self._show_progress_of(launcher)
        self.config.add_cleanup(launcher.close)
        return launcher

    @cached_property
    def progress(self) -> Progress | None:
        """What shows how far long measurements are; None where nobody would see it."""
        torchrun = self.options.torchrun
        if self.worker is not None or (torchrun is not None and torchrun.rank > 0):
            return None
        from .report import live

        return live.begin(self.config)

    def _show_progress_of(self, launcher: Workers) -> None:
        launcher.progress = self.progress
        self.config.add_cleanup(partial(setattr, launcher, "progress", None))

    @property
    def tried_on(self) -> Workers:
        """Where refusals are proved: on the host where there is no GPU, virtual or real."""
        from .refusals import has_cuda_build

        if self.options.host or (self.options.machine is None and not has_cuda_build()):
            return self.host_launcher
        return self.launcher

    @property
    def device(self) -> Device:
        """What is measured on."""
        if self.options.host:
            return self.host_launcher.device
        return self.worker.device if self.worker is not None else self.launcher.device

    @cached_property
    def baselines(self) -> Baselines:
        """Of the device."""
        from .baselines import Baselines

        return Baselines(self.options.baselines, self.device.key)

    @cached_property
    def comparing(self) -> Comparing:
        """What this session measured for comparisons."""
        from .comparing import Comparing

        return Comparing(self)

    @cached_property
    def leftovers(self) -> Leftovers:
        """What the tests of this process leave on real GPUs."""
        from .leftovers import Leftovers

        return Leftovers.of(self.config)

    @cached_property
    def artifacts(self) -> Artifacts | None:
        """With --mbmem-artifacts: what writes the folders of failed tests. A worker's test is its caller's."""
        if self.options.artifacts is None or self.worker is not None:
            return None
        from .artifacts import Artifacts

        return Artifacts(self, self.options.artifacts)

    @cached_property
    def snapshots(self) -> Snapshots:
        """The files of this session."""
        from .snapshots import Snapshots

        return Snapshots(self)

    def register_hooks(self) -> None:
        """Have the hooks of `MeasuringTests` called from now on."""
        if not self._hooks_registered:
            self._hooks_registered = True
            self.config.pluginmanager.register(MeasuringTests(self), "mbmem-measuring-tests")
            if self.options.machine is not None and self.worker is None:
                self.config.pluginmanager.register(self.leftovers, "mbmem-leftovers")
            if self.artifacts is not None:
                self.config.pluginmanager.register(self.artifacts, "mbmem-artifacts")
            self.register_reporter()
            _ = self.progress  # which is to know every test

    def register_reporter(self) -> None:
        """Have the hooks of `Reporter` called from now on, except in workers, which only pass reports on.

        Of the processes of a torchrun the first one reports and writes.
        """
        is_first = self.options.torchrun is None or self.options.torchrun.rank == 0
        if self.reporter is None and self.worker is None and is_first and not hasattr(self.config, "workerinput"):
            from .report.reporter import Reporter

            self.reporter = Reporter(self)
            self.config.pluginmanager.register(self.reporter, "mbmem-reporter")

    def leave_reports_to_the_first_rank(self) -> None:
        """In another process of a torchrun: print nothing but what fails."""
        torchrun = self.options.torchrun
        if torchrun is not None and torchrun.rank > 0 and self.worker is None:
            from .report.other_rank import OtherRank

            self.config.option.xmlpath = None  # the first rank's
            self.config.pluginmanager.register(OtherRank(self, torchrun.rank), "mbmem-other-rank")

    def enter(self, item: pytest.Item) -> None:
        """Under torchrun: tell the launcher which test begins."""
        from .measure.gpu_launch import GpuLauncher

        if isinstance(self.launcher, GpuLauncher):
            self.launcher.test_number = item.session.items.index(item)
            self.launcher.test_name = item.nodeid

    def failed_elsewhere(self, failed: Mapping[str, str]) -> list[tuple[int, str, str]]:
        """What failed in the other processes of a torchrun: rank, test, text. `failed`: what failed here, by test."""
        launcher = self.__dict__.get("launcher")  # if it was made
        if self.options.torchrun is None or launcher is None:
            return []
        elsewhere: list[tuple[int, str, str]] = launcher.failed_elsewhere(failed)
        return elsewhere

    def header(self) -> dict[str, str]:
        """What this session measures with, by name."""
        from .measure.launch import versions

        if self.options.host:
            from .measure.host import NOT_GATED

            return {
                "device": f"{self.device.key}, {self.device.name}; {NOT_GATED}",
                "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
            }
        found = versions()
        if (machine := self.options.machine) is not None:
            device = f"{self.device.key}, {len(machine.gpus)} x {self.device.name}, ranks: {self.options.ranks}"
            if (torchrun := self.options.torchrun) is not None:
                device += f", {torchrun.world_size} processes of torchrun"
            found = {**found, "driver": machine.driver}
        else:
            device = f"{self.device.key}, a virtual {self.options.gpu.name}"
        return {
            "device": device,
            "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
            "baselines": str(self.options.baselines / self.device.key),
        }

    def header_lines(self) -> list[str]:
        """For pytest's report header."""
        return [f"mbmem {name}: {value}" for name, value in self.header().items()]

    def plan(self, item: pytest.Item) -> Plan | None:
        """How to measure the test; None for one that has nothing to do with this plugin."""
        fixtures = getattr(item, "fixturenames", ())
        # The keywords know more names than those of markers, but ask faster: this runs for every test of a session.
        names = [name for name in MARKERS if name in item.keywords]
        marked = bool(names) and any(marker.name in names for marker in item.iter_markers())
        mbmem, model = "mbmem" in fixtures, "megatron_model" in fixtures
        if not (marked or mbmem or model):
            return None
        plan = Plan(in_worker=not mbmem)
        try:
            plan.gates = self._gates(item)
            plan.savings = self._savings(item)
            if plan.savings and not mbmem:
                raise UserError(
                    f"{item.nodeid}: the {SAVING_MARKER} marker compares recipes that the test measures; name mbmem "
                    "among its arguments and call mbmem.measure(recipe)"
                )
            plan.fits = self._fits(item, in_worker=plan.in_worker)
            plan.fragmentations = self._fragmentations(item)
            plan.throughputs, plan.timing = self._throughputs(item)
            if plan.throughputs and not mbmem:
                raise UserError(
                    f"{item.nodeid}: the {THROUGHPUT_MARKER} marker is about the steps of a recipe, and a test that "
                    "runs whole in a worker has none; name mbmem among its arguments and call mbmem.measure(recipe)"
                )
            plan.growth = self._growth_rule(item, in_worker=plan.in_worker)
            plan.incompatible = self._incompatible(item, plan)
            judging = next((name for name, there in plan.peaks.items() if there), None)
            if plan.in_worker and plan.growth is not None and judging is not None:
                raise UserError(
                    f"{item.nodeid}: no_memory_growth runs the whole test without garbage collection, which changes "
                    f"the peak that {judging} judges; give each marker a test of its own"
                )
            if mbmem and model:
                raise UserError(
                    f"{item.nodeid}: uses mbmem, which measures in workers of its own, and megatron_model, which needs "
                    "the whole test in a worker; use one of them"
                )
        except UserError as error:
            plan.mistake = str(error)
        return plan

    def _gates(self, item: pytest.Item) -> tuple[PeakGate, ...]:
        """Of all markers; the closest one decides where several gate the same figure."""
        from .gates import PeakGate

        gates: dict[str, PeakGate] = {}
        for marker in item.iter_markers(MARKER):
            gate = PeakGate.from_marker(marker.args, marker.kwargs, self.options.gate_defaults, item.nodeid)
            gates.setdefault(gate.metric_id, gate)
        return tuple(gates.values())

    def _savings(self, item: pytest.Item) -> tuple[SavingGate, ...]:
        """Of all markers, the closest one first; only one of those that are equal."""
        markers = list(item.iter_markers(SAVING_MARKER))
        if not markers:
            return ()
        from .savings import SavingGate

        gates: list[SavingGate] = []
        for marker in markers:
            gate = SavingGate.from_marker(marker.args, marker.kwargs, item.nodeid, item.path.parent)
            if gate not in gates:
                gates.append(gate)
        return tuple(gates)

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        """All that are known to this session, by name."""
        from .virtual_gpu.gpus import load_gpus

        return load_gpus(self.options.gpus_file)

    def _fits(self, item: pytest.Item, in_worker: bool) -> tuple[FitGate, ...]:
        """Of all markers; the closest one decides where several name the same GPU."""
        gates: dict[str, FitGate] = {}
        for marker in item.iter_markers(FITS_MARKER):
            from .fits import FitGate

            gpu = self.options.gpu
            for gate in FitGate.from_marker(marker.args, marker.kwargs, self.gpus, gpu, item.nodeid):
                if in_worker and gate.gpu != gpu:
                    raise UserError(
                        f"{item.nodeid}: fits({gate.gpu.key!r}): a test that runs whole in a worker is judged on the "
                        f"GPU of this session, {gpu.key}; leave the name out, or give the recipe to mbmem.measure()"
                    )
                gates.setdefault(gate.gpu.key, gate)
        return tuple(gates.values())

    def _fragmentations(self, item: pytest.Item) -> tuple[FragmentationRule, ...]:
        """Of all markers; the closest one decides where several are about the same phase."""
        rules: dict[str, FragmentationRule] = {}
        for marker in item.iter_markers(FRAGMENTATION_MARKER):
            from .fragmentation import FragmentationRule

            capacity = self.options.gpu.capacity
            rule = FragmentationRule.from_marker(marker.args, marker.kwargs, capacity, item.nodeid)
            rules.setdefault(rule.metric_id, rule)
        return tuple(rules.values())

    def _throughputs(self, item: pytest.Item) -> tuple[tuple[ThroughputGate, ...], Timing | None]:
        """Of all markers; the closest one decides where several judge the same, and how many steps are timed."""
        gates: dict[str, ThroughputGate] = {}
        timing: Timing | None = None
        for marker in item.iter_markers(THROUGHPUT_MARKER):
            from .throughput import ThroughputGate

            gate, its_timing = ThroughputGate.from_marker(marker.args, marker.kwargs, item.nodeid)
            timing = timing or its_timing
            if any(closer.counts for closer in gates.values()):
                gate = replace(gate, counts=False)
            gates.setdefault(gate.judges, gate)
        return tuple(gates.values()), timing

    def _growth_rule(self, item: pytest.Item, in_worker: bool) -> GrowthRule | None:
        """Of the closest marker."""
        marker = item.get_closest_marker("no_memory_growth")
        if marker is None:
            return None
        from .growth import GrowthRule

        def as_control(value: Any) -> Recipe | Mapping[str, object]:
            return self._control(item, value, "no_memory_growth(control=...)")

        rule = GrowthRule.from_marker(marker.args, marker.kwargs, item.nodeid, as_control)
        if in_worker:
            rule.check_in_worker(item.nodeid)
        return rule

    def _incompatible(self, item: pytest.Item, plan: Plan) -> Constraint | None:
        """Of the closest marker, beside which there must be no other of the same function or class."""
        marker = item.get_closest_marker(INCOMPATIBLE_MARKER)
        if marker is None:
            return None
        from unittest import TestCase

        from .refusals import entry_of_marker

        entry = entry_of_marker(marker.args, marker.kwargs, item.nodeid)
        (closest, _), *_ = by_node = list(item.iter_markers_with_node(INCOMPATIBLE_MARKER))
        beside = [other for node, other in by_node if node is closest]
        ids = dict.fromkeys(entry_of_marker(other.args, other.kwargs, item.nodeid).id for other in beside)
        if len(ids) > 1:
            raise UserError(
                f"{item.nodeid}: {INCOMPATIBLE_MARKER}: {', '.join(ids)}: Megatron Core can refuse for one of them "
                "alone; give each a test of its own"
            )
        if issubclass(getattr(item, "cls", None) or object, TestCase):
            raise UserError(
                f"{item.nodeid}: {INCOMPATIBLE_MARKER}: unittest keeps to itself what a TestCase raises; write the "
                "test as a function, or as a method of a plain class"
            )
        judging = [*plan.measures, *(["no_memory_growth"] if plan.growth is not None else [])]
        if judging:
            raise UserError(
                f"{item.nodeid}: {INCOMPATIBLE_MARKER} says that nothing runs, so that {judging[0]} has nothing to "
                "judge; give each marker a test of its own"
            )
        return entry

    # Measuring --------------------------------------------------------------------------------------------------------

    def measure(
        self,
        item: pytest.Item,
        recipe: Recipe | Mapping[str, Any] | str | Path,
        name: str | None,
        ranks: Literal["distinct", "all"] | Sequence[int],
        may_fail: bool,
    ) -> Measurement:
        """Measure a recipe for a test and keep the result for its gates and for the reports."""
        __tracebackhide__ = True
        key = self._new_key(item, name)
        parsed = self.recipe(item, recipe, "mbmem.measure")
        plan = item.stash.get(PLAN, None)
        if plan is not None and plan.incompatible is not None:
            self._prove(item, parsed, plan.incompatible, ranks)
            raise self._refusal(parsed, plan.incompatible)
        if plan is not None:
            self._check_controls(item, plan, parsed)
        measurement = self._measure(item, parsed, ranks)
        self.keep(item, key, name, measurement, ranks)
        self.write_snapshots(item)
        failure = measurement.failure
        if failure is not None and not may_fail and not self._is_about_other_gpus(item, failure):
            error = _raised(failure, self.device)
            if isinstance(error, OutOfMemory):
                error.measurement = measurement
            raise error
        return measurement

    @staticmethod
    def _check_controls(item: pytest.Item, plan: Plan, recipe: Recipe) -> None:
        """Raise `IncompatibleSettings`, before the recipe is measured, for a control of the test's markers."""
        controls: list[Callable[[], object]] = [partial(g.control_of, recipe, item.nodeid) for g in plan.savings]
        if plan.growth is not None:
            from .measure.growth_runs import control_of

            controls.append(partial(control_of, recipe, plan.growth))
        for control in controls:
            try:
                control()
            except IncompatibleSettings:
                raise
            except UserError:  # of a control that is not matched: said by its own marker, beside what others find
                continue

    def _measure(
        self, item: pytest.Item, recipe: Recipe, ranks: Literal["distinct", "all"] | Sequence[int]
    ) -> Measurement:
        from .measure.gpu_launch import GpuLauncher

        if self.options.host:
            return self.host_launcher.measure(recipe, ranks=ranks)
        if isinstance(self.launcher, GpuLauncher):
            plan = item.stash[PLAN]
            return self.launcher.measure(recipe, ranks=ranks, timing=plan.timing if plan is not None else None)
        return self.launcher.measure(recipe, ranks=ranks)

    def refuses(
        self, item: pytest.Item, recipe: Given, id: str | None, ranks: Literal["distinct", "all"] | Sequence[int]
    ) -> Proof:
        """Prove for a test that Megatron Core refuses a recipe as documented."""
        __tracebackhide__ = True
        from .incompatibilities import catalog

        parsed = self.recipe(item, recipe, "mbmem.refuses")
        plan = item.stash.get(PLAN, None)
        entry = plan.incompatible if plan is not None else None
        if id is not None:
            try:
                entry = catalog()[id]
            except UserError as error:
                raise UserError(f"{item.nodeid}: mbmem.refuses: {error}") from None
        if entry is None:
            raise UserError(
                f"{item.nodeid}: mbmem.refuses(recipe): which constraint the recipe breaks must be said, as in "
                'mbmem.refuses(recipe, "cpu-offload-with-pp"), or by the incompatible marker'
            )
        return self._prove(item, parsed, entry, ranks)

    def _prove(
        self, item: pytest.Item, recipe: Recipe, entry: Constraint, ranks: Literal["distinct", "all"] | Sequence[int]
    ) -> Proof:
        """The proof that the recipe is refused as documented. Fails or skips the test where there is none."""
        __tracebackhide__ = True
        from .refusals import prove

        try:
            proof = prove(self.tried_on, recipe, entry, ranks=ranks)
        except UserError as error:
            raise UserError(f"{item.nodeid}: {error}") from None
        item.stash.setdefault(RECORD, TestRecord()).proofs.append(proof)
        _demand(proof)
        return proof

    @staticmethod
    def _refusal(recipe: Recipe, entry: Constraint) -> IncompatibleSettings:
        """What measuring the recipe raises without the marker; an error of its own for what only a run would tell."""
        from .incompatibilities import check

        try:
            check(recipe)
        except IncompatibleSettings as error:
            return error
        return IncompatibleSettings(f"{entry.id}: {entry.why}", (entry.id,))

    def _is_about_other_gpus(self, item: pytest.Item, failure: Failure) -> bool:
        """Whether this session's GPU being too small is no matter: the test's fits markers name others alone."""
        plan = item.stash.get(PLAN, None)
        if self.options.host or plan is None or not plan.fits or failure.kind != "out of memory":
            return False
        return all(gate.gpu != self.options.gpu for gate in plan.fits)

    def explain(self, failed: Measurement | BaseException) -> Shortage:
        """Why a recipe ran out of memory, for a test that asks. Raises `UserError` for anything that did not."""
        from .measurement import Measurement

        measurement = failed.measurement if isinstance(failed, OutOfMemory) else failed
        if not isinstance(measurement, Measurement):
            raise UserError(
                f"mbmem.explain({failed!r}): allowed are a measurement and the OutOfMemory that mbmem.measure raises"
            )
        explained = self.launcher.explain(measurement).failure
        assert explained is not None
        assert explained.shortage is not None
        return explained.shortage

    def _explained(self, measurement: Measurement) -> Measurement:
        """What failed a test with the reason, or with why that could not be found out."""
        if self.worker is not None or not measurement.can_be_explained:
            return measurement
        from .measure.oom import not_explained

        try:
            return self.launcher.explain(measurement)
        except UserError as error:
            return not_explained(measurement, f"the run could not be repeated: {error}")

    def explain_error(self, item: pytest.Item, error: OutOfMemory) -> bool:
        """Put why memory ran out into an error that fails its test. Returns whether there was something to say."""
        from .report.oom import failure_lines

        before = error.measurement
        if before is None or not before.can_be_explained:
            return False
        measurement = self._explained(before)
        for measured in item.stash[RECORD].measured:
            if measured.measurement is before:
                measured.measurement = measurement
        assert measurement.failure is not None
        error.args = ("\n".join([*failure_lines(measurement.failure), "", str(error)]),)
        return True

    def parity(
        self,
        item: pytest.Item,
        control: Given,
        candidate: Given,
        precisions: Sequence[Precision] | None,
    ) -> Parity:
        """Compare a candidate's numbers on the host with its control's."""
        __tracebackhide__ = True
        from .measure.host import Parity
        from .savings import changed, is_changes

        first = self.recipe(item, control, "mbmem.parity")
        if is_changes(candidate):
            second = changed(first, candidate, f"{item.nodeid}: mbmem.parity()")
        else:
            second = self.recipe(item, candidate, "mbmem.parity")
        parity = self.host_launcher.parity(first, second, precisions)
        if not isinstance(parity, Parity):
            raise _raised(parity, self.host_launcher.device)
        if not parity.passed:
            raise ParityFailed(parity.explain())
        return parity

    def keep(
        self, item: pytest.Item, key: str, name: str | None, measurement: Measurement, ranks: object = "distinct"
    ) -> None:
        """Put a measurement on the test's record."""
        from .report.results import Measured

        measured = Measured(key, name, measurement, ranks=ranks)
        item.stash.setdefault(RECORD, TestRecord()).measured.append(measured)

    def write_snapshots(self, item: pytest.Item) -> None:
        """Of what the test measured last, if they are asked for."""
        from .snapshots import measurement_name

        measured = item.stash[RECORD].measured
        self.snapshots.write(measurement_name(item, measured, measured[-1]), measured[-1].measurement)

    def _new_key(self, item: pytest.Item, name: str | None) -> str:
        from .baselines import clean_nodeid

        if name is not None and (not isinstance(name, str) or not name or not name.isprintable() or "@" in name):
            raise UserError(f"{item.nodeid}: mbmem.measure(name={name!r}): allowed is text without '@'")
        key = clean_nodeid(item.nodeid)[1] + (f"@{name}" if name else "")
        plan = item.stash.get(PLAN, None)
        against_baseline = plan is not None and plan.has_baseline
        if against_baseline and any(m.key == key for m in item.stash.setdefault(RECORD, TestRecord()).measured):
            again = f"named {name!r}" if name else "without a name"
            raise UserError(
                f"{item.nodeid}: a second measurement {again}; each one after the first needs a name of its own "
                'to have a baseline of its own: mbmem.measure(recipe, name="...")'
            )
        return key

    @staticmethod
    def recipe(item: pytest.Item, recipe: Given, function: str) -> Recipe:
        """The recipe that was handed to `function`; a YAML file's path is relative to the test's own file."""
        from collections.abc import Mapping

        from .recipe import Recipe

        if isinstance(recipe, Recipe):
            return recipe
        if isinstance(recipe, (str, Path)):
            return Recipe.from_yaml(item.path.parent / recipe)
        if isinstance(recipe, Mapping):
            return Recipe.from_dict(recipe, f"{item.nodeid}: recipe")
        raise UserError(
            f"{item.nodeid}: {function}({recipe!r}): allowed are a Recipe, the path of a YAML file, or a mapping of "
            "what such a file holds"
        )

    def _control(self, item: pytest.Item, control: Given, function: str) -> Recipe | Mapping[str, object]:
        """The same, or changes of the recipe that it is the control of."""
        from .savings import check_changes, is_changes

        if not is_changes(control):
            return self.recipe(item, control, function)
        check_changes(control, f"{item.nodeid}: {function}")
        return dict(control)

    # Judging ----------------------------------------------------------------------------------------------------------

    def judge(self, item: pytest.Item, plan: Plan, *, explain: bool = True) -> list[str]:
        """Judge all the test measured by all its gates. Returns a text for each verdict that must fail the test.

        With `explain`, what ran out of memory is repeated to find out why.
        """
        from .baselines import clean_nodeid
        from .gates import judge
        from .report.results import Judged
        from .report.terminal import failure_text

        record = item.stash.setdefault(RECORD, TestRecord())
        if plan.gates and not record.measured:
            return [record.lacks("measured", item, MARKER)]
        if self.options.host:  # memory is not judged, but a test with a gate is about a run that works
            gated = plan.measures or plan.growth is not None
            failures = [m.measurement.failure for m in record.measured if gated]
            return [str(_raised(failure, self.device)) for failure in failures if failure is not None]
        module = clean_nodeid(item.nodeid)[0]
        texts = []
        for measured in record.measured:
            for gate in plan.gates:
                entry = None if gate.limit is not None else self._baseline(module, measured.key)
                judgement = judge(gate, measured.measurement, entry, measured.key)
                accepted = False
                if gate.limit is None and measured.measurement.failure is None and judgement.measured is not None:
                    new = _record(module, measured, judgement)
                    record.records.append(new)
                    accepted = self._accepts(judgement)
                judged = Judged(judgement, accepted)
                measured.judged.append(judged)
                if not judged.passed:
                    if explain:
                        measured.measurement = self._explained(measured.measurement)
                    to_paste = self._to_paste(new) if judgement.verdict == "missing" else None
                    texts.append(failure_text(item.nodeid, measured, judgement, to_paste))
        return texts

    def judge_savings(self, item: pytest.Item, plan: Plan) -> list[str | TooFewGpus]:
        """Measure the controls of the test's memory_saving markers and judge by them, as `judge` does by its gates.

        A control that needs more GPUs than there are is among what is returned.
        """
        if not plan.savings:
            return []
        from .report.comparisons import saving_failure_text

        record = item.stash.setdefault(RECORD, TestRecord())
        measured = record.measured
        if not measured:
            return [record.lacks("measured", item, SAVING_MARKER)]
        if self.options.host:
            return []
        texts: list[str | TooFewGpus] = []
        for one in measured:
            for gate in plan.savings:
                try:
                    saving = self.comparing.judge(item, one, gate)
                except (UserError, MeasurementFailed) as error:
                    texts.append(str(error))
                    continue
                except TooFewGpus as error:
                    texts.append(error)
                    continue
                if not saving.passed:
                    one.measurement = self._explained(one.measurement)
                    if saving.comparison is not None:
                        control = self._explained(saving.comparison.control)
                        saving = replace(saving, comparison=replace(saving.comparison, control=control))
                one.savings.append(saving)
                if not saving.passed:
                    texts.append(saving_failure_text(one, saving))
        return texts

    def judge_fits(self, item: pytest.Item, plan: Plan) -> list[str]:
        """Judge all the test measured by its fits and fragmentation markers, as `judge` does by its gates."""
        rules = [name for name in (FITS_MARKER, FRAGMENTATION_MARKER) if plan.peaks[name]]
        if not rules:
            return []
        from . import fits, fragmentation
        from .report.fits import fit_failure_text, fragmentation_failure_text

        record = item.stash.setdefault(RECORD, TestRecord())
        measured = record.measured
        if not measured:
            if plan.gates or plan.savings:  # which say the same
                return []
            return [record.lacks("measured", item, rules[0])]
        if self.options.host:
            return []
        texts = []
        for one in measured:
            for gate in plan.fits:
                if one.measurement.recipe is None or self.worker is not None:
                    fit = fits.judge_own(gate, one.measurement)
                else:
                    fit = fits.judge_recipe(gate, one.measurement, one.ranks, self.launcher)
                one.fits.append(fit)
                if not fit.passed:
                    texts.append(fit_failure_text(one, fit))
            for rule in plan.fragmentations:
                found = fragmentation.judge(rule, one.measurement)
                one.fragmentations.append(found)
                if not found.passed:
                    one.measurement = self._explained(one.measurement)
                    texts.append(fragmentation_failure_text(one, found))
        return texts

    def judge_throughput(self, item: pytest.Item, plan: Plan) -> list[str]:
        """Judge all the test measured by its throughput markers, as `judge` does by its gates."""
        if not plan.throughputs:
            return []
        from .baselines import Record, clean_nodeid
        from .report.results import Judged
        from .report.throughput import throughput_failure_text
        from .throughput import judge

        record = item.stash.setdefault(RECORD, TestRecord())
        if not record.measured:
            if plan.measures != [THROUGHPUT_MARKER]:  # the others say the same
                return []
            return [record.lacks("measured", item, THROUGHPUT_MARKER)]
        if self.options.host:
            return []
        module = clean_nodeid(item.nodeid)[0]
        texts = []
        for one in record.measured:
            missing: list[Record] = []
            failed: list[ThroughputJudgement] = []
            for gate in plan.throughputs:
                needed = gate.needs_baseline(one.measurement.device.virtual)
                entry = self._baseline(module, one.key) if needed else None
                for judgement in judge(gate, one.measurement, entry, one.key):
                    judged = Judged(judgement)
                    if judgement.against_minimum is None and judgement.measured is not None:
                        new = Record.of_step(module, judgement, one.measurement)
                        record.records.append(new)
                        judged.accepted = self._accepts(judgement)
                        missing += [new] if judgement.verdict == "missing" else []
                    one.throughputs.append(judged)
                    failed += [] if judged.passed else [judgement]
            if failed:
                one.measurement = self._explained(one.measurement)
                texts.append(
                    throughput_failure_text(item.nodeid, one, failed, self._to_paste(*missing) if missing else None)
                )
        return texts

    def judge_growth(self, item: pytest.Item, plan: Plan, body: Body | None) -> list[str]:
        """Run what the test measured by its `no_memory_growth` rule. Returns a text for each that grows."""
        if plan.growth is None:
            return []
        record = item.stash.setdefault(RECORD, TestRecord())
        if self.worker is not None and body is not None:
            fixtures = getattr(item, "funcargs", {})
            growths = self.worker.grown(body, fixtures, plan.growth)
        elif not record.measured:
            if plan.measures:  # which say the same
                return []
            return [record.lacks("measured", item, "no_memory_growth")]
        elif self.options.host:
            return []
        else:
            try:
                growths = [self._growth(measured, plan.growth) for measured in record.measured]
            except MeasurementFailed as error:
                return [str(error)]
        record.growths = [growth.summary() for growth in growths]
        for measured in record.measured:
            notes = tuple(growth.headline() for growth in growths if growth.name in ("", measured.name))
            measured.measurement = replace(measured.measurement, notes=(*measured.measurement.notes, *notes))
        return [growth.explain() for growth in growths if not growth.passed]

    def growth(
        self,
        item: pytest.Item,
        recipe: Given,
        arguments: Mapping[str, object],
        ranks: Literal["distinct", "all"] | Sequence[int],
    ) -> Growth:
        """Run a recipe by a rule that a test's body gives."""
        __tracebackhide__ = True
        from .growth import GrowthRule
        from .measure.growth_runs import measure_growth

        where = "mbmem.growth"
        rule = GrowthRule.make(
            arguments, f"{item.nodeid}: {where}", lambda value: self._control(item, value, f"{where}(control=...)")
        )
        return measure_growth(self.launcher, self.recipe(item, recipe, where), rule, ranks)

    def _growth(self, measured: Measured, rule: GrowthRule) -> Growth:
        from .measure.growth_runs import measure_growth
        from .recipe import Recipe

        measurement = measured.measurement
        if measurement.failure is not None:
            raise MeasurementFailed(f"memory growth cannot be judged: {measurement.failure.kind}")
        recipe = Recipe.from_dict(measurement.recipe, measured.key)
        ranks = [rank.rank for rank in measurement.ranks]
        return measure_growth(self.launcher, recipe, rule, ranks, measured.name or "")

    def _baseline(self, module: str, key: str) -> Entry | None:
        from .baseline_file import DamagedFile

        try:
            return self.baselines.get(module, key)
        except DamagedFile:
            if self.options.update == "all":  # will be written anew
                return None
            raise

    def _accepts(self, judgement: Judgement | ThroughputJudgement) -> bool:
        """Whether --mbmem-update makes what was measured the baseline. A regression needs a reason for that."""
        update, verdict = self.options.update, judgement.verdict
        if update is None or self._baseline_is_equal(judgement):
            return False
        if verdict == "regression" and self.options.reason is None:
            return False
        if update == "new":
            return verdict == "missing"
        if update == "changed":
            return verdict != "pass"
        return True

    @staticmethod
    def _baseline_is_equal(judgement: Judgement | ThroughputJudgement) -> bool:
        return judgement.verdict == "pass" and judgement.measured == judgement.reference

    def _to_paste(self, *records: Record) -> str:
        from .baselines import paste

        return str(paste(self.options.baselines, records))


def _record(module: str, measured: Measured, judgement: Judgement) -> Record:
    from .baselines import Record

    return Record.of(module, measured.key, judgement.gate, measured.measurement)


def _raised(failure: Failure, device: Device) -> MeasurementFailed:
    place = f" in {failure.name}" if failure.name else ""
    kinds = {"out of memory": OutOfMemory, "refused": Refused, "no effect": NoEffect}
    kind = kinds.get(failure.kind, MeasurementFailed)
    what = "the worker raised an error" if failure.kind == "error" else failure.kind
    return kind(f"{what} on rank {failure.rank}{place} ({device.name}): {failure.message}")


def _demand(proof: Proof) -> None:
    """Fail the test unless the recipe is refused as documented; skip it where that cannot be decided."""
    if proof.verdict == "cannot be decided":
        pytest.skip(proof.headline)
    if proof.verdict != "refused as documented":
        pytest.fail(proof.explain(), pytrace=False)


class MeasuringTests:
    """The hooks that run for every test."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a test that has no `mbmem` fixture whole in a worker."""
        plan = item.stash.get(PLAN, None)
        if plan is None or not plan.in_worker or plan.mistake is not None or self.run.worker is not None:
            return None
        if self.run.options.host or self._undecided(plan) is not None:  # skipped in its setup
            return None
        if item.config.getoption("setuponly", False):  # --setup-only and --setup-plan run no test
            return None
        from .item import run_in_worker

        run_in_worker(self.run, item, nextitem)
        return True

    def _undecided(self, plan: Plan) -> Constraint | None:
        """What a whole test is to prove where no worker can run it, for want of a GPU, real or virtual."""
        if plan.incompatible is None or not plan.in_worker or self.run.options.machine is not None:
            return None
        from .refusals import has_cuda_build

        return None if has_cuda_build() else plan.incompatible

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin with a clean record (a test may run again), and refuse a test with a mistake in it."""
        plan = item.stash.get(PLAN, None)
        if plan is None:
            return
        item.stash[RECORD] = TestRecord()
        if self.run.options.torchrun is not None and self.run.worker is None:
            self.run.enter(item)
        if plan.mistake is not None:
            pytest.fail(plan.mistake, pytrace=False)
        if plan.in_worker and self.run.options.host:
            pytest.skip("--mbmem-host: runs recipes that are given to mbmem.measure; this test itself needs a GPU")
        if (entry := self._undecided(plan)) is not None:
            pytest.skip(f"{entry.id}: cannot be decided: torch is a CPU build")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what the test measured when its body is through; a failing body is judged for the reports only."""
        plan = item.stash.get(PLAN, None)
        if plan is None:
            return (yield)
        if plan.incompatible is not None:
            return (yield from self._must_be_refused(item, plan.incompatible))
        # Growth has a recording of its own, and the allocator has one history.
        watch = self.run.worker.watch(record=plan.growth is None) if self.run.worker is not None else None
        body = self.run.worker.watch_growth() if self.run.worker is not None and plan.growth is not None else None
        result: object = None
        found: list[str | TooFewGpus] = []
        try:
            result = yield
        except NotOnHost as error:
            pytest.skip(str(error))
        except TooFewGpus as error:
            found.append(error)
        except (Exception, pytest.fail.Exception) as error:
            if body is not None:
                body.close()
            with contextlib.suppress(UserError):  # the test's own failure is the one to report
                self._judge(item, plan, watch, error)
            item.stash[RECORD].withdraw()
            raise
        record = item.stash.setdefault(RECORD, TestRecord())
        try:
            if not found or record.measured:
                found += self._judge(item, plan, watch)
                found += self.run.judge_savings(item, plan)
                found += self.run.judge_fits(item, plan)
                found += self.run.judge_throughput(item, plan)
                found += self.run.judge_growth(item, plan, body)
        except (UserError, MeasurementFailed) as error:
            found.append(str(error))
        finally:
            if body is not None:
                body.close()
        if found:
            record.withdraw()
            self._end(found)
        return result

    def _must_be_refused(self, item: pytest.Item, entry: Constraint) -> Generator[None, object, object]:
        """Pass a test of the incompatible marker if what it tries is refused as documented, and for nothing else."""
        record, worker = item.stash.setdefault(RECORD, TestRecord()), self.run.worker
        result: object = None
        error: Exception | None = None
        try:
            result = yield
        except NotOnHost as other:
            pytest.skip(str(other))
        except Exception as raised:
            refused = isinstance(raised, IncompatibleSettings) and any(raised is e for e in record.errors)
            if worker is None and not refused:  # mbmem.measure refuses after a proof alone
                raise
            error = raised
        if worker is not None:
            from .measure.refusal_worker import message_of, passed_megatron
            from .refusals import Raised, judge_body

            said = None
            if error is not None:
                said = Raised(type(error).__name__, message_of(error), at="", of_megatron=passed_megatron(error))
            try:
                proof = judge_body(entry, said, worker.tried, real_gpu=self.run.options.machine is not None)
            except UserError as mistake:
                raise pytest.fail.Exception(f"{item.nodeid}: {mistake}", pytrace=False) from None
            record.proofs.append(proof)
        elif not record.proofs:
            calls = "mbmem.measure() or mbmem.refuses()"
            pytest.fail(record.lacks("tried", item, INCOMPATIBLE_MARKER, calls), pytrace=False)
        for proof in record.proofs:
            _demand(proof)
        return result

    def _end(self, found: Sequence[str | TooFewGpus]) -> NoReturn:
        """Fail the test for what was found; skip it if nothing but GPUs is lacking."""
        texts = [one for one in found if isinstance(one, str)]
        lacking = dict.fromkeys(str(one) for one in found if isinstance(one, TooFewGpus))
        require = self.run.options.require_gpus
        if not texts and not require:
            pytest.skip("\n".join(lacking))
        texts += [f"--mbmem-require-gpus: {one}" if require else one for one in lacking]
        pytest.fail("\n\n".join(texts), pytrace=False)

    def _judge(
        self, item: pytest.Item, plan: Plan, watch: Watch | None, error: BaseException | None = None
    ) -> list[str]:
        if watch is not None:
            from .baselines import clean_nodeid

            worker, torchrun = self.run.worker, self.run.options.torchrun
            assert worker is not None
            measurement = self.run.snapshots.with_note(watch.measurement(error, torchrun.rank if torchrun else 0))
            if torchrun is not None:
                measurement = worker.gathered(measurement, torchrun, item.nodeid, self.run.options.timeout)
            self.run.keep(item, clean_nodeid(item.nodeid)[1], None, measurement)
            self.run.write_snapshots(item)
        return self.run.judge(item, plan, explain=error is None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the figures on the report, where xdist carries them to the controller, and among its properties."""
        plan = item.stash.get(PLAN, None)
        record = item.stash.get(RECORD, None)
        if plan is None or record is None:
            return (yield)
        if call.when == "call":
            from .report.junit import properties

            mine = properties(record.measured, record.sweeps, record.growths, record.proofs, item.nodeid)
            names = {name for name, _ in mine}
            item.user_properties[:] = [p for p in item.user_properties if p[0] not in names] + mine
        report = yield
        error = call.excinfo.value if report.failed and call.excinfo is not None else None
        if isinstance(error, OutOfMemory) and self.run.explain_error(item, error):
            report.longrepr = item.repr_failure(call.excinfo)  # type: ignore[arg-type]
        if isinstance(error, IncompatibleSettings) and call.excinfo is not None:  # complete without a traceback
            report.longrepr = call.excinfo.getrepr(style="value")
        if call.when == "call":
            errors = [*record.errors, error] if report.failed else []
            record.refused = [id for one in errors if isinstance(one, IncompatibleSettings) for id in one.ids]
        if call.when == "call" and self.run.worker is None:  # a worker's test is diagnosed where its report arrives
            record.diagnose()
            if record.findings:
                from .report.findings import say

                say(item.user_properties, report, record.findings)
        if report.failed and call.when == "call" and call.excinfo is not None:
            said = self.run.snapshots.of_failure(item, record.measured, call.excinfo.value)
            add_section = getattr(report.longrepr, "addsection", None)
            if said and add_section is not None:
                add_section("memory snapshot", said)
        if report.failed and self.run.artifacts is not None:
            self.run.artifacts.of_test(item, report, record)
        # an attribute of ours, which pytest's serialisation carries along
        report.mbmem = record.to_json() if call.when == "call" else {}  # type: ignore[attr-defined]
        return report
