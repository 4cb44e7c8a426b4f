"""Comments for a pull request, of what `mbmem compare` and `mbmem trend` say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .compared import HEAD, Compared, Row
from .markdown import code, fenced, plain, references, size, table
from .trend import HEAD as OF_TREND
from .trend import NOTE, Series, cells_of, sparkline

LARGEST = 65_536
"""Characters that GitHub takes of a comment; bytes are counted here, of which there are as many at least."""

_SPECIAL = re.compile("[^A-Za-z0-9 /=%,.+-]")
"""Of figures, as in "+1.00 GiB"."""

_KEPT = 200
"""Bytes that are kept free for what says that something is left out."""

_MOST_LINES, _LONGEST_LINE = 10, 240
"""Of broken rules, and of notes; characters of each."""


def comparison(compared: Compared, notes: Iterable[str] = (), broken: Sequence[str] | None = None) -> str:
    """The summary, the figures that changed, and folded below what grew in each test.

    `notes` stand below the figures, and the lines of `broken` rules below the summary; None where there are no rules.
    """
    changed = sorted((row for row in compared.rows if row.changed), key=lambda row: not row.is_bad)
    mark = "\u274c" if broken or any(row.is_bad for row in changed) else "\u2705"
    head = [f"{mark} **Memory:** {compared.summary}", ""]
    if broken is not None:
        head += ["**Rules are broken:**", *_list(broken)] if broken else ["No rule of --fail-on is broken.", ""]
    lines = table(HEAD, [_cells(row.cells()) for row in changed], right=("base", "head", "change"))
    head += lines[:2] if changed else ["Every figure is the same, within the tolerances of the gates.", ""]
    ends = [*(_list(notes) or [""]), f"Base {code(compared.base)}, head {code(compared.head)}."]
    return _fitted(head, lines[2:], ends, filter(None, map(_details, changed)))


def trend(series: Sequence[Series]) -> str:
    """A table with a row for each test and metric."""
    rows = [[*_cells(cells_of(one)), sparkline(one.values)] for one in series]
    lines = table((*OF_TREND, "trend"), rows, right=OF_TREND[3:])
    return _fitted(["**Memory over runs**", "", *lines[:2]], lines[2:], ["", NOTE], ())


def _list(texts: Iterable[str]) -> list[str]:
    """Equal ones once, and an empty line below; nothing of none."""
    found = list(dict.fromkeys(texts))
    shown = [text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 3] + "..." for text in found[:_MOST_LINES]]
    more = [f"- and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return ["", *(f"- {plain(text)}" for text in shown), *more, ""] if found else []


def _cells(cells: Sequence[str]) -> list[str]:
    """Test and device are names, as code; the others are figures and words."""
    return [code(cells[0]), code(cells[1]), *(references(_SPECIAL, cell) for cell in cells[2:])]


def _details(row: Row) -> str:
    lines = row.growth_lines()
    if not lines:
        return ""
    label, _, metric, *_ = _cells(row.cells())
    summary = f"{label} {metric}: {row.change_text}"
    return f"\n<details><summary>{summary}</summary>\n\n{fenced(lines)}\n\n</details>"


def _fitted(head: Sequence[str], rows: Sequence[str], ends: Sequence[str], details: Iterable[str]) -> str:
    """As many rows, and then details, as a comment can hold; it says how many rows are left out."""
    left = LARGEST - _KEPT - size((*head, *ends))
    shown = _first(rows, left)
    left_out = len(rows) - len(shown)
    note = [f"{left_out} more are left out, as a comment holds no more."] if left_out else []
    below = _first(details, left - size(shown))
    return "\n".join([*head, *shown, *ends, *note, *below]) + "\n"


def _first(texts: Iterable[str], left: int) -> list[str]:
    """Those that fit into as many bytes."""
    shown: list[str] = []
    for text in texts:
        left -= size([text])
        if left < 0:
            break
        shown.append(text)
    return shown
