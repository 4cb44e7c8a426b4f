"""Files that the commands write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from .files import write_report
from .options import check_output, check_that_files_differ, check_that_inputs_stay


def check_outputs(paths: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Before anything takes time. Raises `UserError` for an option's path that cannot be written, or is another's.

    A path that is one of `inputs` is refused too.
    """
    for option, path in paths.items():
        if path is not None:
            check_output(path, option)
    check_that_files_differ(paths)
    check_that_inputs_stay(paths, inputs)


def write(path: Path, text: str) -> None:
    """Write the whole file, and say so."""
    write_report(path, text)
    print(f"written: {path}")
