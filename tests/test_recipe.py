from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.models import PRESETS
from pytest_mbmem.recipe import Lora, Memory, Mla, Model, Moe, Optimizer, Parallelism, Recipe, Training
from pytest_mbmem.validation import Part
from pytest_mbmem.virtual_gpu.build import LIBRARY_FOLDERS

SMALL = Model(num_layers=4, hidden_size=512, num_attention_heads=8)
EXPERTS = dataclasses.replace(SMALL, moe=Moe(num_moe_experts=4))
RECIPE = Recipe(model=SMALL)
PARTS: dict[str, Part] = {
    "model.": SMALL,
    "model.moe.": Moe(num_moe_experts=4),
    "model.mla.": Mla(),
    "parallelism.": Parallelism(),
    "training.": Training(),
    "optimizer.": Optimizer(),
    "memory.": Memory(),
    "lora.": Lora(),
    "": RECIPE,
}
FIELDS = [(prefix, f.name, f.type) for prefix, part in PARTS.items() for f in dataclasses.fields(part)]


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message_of(*args: Any, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        RECIPE.but(*args, **changes)
    return str(error.value)


# Valid recipes of every kind, small and large


@st.composite
def models(draw: st.DrawFn, tp: int = 1, layers: int | None = None, experts: bool = False) -> Model:
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * tp * draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([16, 24, 32])) * tp  # at most 256 when doubled: flash attention's limit
    num_layers = layers or draw(st.integers(1, 12))
    mla, moe = None, None
    if draw(st.booleans()):
        mla = Mla(q_lora_rank=draw(st.sampled_from([None, 64])), kv_lora_rank=draw(st.integers(1, 99)))
    if experts or draw(st.booleans()):
        moe = Moe(
            num_moe_experts=8,
            moe_router_topk=draw(st.integers(1, 8)),
            moe_ffn_hidden_size=draw(st.sampled_from([None, 96 * tp])),
            moe_shared_expert_intermediate_size=draw(st.sampled_from([None, 192 * tp])),
            moe_layer_freq=draw(st.integers(1, 3) | st.tuples(*[st.sampled_from([0, 1])] * num_layers)),
        )
    return Model(
        num_layers=num_layers,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        num_query_groups=None if mla else draw(st.sampled_from([None, groups if groups % tp == 0 else heads])),
        kv_channels=None if mla else draw(st.sampled_from([None, head_dim, 2 * head_dim])),
        ffn_hidden_size=draw(st.sampled_from([None, 64 * tp, 10**15 * tp])),
        vocab_size=draw(st.integers(1, 2**40)),
        position_embedding_type="rope" if mla else draw(st.sampled_from(["rope", "learned_absolute", "none"])),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        activation=draw(st.sampled_from(["gelu", "swiglu"])),
        add_bias_linear=not moe and draw(st.booleans()),
        hidden_dropout=draw(st.floats(0, 1, exclude_max=True)),
        moe=moe,
        mla=mla,
    )


MEMORIES = [
    Memory(),
    Memory(alloc_conf="expandable_segments:True"),
    Memory(alloc_conf="a:1, b:[256:1,>:4]"),
    Memory(recompute_granularity="selective"),
    Memory(recompute_granularity="selective", recompute_modules=()),
    Memory(recompute_granularity="selective", recompute_modules=("core_attn", "layernorm")),
    Memory(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    Memory(offload_modules=("core_attn",), min_offloaded_tensor_size=1),
    Memory(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    tp, cp, ep, dp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    pp = draw(st.sampled_from([1, 2, 3]))
    vpp = draw(st.sampled_from([None, 2])) if pp > 1 else None
    layers = pp * (vpp or 1) * draw(st.integers(1, 3))
    ep = math.gcd(ep, cp * dp)
    model = draw(models(tp, layers, experts=ep > 1))
    micro = draw(st.integers(1, 4))
    precision: Any = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    distributed = draw(st.booleans())
    return Recipe(
        model=model,
        parallelism=Parallelism(
            tp=tp,
            sequence_parallel=tp > 1 and (model.moe is not None or draw(st.booleans())),
            pp=pp,
            vpp=vpp,
            cp=cp,
            ep=ep,
            dp=dp,
            distributed_optimizer=distributed,
            overlap_grad_reduce=True,
            overlap_param_gather=distributed and draw(st.booleans()),
        ),
        training=Training(
            micro_batch_size=micro,
            global_batch_size=micro * dp * pp * draw(st.integers(1, 3)),
            seq_length=2 * tp * cp * draw(st.integers(1, 100)),
            precision=precision,
            attention_backend="unfused" if precision == "fp32" else draw(st.sampled_from(["unfused", "flash"])),
        ),
        optimizer=Optimizer(lr=draw(st.floats(0, 1)), clip_grad=draw(st.integers(0, 9))),
        memory=draw(st.sampled_from(MEMORIES)),
        lora=draw(st.sampled_from([None, Lora(), Lora(rank=8, targets=("linear_fc1",))])),
        environment=draw(st.dictionaries(st.from_regex("[A-Z]{1,5}_X[0-9]?", fullmatch=True), TEXT, max_size=3)),
        name=draw(TEXT),
    )


TEXT = st.text().filter(str.isprintable)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.none(), inner),
    max_leaves=8,
)


# What comes out


def test_sizes_that_were_left_out_are_resolved() -> None:
    recipe = Recipe(model=SMALL, parallelism=Parallelism(tp=2, pp=2, dp=3))
    assert (SMALL.query_groups, SMALL.head_dim, SMALL.ffn_size, SMALL.expert_ffn_size) == (8, 64, 2048, 2048)
    assert recipe.parallelism.expert_tp == 2
    assert recipe.world_size == 12
    assert recipe.global_batch_size == 3
    assert recipe.num_microbatches == 1
    assert recipe.max_position_embeddings == 4096


def test_sizes_that_were_given_are_used() -> None:
    model = dataclasses.replace(EXPERTS, num_query_groups=2, kv_channels=32, ffn_hidden_size=100)
    assert (model.query_groups, model.head_dim, model.ffn_size, model.expert_ffn_size) == (2, 32, 100, 100)
    recipe = RECIPE.but(micro_batch_size=2, global_batch_size=24, dp=3, max_position_embeddings=9)
    assert (recipe.num_microbatches, recipe.max_position_embeddings) == (4, 9)


@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_the_vocabulary_is_padded_to_a_multiple_of_128_per_rank(tp: int, padded: int) -> None:
    assert SMALL.padded_vocab_size(tp) == padded


def test_a_vocabulary_that_is_a_multiple_stays() -> None:
    model = dataclasses.replace(SMALL, vocab_size=1000, make_vocab_size_divisible_by=500)
    assert (model.padded_vocab_size(1), model.padded_vocab_size(2), model.padded_vocab_size(3)) == (1000, 1000, 1500)


# Counted by building the models with megatron-core 0.16.1 (GPTModel with its local layer spec)
COUNTED = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=256, max_position_embeddings=32)
MLA = Mla(q_lora_rank=16, kv_lora_rank=24, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 131_712),
        ({"num_query_groups": 2, "kv_channels": 32, "qk_layernorm": True}, 148_352),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "qk_layernorm": True, "add_qkv_bias": True}
            | {"ffn_hidden_size": 192},
            140_032,
        ),
        (
            {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
            | {"add_bias_linear": True},
            118_528,
        ),
        ({"add_bias_linear": True, "activation": "swiglu", "num_query_groups": 1}, 153_664),
        ({"moe": Moe(num_moe_experts=4, moe_ffn_hidden_size=96), "activation": "swiglu"}, 214_144),
        (
            {"moe": Moe(num_moe_experts=4, moe_ffn_hidden_size=96, moe_layer_freq=(0, 1)), "add_bias_linear": True},
            149_828,
        ),
        ({"moe": Moe(num_moe_experts=4, moe_layer_freq=2, moe_shared_expert_intermediate_size=48)}, 236_416),
        ({"mla": MLA, "qk_layernorm": True, "add_bias_linear": True}, 117_024),
        ({"mla": dataclasses.replace(MLA, q_lora_rank=None)}, 118_656),
        (
            {"mla": dataclasses.replace(MLA, q_lora_rank=None), "qk_layernorm": True, "normalization": "RMSNorm"},
            118_384,
        ),
    ],
)
def test_parameters_are_counted_as_megatron_makes_them(changes: dict[str, Any], count: int) -> None:
    assert dataclasses.replace(COUNTED, **changes).num_parameters == count


