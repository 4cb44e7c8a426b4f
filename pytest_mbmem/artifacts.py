"""The folder that a failed test leaves under --mbmem-artifacts: all that is needed to look into the failure elsewhere.

    failure.txt             why the test failed, and what it printed
    repeat.sh               runs this one test again
    notes.txt               what is not here, and why
    worker.log              of a test that runs whole in a worker: what that printed
    measurement[-NAME]/     of each that the test made
        measurement.json    as `mbmem compare` reads it
        recipe.yaml         as `mbmem measure` reads it
        rank0.pickle        PyTorch's memory snapshot, as `mbmem snapshot` reads it
        rank0.log           what the worker printed

A folder appears whole under its name, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import repeat
from .baselines import clean_nodeid
from .errors import UserError
from .files import write_atomically
from .measurement import Measurement
from .recipe import Recipe
from .report.results import Measured
from .snapshots import Again, run_again, unique_name
from .texts import encodable

if TYPE_CHECKING:
    from .session import Run, TestRecord

_WILL_END_SO_AGAIN = ("died", "timeout", "lost peer", "refused")
"""How a rank can end whose second run would have no snapshot either, or take as long."""

TITLE = "artifacts"


@dataclass(frozen=True)
class WholeTest:
    """What a test that ran whole in a worker has left."""

    log: str
    ended: bool  # or the worker died, or took too long
    snapshot: Path
    no_snapshot: str | None  # why there is none in that file


class Artifacts:
    """Of one pytest process. A pytest plugin."""

    def __init__(self, run: Run, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._written: dict[str, Path] = {}
        self._variables = repeat.variables(os.environ)  # before a test changes them

    def of_test(self, item: pytest.Item, report: pytest.TestReport, record: TestRecord) -> None:
        """Leave the folder of a test whose failure is in the report, and say there where it is."""
        measurements = dict(_measurements(record.measured, record))
        if measurements:
            self._leave(item, report, measurements, None)

    def of_worker(self, item: pytest.Item, reports: Sequence[pytest.TestReport], whole: WholeTest) -> None:
        """The same of a test that ran whole in a worker, perhaps not to its end."""
        failed = [report for report in reports if report.failed]
        data: list[Mapping[str, Any]] = [getattr(report, "mbmem", None) or {} for report in reports]
        found = [m for one in data for m in one.get("measurements", ())]
        measured = [Measured.from_json(m, item.nodeid) for m in found[-1:]]  # of the last run
        if failed and (measured or not whole.ended):
            self._leave(item, failed[0], dict(_measurements(measured)), whole, failed)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure that does not count, because the test runs again, leaves nothing."""
        if str(report.outcome) == "rerun" and report.nodeid in self._written:
            shutil.rmtree(self._written.pop(report.nodeid), ignore_errors=True)

    def _leave(
        self,
        item: pytest.Item,
        report: pytest.TestReport,
        measurements: Mapping[str, Measurement],
        whole: WholeTest | None,
        failed: Sequence[pytest.TestReport] = (),
    ) -> None:
        target = self._folder / unique_name("::".join(clean_nodeid(item.nodeid)))
        part = self._folder / f".{target.name}.{os.getpid()}.part"
        try:
            self._folder.mkdir(exist_ok=True)
            _remove_parts(target)
            if whole is None and report.when == "teardown" and item.nodeid in self._written:  # the call failed as well
                write_atomically(target / "teardown.txt", encodable(_failure_text(report)))
                return
            part.mkdir()
            try:
                _write(part / "failure.txt", "\n".join(map(_failure_text, failed or [report])))
                notes = list(self._fill(part, item, measurements, whole))
                if notes:
                    _write(part / "notes.txt", "\n".join(notes) + "\n")
                _replace(part, target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        except OSError as error:
            say(report, f"none: {error.filename or target}: cannot be written ({error.strerror or error})")
            return
        self._written[item.nodeid] = target
        shown = shlex.quote(os.path.relpath(target) if target.is_relative_to(Path.cwd()) else str(target))
        say(report, f"{shown}\n  sh {shown}/repeat.sh")

    def _fill(
        self,
        folder: Path,
        item: pytest.Item,
        measurements: Mapping[str, Measurement],
        whole: WholeTest | None,
    ) -> Iterator[str]:
        """Write all the rest into the folder. Yields what cannot be there, and why."""
        _write(folder / "repeat.sh", repeat.script(item, self._run.options, self._variables))
        (folder / "repeat.sh").chmod(0o755)
        if whole is not None:
            if whole.log:
                _write(folder / "worker.log", whole.log)
            else:
                yield "worker.log: the worker printed nothing outside of what pytest captured"
            if not measurements:
                yield "no measurement: the worker ended before there was one"
        for name, measurement in measurements.items():
            inner = folder / name
            inner.mkdir()
            _write(inner / "measurement.json", json.dumps(measurement.to_json(), indent=1) + "\n")
            if measurement.recipe is not None:
                _write(inner / "recipe.yaml", Recipe.from_dict(measurement.recipe, name).to_yaml())
            else:
                yield f"{name}: no recipe: the test built none"
            for log, text in measurement.logs.items():
                if text:
                    _write(inner / f"{_readable(log)}.log", text)
                else:
                    yield f"{name}: {log}.log: the worker printed nothing"
            yield from (f"{name}: {note}" for note in self._snapshots(measurement, inner, whole))

    # Snapshots --------------------------------------------------------------------------------------------------------

    def _snapshots(self, measurement: Measurement, folder: Path, whole: WholeTest | None) -> Iterator[str]:
        """Write what can be written. Yields why others are not there."""
        if measurement.steps or self._run.options.host:
            yield "no memory snapshot: a run on the host has no GPU memory"
            return
        if whole is not None:
            if whole.no_snapshot is not None:
                yield f"no memory snapshot: {whole.no_snapshot}"
            elif whole.snapshot.exists():
                shutil.move(whole.snapshot, folder / f"rank{measurement.ranks[0].rank}.pickle")
            return
        ranks = [rank.rank for rank in measurement.ranks]
        failure = measurement.failure
        if failure is not None:
            if failure.kind in _WILL_END_SO_AGAIN:
                yield f"no memory snapshot of rank {failure.rank}: its run ended with: {failure.kind}"
                ranks = [rank for rank in ranks if rank != failure.rank]
            elif failure.kind != "disturbed" and failure.rank not in ranks:
                ranks.append(failure.rank)
        yield from self._run_again(measurement, sorted(ranks), folder)

    def _run_again(self, measurement: Measurement, ranks: Sequence[int], folder: Path) -> Iterator[str]:
        again = Again.on(self._run.launcher, self._run.launcher, measurement)
        if again.is_virtual:
            yield (
                "no memory snapshot of a joint rank, which cannot run again alone; rankN-virtual.pickle is of the same "
                "rank on the virtual twin"
            )
        files = {rank: folder / f"rank{rank}{again.suffix}.pickle" for rank in ranks}
        try:
            problems = run_again(measurement, files, again.launcher) if files else {}
        except UserError as error:
            problems = dict.fromkeys(files, str(error))
        for rank, problem in problems.items():
            if problem is not None:
                yield f"no memory snapshot of rank {rank}: {problem}"


def say(report: pytest.TestReport, text: str) -> None:
    """Add it to the failure's text."""
    add_section = getattr(report.longrepr, "addsection", None)
    if add_section is not None:
        add_section(TITLE, text)
    elif isinstance(report.longrepr, str):
        report.longrepr = f"{report.longrepr}\n\n{TITLE}: {text}"
    else:
        report.sections.append((TITLE, text))


def _measurements(measured: Sequence[Measured], record: TestRecord | None = None) -> Iterator[tuple[str, Measurement]]:
    """Each once, with the name of its folder."""
    seen: set[int] = set()
    names: dict[str, int] = {}
    for label, measurement in _all(measured, record):
        if id(measurement) in seen:
            continue
        seen.add(id(measurement))
        name = "-".join(filter(None, ("measurement", _readable(label))))
        names[name] = names.get(name, 0) + 1
        yield name + (f"-{names[name]}" if names[name] > 1 else ""), measurement


def _all(measured: Sequence[Measured], record: TestRecord | None) -> Iterator[tuple[str, Measurement]]:
    for one in measured:
        yield one.name or "", one.measurement
        for saving in one.savings:
            if saving.comparison is not None:
                yield f"control of {one.name}" if one.name else "control", saving.comparison.control
    for sweep in record.sweeps if record is not None else ():
        for row in (sweep.control, *sweep.rows):
            yield " ".join(filter(None, (sweep.name, row.name))), row.measurement


def _failure_text(report: pytest.TestReport) -> str:
    parts = [report.longreprtext, *(f"{f' {title} ':-^80}\n{content}" for title, content in report.sections)]
    return "\n\n".join(parts) + "\n"


def _readable(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", text).strip("._-")[:80]


def _write(path: Path, text: str) -> None:
    path.write_text(encodable(text), encoding="utf-8", newline="\n")


def _replace(part: Path, target: Path) -> None:
    """Give the folder its name; one of an earlier run goes, whoever else does the same at this moment."""
    old = part.with_suffix(".old")
    while True:
        try:
            part.rename(target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            target.rename(old)
        shutil.rmtree(old, ignore_errors=True)


def _remove_parts(target: Path) -> None:
    """What processes that were killed have left of this folder."""
    for left in target.parent.glob(f".{target.name}.*"):
        number = left.suffixes[-2].removeprefix(".") if len(left.suffixes) > 1 else ""
        if number.isdecimal() and not Path("/proc", number).exists():
            shutil.rmtree(left, ignore_errors=True)
