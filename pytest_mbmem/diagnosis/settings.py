"""Rules on settings that exclude each other: the rows of the documents' tables that are errors of configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .case import Case
from .finding import MEMORY, RECOMPUTE, Action, Finding


@dataclass(frozen=True)
class _Row:
    """A row of a table, for the constraints of the catalogue that it is about."""

    rule: str
    ids: tuple[str, ...]
    cause: str
    actions: tuple[Action, ...]
    source: str


_ROWS = (
    _Row(
        "expandable segments with NCCL user buffers",
        ("nccl-ub-with-expandable-segments",),
        "NCCL user buffers are incompatible with the expandable allocator",
        (
            Action("take expandable_segments:True out of memory.alloc_conf"),
            Action("or turn off megatron.nccl_ub"),
        ),
        MEMORY,
    ),
    _Row(
        "pipeline parallelism with CPU offloading",
        ("cpu-offload-with-pp",),
        "memory.cpu_offloading is set with parallelism.pp above 1",
        (Action("turn memory.cpu_offloading off"), Action("or set parallelism.pp to 1")),
        MEMORY,
    ),
    _Row(
        "expert overlap with recompute",
        (
            "ep-overlap-with-moe-recompute",
            "ep-overlap-with-full-recompute",
            "recompute-shared-experts-with-overlap",
        ),
        "whole-moe or shared_experts recompute would replay the communication that is overlapped",
        (
            Action("keep the overlap and recompute a compatible inner boundary, as moe_act or layernorm"),
            Action("or turn the overlap off and measure the whole configuration again"),
        ),
        RECOMPUTE,
    ),
    _Row(
        "full recompute with CUDA graphs",
        ("cuda-graph-with-full-recompute",),
        "full recompute goes with a graph of the full iteration alone",
        (
            Action(
                'set megatron.cuda_graph_impl to "full_iteration" (in Megatron Core 0.16 and 0.17 "local" with scope '
                '"full_iteration")'
            ),
            Action("or turn CUDA graphs off"),
            Action("or recompute selected modules"),
        ),
        RECOMPUTE,
    ),
)

IDS: Mapping[str, str] = {id: row.rule for row in _ROWS for id in row.ids}
"""The constraints that a rule is about, and which."""


def refused(case: Case) -> Iterator[Finding]:
    """A recipe that was refused for one of them."""
    from ..incompatibilities import catalog  # which needs PyYAML

    for row in _ROWS:
        found = [id for id in dict.fromkeys(case.refused) if id in row.ids]
        if not found:
            continue
        ids = ", ".join(found)
        yield Finding(
            row.rule,
            f"the recipe is refused before anything runs: {ids}",
            tuple(f"{id} forbids: {catalog()[id].forbids.text}" for id in found),
            row.cause,
            f"mbmem check RECIPE.yaml; mbmem explain {found[0]}",
            row.actions,
            row.source,
        )