def test_learned_positions_of_unknown_number_cannot_be_counted() -> None:
    model = dataclasses.replace(SMALL, position_embedding_type="learned_absolute")
    with pytest.raises(UserError, match=r"model\.max_position_embeddings"):
        _ = model.num_parameters


def test_dense_recipes_experts_and_mla_can_be_measured() -> None:
    assert RECIPE.not_yet() == []
    assert RECIPE.but(model=PRESETS["deepseek-v3"]).not_yet() == []


def test_context_parallelism_needs_flash_attention() -> None:
    assert "parallelism.cp" in RECIPE.but(cp=2).not_yet()[0]
    assert RECIPE.but(cp=2, attention_backend="flash").not_yet() == []


def test_reading_recipes_costs_neither_torch_nor_yaml() -> None:
    code = "import sys, pytest_mbmem.models; print([m for m in ('torch', 'yaml', 'pytest') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Digest


def full_recipe() -> Recipe:
    return Recipe(
        model=dataclasses.replace(SMALL, num_query_groups=2, rotary_percent=0.5, moe=Moe(num_moe_experts=4)),
        parallelism=Parallelism(tp=2, sequence_parallel=True, dp=2),
        optimizer=Optimizer(lr=3e-5),
        memory=Memory(alloc_conf="expandable_segments:True"),
        environment={"NCCL_DEBUG": "INFO", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        name="a name",
    )


def test_the_digest_of_a_recipe_never_changes() -> None:
    assert RECIPE.digest == "beaed91897a9bae5"
    assert full_recipe().digest == "dc7f58e964a490bf"


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_the_digest_is_the_same_in_another_process(seed: str) -> None:
    code = f"from pytest_mbmem.recipe import Recipe; print(Recipe.from_dict({full_recipe().to_dict()!r}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert process.stdout.strip() == full_recipe().digest


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"clip_grad": 1},
        {"num_query_groups": 8},
        {"kv_channels": 64},
        {"ffn_hidden_size": 2048},
        {"global_batch_size": 1},
        {"etp": 1},
        {"max_position_embeddings": 4096},
        {"hidden_dropout": -0.0},
        {"optimizer_offload_fraction": 1},
        {"cpu_offloading_num_layers": 0},
    ],
)
def test_what_means_the_same_has_the_same_digest(changes: dict[str, Any]) -> None:
    assert RECIPE.but(**changes).digest == RECIPE.digest
    assert RECIPE.differences(RECIPE.but(**changes)) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_layers": 8},
        {"num_query_groups": 4},
        {"vocab_size": 50258},
        {"dp": 2},
        {"seq_length": 2048},
        {"precision": "fp16"},
        {"masked_softmax_fusion": False},
        {"lr": 2e-4},
        {"alloc_conf": "expandable_segments:True"},
        {"environment": {"A": "1"}},
        {"environment": {"A": "2"}},
        {"moe": Moe(num_moe_experts=2)},
        {"moe": Moe(num_moe_experts=2, moe_layer_freq=(0, 1, 1, 1))},
        {"mla": Mla()},
    ],
)
def test_what_changes_the_job_changes_the_digest(changes: dict[str, Any]) -> None:
    recipe = RECIPE.but(**changes)
    assert recipe.digest != RECIPE.digest
    assert set(changes) <= {part for key in recipe.differences(RECIPE) for part in key.split(".")}


