"""The file of --mbmem-json, for other programs and for `mbmem report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_bytes
from .results import Results


def text(results: Results) -> str:
    """The whole file. ASCII alone, so that any test id can be written."""
    return json.dumps(results.to_json(), indent=1) + "\n"


def load(path: Path) -> Results:
    """Read what `text` wrote. Raises `UserError` naming the file if it is missing, damaged or something else."""
    return Results.from_json(parse(read_bytes(path), str(path)), str(path))


def parse(content: bytes, source: str) -> Any:
    """The data of a JSON file. Raises `UserError` naming `source` if there are none."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}: cannot be read as JSON ({error})") from None
