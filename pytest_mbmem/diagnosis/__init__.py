"""Evidence -> likely cause -> how to confirm it -> what to do next, by the failure tables of NVIDIA's documents.

A rule is a function from a `Case`, which holds all that one test measured, to findings; it reads figures, never texts,
and says nothing without its evidence. What a rule needs to be sure of is in its docstring, what it calls much or little
in a named constant. Imports neither torch nor pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import activations, moved, over_time, settings, shortage
from .case import Case, Subject
from .finding import Action, Finding

__all__ = ["RULES", "Action", "Case", "Finding", "Subject", "diagnose"]

RULES: tuple[Callable[[Case], Iterable[Finding]], ...] = (
    settings.refused,
    shortage.shortages,
    shortage.starved_fits,
    shortage.single_rank,
    shortage.reserved_high,
    over_time.leaks,
    moved.advanced,
    moved.peaks,
    activations.without_effect,
    activations.core_attention,
    activations.dominated,
    activations.gathered_inputs,
    shortage.estimates,
    over_time.environments,
    over_time.loose_baselines,
)
"""The most telling first: why nothing ran, why memory ran out, what grows, where the peak is, what it is made of."""


def diagnose(case: Case) -> list[Finding]:
    """What the rules find, the most important first; equal findings come once."""
    return list(dict.fromkeys(finding for rule in RULES for finding in rule(case)))
