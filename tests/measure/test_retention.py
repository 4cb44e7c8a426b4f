"""Recipes that hold on to memory, on the virtual GPU: Megatron's own retention, and faults put into the training loop.

What stays is compared with what the fault must hold, in bytes: the allocator rounds each tensor up to 512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_mbmem.errors import OutOfMemory, UserError
from pytest_mbmem.growth import Growth, GrowthRule
from pytest_mbmem.measure.growth_runs import measure_growth
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.workers import CallResult
from pytest_mbmem.recipe import Model, Moe, Recipe, Training
from pytest_mbmem.virtual_gpu.gpus import load_gpus

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = Recipe(
    model=Model(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        vocab_size=1000,
        moe=Moe(num_moe_experts=4, moe_router_topk=2, moe_token_dispatcher_type="alltoall"),
    ),
    training=Training(seq_length=256),
)
HIDDEN = 256 * 64 * 2  # bytes of one layer's input there


class Faulty:
    """A launcher whose workers train with a fault of leaks.py."""

    def __init__(self, launcher: Launcher, fault: str) -> None:
        self._launcher, self._fault = launcher, fault
        self.timeout, self.cannot_run_alone = launcher.timeout, launcher.cannot_run_alone
        self.device = launcher.device

    def call_all(
        self, calls: Sequence[tuple[str, Mapping[str, Any]]], environment: Mapping[str, str], timeout: float
    ) -> list[CallResult]:
        return self._launcher.call_all([(f"leaks:{self._fault}", a) for _, a in calls], environment, timeout)


def grown(launcher: Launcher, fault: str, recipe: Recipe, **rule: Any) -> Growth:
    return measure_growth(Faulty(launcher, fault), recipe, GrowthRule(**rule))  # type: ignore[arg-type]


# Megatron's own ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe_full_recompute(launcher: Launcher) -> Growth:
    return measure_growth(launcher, MOE.but(**FULL), GrowthRule())


def test_moe_with_full_recompute_keeps_each_checkpoints_input_and_its_gradient(moe_full_recompute: Growth) -> None:
    """megatron-core 0.16.1 and 0.19.2. A version that lets go of them makes this test fail: then it goes."""
    assert moe_full_recompute.over_control == 4 * 2 * HIDDEN
    assert not moe_full_recompute.passed
    (finding,) = moe_full_recompute.findings
    assert (finding.kind, finding.rank, finding.bytes) == ("after backward", 0, 4 * 2 * HIDDEN)
    assert sum(holder.bytes for holder in finding.holders) == finding.bytes
    graph = "the autograd graph of decoder.layers.*.mlp.token_dispatcher.probs, its leaf (AccumulateGrad)"
    assert {holder.path for holder in finding.holders} == {graph, f"{graph}.grad"}
    assert {(holder.count, holder.example) for holder in finding.holders} == {(4, "256x1x64 bfloat16")}
    assert any("tensor_parallel/random.py" in holder.allocated_at for holder in finding.holders)


def test_what_moe_keeps_is_no_garbage(moe_full_recompute: Growth) -> None:
    (rank,) = moe_full_recompute.ranks
    assert (rank.run.freed_by_gc, rank.run.kept_freed_by_gc) == (0, 0)
    assert (moe_full_recompute.per_step, moe_full_recompute.per_microbatch <= 4096) == (0, True)


def test_what_moe_keeps_doubles_with_the_number_of_checkpoints(launcher: Launcher, moe_full_recompute: Growth) -> None:
    half = measure_growth(launcher, MOE.but(**{**FULL, "recompute_num_layers": 2}), GrowthRule())
    assert moe_full_recompute.over_control == 2 * half.over_control > 0


def test_dense_layers_with_full_recompute_keep_nothing(launcher: Launcher) -> None:
    dense = measure_growth(launcher, MOE.but(moe=None, **FULL), GrowthRule(slack=0, microbatches=(2, 4)))
    assert dense.over_control == dense.per_step == dense.freed_by_gc == 0
    assert dense.per_microbatch == 512  # the reported loss


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2, "dp": 2, "distributed_optimizer": True, "overlap_grad_reduce": True},
        {"pp": 2, "vpp": 2},
        {"tp": 2, "sequence_parallel": True, "recompute_granularity": "selective"},
    ],
    ids=["pp2-dp2", "pp2-vpp2", "tp2-selective"],
)
def test_a_sound_recipe_passes_on_every_rank(launcher: Launcher, changes: dict[str, Any]) -> None:
    recipe = MOE.but(moe=None, global_batch_size=4, **changes)
    sound = measure_growth(launcher, recipe, GrowthRule())
    assert sound.passed, sound.explain()
    assert len(sound.ranks) >= recipe.parallelism.pp
    assert sound.per_step == 0
    assert all(len(set(rank.run.resting)) == 1 for rank in sound.ranks)  # to the byte


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_view_that_is_kept_every_step_is_growth_by_its_whole_storage(
    launcher: Launcher, small_recipe: Recipe
) -> None:
    leak = grown(launcher, "view_of_each_step", small_recipe)
    output = 128 * 64 * 2
    assert leak.per_step == 2 * output
    (finding,) = [f for f in leak.findings if f.kind == "per step"]
    (holder,) = finding.holders
    assert (holder.path, holder.bytes, holder.count) == ("decoder.layers.*.history[*]", 2 * output, 2)
    assert holder.example == "1x1x64 bfloat16 (a view of 16.00 KiB)"


def test_outputs_that_are_replaced_are_kept_but_do_not_grow(launcher: Launcher, small_recipe: Recipe) -> None:
    kept = grown(launcher, "last_output", small_recipe)
    assert kept.passed, kept.explain()
    held = {holder.path: holder for holder in kept.ranks[0].run.kept}
    assert held["decoder.layers.*.last['output']"].bytes == 2 * 128 * 64 * 2


def test_with_recompute_the_same_outputs_exceed_the_control_by_their_graphs(
    launcher: Launcher, small_recipe: Recipe
) -> None:
    kept = grown(launcher, "last_output", small_recipe.but(**FULL))
    (finding,) = kept.findings
    assert finding.kind == "after backward"
    assert all("decoder.layers.*.last['output']" in holder.path for holder in finding.holders)
    assert sum(holder.bytes for holder in finding.holders) == finding.bytes


def test_a_reported_loss_with_its_graph_pins_what_each_microbatch_received(
    launcher: Launcher, small_recipe: Recipe
) -> None:
    leak = grown(launcher, "loss_with_its_graph", small_recipe.but(pp=2), microbatches=(4, 16))
    first, last = leak.ranks
    received = 128 * 64 * 2
    assert first.per_microbatch <= 512
    assert last.per_microbatch >= 2 * received  # the buffer and its gradient
    (finding,) = leak.findings
    assert (finding.kind, finding.rank) == ("per microbatch", 1)
    pinned = finding.holders[0]
    assert "the autograd graph of " in pinned.path
    assert "forward_data_store" in pinned.path
    assert (pinned.count, pinned.bytes) == (12, 12 * received)


def test_cycles_are_growth_that_gc_frees_whenever_gc_would_run(launcher: Launcher, small_recipe: Recipe) -> None:
    leak = grown(launcher, "cycle_of_each_step", small_recipe)
    output = 128 * 64 * 2
    assert leak.per_step == output
    assert leak.freed_by_gc == 7 * output  # two steps of warm-up and five
    assert leak.ranks[0].run.cycles == ("Ring",)
    assert "needs a garbage collection to free 112.00 KiB\n  reference cycles through Ring:" in leak.explain()
    assert grown(launcher, "with_gc_on_a_timer", small_recipe) == leak


def test_a_second_step_that_is_higher_than_the_first_is_no_growth(launcher: Launcher, small_recipe: Recipe) -> None:
    assert grown(launcher, "state_in_step_two", small_recipe).passed


# Runs ----------------------------------------------------------------------------------------------------------------


def test_the_same_recipe_gives_the_same_figures(launcher: Launcher, small_recipe: Recipe) -> None:
    assert measure_growth(launcher, small_recipe, GrowthRule()) == measure_growth(launcher, small_recipe, GrowthRule())


def test_steps_ranks_and_control_are_those_asked_for(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(dp=4, **FULL)
    control = small_recipe.but(dp=4, recompute_granularity="selective")
    asked = measure_growth(launcher, recipe, GrowthRule(steps=6, control=control), ranks=[1, 2])
    assert [rank.rank for rank in asked.ranks] == [1, 2]
    assert len(asked.ranks[0].run.resting) == 7
    assert asked.ranks[0].control is not None
    assert asked.passed, asked.explain()


def test_a_control_of_another_job_is_refused(launcher: Launcher, small_recipe: Recipe) -> None:
    with pytest.raises(UserError, match="seq_length"):
        measure_growth(launcher, small_recipe.but(**FULL), GrowthRule(control=small_recipe.but(seq_length=64)))


def test_too_few_microbatches_for_the_pipeline_are_refused(launcher: Launcher, small_recipe: Recipe) -> None:
    with pytest.raises(UserError, match=r"microbatches=\(1, 4\)\): 1 do not fill the pipeline's 2 stages"):
        measure_growth(launcher, small_recipe.but(pp=2), GrowthRule(microbatches=(1, 4)))


def test_a_run_that_does_not_fit_says_which(small_recipe: Recipe) -> None:
    launcher = Launcher(load_gpus()["l4-24gb"], timeout=120)
    try:
        huge = small_recipe.but(hidden_size=8192, num_attention_heads=64, num_layers=8)
        with pytest.raises(OutOfMemory, match="memory growth: rank 0: out of memory: CUDA out of memory"):
            measure_growth(launcher, huge, GrowthRule())
    finally:
        launcher.close()
