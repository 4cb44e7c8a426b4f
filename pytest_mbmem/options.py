"""Every option and ini key: declared, read and checked in one place."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from .errors import UserError

if TYPE_CHECKING:
    import pytest

    from .gates import GateDefaults
    from .measure.nvml import Machine
    from .measure.torchrun import Torchrun
    from .report.trend import Series
    from .virtual_gpu.gpus import Gpu

DEFAULT_GPU = "h100-80gb"
DEFAULT_TIMEOUT = 600.0
UPDATE_MODES = ("new", "changed", "all")
CI_MODES = ("auto", "off")

RanksMode = Literal["auto", "joint", "solo"]
"""How ranks are measured on real GPUs: all of a job at once, one at a time, or at once if there are GPUs enough."""

RANKS_MODES: tuple[RanksMode, ...] = get_args(RanksMode)

_INI_KEYS = {
    "mbmem_virtual_gpu": f"name of the virtual GPU (default: {DEFAULT_GPU})",
    "mbmem_gpus": "YAML file with more virtual GPUs, relative to the configuration file",
    "mbmem_baselines": "folder of the baselines, relative to the configuration file (default: baselines)",
    "mbmem_ci": "auto or off: whether annotations and a summary are written in GitHub Actions (default: auto)",
    "mbmem_snapshots": "folder for PyTorch's memory snapshots, relative to the configuration file",
    "mbmem_artifacts": "folder for what failed tests leave, relative to the configuration file",
    "mbmem_ranks": "joint, solo or auto: how --mbmem-gpu measures the ranks of a job (default: auto)",
    "mbmem_timeout": f"seconds that one worker may take (default: {DEFAULT_TIMEOUT:g})",
    "mbmem_tolerance": "tolerance of every baseline gate that names none, as in 1%",
    "mbmem_slack": "slack of every baseline gate that names none, as in 2 MiB",
}


def add(parser: pytest.Parser) -> None:
    """Declare options and ini keys. An option's default is None, or its ini key would never be asked."""
    group = parser.getgroup("mbmem", "memory gates (pytest-mbmem)")
    option = group.addoption
    option("--mbmem-virtual-gpu", metavar="NAME", help=f"virtual GPU to measure on (default: {DEFAULT_GPU})")
    option("--mbmem-gpus", metavar="FILE", help="YAML file with more virtual GPUs")
    option("--mbmem-gpu", action="store_true", help="measure on the GPUs of this machine, and on a virtual twin")
    option(
        "--mbmem-ranks",
        metavar="MODE",
        help="with --mbmem-gpu: joint (all ranks of a job at once), solo (one at a time on one GPU), or auto (joint if "
        "there are GPUs enough; the default)",
    )
    option("--mbmem-require-gpus", action="store_true", help="with --mbmem-gpu: too few GPUs fail a test")
    option("--mbmem-host", action="store_true", help="train recipes, shrunk, with real numbers on the CPU; no gates")
    option("--mbmem-baselines", metavar="DIR", help="folder of the baselines (default: baselines in the rootdir)")
    option(
        "--mbmem-update",
        nargs="?",
        const="changed",
        metavar="MODE",
        help="write baselines of the tests that run: new (missing ones), changed (also stale ones and changed peaks; "
        "the default), all (every measured peak)",
    )
    option("--mbmem-reason", metavar="TEXT", help="why peaks rise; kept in the baseline file")
    option("--mbmem-json", metavar="FILE", help="write all measurements and verdicts as JSON")
    option("--mbmem-html", metavar="FILE", help="write a report to be read in a browser")
    option("--mbmem-junit", metavar="FILE", help="write a JUnit file with a case for each verdict")
    option(
        "--mbmem-earlier",
        metavar="PATH",
        action="append",
        help="JUnit or --mbmem-json file of an earlier run, or a folder of them, for the trend in --mbmem-html; may be "
        "given several times",
    )
    option("--mbmem-metrics", metavar="FILE", help="write figures as OpenMetrics text, as for GitLab's metrics reports")
    option(
        "--mbmem-ci",
        metavar="MODE",
        help="auto (annotations and a summary where this runs in GitHub Actions; the default) or off",
    )
    option("--mbmem-snapshots", metavar="DIR", help="write PyTorch's memory snapshot of every measured rank")
    option("--mbmem-artifacts", metavar="DIR", help="write all that is needed to look into each failed test")
    option(
        "--mbmem-conformance",
        action="store_true",
        help="try every documented incompatibility of settings with the installed versions; runs no tests unless their "
        "paths are named",
    )
    option("--mbmem-timeout", metavar="SECONDS", help=f"time limit of one worker (default: {DEFAULT_TIMEOUT:g})")
    for name, text in _INI_KEYS.items():
        parser.addini(name, text, default=None)


