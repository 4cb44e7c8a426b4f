"""In a worker: writes PyTorch's memory snapshots, which `python -m torch.cuda._memory_viz` reads."""

from __future__ import annotations

import glob
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..garbage import no_collections


def write_snapshot(snapshot: Mapping[str, Any], file: Path) -> None:
    """Write it whole or not at all. Raises `OSError`.

    Removes what a process that was killed meanwhile has left of it.
    """
    for left in file.parent.glob(f".{glob.escape(file.name)}.*.part"):
        if not Path("/proc", left.suffixes[-2].removeprefix(".")).exists():
            left.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with no_collections(), part.open("wb") as stream:
            pickle.dump(snapshot, stream)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def problem_of(error: OSError, file: Path) -> str:
    """Why the file could not be written."""
    return f"{file}: cannot be written ({error.strerror or error})"


def run_and_write(file: str, recipe: dict[str, Any], rank: int) -> str | None:
    """Run a recipe's rank as it is measured, and leave its snapshot in the file. Returns why there is none, or None."""
    from .worker import measure_rank

    try:
        measured = measure_rank(recipe, rank, {}, 1, snapshot=file)
    except OSError as error:
        return problem_of(error, Path(file))
    refused = measured["rank"] is None
    return f"rank {rank} did not run again: {measured['failure']['message']}" if refused else None
