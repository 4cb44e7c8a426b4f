"""Megatron's configuration objects of a recipe: they have its settings, and what is no setting is refused."""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Lora, Mla, Model, Moe, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128),
    training=Training(seq_length=64),
)
pytestmark = pytest.mark.usefixtures("megatron_model")  # so that they run in a worker

RECIPES = [
    RECIPE,
    RECIPE.but(tp=2, sequence_parallel=True, pp=2, vpp=2, global_batch_size=4, precision="fp16", lora=Lora()),
    RECIPE.but(moe=Moe(num_moe_experts=4, moe_layer_freq=(0, 1, 1, 1), moe_z_loss_coeff=0.1), ep=2, dp=2),
    RECIPE.but(num_query_groups=None, mla=Mla(kv_lora_rank=16), activation="swiglu", attention_backend="flash"),
    RECIPE.but(offload_modules=("core_attn",), main_grads="bf16", distributed_optimizer=True, kind="adam", lr=0.5),
    RECIPE.but(recompute_granularity="selective", recompute_modules=("core_attn", "mlp"), clip_grad=0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=["plain", "parallel", "experts", "mla", "offload", "recompute"])
def test_configurations_have_exactly_the_recipe_s_settings(recipe: Recipe) -> None:
    import torch
    import torch.nn.functional as F

    from pytest_mbmem import megatron_settings
    from pytest_mbmem.megatron import configs

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    functions = {"gelu": F.gelu, "silu": F.silu}
    for kind in ("transformer", "ddp", "optimizer"):
        config = getattr(configs, f"{kind}_config")(recipe)
        for name, value in getattr(megatron_settings, f"{kind}_settings")(recipe).items():
            found = getattr(config, name)
            if name.endswith("_dtype") and name != "moe_router_dtype":
                assert found is dtypes[value], name
            elif name == "activation_func":
                assert found is functions[value]
            elif name == "attention_backend":
                assert found.name == value
            elif value is not None:  # Megatron puts in its defaults
                assert found == value, name


def test_added_settings_reach_every_class_that_has_them() -> None:
    import torch

    from pytest_mbmem.megatron import configs

    added = {
        "fp8_recipe": "blockwise",  # of the model and of the optimizer
        "barrier_with_L1_time": False,  # likewise
        "delay_wgrad_compute": False,  # of the model and of the wrapper
        "bucket_size": 1234,
        "pad_buckets_for_high_nccl_busbw": True,
        "adam_beta1": 0.5,
        "layernorm_epsilon": 0.25,
        "autocast_dtype": "torch.float16",
        "overlap_p2p_comm": True,  # a constant of the package
        "batch_p2p_comm": False,
        "no_rope_freq": [0, 1, 0, 1],
        "moe_router_topk_scaling_factor": None,
    }
    recipe = RECIPE.but(megatron=added)
    model, wrapper = configs.transformer_config(recipe), configs.ddp_config(recipe)
    optimizer = configs.optimizer_config(recipe)
    assert (model.fp8_recipe, optimizer.fp8_recipe) == ("blockwise", "blockwise")
    assert (model.barrier_with_L1_time, optimizer.barrier_with_L1_time) == (False, False)
    assert (wrapper.bucket_size, wrapper.pad_buckets_for_high_nccl_busbw) == (1234, True)
    assert (optimizer.adam_beta1, model.layernorm_epsilon) == (0.5, 0.25)
    assert model.autocast_dtype is torch.float16
    assert (model.overlap_p2p_comm, model.batch_p2p_comm, model.no_rope_freq) == (True, False, [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({"nccl_up": True}, r"megatron\.nccl_up: no setting of TransformerConfig, .*; nearest: nccl_ub.* \(megatron-c"),
        ({"xyzzy": 1}, r"megatron\.xyzzy: no setting of .* or OptimizerConfig \(megatron-core [0-9.]+\)$"),
        ({"cache_mla_latents": True}, r"megatron\.cache_mla_latents: needs a model with multi-latent attention"),
        ({"init_method": "normal"}, r"megatron\.init_method: takes an object of Python, which a recipe cannot hold"),
        ({"autocast_dtype": "fp8"}, r"megatron\.autocast_dtype: 'fp8' is not one of bf16, fp16, fp32, torch\.bfloat16"),
        ({"autocast_dtype": ["bf16"]}, r"megatron\.autocast_dtype: \['bf16'\] is not one of bf16"),
        ({"bucket_size": "big"}, r"megatron\.bucket_size: 'big' is not a whole number"),
        ({"bucket_size": True}, r"megatron\.bucket_size: True is not a whole number"),
        ({"layernorm_epsilon": "a"}, r"megatron\.layernorm_epsilon: 'a' is not a number"),
        ({"nccl_ub": 1}, r"megatron\.nccl_ub: 1 is not true or false"),
    ],
)
def test_what_is_no_setting_of_the_installed_megatron_is_refused(added: dict[str, object], message: str) -> None:
    from pytest_mbmem.errors import UserError
    from pytest_mbmem.megatron import configs

    with pytest.raises(UserError, match=message):
        configs.transformer_config(RECIPE.but(megatron=added))


def test_an_mla_setting_is_taken_with_mla() -> None:
    from pytest_mbmem.megatron import configs

    recipe = RECIPE.but(num_query_groups=None, mla=Mla(), megatron={"mscale": 2})
    assert configs.transformer_config(recipe).mscale == 2


def test_what_cannot_be_measured_is_a_setting_of_megatron_s() -> None:
    from pytest_mbmem.megatron.configs import known_settings
    from pytest_mbmem.unmeasured import _NOT_MEASURED

    newer = {"optimizer_cuda_graph", "use_transformer_engine_op_fuser", "fp4_param_gather", "gtp_weight_remat_size"}
    newer |= {"overlap_dispatch_backward_with_experts_wgrad", "expert_gtp_weight_remat_size"}
    names = {name for names in _NOT_MEASURED.values() for name in names}
    assert names - newer <= known_settings(RECIPE).keys()
