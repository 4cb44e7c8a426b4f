"""Which ranks are measured, and what each of them stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.ranks import at, chosen
from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training


def recipe(**parallelism: object) -> Recipe:
    p = Parallelism(**parallelism)  # type: ignore[arg-type]
    model = Model(num_layers=8, hidden_size=64, num_attention_heads=8, vocab_size=1000)
    return Recipe(model=model, parallelism=p, training=Training(seq_length=128, global_batch_size=8 * p.dp))


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
    c = at(Parallelism(tp=2, dp=3, pp=4), rank).coordinates
    assert c["tp"] + 2 * (c["cp"] + 1 * (c["dp"] + 3 * c["pp"])) == rank


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
