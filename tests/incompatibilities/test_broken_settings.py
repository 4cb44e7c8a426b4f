"""Settings by what they break, where the value's kind, the place of a layer or the version decides."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mbmem.incompatibilities import catalog

OLD = {"megatron-core": "0.16.1", "torch": "2.14.1"}
NEW = {"megatron-core": "0.19.2", "torch": "2.14.1"}

PP2 = {"pipeline_model_parallel_size": 2, "pipeline_dtype": "bf16"}
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block"}
MOE = {"num_moe_experts": 4, "add_bias_linear": False}
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "transformer_impl": "local"}
OFFLOAD = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}
SELECTIVE = {"recompute_granularity": "selective", "transformer_impl": "local"}
PP3 = {"pipeline_model_parallel_size": 3, "pipeline_dtype": "bf16", "num_layers": 6}
BLOCK_OFFLOAD = "fine-grained-offload-with-block-recompute-in-pipeline"
NCCL_UB = {"nccl_ub": True, "overlap_grad_reduce": True}
LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
VPP, TYPE, COEFF = "virtual_pipeline_model_parallel_size", "moe_router_load_balancing_type", "moe_aux_loss_coeff"


def broken_ids(settings: dict[str, Any], versions: dict[str, str]) -> set[str]:
    return {entry.id for entry in catalog().values() if entry.breaks(settings, versions)}


def microbatches(count: int) -> dict[str, Any]:
    return {"global_batch_size": 2 * count, "micro_batch_size": 1, "data_parallel_size": 2}


CASES: list[tuple[dict[str, Any], set[str]]] = [
    # one stage, and layers shared out over more
    ({FIRST: 1, LAST: 1}, {"pp-split-without-pp"}),
    ({FIRST: 4}, {"pp-split-without-pp"}),
    ({FIRST: 2}, {"pp-split-without-pp", "pp-middle-stages-mismatch"}),
    ({FIRST: 2, LAST: 2}, {"pp-split-without-pp", "pp-middle-stages-mismatch"}),
    ({LOSS: True}, {"pp-split-without-pp"}),
    ({LAYOUT: "Ett|ttL"}, {"pp-split-without-pp"}),
    ({LAYOUT: "EttttL"}, set()),
    # a layout's chunks
    ({**PP2, LAYOUT: "Ett|ttL"}, set()),
    ({**PP2, LAYOUT: "Et|t|t|tL"}, {"pp-layout-without-vpp"}),
    ({**PP2, LAYOUT: "Et|t|t|tL", VPP: 2}, set()),
    ({**PP2, LAYOUT: "Ett|ttL", VPP: 2}, {"pp-layout-with-other-vpp"}),
    # groups of layers, which have to divide the layers of each chunk
    ({**PP2, **UNIFORM, "recompute_num_layers": 2}, set()),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, LAYOUT: "Ett|ttL"}, set()),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, LAYOUT: "Et|tttL"}, {"recompute-uniform-not-dividing"}),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, LAYOUT: "Et|tt|t|L", VPP: 2}, {"recompute-uniform-not-dividing"}),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, "num_layers": 3, LOSS: True}, {"recompute-uniform-not-dividing"}),
    (
        {**PP2, **UNIFORM, "recompute_num_layers": 2, "num_layers": 3, EMBEDDING: True},
        {"recompute-uniform-not-dividing"},
    ),
    (
        {**PP2, **UNIFORM, "recompute_num_layers": 2, "num_layers": 7, LOSS: True, VPP: 2},
        {"recompute-uniform-not-dividing"},
    ),
    ({**PP2, **UNIFORM, "recompute_num_layers": 1, "num_layers": 3, LOSS: True, VPP: 2}, set()),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, "num_layers": 6, FIRST: 2}, set()),
    ({**PP2, **UNIFORM, "recompute_num_layers": 2, "num_layers": 6, FIRST: 1}, {"recompute-uniform-not-dividing"}),
    ({**PP2, **BLOCK, "recompute_num_layers": 3, LAYOUT: "Et|tttL"}, set()),
    ({**PP2, **BLOCK, "recompute_num_layers": 4, LAYOUT: "Et|tttL"}, {"recompute-num-layers-beyond-stage"}),
    # multi-token prediction
    ({**UNIFORM, "recompute_num_layers": 2, "mtp_num_layers": 1}, {"recompute-uniform-with-mtp"}),
    ({**UNIFORM, "recompute_num_layers": 1, "mtp_num_layers": 1}, set()),
    ({**BLOCK, "recompute_num_layers": 4, "mtp_num_layers": 1}, {"recompute-block-with-mtp"}),
    ({**BLOCK, "recompute_num_layers": 4, **OFFLOAD}, {"fine-grained-offload-with-full-recompute"}),
    ({**BLOCK, "recompute_num_layers": 4, **OFFLOAD, "mtp_num_layers": 1}, {"recompute-block-with-mtp"}),
    ({**BLOCK, "recompute_num_layers": 3, **OFFLOAD}, set()),
    # offload by module, where forwards of several microbatches or model chunks come before a backward
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP2}, set()),
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP2, LAYOUT: "Et|tttL"}, {BLOCK_OFFLOAD}),
    (
        {**BLOCK, "recompute_num_layers": 2, **OFFLOAD, **PP2, "mtp_num_layers": 1},
        {"recompute-block-with-mtp", BLOCK_OFFLOAD},
    ),
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP2, VPP: 2, "num_layers": 8}, {BLOCK_OFFLOAD}),
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP3}, {BLOCK_OFFLOAD}),
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP3, **microbatches(3)}, {BLOCK_OFFLOAD}),
    ({**BLOCK, "recompute_num_layers": 1, **OFFLOAD, **PP3, **microbatches(2)}, set()),
    ({**SELECTIVE, **OFFLOAD}, {"fine-grained-offload-of-recomputed-core-attn"}),
    ({**SELECTIVE, **OFFLOAD, "offload_modules": ["attn_proj", "core_attn"], "recompute_modules": []}, set()),
    # the allocator's settings: what PyTorch has in the end, and the text that Megatron looks for
    (
        {**NCCL_UB, "alloc_conf": "expandable_segments:True,expandable_segments:False"},
        {"nccl-ub-with-expandable-segments"},
    ),
    ({**NCCL_UB, "alloc_conf": "expandable_segments:False"}, set()),
    # groups of experts, rotation, variants of attention
    ({**MOE, "moe_router_group_topk": 1, "moe_router_num_groups": 2}, set()),
    ({**MOE, "moe_router_num_groups": 3}, set()),
    ({**MOE, "moe_router_group_topk": 1, "moe_router_num_groups": 4}, {"moe-groups-with-too-few-experts"}),
    ({"no_rope_freq": 2}, set()),
    ({"no_rope_freq": [1, 0]}, {"no-rope-freq-not-fitting-layers"}),
    # dense layers between those with experts
    ({**MOE, **MLP, "moe_layer_freq": 1}, {"recompute-mlp-without-dense-layers"}),
    ({**MOE, **MLP, "moe_layer_freq": [1, 1, 1, 1]}, {"recompute-mlp-without-dense-layers"}),
    ({**MOE, **MLP, "moe_layer_freq": 2}, set()),
    ({**MOE, **MLP, "moe_layer_freq": 2, "num_layers": 1}, {"recompute-mlp-without-dense-layers"}),
    ({**MOE, **MLP, "moe_layer_freq": 2, "add_bias_linear": True}, {"recompute-mlp-with-bias"}),
    ({**MOE, **MLP, "moe_layer_freq": [1, 0, 1, 0], "add_bias_linear": True}, {"recompute-mlp-with-bias"}),
    # balancing, by one name or several
    ({**MOE, TYPE: "foo"}, {"moe-balancing-unknown"}),
    ({**MOE, TYPE: "aux_loss,none"}, {"moe-balancing-unknown"}),
    ({**MOE, TYPE: "sinkhorn"}, set()),
    ({**MOE, TYPE: ["aux_loss", "foo"], COEFF: [0.1, 0.1]}, {"moe-balancing-unknown"}),
    ({**MOE, TYPE: ["aux_loss", "sinkhorn"], COEFF: [0.1, 0.1]}, {"moe-balancing-unknown"}),
    ({**MOE, TYPE: ["aux_loss", "seq_aux_loss"], COEFF: [0.1, 0.1]}, set()),
    ({**MOE, TYPE: ["aux_loss", "seq_aux_loss"], COEFF: [0.1]}, {"moe-balancing-list-without-coefficients"}),
    ({**MOE, TYPE: ["none"], COEFF: [0.1]}, {"moe-aux-loss-without-balancing"}),
    ({**MOE, TYPE: ["none"], COEFF: [0]}, set()),
    # the scope of CUDA graphs
    ({"cuda_graph_impl": "local", "cuda_graph_scope": 3}, {"cuda-graph-scope-not-text"}),
    ({"cuda_graph_impl": "local", "cuda_graph_scope": "attn,nope"}, {"cuda-graph-scope-unknown"}),
    # fused kernels of Transformer Engine
    ({"apply_rope_fusion": True, "rope_type": "rope"}, {"rope-fusion-without-transformer-engine"}),
    ({"apply_rope_fusion": True, "multi_latent_attention": True, "rope_type": "yarn"}, set()),
]


# a set shows its elements in another order in each process, and xdist's must name a test alike
@pytest.mark.parametrize(
    ("settings", "ids"), CASES, ids=lambda value: str(sorted(value) if isinstance(value, set) else value)
)
def test_what_settings_break(settings: dict[str, Any], ids: set[str]) -> None:
    assert broken_ids(settings, OLD) == ids


@pytest.mark.parametrize(
    ("settings", "old", "new"),
    [
        ({**MOE, TYPE: "quantile_balancing"}, {"moe-balancing-unknown"}, set()),
        (
            {**MOE, TYPE: "quantile_balancing", COEFF: 0.1},
            {"moe-balancing-unknown"},
            {"moe-aux-loss-without-balancing"},
        ),
        ({**UNIFORM, "recompute_num_layers": 3}, {"recompute-uniform-not-dividing"}, set()),
    ],
)
def test_versions_decide(settings: dict[str, Any], old: set[str], new: set[str]) -> None:
    assert broken_ids(settings, OLD) == old
    assert broken_ids(settings, NEW) == new


def raised(id: str, settings: dict[str, Any], versions: dict[str, str]) -> str:
    """What Megatron Core is documented to raise; "" if it accepts the settings."""
    outcome = catalog()[id].outcome(settings, versions)
    assert outcome is not None
    return outcome.raises


@pytest.mark.parametrize(
    ("id", "settings", "error", "old_error"),
    [
        ("fp8-moe-old-transformer-engine", {**MOE, "fp8": "hybrid"}, "ValueError", "TypeError"),
        ("moe-permute-fusion-without-transformer-engine", {"moe_permute_fusion": True}, "ValueError", "ImportError"),
    ],
)
def test_without_transformer_engine_old_versions_fail_in_asking_for_it(
    id: str, settings: dict[str, Any], error: str, old_error: str
) -> None:
    assert raised(id, settings, OLD) == old_error
    assert raised(id, settings, NEW) == error
    assert raised(id, settings, {**OLD, "transformer-engine": "1.6"}) == error
    assert not catalog()[id].breaks(settings, {**OLD, "transformer-engine": "2.9"})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({FIRST: 1, LAST: 1}, ""),
        ({FIRST: 4}, ""),
        ({FIRST: 2}, "ValueError"),
        ({LAYOUT: "Ett|ttL"}, ""),
        ({LOSS: True}, ""),
    ],
)
def test_what_one_stage_makes_of_a_split(settings: dict[str, Any], error: str) -> None:
    assert raised("pp-split-without-pp", settings, OLD) == error


@pytest.mark.parametrize(
    ("id", "settings", "error"),
    [
        ("fine-grained-offload-with-full-recompute", {}, ""),
        ("fine-grained-offload-with-full-recompute", PP2, "AssertionError"),
        ("fine-grained-offload-with-full-recompute", {**PP2, **microbatches(1)}, ""),
        ("fine-grained-offload-with-full-recompute", {**PP2, **microbatches(2)}, "AssertionError"),
        ("fine-grained-offload-with-full-recompute", {**PP2, "offload_modules": ["moe_act"]}, ""),
        ("fine-grained-offload-inside-recomputed-moe", {**PP2, VPP: 2}, "AssertionError"),
        ("param-gather-overlap-without-distributed-optimizer", {**PP2, VPP: 2}, "AssertionError"),
        ("param-gather-overlap-without-distributed-optimizer", {"data_parallel_size": 2}, ""),
    ],
)
def test_what_a_pipeline_makes_of_it(id: str, settings: dict[str, Any], error: str) -> None:
    assert raised(id, {**OFFLOAD, **settings}, OLD) == error


def test_parameters_are_gathered_without_their_optimizer_in_new_versions() -> None:
    id = "param-gather-overlap-without-distributed-optimizer"
    assert raised(id, {"data_parallel_size": 2}, NEW) == "TypeError"
    assert raised(id, {"data_parallel_size": 1}, NEW) == ""


@pytest.mark.parametrize(("impl", "new"), [("local", False), ("transformer_engine", True)])
def test_graphs_with_text_that_pytorch_takes_back(impl: str, new: bool) -> None:
    entry = catalog()["cuda-graph-with-expandable-segments"]
    settings = {"cuda_graph_impl": impl, "alloc_conf": "expandable_segments:True,expandable_segments:False"}
    assert entry.breaks(settings, OLD)
    assert entry.breaks(settings, NEW) is new
    assert not entry.breaks({**settings, "NCCL_GRAPH_REGISTER": "0"}, OLD)


def test_graphs_with_expandable_segments_fail_where_their_manager_is_made() -> None:
    entry = catalog()["cuda-graph-with-expandable-segments"]
    for impl, at in (("local", "model"), ("transformer_engine", "capture")):
        outcome = entry.outcome({"cuda_graph_impl": impl, "alloc_conf": "expandable_segments:True"}, OLD)
        assert outcome is not None
        assert (outcome.raises, outcome.at) == ("AssertionError", at)
