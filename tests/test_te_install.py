"""Installing Transformer Engine: what pip is told, what is kept, and what is said when it cannot be built."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.te import compiler, install
from pytest_mbmem.te.installation import Installation
from pytest_mbmem.virtual_gpu.build import Torch

VERSION = "2.14.0"
WHEEL = f"transformer_engine_torch-{VERSION}-cp311-cp311-linux_x86_64.whl"


class Pip:
    """In place of pip: makes the files that it would, and keeps its commands and their environment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Installation | None = None) -> None:
        self.commands: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.output = ""  # of a build that fails
        self.packages: dict[str, str] = {}
        self.found = before
        monkeypatch.setattr(install.subprocess, "run", self.run)
        monkeypatch.setattr(install, "find", self)
        monkeypatch.setattr(install, "find_torch", lambda: Torch(Path("torch"), "2.14.1+cu130", "13.0"))
        monkeypatch.setattr(
            install, "versions_of", lambda names: {n: self.packages[n] for n in {*names} & {*self.packages}}
        )

    def __call__(self) -> Installation | None:
        return self.found

    def cache_clear(self) -> None:
        self.found = Installation(VERSION, None)

    def run(self, command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        self.commands.append(shlex.join(command[4:]))
        self.environments.append(env)
        if command[4] == "download":
            folder = Path(command[command.index("-d") + 1])
            header = folder / "common.h"
            header.write_text("")
            with tarfile.open(folder / f"transformer_engine_torch-{VERSION}.tar.gz", "w:gz") as archive:
                archive.add(header, f"transformer_engine_torch-{VERSION}/csrc/common.h")
        if command[4] == "wheel":
            if self.output:
                return subprocess.CompletedProcess(command, 1, self.output, "")
            assert Path(env["CXX"]).read_text().startswith("#!/bin/sh\n")
            folder = Path(command[command.index("-w") + 1])
            folder.mkdir()
            (folder / WHEEL).write_text("")
        return subprocess.CompletedProcess(command, 0, "", "")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("version", ["2.9.0", "1.13.0", "2", "2.20.2+cu13", "main", ""])
def test_a_version_must_be_one_that_recipes_are_measured_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    pip = Pip(monkeypatch)
    with pytest.raises(UserError, match=r"^--version .*: not a version from 2\.10 on, as in 2\.\d+\.\d+$"):
        install.install(version, tmp_path)
    assert pip.commands == []
    assert names(tmp_path) == []


def test_what_is_installed_already_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch, Installation(VERSION, None))
    assert (
        install.install(VERSION, tmp_path)
        == f"Transformer Engine {VERSION} for torch 2.14.1+cu130 is installed already"
    )
    assert pip.commands == []


@pytest.mark.parametrize(
    "before",
    [None, Installation(VERSION, "is damaged"), Installation("2.10.0", None)],
    ids=["none", "damaged", "older"],
)
def test_the_extension_is_built_before_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: Installation | None
) -> None:
    pip = Pip(monkeypatch, before)
    said = install.install(VERSION, tmp_path)
    (wheel,) = tmp_path.rglob("*.whl")
    assert (
        said
        == f"Transformer Engine {VERSION} for torch 2.14.1+cu130 is installed, built, and kept as the wheel {wheel}"
    )
    assert names(tmp_path) == [".lock", WHEEL]
    assert [command.split()[0] for command in pip.commands] == ["install", "download", "wheel", "install", "install"]
    tools, download, build, replace, complete = pip.commands
    assert "nvidia-cuda-cccl==13.0.*" in tools
    assert f"transformer-engine-torch=={VERSION}" in download
    wanted = f"transformer-engine=={VERSION} transformer-engine-cu13=={VERSION} {wheel}"
    assert replace == f"install --force-reinstall --no-deps {wanted}"
    assert complete == f"install {wanted}"
    assert pip.environments[2]["NVTE_PYTORCH_FORCE_BUILD"] == "TRUE"
    assert "--no-build-isolation" in build  # against the torch that is installed


def test_the_wheel_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    install.install(VERSION, tmp_path)
    pip.found, pip.commands = None, []
    (wheel,) = tmp_path.rglob("*.whl")
    assert install.install(VERSION, tmp_path).endswith(f"is installed, from the cached wheel {wheel}")
    assert [command.split()[0] for command in pip.commands] == ["install", "install"]


def test_another_torch_has_a_wheel_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    for version in ("2.14.1+cu130", "2.15.0+cu130"):
        pip.found = None
        monkeypatch.setattr(install, "find_torch", lambda version=version: Torch(Path("torch"), version, "13.0"))
        assert "is installed, built," in install.install(VERSION, tmp_path)


