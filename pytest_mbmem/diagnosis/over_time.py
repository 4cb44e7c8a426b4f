"""Rules on memory that grows from step to step, and on baselines that are not of today."""

from __future__ import annotations

from collections.abc import Iterator

from ..drift import LOOSE
from ..gates import Judgement, environment_changes
from ..throughput import ThroughputJudgement, figure_text
from ..units import format_bytes
from .case import Case, Subject
from .finding import OWN, Action, Finding


def leaks(case: Case) -> Iterator[Finding]:
    """Memory that grows with every step, by the largest finding of each growth."""
    for growth in case.growths:
        per_step = [found for found in growth.findings if found.kind == "per step"]
        if growth.passed or not per_step:
            continue
        worst = max(per_step, key=lambda found: found.bytes)
        holder = worst.holders[0] if worst.holders else None
        of = f" ({growth.name})" if growth.name else ""
        yield Finding(
            "leak by step",
            f"rank {worst.rank} keeps {format_bytes(worst.bytes)} more with every step{of}",
            (
                worst.detail,
                *([f"held by {holder.path}: {holder.describe()}"] if holder is not None else []),
            ),
            "something keeps a tensor of every step: a list of losses that were not detached, a view, an attribute",
            "no_memory_growth(steps=10): a leak grows on by the same bytes; a buffer that is made once does not",
            (Action("detach or drop what the holder keeps, as in loss.detach(), or loss.item() for a number"),),
            OWN,
        )


def loose_baselines(case: Case) -> Iterator[Finding]:
    """A baseline that is more than `LOOSE` times what was measured."""
    for subject in case.subjects:
        for what, reference, measured in _references(subject):
            if 0 < LOOSE * measured < reference:
                yield Finding(
                    "loose baseline",
                    f"the baseline of {what} is loose{subject.of}",
                    (
                        f"it is {figure_text(what, reference)}, {reference / measured:.1f} times the "
                        f"{figure_text(what, measured)} that were measured",
                    ),
                    "it takes less since the baseline was recorded, and nobody recorded that",
                    "the baseline's history in the test's report; on a virtual GPU a second run measures the same",
                    (
                        Action(
                            "record it with --mbmem-update=changed; a regression up to the old figure passes till then"
                        ),
                    ),
                    OWN,
                )


def _references(subject: Subject) -> Iterator[tuple[str, int, int]]:
    """What is gated against a baseline: its name, the baseline's figure and the measured one."""
    found: list[tuple[str, Judgement | ThroughputJudgement]]
    found = [(peak.gate.metric_id, peak) for peak in subject.peaks if peak.gate.limit is None]
    found += [(steps.metric_id, steps) for steps in subject.throughputs if steps.against_minimum is None]
    for name, judgement in found:
        if judgement.verdict != "stale" and judgement.reference is not None and judgement.measured is not None:
            yield name, judgement.reference, judgement.measured


def environments(case: Case) -> Iterator[Finding]:
    """A verdict that differs from the baseline's, in an environment that does too."""
    for subject in case.subjects:
        now = {key: str(value) for key, value in subject.measurement.environment.items()}
        seen: dict[tuple[str, ...], list[str]] = {}
        judgements: list[Judgement | ThroughputJudgement] = [*subject.peaks, *subject.throughputs]
        for judgement in judgements:
            if judgement.origin is None or judgement.verdict not in ("regression", "improvement", "out of memory"):
                continue
            if changed := environment_changes(judgement.origin.environment, now):
                seen.setdefault(tuple(changed), []).append(judgement.explain())
        for changes, said in seen.items():
            before = ", ".join(change.rpartition(" -> ")[0] for change in changes)
            yield Finding(
                "environment changed",
                f"the environment is not the one of the baseline{subject.of}",
                (", ".join(changes), said[0]),
                "another version of a library allocates, or works, otherwise",
                f"run the test once in that environment: {before}",
                (
                    Action("if it comes from the new version: accept it with --mbmem-update=changed --mbmem-reason"),
                    Action("if it does not: look for the change in the code, with the versions of the baseline"),
                ),
                OWN,
            )