def test_the_order_of_the_environment_does_not_matter() -> None:
    one, two = ({"A": "1", "B": "2"}, {"B": "2", "A": "1"})
    assert RECIPE.but(environment=one).digest == RECIPE.but(environment=two).digest


@given(recipe=recipes(), other=recipes())
def test_differences_are_none_exactly_when_digests_are_equal(recipe: Recipe, other: Recipe) -> None:
    differences = recipe.differences(other)
    assert (differences == {}) == (recipe.digest == other.digest)
    assert differences == {key: (mine, theirs) for key, (theirs, mine) in other.differences(recipe).items()}
    assert all(mine != theirs for mine, theirs in differences.values())


def test_differences_name_keys_and_both_values() -> None:
    other = RECIPE.but(
        hidden_size=1024, tp=2, environment={"A": "1"}, moe=Moe(num_moe_experts=4), sequence_parallel=True
    )
    assert RECIPE.differences(other) == {
        "environment.A": (None, "1"),
        "model.hidden_size": (512, 1024),
        "model.moe": (None, True),
        "model.moe.num_moe_experts": (None, 4),
        "parallelism.sequence_parallel": (False, True),
        "parallelism.tp": (1, 2),
    }


def test_differences_show_what_a_left_out_value_comes_to() -> None:
    assert RECIPE.differences(RECIPE.but(ffn_hidden_size=1024)) == {"model.ffn_hidden_size": (2048, 1024)}


# There and back


@given(recipe=recipes())
def test_a_recipe_survives_yaml_json_pickle_and_copy(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.getbasetemp(), recipe.to_yaml())
    for again in (
        Recipe.from_yaml(path),
        Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))),
        pickle.loads(pickle.dumps(recipe)),
        copy.deepcopy(recipe),
        recipe.but(),
    ):
        assert again == recipe
        assert again.digest == recipe.digest
        assert hash(again) == hash(recipe)


def test_yaml_shows_what_was_chosen() -> None:
    recipe = RECIPE.but(
        tp=2, name="small", lr=1e-5, moe_router_topk=1, moe=Moe(num_moe_experts=4), sequence_parallel=True
    )
    assert recipe.to_yaml() == (
        "model:\n  num_layers: 4\n  hidden_size: 512\n  num_attention_heads: 8\n"
        "  moe:\n    num_moe_experts: 4\n    moe_router_topk: 1\n"
        "parallelism:\n  tp: 2\n  sequence_parallel: true\noptimizer:\n  lr: 1.0e-05\nname: small\n"
    )


def test_a_name_that_looks_like_a_number_stays_a_text(tmp_path: Path) -> None:
    recipe = RECIPE.but(name="0E0")
    assert Recipe.from_yaml(write(tmp_path, recipe.to_yaml())) == recipe


def test_an_mla_of_defaults_is_kept() -> None:
    recipe = RECIPE.but(mla=Mla())
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_the_environment_is_a_copy() -> None:
    environment = {"A": "1"}
    recipe = RECIPE.but(environment=environment)
    environment["A"] = "2"
    assert recipe.environment == {"A": "1"}


# YAML


def test_a_preset_can_be_shrunk_and_overridden(tmp_path: Path) -> None:
    text = "model: {preset: llama3-8b, shrunk: {layers: 4, hidden: 512}, vocab_size: 1000, rotary_base: 10000}"
    model = Recipe.from_yaml(write(tmp_path, text)).model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.query_groups) == (4, 512, 4, 1)
    assert (model.vocab_size, model.rotary_base, model.activation) == (1000, 10000, "swiglu")


def test_a_preset_can_be_named_alone(tmp_path: Path) -> None:
    assert Recipe.from_yaml(write(tmp_path, "model: qwen3-8b\n")) == Recipe(model=PRESETS["qwen3-8b"])


def test_single_fields_of_a_preset_s_experts_can_be_overridden() -> None:
    recipe = Recipe.from_dict({"model": {"preset": "mixtral-8x7b", "moe": {"moe_router_topk": 1}}})
    assert recipe.model.moe == Moe(num_moe_experts=8, moe_router_topk=1)


def test_a_preset_s_experts_can_be_taken_away() -> None:
    assert Recipe.from_dict({"model": {"preset": "mixtral-8x7b", "moe": None}}).model.moe is None


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    text = "model: llama3-8b\noptimizer: {lr: 3e-5, weight_decay: 1, clip_grad: 1.5E+0}"
    assert Recipe.from_yaml(write(tmp_path, text)).optimizer == Optimizer(lr=3e-5, weight_decay=1.0, clip_grad=1.5)


