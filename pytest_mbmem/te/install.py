"""Installs Transformer Engine beside the torch that is installed: `python -m pytest_mbmem.te.install`, or `make te`.

PyPI has Transformer Engine's kernels as a wheel, and its torch extension as source only, which wants the headers of a
CUDA toolkit. This takes the headers from pip packages, compiles the extension (C++ alone, no CUDA code) and keeps the
wheel in the user's cache folder: the next installation with the same versions takes seconds. Nothing is done where that
version is installed already and can be used; where it cannot be built, what was installed before stays as it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import Version

from ..errors import UserError
from ..installed import versions_of
from ..virtual_gpu.build import Torch, cache_folder, find_torch, locked
from . import compiler
from .installation import OLDEST, OTHER_PACKAGES, find

VERSION = "2.20.2"
"""What is installed unless a version is named: the one that was tested most."""

_HEADERS = {"12": ("nvidia-cuda-cccl-cu12", "nvidia-cuda-nvcc-cu12"), "13": ("nvidia-cuda-cccl", "nvidia-cuda-crt")}
"""By CUDA's major version: pip packages with the headers that torch's own dependencies lack, in the toolkit's
version."""

_TOOLS = ("pybind11", "ninja", "setuptools", "wheel", "nvidia-cudnn-frontend>=1.29")
"""pip packages that the extension is built with."""

_MOST_LINES = 20
"""Of what a failed command printed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit status: 0 when that version is installed then, else 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m pytest_mbmem.te.install", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--version", default=VERSION, help=f"of Transformer Engine, from {OLDEST} on ({VERSION})")
    options = parser.parse_args(arguments)
    try:
        print(install(options.version))
    except UserError as error:
        print(f"transformer-engine: {error}", file=sys.stderr)
        return 1
    return 0


def install(version: str, cache: Path | None = None) -> str:
    """Have this version installed in the running Python's environment, with the extension built for its torch.

    `cache` defaults to `$XDG_CACHE_HOME/pytest-mbmem/transformer-engine` or `~/.cache/pytest-mbmem/transformer-engine`.
    Returns what was done. Raises `UserError` for a version before `OLDEST`, where there is no CUDA build of torch or no
    C++ compiler, and where pip or the compiler fails.
    """
    if not re.fullmatch(r"\d+(\.\d+){1,2}", version) or Version(version) < Version(OLDEST):
        raise UserError(f"--version {version}: not a version from {OLDEST} on, as in {VERSION}")
    torch = find_torch()
    name = f"Transformer Engine {version} for torch {torch.version}"
    there = find()
    if there is not None and there.version == version and there.problem is None:
        return f"{name} is installed already"
    wheels = (cache or cache_folder("transformer-engine")) / _folder_name(version, torch)
    try:
        wheels.mkdir(parents=True, exist_ok=True)
        with locked(wheels / ".lock"):
            wheel = next(wheels.glob("*.whl"), None)
            done = "from the cached wheel"
            if wheel is None:
                print(f"building the extension of {name}: some ten minutes on two cores", flush=True)
                wheel, done = _build(version, torch.cuda, wheels), "built, and kept as the wheel"
            _install(version, torch.cuda, wheel)
    except OSError as error:
        raise UserError(f"{error.filename or wheels}: {error.strerror or error}") from None
    find.cache_clear()
    importlib.invalidate_caches()
    there = find()
    if there is None or there.problem is not None:
        raise UserError(f"{name} was installed and cannot be used: {there.problem if there else 'it is not found'}")
    return f"{name} is installed, {done} {wheel}"


def _folder_name(version: str, torch: Torch) -> str:
    """Of everything that a wheel fits to."""
    return f"{version}-torch-{torch.version}-cuda-{torch.cuda}-{sysconfig.get_config_var('SOABI')}"


def _install(version: str, cuda: str, wheel: Path) -> None:
    kernels = f"transformer-engine-cu{cuda.split('.')[0]}"
    if others := versions_of(set(OTHER_PACKAGES) - {kernels, "transformer-engine-torch"}):
        _pip("uninstall", "--yes", *others)  # the library for another CUDA has the same place
    wanted = (f"transformer-engine=={version}", f"{kernels}=={version}", str(wheel))
    _pip("install", "--force-reinstall", "--no-deps", *wanted)  # also where one of the three is there, but damaged
    _pip("install", *wanted)  # what they depend on


def _build(version: str, cuda: str, wheels: Path) -> Path:
    """The wheel, in this folder; whole or not there at all."""
    for leftover in wheels.glob(".building-*"):  # of a killed process: whoever builds holds the lock
        shutil.rmtree(leftover)
    cxx = _find_compiler()
    packages = _HEADERS.get(cuda.split(".")[0])
    if packages is None:
        raise UserError(f"torch is a build for CUDA {cuda}: Transformer Engine has kernels for {', '.join(_HEADERS)}")
    _pip("install", *(f"{package}=={cuda}.*" for package in packages), *_TOOLS)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=wheels) as name:
        folder = Path(name)
        package = "transformer-engine-torch"
        only_source = ("--no-deps", "--no-build-isolation", "--no-binary", package)
        _pip("download", *only_source, "-d", name, f"{package}=={version}")
        shutil.unpack_archive(next(folder.glob("*.tar.gz")), folder)
        source = next(path for path in folder.iterdir() if path.is_dir())
        wrapper = folder / "c++"
        header = source / "csrc" / "common.h"
        run = (sys.executable, compiler.__file__, str(header), str(folder / "precompiled"), *cxx)
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(run)} "$@"\n')
        wrapper.chmod(0o755)
        environment = {
            "CXX": str(wrapper),
            "CPATH": os.pathsep.join(map(str, _include_folders())),
            "NVTE_FRAMEWORK": "pytorch",
            "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # no attempt to fetch a wheel from elsewhere
            "MAX_JOBS": os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0))),
        }
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheel"), str(source), **environment)
        built = next((folder / "wheel").glob("*.whl"))
        return built.rename(wheels / built.name)


def _find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, g++, c++ or clang++."""
    own = shlex.split(os.environ.get("CXX", ""))
    for command in [own] if own else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(command[0]) is not None:
            return command
    looked = f"CXX={shlex.join(own)} is none" if own else "looked for $CXX, g++, c++, clang++: install g++"
    raise UserError(f"the extension of Transformer Engine needs a C++ compiler ({looked})")


def _include_folders() -> list[Path]:
    """The headers in NVIDIA's pip packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = map(Path, spec.submodule_search_locations or [] if spec else [])
    folders = [folder for root in roots for folder in sorted(root.glob("*/include"))]
    return [*folders, *(path for folder in folders if (path := folder / "cccl").is_dir())]


def _pip(*arguments: str, **environment: str) -> None:
    """Run pip in this environment; `UserError` with what it said of errors where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = (result.stdout + result.stderr).strip().splitlines()
        errors = [line.strip() for line in lines if re.search(r"\berror\b|^fatal\b", line, re.I)]
        said = "\n".join((errors or lines)[:_MOST_LINES])
        raise UserError(f"'{shlex.join(command[1:])}' failed:\n{said}")


if __name__ == "__main__":
    sys.exit(main())
