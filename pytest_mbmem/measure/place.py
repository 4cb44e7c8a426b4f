"""Where a worker is, for whoever watches it: a few bytes of memory that it shares with the launcher through a file.

Saying it is a copy of 64 bytes, with no call of the system, so that every phase can be said. Nothing is said in a
worker that nobody watches.
"""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

SIZE = 64

_shared: mmap.mmap | None = None


def make(path: Path) -> None:
    """In the launcher: the file of a worker that has not begun."""
    path.write_bytes(b" " * SIZE)


def read(path: Path) -> str:
    """In the launcher: what the worker said last; empty if nothing."""
    try:
        return path.read_bytes()[:SIZE].decode("ascii", "replace").strip()
    except OSError:
        return ""


def watched_in(path: str | None) -> None:
    """In the worker: say it in this file from now on."""
    global _shared
    if path is not None:
        with contextlib.suppress(OSError, ValueError), Path(path).open("r+b") as file:
            _shared = mmap.mmap(file.fileno(), SIZE)


def say(text: str) -> None:
    """In the worker: where it is, in ASCII."""
    if _shared is not None:
        _shared[:] = text.encode("ascii", "replace")[:SIZE].ljust(SIZE)


def is_watched() -> bool:
    """In the worker: whether somebody watches it."""
    return _shared is not None
