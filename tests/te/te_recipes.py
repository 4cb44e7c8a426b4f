"""The small model of the tests of Transformer Engine, its sizes, and figures of its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Model, Recipe, Training

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQUENCE = 2, 256, 4, 1024, 1024, 512

RECIPE = Recipe(
    model=Model(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=FFN,
        vocab_size=VOCAB,
        normalization="RMSNorm",
        activation="swiglu",
    ),
    training=Training(seq_length=SEQUENCE, steps=2, transformer_impl="transformer_engine"),
)

SHAPES = {
    "linear_qkv": (3 * HIDDEN, HIDDEN),
    "linear_proj": (HIDDEN, HIDDEN),
    "linear_fc1": (2 * FFN, HIDDEN),
    "linear_fc2": (HIDDEN, FFN),
}
"""Of the weights of a layer."""

WEIGHTS = LAYERS * sum(rows * columns for rows, columns in SHAPES.values())
PARAMETERS = WEIGHTS + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN  # embedding, output layer, norms


def with_megatron(**settings: Any) -> Recipe:
    """With settings by Megatron's names."""
    return RECIPE.but(megatron=settings)


def distributed(**settings: Any) -> Recipe:
    """With the distributed optimizer too."""
    return RECIPE.but(distributed_optimizer=True, megatron=settings)


def index(measurement: Measurement, phase: str) -> int:
    """Of a phase such as "step-2/forward"."""
    assert measurement.failure is None, measurement.failure
    return [figures.name for figures in measurement.ranks[0].phases].index(phase)


def resting(measurement: Measurement, phase: str) -> int:
    """Allocated bytes at the end of a phase."""
    return measurement.ranks[0].phases[index(measurement, phase)].resting["allocated"]


def category(measurement: Measurement, name: str, phase: str = "step-2/forward") -> int:
    """Bytes of a category at the peak of a phase."""
    composition = measurement.ranks[0].composition
    assert composition is not None
    categories: Mapping[Any, int] = composition.categories(index(measurement, phase))
    return categories[name]
