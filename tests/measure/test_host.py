"""Host runs: how recipes are shrunk, real losses on one and several ranks, and what a run that goes wrong says."""

from __future__ import annotations

import math

import pytest

from pytest_mbmem import incompatibilities
from pytest_mbmem.errors import NotOnHost, UserError
from pytest_mbmem.measure import host
from pytest_mbmem.measure.host import DEVICE, HostLauncher, Parity, Precision, shrunk
from pytest_mbmem.measurement import Failure, Measurement
from pytest_mbmem.models import PRESETS, preset
from pytest_mbmem.recipe import Lora, Model, Moe, Parallelism, Recipe, Training

LLAMA = Recipe(
    model=preset("llama3-8b"),
    parallelism=Parallelism(),
    training=Training(global_batch_size=32, attention_backend="flash"),
)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


def selective(*modules: str) -> dict[str, object]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


# Shrinking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shrinks_to_its_own_make(name: str) -> None:
    big = Recipe(model=preset(name), training=Training(seq_length=2048))
    small = shrunk(big)
    assert small.model.num_parameters < 2_000_000
    for what in ("normalization", "activation", "position_embedding_type", "qk_layernorm", "add_bias_linear"):
        assert getattr(small.model, what) == getattr(big.model, what)
    assert (small.model.moe is None, small.model.mla is None) == (big.model.moe is None, big.model.mla is None)
    assert (small.model.query_groups < small.model.num_attention_heads) == (
        big.model.query_groups < big.model.num_attention_heads
    )


def test_experts_keep_their_kinds_of_layers() -> None:
    moe = shrunk(Recipe(model=preset("deepseek-v3"), training=Training())).model.moe
    assert moe is not None
    assert moe.moe_layer_freq == (0, 1)
    assert (moe.num_moe_experts, moe.moe_router_topk, moe.moe_shared_expert_intermediate_size) == (8, 2, 64)


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({"tp": 8, "sequence_parallel": True}, {"tp": 2}),
        ({"pp": 16, "vpp": 2, "dp": 4}, {"pp": 2, "vpp": 2, "dp": 2}),
        ({"tp": 4, "pp": 4, "dp": 32}, {"tp": 2, "pp": 2, "dp": 2}),
        ({"tp": 4, "pp": 4, "cp": 2, "dp": 32}, {"tp": 2, "pp": 2, "cp": 2, "dp": 1}),
    ],
)
def test_two_ranks_of_each_kind_and_eight_at_most(sizes: dict[str, int], ranks: dict[str, int]) -> None:
    big = LLAMA.but(**sizes, num_layers=64, global_batch_size=512)
    small = shrunk(big)
    assert small.parallelism == Parallelism(**{"sequence_parallel": big.parallelism.sequence_parallel, **ranks})
    assert small.world_size <= 8
    assert small.num_microbatches == 2


def test_expert_parallelism_stays_where_there_are_ranks_for_it() -> None:
    mixtral = LLAMA.but(model=preset("mixtral-8x7b"), dp=8, ep=8)
    assert shrunk(mixtral).parallelism.ep == 2
    with_tp = mixtral.but(tp=4, sequence_parallel=True, etp=1)
    assert (shrunk(with_tp).parallelism.ep, shrunk(with_tp).parallelism.etp) == (2, 1)


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (FULL, 1),
        (FULL | {"recompute_num_layers": 8}, 2),
        (FULL | {"recompute_method": "block", "recompute_num_layers": 8}, 1),
        (FULL | {"recompute_method": "block", "recompute_num_layers": 32}, 2),
    ],
)
def test_a_number_of_recomputed_layers_stays_some_or_all(settings: dict[str, object], number: int) -> None:
    assert shrunk(LLAMA.but(**settings)).memory.recompute_num_layers == number


