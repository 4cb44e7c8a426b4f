"""What of a peak each recompute label stands for, read off the modules and lines that hold it.

The names are Megatron Core's: layers are decoder.layers.*, and what a label's checkpoint makes again in backward is
held by the modules inside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..measurement import Category, Owner
from ..units import format_bytes, format_fraction
from .case import Spot

MATERIAL = 20
"""A part dominates a peak if it is the largest of its activations and at least one part in 20 of it: a saving that the
documents call real relief was 6.3% of the peak (moe_act, Nemotron 3 Nano)."""

MODEL_STATE: tuple[Category, ...] = ("parameters", "gradients", "main gradients", "optimizer state", "buffers")
"""What activation recompute does not reach."""


def boundary(owner: Owner) -> str:
    """The label that would make an activation again, or the module's own name.

    "experts" is what lies between dispatch and combine, "adapter" what LoRA's keep; of a layer with experts "mlp" is
    routing, dispatch and combine.
    """
    names = owner.module.split(".")
    if "adapter" in names:
        return "adapter"
    if "core_attention" in names:
        return "core_attn"
    if "qkv_up_proj" in owner.line or names[-1].endswith("_up_proj"):
        return "mla_up_proj"
    if "shared_experts" in names:
        return "shared_experts"
    if "experts" in names:
        return "experts"
    if names[-1] in ("input_layernorm", "pre_mlp_layernorm"):
        return "layernorm"
    return "mlp" if "mlp" in names else owner.module


def explains(spot: Spot, belongs: Callable[[Owner], bool]) -> bool:
    """Whether activations that belong to something can be why a peak is too high: what was there before the peak went
    over its baseline is not."""
    if spot.growth is None:
        return True
    grown = sum(
        change.size
        for change in spot.growth.changes
        if change.part.category == "activations"
        and belongs(Owner("activations", change.part.module, change.part.line or change.part.place))
    )
    return 2 * grown >= spot.growth.total


@dataclass(frozen=True)
class Dominating:
    """The largest part of the activations at a peak."""

    boundary: str
    size: int  # bytes
    peak: int
    held: Mapping[Owner, int]  # by whom, the most first

    @property
    def text(self) -> str:
        """As in "12.00 GiB, 31.20% of the peak of 38.46 GiB"."""
        return f"{format_bytes(self.size)}, {format_fraction(self.size / self.peak)} of the peak of " + format_bytes(
            self.peak
        )

    def holders(self, most: int = 2) -> str:
        """Who holds the most of it, as in "9.00 GiB mlp.experts.linear_fc1, 3.00 GiB mlp.experts"."""
        return ", ".join(f"{format_bytes(size)} {owner.module}" for owner, size in list(self.held.items())[:most])


def dominating(spot: Spot) -> Dominating | None:
    """Of the peak; None where no part of its activations does, or the allocator did not tell owners."""
    owners = spot.rank.owners(spot.phase)
    sizes: dict[str, dict[Owner, int]] = {}
    for owner, size in owners.items():
        if owner.category == "activations":
            sizes.setdefault(boundary(owner), {})[owner] = size
    if not sizes:
        return None
    largest = max(sizes, key=lambda name: sum(sizes[name].values()))
    held, peak = sizes[largest], spot.rank.peak("allocated", spot.phase)
    size = sum(held.values())
    return Dominating(largest, size, peak, held) if largest and size * MATERIAL >= peak else None
