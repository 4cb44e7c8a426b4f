"""One whole test in a worker: the pytest process asks, the worker runs pytest for that one test and sends its reports.

The worker parses the same command line in the same folder, so it has the same rootdir, configuration, plugins, conftest
files and options; then whatever chooses tests or writes reports is switched off there. Hooks, fixtures and gates are
pytest's own: nothing about a test is imitated. Fixtures of wider scopes are set up anew for each such test.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import marshal
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from .errors import UserError
from .measurement import METRICS, Device, Measurement, Metric, PhaseFigures, RankMeasurement

if TYPE_CHECKING:
    from .session import Run

WORKER = pytest.StashKey["Worker"]()

_SWITCHED_OFF: dict[str, Any] = {
    # what chooses tests
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "pyargs": False,
    "maxfail": 0,
    # what does something else than run a test
    "cacheclear": False,
    "collectonly": False,
    "setupshow": False,
    # what writes reports
    "htmlpath": None,
    "mbmem_html": None,
    "mbmem_json": None,
    "pastebin": None,
    "report_log": None,
    "xmlpath": None,
    # xdist
    "dist": "no",
    "distload": False,
    "looponfail": False,
    "maxprocesses": None,
    "numprocesses": None,
    "tx": [],
}

_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "LD_PRELOAD")  # the launcher decides about these


# The pytest process ---------------------------------------------------------------------------------------------------


def run_in_worker(run: Run, item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do for a test what pytest's own `pytest_runtest_protocol` does, with its reports from a worker."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    interactive = item.config.getoption("usepdb", False) or item.config.getoption("trace", False)
    # An error in here (a signal of pytest-timeout, say) is this test's; pytest.exit() and Ctrl-C are the session's.
    call = pytest.CallInfo.from_call(
        lambda: (_in_terminal if interactive else _in_fork)(run, item),
        when="call",
        reraise=(pytest.exit.Exception, KeyboardInterrupt),
    )
    answer: dict[str, Any] = {} if call.excinfo is not None else call.result or {}
    _pass_on_warnings(item, answer.get("warnings", ()))
    reports = [_report(item, data) for data in _unpack(answer.get("reports", ""))]
    if call.excinfo is not None:
        error = call.excinfo.value
        when = "setup" if isinstance(error, UserError) else "call"
        text = str(error) if isinstance(error, (UserError, _NoResult)) else f"{type(error).__name__}: {error}"
        reports = _broken_off(item, when, text, call.duration, getattr(error, "output", ""))
    for report in reports[:-1]:
        hook.pytest_runtest_logreport(report=report)
    # Fixtures of wider scopes that earlier tests left, and the next test does not need, end here.
    end = item.session.shouldfail or item.session.shouldstop
    state = item.session._setupstate  # type: ignore[attr-defined]
    teardown = pytest.CallInfo.from_call(lambda: state.teardown_exact(None if end else nextitem), when="teardown")
    last = reports[-1]
    if teardown.excinfo is not None and last.passed:
        last = pytest.TestReport.from_item_and_call(item, teardown)
    hook.pytest_runtest_logreport(report=last)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if answer.get("exit_reason") is not None:
        pytest.exit(answer["exit_reason"])


class _NoResult(Exception):
    """The worker ended without reports of the test."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


def _in_fork(run: Run, item: pytest.Item) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON}
    folder = item.config.invocation_params.dir
    result = run.launcher.call(
        "pytest_mbmem.item:run", _request(run, item, interactive=False), environment=environment, cwd=folder
    )
    if result.failure is not None:
        what = {"died": "the test's worker died", "timeout": "the test ran out of time"}
        message = f"{what.get(result.failure, 'the worker that runs the test failed')}: {result.message}"
        raise _NoResult(message, result.output)
    if item.config.getoption("capture") == "no":
        sys.stdout.write(result.output)
    return _checked(result.value, result.output)


def _in_terminal(run: Run, item: pytest.Item) -> dict[str, Any]:
    """In a process of its own that has the terminal, for --pdb and --trace; it loads torch anew."""
    capture = item.config.pluginmanager.getplugin("capturemanager")
    shown = capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext()
    with tempfile.TemporaryDirectory(prefix="mbmem-") as folder, shown:
        request, result = Path(folder, "request.json"), Path(folder, "result.json")
        request.write_text(json.dumps(_request(run, item, interactive=True)))
        command = [sys.executable, "-m", "pytest_mbmem.item", str(request), str(result)]
        cwd = item.config.invocation_params.dir
        status = subprocess.run(command, env=run.launcher.command_environment(), cwd=cwd, check=False).returncode
        if not result.exists():
            raise _NoResult(f"the test's process ended with status {status}")
        return _checked(json.loads(result.read_text()), "")


