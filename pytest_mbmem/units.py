"""Bytes and fractions as people write them: "2.5 GiB", "3%". Parse and print.

GiB is 2**30 bytes and GB is 10**9, as in IEC 80000-13. "KB" is refused because half of the world reads it as 1024.
"""

from __future__ import annotations

import re
from decimal import Decimal

from .errors import UserError

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {**_BINARY, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)")
_FRACTION = re.compile(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+) *(%?)")


def parse_bytes(value: object, source: str) -> int:
    """Bytes of a number with a unit ("2.5 GiB", "512 MiB", "1.2 GB", "100 B"), or of a plain int.

    A fraction of a byte is rounded to the nearest byte. Raises `UserError`, with `source` in front, for anything else,
    for a negative int, and for text without a unit.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match and match[2] in _UNITS:
        return round(Decimal(match[1]) * _UNITS[match[2]])
    raise UserError(
        f"{source}: {value!r} is not a size; write a number with one of the units {', '.join(_UNITS)} "
        "(as in '2.5 GiB'), or a whole number of bytes, 0 or more"
    )


def format_bytes(n: int, signed: bool = False) -> str:
    """Bytes in the largest binary unit that they fill: "2.50 GiB", "512 B"; with `signed` "+1.20 MiB"."""
    sign = "-" if n < 0 else "+" if signed else ""
    size = abs(n)
    unit, factor = "B", 1
    for next_unit, next_factor in _BINARY.items():
        # Compared as printed: 1048575 bytes are "1.00 MiB", not "1024.00 KiB".
        if round(size / next_factor, 2) >= 1:
            unit, factor = next_unit, next_factor
    return f"{sign}{size} B" if factor == 1 else f"{sign}{size / factor:.2f} {unit}"


def parse_fraction(value: object, source: str) -> float:
    """A fraction from 0 to 1, of a percentage ("3%", "0.5 %") or of a number below 1 (0.03, "0.03", 0).

    Raises `UserError`, with `source` in front, for anything else. A number of 1 and more is refused, because the one
    who writes a tolerance of 3 means 3%.
    """
    number: float | None = None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value) if 0 <= value < 1 else None
    elif isinstance(value, str) and (match := _FRACTION.fullmatch(value.strip())):
        amount = Decimal(match[1])
        if match[2] and amount <= 100:
            number = float(amount / 100)
        elif not match[2] and amount < 1:
            number = float(amount)
    if number is None:
        raise UserError(
            f"{source}: {value!r} is not a fraction; write a percentage from 0% to 100% (as in '3%'), "
            "or a number from 0 to below 1 (as in 0.03)"
        )
    return number


def format_fraction(fraction: float, signed: bool = False) -> str:
    """A fraction as a percentage with two decimals: "1.23%"; with `signed` "+1.23%"."""
    percent = round(fraction * 100, 2) + 0.0  # "+ 0.0" makes a plain zero of a negative one
    return f"{percent:+.2f}%" if signed else f"{percent:.2f}%"
