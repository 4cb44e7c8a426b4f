"""The file of --mbmem-metrics: figures in OpenMetrics text, which GitLab compares with the target branch's.

https://docs.gitlab.com/ci/testing/metrics_reports/ and, for the form,
https://prometheus.io/docs/specs/om/open_metrics_spec/
"""

from __future__ import annotations

from collections.abc import Iterator

from ..baselines import clean_nodeid
from ..measurement import Measurement
from ..texts import encodable
from ..throughput import STEP_METRICS, Throughput
from .results import Measured, Results

_FAMILIES = {
    "mbmem_peak_bytes": ("bytes", "Peak GPU memory of the worst rank."),
    "mbmem_saved_bytes": ("bytes", "Peak GPU memory that the measured settings save against their control."),
    "mbmem_unused_bytes": ("bytes", "Reserved memory that held no tensor at the peak."),
    "mbmem_step_seconds": ("seconds", "Median time of a step."),
    "mbmem_step_flops": ("flops", "FLOPs of a step on the rank that computes most."),
    "mbmem_step_bytes": ("bytes", "Bytes that a step sends or moves on the rank with most of them."),
}
_OF_STEPS = {"step_ns": "mbmem_step_seconds", "flops": "mbmem_step_flops", "bytes": "mbmem_step_bytes"}

Sample = tuple[str, str, int]
"""A family, the metric as baselines call it, and the figure; a time in nanoseconds."""


def metrics(results: Results) -> str:
    """One line for each figure, with the labels test, device and metric. Failed measurements have none.

    Of a test that measured several times under one name, the highest.
    """
    found: dict[tuple[str, str], int] = {}
    for test in results.tests.values():
        for measured in test.measured:
            label = "::".join(filter(None, clean_nodeid(test.id))) + (f"@{measured.name}" if measured.name else "")
            device = measured.measurement.device.key
            for family, metric, value in _samples(measured):
                labels = f'test="{_escaped(label)}",device="{_escaped(device)}",metric="{_escaped(metric)}"'
                found[family, labels] = max(value, found.get((family, labels), value))
    lines: list[str] = []
    for family, (unit, text) in _FAMILIES.items():
        samples = [
            f"{family}{{{labels}}} {_number(family, value)}" for (of, labels), value in found.items() if of == family
        ]
        if samples:
            head = [f"# TYPE {family} gauge", f"# UNIT {family} {unit}", f"# HELP {family} {text}"]
            lines += [*head, *samples]
    return "\n".join([*lines, "# EOF"]) + "\n"


def _samples(measured: Measured) -> Iterator[Sample]:
    measurement = measured.measurement
    if measurement.failure is None and measurement.ranks and not measurement.steps:
        yield from _peaks(measurement)
    for judged in measured.judged:
        if judged.judgement.measured is not None and judged.judgement.gate.phase is not None:
            yield "mbmem_peak_bytes", judged.judgement.gate.metric_id, judged.judgement.measured
    for saving in measured.savings:
        if saving.comparison is not None and saving.comparison.has_figures:
            yield (
                "mbmem_saved_bytes",
                f"{saving.rule.metric_id} against {saving.rule.control}",
                saving.comparison.saving,
            )
    for fragmentation in measured.fragmentations:
        if fragmentation.unused is not None:
            yield "mbmem_unused_bytes", fragmentation.rule.metric_id, fragmentation.unused
    for steps in measured.throughputs:
        step = steps.judgement
        if step.measured is not None and step.throughput is None:
            yield _OF_STEPS[STEP_METRICS[step.metric_id].key], step.metric_id, step.measured


def _peaks(measurement: Measurement) -> Iterator[Sample]:
    """And the time of a step, where it was measured."""
    yield "mbmem_peak_bytes", "allocated", measurement.peak()
    yield "mbmem_peak_bytes", "reserved", measurement.peak("reserved")
    throughput = Throughput.of(measurement)
    if throughput is not None:
        yield "mbmem_step_seconds", throughput.metric_id, throughput.step


def _number(family: str, value: int) -> str:
    return repr(value / 1e9) if family == "mbmem_step_seconds" else str(value)


def _escaped(text: str) -> str:
    """A label's value, on one line and in UTF-8."""
    text = encodable(text)
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
