"""The closed-form estimate: against the sources of its formulas, published figures, and measurements."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.closed_form import activations, states
from pytest_mbmem.closed_form.activations import Shape
from pytest_mbmem.closed_form.stages import Chunk, in_flight, stages
from pytest_mbmem.errors import IncompatibleSettings
from pytest_mbmem.estimate import CATEGORIES, communicators, estimate
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.models import PRESETS
from pytest_mbmem.recipe import Lora, Mla, Model, Moe, Recipe, Training
from pytest_mbmem.report.estimates import KINDS, OTHER, Side

PUBLISHED = yaml.safe_load((Path(__file__).parent / "published" / "rows.yaml").read_text(encoding="utf-8"))
MIB = 2**20


def recipe(model: Model | None = None, lora: Lora | None = None, **changes: object) -> Recipe:
    """Four layers of 256 channels, grouped queries, SwiGLU, flash attention, bf16."""
    model = model or Model(
        num_layers=4,
        hidden_size=256,
        num_attention_heads=8,
        num_query_groups=4,
        ffn_hidden_size=640,
        vocab_size=4096,
        normalization="RMSNorm",
        activation="swiglu",
    )
    training = Training(seq_length=512, micro_batch_size=4, steps=2, attention_backend="flash")
    return Recipe(model=model, training=training, lora=lora).but(**changes)


def with_experts(**changes: Any) -> Model:
    moe = Moe(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=384, **changes)
    return recipe().but(moe=moe).model


TE = {"transformer_impl": "transformer_engine"}
MLA = Mla(q_lora_rank=64, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32)


def size_of(found: Any, name: str, category: str = CATEGORIES[0]) -> int:
    return sum(part.size for part in found.components if (part.name, part.category) == (name, category))


# Sources --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (4, False), (4, True)])
def test_a_layer_is_the_sum_of_korthikanti_et_al(tp: int, sequence_parallel: bool) -> None:
    """Equations 1, 2 and 4: s b h (34 + 5 a s / h), and how tensor and sequence parallelism share it out."""
    changes = {"tp": tp, "sequence_parallel": sequence_parallel, "attention_backend": "unfused", "seq_length": 512}
    shape = Shape(recipe(PRESETS["gpt3-125m"].shrunk(layers=2), **changes))
    found = [activations.layer_input(shape), *(one.term for one in activations.layer(shape, has_experts=False))]
    size = sum(term.size for term in found if "statistics" not in term.name)  # which the paper leaves out
    s, b, h, a = 512, 4, 768, 12
    alone = 10 / tp if sequence_parallel else 10
    assert size == s * b * h * alone + s * b * h * 24 // tp + 5 * a * s * s * b // tp


def test_states_are_those_of_zero_and_of_megatrons_distributed_optimizer() -> None:
    """With fp32 gradients 18 bytes a parameter; distributed 6 and 12 shared out (Megatron Core's documentation)."""
    parameters = recipe().model.num_parameters
    assert sum(estimate(recipe()).by_kind[kind] for kind in KINDS[:3]) == 18 * parameters
    shared = estimate(recipe(dp=4, distributed_optimizer=True))
    assert sum(shared.by_kind[kind] for kind in KINDS[:3]) == 6 * parameters + 12 * parameters // 4
    assert sum(estimate(recipe(precision="fp32", attention_backend="unfused")).by_kind[kind] for kind in KINDS[:3]) == (
        16 * parameters
    )
    assert estimate(recipe(main_grads="bf16")).by_kind["gradients"] == 2 * parameters
    assert estimate(recipe(kind="sgd")).by_kind["optimizer state"] == 8 * parameters
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "distributed_optimizer": True}
    assert estimate(recipe(**half)).by_kind["optimizer state"] == 6 * parameters


def test_a_frozen_base_has_parameters_alone() -> None:
    found = estimate(recipe(lora=Lora(rank=8, targets=("linear_proj",))))
    adapters = 4 * 8 * (256 + 256)
    assert size_of(found, "parameters") == 2 * (recipe().model.num_parameters + adapters)
    assert size_of(found, "gradients") == 4 * adapters
    assert size_of(found, "optimizer state") == 12 * adapters


