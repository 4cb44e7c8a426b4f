"""Installs Transformer Engine beside the torch that is installed: `python -m pytest_mbmem.te.install`, or `make te`.

PyPI has Transformer Engine's kernels as a wheel, and its torch extension as source only, which wants the headers of a
CUDA toolkit. This takes the headers from pip packages, compiles the extension (C++ alone, no CUDA code) and keeps the
wheel in the user's cache folder: the next installation with the same versions takes seconds. Nothing is done where that
version is installed already.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
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
from ..virtual_gpu.build import cache_folder, find_torch, locked
from . import compiler
from .installation import OLDEST, find

VERSION = "2.20.2"
"""What is installed unless a version is named: the one that was tested most."""

_HEADERS = ("nvidia-cuda-cccl", "nvidia-cuda-crt")
"""pip packages with the headers that torch's own dependencies lack, in the toolkit's version."""

_TOOLS = ("pybind11", "ninja", "setuptools", "wheel", "nvidia-cudnn-frontend>=1.29")
"""pip packages that the extension is built with."""


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
    Returns what was done. Raises `UserError` where there is no CUDA build of torch or no C++ compiler, or where pip or
    the compiler fails.
    """
    if not re.fullmatch(r"\d+(\.\d+){1,2}", version) or Version(version) < Version(OLDEST):
        raise UserError(f"--version {version}: not a version from {OLDEST} on, as in {VERSION}")
    torch = find_torch()
    name = f"Transformer Engine {version} for torch {torch.version}"
    there = find()
    if there is not None and there.version == version and there.problem is None:
        return f"{name} is installed already"
    cuda = torch.cuda
    _pip(
        "install",
        "--no-deps",
        f"transformer-engine=={version}",
        f"transformer-engine-cu{cuda.split('.')[0]}=={version}",
    )
    wheels = (cache or cache_folder("transformer-engine")) / f"{version}-torch-{torch.version}-{_key(cuda)}"
    try:
        wheels.mkdir(parents=True, exist_ok=True)
        with locked(wheels / ".lock"):
            wheel = next(wheels.glob("*.whl"), None)
            done = "from the cached wheel"
            if wheel is None:
                wheel, done = _build(version, cuda, wheels), "built, and kept as the wheel"
            _pip("install", "--force-reinstall", "--no-deps", str(wheel))
            _pip("install", str(wheel))  # what it depends on
    except OSError as error:
        raise UserError(f"{error.filename or wheels}: {error.strerror or error}") from None
    find.cache_clear()
    importlib.invalidate_caches()
    there = find()
    if there is None or there.problem is not None:
        raise UserError(f"{name} was installed and cannot be used: {there.problem if there else 'it is not found'}")
    return f"{name} is installed, {done} {wheel}"


def _key(cuda: str) -> str:
    """Of what else goes into a wheel."""
    python = f"{sysconfig.get_config_var('SOABI')}"
    how = Path(compiler.__file__).read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(repr((python, cuda, how)).encode()).hexdigest()[:12]


def _build(version: str, cuda: str, wheels: Path) -> Path:
    """The wheel, in this folder; whole or not there at all."""
    _pip("install", *(f"{package}=={cuda}.*" for package in _HEADERS), *_TOOLS)
    compiler_path = shutil.which(os.environ.get("CXX") or "g++")
    if compiler_path is None:
        raise UserError("the extension of Transformer Engine needs a C++ compiler: install g++, or set CXX to one")
    with tempfile.TemporaryDirectory(prefix=".building-", dir=wheels) as name:
        folder = Path(name)
        _pip(
            "download",
            "--no-deps",
            "--no-build-isolation",
            "--no-binary",
            ":all:",
            "-d",
            name,
            f"transformer-engine-torch=={version}",
        )
        archive = next(folder.glob("*.tar.gz"))
        shutil.unpack_archive(archive, folder)
        source = next(path for path in folder.iterdir() if path.is_dir())
        wrapper = folder / "c++"
        run = (
            sys.executable,
            compiler.__file__,
            str(source / "csrc" / "common.h"),
            str(folder / "precompiled"),
            compiler_path,
        )
        wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(run)} "$@"\n')
        wrapper.chmod(0o755)
        environment = {
            "CXX": str(wrapper),
            "CPATH": os.pathsep.join(map(str, _include_folders())),
            "NVTE_FRAMEWORK": "pytorch",
            "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
            "NVTE_PYTORCH_FORCE_BUILD": "TRUE",  # no attempt to fetch a wheel from elsewhere
            "MAX_JOBS": os.environ.get("MAX_JOBS") or str(os.cpu_count()),
        }
        _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder / "wheel"), str(source), **environment)
        built = next((folder / "wheel").glob("*.whl"))
        return built.rename(wheels / built.name)


def _include_folders() -> list[Path]:
    """The headers in NVIDIA's pip packages."""
    root = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = sorted(root.glob("*/include"))
    return [*folders, *(path for folder in folders if (path := folder / "cccl").is_dir())]


def _pip(*arguments: str, **environment: str) -> None:
    """Run pip in this environment; `UserError` with the end of what it printed where it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if result.returncode:
        said = (result.stdout + result.stderr).strip()[-4000:]
        raise UserError(f"'{shlex.join(command[1:])}' failed:\n{said}")


if __name__ == "__main__":
    sys.exit(main())
