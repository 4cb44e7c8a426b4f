"""The text of a baseline file: strict reading, deterministic writing. Nothing here writes to the disk.

A file looks like this:

    format: 1
    environments:
      e1:
        megatron-core: 0.16.1
        torch: "2.14"
    tests:
      test_dense[tp2]:
        recipe_digest: 0f3b8a9cd2e4715a     # null for a test without a recipe
        recipe: ...                         # as it was written, so that "stale" can say what changed
        metrics:
          allocated:                        # or "reserved", or with a phase "allocated@optimizer"
            peak: 4516590080  # 4.21 GiB    # the highest of `ranks`, in bytes
            rank: 3                         # the rank that reached it
            phase: step-2/backward          # and where
            ranks:
              0: 4301234688  # 4.01 GiB
              3: 4516590080  # 4.21 GiB
            first: 4510000000  # 4.20 GiB   # the first peak that was recorded for this recipe
            updates: 1                      # how often the peak was changed since then
            reason: why it was changed      # optional
            earlier:                        # optional: by their number the peaks before, and why each was accepted
              0: [4510000000, null]  # 4.20 GiB
            split:                          # optional: what the peak is made of, in bytes that add up to it
              activations:                  # bytes, and how many modules the name stands for
                "decoder.layers.*.mlp @ transformer/mlp.py (forward)": [402653184, 20]  # 384.00 MiB
                other: 1048576  # 1.00 MiB  # too small to be named, or without a name
              rounding: 4096  # 4.00 KiB
            environment: e1                 # an id from above, or the versions themselves
          throughput:                       # what a step takes, here of joint ranks (see throughput.STEP_METRICS)
            step_ns: 41200000  # 41.20 ms   # the median; "flops" or "bytes" where they are counted instead
            spread_ns: 800000  # 800.00 us  # of a time alone: the interquartile range
            rank: 3                         # the slowest or most loaded
            first: 41200000  # 41.20 ms     # these as above
            updates: 0
            environment: e1

Reading refuses whatever is not exactly that, with file and line. A file that was cut short is never read as a smaller
figure: each figure ends with a required key, and each line with a newline. Comments made by hand are not kept.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from .drift import Accepted
from .errors import UserError
from .gates import GATED_METRICS
from .measurement import PHASES, check_phase, step_name
from .split import SPLIT_CATEGORIES, Part, Split, in_order, total
from .throughput import STEP_METRICS, Kind
from .units import format_bytes
from .validation import show

FORMAT = 1
"""Version of the file's form; a file with another one is refused."""


@dataclass(frozen=True)
class Figure:
    """One accepted figure, of which more is worse: a peak in bytes, or what a step takes, in the metric's own unit."""

    value: int
    rank: int
    phase: str  # of a peak; empty for a step
    ranks: Mapping[int, int]  # of a peak: rank -> its own, the highest of which is `value`; empty for a step
    first: int
    updates: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    reason: str | None = None
    earlier: tuple[Accepted, ...] = ()  # values before this one, oldest first; an older version kept none
    split: Split | None = None  # of a peak; None where it was not known, or an older version wrote it
    spread: int | None = None  # of a step's time


@dataclass(frozen=True)
class Entry:
    """What is stored for one test (or for one named measurement of it)."""

    recipe_digest: str | None
    recipe: Mapping[str, Any] | None
    figures: Mapping[str, Figure]  # by PeakGate.metric_id or StepMetric


@dataclass(frozen=True)
class Place:
    """Where the first key of a mapping stands in a file."""

    line: int  # from 1
    column: int  # spaces in front of it


