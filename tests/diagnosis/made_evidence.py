"""Evidence made by hand, for the rules of the diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_mbmem.compare import Comparison
from pytest_mbmem.diagnosis import Case, Finding, Subject, diagnose
from pytest_mbmem.gates import Judgement, PeakGate
from pytest_mbmem.measurement import Composition, Device, Failure, Measurement, Owner, PhaseFigures, RankMeasurement
from pytest_mbmem.oom import Diagnosis, Shortage, Trial
from pytest_mbmem.recipe import Mla, Model, Moe, Parallelism, Recipe, Training

MIB, GIB = 2**20, 2**30
H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=True)

MODEL = Model(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024)
DENSE = Recipe(model=MODEL, training=Training(seq_length=512, steps=2))
FLASH = DENSE.but(attention_backend="flash")
MLA = Recipe(
    model=Model(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1024, mla=Mla()),
    training=Training(seq_length=512, steps=2),
)
MOE = Recipe(
    model=Model(
        num_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=1024,
        moe=Moe(num_moe_experts=4, moe_grouped_gemm=True),
    ),
    parallelism=Parallelism(),
    training=Training(seq_length=512, steps=2),
)

Place = tuple[int, str]
PEAK: Place = (2, "backward")
STEP_2: Mapping[Place, int] = {(0, "build"): MIB, (1, "optimizer"): MIB, PEAK: 0, (2, "optimizer"): MIB}


def selective(recipe: Recipe, *labels: str) -> Recipe:
    """The recipe with selective recompute of these labels."""
    return recipe.but(recompute_granularity="selective", recompute_modules=list(labels))


def held(owners: Mapping[str, int], rest: int = 0) -> dict[Owner, int]:
    """Activations by module, as in {"mlp.experts": 3}; `rest` bytes of parameters."""
    found = {}
    for name, size in owners.items():
        module, _, line = name.partition("|")
        found[Owner("activations", f"decoder.layers.*.{module}", line or "x.py:1 (forward)")] = size
    return found | ({Owner("parameters", "decoder"): rest} if rest else {})


def rank(
    number: int = 0,
    peak: int = 10 * GIB,
    *,
    reserved: int | None = None,
    owners: Mapping[Owner, int] | None = None,
    phases: Mapping[Place, int] | None = None,
    **rest: Any,
) -> RankMeasurement:
    """Of two whole steps, with its peak allocated (and reserved) in step-2/backward unless `phases` says otherwise.

    With `owners`, these hold the peak, which then is their sum.
    """
    if owners is not None:
        peak = sum(owners.values())
    sizes = {**STEP_2, PEAK: peak} if phases is None else dict(phases)
    top = peak if reserved is None else reserved
    figures = tuple(
        PhaseFigures(step, phase, {"allocated": size, "reserved": max(size, top) if size == peak else size}, {})
        for (step, phase), size in sizes.items()
    )
    if owners is not None:
        at_peaks = tuple(tuple(owners.values()) if p == PEAK else (0,) * len(owners) for p in sizes)
        rest["composition"] = Composition(tuple(owners), at_peaks)
    return RankMeasurement(number, {"tp": 0, "cp": 0, "dp": 0, "pp": number}, 1, figures, **rest)


def measurement(*ranks: RankMeasurement, recipe: Recipe | None = DENSE, **rest: Any) -> Measurement:
    """Of these ranks."""
    return Measurement(
        H100,
        ranks,
        recipe=recipe.to_dict() if recipe is not None else None,
        recipe_digest="digest" if recipe is not None else None,
        **{"environment": {"torch": "2.14.1"}, **rest},
    )


def shortage(verdict: Any = None, *trials: Trial, remedies: tuple[Any, ...] = (), **rest: Any) -> Shortage:
    """Of 2 GiB that 79 GiB could not serve; with a verdict, it has a diagnosis."""
    fields: dict[str, Any] = {
        "requested": 2 * GIB,
        "allocated": 70 * GIB,
        "reserved": 76 * GIB,
        "pieces": 4,
        "largest_piece": GIB,
        "device_free": GIB,
        "limit": 80 * GIB,
        "expandable_segments": False,
        **rest,
    }
    if verdict is not None:
        fields["diagnosis"] = Diagnosis(verdict, "reason", trials, remedies)
    return Shortage(**fields)


def out_of_memory(found: Shortage | None = None, number: int = 0, place: Place = (1, "forward")) -> Failure:
    """Of this rank, there."""
    return Failure("out of memory", number, "CUDA out of memory.", *place, shortage=found)


def over_limit(one: Measurement, phase: str | None = None) -> Subject:
    """A measurement whose worst rank is over a limit."""
    worst = one.worst("allocated", phase)
    gate = PeakGate(limit=1, phase=phase)
    peak = Judgement("regression", gate, "k", worst.peak("allocated", phase), 1, 1, worst.rank, "step-2/backward")
    return Subject(one, peaks=(peak,))


def compared(control: Measurement, candidate: Measurement, *, metric: Any = "allocated", **differences: Any) -> Case:
    """A sweep of one row; the differences are of memory settings."""
    pairs = {f"memory.{name}": pair for name, pair in differences.items()}
    return Case(comparisons=(Comparison(control, candidate, pairs, metric),))


RECOMPUTE: dict[str, Any] = {"recompute_granularity": (None, "selective"), "recompute_modules": (None, ["core_attn"])}


def rules(case: Case | Subject) -> list[str]:
    """The rules that fire."""
    return [finding.rule for finding in diagnose(case if isinstance(case, Case) else Case((case,)))]


def the(rule: str, case: Case | Subject) -> Finding:
    """The finding of a rule that fires once."""
    (finding,) = [f for f in diagnose(case if isinstance(case, Case) else Case((case,))) if f.rule == rule]
    return finding


def text(finding: Finding) -> str:
    """All evidence."""
    return "\n".join(finding.evidence)
