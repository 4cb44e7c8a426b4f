"""A test that runs whole in a worker: the worker's side (`run`) and the side that sends it there (`run_in_worker`).

The worker collects the test again and runs it under the same options, as xdist's workers do. Its reports come back and
are logged as if the test had run here.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._io import TerminalWriter

from .errors import MeasurementFailed, UserError
from .measurement import Device, Failure, FailureKind, Measurement, RankMeasurement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .growth import Growth, GrowthRule
    from .measure.retention import Body
    from .measure.torchrun import Torchrun
    from .megatron.model import LiveModel
    from .recipe import Recipe
    from .session import Run

WORKER: Worker | None = None
"""Set in a process that runs one whole test."""

_NOT_INHERITED: dict[str, Any] = {
    # The worker runs one test that was chosen here, once.
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "stepwise_skip": False,
    "maxfail": 0,
    "numprocesses": None,
    "dist": "no",
    "tx": [],
    "looponfail": False,
    # Reports are this side's.
    "xmlpath": None,
    "setupshow": False,
    "mbmem_json": None,
    "mbmem_html": None,
    "mbmem_metrics": None,
    "mbmem_junit": None,
    "mbmem_earlier": None,
    "mbmem_conformance": False,
    "log_file": None,
    "debug": None,
    "report_log": None,
    "htmlpath": None,
    "no_cov": True,
}

_ASSUMPTIONS = ("kernels do nothing: a value that one would have computed reads as what was there before, mostly zero",)


class Worker:
    """The process that one whole test runs in."""

    def __init__(
        self, device: Device, history: Path, snapshots_folder: Path | None, environment: Mapping[str, str]
    ) -> None:
        self.device = device
        self.environment = environment  # versions of what the measurement depends on
        self.history = history  # the file that gets the allocator's history if a test fails for want of memory
        self.ran_out_of_memory = False  # and the allocator said what it had
        self.failed_request: int | None = None  # which event of the history that failure is
        self.reports: list[Any] = []
        self.assumptions: tuple[str, ...] = ()
        self.notes: list[str] = []
        self.built: list[tuple[Recipe, int]] = []
        self.tried: Recipe | None = None  # the last one that was to be built
        self.models: list[LiveModel] = []
        self.warnings: list[dict[str, Any]] = []
        self.snapshot: dict[str, Any] | None = None  # of the allocator's history, when the test's body is through
        self.snapshot_rank = 0  # whose it is
        self.snapshots_folder = snapshots_folder
        self.interruption: str | None = None
        self.errors: list[str] = []

    def watch(self, *, record: bool) -> Watch:
        """Begin to measure; with `record`, what the peak is made of too."""
        return Watch(self, record=record)

    def leave_snapshot(self, file: Path) -> str | None:
        """Write the snapshot of the test's run. Returns why it could not be written, or None."""
        from .measure.snapshot_files import problem_of, write_snapshot

        if self.snapshot is None:
            return "PyTorch's allocator did not record its history (torch 2.14 and later do, without no_memory_growth)"
        try:
            write_snapshot(self.snapshot, file)
        except OSError as error:
            return problem_of(error, file)
        return None

    def leave_history(self) -> int | str | None:
        """Write the allocator's history if the test ran out of memory and fails for it.

        Returns which of its events that is, why there is no history, or None if the test did not fail so.
        """
        if not self.ran_out_of_memory or not any(report.failed and report.when == "call" for report in self.reports):
            return None
        if self.failed_request is None:
            return "the allocator's history was not recorded (torch 2.14 and later do, without no_memory_growth)"
        return self.leave_snapshot(self.history) or self.failed_request

    @property
    def has_failed(self) -> bool:
        """Whether the test failed, its teardown included."""
        return any(report.failed for report in self.reports)

    @property
    def rank(self) -> int:
        """Of the model that was built last; 0 in a test without a recipe."""
        return self.built[-1][1] if self.built else 0

    def watch_growth(self) -> Body:
        """Begin to see what the test's body leaves behind."""
        from . import growth
        from .measure.retention import Body

        growth.WATCHED.clear()
        return Body()

    def grown(self, body: Body, fixtures: Mapping[str, Any], rule: GrowthRule) -> list[Growth]:
        """What the body left behind, and what it watched itself."""
        from . import growth

        trace = body.end(fixtures, with_model=any(model.is_open for model in self.models))
        left = growth.Growth((growth.RankGrowth(self.rank, trace),), rule.slack)
        return [left, *growth.WATCHED]

    def build(self, recipe: Recipe, rank: int, *, checked: bool = True) -> LiveModel:
        """The recipe's rank as a live model. Raises `UserError` or `Refused` for what cannot be built.

        Without `checked` it is Megatron Core alone that refuses settings, with its own exceptions.
        """
        from .measure import allocator, launch
        from .measure.effects import requested
        from .measure.history import cuda_is_initialized
        from .measure.ranks import chosen
        from .measure.worker import assumptions, refusals
        from .megatron import recompute
        from .megatron.model import live_model
        from .virtual_gpu.counters import driver_is_loaded

        self.tried = recipe
        if checked:
            launch.check_on_gpu(recipe, virtual=driver_is_loaded())
        else:
            recompute.end_recursion()
        chosen(recipe, [rank])
        wanted = launch.recipe_environment(recipe)
        unset = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
        if unset and cuda_is_initialized():
            raise UserError(
                f"megatron_model: the recipe sets {', '.join(unset)}, which CUDA reads when it starts, and this test "
                "has used CUDA before; build the model first"
            )
        if left := {name for earlier, _ in self.built for name in earlier.environment} - wanted.keys():
            raise UserError(
                f"megatron_model: an earlier model of this test set {', '.join(sorted(left))}, which this recipe does "
                "not; build them in tests of their own"
            )
        os.environ.update(unset)
        # Megatron warns of its own defaults, which a test may have made errors of. Until the test ends.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        with refusals(recipe.megatron) if checked else contextlib.nullcontext():
            model = live_model(recipe, rank, virtual=driver_is_loaded())
        allocator.check_settings(recipe.memory.alloc_conf)
        self.models.append(model)
        self.built.append((recipe, rank))
        self.assumptions = tuple(dict.fromkeys([*self.assumptions, *assumptions(recipe)]))
        if asked := requested(recipe):
            self.notes.append(f"only mbmem.measure checks whether {', '.join(asked)} has an effect")
        return model

    def gathered(self, measurement: Measurement, torchrun: Torchrun, nodeid: str, timeout: float) -> Measurement:
        """This test's measurement with the ranks that the other processes of a torchrun measured in it.

        It is joint, unless recipes were built: each process builds its rank alone. Raises `UserError` if one of them
        gives none in time. `timeout` is that of this worker, in seconds.
        """
        from .measure import peers

        timeout *= 0.8  # this worker has no more than the whole, the test's own time included
        times = peers.times_here(torchrun.job(nodeid, timeout), torchrun.rank)
        job = torchrun.job(f"{nodeid}#{times}", timeout)
        failed = measurement.failure is not None
        found = peers.exchange(job, torchrun.rank, measurement.to_json(), failed)
        missing = [str(rank) for rank, data in enumerate(found) if data is None]
        if missing:
            raise UserError(f"{nodeid}: torchrun: no figures from rank {', '.join(missing)} within {timeout:g} s")
        all_of_them = [Measurement.from_json(data, nodeid) for data in found if data is not None]
        ranks: dict[int, RankMeasurement] = {}
        for one in sorted((rank for other in all_of_them for rank in other.ranks), key=lambda rank: rank.peak()):
            ranks[one.rank] = one
        return replace(
            measurement,
            ranks=tuple(ranks[number] for number in sorted(ranks)),
            world_size=max(measurement.world_size, torchrun.world_size),
            notes=tuple(dict.fromkeys(note for other in all_of_them for note in other.notes)),
            failure=next((other.failure for other in all_of_them if other.failure is not None), None),
            mode="solo" if self.built else "joint",
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reports of the test."""
        self.reports.append(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why the test could not be collected here."""
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        """Keep a warning, as plain data: its class may be of a module that the other side should not import."""
        category = warning_message.category
        builtin = category.__module__ == "builtins"
        self.warnings.append(
            {
                "category": category.__name__ if builtin else "UserWarning",
                "text": str(warning_message.message) if builtin else f"{category.__name__}: {warning_message.message}",
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
                "when": when,
                "location": location,
            }
        )

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep what pytest.exit(), Ctrl-C or a debugger that was quit say."""
        self.interruption = str(excinfo.value) or excinfo.typename


class Watch:
    """What the test's body allocates, from the making of this to `measurement`."""

    def __init__(self, worker: Worker, *, record: bool) -> None:
        from .measure.history import TestWatch
        from .measure.oom_worker import Observer

        self._worker = worker
        self._watch = TestWatch(record=record)
        self._observer = Observer()
        self._observer.attach()
        self._zero_reads = self._count_zero_reads()

    def _count_zero_reads(self) -> int:
        from .virtual_gpu.counters import driver_is_loaded, read_counters

        return read_counters().zero_reads if driver_is_loaded() else 0

    def measurement(self, error: BaseException | None = None, own_rank: int = 0) -> Measurement:
        """What was measured; `error` is what ended the body early, `own_rank` the rank of a test without a recipe."""
        from .measure.ranks import at
        from .virtual_gpu.counters import driver_is_loaded

        worker = self._worker
        unbuilt = _ASSUMPTIONS if driver_is_loaded() else ()
        fields: dict[str, Any] = {"assumptions": worker.assumptions or unbuilt, "notes": tuple(worker.notes)}
        place: dict[str, Any] = {"rank": own_rank, "coordinates": {}}
        if len(self._worker.built) == 1:
            recipe, rank = self._worker.built[0]
            place = {"rank": rank, "coordinates": at(recipe, rank).coordinates}
            fields = {
                "recipe": recipe.to_dict(),
                "recipe_digest": recipe.digest,
                "world_size": recipe.world_size,
            } | fields
        reads = self._count_zero_reads() - self._zero_reads
        if reads and not self._worker.built:  # those of Megatron's own step are among its assumptions
            fields["notes"] += (
                f"the test read zeros from the device {reads} times: values that kernels would have computed are not "
                "there, so a size that depends on one is too small",
            )
        results = self._watch.results()
        worker.snapshot, worker.snapshot_rank = self._watch.snapshot, place["rank"]
        if error is not None:
            fields["failure"] = self._failure(error, place["rank"])
        return Measurement(
            device=self._worker.device,
            ranks=(RankMeasurement(stands_for=1, **place, **results),),
            environment=self._worker.environment,
            **fields,
        )

    def _failure(self, error: BaseException, rank: int) -> Failure:
        kind: FailureKind = "out of memory" if type(error).__name__ == "OutOfMemoryError" else "error"
        shortage = None
        if kind == "out of memory":
            shortage, self._worker.failed_request = self._observer.of(error, self._worker.snapshot)
        self._worker.ran_out_of_memory = shortage is not None
        return Failure(kind, rank, str(error) or type(error).__name__, phase="test", shortage=shortage)


def run(
    test: str,
    options: dict[str, Any],
    device: dict[str, Any],
    snapshots: str | None,
    artifact: str | None,
    environment: dict[str, str],
) -> dict[str, Any]:
    """In the worker: run the test. `snapshots` is the folder for that of a failure, `artifact` a file for it as well,
    `environment` what a measurement depends on.

    Returns {"reports": serialised reports, "interruption": what ended the session, or None,
    "errors": why the test could not be run, "warnings": what it warned of, "history": see `Worker.leave_history`,
    "no_artifact": why a test that failed left no snapshot in `artifact`, or None}.
    """
    global WORKER
    WORKER = Worker(Device(**device), _history(options), Path(snapshots) if snapshots else None, environment)
    config = pytest.Config.fromdictargs(options, [test])
    if "no:terminal" in options["plugins"]:
        # pytest 8.4 asks for a terminal's writer to colour what an assertion compares
        config.get_terminal_writer = lambda: TerminalWriter(io.StringIO())  # type: ignore[method-assign]
    config.pluginmanager.register(WORKER, "mbmem-worker")
    try:
        try:
            config.hook.pytest_cmdline_main(config=config)
        except pytest.UsageError as error:  # the test was not found, which is all to say unless collecting it failed
            WORKER.errors = WORKER.errors or [str(error)]
        serialise = config.hook.pytest_report_to_serializable
        reports = [serialise(config=config, report=report) for report in WORKER.reports]
        return {
            "reports": reports,
            "interruption": WORKER.interruption,
            "errors": WORKER.errors,
            "warnings": WORKER.warnings,
            "history": WORKER.leave_history(),
            "no_artifact": WORKER.leave_snapshot(Path(artifact)) if artifact and WORKER.has_failed else None,
        }
    finally:
        config._ensure_unconfigure()


def run_in_worker(measuring: Run, item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Run the test in a worker and log its reports here."""
    ihook = item.ihook
    ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    options = _inherited_options(item.config)
    try:
        reports = _reports(measuring, item, options)
    except (UserError, MeasurementFailed) as error:
        reports = [_failed(item, str(error))]
    finally:
        _clean_up(item.config, options)
    # What the tests before set up and no later one needs; no public hook does only this.
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), "teardown")
    if call.excinfo is not None:
        if reports and reports[-1].when == "teardown" and reports[-1].passed:
            del reports[-1]  # a test has one teardown
        reports.append(pytest.TestReport.from_item_and_call(item, call))
    for report in reports:
        ihook.pytest_runtest_logreport(report=report)
    ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _reports(measuring: Run, item: pytest.Item, options: dict[str, Any]) -> list[pytest.TestReport]:
    config = item.config
    assert item.parent is not None
    in_module = f"{item.parent.nodeid}::{item.name}".partition("::")[2]
    arguments = {
        "test": f"{item.path}::{in_module}",
        "options": options,
        "device": vars(measuring.device),
        "snapshots": str(measuring.snapshots.folder_of_failures or ""),
        "environment": measuring.launcher.versions(),
        "artifact": str(_artifact(options)) if measuring.artifacts is not None else None,
    }
    folder = config.invocation_params.dir
    if _wants_debugger(config):
        value, output, message = _with_terminal(measuring, config, arguments, folder)
    else:
        environment = _of_torchrun(measuring)
        result = measuring.launcher.call("pytest_mbmem.item:run", arguments, environment=environment, cwd=folder)
        value, output, message = result.value, result.output, result.message
        if config.getoption("capture", "no") == "no":
            print(output, end="", flush=True)
    for warning in value["warnings"] if value is not None else []:
        _warn(item, **warning)
    received = value["reports"] if value is not None else []
    reports = [_received(config, item, data) for data in received]
    calls = [report for report in reports if report.when == "call"]
    if value is not None and value["history"] is not None and calls[-1].failed:
        _explain(measuring, calls[-1], _history(options), value["history"])
    if any(getattr(report, "mbmem", None) for report in calls):
        from .report.findings import say_of_worker

        say_of_worker(reports)
    if value is not None and value["interruption"] is not None:
        item.session.shouldstop = f"{item.nodeid}, in its worker: {value['interruption']}"
    elif not any(report.when == "teardown" for report in reports):
        errors = "\n".join(value["errors"]) if value is not None else ""
        text = message or f"pytest could not run this test there\n{errors}"
        reports.append(_failed(item, f"{item.nodeid}, in its worker: {text}\n{output}".strip()))
    if measuring.artifacts is not None:
        from .artifacts import WholeTest

        why = "the worker did not come to its end" if value is None else value["no_artifact"]
        whole = WholeTest(output, value is not None, _artifact(options), why)
        measuring.artifacts.of_worker(item, reports, whole)
    return reports


def _of_torchrun(measuring: Run) -> dict[str, str]:
    """What a whole test sees otherwise than the process of torchrun that it comes from: of all GPUs it has one.

    The store is torchrun's in all tests, and what one left there is there for the next. torch.distributed takes the
    keys of its first process group for those of another test's, so only one test of a session can make that group by
    the variables alone; others give `init_process_group` a store of their own, a `PrefixStore` say.
    """
    return {"LOCAL_RANK": "0"} if measuring.options.torchrun is not None else {}


def _explain(measuring: Run, report: Any, file: Path, history: int | str) -> None:
    """Say in the report of a test that ran out of memory why it did. `history` is what `Worker.leave_history` said."""
    from .measure.oom import explained_by_history, not_explained
    from .report.oom import failure_lines

    for measured in report.mbmem.get("measurements", ()):
        measurement = Measurement.from_json(measured["measurement"], report.nodeid)
        if measurement.failure is not None and measurement.failure.shortage is not None:
            if isinstance(history, str):
                measurement = not_explained(measurement, history)
            else:
                measurement = explained_by_history(measuring.launcher, measurement, file, history)
            measured["measurement"] = measurement.to_json()
            assert measurement.failure is not None
            report.sections.append(("mbmem: out of memory", "\n".join(failure_lines(measurement.failure))))


def _history(options: Mapping[str, Any]) -> Path:
    """Where a worker with these options leaves the allocator's history if memory runs out."""
    return Path(options["basetemp"]).with_name("out-of-memory.pickle")


def _artifact(options: Mapping[str, Any]) -> Path:
    """Where a worker with these options leaves the snapshot of a test that fails."""
    return Path(options["basetemp"]).with_name("failed.pickle")


def _clean_up(config: pytest.Config, options: Mapping[str, Any]) -> None:
    """Remove what nobody needs any more. pytest removes old temporary folders itself, where it has any."""
    history = _history(options)
    history.unlink(missing_ok=True)
    _artifact(options).unlink(missing_ok=True)
    if getattr(config, "_tmp_path_factory", None) is None:
        shutil.rmtree(history.parent, ignore_errors=True)


def _inherited_options(config: pytest.Config) -> dict[str, Any]:
    """The options of this session for the worker's, without those that are about the session itself."""
    options = {k: v for k, v in vars(config.option).items() if _is_plain(v) and k != "file_or_dir"} | _NOT_INHERITED
    factory = getattr(config, "_tmp_path_factory", None)  # absent with -p no:tmpdir
    base = Path(tempfile.mkdtemp(prefix="mbmem-test-", dir=factory and factory.getbasetemp()))
    options["basetemp"] = str(base / "tmp")
    options["override_ini"] = [*(options.get("override_ini") or []), f"cache_dir={base / 'cache'}", "log_file="]
    options["rootdir"] = str(config.rootpath)
    if config.inipath is not None:
        options["inifilename"] = str(config.inipath)
    options["plugins"] = list(options["plugins"])
    if not _wants_debugger(config):
        options["plugins"].append("no:terminal")
    return options


def _wants_debugger(config: pytest.Config) -> bool:
    return bool(config.getoption("usepdb", False) or config.getoption("trace", False))


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (str, int, float, bool))


def _with_terminal(
    measuring: Run, config: pytest.Config, arguments: dict[str, Any], folder: Path
) -> tuple[dict[str, Any] | None, str, str]:
    """For --pdb and --trace: a process of its own that has the terminal, instead of a fork of the server."""
    from .measure.gpu_launch import GpuLauncher

    capture = config.pluginmanager.getplugin("capturemanager")
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "call.pickle"
        file.write_bytes(pickle.dumps(arguments))
        if capture is not None:
            capture.suspend(in_=True)
            stack.callback(capture.resume)
        command = [sys.executable, "-m", "pytest_mbmem.item", str(file)]
        environment = {
            **measuring.launcher.command_environment(),
            **_of_torchrun(measuring),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        if isinstance(measuring.launcher, GpuLauncher):
            environment |= stack.enter_context(measuring.launcher.one_gpu())
        code = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
        value = pickle.loads(file.read_bytes())
        if "reports" in value:
            return value, "", ""
    return None, "", f"the worker ended with exit code {code}"


def _received(config: pytest.Config, item: pytest.Item, data: dict[str, Any]) -> pytest.TestReport:
    report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
    report.nodeid = item.nodeid  # xdist adds a group to it
    return report


def _warn(item: pytest.Item, category: str, text: str, filename: str, lineno: int, when: Any, location: Any) -> None:
    kind: type[Warning] = getattr(builtins, category)
    message = warnings.WarningMessage(kind(text), kind, filename, lineno)
    arguments = {"warning_message": message, "when": when, "nodeid": item.nodeid, "location": location}
    item.ihook.pytest_warning_recorded.call_historic(kwargs=arguments)


def _failed(item: pytest.Item, text: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr=text,
        when="call",
        mbmem={},
    )


def main() -> None:
    """Run the call in the file that is named, and leave its result there."""
    from pytest_mbmem import item  # this module's other self, whose WORKER the plugin reads

    file = Path(sys.argv[1])
    file.write_bytes(pickle.dumps(item.run(**pickle.loads(file.read_bytes()))))


if __name__ == "__main__":
    main()