@dataclass(frozen=True)
class BaselineFile:
    """A file's contents. `environments` keeps the ids that the file uses, so that a rewrite leaves them alone."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)  # of each entry, for messages
    # Where lines can be added: under `tests:`, and under each entry's `metrics:`. Not in mappings written in braces.
    tests_at: Place | None = field(default=None, compare=False)
    metrics_at: Mapping[str, Place] = field(default_factory=dict, compare=False)


# Writing --------------------------------------------------------------------------------------------------------------

# Texts that mean themselves in YAML without quotes; everything else is quoted.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+@:\[\]=-]*(?<!:)")
_RESOLVER = yaml.resolver.Resolver()
_TEXT = "tag:yaml.org,2002:str"

_LONGEST_SIMPLE_KEY = 1000
"""YAML 1.1 (7.3, simple keys): "key: value" on one line holds for keys of up to 1024 characters."""


def dump(stored: BaselineFile) -> str:
    """The text of a file: entries sorted, environments that no figure uses left out."""
    used = [figure.environment for entry in stored.entries.values() for figure in entry.figures.values()]
    ids = {name: environment for name, environment in stored.environments.items() if environment in used}
    number = max((int(name[1:]) for name in stored.environments), default=0)
    for _, entry in sorted(stored.entries.items()):
        for _, figure in sorted(entry.figures.items()):
            if figure.environment not in ids.values():
                number += 1
                ids[f"e{number}"] = figure.environment

    lines = [
        "# Accepted peaks in bytes, written by pytest --mbmem-update. Comments of your own do not survive an update.",
        f"format: {FORMAT}",
        *_block("environments", {name: dict(sorted(ids[name].items())) for name in sorted(ids, key=_id_number)}),
        "tests:" if stored.entries else "tests: {}",
    ]
    for key, entry in sorted(stored.entries.items()):
        lines += [f"  {line}" for line in entry_lines(key, entry, ids)]
    return text_of(lines)


def _id_number(name: str) -> int:
    return int(name[1:])


def text_of(lines: Iterable[str], indent: int = 0) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)


def entry_lines(key: str, entry: Entry, ids: Mapping[str, Mapping[str, str]]) -> list[str]:
    lines = _block("recipe_digest", entry.recipe_digest)
    if entry.recipe is not None:
        lines += _block("recipe", entry.recipe)
    lines.append("metrics:")
    for name, figure in sorted(entry.figures.items()):
        lines += [f"  {line}" for line in figure_lines(name, figure, ids)]
    return [*_key(key), *(f"  {line}" for line in lines)]


def figure_lines(name: str, figure: Figure, ids: Mapping[str, Mapping[str, str]]) -> list[str]:
    lines = [
        *(_step_lines(STEP_METRICS[name], figure) if name in STEP_METRICS else _peak_lines(figure)),
        f"updates: {figure.updates}",
    ]
    if figure.reason is not None:
        lines.append(f"reason: {_flow(figure.reason)}")
    if figure.earlier:
        text = STEP_METRICS[name].text if name in STEP_METRICS else format_bytes
        lines.append("earlier:")
        lines += [f"  {one.update}: {_flow([one.value, one.reason])}  # {text(one.value)}" for one in figure.earlier]
    if figure.split is not None:
        lines += ["split:", *(f"  {line}" for line in _split_lines(figure.split))]
    # The required key at the end of a figure shows that it is complete.
    for known, environment in ids.items():
        if environment == figure.environment:
            lines.append(f"environment: {known}")
            break
    else:
        lines += _block("environment", dict(sorted(figure.environment.items())))
    return [*_key(name), *(f"  {line}" for line in lines)]


def _peak_lines(figure: Figure) -> Iterator[str]:
    yield f"peak: {_bytes(figure.value)}"
    yield f"rank: {figure.rank}"
    yield f"phase: {_flow(figure.phase)}"
    yield "ranks:"
    yield from (f"  {rank}: {_bytes(peak)}" for rank, peak in sorted(figure.ranks.items()))
    yield f"first: {_bytes(figure.first)}"


def _step_lines(kind: Kind, figure: Figure) -> Iterator[str]:
    yield f"{kind.key}: {figure.value}  # {kind.text(figure.value)}"
    if figure.spread is not None:
        yield f"{_SPREAD}: {figure.spread}  # {kind.text(figure.spread)}"
    yield f"rank: {figure.rank}"
    yield f"first: {figure.first}  # {kind.text(figure.first)}"


_SPREAD = "spread_ns"

_OTHER = "other"
"""What remains of a category. Names of other parts have an "@", so that no module's name is taken for it."""