@pytest.mark.parametrize("row", PUBLISHED["rows"], ids=lambda row: row.get("name", row["case"]))
def test_estimates_are_near_and_below_what_nvidia_measured_on_gpus(row: dict[str, Any]) -> None:
    """On the last stage. cuBLAS's two workspaces of 32 MiB, and Transformer Engine's, are known there and not in it."""
    parts = {
        name: {**PUBLISHED["common"].get(name, {}), **row["recipe"].get(name, {})}
        for name in PUBLISHED["common"].keys() | row["recipe"].keys()
    }
    one = Recipe.from_dict(parts, row["case"])
    published, last = row["measured_mib"]["last_peak"], estimate(one).totals[-1] / MIB
    is_te = one.training.transformer_impl == "transformer_engine"
    workspaces = 64 + (0 if not is_te else 32 if row["gpu"].startswith("h100") else 4)
    assert last + workspaces == pytest.approx(published, rel=0.035)
    assert last < published


# Where layers are -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2},
        {"pp": 2, "vpp": 2, "global_batch_size": 8},
        {"pp": 2, "num_layers_in_first_pipeline_stage": 3},
        {"pp": 3, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
        {
            "pp": 3,
            "num_layers": 7,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        {"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|t*1|(t)*2|L"},
    ],
    ids=str,
)
def test_each_layer_is_on_one_stage(changes: dict[str, Any]) -> None:
    one = recipe(**changes)
    chunks = [chunk for stage in stages(one) for chunk in stage]
    assert sorted(layer for chunk in chunks for layer in chunk.layers) == list(range(one.model.num_layers))
    assert (sum(c.embedding for c in chunks), sum(c.output for c in chunks)) == (1, 1)
    parts = [part for stage in stages(one) for part in states.parameters(one, stage)]
    assert sum(part.elements.base for part in parts) == one.model.num_parameters


def test_uneven_stages_move_the_most_loaded_rank() -> None:
    large, small = (recipe(pp=4, vocab_size=vocabulary, global_batch_size=32) for vocabulary in (2**16, 128))
    assert estimate(large).coordinates["pp"] == 3  # the output and the loss
    assert estimate(small).coordinates["pp"] == 0  # four microbatches in flight
    most = estimate(recipe(num_layers=8, vocab_size=128, pp=4, num_layers_in_last_pipeline_stage=5))
    assert (most.rank, most.coordinates["pp"]) == (3, 3)
    assert most.total == max(most.totals) == most.totals[3]


def test_layouts_are_read_as_megatron_does() -> None:
    found = stages(recipe(pp=2, vpp=2, num_layers=5, pipeline_model_parallel_layout="Ett|(t,)*2|t|L"))
    assert found == [
        (Chunk((0, 1), embedding=True), Chunk((4,))),
        (Chunk((2, 3)), Chunk((), output=True)),
    ]


@pytest.mark.parametrize(
    ("changes", "stage", "expected"),
    [
        ({}, 0, [1]),
        ({"pp": 4, "global_batch_size": 32}, 0, [4]),
        ({"pp": 4, "global_batch_size": 32}, 3, [1]),
        ({"pp": 4, "global_batch_size": 8}, 0, [2]),
        ({"pp": 2, "vpp": 2, "global_batch_size": 32}, 1, [2, 1]),
        ({"pp": 2, "vpp": 2, "global_batch_size": 32}, 0, [3, 2]),
        ({"pp": 2, "vpp": 2, "global_batch_size": 8}, 0, [2, 2]),
    ],
)
def test_microbatches_in_flight(changes: dict[str, Any], stage: int, expected: list[int]) -> None:
    one = recipe(**changes)
    assert list(in_flight(one, stage, one.parallelism.vpp or 1)) == expected


# How it changes with settings -----------------------------------------------------------------------------------------


@given(st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([1, 2, 4]))
def test_more_tensor_parallelism_never_needs_more(tp: int, has_mla: bool, mlp: int) -> None:
    model = recipe(ffn_hidden_size=mlp * 512).model
    if has_mla:
        model = recipe(model, num_query_groups=None, mla=MLA).model
    less, more = estimate(recipe(model, tp=tp)), estimate(recipe(model, tp=2 * tp))
    assert size_of(more, "parameters") < size_of(less, "parameters")
    assert more.total < less.total


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans())
def test_experts_are_divided_by_ep_and_etp_and_not_by_tp(ep: int, etp: int, tp: int, grouped: bool) -> None:
    model = with_experts(moe_grouped_gemm=grouped)
    one = recipe(model, tp=tp, ep=ep, etp=etp, dp=8, sequence_parallel=tp > 1)
    elements = 4 * 8 * 3 * 384 * 256 // (ep * etp)
    found, category = estimate(one), CATEGORIES[1]
    assert size_of(found, "parameters", category) == 2 * elements
    assert size_of(found, "gradients", category) == 4 * elements
    assert size_of(found, "optimizer state", category) == 12 * elements
    shared = estimate(one.but(distributed_optimizer=True))
    sharers = tp * 8 // (ep * etp) if ep > 1 else 8  # Megatron Core 0.16 has no other groups without EP
    assert size_of(shared, "optimizer state", category) == 12 * elements // sharers


