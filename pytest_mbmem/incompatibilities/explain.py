"""Constraints in words: of a recipe that breaks some, of one entry, and the table of all."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..labels import setting_names
from ..megatron_settings import KEYS, settings
from ..validation import nearest
from . import broken, catalog
from .catalog import Catalog, Entry, Judged, Outcome, Stage

if TYPE_CHECKING:
    from ..recipe import Recipe

_WIDTH = 110
_FEW = 4  # settings that are all shown


def refusal_text(
    recipe: Recipe,
    source: str,
    found: Mapping[str, Any],
    entries: Sequence[Entry],
    versions: Mapping[str, str],
) -> str:
    """What is wrong with a recipe whose settings break the entries: each with its values, reason and way out."""
    parts = [f"{source or recipe.origin[0]}: incompatible settings: {', '.join(entry.id for entry in entries)}"]
    for entry in entries:
        outcome = entry.outcome(found, versions)
        rows = [("here", ", ".join(_here(recipe, entry, found))), ("why", entry.why), ("instead", entry.instead)]
        rows += [("Megatron", _outcome_text(outcome))] if outcome is not None else []
        parts += ["", entry.id, *_rows(rows), f"  see mbmem explain {entry.id}"]
    return "\n".join(parts)


def accepted_text(recipe: Recipe, versions: Mapping[str, str]) -> str:
    """That a recipe breaks nothing."""
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    return f"{recipe.origin[0]}: breaks none of the documented constraints ({packages or 'of any version'})"


def notes_text(recipe: Recipe, versions: Mapping[str, str]) -> str:
    """What is good to know of a recipe, whether it is refused or not; empty if there is nothing."""
    found, known = settings(recipe), catalog().defaults
    rows = [
        ("a measurement tells", f"{entry.id}: {entry.why} {entry.instead}")
        for entry in broken(found, versions, judged="built")
    ]
    rows += [
        ("good to know", f"{entry.id}: {entry.why} {entry.instead}")
        for entry in broken(found, versions, judged="advice")
    ]
    if not catalog().documented.hold(versions):
        rows.append(("not documented", f"megatron-core {versions['megatron-core']}; known are {catalog().documented}"))
    rows += [("not measured yet", reason) for reason in recipe.not_yet()]
    rows += [
        ("not judged", f"megatron.{name}: no constraint asks for it") for name in recipe.megatron if name not in known
    ]
    return "\n".join(_rows(rows))


def unknown_text(recipe: Recipe) -> str:
    """The settings of `recipe.megatron` that the installed Megatron Core does not have; empty if it has all."""
    known = setting_names()
    rows = [
        ("unknown", f"megatron.{name}: the installed Megatron Core has no such setting{nearest(name, known)}")
        for name in recipe.megatron
        if name not in known
    ]
    return "\n".join(_rows(rows))


def _here(recipe: Recipe, entry: Entry, found: Mapping[str, Any]) -> Iterable[str]:
    """The values that break the entry, by the recipe's own keys."""
    defaults, lines = entry.catalog.defaults, recipe.origin[1]
    values = {name: found.get(name, defaults[name]) for name in entry.reads}
    for name, value in values.items():
        if len(values) > _FEW and value == defaults[name]:
            continue
        key = recipe_key(name)
        note = f" (line {lines[key]})" if key in lines else ""
        if key == f"megatron.{name}" and name in found and name not in recipe.megatron:
            note = " (set by this package)"
        own = recipe_value(recipe, name, value)
        yield f"{key}: {plain(value if own is None else own)}{note}"


def recipe_key(name: str) -> str:
    """Where a recipe states a setting of Megatron's."""
    return KEYS.get(name) or (f"environment.{name}" if name.isupper() else f"megatron.{name}")


def recipe_value(recipe: Recipe, name: str, value: Any) -> Any:
    """A setting's value as the recipe has it, which may have one key for several of Megatron's settings."""
    try:
        return attrgetter(KEYS[name])(recipe)
    except (KeyError, AttributeError):  # a setting of recipe.megatron, or a part that is not there
        return value


