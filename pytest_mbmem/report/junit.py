"""Figures of a test as JUnit properties, which pytest's --junitxml writes and xdist carries to the controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..compare import Comparison, Costs
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import Judgement
from ..growth import GrowthSummary
from ..measurement import Measurement
from ..savings import SavingJudgement
from ..sweep import Sweep
from ..throughput import Throughput, ThroughputJudgement
from .results import Judged, Measured

if TYPE_CHECKING:
    from ..refusals import Proof


TEST = "mbmem_test"
"""The property that holds a test's node id, which its class name and name do not tell exactly."""

Properties = list[tuple[str, object]]


def properties(
    measured: Sequence[Measured],
    sweeps: Sequence[Sweep] = (),
    growths: Sequence[GrowthSummary] = (),
    proofs: Sequence[Proof] = (),
    nodeid: str = "",
) -> Properties:
    """Name and value of each figure, in bytes or as text.

    Behind a name stand the gate, except for the plain one of the whole run's peak allocated, and the measurement's
    name, if it has one: "mbmem_verdict@reserved[control]". Figures of a memory_saving marker begin with "saving_", with
    a number if there are several of the same figure; those of a sweep's rows end with the row's name. Figures of a fits
    marker begin with "fits_", with the GPU behind them. Figures of a throughput marker begin with "throughput_", with
    what is judged behind them, those of a no_memory_growth marker with "growth_". Those of a proof begin with "proof_"
    and end with the constraint's id.
    """
    found = [property for m in measured for property in named(m.name, _figures(m))]
    for number, sweep in enumerate(sweeps, 1):
        found += of_sweep(sweep, number)
    for growth in growths:
        found += of_growth(growth)
    for proof in proofs:
        found += of_proof(proof.id, proof.verdict, proof.headline)
    return [(TEST, nodeid), *found] if found and nodeid else found


def named(name: str | None, figures: Iterable[tuple[str, object]]) -> Properties:
    """As properties of a measurement with this name; without those whose value is None."""
    behind = f"[{name}]" if name else ""
    return [(f"mbmem_{figure}{behind}", value) for figure, value in figures if value is not None]


def of_sweep(sweep: Sweep, number: int) -> Properties:
    """Of a sweep that is the test's first, second, ..."""
    name = sweep.name or ("" if number == 1 else str(number))
    found: Properties = []
    for row in sweep:
        label = f"{name}: {row.name}" if name else row.name
        found += named(label, ((f"sweep_{figure}", value) for figure, value in _compared(row.comparison, row.verdict)))
    return found


def of_growth(growth: GrowthSummary) -> Properties:
    """Of a no_memory_growth marker."""
    figures = {
        "verdict": "pass" if growth.passed else "growth",
        "slack_bytes": growth.slack,
        "per_step_bytes": growth.per_step,
        "over_control_bytes": growth.over_control,
        "per_microbatch_bytes": growth.per_microbatch,
        "freed_by_gc_bytes": growth.freed_by_gc,
    }
    return named(growth.name, ((f"growth_{figure}", value) for figure, value in figures.items()))


def of_proof(constraint: str, verdict: str, headline: str) -> Properties:
    """Of a proof that a recipe is refused."""
    return named(constraint, [("proof_verdict", verdict), ("proof_headline", headline)])


def _figures(measured: Measured) -> Iterator[tuple[str, object]]:
    yield from of_measurement(measured.measurement)
    for judged in measured.judged:
        yield from of_peak(judged)
    for saving, gate in zip(measured.savings, saving_gates(measured), strict=True):
        yield from of_saving(saving, gate)
    for fit in measured.fits:
        yield from of_fit(fit)
    for fragmentation in measured.fragmentations:
        yield from of_fragmentation(fragmentation)
    for steps in measured.throughputs:
        yield from of_steps(steps.judgement)


def of_measurement(measurement: Measurement) -> Iterator[tuple[str, object]]:
    """What does not depend on a gate."""
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
        yield "peak_allocated_bytes_by_rank", " ".join(f"{rank.rank}:{rank.peak()}" for rank in measurement.ranks)
        costs = Costs.of(measurement)
        yield "flops_per_step", costs.flops
        yield "host_peak_bytes", costs.host_peak
        for way, size in costs.moved_bytes.items():
            yield f"moved_{_name(way)}_bytes", size
        yield from _times(measurement)
    if measurement.steps:
        yield "losses", " ".join("nan" if step.loss is None else f"{step.loss:.6g}" for step in measurement.steps)


