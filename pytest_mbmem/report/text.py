"""Pieces of text that several reports are made of."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence

from ..baselines import clean_nodeid
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


def aligned(facts: Sequence[tuple[str, str]]) -> list[str]:
    """A line for each fact, its name in front."""
    width = max(len(name) for name, _ in facts)
    return [f"  {name:<{width}}  {value}" for name, value in facts]


def note_lines(note: str) -> list[str]:
    """A bullet; what differs in a stale recipe comes one key a line."""
    first, *more = note.split("; ") if "the recipe changed" in note else [note]
    head, colon, change = first.partition(": ")
    if not more or not colon:
        return [f"  - {note}"]
    return [f"  - {head}:", *(f"      {part}" for part in (change, *more))]


def advice_lines(nodeid: str, verdict: str, to_paste: str | None, worth: str) -> Iterator[str]:
    """How what a gate found becomes the baseline; `worth` is what a regression costs, as in "memory"."""
    command = f"pytest {shlex.quote('::'.join(clean_nodeid(nodeid)))}"
    if verdict == "missing":
        yield "To record it:"
        yield f"  {command} --mbmem-update=new"
        if to_paste is not None:
            yield f"or paste into {to_paste.rstrip()}"
    elif verdict == "stale":
        yield "If the recipe was changed on purpose:"
        yield f"  {command} --mbmem-update=changed"
    elif verdict == "regression":
        yield f"If it is worth the {worth}, accept it and say why:"
        yield f'  {command} --mbmem-update=changed --mbmem-reason "..."'


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


def headline(failure: str) -> str:
    """Of pytest's text of a failure the line that says what was raised; of a gate's the first one."""
    # xdist begins with the worker's name: "[gw0] linux -- Python 3.11.7 /usr/bin/python3"
    lines = [line for line in failure.splitlines() if line.strip() and not re.match(r"\[gw\d+\] ", line)]
    raised = next((line[2:].strip() for line in lines if line.startswith("E  ")), None)
    return raised or (lines[0].strip() if lines else "")
