from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.models import PRESETS, preset
from pytest_mbmem.recipe import Mla, Model, Recipe

names = pytest.mark.parametrize("name", PRESETS)


# The total of all tensors in the published checkpoints
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-8b", 8_190_735_360),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_a_preset_has_exactly_the_published_parameters(name: str, count: int) -> None:
    assert PRESETS[name].num_parameters == count


# As rounded in the publications: the tables of DeepSeek-V3 (main model), GPT-OSS and GPT-3, the name of Moonlight
@pytest.mark.parametrize(
    ("name", "billions", "digits"),
    [
        ("deepseek-v3", 671, 0),
        ("moonlight-16b", 16, 0),
        ("gpt-oss-120b", 116.83, 2),
        ("gpt3-125m", 0.125, 3),
        ("gpt3-760m", 0.760, 3),
        ("gpt3-1.3b", 1.3, 1),
        ("gpt3-2.7b", 2.7, 1),
        ("gpt3-6.7b", 6.7, 1),
        ("gpt3-13b", 13, 0),
        ("gpt3-175b", 175, 0),
    ],
)
def test_a_preset_has_about_the_published_parameters(name: str, billions: float, digits: int) -> None:
    assert round(PRESETS[name].num_parameters / 1e9, digits) == billions


def test_gpt3_medium_has_355_million_parameters_where_its_name_says_350() -> None:
    assert PRESETS["gpt3-350m"].num_parameters == 355_871_744


def test_the_shapes_of_large_models_are_the_published_ones() -> None:
    llama, deepseek = PRESETS["llama3-70b"], PRESETS["deepseek-v3"]
    assert (llama.num_layers, llama.hidden_size, llama.num_attention_heads, llama.query_groups) == (80, 8192, 64, 8)
    assert (llama.ffn_size, llama.vocab_size, llama.head_dim, llama.rotary_base) == (28672, 128256, 128, 500000)
    assert deepseek.moe is not None
    assert deepseek.moe.layer_pattern(61) == (0, 0, 0) + (1,) * 58
    assert deepseek.mla == Mla(q_lora_rank=1536)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("gpt3")])
def test_gpt3_is_made_as_published(name: str) -> None:
    model = PRESETS[name]
    assert (model.position_embedding_type, model.max_position_embeddings) == ("learned_absolute", 2048)
    assert (model.normalization, model.activation, model.add_bias_linear) == ("LayerNorm", "gelu", True)
    assert (model.vocab_size, model.share_embeddings_and_output_weights) == (50257, True)
    assert (model.attention_dropout, model.hidden_dropout, model.ffn_size) == (0.1, 0.1, 4 * model.hidden_size)


@names
def test_a_preset_makes_a_recipe_that_can_be_read_back(name: str) -> None:
    recipe = Recipe.from_dict({"model": name, "training": {"seq_length": 2048}})
    assert recipe.model == preset(name) == PRESETS[name]
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_a_sequence_longer_than_gpt3_s_positions_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"training\.seq_length: 4096 is more than model\.max_position_embeddings \(2048\)"
    ):
        Recipe(model=PRESETS["gpt3-125m"])


@pytest.mark.parametrize("name", ["llama-8b", "", "LLAMA3-8B", None, 8, ["llama3-8b"]])
def test_an_unknown_preset_is_refused_with_the_names(name: object) -> None:
    with pytest.raises(UserError) as error:
        preset(name)
    assert str(error.value).startswith(f"{name!r} is not a preset; ")
    assert all(known in str(error.value) for known in PRESETS)


def test_the_nearest_preset_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'llama3-70b'"):
        preset("llama-3-70b")


# shrunk()

SHORT = {"training": {"seq_length": 1024}}


def head_size(model: Model) -> int:
    return model.mla.v_head_dim if model.mla else model.head_dim