def test_what_a_cpu_lacks_is_left_out() -> None:
    small = shrunk(LLAMA.but(precision="fp16", alloc_conf="expandable_segments:True"))
    assert (small.training.precision, small.training.attention_backend) == ("fp16", "unfused")
    assert (small.training.masked_softmax_fusion, small.memory.alloc_conf) == (False, "")
    fp8 = LLAMA.but(jit_fusion="compiled", megatron={"fp8": "hybrid", "fp8_recipe": "mxfp8", "qk_clip": False})
    assert (shrunk(fp8).megatron, shrunk(fp8).training.jit_fusion) == ({"qk_clip": False}, "eager")
    uneven = LLAMA.but(pp=4, num_layers_in_first_pipeline_stage=2)
    assert shrunk(uneven).parallelism == Parallelism(pp=2)


@pytest.mark.parametrize("sizes", [{}, {"pp": 2, "pipeline_model_parallel_layout": "Et|L"}], ids=["alone", "Et|L"])
def test_one_layer_with_a_pattern_of_one(sizes: dict) -> None:
    moe = Moe(num_moe_experts=4, moe_layer_freq=(1,))
    model = Model(num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=100, moe=moe)
    small = shrunk(Recipe(model=model, parallelism=Parallelism(**sizes), training=Training(seq_length=64)))
    ranks = sizes.get("pp", 1)
    assert small.model.num_layers == small.world_size == ranks
    assert small.model.moe is not None
    assert small.model.moe.moe_layer_freq == (1,) * ranks


@pytest.mark.parametrize("backend", ["flash", "fused", "auto"])
def test_context_parallelism_has_flash_attention(backend: str) -> None:
    changes = {"transformer_impl": "transformer_engine", "attention_backend": backend}
    assert shrunk(LLAMA.but(cp=2, **changes)).training.attention_backend == "flash"
    assert shrunk(LLAMA.but(**changes)).training.attention_backend == "unfused"


def test_a_small_recipe_keeps_its_size() -> None:
    tiny = Recipe(
        model=Model(num_layers=1, hidden_size=64, num_attention_heads=2, vocab_size=100),
        training=Training(seq_length=16, precision="fp32", masked_softmax_fusion=False),
    )
    small = shrunk(tiny, microbatches=1)
    assert tiny.differences(small) == {}
    assert tiny.but(global_batch_size=2, precision="bf16").differences(shrunk(tiny, "bf16")) == {}


# Losses ---------------------------------------------------------------------------------------------------------------


def losses(measurement: Measurement) -> list[float]:
    assert measurement.failure is None, measurement.failure
    return [step.loss for step in measurement.steps if step.loss is not None]


def test_losses_are_real(host_launcher: HostLauncher) -> None:
    result = host_launcher.measure(LLAMA)
    assert len(losses(result)) == LLAMA.training.steps
    # random parameters know nothing: about the logarithm of the number of tokens
    assert all(math.log(250) - 0.05 < loss < math.log(250) + 0.3 for loss in losses(result))
    assert all(step.grad_norm is not None and 0.1 < step.grad_norm < 100 for step in result.steps)
    assert len(set(losses(result))) == len(result.steps)
    assert result.device == DEVICE
    assert result.recipe_digest == LLAMA.digest
    assert result.notes[0] == "host: memory is not gated"
    assert "model.hidden_size 4096 -> 128" in result.notes[1]
    assert Measurement.from_json(result.to_json()) == result
    with pytest.raises(NotOnHost, match="memory is not measured"):
        result.peak()


