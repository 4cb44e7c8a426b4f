"""What a rule concludes."""

from __future__ import annotations

from dataclasses import dataclass

from ..oom import DOCUMENTS as MEMORY

RECOMPUTE = "NVIDIA's Megatron Bridge skill perf-activation-recompute"
OWN = "pytest-mbmem"
"""With `MEMORY`, the sources of findings."""

__all__ = ["MEMORY", "OWN", "RECOMPUTE", "Action", "Finding"]


@dataclass(frozen=True)
class Action:
    """Something to do next."""

    what: str
    cost: str = ""  # as the documents measured it; empty where they say nothing


@dataclass(frozen=True)
class Finding:
    """What one rule concluded from evidence."""

    rule: str  # its name, as in "fragmentation"
    symptom: str  # what was seen, in one sentence
    evidence: tuple[str, ...]  # each with its figures
    cause: str  # the likely one
    confirm: str  # how to make sure
    actions: tuple[Action, ...]  # in the documents' order
    source: str  # which document says so, or that this package does
