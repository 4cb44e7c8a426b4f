"""How an accepted figure came to be what it is: every value since the first one, and why each was accepted.

A gate compares with the last accepted value alone, so that ten times +3% pass one by one. What is here shows the sum.
Knows neither pytest nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .units import format_fraction

if TYPE_CHECKING:
    from .baseline_file import Figure

LOOSE = 2
"""A bound that is more than this many times what it bounds is loose: it hides a regression of that size."""


@dataclass(frozen=True)
class Accepted:
    """A value that was a baseline."""

    update: int  # 0 for the first one; more than that for the value that so many changes had made
    value: int  # in the figure's own unit
    reason: str | None = None  # why it was accepted; None where nobody said so


History = tuple[Accepted, ...]
"""Oldest first; the last one is the baseline of today. Values that an older version did not keep are missing."""


def history_of(figure: Figure) -> History:
    """Every value of the figure that is known; an older version kept the first one alone, without its reason."""
    earlier = figure.earlier
    if figure.updates and not any(one.update == 0 for one in earlier):
        earlier = (Accepted(0, figure.first), *earlier)
    return (*earlier, Accepted(figure.updates, figure.value, figure.reason))


def history_notes(figure: Figure, measured: int, allowed: int, name: str, text: Callable[[int], str]) -> Iterator[str]:
    """A baseline that has gone loose, and drift since the first figure, which allows no more than `allowed`.

    `name` is the figure's in sentences, and `text` writes its values.
    """
    if 0 < LOOSE * measured < figure.value:
        yield (
            f"the baseline is loose: it is {figure.value / measured:.1f} times what was measured and would hide a "
            "regression of that size; refresh it"
        )
    if figure.updates and measured > allowed:
        share = f"{change_text(measured, figure.first)} " if figure.first else ""
        yield (
            f"drift: {share}since the first recorded {name} of {text(figure.first)}; "
            f"the baseline was changed {times(figure.updates)}"
        )


def times(updates: int) -> str:
    """As in "3 times"."""
    return "once" if updates == 1 else f"{updates} times"


def change_text(value: int, before: int) -> str:
    """As in "+3.00%"; empty where there is nothing to compare with."""
    return format_fraction(value / before - 1, signed=True) if before else ""
