"""Versions of installed packages, without importing them."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """By name; packages that are not installed are left out."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