@names
@given(data=st.data())
def test_a_preset_shrinks_to_any_number_of_layers_and_heads(name: str, data: st.DataObject) -> None:
    model = PRESETS[name]
    layers = data.draw(st.integers(1, model.num_layers))
    hidden = head_size(model) * data.draw(st.integers(1, model.hidden_size // head_size(model)))
    small = model.shrunk(layers=layers, hidden=hidden)
    recipe = Recipe.from_dict({"model": {"preset": name, "shrunk": {"layers": layers, "hidden": hidden}}} | SHORT)
    assert recipe.model == small
    assert (small.num_layers, small.hidden_size, small.vocab_size) == (layers, hidden, model.vocab_size)
    assert head_size(small) == head_size(model)
    if model.ffn_hidden_size:
        assert abs(small.ffn_size - model.ffn_size * hidden / model.hidden_size) <= 63
        assert hidden == model.hidden_size or small.ffn_size % 64 == 0
    if small.moe and model.moe:
        assert small.moe.num_moe_experts == model.moe.num_moe_experts
        assert small.moe.moe_router_topk == model.moe.moe_router_topk


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "groups", "ffn"),
    [
        ("llama3-8b", 512, 4, 1, 1792),
        ("llama3-8b", 1024, 8, 2, 3584),
        ("llama3-8b", 1152, 9, 1, 4032),  # 2 groups would not divide 9 heads
        ("llama3-70b", 2048, 16, 2, 7168),
        ("qwen3-30b-a3b", 512, 8, 1, 1536),
        ("gpt3-175b", 768, 6, 6, 3072),
        ("deepseek-v3", 896, 16, 16, 2304),
        ("deepseek-v3", 512, 8, 8, 1344),  # 9.1 heads would be in proportion
    ],
)
def test_heads_groups_and_mlp_keep_their_ratio(name: str, hidden: int, heads: int, groups: int, ffn: int) -> None:
    model = PRESETS[name].shrunk(hidden=hidden)
    assert (model.num_attention_heads, model.query_groups, model.ffn_size) == (heads, groups, ffn)


def test_experts_and_ranks_keep_their_ratio() -> None:
    deepseek, moonlight = PRESETS["deepseek-v3"].shrunk(hidden=1792), PRESETS["moonlight-16b"].shrunk(hidden=512)
    assert deepseek.moe is not None
    assert (deepseek.moe.moe_ffn_hidden_size, deepseek.moe.moe_shared_expert_intermediate_size) == (512, 512)
    assert deepseek.mla == Mla(q_lora_rank=384, kv_lora_rank=128)
    assert moonlight.moe is not None
    assert (moonlight.moe.moe_ffn_hidden_size, moonlight.moe.moe_shared_expert_intermediate_size) == (384, 768)
    assert moonlight.mla == Mla(q_lora_rank=None, kv_lora_rank=128)


def test_a_pattern_of_layers_is_thinned_out_evenly() -> None:
    moe = PRESETS["deepseek-v3"].shrunk(layers=4).moe
    assert moe is not None
    assert moe.moe_layer_freq == (0, 1, 1, 1)


@pytest.mark.parametrize("hidden", [500, 64, 129])
def test_a_hidden_size_that_is_no_multiple_of_the_head_size_is_refused(hidden: int) -> None:
    message = rf"^model\.shrunk\.hidden: {hidden} is not a multiple of the head size \(128\)"
    with pytest.raises(UserError, match=message):
        PRESETS["llama3-8b"].shrunk(hidden=hidden)


@pytest.mark.parametrize("layers", [0, -1, 33, 2.0, "4", True])
def test_a_number_of_layers_that_is_not_within_the_model_is_refused(layers: object) -> None:
    with pytest.raises(UserError) as error:
        PRESETS["llama3-8b"].shrunk(layers=layers)  # type: ignore[arg-type]
    assert str(error.value) == f"model.shrunk.layers: {layers!r} is not a whole number from 1 to 32, the size now"
