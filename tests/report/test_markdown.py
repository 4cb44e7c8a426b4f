"""Pieces of Markdown."""

from __future__ import annotations

import html
import re

from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.report.markdown import code, fenced, plain


@given(st.text(max_size=299))
def test_no_name_has_a_meaning_for_markdown(name: str) -> None:
    written = code(name)
    inside = written.removeprefix("<code>").removesuffix("</code>")
    assert re.fullmatch(r"(?:[A-Za-z0-9 /=%,?-]|&#[0-9]+;)*", inside)
    assert html.unescape(inside) == "".join(c if c.isprintable() else "?" for c in name)


def test_a_fence_is_longer_than_any_in_its_lines() -> None:
    assert fenced(["a ```` b", "\x1b[0m"]) == "`````\na ```` b\n?[0m\n`````"


@given(st.text())
def test_no_text_has_a_meaning_for_markdown(text: str) -> None:
    written = plain(text)
    assert re.fullmatch(r"(?:[^\W_]| |\?|&#[0-9]+;)*", written)
    shown = " ".join(text.splitlines()).strip()
    assert html.unescape(written) == "".join(c if c.isprintable() else "?" for c in shown)
