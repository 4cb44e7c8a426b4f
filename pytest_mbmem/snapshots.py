"""The snapshot files of a session, in PyTorch's format: of every measured rank, or of the one that failed a gate.

In the pytest process, which imports no torch: a rank is run once more for its snapshot, which is the same run on a
virtual GPU. A test that runs whole in a worker leaves the snapshot of its own run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import OutOfMemory, UserError
from .recipe import Recipe

if TYPE_CHECKING:
    import pytest

    from .measure.launch import Launcher
    from .measurement import Measurement
    from .report.results import Measured
    from .session import Run

_OF_MEMORY = ("regression", "out of memory", "fragmented")
"""Verdicts that a snapshot says more of."""

_LONGEST_NAME = 120


class Again(NamedTuple):
    """How a rank runs once more for its snapshot."""

    launcher: Launcher
    is_virtual: bool  # while what was measured is of a real GPU

    @classmethod
    def on(cls, launcher: Launcher, session: Launcher, measurement: Measurement) -> Again:
        """On the launcher's device. Of a session on real GPUs, a joint rank cannot run again alone: its twin does."""
        from .measure.gpu_launch import GpuLauncher

        if not isinstance(session, GpuLauncher):
            return cls(launcher, is_virtual=False)
        if launcher is session and measurement.mode == "joint" and measurement.world_size > 1:
            return cls(session.twin, is_virtual=True)
        return cls(launcher, is_virtual=launcher is not session)

    @property
    def suffix(self) -> str:
        """Of the file's name."""
        return "-virtual" if self.is_virtual else ""


class _Failed(NamedTuple):
    """What failed a gate."""

    measured: Measured
    rank: int
    again: Again | None  # None: in a worker, which has run it itself