@given(st.sampled_from([("core_attn",), ("mlp",), ("layernorm",), ("mlp", "layernorm")]), st.booleans())
def test_recompute_never_needs_more_and_whole_layers_least(labels: tuple[str, ...], unfused: bool) -> None:
    backend = "unfused" if unfused else "flash"
    plain = recipe(num_layers=16, attention_backend=backend)
    selective = plain.but(recompute_granularity="selective", recompute_modules=labels)
    whole = plain.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert estimate(whole).total < estimate(selective).total < estimate(plain).total
    blocks = [plain.but(recompute_granularity="full", recompute_method="block", recompute_num_layers=n) for n in (4, 8)]
    assert estimate(blocks[1]).total < estimate(blocks[0]).total < estimate(plain).total


def test_no_gradient_goes_through_a_first_attention_without_an_adapter_before_it() -> None:
    sizes = {}
    for target in ("linear_qkv", "linear_proj"):
        found = estimate(recipe(lora=Lora(rank=8, targets=(target,))))
        sizes[target] = size_of(found, "core attention", "activations")
    assert sizes["linear_qkv"] - sizes["linear_proj"] == 4 * 4 * 512 * 8  # the sums of rows, of one layer
    of_projections = [
        size_of(estimate(recipe(lora=Lora(rank=8, targets=(target,)))), "attention projections", "activations")
        for target in ("linear_qkv", "linear_proj")
    ]
    assert of_projections[1] * 4 == of_projections[0] * 3


@given(st.sampled_from([1.0, 1.25, 1.5, 1.75]))
def test_overload_multiplies_what_routed_experts_keep(overload: float) -> None:
    model = with_experts()
    balanced, found = (estimate(recipe(model, dp=2, ep=2, overload=factor)) for factor in (1.0, overload))
    sizes = [size_of(one, "routed experts", "activations") for one in (balanced, found)]
    assert sizes[1] == sizes[0] * overload


def test_regather_keeps_shards_in_place_of_the_gathered_sequence() -> None:
    lora = {"tp": 2, "sequence_parallel": True}
    sizes = [
        estimate(recipe(lora=Lora(rank=8, sequence_parallel_input_regather=r), **lora)).total for r in (False, True)
    ]
    tokens, hidden, layers = 4 * 512, 256, 4
    saved = layers * 2 * (tokens - tokens // 2) * hidden * 2  # inputs of qkv and fc1, in bf16
    assert sizes[0] - sizes[1] == saved - tokens * hidden * 2  # less the buffer that these are gathered into


def test_components_make_up_the_whole_and_say_how() -> None:
    found = estimate(recipe(with_experts(), dp=2, ep=2))
    assert sum(found.by_category.values()) == sum(found.by_kind.values()) == found.total
    assert found.largest.size == max(part.size for part in found.components)
    assert found.exceeds(found.total - 1)
    assert not found.exceeds(found.total)
    (parameters,) = (p for p in found.components if (p.name, p.category) == ("parameters", "routed experts"))
    assert parameters.formula == "2 B x (experts 4718592)"
    (final,) = (part for part in found.components if part.name == "final norm")
    assert final.formula == "1 x (last layer's output 2 B x 2048 x 256 + its norm 2 B x 2048 x 256)"


# What it does not do --------------------------------------------------------------------------------------------------


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(IncompatibleSettings, match="incompatible settings"):
        estimate(recipe(cpu_offloading=True, cpu_offloading_num_layers=1, pp=2))


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "as if they stayed on the GPU"),
        ({"steps": 1}, "a run of one step peaks without it"),
        ({"megatron": {"calculate_per_token_loss": True}}, "not in the formula: calculate_per_token_loss"),
        ({"cp": 2, "attention_backend": "unfused"}, "cannot be measured: parallelism.cp"),
        ({"megatron": {"fp8": "hybrid"}, **TE}, "FP8 and FP4 are not counted"),
        ({"cp": 2, **TE, "attention_backend": "fused"}, "as if keys and values were gathered"),
        ({"optimizer_cpu_offload": True, "distributed_optimizer": True}, "whole parameters up to the fraction"),
    ],
    ids=str,
)
def test_what_the_formula_cannot_do_is_said(changes: dict[str, Any], note: str) -> None:
    assert any(note in said for said in estimate(recipe(**changes)).notes)


