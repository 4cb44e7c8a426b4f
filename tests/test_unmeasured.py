"""Settings that Megatron takes and that would be measured wrongly here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_mbmem import graph_settings, megatron_settings
from pytest_mbmem.recipe import Model, Moe, Recipe
from pytest_mbmem.unmeasured import _NOT_MEASURED, _OF_TE, _OFF, _OWN_CP, reasons

RECIPE = Recipe(model=Model(num_layers=4, hidden_size=64, num_attention_heads=4))
NAMES = [name for names in _NOT_MEASURED.values() for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_a_setting_that_cannot_be_measured_is_named_with_its_reason(name: str) -> None:
    (reason,) = RECIPE.but(megatron={name: "local"}).not_yet()
    assert reason.startswith(f"megatron.{name}: ")


@pytest.mark.parametrize(("name", "off"), [(name, off) for name in NAMES for off in (None, False, *_OFF.get(name, ()))])
def test_a_setting_that_asks_for_nothing_can_be_measured(name: str, off: object) -> None:
    assert RECIPE.but(megatron={name: off}).not_yet() == []


def test_settings_with_the_same_reason_are_named_together() -> None:
    recipe = RECIPE.but(megatron={"fp8": "hybrid", "fp8_param": True, "nccl_ub": True, "init_method_std": 0.1})
    together, alone = reasons(recipe)
    assert together.startswith("megatron.fp8, megatron.fp8_param: Transformer Engine's own modules")
    assert alone.startswith("megatron.nccl_ub: ")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine."""
    monkeypatch.setattr(megatron_settings, "versions_of", lambda packages: dict.fromkeys(packages, "2.20.2"))


OF_TE = RECIPE.but(transformer_impl="transformer_engine")


@pytest.mark.parametrize("name", [*_NOT_MEASURED[_OF_TE], *_NOT_MEASURED[_OWN_CP]])
@pytest.mark.usefixtures("installed")
def test_what_transformer_engine_s_own_layers_do_is_measured_with_them(name: str) -> None:
    assert OF_TE.but(megatron={name: "local"}).not_yet() == []
    assert RECIPE.but(megatron={name: "local"}).not_yet() != []


def test_its_settings_need_it_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_settings, "versions_of", lambda packages: {})
    (reason,) = OF_TE.but(megatron={"fp8": "hybrid"}).not_yet()
    assert reason.startswith("megatron.fp8: Transformer Engine's own modules")


@pytest.mark.usefixtures("installed")
def test_flash_attn_has_no_context_parallelism_here() -> None:
    split = OF_TE.but(cp=2, attention_backend="flash")
    assert [reason.partition(":")[0] for reason in split.not_yet()] == [
        "parallelism.cp with training.attention_backend flash of Transformer Engine"
    ]
    assert split.but(attention_backend="fused").not_yet() == []
    assert split.but(transformer_impl="local").not_yet() == []


def test_a_variable_that_is_read_on_import_has_no_effect_on_one_recipe() -> None:
    (reason,) = RECIPE.but(environment={"NVTE_NVFP4_DISABLE_RHT": "1", "NVTE_FUSED_ATTN": "0"}).not_yet()
    assert reason.startswith("environment.NVTE_NVFP4_DISABLE_RHT: Transformer Engine reads it when it is loaded")


def graphs(implementation: str = "local", scope: object = None, **more: object) -> dict[str, object]:
    return {"cuda_graph_impl": implementation, **({} if scope is None else {"cuda_graph_scope": scope}), **more}


@pytest.mark.parametrize(
    ("settings", "settled"),
    [
        (graphs(), 3),
        (graphs(scope="attn"), 3),
        (graphs(scope="full_iteration"), 5),
        (graphs("transformer_engine"), 5),
        (graphs("transformer_engine", cuda_graph_warmup_steps=1), 3),
        (graphs("transformer_engine", cuda_graph_warmup_steps=0), 2),
        (graphs("none"), 1),
        ({}, 1),
    ],
    ids=str,
)
def test_a_run_must_reach_the_steps_that_replay_graphs(settings: dict[str, object], settled: int) -> None:
    recipe = RECIPE.but(megatron=settings, transformer_impl="local", attention_backend="unfused")
    assert recipe.but(steps=settled).not_yet() == []
    if settled > 1:
        (reason,) = recipe.but(steps=settled - 1).not_yet()
        assert reason.startswith(f"training.steps: {settled - 1} are too few with megatron.cuda_graph_impl ")
        assert reason.endswith(f"has settled after step {settled}")


DROPLESS = RECIPE.but(model=replace(RECIPE.model, moe=Moe(num_moe_experts=4)), transformer_impl="local", steps=5)
PADDED = DROPLESS.but(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)


@pytest.mark.parametrize(
    ("implementation", "scope", "can"),
    [
        ("local", "full", False),
        ("local", ["moe_router"], False),
        ("local", "full_iteration", False),
        ("local", "attn", True),
        ("transformer_engine", None, False),
        ("transformer_engine", "attn,moe_router", True),
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], False),
    ],
    ids=str,
)
def test_a_graph_cannot_hold_what_counts_dropless_tokens(implementation: str, scope: object, can: bool) -> None:
    settings = graphs(implementation, scope)
    assert PADDED.but(megatron=settings).not_yet() == []
    reasons_of = DROPLESS.but(megatron=settings).not_yet()
    assert [reason.partition(":")[0] for reason in reasons_of] == ([] if can else ["megatron.cuda_graph_scope"])


def test_graphs_of_transformer_engines_layers_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPE.but(megatron=graphs(), transformer_impl="transformer_engine", steps=3)
    monkeypatch.setattr("pytest_mbmem.graph_settings.has_te_layers", lambda _: False)
    (reason,) = recipe.not_yet()
    assert reason.startswith("megatron.cuda_graph_impl: Transformer Engine is not installed")
    monkeypatch.setattr("pytest_mbmem.graph_settings.has_te_layers", lambda _: True)
    assert recipe.not_yet() == []


def test_older_names_of_graphs_are_refused_with_the_new_one() -> None:
    (reason,) = RECIPE.but(megatron={"enable_cuda_graph": True}).not_yet()
    assert reason == "megatron.enable_cuda_graph: it is an older name of cuda_graph_impl, which is measured"


def test_a_recipe_without_graphs_is_itself_otherwise() -> None:
    recipe = RECIPE.but(megatron=graphs(scope="attn", init_method_std=0.1))
    assert graph_settings.without_graphs(recipe) == RECIPE.but(megatron={"init_method_std": 0.1})
    assert graph_settings.without_graphs(RECIPE) is RECIPE
