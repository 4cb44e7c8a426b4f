"""A recipe as Megatron's settings: names, values, and which key of the recipe each has."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from operator import attrgetter

import pytest

from pytest_mbmem import megatron_settings
from pytest_mbmem.errors import UserError
from pytest_mbmem.megatron_settings import KEYS, ddp_settings, optimizer_settings, settings, transformer_settings
from pytest_mbmem.recipe import Lora, Memory, Mla, Model, Moe, Optimizer, Parallelism, Recipe, Training

RECIPE = Recipe(model=Model(num_layers=4, hidden_size=64, num_attention_heads=4))
EXPERTS = RECIPE.but(moe=Moe(num_moe_experts=4, moe_layer_freq=(0, 1, 1, 1)), add_bias_linear=True)
OF_NO_CLASS = {
    # sizes of tokens, batches and the job, and what the package assumes
    "model": {"vocab_size", "make_vocab_size_divisible_by", "max_position_embeddings"},
    "model.moe": {"overload"},
    "training": {"steps", "jit_fusion"},
    # arguments of Megatron's model
    "model ": {"share_embeddings_and_output_weights", "moe"},
}


def test_every_field_of_a_recipe_is_a_setting_or_known_to_be_none() -> None:
    parts = {
        "model": Model,
        "model.moe": Moe,
        "model.mla": Mla,
        "parallelism": Parallelism,
        "training": Training,
        "optimizer": Optimizer,
        "memory": Memory,
        "lora": Lora,
    }
    fields = {f"{prefix}.{f.name}" for prefix, part in parts.items() for f in dataclasses.fields(part)}
    others = {f"{prefix.strip()}.{name}" for prefix, names in OF_NO_CLASS.items() for name in names}
    assert set(KEYS.values()) - {"environment.NCCL_GRAPH_REGISTER"} == fields - others


def test_every_setting_of_a_recipe_has_a_key_or_is_a_constant() -> None:
    constants = {"bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion"}
    constants |= {"persist_layer_norm", "overlap_p2p_comm", "batch_p2p_comm", "deallocate_pipeline_outputs"}
    constants |= {"rope_type", "use_torch_optimizer_for_cpu_offload", "use_precision_aware_optimizer"}
    recipe = EXPERTS.but(mla=Mla(), lora=Lora())
    assert settings(recipe).keys() - KEYS.keys() == constants


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPE,
        EXPERTS,
        RECIPE.but(mla=Mla(), memory=Memory(recompute_granularity="selective", recompute_modules=("mlp",))),
        RECIPE.but(lora=Lora(), megatron={"cuda_graph_scope": ["attn", "mlp"], "fp8": None, "fp8_margin": 1}),
    ],
    ids=["plain", "experts", "mla", "lora"],
)
def test_settings_are_plain_data_and_the_recipe_s_values(recipe: Recipe) -> None:
    found = settings(recipe)
    assert json.loads(json.dumps(found)) == found
    derived = {"bf16", "fp16", "gated_linear_unit", "activation_func", "multi_latent_attention", "grad_reduce_in_fp32"}
    derived |= {"fine_grained_activation_offloading", "pipeline_model_parallel_layout", "cpu_offloading_num_layers"}
    derived |= {"optimizer_offload_fraction", "global_batch_size"}
    for name in found.keys() & KEYS.keys() - derived - {"NCCL_GRAPH_REGISTER"}:
        value = attrgetter(KEYS[name])(recipe)
        assert found[name] == (list(value) if isinstance(value, tuple) else value), name


def test_what_follows_from_other_fields() -> None:
    plain = settings(RECIPE)
    assert (plain["bf16"], plain["fp16"], plain["params_dtype"]) == (True, False, "bf16")
    assert (plain["gated_linear_unit"], plain["activation_func"]) == (False, "gelu")
    assert (plain["overlap_p2p_comm"], plain["batch_p2p_comm"]) == (False, True)
    assert (plain["pipeline_model_parallel_layout"], plain["cpu_offloading_num_layers"]) == (None, 0)
    assert (plain["recompute_modules"], plain["offload_modules"]) == (None, [])
    changed = RECIPE.but(activation="swiglu", precision="fp16", pp=2, vpp=2, global_batch_size=2)
    changed = changed.but(offload_modules=("core_attn",), main_grads="fp32", optimizer_cpu_offload=True)
    other = settings(changed.but(distributed_optimizer=True))
    assert (other["bf16"], other["fp16"], other["pipeline_dtype"]) == (False, True, "fp16")
    assert (other["gated_linear_unit"], other["activation_func"]) == (True, "silu")
    assert (other["overlap_p2p_comm"], other["batch_p2p_comm"]) == (True, False)
    assert (other["fine_grained_activation_offloading"], other["offload_modules"]) == (True, ["core_attn"])
    assert (other["use_precision_aware_optimizer"], other["optimizer_offload_fraction"]) == (True, 1.0)
    assert plain["optimizer_offload_fraction"] == 0.0
    assert settings(RECIPE.but(optimizer_offload_fraction=0.5))["optimizer_offload_fraction"] == 0.5


def test_experts_and_latent_attention_have_their_settings_only_where_they_are() -> None:
    assert not {"num_moe_experts", "multi_latent_attention", "lora_rank"} & settings(RECIPE).keys()
    assert settings(EXPERTS)["moe_layer_freq"] == [0, 1, 1, 1]
    assert settings(EXPERTS.but(lora=Lora(targets=("linear_proj",))))["lora_targets"] == ["linear_proj"]
    assert settings(RECIPE.but(mla=Mla(kv_lora_rank=9)))["kv_lora_rank"] == 9


def test_settings_are_those_of_all_classes_and_of_what_runs_below() -> None:
    recipe = RECIPE.but(alloc_conf="expandable_segments:True", environment={"NCCL_GRAPH_REGISTER": "0"})
    found = settings(recipe)
    for part in (transformer_settings(recipe), ddp_settings(recipe), optimizer_settings(recipe)):
        assert part.items() <= found.items()
    assert (found["alloc_conf"], found["NCCL_GRAPH_REGISTER"]) == ("expandable_segments:True", "0")
    assert settings(RECIPE)["NCCL_GRAPH_REGISTER"] == ""


def test_added_settings_replace_constants() -> None:
    recipe = RECIPE.but(megatron={"gradient_accumulation_fusion": True, "nccl_ub": True, "cuda_graph_scope": ["attn"]})
    found = settings(recipe)
    assert found["gradient_accumulation_fusion"] is True
    assert (found["nccl_ub"], found["cuda_graph_scope"]) == (True, ["attn"])
    assert transformer_settings(recipe)["gradient_accumulation_fusion"] is False


def test_settings_cost_neither_torch_nor_yaml() -> None:
    code = (
        "import sys, pytest_mbmem.megatron_settings as m; from pytest_mbmem.recipe import *; "
        "m.settings(Recipe(model=Model(num_layers=1, hidden_size=8, num_attention_heads=1))); "
        "print([m for m in ('torch', 'yaml', 'pytest') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(("one", "other"), [("fp8_param", "fp8_param_gather"), ("fp4_param", "fp4_param_gather")])
def test_parameters_of_few_bits_take_one_setting(one: str, other: str) -> None:
    for given in (one, other):
        found = settings(RECIPE.but(megatron={given: True}))
        assert (found[one], found[other]) == (True, True)
    apart = settings(RECIPE.but(megatron={one: True, other: False}))
    assert (apart[one], apart[other]) == (True, False)


def test_the_precision_aware_optimizer_has_main_gradients_of_the_buffer_s_type() -> None:
    aware = {"use_precision_aware_optimizer": True}
    assert optimizer_settings(RECIPE.but(megatron=aware))["main_grads_dtype"] == "fp32"
    assert optimizer_settings(RECIPE.but(megatron=aware, main_grads="bf16"))["main_grads_dtype"] == "bf16"
    assert "main_grads_dtype" not in optimizer_settings(RECIPE.but(main_grads="bf16"))


@pytest.mark.parametrize("name", ["bf16", "torch.bfloat16"])
def test_main_gradients_of_two_types_are_refused(name: str) -> None:
    assert RECIPE.but(main_grads="bf16", megatron={"main_grads_dtype": name})
    with pytest.raises(UserError, match=r"megatron.main_grads_dtype: '.*' differs from training.main_grads, 'fp32'"):
        RECIPE.but(megatron={"main_grads_dtype": name})


def test_rope_is_fused_where_megatron_lm_fuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_te = RECIPE.but(transformer_impl="transformer_engine")
    monkeypatch.setattr(megatron_settings, "versions_of", lambda packages: {})
    assert transformer_settings(of_te)["apply_rope_fusion"] is False
    monkeypatch.setattr(megatron_settings, "versions_of", lambda packages: dict.fromkeys(packages, "2.20.2"))
    assert transformer_settings(of_te)["apply_rope_fusion"] is True
    for other in (
        RECIPE,
        of_te.but(mla=Mla()),
        of_te.but(position_embedding_type="learned_absolute"),
    ):
        assert transformer_settings(other)["apply_rope_fusion"] is False
