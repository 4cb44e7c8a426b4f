"""Files that the commands write."""

from __future__ import annotations

from pathlib import Path

from .errors import UserError
from .files import write_report


def check_output(path: Path | None, option: str) -> None:
    """Before anything takes time. Raises `UserError` for what can hold no file."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"{option}: the folder {path.parent} does not exist")


def check_outputs(paths: dict[str, Path | None]) -> None:
    """The same for each option's path, which must differ."""
    for option, path in paths.items():
        check_output(path, option)
        for other, same in paths.items():
            if other != option and path is not None and same is not None and path.absolute() == same.absolute():
                raise UserError(f"{option} and {other} name the same file: {path}")


def write(path: Path, text: str) -> None:
    """Write the whole file, and say so."""
    write_report(path, text)
    print(f"written: {path}")