def _checked(answer: dict[str, Any], output: str) -> dict[str, Any]:
    complete = any(report["when"] == "teardown" for report in _unpack(answer["reports"]))
    if not complete and answer["exit_reason"] is not None:
        pytest.exit(answer["exit_reason"])
    if not complete:
        errors = "\n".join(answer["errors"]) or output.strip()
        raise _NoResult(f"the test could not be run in a worker (pytest's exit status {answer['status']}):\n{errors}")
    return answer


def _request(run: Run, item: pytest.Item, *, interactive: bool) -> dict[str, Any]:
    from .baselines import clean_nodeid

    config = item.config
    basetemp = config._tmp_path_factory.mktemp("mbmem")  # type: ignore[attr-defined]
    return {
        "arguments": [str(argument) for argument in config.invocation_params.args],
        "test": f"{item.path}::{clean_nodeid(item.nodeid)[1]}",
        "options": {
            "basetemp": str(basetemp / "test"),
            "randomly_seed": config.getoption("randomly_seed", None),
        },
        "device": vars(run.device),
        "path": sys.path,
        "xdist": _plain(getattr(config, "workerinput", None)),
        "without": ["--no-cov"] if config.pluginmanager.hasplugin("pytest_cov") else [],
        "interactive": interactive,
    }


def _plain(workerinput: dict[str, Any] | None) -> dict[str, Any] | None:
    if workerinput is None:
        return None
    return {k: v for k, v in workerinput.items() if isinstance(v, (str, int, float, list, type(None)))}


def _report(item: pytest.Item, data: dict[str, Any]) -> pytest.TestReport:
    data["nodeid"] = item.nodeid  # with the group that xdist puts behind it
    report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
    assert isinstance(report, pytest.TestReport)
    return report


def _broken_off(item: pytest.Item, when: str, text: str, duration: float, output: str) -> list[pytest.TestReport]:
    """Reports of a test whose worker gave none: failed in `when`, and through."""

    def report(phase: Any, outcome: Any, longrepr: str | None = None) -> pytest.TestReport:
        made = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=outcome,
            longrepr=longrepr,
            when=phase,
            duration=duration if phase == when else 0.0,
            sections=[("Captured output of the worker", output)] if longrepr and output else [],
        )
        made.mbmem = {}
        return made

    if when == "setup":
        return [report("setup", "failed", text), report("teardown", "passed")]
    return [report("setup", "passed"), report("call", "failed", text), report("teardown", "passed")]


def _pass_on_warnings(item: pytest.Item, recorded: Any) -> None:
    for text, module, name, filename, lineno, when, location in recorded:
        category = getattr(sys.modules.get(module), name, None)
        if not (isinstance(category, type) and issubclass(category, Warning)):
            category = UserWarning
        message = warnings.WarningMessage(UserWarning(text), category, filename, lineno)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": when,
                "nodeid": item.nodeid if when == "runtest" else "",
                "location": location and tuple(location),
            }
        )


def _pack(reports: list[dict[str, Any]]) -> str:
    """Marshal knows the builtin types, as xdist's transport does, and JSON does not tell a tuple from a list."""
    return base64.b64encode(marshal.dumps(reports)).decode()


def _unpack(text: str) -> list[dict[str, Any]]:
    return marshal.loads(base64.b64decode(text)) if text else []


# The worker -----------------------------------------------------------------------------------------------------------


def run(
    arguments: list[str],
    test: str,
    options: dict[str, Any],
    device: dict[str, Any],
    path: list[str],
    xdist: dict[str, Any] | None,
    without: list[str],
    interactive: bool,
) -> dict[str, Any]:
    """Run the one test `test` with pytest in this process. Returns its reports and warnings as JSON data."""
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]
    plugin = _OneTest(Worker(Device(**device)), test, options, xdist, interactive)
    status = pytest.main([*without, *arguments], plugins=[plugin])
    return {
        "status": int(status),
        "reports": _pack(plugin.reports),
        "warnings": plugin.warnings,
        "errors": plugin.errors,
        "exit_reason": plugin.exit_reason,
    }