class Snapshots:
    """Of one pytest process."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._written: set[Path] = set()  # others in the folder are of earlier sessions

    @cached_property
    def folder_of_failures(self) -> Path | None:
        """Where those of failed gates go, which need not be there yet; None where there is no place for them."""
        if self._run.options.snapshots is not None:
            return self._run.options.snapshots
        if self._run.worker is not None:
            return self._run.worker.snapshots_folder
        config = self._run.config
        if getattr(config, "cache", None) is None:  # -p no:cacheprovider
            return None
        cache = os.path.expandvars(Path(config.getini("cache_dir")).expanduser())  # as Cache.mkdir() has it
        return config.rootpath / cache / "d" / "mbmem-snapshots"

    def write(self, name: str, measurement: Measurement) -> None:
        """With --mbmem-snapshots: every rank's, in files named after `name`.

        Raises `UserError` if one cannot be written.
        """
        folder, worker = self._run.options.snapshots, self._run.worker
        if folder is None or not measurement.ranks or (worker is not None and worker.snapshot is None):
            return
        again = self._again(measurement)
        ranks = [worker.snapshot_rank] if worker is not None else [rank.rank for rank in measurement.ranks]
        files = {rank: folder / _file_name(name, rank, again) for rank in ranks}
        problems = self._write(measurement, files, again)
        if problems:
            raise UserError(f"--mbmem-snapshots: {'; '.join(problems.values())}")

    def with_note(self, measurement: Measurement) -> Measurement:
        """A whole test's measurement; with --mbmem-snapshots, it notes where the test has no snapshot."""
        worker = self._run.worker
        if self._run.options.snapshots is None or worker is None:
            return measurement
        if worker.snapshot is None:
            why = "as PyTorch's allocator did not record its history"
            others = "no_memory_growth has a recording of its own, and a torch before 2.14 cannot"
            note = f"none of this test, {why} ({others})"
        elif self._run.options.torchrun is not None:
            note = f"of rank {worker.snapshot_rank} alone, as others ran in other processes of torchrun"
        else:
            return measurement
        return replace(measurement, notes=(*measurement.notes, f"--mbmem-snapshots: {note}"))

    def of_failure(self, item: pytest.Item, measured: Sequence[Measured], error: BaseException) -> str:
        """Write those of the gates that failed a test, and say where they are; empty if no gate of memory did."""
        try:
            return self._of_failure(item, measured, error)
        except UserError as problem:
            return f"no memory snapshot: {problem}"

    def _of_failure(self, item: pytest.Item, measured: Sequence[Measured], error: BaseException) -> str:
        torchrun = self._run.options.torchrun
        if self._run.options.host or (torchrun is not None and torchrun.rank > 0):
            return ""
        failed = list(self._failed(measured, error))
        if not failed:
            return ""
        folder = self.folder_of_failures
        if folder is None:
            return "no memory snapshot: pytest runs without its cache; name a folder with --mbmem-snapshots DIR"
        lines = []
        for one in failed:
            measurement = one.measured.measurement
            file = folder / _file_name(measurement_name(item, measured, one.measured), one.rank, one.again)
            problem = None
            if file not in self._written or one.again not in (None, self._again(measurement)):
                problem = self._write(measurement, {one.rank: file}, one.again).get(one.rank)
            shown = os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
            of = f"rank {one.rank}" + (" on a virtual GPU" if one.again is not None and one.again.is_virtual else "")
            lines.append(f"no memory snapshot: {problem}" if problem else f"memory snapshot of {of}: {shown}")
            if not problem:
                lines.append(f"  mbmem snapshot {shlex.quote(shown)}")
        return "\n".join(lines)

    def _failed(self, measured: Sequence[Measured], error: BaseException) -> Iterator[_Failed]:
        for one in measured:
            own = self._again(one.measurement)
            judgements = [j.judgement for j in one.judged if not j.passed] + [*one.fragmentations]
            ranks = [j.rank for j in judgements if j.verdict in _OF_MEMORY and j.rank is not None]
            failure = one.measurement.failure
            if isinstance(error, OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
                ranks += [failure.rank] if failure is not None and failure.kind == "out of memory" else []
            if ranks:
                yield _Failed(one, ranks[0], own)
                continue
            for fit in one.fits:
                if fit.verdict not in ("starved", "out of memory") or fit.rank is None:
                    continue
                gpu = self._run.gpus.get(fit.rule.gpu, self._run.options.gpu)  # the latter is no virtual one's name
                if fit.reserved is not None:  # it fits alone, and not beside the rest
                    gpu = replace(gpu, context_bytes=gpu.capacity - fit.room)
                if gpu.usable > 0:
                    if own is not None:
                        own = Again.on(self._run.launcher.on(gpu), self._run.launcher, one.measurement)
                    yield _Failed(one, fit.rank, own)
                    break

    def _again(self, measurement: Measurement) -> Again | None:
        """How a rank of it runs once more; None in a worker."""
        if self._run.worker is not None:
            return None
        return Again.on(self._run.launcher, self._run.launcher, measurement)

    def _write(self, measurement: Measurement, files: Mapping[int, Path], again: Again | None) -> dict[int, str]:
        """Write the snapshots of ranks into one folder. Returns the problem of each that could not be written."""
        folder = next(iter(files.values())).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder != self._run.options.snapshots:  # in pytest's cache, which this may have begun
                (folder / ".gitignore").write_text("*\n", encoding="ascii")
        except OSError as error:
            return dict.fromkeys(files, f"{folder}: cannot be made ({error.strerror})")
        problems = {rank: problem for rank, problem in self._problems(measurement, files, again).items() if problem}
        self._written |= {file for rank, file in files.items() if rank not in problems}
        return problems

    def _problems(
        self, measurement: Measurement, files: Mapping[int, Path], again: Again | None
    ) -> dict[int, str | None]:
        """The same for each, None where there was none."""
        if again is not None:
            return run_again(measurement, files, again.launcher)
        worker = self._run.worker
        assert worker is not None
        return {
            rank: worker.leave_snapshot(file)
            if rank == worker.snapshot_rank
            else f"rank {rank} ran in another process of torchrun"
            for rank, file in files.items()
        }


def run_again(measurement: Measurement, files: Mapping[int, Path], launcher: Launcher) -> dict[int, str | None]:
    """Run ranks of a recipe once more, each for its snapshot. Returns for each why there is none, or None."""
    from .measure.launch import recipe_environment

    recipe = Recipe.from_dict(measurement.recipe, "recipe")
    calls = [_call(measurement, rank, file) for rank, file in files.items()]
    results = launcher.call_all(calls, recipe_environment(recipe), launcher.timeout)
    return {
        rank: result.message.strip().splitlines()[-1] if result.failure is not None else result.value
        for rank, result in zip(files, results, strict=True)
    }


def _call(measurement: Measurement, rank: int, file: Path) -> tuple[str, dict[str, Any]]:
    arguments = {"file": str(file), "recipe": measurement.recipe, "rank": rank}
    return "pytest_mbmem.measure.snapshot_files:run_and_write", arguments


def measurement_name(item: pytest.Item, measured: Sequence[Measured], one: Measured) -> str:
    """Of one that a test made: node id, the name that it was given, and its number if there are several of it."""
    alike = [other for other in measured if other.key == one.key]
    number = next(i for i, other in enumerate(alike) if other is one)
    return f"{item.nodeid.partition('::')[0]}::{one.key}" + (f" {number + 1}" if number else "")


def _file_name(name: str, rank: int, again: Again | None = None) -> str:
    return f"{unique_name(name)}-rank{rank}{again.suffix if again is not None else ''}.pickle"


def unique_name(name: str) -> str:
    """Of a file or folder: readable, on any file system, and no other's."""
    readable = re.sub(r"[^A-Za-z0-9.=-]+", "_", name).strip("._-")[-_LONGEST_NAME:]
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{readable}-{digest}"
