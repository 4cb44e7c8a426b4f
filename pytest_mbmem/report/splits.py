"""What a peak is made of and what of it grew, as a section of a failure: at most a dozen lines."""

from __future__ import annotations

from ..compare import Comparison
from ..gates import Judgement
from ..split import parts_lines, parts_text, split_of
from .results import Measured


def judged_lines(measured: Measured, judgement: Judgement) -> list[str]:
    """Of a peak that fails its gate: what grew against the baseline, or its largest parts where nothing tells that.

    Of one that has no baseline to compare with, a single line. Empty where the allocator did not tell owners.
    """
    gate, rank = judgement.gate, measured.rank(judgement.rank)
    if judgement.measured is None or rank is None:
        return []
    split = split_of(rank, gate.metric, gate.phase)
    if split is None:
        return []
    if judgement.growth is not None:
        return judgement.growth.lines("against the other recipe" if judgement.verdict == "stale" else "what grew")
    if judgement.verdict != "regression":
        return [f"  by category: {parts_text(split)}"]
    lines = parts_lines(split)
    if gate.limit is None:
        lines.append("  the baseline does not say what it was made of; --mbmem-update records that from now on")
    return lines


def saved_lines(comparison: Comparison | None) -> list[str]:
    """What the candidate's peak has more and less than its control's. Empty where one of them is not known."""
    if comparison is None or not comparison.has_figures or comparison.growth is None:
        return []
    return comparison.growth.lines("against the control")
