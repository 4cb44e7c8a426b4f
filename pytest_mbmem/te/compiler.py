"""A C++ compiler for Transformer Engine's extension: parses its headers once for all its files.

    python compiler.py HEADER FOLDER COMPILER ARGUMENT …

Nine tenths of the time of each of its some thirty files goes into the headers of torch that `csrc/common.h` includes.
This compiles that file into a precompiled header in FOLDER before the first source, with the source's own arguments
(GCC takes a precompiled header only with the same ones), and puts it in front of each source.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

OPTIMIZATION = "-O1"
"""In place of the -O3 that the extension's setup asks for, which takes half as long again. -O0 takes a tenth
less (the header 86 s of processor time instead of 92 s, activation.cpp 23 s instead of 25 s), but real GPUs' step
times are measured with it too."""


def command(header: Path, folder: Path, compiler: str, arguments: Sequence[str]) -> list[str]:
    """What to run in place of the compiler with these arguments."""
    optimized = [OPTIMIZATION if argument.startswith("-O") else argument for argument in arguments]
    source = next((Path(argument) for argument in arguments if argument.endswith(".cpp")), None)
    if source is None or "-c" not in arguments:  # the linker's turn
        return [compiler, *optimized]
    folder.mkdir(exist_ok=True)
    precompiled = folder / header.name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not precompiled.exists():
            arguments_of_header = _for_header(optimized, source)
            subprocess.run(
                [compiler, *arguments_of_header, "-w", "-x", "c++-header", str(header), "-o", f"{precompiled}.gch"],
                check=True,
            )
            precompiled.write_text(f'#include "{header}"\n')
    return [compiler, *optimized, "-include", str(precompiled), "-w"]


def _for_header(arguments: Sequence[str], source: Path) -> list[str]:
    """Without what says which file to read, which to write, and where to write its dependencies."""
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument in ("-o", "-MF"):
            next(rest)
        elif argument not in ("-c", "-MMD", "-MD", str(source)):
            kept.append(argument)
    return kept


if __name__ == "__main__":
    run = command(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    os.execvp(run[0], run)
