"""The reader of ELF tables sees what the linker wrote."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from pytest_mbmem.virtual_gpu.elf import Wanted, read_names, read_needs

compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs a C compiler")


def shared_library(folder, name, source, *arguments):
    (folder / "source.c").write_text(source)
    path = folder / name
    command = [compiler, "-shared", "-fPIC", str(folder / "source.c"), "-o", str(path), f"-Wl,-soname,{name}"]
    subprocess.run([*command, *arguments], check=True)
    return path


@needs_compiler
def test_libraries_symbols_and_versions_are_read(tmp_path):
    script = tmp_path / "versions"
    script.write_text("LIB_1 { global: old; };\nLIB_2 { global: *; };\n")
    provider = shared_library(
        tmp_path,
        "libprovider.so.7",
        "int old(void){return 1;} int new(void){return 2;}",
        f"-Wl,--version-script={script}",
    )
    plain = shared_library(tmp_path, "libplain.so", "int bare(void){return 3;}")
    user = shared_library(
        tmp_path,
        "libuser.so",
        "int old(void); int new(void); int bare(void); int user(void){return old() + new() + bare();}",
        str(provider),
        str(plain),
    )
    needs = read_needs(user)
    assert {"libprovider.so.7", "libplain.so"} <= set(needs.libraries)
    assert {
        Wanted("old", "libprovider.so.7", "LIB_1"),
        Wanted("new", "libprovider.so.7", "LIB_2"),
        Wanted("bare"),
    } <= set(needs.symbols)
    assert "user" not in {wanted.symbol for wanted in needs.symbols}  # it defines that itself
    assert {"old", "new", "bare", "user"} <= read_names(user)
    assert "user" not in read_names(provider)


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01\x01" + bytes(200)])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "file.so").write_bytes(content)
    with pytest.raises(ValueError, match=r"file\.so: not a 64-bit little-endian ELF file"):
        read_needs(tmp_path / "file.so")
    with pytest.raises(ValueError, match=r"file\.so: not a 64-bit little-endian ELF file"):
        read_names(tmp_path / "file.so")


@needs_compiler
def test_a_cut_off_file_is_refused(tmp_path):
    path = shared_library(tmp_path, "libwhole.so", 'int puts(const char *); int f(void){return puts("");}')
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(ValueError, match=r"libwhole\.so: "):
        read_needs(path)
