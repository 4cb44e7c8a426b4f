"""Pieces of text that several reports are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..units import format_bytes

GAP = "  "

_MESSAGE_START, _MESSAGE_END = 3, 17
"""Lines of a worker's message that are shown: what happened, and the end of a traceback."""


def table(cells: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Lines of aligned columns; the first row is the head, and `right` names the columns of numbers."""
    head = cells[0]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        GAP.join(
            text.rjust(width) if name in right else text.ljust(width)
            for text, width, name in zip(row, widths, head, strict=True)
        ).rstrip()
        for row in cells
    ]


def exactly(size: int) -> str:
    """As in "   1.17 GiB (1258291200 bytes)"."""
    return f"{format_bytes(size):>11} ({size} bytes)"


def shortened(message: str) -> list[str]:
    """The lines of a worker's message, without the middle of a long one."""
    lines = message.splitlines()
    left_out = len(lines) - _MESSAGE_START - _MESSAGE_END
    if left_out <= 1:  # saying so would take a line as well
        return lines
    return [*lines[:_MESSAGE_START], f"... {left_out} lines left out ...", *lines[-_MESSAGE_END:]]


def printable(line: str) -> str:
    """Without what would break a line or steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)