@dataclass(frozen=True)
class Options:
    """What the command line and the configuration file ask for, checked."""

    gpu_name: str
    gpus_file: Path | None
    baselines: Path
    update: str | None
    reason: str | None
    json: Path | None
    html: Path | None
    junit: Path | None
    metrics: Path | None
    ci: bool  # annotations and a summary, where this runs in a CI that shows them
    earlier: tuple[Series, ...]  # figures of earlier runs
    snapshots: Path | None  # folder; may not exist yet
    artifacts: Path | None  # the same
    timeout: float
    machine: Machine | None  # with --mbmem-gpu: what measures
    ranks: RanksMode
    require_gpus: bool
    torchrun: Torchrun | None  # the processes that run these tests together
    host: bool  # recipes run on the CPU, and memory is neither measured nor judged
    conformance: bool  # documented constraints are tried with the installed versions
    tolerance: float | None
    slack: int | None
    in_use: bool  # anything of the above is set, or there are baselines

    @classmethod
    def read(cls, config: pytest.Config) -> Options:
        """Raises `UserError` for the first value that is wrong. Changes nothing on disk."""
        given = _Given(config)
        if config.getoption("mbmem_gpu") and config.getoption("mbmem_host"):
            raise UserError("--mbmem-gpu: tests run on the GPU, or with --mbmem-host on the CPU; leave one of them out")
        update, reason = given.option("update"), given.option("reason")
        _check_update(update, reason)
        host = bool(config.getoption("mbmem_host"))
        if host and update is not None:
            raise UserError("--mbmem-update: with --mbmem-host no memory is measured that could be a baseline")
        conformance = bool(config.getoption("mbmem_conformance"))
        if conformance and update is not None:
            raise UserError("--mbmem-update: --mbmem-conformance measures nothing that could be a baseline")
        real = bool(config.getoption("mbmem_gpu"))
        ranks, require_gpus = given.ranks(real=real, host=host), bool(config.getoption("mbmem_require_gpus"))
        if require_gpus and not real:
            raise UserError("--mbmem-require-gpus: without --mbmem-gpu no GPU is needed")
        torchrun = _torchrun(config) if real else None
        gpu_name, gpu_source = given.text("virtual_gpu", DEFAULT_GPU)
        if real and gpu_source == "--mbmem-virtual-gpu" and given.option("virtual_gpu") is not None:
            raise UserError("--mbmem-virtual-gpu: with --mbmem-gpu the virtual twin is of the real GPU; leave one out")
        gpus_file, gpus_source = given.path("gpus")
        if gpus_file is not None and not gpus_file.is_file():
            raise UserError(f"{gpus_source}: {gpus_file} is not a file")
        baselines, baselines_source = given.path("baselines")
        baselines = baselines or config.rootpath / "baselines"
        if baselines.exists() and not baselines.is_dir():
            raise UserError(f"{baselines_source}: {baselines} is not a folder")
        timeout, timeout_source = given.text("timeout", str(DEFAULT_TIMEOUT))
        options = cls(
            gpu_name=gpu_name,
            gpus_file=gpus_file,
            baselines=baselines,
            update=update,
            reason=reason,
            json=given.output("json"),
            html=given.output("html"),
            junit=given.output("junit"),
            metrics=given.output("metrics"),
            ci=given.ci(),
            earlier=given.earlier(),
            snapshots=given.folder("snapshots"),
            artifacts=given.folder("artifacts"),
            timeout=seconds(timeout, timeout_source),
            machine=_machine() if real else None,
            ranks=ranks,
            require_gpus=require_gpus,
            torchrun=torchrun,
            host=host,
            conformance=conformance,
            tolerance=given.tolerance(),
            slack=given.slack(),
            in_use=given.anything or host or real or baselines.is_dir(),
        )
        written = ("json", "html", "junit", "metrics")
        named = {f"--mbmem-{name}": getattr(options, name) for name in written}
        check_that_files_differ({**named, "--junitxml": given.junitxml()})
        if gpu_name != DEFAULT_GPU or gpus_file is not None:  # only then is there something to check
            choose_gpu(gpu_name, gpus_file, gpu_source)
        if torchrun is not None and torchrun.rank > 0:  # the first one reports and writes
            return replace(options, json=None, html=None, junit=None, metrics=None, snapshots=None, artifacts=None)
        return options

    @property
    def gpu(self) -> Gpu:
        """The chosen virtual GPU, or with --mbmem-gpu the real one as far as it is known without CUDA."""
        if self.machine is not None:
            from .measure.gpu_launch import like
            from .virtual_gpu.gpus import load_gpus

            return like(self.machine.gpus[0], load_gpus(self.gpus_file))
        return choose_gpu(self.gpu_name, self.gpus_file, "--mbmem-virtual-gpu")

    @property
    def gate_defaults(self) -> GateDefaults:
        """Tolerance and slack of the ini keys."""
        from .gates import GateDefaults

        return GateDefaults(self.tolerance, self.slack)