def test_quoted_numbers_stay_text(tmp_path: Path) -> None:
    text = "model: llama3-8b\nenvironment:\n  A: '1e-5'\n  B: \"7\"\n  CUBLAS_WORKSPACE_CONFIG: :4096:8\n"
    environment = {"A": "1e-5", "B": "7", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert Recipe.from_yaml(write(tmp_path, text)).environment == environment


def test_anchors_and_merges_can_be_used(tmp_path: Path) -> None:
    text = "model: llama3-8b\nparallelism: &p {tp: 1}\ntraining: {<<: {steps: 1}, seq_length: 128}\n"
    assert Recipe.from_yaml(write(tmp_path, text)).training == Training(steps=1, seq_length=128)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ": the file is empty"),
        ("# nothing\n", ": the file is empty"),
        ("- 1\n", ": the whole: [1] is not a mapping"),
        ("just text", ": the whole: 'just text' is not a mapping"),
        ("{}", ": model: is missing"),
        ("model: llama3-8b\nparallelism:\n  tp: 2\n  tp: 4\n", ":4: parallelism.tp: given twice (first on line 3)"),
        ("{model: llama3-8b, model: llama3-8b}", ":1: model: given twice (first on line 1)"),
        ("model: llama3-8b\nmodel: qwen3-8b\n", ":2: model: given twice (first on line 1)"),
        (
            "model: llama3-8b\nparalellism: {tp: 2}\n",
            ":2: paralellism: unknown key; did you mean 'parallelism'? allowed:",
        ),
        ("model: llama3-8b\n7: 1\n", ":2: 7: unknown key; allowed: model"),
        (
            "model: llama3-8b\ntraining:\n  steps: 3\n  seqlength: 5\n",
            ":4: training.seqlength: unknown key; did you mean",
        ),
        ("model: llama3-8b\ntraining:\n", ":2: training: None is not a mapping of keys"),
        ("model: llama3-8b\ntraining: 5\n", ":2: training: 5 is not a mapping of keys"),
        ("model: llama3-8b\nparallelism: {tp: '2'}\n", ":2: parallelism.tp: '2' is not a whole number from 1"),
        (
            "model: llama3-8b\nparallelism: {cp: 4}\ntraining:\n  seq_length: 100\n",
            ":4: training.seq_length: 100 is not a multiple of parallelism.cp (4)",
        ),
        (
            "model: llama-8b\n",
            ":1: model.preset: 'llama-8b' is not a preset; did you mean 'llama3-8b'? presets: llama3-8b",
        ),
        ("model:\n  preset: [1]\n", ":2: model.preset: [1] is not a preset; presets: llama3-8b"),
        ("model:\n  shrunk: {layers: 1}\n", ":2: model.shrunk: needs model.preset"),
        ("model:\n  preset: llama3-8b\n  shrunk: 4\n", ":3: model.shrunk: 4 is not a mapping of layers and hidden"),
        (
            "model:\n  preset: llama3-8b\n  shrunk: {layer: 4}\n",
            ":3: model.shrunk.layer: unknown key; did you mean 'layers'?",
        ),
        (
            "model:\n  preset: llama3-8b\n  shrunk:\n    hidden: 500\n",
            ":4: model.shrunk.hidden: 500 is not a multiple of",
        ),
        (
            "model:\n  preset: llama3-8b\n  shrunk:\n    layers: 99\n",
            ":4: model.shrunk.layers: 99 is not a whole number from 1",
        ),
        ("model:\n  hidden_size: 4\n  num_layers: 1\n", ":1: model.num_attention_heads: is missing"),
        ("model:\n  layers: 4\n", ":2: model.layers: unknown key; did you mean 'num_layers'?"),
        ("model: llama3-8b\nenvironment: {A: 1}\n", ":2: environment: {'A': 1} is not a mapping of names to text"),
        ("model: llama3-8b\noptimizer: {lr: .nan}\n", ":2: optimizer.lr: nan is not a number 0 or more"),
        ("model: llama3-8b\noptimizer: {lr: .inf}\n", ":2: optimizer.lr: inf is not a number 0 or more"),
        ("model: llama3-8b\ntraining: {deterministic: 1}\n", ":2: training.deterministic: 1 is not true or false"),
        ("a: [1\nb: 2", ":2: not valid YAML: "),
        ("a: b: c", ":1: not valid YAML: mapping values are not allowed "),
        ("<<<<<<< ours\nmodel: llama3-8b\n=======\n>>>>>>> theirs\n", ":2: not valid YAML"),
        ("a: \x00", ": not valid YAML: "),
        ("a: *x", ":1: not valid YAML: found undefined alias"),
        ("a: !!python/object:os.system {}", ":1: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\na: 2", ":2: not valid YAML: but found another document"),
        ("name: 2024-99-99", ": not valid YAML: month must be in 1..12"),
        ("name: !!int ''", ": not valid YAML: "),
        ("name: !!timestamp x", ": not valid YAML: "),
        ("name: !!bool x", ": not valid YAML: "),
        ("[" * 5000, ":1: not valid YAML: "),
        ("&a [*a]", ": the whole: "),
        (f"name: {'9' * 5000}", ": not valid YAML: Exceeds the limit"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_line_and_key(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        Recipe.from_yaml(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_an_absent_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.yaml: cannot be read \(No such file or directory\)"):
        Recipe.from_yaml(tmp_path / "absent.yaml")


def test_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Recipe.from_yaml(tmp_path)


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError, match=r"recipe\.yaml: not valid YAML: 'utf-8' codec"):
        Recipe.from_yaml(path)


def test_exponential_aliases_make_a_short_message(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(UserError) as error:
        Recipe.from_yaml(write(tmp_path, "\n".join([*lines, "model: *a29"])))
    assert len(str(error.value)) < 1000


def test_data_is_refused_with_its_source() -> None:
    with pytest.raises(UserError, match=r"^my test: parallelism\.tp: 0 is not a whole number"):
        Recipe.from_dict({"model": "llama3-8b", "parallelism": {"tp": 0}}, "my test")


@given(data=JUNK)
def test_junk_is_refused_with_a_user_error(data: object) -> None:
    with pytest.raises(UserError):
        Recipe.from_dict(data)


@given(data=st.data())
def test_junk_in_any_field_is_accepted_or_refused_with_a_user_error(data: st.DataObject) -> None:
    prefix, name, _ = data.draw(st.sampled_from(FIELDS))
    recipe: dict[str, Any] = {"model": "mixtral-8x7b" if "moe" in prefix else "llama3-8b"}
    recipe["model"] = {"preset": recipe["model"]} | ({"mla": {}, "num_query_groups": None} if "mla" in prefix else {})
    node = recipe
    for part in prefix.split(".")[:-1]:
        node = node.setdefault(part, {})
    node[name] = data.draw(JUNK)
    with contextlib.suppress(UserError):
        assert Recipe.from_dict(recipe).digest


@given(text=st.text() | st.text("model: {}[]&*!|>'\"%@`#,-?\n\t0123456789eE.~<=a"))
def test_any_text_is_read_or_refused_with_a_user_error(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"junk\.yaml"):
        Recipe.from_yaml(path)


# Wrong values in Python

WRONG: dict[str, list[object]] = {
    "int": [0, -1, 1.0, True, "4", 2**63, 10**5000, math.nan, [], {}, b"4", object()],
    "int | None": [0, -1, 1.0, True, "4", 2**63, [], object()],
    "bool": [0, 1, "true", None, [], 1.0],
    "str": [None, 1, True, "two\nlines", "\x00", "\ud800", [], b"x"],
    "_Dropout": [1, 1.0, -0.1, math.nan, math.inf, -math.inf, "0.1", True, None, 10**400, []],
    "_Share": [0, 0.0, 1.1, -1, math.nan, "1", True, None],
    "_Amount": [-1e-9, -1, math.nan, math.inf, "1e-4", True, None, 10**400],
    "Mapping[str, str]": [None, [], "A=1", {"A": 1}, {"A": None}, {1: "A"}, {"A": "two\nlines"}, [("A", "1")]],
    "_Positive | None": [0, 0.0, -1, math.nan, math.inf, "1", True, 10**400, []],
    "_Overload": [0, 0.99, -1, math.nan, math.inf, "1.5", True, None],
    "_Share | None": [0, 0.0, 1.1, -1, math.nan, "1", True],
    "_AnyInt": [1.0, True, "4", None, 2**63, -(2**63), 10**5000, math.nan, [], {}],
    "_AnyInt | None": [1.0, True, "4", 2**63, -(2**63), math.nan, []],
    "str | None": [1, True, "two\nlines", [], b"x"],
    "Mapping[str, Any]": [None, [], "fp8", {1: 2}, {"a b": 1}, {"": 1}, {None: 1}],
    "_Positive": [0, 0.0, -1, math.nan, math.inf, "1", True, None],
    "int | tuple[Literal[0, 1], ...]": [0, -1, True, "1", None, [2], [True, False], [0.0], {}, {0: 1}],
    "tuple[str, ...]": [None, 1, "core_attn", [1], ["two\nlines"], {}, {"core_attn": 1}],
    "tuple[str, ...] | None": [1, "core_attn", [1], ["two\nlines"], {}, {"core_attn": 1}],
    "tuple[LoraTarget, ...]": [None, 1, "linear_qkv", ["linear"], [1], {}],
}


def wrong_values(kind: str) -> list[object]:
    if kind in WRONG:
        return WRONG[kind]
    # Literals, and parts that may be absent or not
    return [1, True, [], "BF16", {}, math.nan, object()] + ([] if "None" in kind else [None])


@pytest.mark.parametrize(("prefix", "name", "kind"), FIELDS, ids=[prefix + name for prefix, name, _ in FIELDS])
def test_a_wrong_type_or_range_is_named_with_its_key(prefix: str, name: str, kind: str) -> None:
    for value in wrong_values(kind):
        with pytest.raises(UserError) as error:
            dataclasses.replace(PARTS[prefix], **{name: value})
        message = str(error.value)
        assert message.startswith(f"{prefix}{name}: ")
        assert " is not " in message
        assert len(message) < 300


def test_very_large_sizes_are_fine() -> None:
    recipe = RECIPE.but(vocab_size=2**62, ffn_hidden_size=2**62)
    assert recipe.model.padded_vocab_size(1) == 2**62
    assert recipe.model.num_parameters > 2**73
    assert len(recipe.digest) == 16


def test_a_whole_number_is_a_float_where_one_is_asked_for() -> None:
    assert Optimizer(lr=1) == Optimizer(lr=1.0)
    assert type(Optimizer(lr=1).lr) is float


def test_a_message_shows_a_short_form_of_a_long_value() -> None:
    with pytest.raises(UserError) as error:
        Memory(alloc_conf=["x" * 10**6] * 10**4)  # type: ignore[arg-type]
    assert len(str(error.value)) < 1000


# Impossible sizes

MOE: dict[str, Any] = {"moe": Moe(num_moe_experts=4)}
LEARNED: dict[str, Any] = {"position_embedding_type": "learned_absolute", "max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp": 2, "vpp": 1}, "parallelism.vpp: 1 is not interleaved; write 2 or more, or leave it out"),
        ({"num_query_groups": 3}, "model.num_attention_heads: 8 is not a multiple of model.num_query_groups (3)"),
        ({"num_query_groups": 16}, "model.num_attention_heads: 8 is not a multiple of model.num_query_groups (16)"),
        (
            {"num_attention_heads": 7},
            "model.hidden_size: 512 (kv_channels unset) is not a multiple of model.num_attention_heads (7)",
        ),
        (
            {"alloc_conf": "backend:cudaMallocAsync"},
            "memory.alloc_conf: 'backend:cudaMallocAsync': only the backend 'native' can be measured; "
            "PyTorch fixes it when it is loaded",
        ),
        (
            {"kv_channels": 36, "attention_backend": "flash"},
            "model.kv_channels: 36 channels a head; flash attention takes multiples of 8 up to 256",
        ),
        ({"kv_channels": 63}, "model.kv_channels: RoPE needs an even number of rotated channels, not 63"),
        ({"rotary_percent": 0.001}, "model.kv_channels: RoPE needs an even number of rotated channels, not 0"),
        (
            {"cp": 4, "seq_length": 100},
            "training.seq_length: 100 is not a multiple of parallelism.cp (4) * two parts a rank (2)",
        ),
        (
            {"global_batch_size": 9, "micro_batch_size": 2, "dp": 2},
            "training.global_batch_size: 9 is not a multiple of training.micro_batch_size (2) * parallelism.dp (2)",
        ),
        (LEARNED, "training.seq_length: 4096 is more than model.max_position_embeddings (1024)"),
        ({"main_grads": "bf16", "precision": "fp16"}, "training.main_grads: 'bf16' needs training.precision 'bf16'"),
        ({"attention_backend": "flash", "precision": "fp32"}, "training.attention_backend: 'flash' needs"),
        (
            {"attention_backend": "fused"},
            "training.attention_backend: 'fused' needs training.transformer_impl 'transformer_engine', not 'local'",
        ),
        (
            {"attention_backend": "auto"},
            "training.attention_backend: 'auto' needs training.transformer_impl 'transformer_engine', not 'local'",
        ),
        (
            {**MOE, "ep": 4, "dp": 2},
            "parallelism.ep: 4 with parallelism.etp 1 makes groups of 4 ranks; tp * cp * dp (2) is not a multiple",
        ),
        ({**MOE, "moe_layer_freq": [0, 1]}, "model.moe.moe_layer_freq: a pattern of 2 layers for model.num_layers 4"),
        ({"mla": Mla(), "num_query_groups": 8}, "model.num_query_groups: 8 has no meaning with model.mla"),
        ({"mla": Mla(), "kv_channels": 64}, "model.kv_channels: 64 has no meaning with model.mla"),
        (
            {"mla": Mla(), "position_embedding_type": "none"},
            "model.position_embedding_type: 'none' is not possible with",
        ),
        ({"environment": {"lower": "1"}}, "environment: 'lower' is not a name of capital letters"),
        ({"environment": {"1A": "1"}}, "environment: '1A' is not a name of capital letters"),
        (
            {"environment": {"PYTORCH_CUDA_ALLOC_CONF": "a:b"}},
            "environment.PYTORCH_CUDA_ALLOC_CONF: may not be set here: write it as memory.alloc_conf",
        ),
        (
            {"environment": {"PYTORCH_ALLOC_CONF": "a:b"}},
            "environment.PYTORCH_ALLOC_CONF: may not be set here: write it as memory.alloc_conf",
        ),
        *(
            ({"environment": {name: "x"}}, f"environment.{name}: may not be set here: the virtual GPU sets it")
            for name in ("LD_PRELOAD", *LIBRARY_FOLDERS)
        ),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment.CUDA_VISIBLE_DEVICES: may not be set here"),
        ({"environment": {"MBMEM_X": "0"}}, "environment.MBMEM_X: may not be set here: the plugin's own"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    assert message_of(**changes).startswith(message)


def test_rope_of_mla_needs_an_even_size() -> None:
    with pytest.raises(UserError, match=r"^model\.mla\.qk_pos_emb_head_dim: 3 is not a multiple of"):
        Mla(qk_pos_emb_head_dim=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_query_groups": 1, "tp": 8},
        {"num_query_groups": 2, "tp": 4},
        {"num_query_groups": 4, "tp": 2},
        {"kv_channels": 63, "position_embedding_type": "none"},
        {"num_attention_heads": 7, "kv_channels": 64},
        {"rotary_percent": 0.5},
        {"pp": 2, "vpp": 2, "global_batch_size": 4},
        {"pp": 4},
        {"attention_backend": "flash", "attention_dropout": 0.1},
        {"main_grads": "bf16"},
        {**LEARNED, "seq_length": 1024},
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {**MOE, "ep": 2, "etp": 1, "tp": 2, "sequence_parallel": True},
        {**MOE, "ep": 4, "etp": 2, "cp": 2, "dp": 4},
        {**MOE, "moe_layer_freq": [0, 1, 1, 1]},
        {"mla": Mla(q_lora_rank=None), "num_attention_heads": 3},
    ],
)
def test_what_megatron_can_run_is_accepted(changes: dict[str, Any]) -> None:
    assert RECIPE.but(**changes) != RECIPE


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "max_split_size_mb:64, expandable_segments:True",
        "roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.6",
        " backend : native ",
        "expandable_segments:True,",
        " ",
        "",
    ],
)
def test_allocator_settings_are_kept_as_written(text: str) -> None:
    assert Memory(alloc_conf=text).alloc_conf == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments", "'expandable_segments': 'expandable_segments' has no value"),
        ("expandable_segments:true", "expandable_segments:true: not one of True, False"),
        (",", "',': a key is missing before ','"),
        ("a:b c:d", "'a:b c:d': a comma is missing after a:bc"),
        ("a=b", "'a=b': 'a=b' has no value"),
        ("a:[1", "'a:[1': the list of 'a' is not closed"),
    ],
)
def test_allocator_settings_that_are_not_pairs_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match="^" + re.escape(f"memory.alloc_conf: {message}")):
        Memory(alloc_conf=text)
    file = tmp_path / "recipe.yaml"
    file.write_text(f"model: llama3-8b\nmemory:\n  alloc_conf: {text!r}\n")
    with pytest.raises(UserError, match="^" + re.escape(f"{file}:3: memory.alloc_conf: {message}")):
        Recipe.from_yaml(file)


