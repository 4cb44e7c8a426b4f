"""What holds the activations of a peak, and settings that change little of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evidence import (
    DENSE,
    FLASH,
    GIB,
    MIB,
    MLA,
    MOE,
    RECOMPUTE,
    compared,
    held,
    measurement,
    out_of_memory,
    over_limit,
    rank,
    rules,
    selective,
    shortage,
    text,
    the,
)

from pytest_mbmem.compare import Comparison
from pytest_mbmem.diagnosis import Case, Subject
from pytest_mbmem.diagnosis.activations import LEAST_GATHERED, LITTLE
from pytest_mbmem.diagnosis.parts import MATERIAL, boundary
from pytest_mbmem.gates import Judgement, PeakGate
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Adapter, Effect, Failure, Measurement, Owner
from pytest_mbmem.recipe import Lora, Recipe
from pytest_mbmem.savings import SavingRule, judge_saving
from pytest_mbmem.split import growth, split_of

UP = "self_attention|megatron/core/transformer/multi_latent_attention.py:822 (qkv_up_proj_and_rope_apply)"
EXPERTS = "mlp.experts.linear_fc1"
NORM = "input_layernorm"
SCORES = "self_attention.core_attention.scale_mask_softmax"
FC1 = "mlp.linear_fc1"


def too_high(recipe: Recipe, rest: int = 0, **owners: int) -> Subject:
    """A peak over its limit that is held by these; "up", "experts", "norm", "scores" and "fc1" are named above."""
    names = {"up": UP, "experts": EXPERTS, "norm": NORM, "scores": SCORES, "fc1": FC1}
    return over_limit(measurement(rank(owners=held({names[n]: s for n, s in owners.items()}, rest)), recipe=recipe))


# What dominates -------------------------------------------------------------------------------------------------------


def test_mla_projections_dominate_although_core_attention_is_recomputed() -> None:
    found = the("MLA projections dominate", too_high(selective(MLA, "core_attn"), up=6 * GIB, fc1=4 * GIB))
    assert found.symptom == "the peak of rank 0 is over its limit, although core_attn is recomputed"
    assert "expanded Q/K/V projection tensors hold 6.00 GiB, 60.00% of the peak of 10.00 GiB" in text(found)
    assert [(action.what.split(":")[0], action.cost) for action in found.actions] == [
        ("add mla_up_proj to memory.recompute_modules", "+5.2% step time on Moonlight 16B")
    ]
    assert "control={\"recompute_modules\": ['core_attn']}" in found.confirm


def test_moe_intermediates_dominate_and_the_narrow_boundary_comes_first() -> None:
    found = the("MoE intermediates dominate", too_high(MOE, experts=6 * GIB, norm=4 * GIB))
    assert [action.what.split()[1] for action in found.actions] == ["moe_act", "layernorm", "moe"]
    assert found.actions[0].cost == "+2.0% step time on Moonlight 16B"
    next_one = the("MoE intermediates dominate", too_high(selective(MOE, "moe_act"), experts=6 * GIB))
    assert [action.what.split()[1] for action in next_one.actions] == ["layernorm", "moe"]


def test_what_the_recipe_cannot_have_is_said_with_the_constraint() -> None:
    model = dataclasses.replace(MOE.model, moe=dataclasses.replace(MOE.model.moe, moe_grouped_gemm=False))  # type: ignore[type-var]
    found = the("MoE intermediates dominate", too_high(dataclasses.replace(MOE, model=model), experts=GIB))
    assert (
        found.actions[0].what == "moe_act is not possible: recompute-moe-act-without-grouped-gemm (see mbmem explain)"
    )


def test_what_was_there_before_a_peak_went_over_its_baseline_is_not_why() -> None:
    """As of a pull request that keeps statistics: the dense MLP held the most before, and did not grow."""
    before = measurement(rank(owners=held({FC1: 6 * GIB}, rest=4 * GIB)))
    for grown, fires in (({FC1: 6 * GIB, "statistics": GIB}, False), ({FC1: 7 * GIB}, True)):
        after = measurement(rank(owners=held(grown, rest=4 * GIB)))
        splits = [split_of(one.worst()) for one in (before, after)]
        assert splits[0] is not None
        assert splits[1] is not None
        grew = growth(splits[0], splits[1])
        peak = Judgement("regression", PeakGate(), "k", 11 * GIB, 10 * GIB, 10 * GIB, 0, "step-2/backward", growth=grew)
        assert ("dense MLP dominates" in rules(Subject(after, peaks=(peak,)))) is fires


def test_norm_outputs_dominate() -> None:
    assert the("norm outputs dominate", too_high(DENSE, norm=GIB)).actions[0].what.startswith("add layernorm")
    assert the("norm outputs dominate", too_high(MOE, norm=GIB)).actions[0].what.startswith("add moe_act")


def test_scores_of_unfused_attention_dominate_and_those_of_flash_attention_do_not() -> None:
    assert rules(too_high(DENSE, scores=GIB)) == ["attention core dominates"]
    assert rules(too_high(FLASH, scores=GIB)) == []


def test_the_dense_mlp_dominates() -> None:
    assert the("dense MLP dominates", too_high(DENSE, fc1=GIB)).actions[0].cost == "-16% throughput on Llama 3 70B"
    assert rules(too_high(MOE, fc1=GIB)) == []  # there it is routing, dispatch and combine


NAMES = {
    "up": "MLA projections dominate",
    "experts": "MoE intermediates dominate",
    "norm": "norm outputs dominate",
    "scores": "attention core dominates",
}
sizes = st.integers(0, 40)


@given(st.sampled_from([DENSE, MLA, MOE]), st.fixed_dictionaries(dict.fromkeys(NAMES, sizes)), st.integers(1, 400))
def test_only_the_largest_part_dominates_and_only_a_material_one(
    recipe: Recipe, parts: dict[str, int], rest: int
) -> None:
    found = rules(too_high(recipe, rest * MIB, **{name: size * MIB for name, size in parts.items() if size}))
    dominating = [rule for rule in found if rule in NAMES.values()]
    assert len(dominating) <= 1
    peak = sum(parts.values()) + rest
    for name, rule in NAMES.items():
        if rule in found:
            assert parts[name] == max(parts.values())
            assert parts[name] * MATERIAL >= peak
    if recipe is not MLA:
        assert NAMES["up"] not in found
    if recipe is not MOE:
        assert NAMES["experts"] not in found


@pytest.mark.parametrize(
    "recipe",
    [
        selective(MLA, "mla_up_proj"),
        MLA.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    ],
    ids=["recomputed", "full"],
)
def test_what_is_recomputed_already_is_not_advised(recipe: Recipe) -> None:
    within = the("norm outputs dominate", too_high(selective(MOE, "moe"), norm=GIB))
    assert [action.what.split()[1] for action in within.actions] == ["layernorm"]  # moe makes what moe_act does again
    assert rules(too_high(recipe, up=GIB)) == []
    assert rules(too_high(selective(MOE, "moe"), experts=GIB)) == []


def test_a_peak_that_passes_or_has_no_owners_is_not_judged() -> None:
    assert rules(Subject(measurement(rank(owners=held({UP: GIB})), recipe=MLA))) == []
    assert rules(over_limit(measurement(rank(), recipe=MLA))) == []
    assert rules(over_limit(measurement(rank(owners=held({UP: GIB})), recipe=None))) == []


def test_shared_experts_dominate() -> None:
    owners = held({"mlp.shared_experts.linear_fc1": GIB})
    moe = dataclasses.replace(MOE.model.moe, moe_shared_expert_intermediate_size=512)  # type: ignore[type-var]
    recipe = dataclasses.replace(MOE, model=dataclasses.replace(MOE.model, moe=moe))
    found = the("shared experts dominate", over_limit(measurement(rank(owners=owners), recipe=recipe)))
    assert [action.what.split()[1] for action in found.actions] == ["shared_experts", "moe"]
    assert rules(over_limit(measurement(rank(owners=owners), recipe=selective(recipe, "moe")))) == []


def test_a_peak_of_reserved_bytes_is_not_one_of_activations() -> None:
    one = measurement(rank(owners=held({UP: GIB}), reserved=2 * GIB), recipe=MLA)
    peak = Judgement("regression", PeakGate("reserved", limit=GIB), "k", 2 * GIB, GIB, GIB, 0, "step-2/backward")
    assert rules(Subject(one, peaks=(peak,))) == []
    comparison = Comparison(one, one, {"memory.alloc_conf": ("", "x")}, "reserved")
    saving = judge_saving(SavingRule("c", at_least=GIB), comparison)
    assert not {rule for rule in rules(Subject(one, savings=(saving,))) if "dominate" in rule}


def test_memory_lost_to_fragmentation_is_no_reason_to_recompute() -> None:
    one = measurement(rank(owners=held({UP: GIB})), recipe=MLA, failure=out_of_memory(shortage("fragmentation")))
    assert rules(Subject(one)) == ["fragmentation"]


def test_activations_of_another_phase_than_that_which_ran_out_are_none_of_its_cause() -> None:
    held_by = held({UP: 8 * GIB})
    one = rank(owners=held_by, phases={(2, "backward"): 8 * GIB, (2, "optimizer"): GIB})
    failure = out_of_memory(place=(2, "optimizer"))
    assert rules(Subject(measurement(one, recipe=MLA, failure=failure))) == []
    failure = out_of_memory(place=(2, "backward"))
    assert rules(Subject(measurement(one, recipe=MLA, failure=failure))) == ["MLA projections dominate"]


def test_where_memory_ran_out_the_rank_that_did_is_looked_at() -> None:
    fine, failed = rank(0, owners=held({FC1: 9 * GIB})), rank(1, owners=held({UP: 8 * GIB}))
    subject = Subject(measurement(fine, failed, recipe=MLA, failure=out_of_memory(number=1)))
    assert the("MLA projections dominate", subject).symptom == "rank 1 ran out of memory"


def test_modules_of_megatron_belong_to_the_labels_that_recompute_them() -> None:
    def of(module: str, line: str = "x.py:1 (forward)") -> str:
        return boundary(Owner("activations", f"decoder.layers.*.{module}", line))

    assert of("self_attention.core_attention") == "core_attn"
    assert of("self_attention.linear_kv_up_proj") == "mla_up_proj"
    assert of("mlp.shared_experts.linear_fc1") == "shared_experts"
    assert of("mlp.experts") == of("mlp.experts.local_experts.*.linear_fc2") == "experts"
    assert of("pre_mlp_layernorm") == "layernorm"
    assert of("mlp.linear_fc1") == of("mlp") == "mlp"
    assert of("mlp.linear_fc1.adapter") == "adapter"
    assert of("self_attention.linear_qkv") == "decoder.layers.*.self_attention.linear_qkv"
    assert of("self_attention.q_layernorm") == "decoder.layers.*.self_attention.q_layernorm"


def test_the_names_are_those_of_real_measurements(launcher: Launcher) -> None:
    """Recompute of labels takes bytes of their boundaries away, more than of any other."""
    mla, moe, dense = MLA.but(attention_backend="flash", steps=1), MOE.but(steps=1), DENSE.but(steps=1)
    tried = [
        (mla, ["mla_up_proj"], {"mla_up_proj"}),
        (moe, ["moe_act", "layernorm"], {"experts", "layernorm"}),
        (dense, ["core_attn"], {"core_attn"}),
    ]
    recipes = [one for recipe, labels, _ in tried for one in (recipe, selective(recipe, *labels))]
    answers = iter(launcher.measure_many(recipes, count_flops=False, check_effects=False))
    for _, labels, names in tried:
        without, with_labels = (_activations(next(answers)) for _ in range(2))
        gone = {name: size - with_labels.get(name, 0) for name, size in without.items()}
        assert set(sorted(gone, key=lambda name: -gone[name])[: len(labels)]) == names
        assert all(gone[name] * 5 >= without[name] for name in names)  # moe_act leaves what FC1 makes


def _activations(measurement: Measurement) -> dict[str, int]:
    found: dict[str, int] = {}
    for owner, size in measurement.worst().owners("forward").items():
        if owner.category == "activations":
            found[boundary(owner)] = found.get(boundary(owner), 0) + size
    return found


# LoRA -----------------------------------------------------------------------------------------------------------------

LORA = dataclasses.replace(DENSE.but(tp=2, sequence_parallel=True), lora=Lora(rank=16))
GATHERED = "self_attention.linear_qkv.adapter|megatron/core/tensor_parallel/mappings.py:141 (_gather_along_first_dim)"


def adapted(recipe: Recipe, gathered: int, rest: int, *, reason: str = "", effective: bool = False) -> Subject:
    asked = recipe.lora is not None and recipe.lora.sequence_parallel_input_regather
    row = Adapter("linear_proj", 4, asked, False, "row-parallel" if asked else "")  # which gathers nothing
    adapters = (Adapter("linear_qkv", 4, asked, effective, reason), row)
    return over_limit(measurement(rank(owners=held({GATHERED: gathered}, rest), adapters=adapters), recipe=recipe))


def test_lora_retains_gathered_inputs() -> None:
    found = the("LoRA retains gathered inputs", adapted(LORA, GIB, 9 * GIB))
    assert "gathered inputs of LoRA hold 1.00 GiB, 10.00% of the peak of 10.00 GiB" in text(found)
    assert "not gathered again: 4 x linear_qkv" in text(found)
    assert found.actions[0].cost == "-0.3% to -6.7% throughput in three recipes"


def test_lora_whose_re_gather_has_no_effect_says_why() -> None:
    asked = LORA.but(sequence_parallel_input_regather=True)
    found = the("LoRA retains gathered inputs", adapted(asked, GIB, 9 * GIB, reason="row-parallel"))
    assert "4 x linear_qkv (row-parallel)" in text(found)
    assert "mbmem explain" in found.actions[0].what
    assert "linear_proj" not in text(found)
    assert rules(adapted(asked, GIB, 9 * GIB, effective=True)) == []  # gathered again, and that is what is held


@given(st.integers(0, 100), st.integers(1, 3000))
def test_gathered_inputs_must_be_worth_the_communication(gathered: int, rest: int) -> None:
    found = rules(adapted(LORA, gathered * MIB, rest * MIB)) if gathered else rules(too_high(LORA, rest * MIB))
    fires = gathered > 0 and gathered >= LEAST_GATHERED * (gathered + rest)
    assert ("LoRA retains gathered inputs" in found) == fires


def test_gathered_inputs_need_sequence_parallelism_and_lora() -> None:
    assert rules(adapted(LORA.but(sequence_parallel=False), GIB, GIB)) == []
    assert rules(adapted(DENSE.but(tp=2, sequence_parallel=True), GIB, GIB)) == []


# Settings that change little ------------------------------------------------------------------------------------------

CORE = "core_attn saves little"


def of_core_attention(recipe: Recipe, saving: float, **rest: Any) -> Case:
    control = measurement(rank(0, 1000 * MIB), recipe=recipe)
    after = round(1000 * MIB * (1 - saving))
    return compared(control, measurement(rank(0, after, **rest), recipe=selective(recipe, "core_attn")), **RECOMPUTE)


def test_flash_attention_already_rematerialises() -> None:
    found = the(CORE, of_core_attention(FLASH, 0.0005))
    assert "peak allocated 1000.00 MiB -> 999.50 MiB: 0.05% saved" in text(found)
    assert "training.attention_backend is 'flash'" in text(found)
    assert (
        found.cause
        == "flash attention already rematerialises its internals, or another part of the model sets the peak"
    )
    assert found.confirm.startswith("the control above has recompute_modules: []; ")
    assert [action.what.split(":")[0] for action in found.actions][1:] == ["add layernorm to memory.recompute_modules"]


def test_of_unfused_attention_the_peak_is_elsewhere() -> None:
    assert the(CORE, of_core_attention(DENSE, 0.0)).cause == "another part of the model sets the peak"


def test_what_to_test_next_is_by_the_architecture() -> None:
    mla, moe = (the(CORE, of_core_attention(recipe, 0.0)) for recipe in (MLA, MOE))
    assert mla.actions[1].what.startswith("add mla_up_proj")
    assert moe.actions[1].what.startswith("add moe_act")


@given(st.floats(-0.5, 0.5))
def test_little_is_less_than_the_documents_choose_among(saving: float) -> None:
    fires = 1000 * MIB - round(1000 * MIB * (1 - saving)) < LITTLE * 1000 * MIB
    assert (CORE in rules(of_core_attention(FLASH, saving))) == fires


@pytest.mark.parametrize(("saving", "fires"), [(0.0001, True), (0.0183, False)])
def test_the_savings_that_the_documents_call_little_and_useful(saving: float, fires: bool) -> None:
    assert (CORE in rules(of_core_attention(FLASH, saving))) == fires


def test_the_saving_that_the_documents_call_relief_is_material_and_less_is_not() -> None:
    assert NAMES["experts"] in rules(too_high(MOE, 937 * MIB, experts=63 * MIB))
    assert rules(too_high(MOE, 960 * MIB, experts=40 * MIB)) == []


def test_reserved_bytes_say_nothing_about_core_attention() -> None:
    case = of_core_attention(FLASH, 0.0)
    comparison = dataclasses.replace(case.comparisons[0], metric="reserved")
    assert CORE not in rules(Case(comparisons=(comparison,)))


def test_another_label_beside_it_or_another_setting_is_not_about_core_attention() -> None:
    control = measurement(rank(), recipe=FLASH)
    both = compared(control, measurement(rank(), recipe=selective(FLASH, "core_attn", "layernorm")), **RECOMPUTE)
    assert CORE not in rules(both)
    swapped = compared(
        measurement(rank(), recipe=selective(FLASH, "layernorm")),
        measurement(rank(), recipe=selective(FLASH, "core_attn")),
        recompute_modules=(["layernorm"], ["core_attn"]),
    )
    assert CORE not in rules(swapped)
    more = compared(
        control, measurement(rank(), recipe=selective(FLASH, "core_attn")), **RECOMPUTE, alloc_conf=("", "x")
    )
    assert CORE not in rules(more)


NOTHING = "setting without effect"


def test_a_setting_without_effect_is_quoted_with_its_reasons() -> None:
    message = "memory.recompute_modules 'mlp': requested, not effective: no dense MLP (all measured ranks)"
    subject = Subject(measurement(rank(), failure=Failure("no effect", 0, message)))
    assert the(NOTHING, subject).evidence == (message,)
    assert rules(Subject(measurement(rank(), failure=Failure("error", 0, message)))) == []


def test_a_comparison_in_which_no_figure_differs() -> None:
    idle = Effect("memory.recompute_modules 'mlp'", False, 0, "no dense MLP")
    one = measurement(rank(effects=(idle,)), recipe=MOE)
    found = the(NOTHING, compared(one, one, recompute_modules=([], ["mlp"])))
    assert "no figure of any rank differs: peak allocated 10.00 GiB -> 10.00 GiB" in text(found)
    assert "no dense MLP" in text(found)


def test_a_label_that_acts_and_saves_nothing_of_the_peak() -> None:
    acting = Effect("memory.recompute_modules 'layernorm'", True, 8)
    control, candidate = (measurement(rank(0, size, effects=(acting,))) for size in (GIB, GIB - 1024))
    found = the(NOTHING, compared(control, candidate, recompute_modules=([], ["layernorm"])))
    assert "acts on 8 modules of rank 0" in text(found)
    assert found.cause.startswith("the peak is elsewhere")
    saving = measurement(rank(0, GIB - 2 * MIB))
    assert rules(compared(control, saving, recompute_modules=([], ["layernorm"]))) == []


def test_a_saving_that_fails_for_its_time_alone_is_not_about_memory() -> None:
    slow, fast = rank(owners=held({FC1: GIB}), flops_per_step=200), rank(0, 2 * GIB, flops_per_step=100)
    comparison = compared(measurement(fast), measurement(slow), recompute_modules=([], ["layernorm"])).comparisons[0]
    too_slow = judge_saving(SavingRule("c", max_slowdown=0.0), comparison)
    assert (too_slow.verdict, rules(Subject(comparison.candidate, savings=(too_slow,)))) == ("too slow", [])
    too_little = judge_saving(SavingRule("c", at_least=2 * GIB), comparison)
    assert rules(Subject(comparison.candidate, savings=(too_little,))) == ["dense MLP dominates"]


def test_recipes_of_another_version_are_no_error() -> None:
    one = dataclasses.replace(measurement(rank(owners=held({UP: GIB}))), recipe={"model": {"unknown": 1}})
    assert rules(over_limit(one)) == []
