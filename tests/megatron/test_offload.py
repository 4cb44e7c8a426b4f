"""Offload to host memory: what leaves the device is what the layers save, and the peak falls by it."""

from __future__ import annotations

import importlib.util

import pytest

from pytest_mbmem.errors import IncompatibleSettings
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
own_offload = pytest.mark.skipif(
    HAS_TE, reason="Transformer Engine is installed, whose layer offload takes its own layers' tensors (tests/te)"
)

MIB = 2**20
STATE = MIB  # of one hidden state: 1024 tokens of 512 channels in two bytes
READ = 4  # bytes of the gradients' norm, which every step reads

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=1000, activation="swiglu"),
    parallelism=Parallelism(),
    training=Training(seq_length=1024, attention_backend="flash", steps=3),
).but(position_embedding_type="none")
SAVED_BY_A_LAYER = [
    *(STATE, STATE),  # input and output of the norm
    3 * STATE,  # queries, keys and values in one
    STATE,  # output of the attention
    *(STATE, STATE),  # the other norm
    *(8 * STATE, 4 * STATE),  # before and after SwiGLU, at four times the channels
]
LAYER = sum(SAVED_BY_A_LAYER)


def measured(launcher: Launcher, **changes: object) -> Measurement:
    result = launcher.measure(RECIPE.but(**changes), count_flops=False)
    assert result.failure is None, result.failure.message
    return result


def constraints(launcher: Launcher, **changes: object) -> tuple[str, ...]:
    """Those that keep the recipe from running."""
    with pytest.raises(IncompatibleSettings) as error:
        launcher.measure(RECIPE.but(**changes), count_flops=False)
    return error.value.ids


@pytest.fixture(scope="module")
def control(launcher: Launcher) -> Measurement:
    return measured(launcher)


def test_a_step_without_offload_moves_next_to_nothing(control: Measurement) -> None:
    (rank,) = control.ranks
    assert rank.moved_bytes == {"to host": READ, "to device": 0}
    assert rank.host_peak is not None
    assert rank.host_peak < 4096
    assert not [a for a in control.assumptions if "offload" in a]


# --- layers ----------------------------------------------------------------------------------------------------------


@own_offload
@pytest.mark.parametrize("layers", [1, 3])
def test_offloaded_layers_move_exactly_what_they_save(launcher: Launcher, control: Measurement, layers: int) -> None:
    offloaded = measured(launcher, cpu_offloading=True, cpu_offloading_num_layers=layers)
    (rank,) = offloaded.ranks
    assert rank.moved_bytes == {"to host": layers * LAYER + READ, "to device": layers * LAYER}
    pinned = layers * sum(2 ** (size - 1).bit_length() for size in SAVED_BY_A_LAYER)  # PyTorch's blocks
    assert rank.host_peak is not None
    assert pinned <= rank.host_peak < pinned + 4096
    # The first layer's input is also the model's, which lives as long as its forward; blocks are rounded.
    fallen = control.peak(phase="forward") - offloaded.peak(phase="forward")
    assert layers * LAYER - 2 * STATE <= fallen <= layers * LAYER
    assert "layer offload: saved-tensor hooks in place of Transformer Engine's" in offloaded.assumptions


@own_offload
def test_layer_offload_returns_to_where_it_began_with_every_microbatch(launcher: Launcher) -> None:
    several = {"global_batch_size": 3}
    (plain,) = measured(launcher, **several).ranks
    (rank,) = measured(launcher, **several, cpu_offloading=True, cpu_offloading_num_layers=2).ranks
    assert rank.moved_bytes == {"to host": 3 * 2 * LAYER + READ, "to device": 3 * 2 * LAYER}
    for retained, without in zip(rank.retained_after_backward, plain.retained_after_backward, strict=True):
        assert abs(retained - without) <= 2 * MIB  # the allocator's rounding
    (once,) = measured(launcher, cpu_offloading=True, cpu_offloading_num_layers=2).ranks
    assert rank.host_peak == once.host_peak