# but()


def test_changes_are_named_without_their_part() -> None:
    recipe = RECIPE.but(num_layers=8, tp=2, seq_length=1024, lr=1, alloc_conf="a:b", name="x", environment={"A": "1"})
    assert recipe == Recipe(
        model=dataclasses.replace(SMALL, num_layers=8),
        parallelism=Parallelism(tp=2),
        training=Training(seq_length=1024),
        optimizer=Optimizer(lr=1),
        memory=Memory(alloc_conf="a:b"),
        environment={"A": "1"},
        name="x",
    )


def test_a_change_beside_its_part_is_made_in_the_new_part() -> None:
    recipe = RECIPE.but(model=PRESETS["mixtral-8x7b"], num_layers=2, moe_router_topk=1, training=Training(steps=5))
    assert (recipe.model.num_layers, recipe.training.steps) == (2, 5)
    assert recipe.model.moe == Moe(num_moe_experts=8, moe_router_topk=1)


def test_changes_that_are_only_possible_together_are_made_together() -> None:
    assert RECIPE.but(tp=2, sequence_parallel=True).but(tp=1, sequence_parallel=False) == RECIPE


def test_an_unknown_change_is_refused_with_the_nearest_name() -> None:
    assert message_of(num_layer=2) == "but(): 'num_layer' is not a field of a recipe; did you mean 'num_layers'?"