def _split_lines(split: Split) -> Iterator[str]:
    """A line for each part, under its category; a category that has no named part is one line."""
    categories: dict[str, list[Part]] = {}
    for part in in_order(split):
        categories.setdefault(part.category, []).append(part)
    for category, parts in categories.items():
        if all(part.is_other for part in parts):
            yield f"{_key(category)[0]} {_bytes(total(parts))}"
            continue
        yield from _key(category)
        for part in sorted(parts, key=lambda part: part.is_other):
            *before, last = _key(_OTHER if part.is_other else _part_name(part))
            held = str(part.size) if part.is_other else f"[{part.size}, {part.modules}]"
            yield from (f"  {line}" for line in (*before, f"{last} {held}  # {format_bytes(part.size)}"))


def _part_name(part: Part) -> str:
    return f"{part.module} @".removeprefix(" ") + (f" {part.place}" if part.place else "")


def _bytes(size: int) -> str:
    return f"{size}  # {format_bytes(size)}"


def _key(key: str) -> list[str]:
    written = _flow(key)
    return [f"{written}:"] if len(written) <= _LONGEST_SIMPLE_KEY else [f"? {written}", ":"]


def _block(key: str, value: Any) -> list[str]:
    """A key with its value: mappings one key a line, everything else in one line."""
    lines = _key(key)
    if isinstance(value, Mapping) and value:
        return [*lines, *(f"  {line}" for inner, part in value.items() for line in _block(inner, part))]
    lines[-1] += f" {_flow(value)}"
    return lines


def _flow(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 reads a number without a point as text.
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, str):
        # types-PyYAML leaves this method untyped.
        tag = _RESOLVER.resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
        return value if tag == _TEXT and _PLAIN.fullmatch(value) else _quoted(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)}: {_flow_part(part)}" for key, part in value.items()) + "}"
    return "[" + ", ".join(_flow_part(part) for part in value) + "]"


def _flow_part(value: Any) -> str:
    # Brackets and commas end a text that stands in brackets without quotes.
    return _quoted(value) if isinstance(value, str) else _flow(value)


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# Reading --------------------------------------------------------------------------------------------------------------


class DamagedFile(UserError):
    """A baseline file that is not one: the message names file and line and says what is allowed."""


_NULL, _BOOL, _INT, _FLOAT, _MAPPING, _SEQUENCE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "map", "seq")
)
_CONFLICT = re.compile(r"(<{7}|={7}|>{7}|\|{7})([ \r]|$)")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,18})")
_FLOATING = re.compile(r"-?[0-9]+\.[0-9]*(e[-+]?[0-9]{1,3})?")
_ENVIRONMENT_ID = re.compile(r"e[1-9][0-9]{0,8}")
_DEEPEST = 20
"""Mappings within mappings that a recipe may have; more is no recipe, and exhausts the YAML parser's stack."""

_STEPS = tuple(step_name(step) for step in range(4))
_METRIC_IDS = (
    f"{' or '.join(GATED_METRICS)}, alone or with a phase as in 'allocated@optimizer', {', '.join(STEP_METRICS)}"
)


def read(path: Path) -> BaselineFile:
    """The contents of a baseline file; an empty one where there is no file.

    Raises `DamagedFile` for anything but a complete and consistent baseline file, `UserError` if it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link to a file that does not exist") from None
        return BaselineFile()
    except OSError as error:
        raise UserError(f"{path}: the baseline file cannot be read ({error.strerror or error})") from None
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DamagedFile(f"{path}:{line}: not UTF-8 text ({error.reason})") from None
    return parse(text, path)


def parse(text: str, path: Path) -> BaselineFile:
    """The contents of a baseline file's text; `path` is for messages. Raises `DamagedFile`."""
    root = _compose(text, path)
    top = _Value(path, 1, "the file", root).fields(("format", "environments", "tests"))
    if top["format"].integer() != FORMAT:
        raise top["format"].wrong(f"{FORMAT}, the form that this version of pytest-mbmem reads and writes")

    environments: dict[str, Mapping[str, str]] = {}
    for name, value in top["environments"].mapping().items():
        if not _ENVIRONMENT_ID.fullmatch(name):
            raise value.damaged(f"the environment's id {name!r} is not one of e1, e2, ...")
        environments[name] = value.environment()

    entries: dict[str, Entry] = {}
    lines: dict[str, int] = {}
    metrics_at: dict[str, Place] = {}
    for key, value in top["tests"].mapping().items():
        parts = value.fields(("recipe_digest", "metrics"), ("recipe",))
        figures = {}
        for name, metric in parts["metrics"].mapping().items():
            _check_metric_id(name, metric)
            kind = STEP_METRICS.get(name)
            figures[name] = _peak(metric, environments) if kind is None else _step(metric, kind, environments)
        if not figures:
            raise parts["metrics"].damaged(f"no figure; allowed: at least one of {_METRIC_IDS}")
        digest = None if parts["recipe_digest"].is_null() else parts["recipe_digest"].text()
        recipe = parts["recipe"].recipe() if "recipe" in parts else None
        entries[key] = Entry(digest, recipe, figures)
        lines[key] = value.line
        if (place := parts["metrics"].place()) is not None:
            metrics_at[key] = place
    return BaselineFile(entries, environments, lines, top["tests"].place(), metrics_at)