def test_kernels_for_another_cuda_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch, Installation(VERSION, "was built for CUDA 12"))
    pip.packages = {"transformer-engine-cu12": VERSION, "transformer-engine-torch": VERSION}
    install.install(VERSION, tmp_path)
    assert pip.commands[3] == "uninstall --yes transformer-engine-cu12"


def test_what_a_killed_build_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    install.install(VERSION, tmp_path)
    (wheel,) = tmp_path.rglob("*.whl")
    wheel.unlink()
    (wheel.parent / ".building-1").mkdir()
    (wheel.parent / ".building-1" / "common.h.gch").write_text("")
    pip.found = None
    install.install(VERSION, tmp_path)
    assert names(tmp_path) == [".lock", WHEEL]


def test_a_build_that_fails_says_why_and_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch, Installation("2.20.2", None))
    pip.output = "\n".join(
        ["Processing csrc", *["  a line of ninja"] * 500, "  csrc/cast.cpp:7:3: error: 'at::Gone' was not declared"]
    )
    with pytest.raises(UserError, match=r"failed:\ncsrc/cast\.cpp:7:3: error: 'at::Gone' was not declared$"):
        install.install(VERSION, tmp_path)
    assert [command.split()[0] for command in pip.commands] == ["install", "download", "wheel"]
    assert not any(f"transformer-engine=={VERSION}" in command for command in pip.commands)
    assert names(tmp_path) == [".lock"]


def test_an_installation_that_cannot_be_used_is_no_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(pip, "cache_clear", lambda: setattr(pip, "found", Installation(VERSION, "it is damaged")))
    with pytest.raises(UserError, match="was installed and cannot be used: it is damaged"):
        install.install(VERSION, tmp_path)


def test_other_cuda_versions_have_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setattr(install, "find_torch", lambda: Torch(Path("torch"), "2.14.1+cu118", "11.8"))
    with pytest.raises(UserError, match=r"torch is a build for CUDA 11\.8: Transformer Engine has kernels for 12, 13"):
        install.install(VERSION, tmp_path)
    assert pip.commands == []


@pytest.mark.parametrize(
    ("cxx", "said"), [("", r"looked for \$CXX, g\+\+, "), ("no-such -m64", "CXX=no-such -m64 is none")]
)
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str, said: str) -> None:
    pip = Pip(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(UserError, match=rf"needs a C\+\+ compiler \({said}"):
        install.install(VERSION, tmp_path)
    assert pip.commands == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Pip(monkeypatch)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/.*: Not a directory"):
        install.install(VERSION, tmp_path / "file")


def test_the_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Pip(monkeypatch, Installation(VERSION, None))
    assert install.main(["--version", "2.9.0"]) == 1
    assert capsys.readouterr().err == "transformer-engine: --version 2.9.0: not a version from 2.10 on, as in 2.20.2\n"
    assert install.main(["--version", VERSION]) == 0
    assert capsys.readouterr().out.endswith("is installed already\n")


# The compiler's wrapper -----------------------------------------------------------------------------------------------


@pytest.fixture
def compile_file(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Compiles a file through the wrapper, whose header defines MADE."""
    try:
        cxx = install._find_compiler()
    except UserError as error:
        pytest.skip(str(error))
    header = tmp_path / "common.h"
    header.write_text("#define MADE 42\n")

    def run(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "a.cpp").write_text(source)
        command = [sys.executable, compiler.__file__, str(header), str(tmp_path / "precompiled"), *cxx]
        given = ["-MMD", "-MF", "a.d", "-c", str(tmp_path / "a.cpp"), "-o", str(tmp_path / "a.o"), "-O3", *arguments]
        return subprocess.run([*command, *given], cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_sources_get_the_precompiled_header(
    tmp_path: Path, compile_file: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    for _ in range(2):  # the second time it is there
        assert compile_file("int made() { return MADE; }\n").returncode == 0
        assert (tmp_path / "a.o").stat().st_size > 0
    assert (tmp_path / "precompiled" / "common.h.gch").stat().st_size > 0


def test_a_source_that_does_not_compile_fails(compile_file: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = compile_file("int made() { return GONE; }\n")
    assert result.returncode != 0
    assert "GONE" in result.stderr


def test_only_sources_get_it_and_all_get_the_optimization(tmp_path: Path) -> None:
    link = compiler.command(
        tmp_path / "common.h", tmp_path / "precompiled", "g++", ["-O3", "-shared", "a.o", "-o", "a.so"]
    )
    assert link == ["g++", compiler.OPTIMIZATION, "-shared", "a.o", "-o", "a.so"]
    assert not (tmp_path / "precompiled").exists()
