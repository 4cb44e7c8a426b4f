"""Recipes of tests as nested mappings of which one stands on another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, mapping by mapping."""
    both = {key: merged(base[key], over[key]) for key in base.keys() & over.keys() if isinstance(base[key], dict)}
    return {**base, **over, **both}
