"""Evidence -> likely cause -> how to confirm it -> what to do next, by the failure tables of NVIDIA's documents.

Imports neither torch nor pytest.
"""

from __future__ import annotations

from dataclasses import dataclass


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
