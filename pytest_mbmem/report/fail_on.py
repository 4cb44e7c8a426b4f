"""The rules of --fail-on: how much worse a figure may get, as in "allocated:1%", "reserved:100 MiB" and "missing"."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ..errors import UserError
from ..gates import GATED_METRICS, band
from ..measurement import check_phase
from ..throughput import STEP_METRICS, TIMES
from ..units import parse_bytes, parse_fraction

MISSING = "missing"
"""The rule against tests and figures that are no longer there."""

_OF_BYTES = (*GATED_METRICS, *(metric for metric, kind in STEP_METRICS.items() if kind.key == "bytes"))


@dataclass(frozen=True)
class Rule:
    """How much worse a figure may get; one of the two bounds is given, unless it is the rule `MISSING`."""

    text: str  # as it was given
    metric: str
    fraction: float | None = None
    size: int | None = None  # bytes

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises `UserError` for a text that is no rule."""
        source = f"--fail-on: {text!r}"
        if text == MISSING:
            return cls(text, MISSING)
        metric, colon, limit = text.partition(":")
        base, at, phase = metric.partition("@")
        known = base in GATED_METRICS if at else base in (*GATED_METRICS, *STEP_METRICS)
        if not colon or not known:
            metrics = ", ".join((*GATED_METRICS, *STEP_METRICS))
            raise UserError(
                f'{source} is no rule; write a metric and how much worse it may get, as in "allocated:1%", or '
                f'"{MISSING}". Metrics: {metrics}; with a phase, as in "reserved@optimizer": {", ".join(GATED_METRICS)}'
            )
        if at:
            check_phase(phase, source)
        if limit.rstrip().endswith("%"):
            fraction = parse_fraction(limit, source)
            if fraction >= 1 and base in TIMES:
                raise UserError(f"{source}: throughput cannot fall by more than 100%; allowed are 0% to below 100%")
            return cls(text, metric, fraction=fraction)
        if base in _OF_BYTES:
            return cls(text, metric, size=parse_bytes(limit, source))
        raise UserError(f"{source}: {limit!r} is not a percentage, as in 1%; {base} is no size")

    def is_about(self, metric_id: str) -> bool:
        """Whether it bounds this metric; one on throughput bounds that of solo ranks too."""
        return metric_id == self.metric or (self.metric == "throughput" and metric_id in TIMES)

    def is_broken(self, before: int, after: int) -> bool:
        """Whether a figure of the metric got worse by more. Of a step's time, throughput falls as it rises."""
        if self.fraction is not None and self.metric in TIMES:
            return after * (1 - Fraction(repr(self.fraction))) > before
        return after > before + (self.size if self.size is not None else band(before, self.fraction or 0.0, 0))
