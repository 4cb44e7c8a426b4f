"""The file of --mbmem-json, for other programs and for `mbmem report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from .results import Results


def text(results: Results) -> str:
    """The whole file. ASCII alone, so that any test id can be written."""
    return json.dumps(results.to_json(), indent=1) + "\n"


def load(path: Path) -> Results:
    """Read what `text` wrote. Raises `UserError` naming the file if it is missing, damaged or something else."""
    return Results.from_json(read(path), str(path))


def read(path: Path) -> Any:
    """The data of a JSON file. Raises `UserError` naming the file if there are none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from None
