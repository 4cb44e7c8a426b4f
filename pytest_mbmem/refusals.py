"""Proofs that the installed Megatron Core does with settings what the catalogue of constraints says.

Runs in the pytest process, so it imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from . import incompatibilities
from .errors import MeasurementFailed, UserError
from .incompatibilities import installed
from .incompatibilities.catalog import PACKAGES, Construction, Entry, Names, Outcome, Stage
from .incompatibilities.explain import plain, recipe_key, recipe_value
from .measure import launch
from .measure import ranks as rank_choice
from .measure.gpu_launch import GpuLauncher
from .measure.host import HostLauncher
from .measure.ranks import Ranks
from .measure.workers import CallResult, Workers
from .megatron_settings import settings as settings_of
from .recipe import Recipe
from .validation import show
from .virtual_gpu.build import find_torch

Verdict = Literal[
    "refused as documented",
    "accepted silently, as documented",
    "documentation and code disagree",
    "cannot be decided",
]

_CONSTRUCT_ALL, _CONFIGURE, _ATTEMPT = (
    f"pytest_mbmem.measure.refusal_worker:{name}" for name in ("construct_all", "configure", "attempt")
)

_BASE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
"""What TransformerConfig needs, for examples that are not about it."""


@dataclass(frozen=True)
class Raised:
    """An exception that ended a trial. One that killed its process is of type "died", one without end "timeout"."""

    type: str
    message: str
    at: Stage | Literal[""]  # empty: not known
    where: str = ""  # module and line
    of_megatron: bool = True  # it went through Megatron's code

    def is_documented_by(self, outcome: Outcome | None) -> bool:
        """Whether type and start of the message are those. A message documented as empty is an empty one."""
        if outcome is None or self.type != outcome.raises or not self.of_megatron:
            return False
        said, documented = _one_line(self.message), _one_line(outcome.message)
        if documented.startswith("... "):  # it begins with a value
            return documented[3:] in said
        return said.startswith(documented) if documented else not said

    def __str__(self) -> str:
        return _error(self.type, self.at, self.message) + (f" ({self.where})" if self.where else "")


@dataclass(frozen=True)
class Proof:
    """What the installed versions do with settings that break a constraint, beside what is documented."""

    id: str
    verdict: Verdict
    versions: Mapping[str, str]
    settings: Mapping[str, Any]  # those that the constraint reads, by the names that the subject has for them
    documented: Outcome | None = None
    raised: Raised | None = None  # None: nothing was
    tried: str = ""  # what was done with the settings
    reason: str = ""  # why it cannot be decided
    others: tuple[str, ...] = ()  # constraints that document what was raised, where this one does not

    @property
    def as_documented(self) -> bool:
        """Whether documentation and code agree."""
        return self.verdict in ("refused as documented", "accepted silently, as documented")

    @property
    def headline(self) -> str:
        """The verdict on one line, with what is different."""
        text = f"{self.id}: {self.verdict}"
        if self.verdict == "cannot be decided":
            return f"{text}: {self.reason}"
        if self.verdict == "accepted silently, as documented":
            return f"{text}, so there is no error to prove"
        if self.verdict != "documentation and code disagree" or self.documented is None:
            return text
        if self.raised is None:
            return f"{text}: the error has vanished"
        if not self.raised.of_megatron:
            return f"{text}: {self.raised.type} did not come from Megatron Core"
        if not self.documented.raises:
            return f"{text}: an error has appeared, {self.raised.type}"
        if self.others:
            return f"{text}: {', '.join(self.others)} is refused first"
        if self.raised.type != self.documented.raises:
            return f"{text}: {self.raised.type} instead of {self.documented.raises}"
        return f"{text}: the message has changed"

    @property
    def note(self) -> str:
        """What is otherwise than documented and decides nothing: when it is raised."""
        if self.raised is None or self.documented is None or not self.documented.raises:
            return ""
        if self.raised.at in ("", self.documented.at):
            return ""
        return f"documented to be raised at {self.documented.at}, raised at {self.raised.at}"

    def summary(self) -> dict[str, str]:
        """What reports say of it."""
        return {"id": self.id, "verdict": self.verdict, "headline": self.headline}

    def explain(self) -> str:
        """The verdict, what is documented and what happened, for a person."""
        return "\n".join([self.headline, *(f"  {name + ':':<12}{text}" for name, text in self._rows())])

    def _rows(self) -> Iterator[tuple[str, str]]:
        if self.documented is not None:
            yield "documented", documented_text(self.documented)
        if self.tried:
            yield "happened", str(self.raised) if self.raised is not None else f"accepted: {self.tried}"
        if self.note:
            yield "note", self.note
        for other in self.others:
            yield "note", f"that is the documented error of {other}, which these settings break too"
        if self.settings:
            yield "settings", ", ".join(f"{name}: {plain(value)}" for name, value in self.settings.items())
        yield "versions", versions_text(self.versions)


def versions_text(versions: Mapping[str, str]) -> str:
    """The packages that constraints depend on, as in "torch 2.14.1, no transformer-engine"."""
    return ", ".join(f"{name} {versions[name]}" if name in versions else f"no {name}" for name in PACKAGES)


def documented_text(outcome: Outcome) -> str:
    """What Megatron Core does by the catalogue."""
    return _error(outcome.raises, outcome.at, outcome.message) if outcome.raises else f"accepted: {outcome.accepts}"


def _error(type: str, at: str, message: str) -> str:
    return f"{type}{f' at {at}' if at else ''}: {_one_line(message) or '(without a message)'}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def prove(
    launcher: Workers,
    subject: Recipe | Construction,
    entry: Entry,
    *,
    ranks: Ranks = "distinct",
    make: Callable[[], Mapping[str, CallResult]] | None = None,
) -> Proof:
    """Try settings that break the entry with the installed Megatron Core, this package's own checks set aside.

    Args:
        launcher: where. On a `HostLauncher`, configurations alone are tried.
        subject: the settings.
        ranks: of a recipe, as `measure` takes them; one that raises is enough.
        make: gives the answer to the entry's example, among others. None: `make_all` does.

    Raises `UserError` for settings that do not break the entry, and for wrong ranks.
    """
    if isinstance(subject, Recipe):
        rank_choice.check(subject, ranks)
    case = _Case.of(entry, subject)
    reason = case.undecided()
    if reason is None and subject is entry.example and not entry.breaks(case.settings, case.versions):
        reason = f"does not hold for {versions_text(case.versions)}"  # by what `forbids` itself asks of versions
    if reason is None:
        case.check()
        reason = _lacking(case, real_gpu=isinstance(launcher, GpuLauncher))
        if reason is None and isinstance(launcher, HostLauncher):
            reason = _lacking_on_host(case, subject)
    if reason is not None:
        return case.proof("cannot be decided", reason=reason)
    try:
        if isinstance(subject, Construction):
            made = make_all(launcher, {entry.id: subject}) if make is None else make()
            tried, raised = f"a {subject.config} was made, and nothing was done with it", _raised(made[entry.id])
        else:
            tried, raised = _tried(launcher, subject, case, ranks)
    except _NotAsked as error:
        return case.proof("cannot be decided", reason=str(error))
    return case.judged(tried, raised)


def judge_body(entry: Entry, raised: Raised | None, recipe: Recipe | None, *, real_gpu: bool) -> Proof:
    """Whether what ended a test's body, on a real or a virtual GPU, is the entry's documented error.

    `recipe` is the one that the body had built, which tells what is documented for it; without it, any of the entry's
    errors for the installed versions will do. Raises `UserError` for a recipe that does not break the entry.
    """
    case = _Case.of(entry, recipe)
    if recipe is not None and case.undecided() is None:
        case.check()
    elif recipe is None:
        possible = [outcome for outcome in entry.outcomes if outcome.versions.hold(case.versions)]
        said = (o for o in possible if raised is not None and raised.is_documented_by(o))
        case = replace(case, outcome=next(said, possible[0] if possible else None), shown={})
    reason = case.undecided() or _lacking(case, real_gpu=real_gpu)
    if reason is not None:
        return case.proof("cannot be decided", reason=reason)
    return case.judged("the test's body came to its end", raised)


def entry_of_marker(args: Sequence[Any], kwargs: Mapping[str, Any], nodeid: str) -> Entry:
    """The constraint that an incompatible marker names. Raises `UserError`, with the nearest ids for an unknown one."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not set(kwargs) <= {"id"}:
        shown = ", ".join([*map(show, args), *(f"{name}={show(value)}" for name, value in kwargs.items())])
        raise UserError(
            f"{nodeid}: incompatible({shown}): takes the id of one documented constraint, as in "
            'incompatible("cpu-offload-with-pp"); `mbmem explain` lists them'
        )
    try:
        return incompatibilities.catalog()[given[0]]
    except UserError as error:
        raise UserError(f"{nodeid}: incompatible: {error}") from None


