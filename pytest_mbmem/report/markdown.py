"""Comments for a pull request, in the Markdown of GitHub and GitLab."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .compared import HEAD, Compared, Row
from .trend import HEAD as OF_TREND
from .trend import Series, cells_of, sparkline

LARGEST = 65_536
"""Characters that GitHub takes of a comment; bytes are counted here, of which there are as many at least."""

_SPECIAL = re.compile("[^A-Za-z0-9 /=%,-]")

_IN_A_FIGURE = re.compile("[^A-Za-z0-9 /=%,.+-]")
"""Of what this package writes, as in "+1.00 GiB"."""

_KEPT = 200
"""Bytes that are kept free for what says that something is left out."""

_LONGEST = 300
"""Characters that are shown of a name."""


def code(text: str) -> str:
    """A text of any kind as code in a line or a cell, without any meaning for Markdown or HTML."""
    shown = text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
    return f"<code>{_SPECIAL.sub(_reference, shown)}</code>" if shown else ""


def _reference(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};" if found[0].isprintable() else "?"


def fenced(lines: Iterable[str]) -> str:
    """Lines as they are; the fence is longer than any in them."""
    shown = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([fence, *shown, fence])


def comparison(compared: Compared) -> str:
    """The summary, the figures that changed, and folded below what grew in each test."""
    changed = sorted((row for row in compared.rows if row.changed), key=lambda row: not row.is_bad)
    mark = "\u274c" if any(row.is_bad for row in changed) else "\u2705"
    head = [f"{mark} **Memory:** {compared.summary}", ""]
    table = _table(HEAD, [_cells(row.cells()) for row in changed], right=("base", "head", "change"))
    head += table[:2] if changed else ["Every figure is the same, within the tolerances of the gates.", ""]
    ends = ["", f"Base {code(compared.base)}, head {code(compared.head)}."]
    return _fitted(head, table[2:], ends, filter(None, map(_details, changed)))


def trend(series: Sequence[Series]) -> str:
    """A table with a row for each test and metric."""
    rows = [[*_cells(cells_of(one)), sparkline(one.values)] for one in series]
    table = _table((*OF_TREND, "trend"), rows, right=OF_TREND[3:])
    ends = ["", "More is worse of every metric; throughput is the time of a step."]
    return _fitted(["**Memory over runs**", "", *table[:2]], table[2:], ends, ())


def _cells(cells: Sequence[str]) -> list[str]:
    """Names as code; figures hold nothing but what this package writes."""
    return [code(cells[0]), code(cells[1]), *(_IN_A_FIGURE.sub(_reference, cell) for cell in cells[2:])]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str]) -> list[str]:
    aligned = ["---:" if name in right else "---" for name in head]
    return [f"| {' | '.join(row)} |" for row in (head, aligned, *rows)]


def _details(row: Row) -> str:
    lines = row.growth_lines()
    if not lines:
        return ""
    summary = f"{code(row.label)} {row.metric}: {row.cells()[5]}"
    return f"\n<details><summary>{summary}</summary>\n\n{fenced(lines)}\n\n</details>"


def _fitted(head: Sequence[str], rows: Sequence[str], ends: Sequence[str], details: Iterable[str]) -> str:
    """As many rows, and then details, as a comment can hold; it says how many rows are left out."""
    left = LARGEST - _KEPT - sum(map(_bytes, (*head, *ends)))
    shown = _first(rows, left)
    left_out = len(rows) - len(shown)
    note = [f"{left_out} more are left out, as a comment holds no more."] if left_out else []
    below = _first(details, left - sum(map(_bytes, shown)))
    return "\n".join([*head, *shown, *ends, *note, *below]) + "\n"


def _first(texts: Iterable[str], left: int) -> list[str]:
    """Those that fit into as many bytes."""
    shown: list[str] = []
    for text in texts:
        left -= _bytes(text)
        if left < 0:
            break
        shown.append(text)
    return shown


def _bytes(text: str) -> int:
    """With the line's end."""
    return len(text.encode("utf-8", "backslashreplace")) + 1
