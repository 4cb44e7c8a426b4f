"""Pieces of Markdown as GitHub and GitLab read it. Every text that goes in is escaped; what comes out is Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from ..texts import printable

_SPECIAL_IN_CODE = re.compile("[^A-Za-z0-9 /=%,-]")

_SPECIAL = re.compile(r"[^\w ]|_")

_LONGEST = 300
"""Characters that are shown of a name."""


def code(text: str) -> str:
    """A name of any kind as code in a line or a cell; nothing for an empty one."""
    shown = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return f"<code>{references(_SPECIAL_IN_CODE, shown)}</code>" if shown else ""


def plain(text: str) -> str:
    """A text of any kind on one line, wherever it stands."""
    return references(_SPECIAL, " ".join(text.splitlines()).strip())


def references(special: re.Pattern[str], text: str) -> str:
    """The text with a character reference for each special character, or "?" where nothing could show it."""
    return special.sub(lambda found: f"&#{ord(found[0])};" if found[0].isprintable() else "?", text)


def fenced(lines: Iterable[str]) -> str:
    """Lines as they are; the fence is longer than any in them."""
    shown = [printable(line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *shown, fence])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Lines of a table whose cells are Markdown, two of them for the head; `right` names the columns of numbers."""
    aligned = ["---:" if name in right else "---" for name in head]
    return [f"| {' | '.join(row)} |" for row in (head, aligned, *rows)]


def size(lines: Iterable[str]) -> int:
    """Bytes, with the lines' ends."""
    return sum(len(line.encode("utf-8", "backslashreplace")) + 1 for line in lines)