@dataclass(frozen=True)
class _Case:
    """Settings, and what is documented for them."""

    entry: Entry
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    outcome: Outcome | None
    shown: Mapping[str, Any]

    @classmethod
    def of(cls, entry: Entry, subject: Recipe | Construction | None) -> _Case:
        """Of the subject's settings (None: none), for the installed versions."""
        versions = installed()
        settings = settings_of(subject) if isinstance(subject, Recipe) else subject.settings if subject else {}
        names = Names(entry.catalog, settings, versions)
        shown = {name: names[name] for name in entry.reads}
        if isinstance(subject, Recipe):
            shown = {recipe_key(name): recipe_value(subject, name, value) for name, value in shown.items()}
        return cls(entry, settings, versions, entry.outcome(settings, versions), shown)

    def undecided(self) -> str | None:
        """Why there is nothing to try with the installed versions."""
        if not self.entry.versions.hold(self.versions):
            return _does_not_hold(self.entry, self.versions)
        return None if self.outcome is not None else f"nothing is documented for {versions_text(self.versions)}"

    def check(self) -> None:
        """Raise `UserError` unless the settings break the entry."""
        if not self.entry.breaks(self.settings, self.versions):
            given = ", ".join(f"{name}: {plain(value)}" for name, value in self.shown.items())
            forbids = self.entry.forbids.text
            raise UserError(f"the settings do not break {self.entry.id}, which forbids {forbids}; here {given}")

    def proof(self, verdict: Verdict, **fields: Any) -> Proof:
        """With this verdict."""
        return Proof(self.entry.id, verdict, self.versions, self.shown, self.outcome, **fields)

    def judged(self, tried: str, raised: Raised | None) -> Proof:
        """What was done with the settings and what it raised, beside what is documented."""
        assert self.outcome is not None
        if raised is None and not self.outcome.raises:
            return self.proof("accepted silently, as documented", tried=tried)
        if raised is None:
            return self.proof("documentation and code disagree", tried=tried)
        if raised.is_documented_by(self.outcome):
            return self.proof("refused as documented", tried=tried, raised=raised)
        every = [e for e in self.entry.catalog.values() if e.breaks(self.settings, self.versions)]
        others = [e.id for e in every if raised.is_documented_by(e.outcome(self.settings, self.versions))]
        return self.proof("documentation and code disagree", tried=tried, raised=raised, others=tuple(others))


