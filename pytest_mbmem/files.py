"""Files are read whole, and written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError


def read_bytes(path: Path) -> bytes:
    """The whole file, or what a pipe gives once. Raises `UserError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8 so that a reader sees the old file or the new one, never a part. Raises `OSError`."""
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():  # /dev/stdout and the like are written to, never replaced
        target.write_text(text, encoding="utf-8")
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def append_to(path: Path, text: str) -> None:
    """Add `text` as UTF-8 to the end of a file that others add to as well. Raises `OSError`."""
    with path.open("ab") as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def write_report(path: Path, text: str) -> None:
    """`write_atomically` for a file that the user named. Raises `UserError`."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
