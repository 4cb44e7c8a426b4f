"""The YAML store of accepted figures: `baselines/<device key>/<test module>.yaml`.

The module's path is kept relative to pytest's rootdir (`tests/sub/test_x.py` -> `tests/sub/test_x.yaml`), because two
folders may hold modules of the same name. `baseline_file` describes what is in a file.

Only `apply_updates` writes. What did not run keeps its meaning; comments made by hand are not kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from .baseline_file import (
    BaselineFile,
    DamagedFile,
    Entry,
    Figure,
    dump,
    entry_lines,
    figure_lines,
    read,
    text_of,
)
from .drift import Accepted, history_of
from .errors import UserError
from .gates import Comparison, PeakGate, compare
from .measurement import Measurement
from .split import Part, compact, split_of
from .texts import encodable
from .throughput import STEP_METRICS, ThroughputJudgement, compare_steps, figure_name, figure_text, noise_of

UpdateMode = Literal["new", "changed", "all"]
UPDATE_MODES: tuple[UpdateMode, ...] = ("new", "changed", "all")

ChangeKind = Literal["new", "stale", "regression", "improvement", "refreshed", "damaged file replaced"]

LOCK_TIMEOUT = 60.0
"""Seconds to wait for another pytest that updates the same folder; an update itself takes milliseconds."""


@dataclass(frozen=True)
class Record:
    """A measured figure on its way from the process that ran the test to the one that writes baselines."""

    device: str
    module: str
    key: str
    metric_id: str
    tolerance: float
    slack: int
    recipe_digest: str | None
    recipe: Mapping[str, Any] | None
    figure: Figure

    @classmethod
    def of(cls, module: str, key: str, gate: PeakGate, measurement: Measurement) -> Record:
        """What `gate` gates in `measurement`.

        Raises `UserError` where there is nothing that could become a baseline: a failed measurement, a peak of 0, a
        recipe or an environment that YAML cannot hold.
        """
        source = f"{module}::{key}"
        if measurement.failure is not None:
            raise UserError(f"{source}: a measurement that failed ({measurement.failure.kind}) is no baseline")
        worst = measurement.worst(gate.metric, gate.phase)
        peak = worst.peak(gate.metric, gate.phase)
        ranks = {rank.rank: rank.peak(gate.metric, gate.phase) for rank in measurement.ranks}
        if peak == 0 or min(ranks.values()) < 0:
            raise UserError(f"{source}: a peak {gate.metric} of {min(ranks.values())} bytes is no baseline")
        figure = Figure(
            value=peak,
            rank=worst.rank,
            phase=worst.peak_phase(gate.metric, gate.phase).name,
            ranks=ranks,
            first=peak,
            split=compact(split) if (split := split_of(worst, gate.metric, gate.phase)) is not None else None,
        )
        return cls._of(module, key, measurement, gate.metric_id, gate.tolerance, figure, gate.slack)

    @classmethod
    def of_step(cls, module: str, judgement: ThroughputJudgement, measurement: Measurement) -> Record:
        """What `judgement`, which has a measured figure, is about. Raises `UserError` as `of` does."""
        assert judgement.measured is not None
        assert judgement.rank is not None
        measured = judgement.measured
        figure = Figure(measured, judgement.rank, phase="", ranks={}, first=measured, spread=judgement.spread)
        tolerance = judgement.gate.tolerance
        return cls._of(module, judgement.key, measurement, judgement.metric_id, tolerance, figure)

    @classmethod
    def _of(
        cls,
        module: str,
        key: str,
        measurement: Measurement,
        metric_id: str,
        tolerance: float,
        figure: Figure,
        slack: int = 0,
    ) -> Record:
        environment = {encodable(name): encodable(value) for name, value in measurement.environment.items()}
        recipe = None if measurement.recipe is None else _plain(measurement.recipe, f"{module}::{key}")
        return cls(
            device=measurement.device.key,
            module=module,
            key=key,
            metric_id=metric_id,
            tolerance=tolerance,
            slack=slack,
            recipe_digest=measurement.recipe_digest,
            recipe=recipe,
            figure=replace(figure, environment=environment),
        )

    def compared_with(self, before: Figure) -> Comparison:
        """The figure against an accepted one, by the rule that gates it."""
        if self.metric_id in STEP_METRICS:
            return compare_steps(self.figure.value, self.figure.spread, before, self.tolerance)
        return compare(self.figure.value, before.value, self.tolerance, self.slack)

    def is_worse_than(self, before: Figure) -> bool:
        """Whether a person must say why it is accepted. A step time within the noise is no worse."""
        return self.figure.value > before.value + (noise_of(self.figure.spread, before) or 0)

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json.dumps` and xdist's `workeroutput` take."""
        figure = {**vars(self.figure), "ranks": [[rank, peak] for rank, peak in self.figure.ranks.items()]}
        figure["environment"] = dict(self.figure.environment)
        figure["earlier"] = [dict(vars(one)) for one in self.figure.earlier]
        figure["split"] = None if self.figure.split is None else [dict(vars(part)) for part in self.figure.split]
        return {**vars(self), "figure": figure}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Read what `to_json` wrote in a process of the same session."""
        split = data["figure"]["split"]
        parts = None if split is None else tuple(Part(**part) for part in split)
        earlier = tuple(Accepted(**one) for one in data["figure"]["earlier"])
        figure = {**data["figure"], "ranks": dict(data["figure"]["ranks"]), "split": parts, "earlier": earlier}
        return cls(**{**data, "figure": Figure(**figure)})


@dataclass(frozen=True)
class Change:
    """One figure that an update wrote."""

    path: Path
    key: str
    metric_id: str
    kind: ChangeKind
    old: int | None  # what was accepted before, in bytes or in the metric's own unit
    new: int
    is_worse: bool = False  # with the same recipe


@dataclass(frozen=True)
class Orphan:
    """An entry whose test does not exist any more."""

    path: Path
    line: int
    key: str


@dataclass(frozen=True)
class Paste:
    """Lines that give a test its baseline when they are put into the file by hand."""

    path: Path
    after_line: int | None  # None: the text is the whole file
    text: str

    def __str__(self) -> str:
        where = (
            f"{self.path}, as the whole file:"
            if self.after_line is None
            else f"{self.path}, after line {self.after_line}:"
        )
        return f"{where}\n{self.text}"


def _plain(value: Any, source: str) -> Any:
    """The value in the types that a YAML file gives back. Raises `UserError` for a value that it cannot hold."""
    if isinstance(value, Mapping):
        return {encodable(str(key)): _plain(part, source) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part, source) for part in value]
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise UserError(f"{source}: the recipe holds {value!r}; allowed are texts, finite numbers, lists and mappings")


# Keys and paths -------------------------------------------------------------------------------------------------------


def clean_nodeid(nodeid: str) -> tuple[str, str]:
    """Module and key of a pytest node id: ("tests/test_x.py", "TestY::test_z[tp2-bf16]").

    xdist's `--dist=loadgroup` appends "@group" to the ids of grouped tests; it is taken off, by xdist's own rule that a
    group starts at an "@" behind the last "]". So the key is the same with and without xdist, except for a group whose
    name holds a "]".
    """
    module, _, key = nodeid.partition("::")
    bracket = key.rfind("]")
    at = key.find("@", bracket + 1)
    key = key if at < 0 else key[:at]
    # A lone surrogate (an undecodable byte of a file name) cannot be written as UTF-8.
    return encodable(module), encodable(key)


def baseline_path(folder: Path, device: str, module: str) -> Path:
    """The file that holds the baselines of a test module (its path relative to the rootdir) on a device."""
    parts = PurePosixPath(module).parts
    if not parts or PurePosixPath(module).is_absolute() or ".." in parts:
        raise UserError(
            f"{module}: a test module outside of pytest's rootdir has no place in the baselines folder {folder}; "
            "choose the rootdir with --rootdir or the place of the configuration file"
        )
    return folder.joinpath(device, *parts[:-1], parts[-1].removesuffix(".py") + ".yaml")


class Baselines:
    """The stored baselines of one device; each file is read once."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self._files: dict[str, BaselineFile] = {}

    def get(self, module: str, key: str) -> Entry | None:
        """The entry of a test, or None. Raises `UserError` when the file is damaged or cannot be read."""
        if module not in self._files:
            self._files[module] = read(baseline_path(self.folder, self.device, module))
        return self._files[module].entries.get(key)


