"""CUDA graphs around Transformer Engine's layers: Megatron's own capturing, and PyTorch's private pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement, PhaseFigures
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training

LAYERS = 4
RECIPE = Recipe(
    model=Model(num_layers=LAYERS, hidden_size=256, num_attention_heads=4, vocab_size=4096),
    parallelism=Parallelism(dp=2),
    training=Training(seq_length=512, micro_batch_size=2, steps=5, transformer_impl="transformer_engine"),
)
SCORES = LAYERS * 2 * 4 * 512 * 512 * 2  # bytes: layers, batch, heads, sequence², bf16: of unfused attention

LauncherOf = Callable[..., Launcher]


def graphs(implementation: str, scope: str | None = None) -> dict[str, str]:
    return {"cuda_graph_impl": implementation, **({} if scope is None else {"cuda_graph_scope": scope})}


def figures(measurement: Measurement, step: int, phase: str) -> PhaseFigures:
    (found,) = [f for f in measurement.ranks[0].phases if (f.step, f.phase) == (step, phase)]
    return found


def measure(launcher_of: LauncherOf, recipe: Recipe) -> Measurement:
    measurement = launcher_of().measure(recipe)
    assert measurement.failure is None, measurement.failure
    return measurement


@pytest.fixture(scope="module")
def plain(launcher_of: LauncherOf) -> Measurement:
    return measure(launcher_of, RECIPE)


@pytest.fixture(scope="module")
def by_te(launcher_of: LauncherOf) -> Measurement:
    return measure(launcher_of, RECIPE.but(megatron=graphs("transformer_engine")))


def held(measurement: Measurement, step: int) -> int:
    """Bytes allocated at the end of the step's forward beyond those at its end: activations."""
    rest = figures(measurement, step, "optimizer").resting["allocated"]
    return figures(measurement, step, "forward").resting["allocated"] - rest


def test_nothing_changes_before_the_capture_and_nothing_after_it(plain: Measurement, by_te: Measurement) -> None:
    for step in (1, 2, 3):
        for phase in ("forward", "backward", "grad-sync", "optimizer"):
            for which in ("peak", "resting"):
                with_graphs, without = (getattr(figures(m, step, phase), which) for m in (by_te, plain))
                assert with_graphs["allocated"] == without["allocated"]
    captured, replayed = (figures(by_te, step, "optimizer") for step in (4, 5))
    assert captured.resting == replayed.resting
    assert figures(by_te, 4, "forward").peak["allocated"] > figures(by_te, 5, "forward").peak["allocated"]


def test_what_layers_keep_moves_into_the_pool(plain: Measurement, by_te: Measurement) -> None:
    moved = held(plain, 5) - held(by_te, 5)
    assert moved >= SCORES
    grown = figures(by_te, 5, "optimizer").resting["reserved"] - figures(plain, 5, "optimizer").resting["reserved"]
    assert grown >= moved  # and reserved memory has all of it, beside the graphs' own inputs, outputs and workspaces
    assert any("private pools are reserved memory" in text for text in by_te.assumptions)
    assert by_te.ranks[0].flops_per_step == plain.ranks[0].flops_per_step


def test_megatrons_own_graphs_are_captured_after_the_first_step(launcher_of: LauncherOf, plain: Measurement) -> None:
    local = measure(launcher_of, RECIPE.but(megatron=graphs("local"), steps=3))
    assert held(plain, 3) - held(local, 3) >= SCORES
    assert figures(local, 1, "grad-sync").peak["allocated"] > figures(plain, 1, "grad-sync").peak["allocated"]


def test_a_graph_of_the_whole_step_replays_without_allocating(launcher_of: LauncherOf, plain: Measurement) -> None:
    whole = measure(launcher_of, RECIPE.but(megatron=graphs("local", "full_iteration")))
    phases = {f.phase for f in whole.ranks[0].phases if f.step == 5}
    assert phases == {"forward", "optimizer"}  # nothing of the schedule is run any more
    first, last = figures(whole, 4, "forward"), figures(whole, 5, "forward")
    assert last.peak["allocated"] < figures(plain, 5, "forward").peak["allocated"] < first.peak["allocated"]
    assert last.peak["reserved"] >= figures(plain, 5, "forward").peak["reserved"]


def test_the_attention_of_dropless_experts_can_be_captured(launcher_of: LauncherOf) -> None:
    model = Model(num_layers=2, hidden_size=256, num_attention_heads=4, vocab_size=4096, moe=Moe(num_moe_experts=4))
    recipe = RECIPE.but(model=model, megatron=graphs("transformer_engine", "attn,moe_router"))
    measure(launcher_of, recipe)
    with pytest.raises(UserError, match=r"megatron\.cuda_graph_scope: with attn,moe_router,moe_preprocess"):
        launcher_of().measure(recipe.but(megatron=graphs("transformer_engine", "attn,moe_router,moe_preprocess")))


def test_hooks_that_gather_parameters_stay_out_of_the_graphs(launcher_of: LauncherOf) -> None:
    recipe = RECIPE.but(
        tp=2,
        sequence_parallel=True,
        distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        megatron=graphs("transformer_engine"),
    )
    measure(launcher_of, recipe)
