"""The catalogue's conditions: what is no condition is refused when it is read, and none fails in being evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.incompatibilities import Entry, catalog
from pytest_mbmem.incompatibilities.catalog import Names
from pytest_mbmem.incompatibilities.expression import Expression
from pytest_mbmem.megatron_settings import settings
from pytest_mbmem.recipe import Recipe

VERSIONS: list[dict[str, str]] = [
    {"megatron-core": "0.16.1", "torch": "2.14.1"},
    {"megatron-core": "0.19.2", "torch": "2.14.1", "transformer-engine": "2.9"},
    {},
]

# values of another kind than in the examples
OTHERS: list[dict[str, Any]] = [
    {"num_moe_experts": 4, "moe_layer_freq": 2, "cuda_graph_impl": "local", "recompute_granularity": "selective"},
    {"num_moe_experts": 4, "moe_layer_freq": [0, 1, 1, 1], "moe_router_load_balancing_type": ["aux_loss", "none"]},
    {"cuda_graph_impl": "local", "cuda_graph_scope": "attn,mlp", "recompute_modules": "mlp"},
    {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": [["embedding"], ["decoder", "loss"]]},
    {"recompute_granularity": "full", "fine_grained_activation_offloading": True, "offload_modules": "core_attn"},
]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("older(torch)", "older takes 2 arguments, not 1"),
        ("len(modules, modules)", "len takes 1 argument, not 2"),
        ("layout_layers(modules)", "layout_layers takes 2 arguments, not 1"),
        ('older(torch, "two")', "'two' is not a version, as in"),
        ("older(torch, 2.6)", "2.6 is not a version, as in"),
        ("older(torch, modules)", "modules is not a version, as in"),
        ("len(*modules)", "Starred is not possible in an expression"),
    ],
)
def test_a_wrong_call_is_refused_when_it_is_read(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"^here: .*{problem}"):
        Expression(text, ["torch", "modules"], "here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("as_list(modules)", ["a", "b"]),
        ("as_list(number) + as_list(nothing)", [2]),
        ("[is_number(number), is_number(modules), is_text(modules), is_text(nothing)]", [True, False, True, False]),
        ("all_divisible([4, 2, 0], number) and not all_divisible([4, 3], number)", True),
        ("largest([1, 3, number]) + largest([])", 3),
        ("first([1, 3, number]) + first([])", 1),
    ],
)
def test_functions(text: str, value: object) -> None:
    names = {"modules": "a, b", "number": 2, "nothing": None}
    assert Expression(text, list(names), "here").value(names) == value


def examples() -> Iterator[dict[str, Any]]:
    """Of all entries."""
    for entry in catalog().values():
        found = entry.example
        yield settings(found) if isinstance(found, Recipe) else found.settings


def conditions(entry: Entry) -> Iterator[Expression]:
    """All of an entry."""
    yield entry.forbids
    yield from (outcome.condition for outcome in entry.outcomes if outcome.condition is not None)


@pytest.mark.parametrize("versions", VERSIONS, ids=str)
def test_no_condition_fails_on_the_settings_of_any_example(versions: dict[str, str]) -> None:
    """One that does counts as not broken, and a constraint would be lost without a word."""
    failed = []
    for found in (*examples(), *OTHERS):
        for entry in catalog().values():
            for condition in conditions(entry):
                try:
                    condition.value(Names(catalog(), found, versions))
                except Exception as error:
                    failed.append((entry.id, condition.text, found, error))
    assert failed == []
