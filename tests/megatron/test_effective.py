"""What acts on a memory setting in built models: dense, with experts, of both kinds, latent attention, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_mbmem.measure.effects import probes
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Effect
from pytest_mbmem.recipe import Mla, Model, Moe, Recipe, Training

DENSE = Recipe(
    model=Model(num_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=1000),
    training=Training(seq_length=64, steps=1),
)
GROUPED = Moe(num_moe_experts=4, moe_grouped_gemm=True, moe_shared_expert_intermediate_size=64)
EXPERTS = DENSE.but(moe=GROUPED)
MIXED = DENSE.but(moe=Moe(num_moe_experts=4, moe_layer_freq=(0, 0, 1, 1)))
LATENT = DENSE.but(mla=Mla(q_lora_rank=32, kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16))
ANYWHERE = ("core_attn", "layernorm", "mlp", "moe", "shared_experts")


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def selective(*labels: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": labels}


def found(launcher: Launcher, recipe: Recipe) -> list[dict[str, Effect]]:
    """The effects of each measured rank by setting, which are those that a measurement probes."""
    measurement = launcher.measure(recipe, count_flops=False, check_effects=False)
    assert measurement.failure is None, measurement.failure.message
    for rank in measurement.ranks:
        more = {f"memory.recompute_num_layers {recipe.memory.recompute_num_layers}"}
        assert {effect.setting for effect in rank.effects} - more == set(probes(recipe))
    return [{effect.setting: effect for effect in rank.effects} for rank in measurement.ranks]


def told(effects: dict[str, Effect]) -> dict[str, int | str]:
    """Label or setting -> how much acts on it, or why nothing does."""
    names = {name: name.rpartition(" ")[2].strip("'") for name in effects}
    return {names[name]: effect.acting if effect.effective else effect.reason for name, effect in effects.items()}


@pytest.mark.parametrize(
    ("recipe", "labels", "expected"),
    [
        (DENSE, ANYWHERE, [4, 4, 4, "no experts in the 4 layers", "no experts in the 4 layers"]),
        (EXPERTS, (*ANYWHERE, "moe_act"), [4, 4, "only experts and no dense MLP in the 4 layers", 4, 4, 4]),
        (MIXED, ANYWHERE, [4, 4, 2, 2, "no shared expert beside the experts in the 4 layers"]),
        (LATENT, ("core_attn", "mla_up_proj"), [4, 4]),
    ],
    ids=["dense", "experts", "mixed", "latent"],
)
def test_labels_of_recompute(
    recipe: Recipe, labels: tuple[str, ...], expected: list[int | str], launcher: Launcher
) -> None:
    (effects,) = found(launcher, recipe.but(**selective(*labels)))
    assert told(effects) == dict(zip(labels, expected, strict=True))


def test_stages_may_have_different_modules(launcher: Launcher) -> None:
    """Layers with experts and without on a pipeline stage each, which are alone on their rank."""
    first, last = found(launcher, MIXED.but(pp=2, **selective("mlp", "moe")))
    assert told(first) == {"mlp": 2, "moe": "no experts in the 2 layers"}
    assert told(last) == {"mlp": "only experts and no dense MLP in the 2 layers", "moe": 2}


@pytest.mark.parametrize(
    ("recipe", "labels", "expected"),
    [
        (DENSE, ("attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj"), [4] * 5),
        (DENSE, ("moe_act",), ["no experts in the 4 layers"]),
        (EXPERTS, ("expert_fc1", "moe_act"), [4, 4]),
        (MIXED, ("expert_fc1", "mlp_norm"), ["no grouped experts (moe_grouped_gemm) in the 4 layers", 4]),
    ],
    ids=["dense", "dense-experts", "experts", "sequential"],
)
def test_labels_of_offload(
    recipe: Recipe, labels: tuple[str, ...], expected: list[int | str], launcher: Launcher
) -> None:
    (effects,) = found(launcher, recipe.but(offload_modules=labels, min_offloaded_tensor_size=4096))
    assert told(effects) == dict(zip(labels, expected, strict=True))
    assert all("tensors of fewer than 4096 elements" in effect.reason for effect in effects.values() if effect.acting)


BEYOND = "the stage has 2 layers, so it comes to 2"
IN_CHUNKS = "the largest model chunk of the stage has 1 layer, so it comes to 1"


@pytest.mark.parametrize(
    ("changes", "layers", "number"),
    [
        (full("block", 3), 3, 3),
        (full("uniform", 2), 4, 2),
        ({**full("block", 2), "pp": 2}, 2, 2),
        ({**full("block", 3), "pp": 2}, 2, BEYOND),
        ({**full("block", 2), "pp": 2, "vpp": 2, "global_batch_size": 2}, 2, IN_CHUNKS),
        ({**full("block", 5), "mtp_num_layers": 1}, 4, "the stage has 4 layers, so it comes to 4"),
        ({**full("uniform", 1), "mtp_num_layers": 1}, 5, 1),
    ],
    ids=["block", "uniform", "stage", "beyond-stage", "beyond-chunk", "mtp-block", "mtp-uniform"],
)
def test_full_recompute_of_the_layers_that_are_built(
    changes: dict[str, Any], layers: int, number: int | str, launcher: Launcher
) -> None:
    asked = changes["recompute_num_layers"]
    for effects in found(launcher, DENSE.but(**changes)):
        assert effects.pop("memory.recompute_granularity 'full'").acting == layers
        assert told(effects) == {str(asked): number}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (full("block", 0), {"full": "recompute_num_layers 0: no layer is recomputed"}),
        (
            {"cpu_offloading": True, "cpu_offloading_num_layers": 0},
            {"memory.cpu_offloading": "cpu_offloading_num_layers 0: no layer is offloaded"},
        ),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 3}, {"memory.cpu_offloading": 3}),
        (
            {**full("block", 3), "tp": 2, "distribute_saved_activations": True},
            {"full": 3, "3": 3, "memory.distribute_saved_activations": 3},
        ),
        (
            {"optimizer_cpu_offload": True, "distributed_optimizer": True, "optimizer_offload_fraction": 0.1},
            {"memory.optimizer_cpu_offload": 1},
        ),
    ],
    ids=["block-0", "offload-0", "offload-3", "distributed", "optimizer"],
)
def test_other_settings(changes: dict[str, Any], expected: dict[str, int | str], launcher: Launcher) -> None:
    (effects,) = found(launcher, DENSE.but(**changes))
    assert told(effects) == expected


def test_fused_norms_and_what_megatron_turned_off(megatron_model: Callable[..., Any]) -> None:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from pytest_mbmem.megatron.effective import effects

    model = megatron_model(DENSE.but(**selective("layernorm", "mlp")))
    layers = [m for m in model.chunks[0].modules() if isinstance(m, TransformerLayer)]
    for layer in layers:
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp()
        layer.recompute_mlp = False
    assert told({effect.setting: effect for effect in effects(model)}) == {
        "layernorm": "no norm that is a module of its own in the 4 layers",
        "mlp": "Megatron turned it off in the 4 modules that could do it",
    }