def test_the_distributed_optimizer_trains_as_the_plain_one(host_launcher: HostLauncher) -> None:
    plain = LLAMA.but(dp=2, precision="fp32", attention_backend="unfused")
    sharded = plain.but(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
    assert losses(host_launcher.measure(sharded)) == pytest.approx(losses(host_launcher.measure(plain)), rel=1e-5)


def test_fp16_trains_as_bf16_and_skips_no_step(host_launcher: HostLauncher) -> None:
    half = host_launcher.measure(LLAMA.but(precision="fp16"))
    assert losses(half) == pytest.approx(losses(host_launcher.measure(LLAMA)), rel=1e-3)
    assert all(step.grad_norm is not None and 0.1 < step.grad_norm < 100 for step in half.steps)


def test_fp16_skips_a_step_whose_scaled_gradients_overflow(
    host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_TRAIN", "host_faults:begins_with_megatrons_loss_scale")
    result = host_launcher.measure(LLAMA.but(precision="fp16"))
    assert [step.skipped for step in result.steps] == [True] * 3
    assert result.failure is not None
    assert (result.failure.kind, result.failure.step) == ("skipped step", 1)
    assert result.failure.message.startswith("the optimizer skipped step 1: the gradient of ")


def test_context_parallel_attention_computes_what_one_rank_does(host_launcher: HostLauncher) -> None:
    whole, halves = LLAMA.but(steps=1), LLAMA.but(steps=1, cp=2)
    assert losses(host_launcher.measure(halves)) == pytest.approx(losses(host_launcher.measure(whole)), rel=2e-4)


def test_all_kinds_of_parallelism_together(host_launcher: HostLauncher) -> None:
    recipe = LLAMA.but(
        model=preset("mixtral-8x7b"), tp=2, sequence_parallel=True, pp=2, vpp=2, dp=2, ep=2, etp=1, steps=2
    )
    result = host_launcher.measure(recipe)
    assert all(math.log(250) - 0.1 < loss < math.log(250) + 0.5 for loss in losses(result))


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_a_failure(host_launcher: HostLauncher) -> None:
    result = host_launcher.measure(LLAMA.but(lr=1e18))
    assert result.failure is not None
    assert result.failure.kind == "not finite"
    assert result.failure.message == "the loss is not finite in step 2"
    assert [step.loss is None for step in result.steps] == [False, True, True]


@pytest.mark.parametrize(
    ("fault", "changes", "kind", "message"),
    [
        ("skips_steps", {}, "skipped step", "the optimizer skipped step 1"),
        ("loses_a_rank", {"dp": 2}, "died", "the process of this rank ended with exit code 3"),
        (
            "refuses_the_second_step",
            {},
            "refused",
            "memory.recompute_num_layers: 2 does not divide the 3 layers",
        ),
        (
            "meets_an_assertion_in_the_second_step",
            {},
            "refused",
            "Megatron Core refuses it: context parallel group is not initialized",
        ),
    ],
)
def test_a_run_that_goes_wrong_says_so(
    host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch, fault: str, changes: dict, kind: str, message: str
) -> None:
    monkeypatch.setattr(host, "_TRAIN", f"host_faults:{fault}")
    failure = host_launcher.measure(LLAMA.but(**changes)).failure
    assert failure is not None
    assert (failure.kind, failure.message) == (kind, message)
    assert failure.rank == len(changes)


@pytest.fixture
def of_a_later_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of what it refuses."""
    monkeypatch.setattr(incompatibilities, "check", lambda *_: None)


@pytest.mark.usefixtures("of_a_later_megatron")
def test_settings_that_megatron_refuses(host_launcher: HostLauncher) -> None:
    failure = host_launcher.measure(LLAMA.but(**selective("nonsense"))).failure
    assert failure is not None
    assert failure.kind == "refused"
    assert "Invalid choices for recompute_modules: {'nonsense'}" in failure.message


# Parity ---------------------------------------------------------------------------------------------------------------

GPT = LLAMA.but(**DROPOUT, attention_backend="unfused")
MOONLIGHT = GPT.but(model=preset("moonlight-16b"), moe_grouped_gemm=True, **DROPOUT)
GRADIENTS = {"weight gradient", "input gradient", "main_grad"}
LORA = GPT.but(tp=2, sequence_parallel=True, lora=Lora(rank=8))


@pytest.mark.parametrize(
    ("control", "settings"),
    [
        (GPT, FULL),
        (GPT.but(tp=2), FULL | {"distribute_saved_activations": True}),
        (GPT.but(tp=2, sequence_parallel=True), selective("core_attn", "layernorm", "mlp")),
        (GPT.but(pp=2), FULL | {"recompute_method": "block"}),
        (MOONLIGHT, selective("core_attn", "mla_up_proj", "layernorm", "moe_act")),
        (MOONLIGHT.but(dp=2, ep=2), selective("moe")),
        (LORA, {"sequence_parallel_input_regather": True}),
        (LORA.but(dropout=0.1), FULL),
        (GPT, {"cpu_offloading": True, "cpu_offloading_num_layers": 1}),
        (GPT, {"offload_modules": ["attn_norm", "core_attn", "attn_proj"]}),
    ],
    ids=lambda value: value.parallelism.world_size if isinstance(value, Recipe) else "-".join(map(str, value.values())),
)
def test_memory_settings_change_no_number(
    host_launcher: HostLauncher, control: Recipe, settings: dict[str, object]
) -> None:
    parity = host_launcher.parity(control, control.but(**settings))
    assert isinstance(parity, Parity), parity
    assert parity.passed, parity.explain()
    kinds = ["output", "weight gradient", "input gradient", "main_grad", "parameter update"]
    assert {(row.precision, row.kind) for row in parity.rows} == {(p, k) for p in ("fp32", "bf16") for k in kinds}
    assert all(row.zero == 0 for row in parity.rows)
    assert parity.ranks == control.world_size


def test_optimizer_offload_changes_no_number(host_launcher: HostLauncher) -> None:
    control = GPT.but(dp=2, distributed_optimizer=True)
    parity = host_launcher.parity(control, control.but(optimizer_cpu_offload=True))
    assert isinstance(parity, Parity), parity
    assert parity.passed, parity.explain()
    assert {row.precision for row in parity.rows} == {"bf16"}
    assert "\nfp32 left out: optimizer-offload-in-fp32-with-distributed-optimizer (see mbm" in parity.table()
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    single = GPT.but(precision="fp32")
    alone = host_launcher.parity(single, single.but(**half), ["fp32"])
    assert isinstance(alone, Parity), alone
    assert alone.passed, alone.explain()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("fault", "error"), [("skips_the_update", 1.0), ("updates_with_the_wrong_sign", 2.0)])
def test_a_wrong_update_is_found(
    host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch, fault: str, error: float, precision: Precision
) -> None:
    monkeypatch.setattr(host, "_PARITY", f"host_faults:{fault}")
    control = GPT.but(precision=precision, distributed_optimizer=precision == "bf16")
    parity = host_launcher.parity(control, control.but(optimizer_cpu_offload=True), [precision])
    assert isinstance(parity, Parity), parity
    assert [row.kind for row in parity.rows if not row.passed] == ["parameter update"]
    assert parity.error("parameter update") == pytest.approx(error, rel=0.05)
    assert parity.error("main_grad") == 0


@pytest.mark.parametrize(
    ("fault", "kind", "rank"),
    [("records_no_input_gradients", "input gradient", 0), ("records_no_outputs_on_rank_1", "output", 1)],
)
def test_a_kind_that_both_sides_lack_is_no_parity(
    host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch, fault: str, kind: str, rank: int
) -> None:
    monkeypatch.setattr(host, "_PARITY", f"host_faults:{fault}")
    control = GPT.but(pp=2)
    parity = host_launcher.parity(control, control.but(**FULL), ["fp32"])
    assert isinstance(parity, Parity), parity
    (row,) = [row for row in parity.rows if not row.passed]
    assert row.explain() == (
        f"fp32 {kind}: relative error inf (neither side has it), tolerance 1e-05: any {kind} on rank {rank}"
    )


def test_context_parallel_recipes_are_compared_in_bf16(host_launcher: HostLauncher) -> None:
    control = LLAMA.but(cp=2, **DROPOUT)
    with pytest.raises(UserError, match=r'leave fp32 out: precisions=\("bf16",\)'):
        host_launcher.parity(control, control.but(**FULL), ["fp32", "bf16"])
    parity = host_launcher.parity(control, control.but(**FULL))
    assert isinstance(parity, Parity), parity
    assert parity.passed, parity.explain()
    assert {row.precision for row in parity.rows} == {"bf16"}
    assert parity.table().endswith("\nfp32 left out: context parallelism needs flash attention, which has no fp32")


@pytest.mark.parametrize(
    ("fault", "control", "settings", "kinds"),
    [
        ("replays_other_dropout", GPT, FULL, GRADIENTS),
        (
            "replays_other_dropout_in_tensor_parallel_regions",
            GPT.but(hidden_dropout=0.0),
            selective("core_attn"),
            GRADIENTS,
        ),
        ("doubles_the_gradient_of_a", LORA, {"sequence_parallel_input_regather": True}, GRADIENTS - {"input gradient"}),
        ("keeps_the_last_microbatch_only", GPT, FULL, {"main_grad"}),
        ("brings_zeros_back", GPT, {"cpu_offloading": True, "cpu_offloading_num_layers": 1}, GRADIENTS),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parity_finds(
    host_launcher: HostLauncher,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    control: Recipe,
    settings: dict[str, object],
    kinds: set[str],
) -> None:
    monkeypatch.setattr(host, "_PARITY", f"host_faults:{fault}")
    precision = "bf16" if settings == FULL else "fp32"
    parity = host_launcher.parity(control, control.but(**settings), [precision])
    assert isinstance(parity, Parity), parity
    assert not parity.passed
    # What follows from a wrong gradient differs too: the parameters, and with a generator that is left in another state
    # the outputs of the next microbatch.
    wrong = {row.kind for row in parity.rows if not row.passed}
    assert wrong - {"parameter update", "output"} == kinds
    assert all(parity.error(kind) > 0.1 for kind in kinds), parity.table()


def test_a_double_gradient_is_named(host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PARITY", "host_faults:doubles_the_gradient_of_a")
    parity = host_launcher.parity(LORA, LORA.but(sequence_parallel_input_regather=True), ["fp32"])
    assert isinstance(parity, Parity)
    row = next(row for row in parity.rows if row.kind == "main_grad")
    assert row.error == pytest.approx(1.0)
    assert row.name.endswith("adapter.linear_a.weight")
    assert row.explain().startswith("fp32 main_grad: relative error 1, tolerance 1e-05: decoder.layers.")
    assert "lora.sequence_parallel_input_regather: False -> True" in parity.explain()


def test_comparing_nothing_but_zeros_is_no_parity(host_launcher: HostLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PARITY", "host_faults:loses_gradients")
    parity = host_launcher.parity(GPT, GPT.but(**FULL), ["fp32"])
    assert isinstance(parity, Parity)
    assert [row.kind for row in parity.rows if not row.passed] == ["main_grad"]
    assert "are zero on both sides: nothing to compare" in parity.explain()


@pytest.mark.parametrize(
    ("changes", "precisions", "message"),
    [
        ({}, ["fp32"], "control and candidate are the same recipe"),
        ({"tp": 2}, ["fp32"], r"differ in more than memory settings: parallelism.tp: 1 -> 2 .*\. Make them equal$"),
        ({"alloc_conf": "expandable_segments:True"}, ["fp32"], "the host has nothing that this changes: memory.alloc"),
        (FULL, ["fp16"], r"precisions=\['fp16'\]: allowed are fp32, bf16"),
        (FULL, "fp32", "precisions='fp32': allowed are fp32, bf16"),
        (FULL, [], r"precisions=\[\]: allowed are fp32, bf16"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, (dict, list)) else value.partition(" ")[0],
)
def test_what_cannot_be_compared_is_refused(changes: dict, precisions: list, message: str) -> None:
    with pytest.raises(UserError, match=message):
        HostLauncher().parity(GPT, GPT.but(**changes), precisions)


@pytest.mark.usefixtures("of_a_later_megatron")
def test_what_a_side_refuses_names_the_side(host_launcher: HostLauncher) -> None:
    failure = host_launcher.parity(GPT, GPT.but(**selective("nonsense")), ["bf16"])
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert failure.message.startswith("candidate, bf16: Megatron Core refuses it: Invalid choices")
    assert host_launcher.parity(GPT, GPT.but(**selective("nonsense"))) == failure