def orphans(folder: Path, device: str, seen: Mapping[str, Iterable[str]]) -> list[Orphan]:
    """Stored entries of a device without a test.

    `seen` has the keys of every collected test by module; an entry of a named measurement ("test_x@control") belongs to
    its test. Whether all tests were collected and selected is for the caller to know. Raises `UserError` for a file
    that cannot be read.
    """
    known = {}
    for module, keys in seen.items():
        with contextlib.suppress(UserError):  # a module outside of the rootdir has no baselines
            known[baseline_path(folder, device, module)] = set(keys)
    found = []
    for path in sorted((folder / device).rglob("*.yaml")):
        if path.name.startswith("."):
            continue
        tests = known.get(path, set())
        stored = read(path)
        for key in stored.entries:
            if key not in tests and clean_nodeid(f"::{key}")[1] not in tests:
                found.append(Orphan(path, stored.lines[key], key))
    return found


# Updating -------------------------------------------------------------------------------------------------------------


def apply_updates(folder: Path, records: Iterable[Record], mode: UpdateMode, reason: str | None = None) -> list[Change]:
    """Write what the tests of a session measured; returns what was changed, sorted by file and key.

    "new" adds what is missing, "changed" also accepts what is stale or outside of the gate's band, "all" accepts every
    measured figure, and replaces a damaged file by what was measured. What did not run, and what is equal, is left
    alone; a file without a change is not touched.

    Only one process of a session may call this (under xdist the controller); several sessions at once wait for each
    other. All files are checked and written beside their targets before the first one is replaced, and each is replaced
    atomically. Raises `UserError`, with nothing changed, for a damaged file (unless `mode` is "all"), for a figure
    that gets worse without a `reason`, and when files cannot be written.
    """
    wanted: dict[Path, dict[str, dict[str, Record]]] = {}
    for record in _merged(records):
        path = baseline_path(folder, record.device, record.module)
        wanted.setdefault(path, {}).setdefault(record.key, {})[record.metric_id] = record
    if not wanted:
        return []
    if reason is not None:
        reason = " ".join(encodable(reason).split()) or None

    with _lock(folder):
        changes: list[Change] = []
        texts: dict[Path, str] = {}
        for path in sorted(wanted):
            old, damage = BaselineFile(), None
            try:
                old = read(path)
            except DamagedFile as error:
                if mode != "all":
                    raise UserError(f"{error}\nMend or delete the file; --mbmem-update={mode} does not") from None
                damage = error
            new, changed = _updated(path, old, wanted[path], mode, reason, damaged=damage is not None)
            if changed:
                changes += changed
                texts[path] = dump(new)
        if reason is None:
            _require_reason(changes)
        _replace_all(texts)
    return changes