def choose_gpu(name: str, extra: Path | None, source: str) -> Gpu:
    """The virtual GPU of that name. Raises `UserError` listing the known ones."""
    from .virtual_gpu.gpus import load_gpus

    gpus = load_gpus(extra)
    if name not in gpus:
        raise UserError(f"{source}: there is no virtual GPU {name!r}; known are {', '.join(gpus)}")
    return gpus[name]


def choose_ranks_mode(value: str, source: str) -> RanksMode:
    """How ranks are measured. Raises `UserError` listing what is allowed."""
    for mode in RANKS_MODES:
        if value == mode:
            return mode
    raise UserError(f"{source}: {value!r} is not one of {', '.join(RANKS_MODES)}")


class _Given:
    """Values as they were given, each with the name of the option or ini key for messages."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.anything = False

    def option(self, name: str) -> Any:
        value = self.config.getoption(f"mbmem_{name}")
        self.anything |= value is not None
        return value

    def ini(self, name: str) -> Any:
        value = self.config.getini(f"mbmem_{name}")
        self.anything |= value is not None
        return value

    def text(self, name: str, default: str) -> tuple[str, str]:
        value, ini = self.option(name), self.ini(name)
        if value is not None:
            return value, f"--mbmem-{name.replace('_', '-')}"
        return (default if ini is None else ini), f"ini key mbmem_{name}"

    def path(self, name: str) -> tuple[Path | None, str]:
        """An option's path is relative to where pytest was called, an ini key's to the configuration file."""
        value, ini = self.option(name), self.ini(name)
        if value is not None:
            return self._absolute(value, self.config.invocation_params.dir, f"--mbmem-{name}"), f"--mbmem-{name}"
        source = f"ini key mbmem_{name}"
        folder = self.config.inipath.parent if self.config.inipath else self.config.rootpath
        return (None if ini is None else self._absolute(ini, folder, source)), source

    def output(self, name: str) -> Path | None:
        value = self.option(name)
        if value is None:
            return None
        path = self._absolute(value, self.config.invocation_params.dir, f"--mbmem-{name}")
        check_output(path, f"--mbmem-{name}")
        return path

    def earlier(self) -> tuple[Series, ...]:
        """Of all paths of --mbmem-earlier; read here, so that a damaged file is known before anything takes time."""
        paths = [
            self._absolute(value, self.config.invocation_params.dir, "--mbmem-earlier")
            for value in self.option("earlier") or ()
        ]
        if paths and self.option("html") is None:
            raise UserError("--mbmem-earlier: nothing shows it; give --mbmem-html=FILE too, or see `mbmem trend`")
        if not paths or hasattr(self.config, "workerinput"):  # xdist's controller alone reports
            return ()
        from .report.run_figures import files_of
        from .report.trend import read_series

        try:
            series = tuple(read_series(paths))
        except UserError as error:
            raise UserError(f"--mbmem-earlier: {error}") from None
        check_that_inputs_stay({"--mbmem-html": self.output("html")}, files_of(paths))
        return series

    def junitxml(self) -> Path | None:
        """Where pytest itself writes a JUnit file."""
        value = self.config.getoption("xmlpath", None)
        return Path(os.path.normpath(self.config.invocation_params.dir / value)) if value else None

    def folder(self, name: str) -> Path | None:
        """A folder to write to, which may not exist yet."""
        path, source = self.path(name)
        if path is None:
            return None
        if path.exists() and not path.is_dir():
            raise UserError(f"{source}: {path} is not a folder")
        if not path.parent.is_dir():
            raise UserError(f"{source}: the folder {path.parent} does not exist")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"{source}: {path} cannot be written")
        return path

    def ranks(self, *, real: bool, host: bool) -> RanksMode:
        value, source = self.text("ranks", "auto")
        mode = choose_ranks_mode(value, source)
        if host and mode == "solo":
            raise UserError(f"{source}: solo: with --mbmem-host all ranks of a job run together")
        if self.option("ranks") is not None and not real and not host:
            raise UserError("--mbmem-ranks: on a virtual GPU every rank is measured alone; it is for --mbmem-gpu")
        return mode

    def ci(self) -> bool:
        value, source = self.text("ci", "auto")
        if value not in CI_MODES:
            raise UserError(f"{source}: {value!r} is not one of {', '.join(CI_MODES)}")
        return value == "auto"

    def tolerance(self) -> float | None:
        value = self.ini("tolerance")
        if value is None:
            return None
        from .units import parse_fraction

        tolerance = parse_fraction(value, "ini key mbmem_tolerance")
        if tolerance >= 1:
            raise UserError(f"ini key mbmem_tolerance: {value!r} is not below 100%")
        return tolerance

    def slack(self) -> int | None:
        value = self.ini("slack")
        if value is None:
            return None
        from .units import parse_bytes

        return parse_bytes(value, "ini key mbmem_slack")

    @staticmethod
    def _absolute(value: str, folder: Path, source: str) -> Path:
        if not value:
            raise UserError(f"{source}: the path is empty")
        return Path(os.path.normpath(folder / value))


def check_output(path: Path, source: str) -> None:
    """Before anything takes time. Raises `UserError` naming the option or so for what cannot be written."""
    try:
        if path.is_dir():
            raise UserError(f"{source}: {path} is a folder; name a file")
        if not path.parent.is_dir():
            raise UserError(f"{source}: the folder {path.parent} does not exist")
        target = Path(os.path.realpath(path))
        needed = [target] if target.exists() else []
        needed += [] if needed and not target.is_file() else [target.parent]  # where the new file is made
    except OSError as error:  # as of a name that is too long
        raise UserError(f"{source}: {path} cannot be written ({error.strerror})") from None
    if not all(os.access(one, os.W_OK) for one in needed):
        raise UserError(f"{source}: {path} cannot be written")


def check_that_inputs_stay(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """Raise `UserError` if an option's path is a file that is read."""
    read = {os.path.realpath(path) for path in inputs}
    for option, path in outputs.items():
        if path is not None and os.path.realpath(path) in read:
            raise UserError(f"{option}: {path} is read, and would be lost; name another file")


