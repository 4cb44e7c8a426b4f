"""A number of bytes, and the formula that it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Term:
    """One tensor, or several of a kind, on one rank."""

    name: str  # what it is, as in "queries"
    element: int  # bytes of one number
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.element * prod(self.sizes)

    @property
    def text(self) -> str:
        """As in "queries 2 B x 4096 x 1024"; sizes of 1 are left out."""
        return f"{self.name} {' x '.join([f'{self.element} B', *(str(size) for size in self.sizes if size != 1)])}"


def total(terms: Iterable[Term]) -> int:
    """Bytes of all."""
    return sum(term.size for term in terms)


def text(terms: Iterable[Term]) -> str:
    """The sum as it is written."""
    return " + ".join(term.text for term in terms if term.size)
