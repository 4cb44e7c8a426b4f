"""What `mbmem snapshot` and `mbmem replay` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..history.owners import line_of
from ..history.stamps import read_stamp
from ..measurement import Owner, place
from ..texts import printable
from ..units import format_bytes, format_fraction
from ..validation import show
from .text import table

if TYPE_CHECKING:
    from ..history.replay import Failed
    from ..history.segments import Held
    from ..history.snapshot import Event
    from ..history.summary import Summary
    from ..measure.replay_runs import Replays, Run

_INDENT = "  "
_WIDEST = 1000  # characters of a line, most of which are names that a stranger's file may have


def summary_lines(summary: Summary, top: int) -> list[str]:
    """Peaks, owners, fragmentation and settings; at most `top` modules and lines."""
    lines = [
        f"{summary.path}: device {summary.device}, {summary.events:,} events",
        f"peak allocated: {format_bytes(summary.peak_allocated)} {_when(summary, *summary.peak_at)}",
        f"peak reserved:  {format_bytes(summary.peak_reserved)} {_when(summary, *summary.reserved_at)}",
        "",
        "held at the peak of allocated bytes, by category:",
        *_shares(["category"], {(category,): size for category, size in summary.categories.items()}, summary, 0),
        "",
        "by module and line:",
        *_shares(["category", "module", "line"], _by_owner(summary.owners), summary, top),
        "",
        "fragmentation:",
        *_fragmentation(summary),
        "",
        f"allocator settings: {_settings(summary.settings)}",
    ]
    return [printable(line[:_WIDEST]) for line in lines]


def _when(summary: Summary, event: int, phase: str) -> str:
    after = f"after event {event + 1:,} of {summary.events:,}"
    return f"in {phase}, {after}" if phase else after


def _by_owner(owners: Mapping[Owner, int]) -> dict[tuple[str, ...], int]:
    return {
        (o.category, o.module + (f" \u00d7 {o.modules}" if o.modules > 1 else ""), o.line): size
        for o, size in owners.items()
    }


def _shares(head: Sequence[str], sizes: Mapping[tuple[str, ...], int], summary: Summary, top: int) -> list[str]:
    """A table of sizes and their shares of the peak; with `top`, what is left out is one row."""
    shown = [(names, size) for names, size in sizes.items() if size]
    if top and len(shown) > top:
        rest = shown[top:]
        others = (f"{len(rest)} more", *[""] * (len(head) - 1))
        shown = [*shown[:top], (others, sum(size for _, size in rest))]
    cells = [["bytes", "share", *head]]
    for names, size in shown:
        cells.append([format_bytes(size), format_fraction(size / max(1, summary.peak_allocated)), *names])
    return [_INDENT + line for line in table(cells, right={"bytes", "share"})]


def _fragmentation(summary: Summary) -> list[str]:
    sizes = ("reserved", "allocated", "free", "largest piece")
    cells = [["", "segment type", "segments", "reserved", "allocated", "free", "pieces", "largest piece"]]
    for when, held in summary.held.items():
        cells += [_held_row(when, h) for h in held]
    lines = table(cells, right={"segments", "pieces", *sizes})
    return [_INDENT + line for line in lines]


def _held_row(when: str, held: Held) -> list[str]:
    sizes = [format_bytes(size) for size in (held.reserved, held.allocated, held.free)]
    return [when, held.type, str(held.segments), *sizes, str(held.pieces), format_bytes(held.largest_piece)]


def _settings(settings: Mapping[str, Any]) -> str:
    """On one line, without mappings of nothing but zeros."""
    shown = {key: v for key, v in settings.items() if not isinstance(v, dict) or any(v.values())}
    return ", ".join(f"{key}={show(value)}" for key, value in shown.items()) or "not in the snapshot"


# Replays --------------------------------------------------------------------------------------------------------------


def replay_lines(replays: Replays) -> list[str]:
    """How exactly the run was reproduced, then whether it fits."""
    snapshot, recorded, result = replays.snapshot, replays.recorded, replays.unchanged.result
    lines = [
        f"{snapshot.path}: device {snapshot.device}, {len(snapshot.events):,} events, recorded with "
        f"{_named(snapshot.alloc_conf)}",
        "",
        f"replayed as recorded, {_limit(recorded.limit)}:",
    ]
    ends = "at the end" if recorded.failed is None else "at the failure"
    cells = [
        ["", "recorded", "replayed"],
        [f"segments {ends}", f"{recorded.segments:,}", f"{result.segments:,}"],
        ["bytes in them", format_bytes(recorded.segment_bytes), format_bytes(result.segment_bytes)],
        ["peak reserved", format_bytes(recorded.peak_reserved), format_bytes(result.peak_reserved)],
        ["segment allocations", f"{recorded.segment_allocations:,}", f"{result.segment_allocations:,}"],
        ["out of memory", _at(recorded.failed), _at(result.failed.operation if result.failed else None)],
    ]
    lines += [_INDENT + line for line in table(cells, right={"recorded", "replayed"})]
    if replays.exact:
        lines.append("The replay reproduces the recorded segments exactly.")
    else:
        off = result.peak_reserved / max(1, recorded.peak_reserved) - 1
        lines.append(
            "The replay does not reproduce the recorded segments exactly: peak reserved is "
            f"{format_fraction(off, signed=True)} off. Take what follows as that exact."
        )
    lines += ["", f"replayed with changes, {replays.limit.reason}:", *_changed(replays.changed)]
    for run in replays.changed:
        if run.result.failed is not None:
            lines += ["", *_failure(run, run.result.failed, snapshot.events)]
    if recorded.failed is not None and any(r.result.failed is None for r in replays.changed):
        lines += [
            "",
            f"The recorded run ran out of memory at event {recorded.failed + 1:,}: what a run that fits would have "
            "allocated after it is not in the history.",
        ]
    return [printable(line[:_WIDEST]) for line in lines]


def _changed(runs: Sequence[Run]) -> list[str]:
    cells = [["allocator settings", "fits", "peak reserved", "peak allocated", "segments", "retries"]]
    for run in runs:
        result = run.result
        cells.append(
            [
                _named(run.settings),
                "yes" if result.failed is None else "no",
                format_bytes(result.peak_reserved),
                format_bytes(result.peak_allocated),
                f"{result.segments:,}",
                f"{result.retries:,}",
            ]
        )
    lines = table(cells, right={"peak reserved", "peak allocated", "segments", "retries"})
    return [_INDENT + line for line in lines]


def _failure(run: Run, failed: Failed, events: Sequence[Event]) -> list[str]:
    event = events[failed.operation]
    stamp = read_stamp(event.get("user_metadata") or "")
    where = [f"event {failed.operation + 1:,} of {len(events):,}"]
    if stamp is not None:
        where += [f"in {place(stamp.step, stamp.phase)}", *([f"of {stamp.module}"] if stamp.module else [])]
    if line := line_of(event.get("frames") or ()):
        where.append(f"by {line}")
    return [
        f"With {_named(run.settings)} it runs out of memory at {', '.join(where)}:",
        f"{_INDENT}asked for {format_bytes(failed.requested)}, while {format_bytes(failed.allocated)} were allocated",
        f"{_INDENT}free but unusable: {format_bytes(failed.unusable)} in the allocator's segments; the device had "
        f"{format_bytes(failed.device_free)} left",
    ]


def _named(settings: str) -> str:
    return settings or "PyTorch's default settings"


def _limit(limit: int | None) -> str:
    if limit is None:
        return "without limit (that of the recorded run is not known)"
    return f"with the {format_bytes(limit)} for PyTorch that it had"


def _at(event: int | None) -> str:
    return "no" if event is None else f"event {event + 1:,}"
