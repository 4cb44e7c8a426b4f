"""Improvements that the baselines do not have yet, with the command that records them, and how a baseline has moved."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..baselines import clean_nodeid
from ..drift import Accepted, History, change_text, times
from ..gates import Judgement
from ..texts import printable
from ..throughput import ThroughputJudgement, figure_text
from ..units import format_bytes, format_fraction
from .results import Results, TestResult
from .rows import label_of

if TYPE_CHECKING:
    import pytest

_MOST_IDS = 5
"""Tests that a command names; of more it names the files."""

_KEPT = {
    "inifilename": "--config-file",
    "rootdir": "--rootdir",
    "mbmem_virtual_gpu": "--mbmem-virtual-gpu",
    "mbmem_gpus": "--mbmem-gpus",
    "mbmem_ranks": "--mbmem-ranks",
    "mbmem_baselines": "--mbmem-baselines",
}
"""Options of this session that a command to record its figures needs as well."""

_MOST_LINES = 20
"""Improvements that are listed."""

_MOST_VALUES = 10
"""Accepted values that a history lists: the first one, and the last ones."""

_MOST_REASONS = 3
"""Reasons that a sentence has: the last ones."""


# Improvements ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Improvement:
    """A figure that is better than its baseline by more than the tolerance, and is not recorded."""

    test: str  # its node id
    figure: str  # what it is of, as in the table: the test, "@name" behind it, and the metric
    before: str
    after: str
    change: float  # as a fraction: of throughput more is better, of anything else less
    drift: str = ""  # since the first recorded value, with reasons; empty for a baseline that was never changed

    def __str__(self) -> str:
        """All of it in one line."""
        text = f"{self.figure}: {self.before} -> {self.after} ({format_fraction(self.change, signed=True)})"
        return printable(f"{text}; {self.drift}" if self.drift else text)


def improvements(results: Results) -> list[Improvement]:
    """Of the tests that passed: one that fails records nothing."""
    return [found for test in results.tests.values() if _passed(test) for found in _improvements_of(test)]


def _passed(test: TestResult) -> bool:
    return test.outcome in ("passed", "xpassed")


def _improvements_of(test: TestResult) -> Iterator[Improvement]:
    for measured in test.measured:
        label = label_of(test.id, measured)
        for judged in measured.judged:
            peak = judged.judgement
            if _is_open(peak, judged.accepted) and peak.reference is not None and peak.measured is not None:
                metric = "" if peak.gate.metric_id == "allocated" else f" {peak.gate.metric_id}"
                sizes = format_bytes(peak.reference), format_bytes(peak.measured)
                drift = drift_text(peak.history, peak.measured, format_bytes)
                yield Improvement(test.id, f"{label}{metric}", *sizes, peak.change or 0.0, drift)
        for steps in measured.throughputs:
            step = steps.judgement
            if _is_open(step, steps.accepted) and step.shown_reference and step.shown and step.measured is not None:
                drift = drift_text(step.history, step.measured, partial(figure_text, step.metric_id))
                shown = step.shown_reference, step.shown
                yield Improvement(test.id, f"{label} {step.metric_id}", *shown, step.change or 0.0, drift)


def _is_open(judgement: Judgement | ThroughputJudgement, accepted: bool) -> bool:
    return judgement.verdict == "improvement" and not accepted


def improvement_lines(found: Sequence[Improvement], update: str) -> list[str]:
    """Each improvement, and the command that records them all."""
    if not found:
        return []
    many = "1 improvement is" if len(found) == 1 else f"{len(found)} improvements are"
    lines = [f"{many} not in the baselines yet, which would let as much be lost again:"]
    lines += [f"  {one}" for one in found[:_MOST_LINES]]
    lines += [f"  and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return [*lines, "to record what is better now:", f"  {update}"]


def update_command(tests: Sequence[str], config: pytest.Config) -> str:
    """What records the figures of tests, if it is run where this session was.

    It names the tests' files where there are many of them, and of this session's options those without which something
    else would be measured or written.
    """
    option: Any = config.option
    options = ["--mbmem-gpu"] if option.mbmem_gpu else []
    options += [f"{flag}={getattr(option, name)}" for name, flag in _KEPT.items() if getattr(option, name) is not None]
    cleaned = [clean_nodeid(test) for test in tests]
    chosen = list(dict.fromkeys("::".join(parts) for parts in cleaned))
    if len(chosen) > _MOST_IDS:
        chosen = list(dict.fromkeys(module for module, _ in cleaned))
    root = os.path.relpath(config.rootpath, config.invocation_params.dir)
    chosen = [os.path.join(root, test).removeprefix("./") for test in chosen]  # noqa: PTH118 (Path would drop a "//")
    return shlex.join(["pytest", *chosen, *options, "--mbmem-update=changed"])


# History --------------------------------------------------------------------------------------------------------------


def drift_text(history: History, measured: int, text: Callable[[int], str]) -> str:
    """Where a figure has come since its first value, in one sentence with reasons; empty if nothing was changed."""
    if not history or not history[-1].update:
        return ""
    first, last = history[0], history[-1]
    reasons = [f'"{one.reason}"' for one in history if one.reason is not None][-_MOST_REASONS:]
    why = f" ({', '.join(reasons)})" if reasons else ""
    share = f"{change_text(measured, first.value)} " if first.value else ""
    return f"{share}since the first {text(first.value)}, changed {times(last.update)}{why}"


def history_lines(history: History, measured: int, text: Callable[[int], str]) -> list[str]:
    """A line for each accepted value and one for what was measured: by how much it differs from the one before, why.

    Empty for a baseline that was never changed and has no reason.
    """
    if not history or (len(history) == 1 and history[0].reason is None):
        return []
    rows: list[tuple[str, str, str]] = []
    skipped = range(1, len(history) + 1 - _MOST_VALUES)
    before: Accepted | None = None
    for index, one in enumerate(history):
        if index not in skipped:
            known = before is not None and before.update == one.update - 1
            change = change_text(one.value, before.value) if before is not None and known else ""
            why = one.reason or ("the first" if one.update == 0 else "no reason was given")
            lost = "" if known or one.update == 0 else "after values that were not kept: "
            rows.append((text(one.value), change, f"{lost}{why}"))
        elif index == skipped[0]:
            rows.append((f"{len(skipped)} more", "", ""))
        before = one
    rows.append((text(measured), change_text(measured, history[-1].value), "measured now"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    total = change_text(measured, history[0].value)
    return [
        f"the baseline's history{f', {total} since the first' if total else ''}:",
        *(printable(f"    {value:>{widths[0]}}  {change:>{widths[1]}}  {why}".rstrip()) for value, change, why in rows),
    ]