def _arguments(example: Construction) -> dict[str, Any]:
    base = _BASE if example.config.endswith("TransformerConfig") else {}
    return {**base, **example.arguments}


def _does_not_hold(entry: Entry, versions: Mapping[str, str]) -> str:
    outside = [
        f"{package} {versions[package]} ({spec})"
        for package, spec in entry.versions.ranges.items()
        if package in versions and not spec.contains(versions[package], prereleases=True)
    ]
    return f"does not hold for {', '.join(outside)}"


def _lacking(case: _Case, *, real_gpu: bool) -> str | None:
    """What is missing on this machine to have the entry's documented outcome."""
    if "transformer-engine" in case.entry.needs and "transformer-engine" not in case.versions:
        return "Transformer Engine is not installed"
    if "gpu" in case.entry.needs and not real_gpu:
        return "takes a real GPU (--mbmem-gpu)"
    if "cuda-build" in case.entry.needs and not has_cuda_build():
        return "torch is a CPU build"
    return None


def _lacking_on_host(case: _Case, subject: Recipe | Construction) -> str | None:
    """What is missing where only configurations can be made."""
    assert case.outcome is not None
    if isinstance(subject, Construction) or (case.outcome.raises and case.outcome.at == "configuration"):
        return None
    return "--mbmem-host has no GPU to build the model on" if has_cuda_build() else "torch is a CPU build"


