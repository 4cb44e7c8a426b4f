"""A snapshot in short: its peaks, who held them, and how fragmented it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..garbage import no_collections
from ..measurement import Category, Owner
from .owners import attribute
from .segments import Held, held_at, held_at_end, reserved_levels
from .snapshot import Snapshot


class At(NamedTuple):
    """A time in a history."""

    event: int  # index; what is meant is the time after it
    phase: str  # empty where the events carry none


@dataclass(frozen=True)
class Summary:
    """Sizes are bytes."""

    path: Path
    device: int
    events: int
    settings: Mapping[str, Any]
    peak_allocated: int  # blocks rounded up to 512 bytes
    peak_at: At
    owners: Mapping[Owner, int]  # at that peak, the largest first
    peak_reserved: int
    reserved_at: At
    held: Mapping[str, Sequence[Held]]  # by the segments, at the times that the keys name

    @classmethod
    def of(cls, snapshot: Snapshot) -> Summary:
        """A million events take seconds."""
        events = snapshot.events
        with no_collections():
            history = attribute(events)
            levels = reserved_levels(events)
            held = {"at the peak of reserved bytes": held_at(events, levels.event)}
            failed = next((i for i, event in enumerate(events) if event["action"] == "oom"), None)
            if failed is not None:
                held["when memory ran out"] = held_at(events, failed)
            held["at the end"] = held_at_end(snapshot)
            return cls(
                path=snapshot.path,
                device=snapshot.device,
                events=len(events),
                settings=snapshot.settings,
                peak_allocated=history.peak,
                peak_at=At(history.peak_event, history.phase_at(history.peak_event)),
                owners=history.at_peak,
                peak_reserved=levels.peak,
                reserved_at=At(levels.event, history.phase_at(levels.event)),
                held=held,
            )

    @property
    def categories(self) -> dict[Category, int]:
        """Bytes at the peak, the largest first."""
        found: dict[Category, int] = {}
        for owner, size in self.owners.items():
            found[owner.category] = found.get(owner.category, 0) + size
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": str(self.path),
            "device": self.device,
            "events": self.events,
            "peak_allocated": self.peak_allocated,
            "peak_at": self.peak_at._asdict(),
            "categories": self.categories,
            "owners": [{**dataclasses.asdict(owner), "bytes": size} for owner, size in self.owners.items()],
            "peak_reserved": self.peak_reserved,
            "reserved_at": self.reserved_at._asdict(),
            "segments": [
                {"when": when, **dataclasses.asdict(held), "allocated": held.allocated}
                for when, of_types in self.held.items()
                for held in of_types
            ],
            "allocator_settings": dict(self.settings),
        }
