"""What runs of the functions that Megatron has torch.compile fuse, and what it takes."""

from __future__ import annotations

import importlib.util

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure import launch
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Recipe

DENSE = {
    "model": {
        "num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 8000,
        "add_bias_linear": True,
        "hidden_dropout": 0.1,
    },
    "training": {"seq_length": 512, "steps": 2, "cross_entropy_loss_fusion": True},
}
EXPERTS = {
    "model": {
        "num_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "activation": "swiglu",
        "moe": {
            "num_moe_experts": 4,
            "moe_grouped_gemm": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
    },
    "training": {"seq_length": 512, "steps": 2},
}
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def measured(launcher: launch.Launcher, recipe: Recipe, how: str) -> Measurement:
    measurement = launcher.measure(recipe.but(jit_fusion=how), ranks=[0], count_flops=False, check_effects=False)
    assert measurement.failure is None
    return measurement


def bytes_in_phases(measurement: Measurement) -> list[tuple[str, int, int]]:
    (rank,) = measurement.ranks
    return [(phase.name, phase.peak["allocated"], phase.resting["allocated"]) for phase in rank.phases]


@needs_triton
@pytest.mark.parametrize("recipe", [DENSE, EXPERTS], ids=["bias-gelu-and-cross-entropy", "swiglu-of-experts"])
def test_compiled_functions_take_what_their_stand_ins_take_and_eager_ones_do_not(
    recipe: dict[str, object], launcher: launch.Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "timeout", 300.0)  # of the first compilation on a slow machine
    of = {
        how: bytes_in_phases(measured(launcher, Recipe.from_dict(recipe), how))
        for how in ("stand-in", "compiled", "eager")
    }
    assert of["compiled"] == of["stand-in"]
    assert of["eager"] != of["stand-in"]


def test_eager_saves_the_copies_of_the_logits_that_the_fused_cross_entropy_makes(launcher: launch.Launcher) -> None:
    recipe = Recipe.from_dict(DENSE)
    stand_in, eager = (measured(launcher, recipe, how) for how in ("stand-in", "eager"))
    copy = 4 * recipe.training.seq_length * recipe.model.padded_vocab_size()
    peaks = [max(peak for name, peak, _ in bytes_in_phases(m) if name == "step-2/forward") for m in (stand_in, eager)]
    assert peaks[0] - peaks[1] == pytest.approx(copy, rel=0.05)


def test_a_measurement_says_what_ran(launcher: launch.Launcher) -> None:
    recipe = Recipe.from_dict(DENSE)
    texts = ["; ".join(measured(launcher, recipe, how).assumptions) for how in ("stand-in", "eager")]
    assert "stand-ins of equal size for what torch.compile fuses" in texts[0]
    assert "torch.compile is off" in texts[1]


def test_the_default_leaves_the_digest_as_it_is() -> None:
    recipe = Recipe.from_dict(DENSE)
    assert recipe.but(jit_fusion="stand-in").digest == recipe.digest
    assert recipe.but(jit_fusion="eager").digest != recipe.digest


def test_a_process_without_torch_compile_refuses_compiled_functions(launcher: launch.Launcher) -> None:
    recipe = Recipe.from_dict(DENSE).but(jit_fusion="compiled").to_dict()
    arguments = {"recipe": recipe, "rank": 0, "coordinates": {}, "stands_for": 1}
    failure = launcher.call("pytest_mbmem.measure.worker:measure_rank", arguments).value["failure"]
    assert failure["kind"] == "refused"
    assert "training.jit_fusion: 'compiled' is not possible here: torch.compile is off" in failure["message"]


def test_models_of_one_process_may_differ_in_it(megatron_model) -> None:
    from megatron.core.fusions import fused_bias_gelu

    recipe = Recipe.from_dict(DENSE)
    used = []
    for how in ("stand-in", "eager", "stand-in"):
        megatron_model(recipe.but(jit_fusion=how)).close()
        used.append(fused_bias_gelu.bias_gelu.__module__)
    assert used == ["pytest_mbmem.megatron.jit_fusion", "megatron.core.fusions.fused_bias_gelu", used[0]]


def test_compiling_without_triton_is_refused(launcher: launch.Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "package_folder", lambda name: None)
    with pytest.raises(UserError, match=r"training\.jit_fusion: 'compiled' needs Triton"):
        launcher.measure(Recipe.from_dict(DENSE).but(jit_fusion="compiled"))


def test_torchs_own_variable_is_no_part_of_a_recipe() -> None:
    with pytest.raises(UserError, match=r"environment\.TORCHDYNAMO_DISABLE.*write it as training\.jit_fusion"):
        Recipe.from_dict({**DENSE, "environment": {"TORCHDYNAMO_DISABLE": "1"}})