def has_cuda_build() -> bool:
    """Whether the installed torch is a CUDA build."""
    try:
        find_torch()
    except UserError:
        return False
    return True


# Trying ---------------------------------------------------------------------------------------------------------------


class _NotAsked(Exception):
    """Megatron Core could not be asked."""


def make_all(launcher: Workers, examples: Mapping[str, Construction]) -> dict[str, CallResult]:
    """What `construct` says to examples of configuration classes, by id, in a call for each of their environments."""
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for id, example in examples.items():
        alike.setdefault(tuple(sorted(example.environment.items())), []).append(id)
    found: dict[str, CallResult] = {}
    for environment, ids in alike.items():
        calls = [{"config": examples[id].config, "arguments": _arguments(examples[id])} for id in ids]
        result = _without_gpu(launcher, _CONSTRUCT_ALL, {"examples": calls}, dict(environment))
        if result.failure is not None and len(ids) > 1:  # one of them ended the worker
            for id in ids:
                found |= make_all(launcher, {id: examples[id]})
            continue
        answers = [result] if result.failure is not None else [replace(result, value=one) for one in result.value]
        found |= zip(ids, answers, strict=True)
    return found


def _tried(launcher: Workers, subject: Recipe, case: _Case, ranks: Ranks) -> tuple[str, Raised | None]:
    """What was done with a recipe, and how it ended."""
    environment = launch.recipe_environment(subject)
    raised = _raised(_without_gpu(launcher, _CONFIGURE, {"recipe": subject.to_dict()}, environment))
    if raised is not None or isinstance(launcher, HostLauncher):
        return "its configurations were made", raised
    first, *others = _ranks(subject, ranks)
    ended: list[Raised] = []
    for some in filter(None, ([first], others)):
        calls = [(_ATTEMPT, {"recipe": subject.to_dict(), "rank": rank}) for rank in some]
        results = launcher.call_all(calls, environment, launcher.timeout)
        ended = [raised for raised in map(_raised, results) if raised is not None]
        if ended:
            break
    count = subject.training.steps
    steps = f"{count} step{'s' if count > 1 else ''}"
    tried = f"rank{'s' if others else ''} {', '.join(map(str, (first, *others)))} trained {steps}"
    assert case.outcome is not None
    if case.outcome.accepts and any(raised.type == "timeout" for raised in ended):
        raise _NotAsked(f"no end within {launcher.timeout:g} s")
    documented = [raised for raised in ended if raised.is_documented_by(case.outcome)]
    if not documented and (reasons := subject.not_yet()):  # what else it did says nothing
        raise _NotAsked(f"this package cannot run it yet: {'; '.join(reasons)}")
    return tried, next(iter([*documented, *ended]), None)


def _without_gpu(
    launcher: Workers, target: str, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> CallResult:
    """A call that no GPU has to be held for."""
    return Workers.call_all(launcher, [(target, arguments)], environment, launcher.timeout)[0]


def _ranks(recipe: Recipe, ranks: Ranks) -> list[int]:
    """Numbers of those to try, in turn; the ranks of a recipe that is impossible may have no coordinates."""
    try:
        return [rank.rank for rank in rank_choice.chosen(recipe, ranks)]
    except (ValueError, ArithmeticError, LookupError):
        return [0] if isinstance(ranks, str) else sorted(ranks)


def _raised(result: CallResult) -> Raised | None:
    """What ended a trial. Raises `_NotAsked` for what this package says, `MeasurementFailed` for a trial that broke."""
    if result.failure == "error":  # of the trial itself, as where Megatron has moved what it imports
        raise MeasurementFailed(f"Megatron Core could not be asked:\n{result.message}")
    if result.failure is not None:
        return Raised(result.failure, result.message, "run")
    if result.value["own"]:
        raise _NotAsked(result.value["own"])
    return None if result.value["raised"] is None else Raised(**result.value["raised"])