def _compose(text: str, path: Path) -> yaml.Node:
    """The document's root node. PyYAML's composer makes nothing but nodes, whatever the tags say."""
    for number, line in enumerate(text.split("\n"), 1):
        if _CONFLICT.match(line):
            raise DamagedFile(f"{path}:{number}: a merge conflict ({line[:7]}); choose one side and remove the markers")
    if not text.endswith("\n"):
        last = text.count("\n") + 1
        raise DamagedFile(f"{path}:{last}: the last line does not end; the file is empty or cut short: restore it")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = yaml.compose(text, Loader=loader)
    except yaml.YAMLError as error:
        at = _error_line(error, text)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        tab = re.match(r" *\t", "".join(text.split("\n")[at - 1 : at]))
        hint = " (indent with spaces, not with tabs)" if tab else ""
        raise DamagedFile(f"{path}:{at}: not YAML: {problem}{hint}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML lets these through: an escape beyond Unicode's range, brackets within brackets without end.
        raise DamagedFile(f"{path}:1: not YAML: {error}") from None
    if root is None:
        raise DamagedFile(f"{path}:1: the file holds nothing; delete it or restore it")
    _refuse_aliases(root, path)
    return root


def _refuse_aliases(root: yaml.Node, path: Path) -> None:
    """A node that is met twice has an alias: a few can stand for more data than memory holds, or for themselves."""
    met, waiting = {id(root)}, [root]
    while waiting:
        node = waiting.pop()
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        for part in inner if isinstance(node, yaml.CollectionNode) else ():
            if id(part) in met:
                raise DamagedFile(
                    f"{path}:{_line(part)}: an alias ('*name') stands for this value; write it out instead"
                )
            met.add(id(part))
            waiting.append(part)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _error_line(error: yaml.YAMLError, text: str) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        return int(mark.line) + 1
    position = getattr(error, "position", None)
    return 1 if position is None else text.count("\n", 0, position) + 1


def _check_metric_id(name: str, value: _Value) -> None:
    metric, at, phase = name.partition("@")
    if name in STEP_METRICS:
        return
    if metric in GATED_METRICS:
        if not at:
            return
        with contextlib.suppress(UserError):
            check_phase(phase, "")
            return
    raise value.damaged(f"{name!r} is no figure; allowed: {_METRIC_IDS}")


def _peak(value: _Value, environments: Mapping[str, Mapping[str, str]]) -> Figure:
    required = ("peak", "rank", "phase", "ranks", "first", "updates", "environment")
    parts = value.fields(required, ("reason", "earlier", "split"))
    ranks = {}
    for name, size in parts["ranks"].mapping().items():
        if not _DECIMAL.fullmatch(name) or name.startswith("-"):
            raise size.damaged(f"rank {name!r}; allowed: a whole number, 0 or more")
        ranks[int(name)] = size.integer(0)
    peak, rank = parts["peak"].integer(1), parts["rank"].integer(0)
    highest = max(ranks.values(), default=None)
    if highest != peak:
        raise parts["peak"].wrong(f"the highest of the ranks' peaks, {highest}")
    if ranks.get(rank) != peak:
        reached = ", ".join(str(name) for name, size in ranks.items() if size == peak)
        raise parts["rank"].wrong(f"a rank that reached the peak: {reached}")
    phase = parts["phase"].text()
    step, _, name = phase.rpartition("/")
    if name not in PHASES or (step and step not in _STEPS):
        raise parts["phase"].wrong("a phase as in 'step-2/backward', 'build' or 'test'")
    return Figure(
        value=peak,
        rank=rank,
        phase=phase,
        ranks=ranks,
        split=_split(parts["split"], peak) if "split" in parts else None,
        **_history(parts, "peak", environments),
    )


def _step(value: _Value, kind: Kind, environments: Mapping[str, Mapping[str, str]]) -> Figure:
    spread = (_SPREAD,) if kind.key == "step_ns" else ()
    parts = value.fields((kind.key, *spread, "rank", "first", "updates", "environment"), ("reason", "earlier"))
    return Figure(
        value=parts[kind.key].integer(kind.lowest),
        rank=parts["rank"].integer(0),
        phase="",
        ranks={},
        spread=parts[_SPREAD].integer(0) if spread else None,
        **_history(parts, kind.key, environments, kind.lowest),
    )


def _history(
    parts: Mapping[str, _Value], key: str, environments: Mapping[str, Mapping[str, str]], lowest: int = 1
) -> dict[str, Any]:
    """What every figure has beside its value, which stands under `key`."""
    value, first, updates = parts[key].integer(lowest), parts["first"].integer(lowest), parts["updates"].integer(0)
    if updates == 0 and first != value:
        raise parts["first"].wrong(f"the {key}, {value}, as long as updates is 0")
    environment = parts["environment"]
    if environment.is_mapping():
        versions: Mapping[str, str] = environment.environment()
    elif environment.text() in environments:
        versions = environments[environment.text()]
    else:
        known = ", ".join(environments) or "none"
        raise environment.wrong(f"an id under environments: ({known}), or a mapping of versions")
    reason = parts["reason"].text() if "reason" in parts else None
    earlier = _earlier(parts["earlier"], first, updates, lowest) if "earlier" in parts else ()
    return {"first": first, "updates": updates, "environment": versions, "reason": reason, "earlier": earlier}


def _earlier(value: _Value, first: int, updates: int, lowest: int) -> tuple[Accepted, ...]:
    found: list[Accepted] = []
    for name, part in value.mapping().items():
        if not _DECIMAL.fullmatch(name) or not (found[-1].update if found else -1) < int(name) < updates:
            raise part.damaged(f"earlier: {name!r}; allowed: whole numbers below updates, {updates}, in their order")
        number, reason = part.items(2)
        accepted = Accepted(int(name), number.integer(lowest), None if reason.is_null() else reason.text())
        if accepted.update == 0 and accepted.value != first:
            raise part.damaged(f"earlier: the value before all changes is {accepted.value}; allowed: first, {first}")
        found.append(accepted)
    return tuple(found)


def _split(value: _Value, peak: int) -> Split:
    parts = []
    for category, held in value.mapping().items():
        if category not in SPLIT_CATEGORIES:
            raise held.damaged(f"{category!r} is no category; allowed: {', '.join(SPLIT_CATEGORIES)}")
        if not held.is_mapping():
            parts.append(Part(category, held.integer(1)))
            continue
        for name, value_of_part in held.mapping().items():
            if name == _OTHER:
                parts.append(Part(category, value_of_part.integer(1)))
                continue
            module, _, place = name.partition("@")
            part = Part(category, 0, module.removesuffix(" "), place.removeprefix(" "))
            if part.is_other or _part_name(part) != name:
                raise value_of_part.damaged(f"{name!r} names no part; allowed: 'module @ file (function)', {_OTHER!r}")
            size, modules = value_of_part.integers(2)
            parts.append(replace(part, size=size, modules=modules))
    if total(parts) != peak:
        raise value.damaged(f"the sizes under split add up to {total(parts)}; allowed: the peak, {peak}, or no split")
    return in_order(parts)


@dataclass(frozen=True)
class _Value:
    """A node of the document with what messages need: its line is the key's, and repeated keys are seen."""

    path: Path
    line: int
    what: str
    node: yaml.Node

    def damaged(self, message: str) -> DamagedFile:
        return DamagedFile(f"{self.path}:{self.line}: {message}")

    def wrong(self, allowed: str) -> DamagedFile:
        kind = "a mapping" if isinstance(self.node, yaml.MappingNode) else "a list"
        found = show(self.node.value) if isinstance(self.node, yaml.ScalarNode) else kind
        return self.damaged(f"{self.what} is {found}; allowed: {allowed}")

    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    def is_null(self) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and self.node.tag == _NULL

    def mapping(self) -> dict[str, _Value]:
        """The values of a mapping by key. Keys are taken as written: the key of a rank is "0"."""
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != _MAPPING:
            raise self.wrong("a mapping, that is lines of 'key: value'")
        values: dict[str, _Value] = {}
        for key, node in self.node.value:
            line = _line(key)
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (_TEXT, _INT):
                raise _Value(self.path, line, f"{self.what}: a key", key).wrong(
                    "a text, in quotes where YAML takes it for something else"
                )
            if key.value in values:
                raise self.damaged_at(line, f"{self.what}: {key.value!r} is there twice; remove one")
            values[key.value] = _Value(self.path, line, key.value, node)
        return values

    def damaged_at(self, line: int, message: str) -> DamagedFile:
        return replace(self, line=line).damaged(message)

    def fields(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Value]:
        """The values of a mapping with exactly these keys."""
        values = self.mapping()
        for key, value in values.items():
            if key not in required + optional:
                raise value.damaged(f"{self.what}: unknown key {key!r}; allowed: {', '.join(required + optional)}")
        for key in required:
            if key not in values:
                raise self.damaged(f"{self.what}: the key {key!r} is missing")
        return values

    def integer(self, lowest: int = 0) -> int:
        if isinstance(self.node, yaml.ScalarNode) and self.node.tag == _INT and _DECIMAL.fullmatch(self.node.value):
            number = int(self.node.value)
            if number >= lowest:
                return number
        raise self.wrong(f"a whole number, {lowest} or more")

    def integers(self, count: int) -> list[int]:
        """A list of so many whole numbers from 1 on."""
        if isinstance(self.node, yaml.SequenceNode) and len(self.node.value) == count:
            return [part.integer(1) for part in self.items(count)]
        raise self.wrong(f"a list of {count} whole numbers, 1 or more")

    def items(self, count: int) -> list[_Value]:
        """The parts of a list of so many."""
        if isinstance(self.node, yaml.SequenceNode) and len(self.node.value) == count:
            return [replace(self, line=_line(part), node=part) for part in self.node.value]
        raise self.wrong(f"a list of {count}")

    def text(self) -> str:
        if not isinstance(self.node, yaml.ScalarNode) or self.node.tag != _TEXT:
            raise self.wrong("a text, in quotes where YAML takes it for something else")
        return str(self.node.value)

    def environment(self) -> dict[str, str]:
        return {name: value.text() for name, value in self.mapping().items()}

    def recipe(self) -> dict[str, Any]:
        return {name: value.plain(_DEEPEST) for name, value in self.mapping().items()}

    def plain(self, depth: int) -> Any:
        """Texts, numbers, truth values, lists and mappings, as a recipe has them."""
        if depth == 0:
            raise self.damaged(f"{self.what}: more than {_DEEPEST} levels of mappings and lists")
        if isinstance(self.node, yaml.MappingNode):
            return {name: value.plain(depth - 1) for name, value in self.mapping().items()}
        if isinstance(self.node, yaml.SequenceNode) and self.node.tag == _SEQUENCE:
            parts = (replace(self, line=_line(part), node=part) for part in self.node.value)
            return [part.plain(depth - 1) for part in parts]
        if isinstance(self.node, yaml.ScalarNode):
            text = self.node.value
            if self.node.tag == _TEXT:
                return text
            if self.node.tag == _NULL:
                return None
            if self.node.tag == _BOOL and text in ("true", "false"):
                return text == "true"
            if self.node.tag == _INT and _DECIMAL.fullmatch(text):
                return int(text)
            if self.node.tag == _FLOAT and _FLOATING.fullmatch(text):
                return float(text)
        raise self.wrong("a text, a decimal number, true, false, null, a list or a mapping")

    def place(self) -> Place | None:
        """Where its first key stands; None for a mapping in braces, which takes no further lines."""
        if not isinstance(self.node, yaml.CollectionNode) or self.node.flow_style or not self.node.value:
            return None
        return Place(_line(self.node), self.node.start_mark.column)