def plain(value: Any) -> str:
    """A value as YAML has it; a part of a recipe in short."""
    return value if isinstance(value, str) and value else json.dumps(value, default=lambda part: {"...": "..."})


def _outcome_text(outcome: Outcome) -> str:
    if not outcome.raises:
        return f"accepts it silently: {outcome.accepts}"
    where = {
        "configuration": "",
        "model": " when the model is built",
        "capture": " when a graph is captured",
        "run": " in the middle of a step",
    }[outcome.at]
    return f"raises {outcome.raises}{where}: {outcome.message or '(without a message)'}"


def list_text(catalog: Catalog) -> str:
    """All ids, each with why."""
    width = max(map(len, catalog))
    return "\n".join(f"{entry.id:<{width}}  {entry.why}" for entry in catalog.values())


def entry_text(entry: Entry) -> str:
    """All that is known of a constraint."""
    rows = [
        ("why", entry.why),
        ("instead", entry.instead),
        *[(_versions_of(outcome), _outcome_text(outcome)) for outcome in entry.outcomes],
        ("holds for", str(entry.versions) or "all versions"),
        ("source", entry.source),
        ("forbids", entry.forbids.text),
        *[("with", f"{name} = {entry.catalog.terms[name].text}") for name in _terms(entry)],
    ]
    if entry.judged == "built":
        rows.append(("judged", "by the built model: a measurement says what has no effect"))
    if entry.judged == "advice":
        rows.append(("judged", "not at all: it is good to know"))
    if entry.needs:
        rows.append(("to prove", f"needs {', '.join(entry.needs)}"))
    return "\n".join([entry.id, *_rows(rows)])


def _terms(entry: Entry) -> list[str]:
    found: list[str] = []
    waiting = list(entry.forbids.names)
    while waiting:
        name = waiting.pop(0)
        if name in entry.catalog.terms and name not in found:
            found.append(name)
            waiting += entry.catalog.terms[name].names
    return found


def _versions_of(outcome: Outcome) -> str:
    conditions = [str(outcome.versions) or "Megatron"]
    if outcome.condition is not None:
        conditions.append(f"if {outcome.condition.text}")
    return ", ".join(conditions)


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(name) for name, _ in rows if len(name) <= 24), default=0)
    lines = []
    for name, text in rows:
        label = f"  {name:<{width}}  "
        wrapped = textwrap.wrap(text, _WIDTH - len(label), break_on_hyphens=False, break_long_words=False) or [""]
        lines.append(f"{label}{wrapped[0]}")
        lines += [" " * len(label) + more for more in wrapped[1:]]
    return lines


def markdown_table(catalog: Catalog) -> str:
    """The constraints as a table in Markdown, for people who read and do not run."""
    lines = ["| id | what excludes each other | Megatron Core | instead |", "|---|---|---|---|"]
    for entry in catalog.values():
        short = (f"`{o.raises}`{_AT[o.at]}" if o.raises else "accepts it" for o in entry.outcomes)
        does = f"{' or '.join(dict.fromkeys(short))}{_JUDGED[entry.judged]}"
        cells = (f"`{entry.id}`", entry.why, does, entry.instead)
        lines.append(f"| {' | '.join(text.replace('|', '&#124;') for text in cells)} |")
    return "\n".join(lines)


_AT: Mapping[Stage, str] = {"configuration": "", "model": " (model)", "capture": " (capture)", "run": " (run)"}

_JUDGED: Mapping[Judged, str] = {"before": "", "built": "; a verdict of the run", "advice": "; good to know"}


BEGIN, END = "<!-- constraints: begin -->", "<!-- constraints: end -->"


def with_table(text: str, catalog: Catalog) -> str:
    """A document with the table of constraints between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{markdown_table(catalog)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    document = Path(sys.argv[1])
    document.write_text(with_table(document.read_text(encoding="utf-8"), catalog()), encoding="utf-8")
