"""Bytes, fractions, rates and times as people write them: "2.5 GiB", "3%", "400 TFLOP/s". Parse and print.

GiB is 2**30 bytes and GB is 10**9, as in IEC 80000-13. "KB" is refused because half of the world reads it as 1024.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from .errors import UserError

RateUnit = Literal["FLOP/s", "tokens/s"]

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {**_BINARY, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)")
_RATES: Mapping[RateUnit, Mapping[str, int]] = {  # the smallest first
    "FLOP/s": {"MFLOP/s": 10**6, "GFLOP/s": 10**9, "TFLOP/s": 10**12, "PFLOP/s": 10**15},
    "tokens/s": {"tokens/s": 1, "k tokens/s": 10**3},
}
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z][A-Za-z ]*/s)")
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


@dataclass(frozen=True)
class Rate:
    """So many FLOPs or tokens in a second."""

    amount: float
    unit: RateUnit

    def __str__(self) -> str:
        """In the largest unit that it fills, as in "412.30 TFLOP/s" or "3.10 k tokens/s"."""
        (name, factor), *larger = _RATES[self.unit].items()
        for next_name, next_factor in larger:
            if round(self.amount / factor, 2) >= 1000:  # compared as printed
                name, factor = next_name, next_factor
        return f"{self.amount / factor:.2f} {name}"


def parse_rate(value: object, source: str) -> Rate:
    """The rate that a text such as "400 TFLOP/s" or "3.5 k tokens/s" names; it is more than 0.

    Raises `UserError`, with `source` in front, for anything else.
    """
    match = _RATE.fullmatch(value.strip()) if isinstance(value, str) else None
    for unit, factors in _RATES.items():
        if match and match[2] in factors and 0 < (amount := float(Decimal(match[1]) * factors[match[2]])) < math.inf:
            return Rate(amount, unit)
    allowed = ", ".join(name for factors in _RATES.values() for name in factors)
    raise UserError(f"{source}: {value!r} is not a rate; write a number above 0 with one of the units {allowed}")


def format_flops(flops: int) -> str:
    """FLOPs in the largest decimal unit that they fill: "1.23 TFLOP"."""
    size, prefix = float(flops), ""
    for larger in "kMGTPE":
        if round(size, 2) < 1000:
            break
        size, prefix = size / 1000, larger
    return f"{size:.2f} {prefix}FLOP"


def format_seconds(seconds: float) -> str:
    """A time in the largest of s, ms and us that it fills: "41.20 ms"."""
    size, unit = seconds * 1e6, "us"
    for larger in ("ms", "s"):
        if round(size, 2) < 1000:  # compared as printed
            break
        size, unit = size / 1000, larger
    return f"{size:.2f} {unit}"
