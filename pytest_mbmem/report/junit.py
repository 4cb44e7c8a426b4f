"""Figures of a test as JUnit properties, which pytest's --junitxml writes and xdist carries to the controller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .results import Judged, Measured


def properties(measured: Sequence[Measured]) -> list[tuple[str, object]]:
    """Name and value of each figure, in bytes or as text.

    Behind a name stand the gate, except for the plain one of the whole run's peak allocated, and the measurement's
    name, if it has one: "mbmem_verdict@reserved[control]".
    """
    return [
        (f"mbmem_{name}" + (f"[{m.name}]" if m.name else ""), value)
        for m in measured
        for name, value in _figures(m)
        if value is not None
    ]


def _figures(measured: Measured) -> Iterator[tuple[str, object]]:
    measurement = measured.measurement
    yield "device", measurement.device.key
    yield "recipe_digest", measurement.recipe_digest
    if measurement.failure is not None:
        yield "failure", measurement.failure.kind
    elif measurement.ranks:
        worst = measurement.worst()
        yield "peak_allocated_bytes", worst.peak()
        yield "peak_reserved_bytes", measurement.peak("reserved")
        yield "worst_rank", worst.rank
        yield "phase", worst.peak_phase().name
        yield "flops_per_step", measurement.flops_per_step
    for judged in measured.judged:
        yield from _verdict(judged)


def _verdict(judged: Judged) -> Iterator[tuple[str, object]]:
    judgement = judged.judgement
    metric = judgement.gate.metric_id
    gate = "" if metric == "allocated" else f"@{metric}"
    yield f"verdict{gate}", judgement.verdict
    yield f"measured_bytes{gate}", judgement.measured
    yield f"{'baseline' if judgement.gate.limit is None else 'limit'}_bytes{gate}", judgement.reference