def test_it_imports_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; from pytest_mbmem.estimate import estimate; from pytest_mbmem.recipe import Recipe; "
        "estimate(Recipe.from_dict({'model': 'mixtral-8x7b'})); sys.exit(bool({'torch', 'pytest'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Measurements ---------------------------------------------------------------------------------------------------------

GPT = recipe(
    activation="gelu",
    normalization="LayerNorm",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
    hidden_dropout=0.1,
    attention_dropout=0.1,
    attention_backend="unfused",
)
SP = {"tp": 2, "sequence_parallel": True}
MEASURED = {
    "unfused, dropout, biases": (GPT, 0.01),
    "interleaved, distributed optimizer": (
        recipe(
            pp=2,
            vpp=2,
            global_batch_size=32,
            dp=2,
            distributed_optimizer=True,
            share_embeddings_and_output_weights=True,
        ),
        0.05,  # of which most is buffers that wait for the next microbatch
    ),
    "experts without EP": (recipe(with_experts(), **SP, dp=2, etp=1, distributed_optimizer=True), 0.05),
    "experts over EP and not TP": (
        recipe(
            with_experts(moe_shared_expert_intermediate_size=256), **SP, ep=2, dp=4, etp=1, distributed_optimizer=True
        ),
        0.01,
    ),
    "grouped experts, overload, full recompute": (
        recipe(
            with_experts(moe_grouped_gemm=True),
            ep=4,
            dp=4,
            overload=1.5,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
        0.02,
    ),
    "MLA, selective recompute": (
        recipe(
            num_query_groups=None,
            mla=MLA,
            **SP,
            recompute_granularity="selective",
            recompute_modules=("mla_up_proj", "layernorm"),
        ),
        0.01,
    ),
    "LoRA": (recipe(lora=Lora(rank=16), **SP), 0.01),
    "LoRA with dropout": (recipe(lora=Lora(rank=16, dropout=0.1), **SP), 0.01),
    "LoRA, Transformer Engine": (
        recipe(lora=Lora(rank=16), micro_batch_size=1, position_embedding_type="none", **SP, **TE),
        0.01,
    ),
    # of which Transformer Engine's own RoPE keeps no sines and cosines
    "Transformer Engine, flash": (recipe(num_query_groups=None, micro_batch_size=1, **TE), 0.02),
    "Transformer Engine, unfused": (
        recipe(num_query_groups=None, micro_batch_size=1, attention_backend="unfused", **TE),
        0.02,
    ),
    "LoRA of experts": (recipe(with_experts(), lora=Lora(rank=16), **SP, etp=1), 0.01),
    "saved inputs shared out": (
        recipe(
            tp=2,
            distribute_saved_activations=True,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        ),
        0.02,
    ),
}


@pytest.mark.parametrize("name", MEASURED)
def test_it_is_what_the_virtual_gpu_measures_but_for_what_it_leaves_out(name: str, launcher: Launcher) -> None:
    """Parameters and gradients to the byte, the optimizer's state to its step counters, activations as stated."""
    one, tolerance = MEASURED[name]
    found, measurement = estimate(one), launcher.measure(one, check_effects=False)
    assert measurement.failure is None
    side = Side.of("virtual", measurement, found)
    assert side is not None
    assert side.kinds is not None
    assert side.rank.rank == found.rank
    assert side.more <= MIB  # another shard of the optimizer's state may have the padding
    kinds = found.by_kind
    assert (side.kinds["parameters"], side.kinds["gradients"]) == (kinds["parameters"], kinds["gradients"])
    assert side.kinds["optimizer state"] == pytest.approx(kinds["optimizer state"], abs=2048)
    assert side.kinds["activations"] == pytest.approx(kinds["activations"], rel=tolerance)
    assert sum(side.kinds.values()) == side.peak
    workspaces = 96 if one.training.transformer_impl == "transformer_engine" else 64  # cuBLAS's, and one more
    assert side.kinds[OTHER] == pytest.approx(workspaces * MIB, rel=0.25)  # and rounding
    assert set(communicators(one)) >= set(side.rank.collective_bytes)
