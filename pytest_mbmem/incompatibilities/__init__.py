"""Settings that exclude each other, as Megatron Core and its documents have them: refused before anything runs.

The constraints are data (catalog.yaml). Imports neither torch nor Megatron.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import IncompatibleSettings
from ..installed import versions_of
from .catalog import PACKAGES, Catalog, Entry, Judged, Outcome

if TYPE_CHECKING:
    from ..recipe import Recipe

__all__ = ["Catalog", "Entry", "Outcome", "broken", "catalog", "check", "installed"]


@functools.cache
def catalog() -> Catalog:
    """The constraints that this package knows."""
    return Catalog()


@functools.cache
def installed() -> Mapping[str, str]:
    """Versions of the packages that constraints depend on; those that are not installed are left out."""
    return versions_of(PACKAGES)


def broken(
    settings: Mapping[str, Any], versions: Mapping[str, str] | None = None, *, judged: Judged = "before"
) -> list[Entry]:
    """The constraints that settings break, by Megatron's own names (see `megatron_settings.settings`).

    Args:
        settings: name -> value; what is left out has Megatron's default.
        versions: of the packages. None: the installed ones.
        judged: "before", those that are refused; "built", those that only the built model can tell of (settings without
            effect); or "advice", what is good to know.
    """
    versions = installed() if versions is None else versions
    return [e for e in catalog().values() if e.judged == judged and e.breaks(settings, versions)]


def check(recipe: Recipe, source: str = "", versions: Mapping[str, str] | None = None) -> None:
    """Raise `IncompatibleSettings`, which names every constraint that the recipe breaks and the way out of each.

    `source` is what messages call the recipe ("": its own `origin`); `versions` as in `broken`.
    """
    from ..megatron_settings import settings
    from .explain import refusal_text

    versions = installed() if versions is None else versions
    found = settings(recipe)
    entries = broken(found, versions)
    if entries:
        text = refusal_text(recipe, source, found, entries, versions)
        raise IncompatibleSettings(text, tuple(entry.id for entry in entries))
