"""Which ranks are measured, and what each of them stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.ranks import at, chosen
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training


def recipe(moe: Moe | None = None, **parallelism: object) -> Recipe:
    p = Parallelism(**parallelism)  # type: ignore[arg-type]
    model = Model(num_layers=8, hidden_size=64, num_attention_heads=8, vocab_size=1000, moe=moe)
    return Recipe(model=model, parallelism=p, training=Training(seq_length=128, global_batch_size=8 * p.dp))


BALANCED = Moe(num_moe_experts=8)
OVERLOADED = Moe(num_moe_experts=8, overload=1.5)


def test_one_rank_of_each_pipeline_stage_stands_for_its_stage() -> None:
    ranks = chosen(recipe(tp=2, pp=4, dp=3), "distinct")
    assert [(r.rank, r.coordinates["pp"], r.stands_for) for r in ranks] == [
        (0, 0, 6),
        (6, 1, 6),
        (12, 2, 6),
        (18, 3, 6),
    ]


def test_the_last_shard_of_a_distributed_optimizer_is_measured_too() -> None:
    ranks = chosen(recipe(tp=2, dp=4, distributed_optimizer=True), "distinct")
    assert [(r.rank, r.coordinates["dp"], r.stands_for) for r in ranks] == [(0, 0, 6), (6, 3, 2)]


def test_a_distributed_optimizer_without_data_parallel_ranks_has_one_shard() -> None:
    assert [r.rank for r in chosen(recipe(tp=2, distributed_optimizer=True), "distinct")] == [0]


@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.integers(1, 5),
    distributed=st.booleans(),
)
def test_the_chosen_ranks_stand_for_the_whole_job(tp: int, pp: int, dp: int, distributed: bool) -> None:
    r = recipe(tp=tp, pp=pp, dp=dp, distributed_optimizer=distributed)
    ranks = chosen(r, "distinct")
    assert sum(x.stands_for for x in ranks) == r.world_size
    assert [x.rank for x in ranks] == sorted({x.rank for x in ranks})


@given(rank=st.integers(0, 2 * 3 * 4 - 1))
def test_coordinates_are_in_megatrons_order_tensor_fastest_pipeline_slowest(rank: int) -> None:
    c = at(recipe(tp=2, dp=3, pp=4), rank).coordinates
    assert c["tp"] + 2 * (c["cp"] + 1 * (c["dp"] + 3 * c["pp"])) == rank


def test_ranks_of_a_model_with_experts_have_an_expert_parallel_coordinate() -> None:
    split = {"tp": 2, "sequence_parallel": True, "dp": 4, "ep": 2}
    coordinates = [at(recipe(BALANCED, **split), rank).coordinates for rank in range(8)]
    assert [c["ep"] for c in coordinates] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert "etp" not in coordinates[0]
    coordinates = [at(recipe(BALANCED, etp=1, **split), rank).coordinates for rank in range(8)]
    assert [c["ep"] for c in coordinates] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [c["etp"] for c in coordinates] == [0] * 8
    assert "ep" not in at(recipe(dp=4), 1).coordinates


def test_balanced_expert_parallel_ranks_hold_the_same() -> None:
    assert [(r.rank, r.stands_for) for r in chosen(recipe(BALANCED, dp=8, ep=4), "distinct")] == [(0, 8)]


def test_the_overloaded_rank_and_one_of_the_others_are_measured() -> None:
    ranks = chosen(recipe(OVERLOADED, dp=8, ep=4, pp=2), "distinct")
    assert [(r.rank, r.coordinates["ep"], r.stands_for) for r in ranks] == [(0, 0, 2), (1, 1, 6), (8, 0, 2), (9, 1, 6)]
    assert [r.work for r in ranks] == [(0, True), (0, False), (1, True), (1, False)]


def test_shares_that_do_not_divide_are_measured_at_their_most_and_their_least() -> None:
    ranks = chosen(recipe(Moe(num_moe_experts=12), dp=4, ep=4), "distinct")  # 256 tokens: 64 a rank, as 22, 21, 21
    assert [(r.rank, r.stands_for) for r in ranks] == [(0, 4)]
    uneven = Moe(num_moe_experts=6, moe_router_topk=1, moe_router_pre_softmax=True)  # 128 tokens: 43, 43, 42
    ranks = chosen(recipe(uneven, dp=3, ep=3), "distinct")
    assert [(r.rank, r.stands_for) for r in ranks] == [(0, 2), (2, 1)]


def test_capacity_evens_shares_out() -> None:
    moe = Moe(num_moe_experts=6, moe_router_topk=1, moe_router_pre_softmax=True, moe_expert_capacity_factor=0.5)
    assert [r.rank for r in chosen(recipe(moe, dp=3, ep=3), "distinct")] == [0]


def test_experts_have_last_shards_on_more_ranks_than_the_rest() -> None:
    # 8 dense shards, the last on rank 7; 2 shards of each expert, the last on ranks 4 to 7
    ranks = chosen(recipe(BALANCED, dp=8, ep=4, distributed_optimizer=True), "distinct")
    assert [(r.rank, r.stands_for) for r in ranks] == [(0, 4), (4, 3), (7, 1)]
    # 1 shard of each expert
    ranks = chosen(recipe(BALANCED, dp=4, ep=4, distributed_optimizer=True), "distinct")
    assert [(r.rank, r.stands_for) for r in ranks] == [(0, 3), (3, 1)]


def test_the_rank_that_loads_the_batch_is_preferred() -> None:
    split = {"tp": 2, "sequence_parallel": True, "etp": 1, "dp": 4, "ep": 4}
    ranks = chosen(recipe(OVERLOADED, **split), "distinct")
    assert [(r.rank, r.coordinates["tp"], r.coordinates["ep"]) for r in ranks] == [(0, 0, 0), (2, 0, 2)]


@given(
    tp=st.sampled_from([1, 2]),
    etp=st.sampled_from([1, 2, None]),
    ep=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    pp=st.sampled_from([1, 2]),
    overload=st.sampled_from([1.0, 1.5]),
    distributed=st.booleans(),
)
def test_the_chosen_ranks_of_a_model_with_experts_stand_for_the_whole_job(
    tp: int, etp: int | None, ep: int, groups: int, pp: int, overload: float, distributed: bool
) -> None:
    moe = Moe(num_moe_experts=8, overload=overload if ep > 1 else 1)
    dp = (etp or tp) * ep * groups
    r = recipe(moe, tp=tp, sequence_parallel=tp > 1, etp=etp, ep=ep, dp=dp, pp=pp, distributed_optimizer=distributed)
    ranks = chosen(r, "distinct")
    assert sum(x.stands_for for x in ranks) == r.world_size
    assert [x.rank for x in ranks] == sorted({x.rank for x in ranks})
    assert {x.is_hot for x in ranks} == {x.is_hot for x in chosen(r, "all")}


SPLITS = [
    {"tp": 2, "dp": 4, "pp": 2, "ep": 2},
    {"tp": 2, "dp": 4, "pp": 2, "ep": 2, "etp": 1},
    {"tp": 1, "dp": 8, "ep": 2, "etp": 2},
    {"tp": 2, "cp": 2, "dp": 2, "ep": 4, "pp": 2},
    {"tp": 4, "dp": 2, "ep": 8, "etp": 1},
    {"tp": 1, "cp": 2, "dp": 3, "ep": 3, "pp": 2},
    {"tp": 2, "cp": 2, "dp": 3, "ep": 3, "etp": 2, "pp": 2},
]


@pytest.mark.usefixtures("megatron_model")  # in a worker, where Megatron is loaded
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(f"{n}{v}" for n, v in split.items()))
def test_coordinates_are_megatrons_own(split: dict[str, int]) -> None:
    from megatron.core.parallel_state import RankGenerator

    r = recipe(Moe(num_moe_experts=24), sequence_parallel=split["tp"] > 1, **split)
    p = r.parallelism
    expert_dp = r.world_size // p.pp // p.ep // p.expert_tp
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=p.tp, ep=1, dp=p.dp, pp=p.pp, cp=p.cp, order=order)
    expert = RankGenerator(tp=p.expert_tp, ep=p.ep, dp=expert_dp, pp=p.pp, cp=1, order=order)
    for rank in range(r.world_size):
        coordinates = {"etp": at(r, rank).coordinates["tp"], **at(r, rank).coordinates}
        for name, generator in (("tp", dense), ("cp", dense), ("dp", dense), ("pp", dense), ("ep", expert)):
            (group,) = (ranks for ranks in generator.get_ranks(name) if rank in ranks)
            assert group.index(rank) == coordinates[name], (rank, name)
        (group,) = (ranks for ranks in expert.get_ranks("tp") if rank in ranks)
        assert group.index(rank) == coordinates["etp"], rank


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "-".join(f"{n}{v}" for n, v in split.items()))
def test_a_solo_rank_has_the_groups_that_megatron_gives_it_in_the_whole_job(
    split: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pytest_mbmem.megatron import solo

    r = recipe(Moe(num_moe_experts=24), sequence_parallel=split["tp"] > 1, **split)
    p = r.parallelism

    def groups() -> dict[str, list[int]]:
        found = {}
        for name, group in vars(parallel_state).items():
            if "GROUP" in name and isinstance(group, dist.ProcessGroup):
                found[name] = dist.get_process_group_ranks(group)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        return found

    original = parallel_state.RankGenerator.get_ranks
    assert original is not solo._own_rank_group
    for rank in {0, 1, r.world_size // 2 + 1, r.world_size - 1}:
        dist.init_process_group("fake", rank=rank, world_size=r.world_size, store=FakeStore())
        monkeypatch.setattr(parallel_state.RankGenerator, "get_ranks", original)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=p.tp,
            pipeline_model_parallel_size=p.pp,
            context_parallel_size=p.cp,
            expert_model_parallel_size=p.ep,
            expert_tensor_parallel_size=p.etp,
            create_gloo_process_groups=False,
        )
        whole = groups()
        solo.initialize(r, rank)
        alone = groups()
        assert alone == whole
        for name in ("_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"):
            assert rank in whole[name]
        assert len(whole["_EXPERT_DATA_PARALLEL_GROUP"]) == r.world_size // p.pp // p.ep // p.expert_tp


def test_all_names_every_rank() -> None:
    assert [r.rank for r in chosen(recipe(pp=2, dp=2), "all")] == [0, 1, 2, 3]


def test_named_ranks_are_measured_lowest_first() -> None:
    assert [r.rank for r in chosen(recipe(dp=4), [3, 1])] == [1, 3]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([4], "4 is not in the job, whose ranks are 0 to 3"),
        ([-1], "-1 is not in the job"),
        ([1, 1], "names a rank twice"),
        ([], "a list of rank numbers"),
        ("worst", '"distinct", "all"'),
        ([True], "a list of rank numbers"),
        ([1.5], "a list of rank numbers"),
    ],
)
def test_ranks_that_the_job_does_not_have_are_refused(ranks: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(recipe(dp=4), ranks)  # type: ignore[arg-type]
