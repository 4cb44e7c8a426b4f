"""The catalogue of documented constraints, read from YAML and checked."""

from __future__ import annotations

import re
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..alloc_conf import has_expandable_segments
from ..errors import UserError
from ..recipe import Recipe
from ..strict_yaml import read_yaml
from ..validation import did_you_mean, nearest, show
from .expression import FUNCTIONS, Expression

T = TypeVar("T")

Where: TypeAlias = Callable[[str], str]
"""From a key within something to where it stands, for messages."""

BUILT_IN = Path(__file__).with_name("catalog.yaml")

PACKAGES = ("megatron-core", "torch", "transformer-engine")
"""Whose versions a constraint may depend on; an expression reads them with _ for - (empty text: not installed)."""

Stage = Literal["configuration", "model", "capture", "run"]
Judged = Literal["before", "built", "advice"]
"""Refused before anything runs; told by the built model, as a verdict of a measurement; or nothing but good to know."""
Need = Literal["transformer-engine", "cuda-build", "gpu"]

_COMPUTED = ("expandable_segments", *(package.replace("-", "_") for package in PACKAGES))
_CONFIGS = (
    "TransformerConfig",
    "MLATransformerConfig",
    "ModelParallelConfig",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
)
_ENTRY_KEYS = ("id", "forbids", "versions", "megatron", "judged", "needs", "why", "instead", "source", "example")
_OPTIONAL = ("versions", "judged", "needs")


@dataclass(frozen=True)
class Versions:
    """Ranges of package versions, as in {"megatron-core": ">=0.16"}; empty: any."""

    ranges: Mapping[str, SpecifierSet]

    def hold(self, installed: Mapping[str, str]) -> bool:
        """Whether all are met. A package whose version is not known meets any range."""
        return all(
            spec.contains(installed[package], prereleases=True)
            for package, spec in self.ranges.items()
            if package in installed
        )

    def __str__(self) -> str:
        return ", ".join(f"{package} {spec}" for package, spec in self.ranges.items())


@dataclass(frozen=True)
class Outcome:
    """What Megatron Core does with settings that break a constraint."""

    versions: Versions
    condition: Expression | None
    raises: str = ""  # name of the exception; empty: accepted
    message: str = ""  # its text's start, or after "... " what is in it
    at: Stage = "configuration"
    accepts: str = ""  # what happens then


@dataclass(frozen=True)
class Construction:
    """Settings as arguments of one of Megatron's configuration classes, in an environment."""

    config: str  # name of the class
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]

    @property
    def settings(self) -> dict[str, Any]:
        """As a constraint reads them."""
        old = self.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
        alloc_conf = self.environment.get("PYTORCH_ALLOC_CONF", old)
        return {**self.arguments, **self.environment, "alloc_conf": alloc_conf}


