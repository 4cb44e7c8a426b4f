"""Results with everything that a page draws, made by hand: the same figures at every call."""

from __future__ import annotations

import dataclasses

from pytest_mbmem.diagnosis import Action, Finding
from pytest_mbmem.measurement import CATEGORIES, Composition, Owner, RankMeasurement, SegmentMap
from pytest_mbmem.report.results import Measured

MIB = 2**20

PARAMETERS, ACTIVATIONS = (
    Owner("parameters", "output_layer"),
    Owner("activations", "decoder.layers.*.mlp", "mlp.py:7", 4),
)
ROUNDING = Owner("rounding")


def point(phase: int, parameters: int, activations: int) -> tuple[int, ...]:
    """Of a timeline; sizes in MiB."""
    sizes = {"parameters": parameters * MIB, "activations": activations * MIB}
    return phase, *(sizes.get(category, 0) for category in CATEGORIES)


SEGMENTS = (
    SegmentMap(2 * MIB, True, ((MIB, CATEGORIES.index("buffers")), (MIB, -1))),
    SegmentMap(
        100 * MIB,
        False,
        (
            (30 * MIB, CATEGORIES.index("parameters")),
            (10 * MIB, -1),
            (5 * MIB, CATEGORIES.index("activations")),
            (15 * MIB, CATEGORIES.index("activations")),
            (40 * MIB, -1),
        ),
    ),
)


def with_history(measured: Measured, *owners: Owner) -> Measured:
    """The same, with what its ranks held: 30 MiB of parameters, 1 MiB of rounding, and otherwise activations.

    These belong to the last of the owners but for 1 MiB of each other one; if there are none, to layers.
    """
    ranks = tuple(_with_history(rank, owners or (ACTIVATIONS,)) for rank in measured.measurement.ranks)
    measured.measurement = dataclasses.replace(measured.measurement, ranks=ranks)
    return measured


def _with_history(rank: RankMeasurement, owners: tuple[Owner, ...]) -> RankMeasurement:
    held = rank.peak() // MIB - 31
    timeline = (point(0, 0, 0), point(0, 1, 0), point(1, 30, held // 2), point(1, 30, held), point(1, 30, 0))
    others = len(owners) - 1
    sizes = (*(MIB for _ in range(others)), (held - others) * MIB)
    at_peaks = ((MIB, *(0 for _ in owners), 0), (30 * MIB, *sizes, MIB))
    composition = Composition((PARAMETERS, *owners, ROUNDING), at_peaks, timeline)
    return dataclasses.replace(rank, composition=composition, segments_at_peak=SEGMENTS)


FINDING = Finding(
    rule="fragmentation",
    symptom="memory is reserved that no block can use",
    evidence=("52.00 MiB of 102.00 MiB are free",),
    cause="blocks of changing sizes",
    confirm="look at the segments at the peak",
    actions=(Action("set expandable_segments:True", "0.00% of a step"), Action("fix the sequence length")),
    source="a document",
)