def _merged(records: Iterable[Record]) -> list[Record]:
    """One record per figure: of a test that ran several times the worst, whatever the order."""
    chosen: dict[tuple[str, str, str, str], Record] = {}
    recipes: dict[tuple[str, str, str], str | None] = {}
    for record in records:
        test = (record.device, record.module, record.key)
        if recipes.setdefault(test, record.recipe_digest) != record.recipe_digest:
            raise UserError(
                f"{record.module}::{record.key}: two different recipes were measured under this one key; "
                "name the second measurement"
            )
        figure = (*test, record.metric_id)
        other = chosen.get(figure)
        if other is None or _rank_of(record) < _rank_of(other):
            chosen[figure] = record
    return [chosen[key] for key in sorted(chosen)]


def _rank_of(record: Record) -> tuple[int, int, float, int]:
    return -record.figure.value, -(record.figure.spread or 0), record.tolerance, record.slack


def _updated(
    path: Path,
    old: BaselineFile,
    wanted: Mapping[str, Mapping[str, Record]],
    mode: UpdateMode,
    reason: str | None,
    damaged: bool,
) -> tuple[BaselineFile, list[Change]]:
    entries = dict(old.entries)
    changes = []
    for key in sorted(wanted):
        stored = old.entries.get(key)
        for metric_id, record in sorted(wanted[key].items()):
            before = stored.figures.get(metric_id) if stored is not None else None
            figure = replace(record.figure, reason=reason)
            kind: ChangeKind
            if damaged:
                kind = "damaged file replaced"
            elif stored is not None and stored.recipe_digest != record.recipe_digest:
                kind = "stale"
            elif before is None:
                kind = "new"
            else:
                same = before.value == figure.value
                verdict = record.compared_with(before)
                kind = "refreshed" if verdict == "pass" else verdict
                figure = replace(
                    figure,
                    first=before.first,
                    updates=before.updates + (not same),
                    reason=before.reason if same else reason,
                    earlier=before.earlier if same else history_of(before),
                    # That of an equal peak stays true where this time the allocator did not tell.
                    split=before.split if same and figure.split is None else figure.split,
                )
                if figure == before:
                    continue
            if (mode == "new" and kind != "new") or (mode == "changed" and kind == "refreshed"):
                continue
            # Figures of another recipe that this run did not measure go with that recipe.
            kept = entries[key].figures if key in entries and entries[key].recipe_digest == record.recipe_digest else {}
            entries[key] = Entry(record.recipe_digest, record.recipe, {**kept, metric_id: figure})
            old_value = None if before is None else before.value
            is_worse = before is not None and kind != "stale" and record.is_worse_than(before)
            changes.append(Change(path, key, metric_id, kind, old_value, figure.value, is_worse))
    return BaselineFile(entries, old.environments), changes