@dataclass(frozen=True)
class Entry:
    """A documented constraint."""

    id: str
    forbids: Expression
    versions: Versions
    outcomes: tuple[Outcome, ...]
    judged: Judged
    needs: tuple[Need, ...]
    why: str
    instead: str
    source: str
    example: Construction | Recipe  # settings that break it
    reads: tuple[str, ...]  # the settings that `forbids` depends on, through terms too
    line: int
    catalog: Catalog

    def breaks(self, settings: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
        """Whether settings break it, for these versions of the packages."""
        return self.versions.hold(versions) and self.forbids.holds(Names(self.catalog, settings, versions))

    def outcome(self, settings: Mapping[str, Any], versions: Mapping[str, str]) -> Outcome | None:
        """What Megatron does with the settings; None where it is not documented for these versions."""
        names = Names(self.catalog, settings, versions)
        for outcome in self.outcomes:
            if outcome.versions.hold(versions) and (outcome.condition is None or outcome.condition.holds(names)):
                return outcome
        return None


class Catalog(Mapping[str, Entry]):
    """Constraints by id, in the file's order.

    Raises `UserError` that names file, line and id for a field, version or setting that is not known.
    """

    def __init__(self, path: Path = BUILT_IN) -> None:
        self.path = path
        data, self._lines = read_yaml(path)
        if not isinstance(data, Mapping) or set(data) != {"documented", "defaults", "terms", "constraints"}:
            raise UserError(f"{path}: must hold the keys documented, defaults, terms and constraints")
        where = f"{path}:{self._lines['documented']}: documented"
        self.documented = _versions({"megatron-core": data["documented"]}, where)
        if not isinstance(data["constraints"], list):
            raise UserError(f"{path}: constraints: {show(data['constraints'])} is not a list")
        self.defaults: Mapping[str, Any] = _mapping(data["defaults"], f"{path}: defaults")
        self.terms: dict[str, Expression] = {}
        for name, text in _mapping(data["terms"], f"{path}: terms").items():
            where = f"{path}:{self._lines[f'terms.{name}']}: terms.{name}"
            if name in self.known or name in FUNCTIONS:
                raise UserError(f"{where}: is the name of a setting or function already")
            self.terms[name] = Expression(text, self.known, where)
        self._lines_of: dict[int, dict[str, int]] = defaultdict(dict)  # of each constraint's keys
        for dotted, line in self._lines.items():
            section, _, rest = dotted.partition(".")
            if section == "constraints" and rest:
                index_text, _, key = rest.partition(".")
                self._lines_of[int(index_text)][key] = line
        self._entries: dict[str, Entry] = {}
        for index, fields in enumerate(data["constraints"]):
            entry = self._entry(index, fields)
            if entry.id in self._entries:
                raise UserError(f"{path}:{entry.line}: {entry.id}: given before on line {self._entries[entry.id].line}")
            self._entries[entry.id] = entry

    @property
    def known(self) -> list[str]:
        """Names that an expression may read: settings, what is computed of them, and the terms so far."""
        return [*self.defaults, *_COMPUTED, *self.terms]

    def __getitem__(self, id: str) -> Entry:
        """Raises `UserError` with the nearest ids for one that is not there."""
        if isinstance(id, str) and id in self._entries:
            return self._entries[id]
        hint = nearest(id, self._entries) or "; `mbmem explain` lists them"
        raise UserError(f"{show(id)} is not a documented constraint{hint}")

    def __contains__(self, id: object) -> bool:
        return id in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _entry(self, index: int, fields: Any) -> Entry:
        lines = self._lines_of[index]

        def first_line(key: str, otherwise: int) -> int:
            """Of a key, or of what is in it (an element of a list has no line of its own)."""
            return min((n for k, n in lines.items() if f"{k}.".startswith(key)), default=otherwise)

        line = first_line("", 1)
        if not isinstance(fields, Mapping) or not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", str(fields.get("id"))):
            raise UserError(f"{self.path}:{line}: constraint {index + 1} has no id of small letters, digits and -")
        id = str(fields["id"])

        def where(key: str) -> str:
            return f"{self.path}:{first_line(f'{key}.', line)}: {id}: {key}"

        _check_keys(fields, _ENTRY_KEYS, _OPTIONAL, where)
        judged: Judged = _one_of(fields.get("judged", "before"), typing.get_args(Judged), where("judged"))
        needs = fields.get("needs", [])
        if not isinstance(needs, list):
            raise UserError(f"{where('needs')}: {show(needs)} is not a list")
        outcomes = fields["megatron"]
        if not isinstance(outcomes, list) or not outcomes:
            raise UserError(f"{where('megatron')}: {show(outcomes)} is not a list of what Megatron Core does")
        forbids = Expression(fields["forbids"], self.known, where("forbids"))
        return Entry(
            id=id,
            forbids=forbids,
            versions=_versions(fields.get("versions", {}), where("versions")),
            outcomes=tuple(self._outcome(one, f"megatron.{n}", where) for n, one in enumerate(outcomes)),
            judged=judged,
            needs=tuple(_one_of(need, typing.get_args(Need), where("needs")) for need in needs),
            why=_text(fields["why"], where("why")),
            instead=_text(fields["instead"], where("instead")),
            source=_text(fields["source"], where("source")),
            example=self._example(fields["example"], where),
            reads=tuple(dict.fromkeys(self._settings_of(forbids))),
            line=line,
            catalog=self,
        )

    def _outcome(self, fields: Any, key: str, where: Where) -> Outcome:
        def inner(name: str) -> str:
            return where(f"{key}.{name}")

        if not isinstance(fields, Mapping) or ("raises" in fields) == ("accepts" in fields):
            raise UserError(f"{where(key)}: {show(fields)} has neither or both of raises and accepts")
        condition = Expression(fields["if"], self.known, inner("if")) if "if" in fields else None
        versions = _versions(fields.get("versions", {}), inner("versions"))
        if "accepts" in fields:
            _check_keys(fields, ("accepts", "versions", "if"), ("versions", "if"), inner)
            return Outcome(versions, condition, accepts=_text(fields["accepts"], inner("accepts")))
        _check_keys(fields, ("raises", "message", "at", "versions", "if"), ("at", "versions", "if"), inner)
        if not isinstance(fields["message"], str):
            raise UserError(f"{inner('message')}: {show(fields['message'])} is not a text")
        at: Stage = _one_of(fields.get("at", "configuration"), typing.get_args(Stage), inner("at"))
        return Outcome(versions, condition, _text(fields["raises"], inner("raises")), fields["message"], at)

    def _example(self, fields: Any, where: Where) -> Construction | Recipe:
        def inner(name: str) -> str:
            return where(f"example.{name}")

        fields = _mapping(fields, where("example"))
        if "recipe" in fields:
            _check_keys(fields, ("recipe",), (), inner)
            return Recipe.from_dict(fields["recipe"], inner("recipe"))
        _check_keys(fields, ("config", "arguments", "environment"), ("environment",), inner)
        config = _one_of(fields["config"], _CONFIGS, inner("config"))
        arguments = _mapping(fields["arguments"], inner("arguments"))
        for name in arguments:
            if name not in self.defaults:
                hint = did_you_mean(name, list(self.defaults))
                raise UserError(f"{inner(f'arguments.{name}')}: unknown setting; {hint}".rstrip("; "))
        environment = _mapping(fields.get("environment", {}), inner("environment"))
        for name, value in environment.items():
            _text(value, inner(f"environment.{name}"))
        return Construction(config, arguments, environment)

    def _settings_of(self, expression: Expression) -> Iterator[str]:
        for name in expression.names:
            if name in self.terms:
                yield from self._settings_of(self.terms[name])
            elif name == "expandable_segments":
                yield "alloc_conf"
            elif name not in _COMPUTED:
                yield name


class Names(dict[str, Any]):
    """What an expression reads: settings over Megatron's defaults, versions, and terms as they are needed."""

    def __init__(self, catalog: Catalog, settings: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        super().__init__({**catalog.defaults, **settings})
        self.update({package.replace("-", "_"): versions.get(package, "") for package in PACKAGES})
        self._terms = catalog.terms

    def __missing__(self, name: str) -> Any:
        if name == "expandable_segments":
            value = has_expandable_segments(self["alloc_conf"])
        elif name in self._terms:
            value = self._terms[name].value(self)
        else:
            raise KeyError(name)
        self[name] = value
        return value


def _check_keys(fields: Mapping[Any, Any], allowed: Sequence[str], optional: Collection[str], where: Where) -> None:
    for key in fields:
        if key not in allowed:
            raise UserError(f"{where(key)}: unknown key; {did_you_mean(key, allowed)}allowed: {', '.join(allowed)}")
    for key in allowed:
        if key not in fields and key not in optional:
            raise UserError(f"{where(key)}: is missing")


def _one_of(value: object, allowed: Sequence[T], where: str) -> T:
    for one in allowed:
        if value == one:
            return one
    raise UserError(f"{where}: {show(value)} is not one of {', '.join(map(str, allowed))}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {show(value)} is not a text")
    return " ".join(value.split())


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{where}: {show(value)} is not a mapping of names")
    return value


def _versions(fields: Any, where: str) -> Versions:
    if not isinstance(fields, Mapping):
        raise UserError(f'{where}: {show(fields)} is not a mapping, as in {{megatron-core: ">=0.16"}}')
    ranges = {}
    for package, text in fields.items():
        _one_of(package, PACKAGES, where)
        try:
            ranges[package] = SpecifierSet(text if isinstance(text, str) else "")
        except InvalidSpecifier:
            raise UserError(f"{where}: {package}: {text!r} is not a version range, as in '>=0.16,<0.20'") from None
        if not str(ranges[package]):
            raise UserError(f"{where}: {package}: {text!r} is not a version range, as in '>=0.16,<0.20'")
    return Versions(ranges)