def test_a_change_of_experts_is_refused_where_there_are_none() -> None:
    assert message_of(moe_router_topk=2) == "but(): moe_router_topk: the recipe has no such part"


def test_field_names_are_unique_across_parts() -> None:
    names = [name for _, name, _ in FIELDS]
    assert len(names) == len(set(names))


# More settings by Megatron's names

NAMES = st.from_regex("[a-z]{1,8}_x", fullmatch=True)
SCALARS = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | TEXT
SCALARS |= st.floats(-(2.0**62), 2.0**62, allow_nan=False)


@given(megatron=st.dictionaries(NAMES, SCALARS | st.lists(SCALARS), max_size=4))
def test_plain_settings_survive_yaml_json_and_pickle(
    megatron: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    recipe = RECIPE.but(megatron=megatron)
    path = write(tmp_path_factory.getbasetemp(), recipe.to_yaml())
    plain = json.loads(json.dumps(recipe.to_dict()))
    for again in (Recipe.from_yaml(path), Recipe.from_dict(plain), pickle.loads(pickle.dumps(recipe))):
        assert again == recipe
        assert again.digest == recipe.digest
        assert recipe.differences(again) == {}
    assert (recipe.digest == RECIPE.digest) == (not megatron)


@given(one=SCALARS | st.lists(SCALARS), other=SCALARS | st.lists(SCALARS))
def test_other_settings_are_another_job(one: object, other: object) -> None:
    recipes = [RECIPE.but(megatron={"fp8_x": value}) for value in (one, other)]
    assert (recipes[0].digest == recipes[1].digest) == (recipes[0].differences(recipes[1]) == {})


@pytest.mark.parametrize("values", [(None, 0), (True, 1), (False, None), ("a", ["a"]), ("1", 1), ([], None)])
def test_settings_of_another_kind_are_another_job(values: tuple[object, object]) -> None:
    here, there = (RECIPE.but(megatron={"fp8": value}) for value in values)
    assert here.digest != there.digest
    assert list(here.differences(there)) == ["megatron.fp8"]


def test_a_whole_number_is_the_same_however_it_is_written() -> None:
    assert RECIPE.but(megatron={"fp8_margin": 1.0}).digest == RECIPE.but(megatron={"fp8_margin": 1}).digest


def test_more_settings_are_a_copy_and_lists_stay_lists_in_data() -> None:
    given_scope, given_settings = ["attn"], {"cuda_graph_impl": "local"}
    recipe = RECIPE.but(megatron={**given_settings, "cuda_graph_scope": given_scope})
    given_scope.append("mlp")
    assert recipe.to_dict()["megatron"] == {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}
    assert RECIPE.differences(recipe) == {
        "megatron.cuda_graph_impl": (None, "local"),
        "megatron.cuda_graph_scope": (None, ("attn",)),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline_model_parallel_size: 2", "megatron.pipeline_model_parallel_size: the recipe has its own key for it"),
        ("fine_grained_activation_offloading: true", "megatron.fine_grained_activation_offloading: the recipe has its"),
        ("fp8: {a: 1}", "megatron.fp8: {'a': 1} is not null, true or false, a number, text on one line, or a list of"),
        ("fp8: [[1]]", "megatron.fp8: [[1]] is not null, true or false"),
        ("fp8: .nan", "megatron.fp8: nan is not null, true or false"),
        ("fp8: 2024-01-01", "megatron.fp8: datetime.date(2024, 1, 1) is not null"),
    ],
)
def test_a_wrong_setting_by_megatron_s_name_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"model: llama3-8b\nmegatron:\n  nccl_ub: true\n  {text}\n")
    with pytest.raises(UserError) as error:
        Recipe.from_yaml(path)
    assert str(error.value).startswith(f"{path}:4: {message}")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tensor_model_parallel_size", "parallelism.tp"),
        ("multi_latent_attention", "model.mla"),
        ("bf16", "training.precision"),
        ("activation_func", "model.activation"),
        ("cpu_offloading", "memory.cpu_offloading"),
        ("use_distributed_optimizer", "parallelism.distributed_optimizer"),
        ("grad_reduce_in_fp32", "training.main_grads"),
        ("lora_rank", "lora.rank"),
        ("alloc_conf", "memory.alloc_conf"),
    ],
)
def test_a_setting_with_a_key_of_its_own_is_refused_with_that_key(name: str, key: str) -> None:
    expected = f"megatron.{name}: the recipe has its own key for it; write it as {key}"
    assert message_of(megatron={name: None}) == expected


