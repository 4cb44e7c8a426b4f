"""Whether Transformer Engine is installed, and whether what is installed fits the torch beside it; imports neither."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

from ..installed import versions_of
from ..virtual_gpu import elf
from ..virtual_gpu.build import Torch, find_torch, package_folder

OLDEST = "2.10"
"""The first version that recipes are measured with."""

_OF_TORCH = re.compile(r"_ZNK?(2at|3c10|4c10d|5torch)\d")
"""Mangled names of functions in torch's namespaces."""


@dataclass(frozen=True)
class Installation:
    """An installed Transformer Engine."""

    version: str
    problem: str | None
    """Why it cannot be used, with what to do about it."""


@cache
def find() -> Installation | None:
    """The installed Transformer Engine, or None. Raises `UserError` without a CUDA build of torch."""
    torch = find_torch()
    version = versions_of(["transformer-engine"]).get("transformer-engine")
    return None if version is None else Installation(version, _problem(version, torch))


def _problem(version: str, torch: Torch) -> str | None:
    again = "install it anew with 'python -m pytest_mbmem.te.install', or as NVIDIA's documentation says"
    if Version(version) < Version(OLDEST):
        return f"Transformer Engine {version} is installed, and recipes are measured from {OLDEST} on: {again}"
    kernels = f"transformer-engine-cu{torch.cuda.split('.')[0]}"
    parts = versions_of([kernels, "transformer-engine-torch"])  # of pip's; one built from source has none
    for name, other in parts.items():
        if other != version:
            return f"transformer-engine {version} and {name} {other} are installed, which do not match: {again}"
    extensions, libraries = _shared_objects("transformer_engine_torch"), _shared_objects("libtransformer_engine")
    if not libraries:
        return (
            f"Transformer Engine {version} is installed without its library for CUDA {torch.cuda} ({kernels}): {again}"
        )
    if not extensions:
        return f"Transformer Engine {version} is installed without its extension for torch: {again}"
    if missing := _missing_in_torch(extensions[0], torch):
        return (
            f"{extensions[0]} was built for another torch than {torch.version}, which lacks {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}: {again}"
        )
    return None


def _shared_objects(prefix: str) -> list[Path]:
    """Where Transformer Engine itself looks for them."""
    package = package_folder("transformer_engine")
    folders = [package.parent, package, package / "wheel_lib"] if package else []
    return [path for folder in folders for path in sorted(folder.glob(f"{prefix}*.so"))]


def _missing_in_torch(extension: Path, torch: Torch) -> list[str]:
    """Functions of torch that the extension calls and this torch does not have."""
    known: set[str] = set()
    for library in (torch.folder / "lib").glob("lib*.so"):
        known |= elf.read_names(library)  # what one of them wants, another defines
    wanted = (symbol.symbol for symbol in elf.read_needs(extension).symbols)
    return sorted(name for name in wanted if _OF_TORCH.match(name) and name not in known)