def _require_reason(changes: Iterable[Change]) -> None:
    """A worse figure is accepted only with a reason; what a damaged file had accepted cannot be known."""
    for change in changes:
        place = f"{change.path}: {change.key}: {change.metric_id}"
        if change.kind == "damaged file replaced":
            raise UserError(
                f"{change.path}: the file is damaged, so nobody can see whether a figure gets worse; "
                'give --mbmem-reason "why" to replace it. No baseline was changed'
            )
        if change.is_worse and change.old is not None:
            old, new = (figure_text(change.metric_id, value) for value in (change.old, change.new))
            raise UserError(
                f"{place}: the {figure_name(change.metric_id)} would rise from {old} to {new}; "
                'give --mbmem-reason "why" to accept it. No baseline was changed'
            )


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other processes from updating the folder. The folder itself is locked, so no lock file is left in it."""
    with _user_errors(folder, "cannot be created"):
        folder.mkdir(parents=True, exist_ok=True)
    with _user_errors(folder, "cannot be opened"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _wait_for(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, folder: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"{folder}: another pytest has been updating these baselines for {LOCK_TIMEOUT:.0f} s; "
                    "end it and update again. No baseline was changed"
                ) from None
            time.sleep(0.05)
        except OSError:
            # A network file system that locks no folders. Each file is still replaced as a whole.
            return
        else:
            return


def _replace_all(texts: Mapping[Path, str]) -> None:
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            with _user_errors(path, "cannot be written; no baseline was changed"):
                staged[path] = _stage(path, text)
        for path, temporary in staged.items():
            with _user_errors(path, "cannot be replaced"):
                temporary.replace(path)
                _sync(path.parent)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, text: str) -> Path:
    """Write the text beside its target, on the disk for certain."""
    if path.is_symlink():
        raise UserError(f"{path}: is a symbolic link; a baseline file that is to be updated must be a plain file")
    path.parent.mkdir(parents=True, exist_ok=True)
    for stray in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        stray.unlink(missing_ok=True)  # of an update that was killed
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _user_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {what} ({error.strerror or error})") from None


# Pasting --------------------------------------------------------------------------------------------------------------


def paste(folder: Path, records: Iterable[Record]) -> Paste:
    """Lines for figures that a baseline file lacks; `records` (at least one) are of one test and key.

    The lines are complete, but for the splits, which are long: the environment is written out, and the next update
    gives it an id. Where there is no file yet, or none that lines can be added to, the text is the whole file. Raises
    `UserError` when the file is damaged.
    """
    records = [replace(record, figure=replace(record.figure, split=None)) for record in records]
    first = records[0]
    key = first.key
    path = baseline_path(folder, first.device, first.module)
    stored = read(path)
    added = Entry(first.recipe_digest, first.recipe, {record.metric_id: record.figure for record in records})
    entry = stored.entries.get(key)
    if entry is None:
        if stored.tests_at is not None:
            return Paste(path, stored.tests_at.line - 1, text_of(entry_lines(key, added, {}), stored.tests_at.column))
    elif entry.recipe_digest == added.recipe_digest:
        place = stored.metrics_at.get(key)
        if place is not None and not added.figures.keys() & entry.figures.keys():
            lines = [line for name, figure in sorted(added.figures.items()) for line in figure_lines(name, figure, {})]
            return Paste(path, place.line - 1, text_of(lines, place.column))
        added = replace(added, figures={**entry.figures, **added.figures})
    return Paste(path, None, dump(replace(stored, entries={**stored.entries, key: added})))