def saving_gates(measured: Measured) -> list[str]:
    """What stands behind the figures of each saving: nothing for the first one of allocated bytes."""
    seen: Counter[str] = Counter()
    gates = []
    for saving in measured.savings:
        metric = saving.rule.metric_id
        seen[metric] += 1
        gates.append(("" if metric == "allocated" else f"@{metric}") + (f"#{seen[metric]}" if seen[metric] > 1 else ""))
    return gates


def of_saving(saving: SavingJudgement, gate: str) -> Iterator[tuple[str, object]]:
    """Of a memory_saving marker; `gate` is one of `saving_gates`."""
    for name, value in _compared(saving.comparison, saving.verdict):
        yield f"saving_{name}{gate}", value


def of_fit(fit: FitJudgement) -> Iterator[tuple[str, object]]:
    """Of a fits marker."""
    gate = f"@{fit.rule.gpu}"
    yield f"fits_verdict{gate}", fit.verdict
    yield f"fits_reserved_bytes{gate}", fit.reserved
    yield f"fits_outside_bytes{gate}", sum(fit.outside.values()) if fit.outside else None
    yield f"fits_headroom_bytes{gate}", fit.rule.headroom
    yield f"fits_left_bytes{gate}", fit.left


def of_fragmentation(fragmentation: FragmentationJudgement) -> Iterator[tuple[str, object]]:
    """Of a fragmentation marker."""
    gate = "" if fragmentation.rule.phase is None else f"@{fragmentation.rule.phase}"
    yield f"fragmentation_verdict{gate}", fragmentation.verdict
    yield f"fragmentation{gate}", fragmentation.fraction
    yield f"fragmentation_bytes{gate}", fragmentation.unused


def of_steps(steps: ThroughputJudgement) -> Iterator[tuple[str, object]]:
    """Of a throughput marker."""
    gate = f"@{steps.metric_id if steps.against_minimum is None else steps.gate.judges}"
    yield f"throughput_verdict{gate}", steps.verdict
    if steps.throughput is None:
        yield f"throughput_measured{gate}", steps.measured
        yield f"throughput_baseline{gate}", steps.reference


def _compared(comparison: Comparison | None, verdict: str) -> Iterator[tuple[str, object]]:
    yield "verdict", verdict
    if comparison is not None and comparison.has_figures:
        yield "control_bytes", comparison.before
        yield "measured_bytes", comparison.after
        yield "saved_bytes", comparison.saving
        yield "saved_bytes_by_rank", " ".join(f"{rank.rank}:{rank.saving}" for rank in comparison.ranks)
        yield "control_phase", comparison.phase_before
        yield "measured_phase", comparison.phase_after
        yield "growth", (growth.text() or None) if (growth := comparison.growth) is not None else None
        extra = comparison.extra
        yield "extra_flops", extra.flops
        yield "slowdown", comparison.slowdown
        for group, size in extra.collective_bytes.items():
            yield f"extra_{_name(group)}_collective_bytes", size
        for way, size in extra.moved_bytes.items():
            yield f"extra_moved_{_name(way)}_bytes", size
        yield "extra_host_bytes", extra.host_peak
        if comparison.is_about_the_allocator:
            for side, figures in zip(("control_", ""), comparison.allocator, strict=True):
                yield f"{side}allocated_bytes", figures.allocated
                yield f"{side}reserved_bytes", figures.reserved
                yield f"{side}retries", figures.retries
                yield f"{side}segments", figures.segments


def _times(measurement: Measurement) -> Iterator[tuple[str, object]]:
    throughput = Throughput.of(measurement)
    if throughput is not None:
        yield "step_metric", throughput.metric_id
        yield "step_seconds", throughput.step / 1e9
        yield "step_spread_seconds", throughput.spread / 1e9
        yield "cold_step_seconds", None if throughput.cold is None else throughput.cold / 1e9
        tokens, flops = throughput.rate("tokens/s"), throughput.rate("FLOP/s")
        yield "tokens_per_second_per_gpu", None if tokens is None else tokens.amount
        yield "model_flops_per_second_per_gpu", None if flops is None else flops.amount


def _name(name: str) -> str:
    return name.replace(" ", "_")


def of_peak(judged: Judged[Judgement]) -> Iterator[tuple[str, object]]:
    """Of a peak_memory marker."""
    judgement = judged.judgement
    metric = judgement.gate.metric_id
    gate = "" if metric == "allocated" else f"@{metric}"
    yield f"verdict{gate}", judgement.verdict
    yield f"measured_bytes{gate}", judgement.measured
    yield f"{'baseline' if judgement.gate.limit is None else 'limit'}_bytes{gate}", judgement.reference
    yield f"growth{gate}", (judgement.growth.text() or None) if judgement.growth is not None else None
