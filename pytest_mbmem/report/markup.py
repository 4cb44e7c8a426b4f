"""Pieces of HTML. Every text that goes in is escaped; what comes out is markup.

Tables are most of a long report: end tags that HTML does not ask for are left out there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def facts(named: Mapping[str, str]) -> str:
    """Names and what there is to say of them."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in named.items())
    return f"<dl>{rows}</dl>" if rows else ""


def listed(texts: Iterable[str], tag: str = "ul") -> str:
    """A list; nothing for no texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<{tag}>{items}</{tag}>" if items else ""


def preformatted(lines: Sequence[str]) -> str:
    """Lines as they are; nothing for none."""
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is too wide."""
    header = "".join(f"<th>{escape(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f'<div class="wide"><table><thead><tr>{header}<tbody>{body}</table></div>'


def details(summary: str, body: str, *, is_open: bool = False) -> str:
    """Markup that is shown when the reader asks for it; nothing for nothing."""
    state = " open" if is_open else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{body}</details>" if body else ""
