"""Megatron's MoE layers run unmodified on the counts that the assumption states."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.virtual_gpu import routing

SEQUENCE, LAYERS = 128, 2
RECIPE = Recipe(
    model=Model(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=1000,
        moe=Moe(num_moe_experts=8),
    ),
    parallelism=Parallelism(dp=4, ep=4),
    training=Training(seq_length=SEQUENCE, steps=2),
)


def expert_inputs(live: Any) -> list[tuple[int, int, list[int]]]:
    """Filled as the model runs: rows and probabilities of each expert layer's input, and how many are each expert's."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    found: list[tuple[int, int, list[int]]] = []

    def note(module: object, arguments: tuple[Any, ...]) -> None:
        tokens, counts, probabilities = arguments[:3]
        found.append((tokens.size(0), probabilities.size(0), list(map(int, counts))))

    for chunk in live.chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                module.experts.register_forward_pre_hook(note)
    return found


def stated(recipe: Recipe, rank: int) -> tuple[int, int, list[int]]:
    """What the experts of that rank are to find in their input."""
    split = recipe.parallelism
    share = routing.shares(recipe)[rank // split.expert_tp % split.ep]
    counts = [count * split.ep * split.expert_tp for count in share]
    return sum(counts), sum(counts), counts


SPLITS = {
    "one rank": {"dp": 1, "ep": 1},
    "ep": {},
    "one expert a rank": {"num_moe_experts": 4},
    "tp": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "tp alone": {"dp": 1, "ep": 1, "tp": 2, "sequence_parallel": True},
    "etp 1": {"tp": 2, "sequence_parallel": True, "etp": 1},
    "etp alone": {"etp": 2, "ep": 2},
    "etp of one expert a rank": {"etp": 2, "ep": 2, "num_moe_experts": 2},
    "cp": {"cp": 2, "dp": 2, "attention_backend": "flash"},
    "more top than local": {"moe_router_topk": 4},
    "shares that do not divide": {"num_moe_experts": 12, "seq_length": 126},
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("split", SPLITS)
def test_experts_receive_what_is_stated(megatron_model: Any, split: str, dispatcher: str) -> None:
    recipe = RECIPE.but(**SPLITS[split], moe_token_dispatcher_type=dispatcher)
    rank = recipe.world_size - 1
    live = megatron_model(recipe, rank=rank)
    inputs = expert_inputs(live)
    live.step()
    assert inputs == [stated(recipe, rank)] * LAYERS
    assert min(inputs[0][2]) > 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(("rank", "rows"), [(0, 1.5), (1, 2.5 / 3)])
def test_the_first_expert_parallel_rank_receives_the_overload(
    megatron_model: Any, dispatcher: str, rank: int, rows: float
) -> None:
    recipe = RECIPE.but(overload=1.5, moe_token_dispatcher_type=dispatcher, seq_length=96)
    live = megatron_model(recipe, rank=rank)
    inputs = expert_inputs(live)
    live.step()
    assert {tokens for tokens, _, _ in inputs} == {round(96 * 2 * rows)}
    assert inputs == [stated(recipe, rank)] * LAYERS


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_experts_drop_what_is_above_their_capacity(megatron_model: Any, factor: float, policy: str) -> None:
    live = megatron_model(RECIPE.but(moe_expert_capacity_factor=factor, moe_token_drop_policy=policy))
    inputs = expert_inputs(live)
    live.step()
    assert {tokens for tokens, _, _ in inputs} == {round(SEQUENCE * 2 * min(factor, 1))}


def test_padding_to_capacity_needs_no_assumption(megatron_model: Any) -> None:
    live = megatron_model(RECIPE.but(moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True))
    inputs = expert_inputs(live)
    live.step()
    assert {tokens for tokens, _, _ in inputs} == {2 * SEQUENCE * 2}


RECOMPUTED = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "the layer with experts": {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
}


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("how", RECOMPUTED)
def test_recomputation_receives_the_same_again(megatron_model: Any, how: str, dispatcher: str) -> None:
    recipe = RECIPE.but(**RECOMPUTED[how], overload=1.5, moe_token_dispatcher_type=dispatcher)
    live = megatron_model(recipe)
    inputs = expert_inputs(live)
    live.step()
    assert inputs == [stated(recipe, 0)] * (2 * LAYERS)


OTHER = {
    "all-gather": ({"moe_token_dispatcher_type": "allgather"}, 0),
    "multi-token prediction": ({"mtp_num_layers": 1}, 1),
    "grouped experts": ({"moe_grouped_gemm": True}, 0),
    "pipeline": ({"num_layers": 4, "pp": 2, "vpp": 2, "global_batch_size": 8}, LAYERS),
    "every other layer": ({"num_layers": 4, "moe_layer_freq": 2}, 0),
    "shared experts beside": ({"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}, 0),
    "sigmoid with bias": ({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, 0),
    "auxiliary losses": ({"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001, "moe_router_dtype": "fp32"}, 0),
    "global auxiliary loss": ({"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"}, 0),
    "sequence auxiliary loss": ({"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"}, 0),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, 0),
    "deterministic": ({"deterministic": True}, 0),
    "half precision": ({"precision": "fp16"}, 0),
    "distributed optimizer": ({"distributed_optimizer": True, "overlap_grad_reduce": True}, 0),
}


@pytest.mark.parametrize("setting", OTHER)
def test_no_read_brings_the_zeros_of_a_kernel(megatron_model: Any, setting: str) -> None:
    from pytest_mbmem.virtual_gpu.counters import read_counters

    changes, more = OTHER[setting]
    recipe = RECIPE.but(**changes, overload=1.5)
    live = megatron_model(recipe)
    inputs = expert_inputs(live)
    read: list[tuple[str, int]] = []
    live.step(lambda step, phase: read.append((phase, read_counters().zero_reads)))
    read.append(("end", read_counters().zero_reads))
    assert inputs == [stated(recipe, 0)] * (LAYERS + more)
    zeros: dict[str, int] = dict.fromkeys((phase for phase, _ in read), 0)
    for (phase, before), (_, after) in itertools.pairwise(read):
        zeros[phase] += after - before
    # What remains are zeros that the host itself wrote, read once by each optimizer (of the experts, and of the rest):
    # since core 0.19 that no parameter's gradient norm is kept apart.
    optimizers = len(getattr(live.optimizer, "chained_optimizers", [live.optimizer]))
    assert zeros.pop("optimizer") == hasattr(live.optimizer, "has_grad_norm_group") * optimizers
    assert set(zeros.values()) == {0}


@pytest.mark.usefixtures("megatron_model")  # in a worker, where Megatron is loaded
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("local", [1, 3])
def test_the_answers_are_what_megatron_computes_from_such_a_routing(
    ep: int, etp: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own arithmetic, with real numbers on the CPU."""
    import torch
    from megatron.core.transformer.moe import token_dispatcher

    from pytest_mbmem.virtual_gpu import assumptions

    tokens, topk, experts = 50, min(2, local), local * ep
    overload = 1.2 if ep > 1 else 1.0
    sent = routing.tokens_sent(tokens, topk, experts, ep, overload=overload)
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool)
    for expert, count in enumerate(sent):
        routing_map[:count, expert] = True
    # what all ranks send, the same each
    gathered = lambda counts, group: counts.repeat(ep * etp)  # noqa: E731
    monkeypatch.setattr(token_dispatcher, "gather_from_sequence_parallel_region", gathered)
    checked = []

    def check(computed: object, values: list[int]) -> None:
        if isinstance(computed, torch.Tensor):
            assert computed.ravel().tolist() == values
            checked.append(computed)

    monkeypatch.setattr(assumptions, "_answer", check)
    config = SimpleNamespace(
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_expert_capacity_factor=None,
        moe_router_padding_for_quantization=False,
        moe_permute_fusion=False,
        assumed_overload=overload,
    )
    for rank in range(ep * etp):
        dispatcher = SimpleNamespace(
            config=config,
            drop_and_pad=False,
            ep_size=ep,
            tp_size=etp,
            tp_rank=rank % etp,
            tp_ep_group=None,
            num_experts=experts,
            num_local_experts=local,
            local_expert_indices=list(range(rank // etp * local, (rank // etp + 1) * local)),
            input_splits=None,
            output_splits=None,
            output_splits_tp=None,
            cuda_dtoh_point="before",
            cuda_sync_point="after",
            cuda_sync_point_priority={"before": 0, "after": 1},
            _maybe_update_cuda_sync_point=lambda point: None,
        )
        checked.clear()
        assumptions._alltoall_counts(
            token_dispatcher.MoEAlltoAllTokenDispatcher.preprocess,
            dispatcher,
            routing_map,
        )
        # tokens per expert; where there are other ranks, three splits; tokens of each expert from each rank
        assert len(checked) == 1 + (3 if ep * etp > 1 else 0) + (local > 1)


def test_an_answer_that_megatron_does_not_ask_for_is_an_error(
    megatron_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy
    from megatron.core.transformer.moe import token_dispatcher

    from pytest_mbmem.virtual_gpu.answers import UnmetAssumption, answers_left

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def knows_the_splits(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
        return numpy.full(4, 64) if as_numpy and tensor is not None else original(tensor, as_numpy, **options)

    live = megatron_model(RECIPE)
    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", knows_the_splits)
    with pytest.raises(UnmetAssumption, match=r"dispatch_preprocess .* 3 answers were not taken and 0 reads had none"):
        live.step()
    assert answers_left() == 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_read_that_has_no_answer_is_an_error(
    megatron_model: Any, dispatcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    from pytest_mbmem.virtual_gpu.answers import UnmetAssumption

    original = token_dispatcher.permute

    def reads_more(tokens: Any, routing_map: Any, *arguments: Any, **options: Any) -> Any:
        bool(routing_map.any())
        return original(tokens, routing_map, *arguments, **options)

    live = megatron_model(RECIPE.but(moe_token_dispatcher_type=dispatcher))
    monkeypatch.setattr(token_dispatcher, "permute", reads_more)
    with pytest.raises(UnmetAssumption, match=r"0 answers were not taken and 1 reads had none"):
        live.step()


def test_masks_elsewhere_select_nothing(megatron_model: Any) -> None:
    import torch

    live = megatron_model(RECIPE)
    live.step()
    x = torch.ones(8, 8, device="cuda")
    assert x.masked_select(x > 0).numel() == 0


def test_sinkhorn_takes_the_stated_iterations(megatron_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    live = megatron_model(RECIPE.but(moe_router_load_balancing_type="sinkhorn"))
    tested = []
    monkeypatch.setattr(torch, "abs", lambda x, original=torch.abs: tested.append(x.shape) or original(x))
    live.step()
    assert len(tested) == routing.SINKHORN_ITERATIONS * LAYERS


def test_models_of_one_process_keep_their_own_overload(megatron_model: Any) -> None:
    first = megatron_model(RECIPE)
    first.close()
    recipe = RECIPE.but(overload=2.0)
    second = megatron_model(recipe)
    inputs = expert_inputs(second)
    second.step()
    assert inputs == [stated(recipe, 0)] * LAYERS


def test_the_peak_follows_the_overload(launcher: Launcher) -> None:
    recipe = RECIPE.but(seq_length=1024)

    def peaks(recipe: Recipe) -> dict[int, int]:
        measurement = launcher.measure(recipe, count_flops=False, check_effects=False)
        assert measurement.failure is None
        return {rank.rank: rank.peak() for rank in measurement.ranks}

    balanced = peaks(recipe)
    overloaded = [peaks(recipe.but(overload=overload)) for overload in (1.25, 1.5, 2.0)]
    assert list(balanced) == [0]
    assert [list(found) for found in overloaded] == [[0, 1]] * 3
    hot = [balanced[0], *(found[0] for found in overloaded)]
    others = [balanced[0], *(found[1] for found in overloaded)]
    assert hot == sorted(set(hot))
    assert others == sorted(set(others), reverse=True)
    # Whatever an expert keeps for backward grows with its rows: two rows of 64 and three of 256 channels and more, in
    # bf16, in each of two layers.
    rows = 1024 * 2 * 0.5
    assert hot[2] - hot[0] > rows * (64 + 256) * 2 * LAYERS


def test_a_measurement_states_the_routing(launcher: Launcher) -> None:
    measurement = launcher.measure(RECIPE.but(overload=1.5), ranks=[0], count_flops=False, check_effects=False)
    assert routing.assumptions(RECIPE.but(overload=1.5))[-1] in measurement.assumptions
    dense = launcher.measure(RECIPE.but(moe=None, ep=1), ranks=[0], count_flops=False, check_effects=False)
    assert not any("routing" in text for text in dense.assumptions)