def check_that_files_differ(named: Mapping[str, Path | None]) -> None:
    """Raise `UserError` if two options name the same file."""
    seen: dict[str, str] = {}
    for option, path in named.items():
        if path is not None and (other := seen.setdefault(os.path.realpath(path), option)) != option:
            raise UserError(f"{other} and {option} name the same file: {path}")


def _machine() -> Machine:
    from .measure.nvml import machine

    return machine()


def _torchrun(config: pytest.Config) -> Torchrun | None:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    from .measure.torchrun import Torchrun

    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        raise UserError("-n: torchrun's processes run the tests together; leave pytest-xdist out")
    return Torchrun.of_environment()


def _check_update(update: str | None, reason: str | None) -> None:
    if update is not None and update not in UPDATE_MODES:
        raise UserError(
            f"--mbmem-update: {update!r} is not one of {', '.join(UPDATE_MODES)}; "
            f"if {update!r} is what to run, write --mbmem-update=changed {update}"
        )
    if reason is not None and update is None:
        raise UserError("--mbmem-reason: nothing is updated; give --mbmem-update too")
    if reason is not None and not reason.strip():
        raise UserError("--mbmem-reason: the reason is empty")


def seconds(value: str, source: str) -> float:
    """A time limit. Raises `UserError` unless it is a number above 0."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(f"{source}: {value!r} is not a number of seconds above 0")
    return number