# shrunk()


@given(model=models(), data=st.data())
def test_a_shrunk_model_is_valid_and_keeps_its_make(model: Model, data: st.DataObject) -> None:
    head = model.mla.v_head_dim if model.mla else model.head_dim
    layers = data.draw(st.integers(1, model.num_layers))
    hidden = head * data.draw(st.integers(1, max(1, model.hidden_size // head)))
    if hidden > model.hidden_size:
        return
    small = model.shrunk(layers, hidden)
    assert (small.num_layers, small.hidden_size, small.vocab_size) == (layers, hidden, model.vocab_size)
    assert small.mla is not None or small.head_dim == model.head_dim
    assert small.query_groups <= model.query_groups
    assert small.num_attention_heads * model.hidden_size <= max(model.num_attention_heads * hidden, model.hidden_size)
    assert (small.moe is None) == (model.moe is None)
    assert (small.mla is None) == (model.mla is None)
    assert Recipe(model=small).digest


@given(model=models(), layers=JUNK, hidden=JUNK | st.integers(1, 2000))
def test_shrinking_to_anything_works_or_is_refused_with_a_user_error(model: Model, layers: Any, hidden: Any) -> None:
    with contextlib.suppress(UserError):
        assert model.shrunk(layers, hidden).num_layers <= model.num_layers


def test_a_model_shrunk_to_its_own_size_is_itself() -> None:
    for model in PRESETS.values():
        assert model.shrunk() == model
        assert model.shrunk(model.num_layers, model.hidden_size) == model


def test_a_model_cannot_grow() -> None:
    with pytest.raises(
        UserError, match=r"^model\.shrunk\.hidden: 1024 is not a whole number from 1 to 512, the size now"
    ):
        SMALL.shrunk(hidden=1024)


# Memory settings, experts, pipeline splits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe", "mlp"]},
            "memory.recompute_modules: ['mlp', 'moe', 'mlp'] names mlp twice",
        ),
        (
            {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0},
            "memory.optimizer_offload_fraction: 0 is not a number above 0, up to 1",
        ),
        ({"lora": Lora(), "targets": []}, "lora.targets: an empty list trains nothing"),
        (
            {"lora": Lora(), "targets": ["linear_qkv"] * 2},
            "lora.targets: ['linear_qkv', 'linear_qkv'] names linear_qkv",
        ),
        ({"moe": Moe(num_moe_experts=4), "overload": 1.5}, "model.moe.overload: 1.5 needs parallelism.ep of 2 or more"),
        (
            {"moe": Moe(num_moe_experts=4), "overload": 2.5, "ep": 2, "dp": 2},
            "model.moe.overload: 2.5 is more than 2, the most that 2 of its experts a token allow",
        ),
        (
            {"moe": Moe(num_moe_experts=4), "overload": 2.0, "ep": 2, "dp": 2},
            "model.moe.overload: 2 leaves no token for the other ranks; allowed is less than 2",
        ),
        (
            {"moe": Moe(num_moe_experts=4096, moe_grouped_gemm=True)},
            "model.moe.moe_grouped_gemm: true with 4096 experts a rank; PyTorch's grouped product takes 1024 at most",
        ),
        ({"mla": Mla(), "add_qkv_bias": True}, "model.add_qkv_bias: True has no meaning with model.mla; leave it out"),
        (
            {"mla": Mla(v_head_dim=256), "attention_backend": "flash"},
            "model.mla.v_head_dim: 256 is more than the 192 channels of queries; flash attention takes less",
        ),
        (
            {"pp": 2, "pipeline_model_parallel_layout": "Et*1000000000|ttttL"},
            "parallelism.pipeline_model_parallel_layout: repeats 1000000000 times, with model.num_layers 4",
        ),
        (
            {"moe": Moe(num_moe_experts=4, moe_router_topk=3), "overload": 1.5, "ep": 2, "dp": 2},
            "model.moe.overload: 1.5 is more than 1.33333",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_reason(changes: dict[str, Any], message: str) -> None:
    assert message_of(**changes).startswith(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute_granularity": "some", "recompute_method": "other", "recompute_num_layers": -1},
        {"recompute_granularity": "full", "cpu_offloading": True, "cpu_offloading_num_layers": 0, "pp": 3, "vpp": 2}
        | {"global_batch_size": 3},
        {"min_offloaded_tensor_size": 0, "overlap_param_gather": True, "sequence_parallel": True},
        {"num_layers_in_first_pipeline_stage": 0, "num_layers_in_last_pipeline_stage": -7, "ep": 3, "dp": 3},
        {"moe": Moe(num_moe_experts=4, moe_router_topk=9, moe_token_dispatcher_type="flex"), "tp": 2, "dp": 3, "ep": 3},
        {"moe": Moe(num_moe_experts=4, moe_router_load_balancing_type="luck", moe_aux_loss_coeff=1), "kind": "sgd"}
        | {"distributed_optimizer": True, "add_bias_linear": True},
    ],
)
def test_what_megatron_refuses_can_be_written(changes: dict[str, Any], tmp_path: Path) -> None:
    recipe = RECIPE.but(**changes)
    assert Recipe.from_yaml(write(tmp_path, recipe.to_yaml())) == recipe
    assert all(setting_of(recipe, name) == value for name, value in changes.items())


def setting_of(recipe: Recipe, name: str) -> object:
    parts = (recipe, recipe.model, recipe.parallelism, recipe.training, recipe.optimizer, recipe.memory)
    return next(getattr(part, name) for part in parts if hasattr(part, name))


def test_no_number_of_layers_to_offload_is_none_at_all() -> None:
    assert RECIPE.but(cpu_offloading=True, cpu_offloading_num_layers=0).digest == RECIPE.but(cpu_offloading=True).digest


def test_an_empty_list_of_modules_is_a_choice() -> None:
    empty = RECIPE.but(recompute_granularity="selective", recompute_modules=[])
    assert empty.digest != RECIPE.but(recompute_granularity="selective").digest
    assert Recipe.from_dict(empty.to_dict()) == empty


def test_a_setting_that_is_switched_takes_along_what_depends_on_it() -> None:
    plain = Recipe(model=SMALL)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    switched: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (full, {"recompute_granularity": None}),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, {"recompute_granularity": None}),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, {"cpu_offloading": False}),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, {"optimizer_cpu_offload": False}),
    ]
    for on, off in switched:
        assert plain.but(**on) != plain
        assert plain.but(**on).but(**off) == plain
        assert plain.but(**on).but(**{name: on[name] for name in off}) == plain.but(**on)  # as it was
    selective = plain.but(**full).but(recompute_granularity="selective", recompute_modules=["mlp"])
    assert selective == plain.but(recompute_granularity="selective", recompute_modules=["mlp"])
    kept = plain.but(**full).but(recompute_granularity=None, recompute_num_layers=2).memory
    assert (kept.recompute_method, kept.recompute_num_layers) == (None, 2)


def test_fewer_modules_to_offload_keep_the_smallest_size_and_none_do_not() -> None:
    recipe = RECIPE.but(offload_modules=["core_attn", "qkv_linear"], min_offloaded_tensor_size=1)
    assert recipe.but(offload_modules=["core_attn"]).memory.min_offloaded_tensor_size == 1
    assert recipe.but(offload_modules=[]) == RECIPE
