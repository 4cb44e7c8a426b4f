"""Whether Transformer Engine is installed, and whether what is installed fits the torch beside it; imports neither."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ..errors import UserError
from ..installed import versions_of
from ..virtual_gpu import elf
from ..virtual_gpu.build import Torch, find_torch, package_folder

if TYPE_CHECKING:
    from ..recipe import Recipe

OLDEST = "2.10"
"""The first version that recipes are measured with."""

COMMAND = "python -m pytest_mbmem.te.install"

_AGAIN = f"install it anew with '{COMMAND}', or uninstall it"

OTHER_PACKAGES = ("transformer-engine-cu12", "transformer-engine-cu13", "transformer-engine-torch")
"""That come with it from PyPI, in its version; one that was built from source as a whole has none of them."""

_KERNELS, _EXTENSION = "libtransformer_engine", "transformer_engine_torch"
"""How the names of its two shared objects begin."""

_OF_TORCH = re.compile(r"_ZNK?(2at|3c10|4c10d|5torch)\d")
"""Mangled names of functions in torch's namespaces."""

_OWN_BACKENDS = ("fused", "auto")
"""Of `training.attention_backend`: without an equivalent for memory."""

_OWN_SETTINGS = ("fp8", "fp4")
"""Of `megatron`: likewise."""


@dataclass(frozen=True)
class Installation:
    """An installed Transformer Engine."""

    version: str
    problem: str | None
    """Why it cannot be used, with what to do about it."""


@cache
def find() -> Installation | None:
    """The installed Transformer Engine, or None. Raises `UserError` without a CUDA build of torch."""
    version = versions_of(["transformer-engine"]).get("transformer-engine")
    if version is not None:
        return Installation(version, _problem(version, find_torch()))
    if (folder := package_folder("transformer_engine")) is None:
        return None
    return Installation("unknown", f"{folder} is there and the package transformer-engine is not: {_AGAIN}")


def check(recipe: Recipe, *, virtual: bool) -> None:
    """Raise `UserError` for a recipe that asks for another Transformer Engine than there is.

    Where none is installed, a virtual GPU has equivalents for memory of a part of it.
    """
    training = recipe.training
    if training.transformer_impl != "transformer_engine":
        return
    found = find()
    if found is not None:
        if found.problem is not None:
            raise UserError(f"training.transformer_impl: 'transformer_engine' cannot be had: {found.problem}")
        return
    needs = f"needs Transformer Engine, which is not installed: '{COMMAND}' does it"
    if not virtual:
        raise UserError(f"training.transformer_impl: 'transformer_engine' on a real GPU {needs}")
    asked = {f"megatron.{name}": recipe.megatron.get(name) for name in _OWN_SETTINGS}
    if training.attention_backend in _OWN_BACKENDS:
        asked["training.attention_backend"] = training.attention_backend
    for key, value in asked.items():
        if value:
            raise UserError(
                f"{key}: {value!r} {needs}; without it there are equivalents for memory, for the attention_backend "
                "unfused and flash, and none for FP8 and FP4"
            )


def problem() -> str:
    """What is wrong with an installed Transformer Engine, which Megatron Core imports; empty if nothing is known."""
    try:
        found = find()
    except UserError:  # no CUDA build of torch, which one on the host does not need
        return ""
    return (found and found.problem) or ""


def _problem(version: str, torch: Torch) -> str | None:
    if Version(version) < Version(OLDEST):
        return f"Transformer Engine {version} is installed, and recipes are measured from {OLDEST} on: {_AGAIN}"
    for name, other in versions_of(OTHER_PACKAGES).items():
        if other != version:
            return f"transformer-engine {version} and {name} {other} are installed, which do not match: {_AGAIN}"
    kernels, extensions = shared_objects(_KERNELS), shared_objects(_EXTENSION)
    for what, files in {"library of kernels": kernels, "extension for torch": extensions}.items():
        if not files:
            return f"Transformer Engine {version} is installed without its {what}: {_AGAIN}"
        if len(files) > 1:
            return f"{files[0]} and {files[1]} are both there, of which Transformer Engine takes neither: remove one"
    (library,), (extension,) = kernels, extensions
    try:
        wrong = _other_cuda(library, torch) or _other_python(extension) or _other_torch(extension, torch)
    except (OSError, ValueError) as error:
        wrong = str(error)
    return f"{wrong}: {_AGAIN}" if wrong else None


def shared_objects(prefix: str) -> list[Path]:
    """Where Transformer Engine itself looks for them: where its Python files are, else where packages are installed."""
    package = package_folder("transformer_engine")
    for root in filter(None, (package and package.parent, Path(sysconfig.get_paths()["purelib"]))):
        folders = (root, root / "transformer_engine", root / "transformer_engine" / "wheel_lib")
        if found := [path for folder in folders for path in sorted(folder.glob(f"{prefix}*.so"))]:
            return found
    return []


def _other_cuda(library: Path, torch: Torch) -> str | None:
    major = torch.cuda.split(".")[0]
    for name in elf.read_needs(library).libraries:
        match = re.fullmatch(r"libcudart\.so\.(\d+)", name)
        if match and match.group(1) != major:
            return f"{library} was built for CUDA {match.group(1)}, and torch {torch.version} for CUDA {torch.cuda}"
    return None


def _other_python(extension: Path) -> str | None:
    if extension.name.removeprefix(_EXTENSION) in EXTENSION_SUFFIXES:
        return None
    return f"{extension} was built for another Python than {sysconfig.get_python_version()}"


def _other_torch(extension: Path, torch: Torch) -> str | None:
    """Whether the extension calls functions of torch that this torch does not have."""
    known: set[str] = set()
    for library in (torch.folder / "lib").glob("lib*.so"):
        known |= elf.read_names(library)  # what one of them wants, another defines
    wanted = (symbol.symbol for symbol in elf.read_needs(extension).symbols)
    missing = sorted(name for name in wanted if _OF_TORCH.match(name) and name not in known)
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{extension} was built for another torch than {torch.version}, which lacks {missing[0]}{more}"
