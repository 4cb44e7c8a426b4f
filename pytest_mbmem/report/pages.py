"""Pages of `mbmem compare` and `mbmem trend` for a browser: one file each, without scripts and without anything from
outside."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..texts import encodable
from ..throughput import figure_text
from .compared import HEAD, Compared, Row
from .markup import details, preformatted
from .trend import HEAD as OF_TREND
from .trend import NOTE, Series, cells_of

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 80rem; padding: 0 1rem;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { border-bottom: 1px solid #8884; padding: .3rem .4rem; text-align: left; vertical-align: middle; }
th { font-weight: 600; }
thead th { overflow-wrap: normal; }
td { white-space: nowrap; }
th[scope=row] { min-width: 11rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
.worse, .failed, .gone { color: #c62828; font-weight: 600; }
.better, .fixed { color: #2e7d32; font-weight: 600; }
svg { display: block; } polyline { fill: none; stroke: #1976d2; stroke-width: 2; } circle { fill: #1976d2; }
pre { overflow-x: auto; }
"""

_WIDTH, _HEIGHT, _EDGE = 120, 36, 4
"""Of a drawn series, in pixels."""


def compare_page(compared: Compared) -> str:
    """The figures of two runs, and what grew in each test."""
    rows = sorted(compared.rows, key=lambda row: (not row.changed, not row.is_bad))
    body = "".join(f"<tr>{_row(row)}</tr>" for row in rows)
    grown = "".join(
        details(f"{row.label} {row.metric}: {row.change_text}", preformatted(row.growth_lines()))
        for row in rows
        if row.changed
    )
    facts = f"<p>{escape(compared.summary)}</p><p>base {escape(compared.base)}, head {escape(compared.head)}</p>"
    return _page("Memory of two runs", facts + _table(HEAD, body) + grown)


def trend_page(series: Sequence[Series]) -> str:
    """A row for each test and metric, with its figures drawn over the runs."""
    rows = ""
    for one in series:
        label, *rest = cells_of(one)
        cells = "".join(_cell(name, text) for name, text in zip(OF_TREND[1:], rest, strict=True))
        rows += f'<tr><th scope="row">{escape(label)}</th>{cells}<td>{_drawn(one)}</td></tr>'
    return _page("Memory over runs", f"{_table((*OF_TREND, 'trend'), rows)}<p>{NOTE}</p>")


def _page(title: str, body: str) -> str:
    text = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )
    return encodable(text)


def _table(head: Sequence[str], rows: str) -> str:
    names = "".join(f'<th scope="col"{_number(name)}>{escape(name)}</th>' for name in head)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    return f"<td{_number(name)}>{escape(text)}</td>"


def _number(name: str) -> str:
    """The class of a column of figures."""
    return "" if name in ("test", "device", "metric", "verdict", "trend") else ' class="number"'


def _row(row: Row) -> str:
    label, *cells, verdict = row.cells()
    shown = "".join(_cell(name, text) for name, text in zip(HEAD[1:-1], cells, strict=True))
    return f'<th scope="row">{escape(label)}</th>{shown}<td class="{verdict}">{verdict}</td>'


def _drawn(series: Series) -> str:
    """A line through the figures, from the lowest to the highest, with what each is where the pointer rests."""
    values = series.values
    least, span = min(values), max(values) - min(values) or 1
    step = (_WIDTH - 2 * _EDGE) / max(len(values) - 1, 1)
    places = [
        (_EDGE + index * step, _HEIGHT - _EDGE - (value - least) * (_HEIGHT - 2 * _EDGE) / span)
        for index, value in enumerate(values)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(point.run)} {escape(point.started)}: '
        f"{figure_text(series.metric, point.value)}</title></circle>"
        for (x, y), point in zip(places, series.points, strict=True)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{len(values)} runs">'
        f'<polyline points="{line}"/>{dots}</svg>'
    )