@own_offload
def test_layer_offload_saves_what_transformer_engine_saves(launcher: Launcher) -> None:
    """Transformer Engine 2.20.2 itself on the virtual GPU, with 6 of 12 such layers offloaded: 404 MiB."""
    recipe = Recipe(
        model=Model(
            num_layers=12,
            hidden_size=512,
            num_attention_heads=8,
            vocab_size=50257,
            position_embedding_type="learned_absolute",
            activation="gelu",
            add_bias_linear=True,
            share_embeddings_and_output_weights=True,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        parallelism=Parallelism(dp=8, distributed_optimizer=True),
        training=Training(micro_batch_size=4, global_batch_size=32, seq_length=1024, attention_backend="flash"),
    )
    peaks = [
        launcher.measure(r, ranks="distinct", count_flops=False).peak()
        for r in (recipe, recipe.but(cpu_offloading=True, cpu_offloading_num_layers=6))
    ]
    assert (peaks[0] - peaks[1]) / MIB == pytest.approx(404, abs=1)


@pytest.mark.usefixtures("megatron_model")  # in a worker
def test_an_offloaded_layer_gets_back_what_it_saved() -> None:
    import torch

    from pytest_mbmem.megatron.offload import _Layer

    layer = _Layer(torch.cuda.Stream())
    base = torch.arange(512 * 1024, dtype=torch.int16).view(2, 256, 1024).cuda()
    views = [base, base.permute(2, 0, 1), base[1], base[1].t(), base.view(-1)]
    kept = [torch.ones(100, device="cuda"), torch.nn.Parameter(torch.zeros(512, 1024, device="cuda"))]
    before = [t.tolist() for t in views]
    saved = [layer.save(t) for t in views + kept]
    assert [s is t for s, t in zip(saved[5:], kept, strict=True)] == [True, True]
    layer.start_offload()
    layer.finish_offload()
    assert [t.nbytes for t in layer.host] == [MIB, MIB // 2]  # the whole once, and a part of it
    assert layer.device == []
    del base, views
    layer.start_reload()
    layer.wait()
    loaded = [layer.load(s) for s in saved]
    assert [t.tolist() for t in loaded[:5]] == before
    assert loaded[5:] == kept
    layer.clear()
    assert (layer.host, layer.device) == ([], [])


def test_weight_offload_is_refused(launcher: Launcher) -> None:
    weights = {"cpu_offloading": True, "cpu_offloading_num_layers": 2, "cpu_offloading_weights": True}
    assert constraints(launcher, **weights) == ("cpu-offload-of-weights",)


# --- modules ---------------------------------------------------------------------------------------------------------

FEWEST = {"min_offloaded_tensor_size": 100_000}


@pytest.mark.parametrize(
    ("modules", "states"),
    [
        (("attn_norm",), 1),
        (("qkv_linear",), 1),
        (("core_attn",), 4),  # queries, keys, values and the output
        (("core_attn", "attn_proj"), 5),
        (("mlp_norm",), 1),
    ],
    ids=["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"],
)
def test_modules_move_exactly_what_they_save(
    launcher: Launcher, control: Measurement, modules: tuple[str, ...], states: int
) -> None:
    offloaded = measured(launcher, offload_modules=modules, **FEWEST)
    (rank,) = offloaded.ranks
    moved = 3 * states * STATE  # after its first step Megatron leaves the last layer on the device
    assert rank.moved_bytes == {"to host": moved + READ, "to device": moved}
    assert rank.host_peak is not None
    assert 4 * states * STATE <= rank.host_peak < 4 * states * STATE + 4096
    assert offloaded.peak() < control.peak()
    assert any("offload by module" in a for a in offloaded.assumptions) is not HAS_TE


@pytest.mark.parametrize("split", [{"pp": 2}, {"pp": 2, "vpp": 2}], ids=["pipeline", "interleaved"])
def test_modules_of_a_pipeline_are_offloaded(launcher: Launcher, split: dict[str, int]) -> None:
    several = {**split, "num_layers": 8, "global_batch_size": 4}
    plain = measured(launcher, **several)
    offloaded = measured(launcher, **several, offload_modules=("core_attn", "attn_proj"), **FEWEST)
    first, without = offloaded.ranks[0], plain.ranks[0]
    moved = first.moved_bytes["to device"]
    assert first.moved_bytes["to host"] == moved + READ
    assert moved % STATE == 0
    of_a_microbatch = 4 * 5 * STATE
    assert 3 * of_a_microbatch <= moved < 4 * of_a_microbatch  # all but the last backward's last layer
    assert without.peak() - first.peak() >= of_a_microbatch  # two microbatches are underway


@pytest.mark.parametrize(("label", "states"), [("expert_fc1", 1), ("moe_act", 2)])
def test_modules_of_experts_are_offloaded(launcher: Launcher, label: str, states: int) -> None:
    moe = Moe(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=512, moe_grouped_gemm=True)
    shape = {"model": Model(num_layers=4, hidden_size=512, num_attention_heads=8, activation="swiglu", moe=moe)}
    (plain,) = measured(launcher, **shape).ranks
    (rank,) = measured(launcher, **shape, offload_modules=(label,), **FEWEST).ranks
    moved = {way: count - plain.moved_bytes[way] for way, count in rank.moved_bytes.items()}
    assert set(moved.values()) == {3 * 2 * states * STATE}  # every token goes to two experts
    assert rank.peak() < plain.peak()


def test_offload_that_moves_nothing_allocates_as_without_it(launcher: Launcher, control: Measurement) -> None:
    recipe = RECIPE.but(offload_modules=("core_attn",), min_offloaded_tensor_size=2**40)
    (rank,), (plain,) = launcher.measure(recipe, count_flops=False).ranks, control.ranks
    assert (rank.allocations, rank.moved_bytes) == (plain.allocations, plain.moved_bytes)


def test_labels_that_megatron_refuses_are_refused(launcher: Launcher) -> None:
    assert constraints(launcher, offload_modules=("attention",)) == ("fine-grained-offload-label-unknown",)
    assert constraints(launcher, offload_modules=("attn_proj",)) == ("fine-grained-offload-attn-proj-alone",)


# --- optimizer -------------------------------------------------------------------------------------------------------


def sharded(launcher: Launcher, **changes: object) -> Measurement:
    recipe = RECIPE.but(dp=2, distributed_optimizer=True, vocab_size=1024, **changes)
    result = launcher.measure(recipe, ranks=[0], count_flops=False)
    assert result.failure is None, result.failure.message
    return result


@pytest.fixture(scope="module")
def sharded_control(launcher: Launcher) -> Measurement:
    return sharded(launcher)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
def test_an_offloaded_optimizer_leaves_gradients_and_parameters_on_the_device(
    launcher: Launcher, sharded_control: Measurement, overlap: bool
) -> None:
    offloaded = sharded(launcher, optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=overlap)
    (rank,), (plain,) = offloaded.ranks, sharded_control.ranks
    share = 4 * RECIPE.but(vocab_size=1024).model.num_parameters // 2  # bytes in fp32
    assert rank.moved_bytes == {"to host": share + READ, "to device": share}
    assert rank.host_peak is not None
    assert rank.host_peak >= share
    resting = [r.phases[-1].resting["allocated"] for r in (plain, rank)]
    assert 3 * share <= resting[0] - resting[1] < 3.2 * share  # main parameters and both averages; blocks are rounded
    assert [a for a in offloaded.assumptions if a.startswith("optimizer offload")]


def test_a_fraction_of_the_optimizer_is_offloaded_in_whole_parameters(
    launcher: Launcher, sharded_control: Measurement
) -> None:
    (rank,) = sharded(launcher, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5).ranks
    model = RECIPE.but(vocab_size=1024).model
    half, largest = 4 * model.num_parameters // 4, 4 * 2 * model.ffn_size * model.hidden_size
    moved = rank.moved_bytes["to device"]
    assert half <= moved < half + largest
    on_device = rank.phases[-1].resting["allocated"]
    resting = sharded_control.ranks[0].phases[-1].resting["allocated"]
    assert 3 * moved <= resting - on_device < 3.3 * moved


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_the_host_optimizer_without_arithmetic_holds_what_the_real_one_holds(
    megatron_model, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import megatron.core.optimizer as megatron_optimizer
    import torch
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from pytest_mbmem.megatron import offload

    changes = {"dp": 2, "distributed_optimizer": True} if kind == "adam" else {"precision": "fp32"}
    recipe = RECIPE.but(optimizer_cpu_offload=True, kind=kind, attention_backend="unfused", **changes)

    def held() -> tuple[list[object], int]:
        live = megatron_model(recipe)
        live.step()
        (optimizer,) = [part.optimizer for part in live.optimizer.chained_optimizers]
        states = [
            (name, tuple(value.shape), value.dtype, value.device.type, value.is_pinned())
            for half in (*optimizer.cpu_optimizers, optimizer)
            for parameter in (p for group in half.param_groups for p in group["params"])
            for name, value in sorted({"parameter": parameter, **half.state[parameter]}.items())
            if isinstance(value, torch.Tensor)
        ]
        on_device = torch.cuda.memory_allocated()
        del optimizer
        live.close()
        return states, on_device

    light = held()
    assert len(light[0]) > 50
    monkeypatch.setattr(offload, "leave_out_host_values", lambda: None)
    monkeypatch.setattr(megatron_optimizer, "CPUAdam", torch.optim.AdamW)
    monkeypatch.setattr(megatron_optimizer, "CPUSGD", torch.optim.SGD)
    monkeypatch.setattr(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", offload._with_values)
    assert held() == light


@pytest.mark.parametrize(
    ("changes", "constraint"),
    [
        ({}, "optimizer-offload-without-distributed-optimizer"),
        ({"kind": "sgd"}, "optimizer-offload-without-distributed-optimizer"),
        (
            {"precision": "fp32", "attention_backend": "unfused", "dp": 2, "distributed_optimizer": True},
            "optimizer-offload-in-fp32-with-distributed-optimizer",
        ),
    ],
    ids=["bf16", "sgd", "fp32"],
)
def test_an_optimizer_that_megatron_breaks_on_is_refused(
    launcher: Launcher, changes: dict[str, object], constraint: str
) -> None:
    assert constraint in constraints(launcher, optimizer_cpu_offload=True, **changes)