class _OneTest:
    """A plugin of the worker's pytest."""

    def __init__(
        self,
        worker: Worker,
        test: str,
        options: dict[str, Any],
        xdist: dict[str, Any] | None,
        interactive: bool,
    ) -> None:
        self.worker, self.test, self.options, self.xdist, self.interactive = worker, test, options, xdist, interactive
        self.reports: list[dict[str, Any]] = []
        self.warnings: list[tuple[Any, ...]] = []
        self.errors: list[str] = []
        self.exit_reason: str | None = None
        self._stdout = sys.stdout

    @pytest.hookimpl(wrapper=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> Generator[None, object, object]:
        """Before anything is configured, leave only this one test to do."""
        options = {**_SWITCHED_OFF, **{k: v for k, v in self.options.items() if v is not None}}
        if not self.interactive:
            options.update(usepdb=False, trace=False)
        else:
            options.update(verbose=-2, no_header=True, no_summary=True)
        for name, value in options.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.args[:] = [self.test]
        config.stash[WORKER] = self.worker
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # they would write the session's cache
            config.pluginmanager.set_blocked(name)
        if self.xdist is not None:
            config.workerinput = self.xdist  # type: ignore[attr-defined]
            config.workeroutput = {}  # type: ignore[attr-defined]
        if not self.interactive:
            # The terminal reporter must be there for plugins that ask for it, but has nothing to say.
            self._stdout, sys.stdout = sys.stdout, Path(os.devnull).open("w")
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """The terminal reporter has its file; tests get the real one. A breakpoint would wait for nobody."""
        sys.stdout = self._stdout
        if not self.interactive:
            import pdb

            pdb.set_trace = sys.breakpointhook = _no_terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report in builtin types; what a plugin put on it in other types is lost, as under xdist."""
        report.user_properties = [(name, _builtin(value)) for name, value in report.user_properties]
        data = {}
        serialized = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        for name, value in serialized.items():
            with contextlib.suppress(ValueError):
                marshal.dumps(value)
                data[name] = value
        self.reports.append(data)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keep the configuration."""
        self.config = config

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, location: tuple[str, int, str] | None
    ) -> None:
        """Keep what `_pass_on_warnings` needs. Those of collecting were seen in the session too."""
        if when == "runtest":
            category = warning_message.category
            name = category.__module__, category.__name__
            place = warning_message.filename, warning_message.lineno
            self.warnings.append((str(warning_message.message), *name, *place, when, location))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say why the test was not found."""
        if report.failed:
            self.errors.append(report.longreprtext)

    def pytest_internalerror(self, excrepr: object) -> None:
        """Say what broke."""
        self.errors.append(str(excrepr))

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """pytest.exit() ends the session as well."""
        self.exit_reason = str(excinfo.value) or type(excinfo.value).__name__


def _builtin(value: object) -> object:
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)


def _no_terminal(*_: object, **__: object) -> NoReturn:
    pytest.fail(
        "a breakpoint was reached, but this test runs in a worker without a terminal; "
        "with --pdb or --trace it runs in the terminal",
        pytrace=False,
    )


class Worker:
    """What a worker knows: the device that it measures on."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def watch(self) -> Watch:
        """Begin to measure."""
        return Watch(self.device)


class Watch:
    """Peaks of this process on the device, from its creation to `measurement()`.

    A test may reset the allocator's peak statistics itself: what they were before is kept.
    """

    def __init__(self, device: Device) -> None:
        import torch

        self.torch, self.device = torch, device
        self.peaks: dict[Metric, int] = dict.fromkeys(METRICS, 0)
        self.retries = 0
        self.resets = {n: getattr(torch._C, n, None) for n in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")}
        # A device that is not in use yet has no peaks to reset, and is left alone: its allocator reads its settings at
        # the first use, and the test may set them before.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        for name, reset in self.resets.items():
            if reset is not None:
                setattr(torch._C, name, self._keeping_peaks(reset))

    def _keeping_peaks(self, reset: Any) -> Any:
        def keep_and_reset(*arguments: Any) -> Any:
            self._keep_peaks()
            return reset(*arguments)

        return keep_and_reset

    def _keep_peaks(self) -> dict[str, Any]:
        statistics = self.torch.cuda.memory_stats() if self.torch.cuda.is_initialized() else {}
        for metric in METRICS:
            self.peaks[metric] = max(self.peaks[metric], statistics.get(f"{metric}_bytes.all.peak", 0))
        return statistics

    def measurement(self) -> Measurement:
        """End, with one rank and one phase, "test". Peaks are 0 if the test did not use the device."""
        from .measure.launch import versions

        for name, reset in self.resets.items():
            if reset is not None:
                setattr(self.torch._C, name, reset)
        statistics = self._keep_peaks()
        resting: dict[Metric, int] = {m: statistics.get(f"{m}_bytes.all.current", 0) for m in METRICS}
        rank = RankMeasurement(
            rank=0,
            coordinates={},
            stands_for=1,
            phases=(PhaseFigures(step=1, phase="test", peak=self.peaks, resting=resting),),
            allocation_retries=statistics.get("num_alloc_retries", 0) - self.retries,
        )
        assumption = ("kernels do nothing: what a test reads from the device is not computed",)
        return Measurement(
            device=self.device,
            ranks=(rank,),
            environment=versions(),
            assumptions=assumption if self.device.virtual else (),
        )


def _main() -> None:
    """The process of `_in_terminal`: REQUEST and RESULT are JSON files."""
    request, result = sys.argv[1:]
    answer = importlib.import_module("pytest_mbmem.item").run(**json.loads(Path(request).read_text()))
    Path(result).write_text(json.dumps(answer))


if __name__ == "__main__":
    _main()
