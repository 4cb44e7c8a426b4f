"""Measurements on GPUs that stand in for real ones: joint and solo ranks, the virtual twin, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gpu_stand_ins import share_server, stand_ins

from pytest_mbmem.errors import CannotRunSolo, TooFewGpus, UserError
from pytest_mbmem.measure import foreign, gpu_launch
from pytest_mbmem.measure.gpu_launch import GpuLauncher, without_recompute
from pytest_mbmem.measure.launch import Launcher, recipe_environment
from pytest_mbmem.measure.nvml import machine
from pytest_mbmem.measure.parts import is_about_peers
from pytest_mbmem.measure.workers import CallResult, Workers
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.options import RanksMode
from pytest_mbmem.recipe import Moe, Recipe
from pytest_mbmem.te import installation
from pytest_mbmem.throughput import Timing
from pytest_mbmem.virtual_gpu.gpus import load_gpus

MIB = 2**20
Make = Callable[..., GpuLauncher]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> Make:
    """Makes a launcher on stand-ins of this description, with calls in forks of the session's server."""
    share_server(monkeypatch, launcher)
    monkeypatch.setattr(gpu_launch, "GRACE", 0.5)

    def make(mode: RanksMode = "auto", timeout: float = 60.0, occupied: Any = lambda: None, **gpus: Any) -> GpuLauncher:
        stand_ins(monkeypatch, **{"gpu": "l4-24gb", "count": 2, "elapsed_ms": [500, 100, 110, 90], **gpus})
        return GpuLauncher(machine(), load_gpus(), timeout=timeout, mode=mode, occupied=occupied)

    return make


def peaks(measurement: Measurement) -> dict[int, int]:
    return {rank.rank: rank.peak() for rank in measurement.ranks}


SPLITS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tp": 2},
    "tp-sp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "global_batch_size": 2},
    "dp": {"dp": 2, "distributed_optimizer": True, "global_batch_size": 2},
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_joint_ranks_hold_what_each_holds_alone(gpus: Make, small_recipe: Recipe, split: dict[str, Any]) -> None:
    """Through PyTorch's own NCCL groups in several processes, and through its fake group in one: the same bytes."""
    recipe = small_recipe.but(**split)
    measurement = gpus().measure(recipe, ranks="all")
    assert (measurement.failure, measurement.mode) == (None, "joint")
    assert measurement.twin is not None
    assert measurement.twin.failure is None
    assert len(measurement.ranks) == recipe.world_size
    assert peaks(measurement) == peaks(measurement.twin)
    assert (measurement.device.virtual, measurement.twin.device.virtual) == (False, True)
    assert measurement.device.key == "stand-in-nvidia-l4-22gib"
    assert measurement.twin.device.key == "virtual-stand-in-nvidia-l4-22gib"
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


def test_figures_of_a_real_gpu(gpus: Make, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    measurement = gpus().measure(recipe, timing=Timing(steps=3, warmup=1))
    (rank,) = measurement.ranks
    context = load_gpus()["l4-24gb"].context_bytes
    assert rank.device_used == rank.peak("reserved") + context
    assert rank.outside == {"CUDA context": context, "NCCL and others": 0}
    assert rank.cold_step == 0.5
    assert rank.step_times == (0.11, 0.09, 0.09)
    assert rank.flops_per_step is not None
    assert rank.model_flops is not None
    assert rank.model_flops < rank.flops_per_step
    assert {"driver", "CUDA", "NCCL", "torch", "megatron-core", "ranks"} <= set(measurement.environment)


def test_memory_of_the_last_phase_counts(gpus: Make, small_recipe: Recipe) -> None:
    """Optimizer state, which the only step makes at its end, makes PyTorch reserve most."""
    (rank,) = gpus().measure(small_recipe.but(steps=1, vocab_size=20_000)).ranks
    assert rank.peak("reserved", "optimizer") > rank.peak("reserved", "backward")
    assert rank.device_used == rank.peak("reserved") + load_gpus()["l4-24gb"].context_bytes


def test_ranks_that_are_named_are_those_reported(gpus: Make, small_recipe: Recipe) -> None:
    measurement = gpus().measure(small_recipe.but(tp=2), ranks=[1])
    assert (measurement.mode, [rank.rank for rank in measurement.ranks]) == ("joint", [1])
    assert measurement.twin is not None
    assert [rank.rank for rank in measurement.twin.ranks] == [1]


def test_every_rank_of_a_joint_job_has_a_twin(gpus: Make, small_recipe: Recipe) -> None:
    measurement = gpus().measure(small_recipe.but(tp=2))
    assert measurement.twin is not None
    assert [rank.rank for rank in measurement.twin.ranks] == [0, 1]


def test_the_twin_itself_has_no_times(gpus: Make, small_recipe: Recipe) -> None:
    twin = gpus().measure(small_recipe).twin
    assert twin is not None
    assert [(rank.cold_step, rank.step_times, rank.device_used) for rank in twin.ranks] == [(None, (), None)]


def test_the_recipe_without_recompute(small_recipe: Recipe) -> None:
    full = small_recipe.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert without_recompute(full) == small_recipe
    assert without_recompute(small_recipe) == small_recipe


# How many GPUs --------------------------------------------------------------------------------------------------------


def test_with_fewer_gpus_than_ranks_each_rank_runs_alone(gpus: Make, small_recipe: Recipe) -> None:
    measurement = gpus().measure(small_recipe.but(tp=2, pp=2, global_batch_size=2))
    assert (measurement.failure, measurement.mode) == (None, "solo")
    assert [rank.rank for rank in measurement.ranks] == [0, 2]
    assert any(note.startswith("solo: each measured rank of 4 ran alone") for note in measurement.notes)


def test_joint_ranks_that_are_asked_for_need_their_gpus(gpus: Make, small_recipe: Recipe) -> None:
    with pytest.raises(TooFewGpus, match="the recipe's job has 4 ranks, and 2 stand-in NVIDIA L4 can be used here"):
        gpus("joint").measure(small_recipe.but(tp=4))


def test_solo_ranks_that_are_asked_for_leave_gpus_unused(gpus: Make, small_recipe: Recipe) -> None:
    measurement = gpus("solo").measure(small_recipe.but(tp=2))
    assert (measurement.mode, len(measurement.ranks)) == ("solo", 1)


def test_experts_do_not_run_alone(gpus: Make, small_recipe: Recipe) -> None:
    model = replace(small_recipe.model, moe=Moe(num_moe_experts=8, moe_router_topk=2))
    recipe = replace(small_recipe, model=model).but(ep=4, dp=4, global_batch_size=4)
    problem = "solo ranks cannot know how many tokens the others send to an expert"
    with pytest.raises(TooFewGpus, match=problem):
        gpus().measure(recipe)
    with pytest.raises(CannotRunSolo, match=problem):
        gpus("solo").measure(recipe)


def test_without_transformer_engine_its_recipes_are_refused_before_anything_runs(
    gpus: Make, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find", lambda: None)
    with pytest.raises(
        UserError, match="'transformer_engine' on a real GPU needs Transformer Engine, which is not inst"
    ):
        gpus().measure(small_recipe.but(transformer_impl="transformer_engine"))


# The environment ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8"),
        ("NCCL_GRAPH_REGISTER", "0"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_the_recipe_sets_the_environment(gpus: Make, small_recipe: Recipe, name: str, value: str) -> None:
    environment = {name: value} if not name.startswith("PYTORCH") else {}
    recipe = small_recipe.but(alloc_conf="expandable_segments:True", environment=environment)
    (result,) = gpus().call_all([("os:getenv", {"key": name})], recipe_environment(recipe), 30)
    assert result.value == value


def test_what_transformer_engine_reads_at_its_import_needs_a_server_of_its_own(
    gpus: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    variable = "NVTE_FLASH_ATTN"
    monkeypatch.setattr(Workers, "close", lambda own: ended.append(own.command_environment().get(variable, "")))
    launcher, question = gpus(), [("os:getenv", {"key": "NVTE_FLASH_ATTN"})]
    environments: list[dict[str, str]] = [{}, {"NVTE_FLASH_ATTN": "0"}, {"NVTE_FLASH_ATTN": "0"}]
    answers = [launcher.call_all(question, environment, 60)[0].value for environment in environments]
    assert answers == [None, "0", "0"]
    assert ended == [""]  # once, and the next one begins with the variable
    assert launcher.command_environment()["NVTE_FLASH_ATTN"] == "0"


def test_the_server_is_told_no_gpu_and_inherits_a_clusters_network(gpus: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    environment = gpus().command_environment()
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"
    assert "CUDA_VISIBLE_DEVICES" not in environment


# What goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("die", "died", "the worker was killed by SIGKILL"),
        ("hang", "timeout", "no result within 20 s"),
        ("lose peer", "error", "DistBackendError"),
    ],
)
def test_a_rank_that_fails_names_itself_and_ends_the_others(
    gpus: Make, small_recipe: Recipe, fault: str, kind: str, message: str
) -> None:
    launcher = gpus(timeout=20.0, fault={"kind": fault, "device": 1, "after_launches": 100})
    failure = launcher.measure(small_recipe.but(tp=2)).failure
    assert failure is not None
    assert (failure.kind, failure.rank) == (kind, 1)
    assert message in failure.message


def test_a_rank_that_runs_out_of_memory_is_the_one_that_is_named(gpus: Make, small_recipe: Recipe) -> None:
    launcher = gpus(capacity="1100 MiB")
    recipe = small_recipe.but(pp=2, vocab_size=400_000, global_batch_size=2)  # the last stage has the logits
    measurement = launcher.measure(recipe)
    assert measurement.failure is not None
    assert (measurement.failure.kind, measurement.failure.rank) == ("out of memory", 1)
    assert measurement.failure.message.startswith("CUDA out of memory. Tried to allocate")
    explained = launcher.explain(measurement).failure
    assert explained is not None
    assert explained.shortage is not None
    assert explained.shortage.diagnosis is not None


@pytest.mark.parametrize(("after", "when"), [(0, "before"), (100, "during")])
def test_another_process_makes_a_measurement_worthless(gpus: Make, small_recipe: Recipe, after: int, when: str) -> None:
    other = {"device": 0, "pid": 4242, "bytes": "2 GiB", "after_launches": after}
    failure = gpus(foreign=[other], count=1).measure(small_recipe).failure
    assert failure is not None
    assert failure.kind == "disturbed"
    assert failure.message.startswith(f"{when} the measurement other processes use GPU 0 (GPU-")
    assert failure.message.endswith("4242 with 2.00 GiB")


def test_another_process_that_is_there_afterwards_does_too(
    gpus: Make, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([None, "other processes use GPU 0"])
    monkeypatch.setattr(foreign, "problem", lambda gpu, ours: next(answers))
    failure = gpus(count=1).measure(small_recipe).failure
    assert failure is not None
    assert (failure.kind, failure.message) == ("disturbed", "after the measurement other processes use GPU 0")


def test_memory_that_this_process_holds_does_too(gpus: Make, small_recipe: Recipe) -> None:
    measurement = gpus(occupied=lambda: "test_a left 3 GiB").measure(small_recipe)
    assert measurement.failure is not None
    assert (measurement.failure.kind, measurement.failure.message) == ("disturbed", "test_a left 3 GiB")
    assert measurement.ranks == ()


def test_without_a_twin_there_is_a_note(
    gpus: Make, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    class None_:
        def measure(self, *_: Any, **__: Any) -> Measurement:
            raise UserError("no C compiler")

        def close(self) -> None:
            pass

    monkeypatch.setattr(gpu_launch, "Launcher", lambda gpu, *, timeout: None_())
    measurement = gpus().measure(small_recipe)
    assert (measurement.failure, measurement.twin) == (None, None)
    assert "no virtual twin: no C compiler" in measurement.notes
    assert [rank.model_flops for rank in measurement.ranks] == [None]
    idle = small_recipe.but(recompute_granularity="selective", recompute_modules=("moe",))
    failure = gpus().measure(idle).failure  # what the built model alone tells
    assert failure is not None
    verdict = "memory.recompute_modules 'moe': requested, not effective: no experts in the 2 layers (rank 0)"
    assert (failure.kind, failure.message) == ("no effect", verdict)
    assert gpus().measure(idle, check_effects=False).failure is None


def test_what_has_no_effect_on_the_twin_has_none(gpus: Make, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(recompute_granularity="selective", recompute_modules=("core_attn", "moe"))
    failure = gpus().measure(recipe).failure
    assert failure is not None
    assert failure.kind == "no effect"
    assert failure.message.startswith("on the virtual twin: memory.recompute_modules 'moe'")


def test_what_runs_without_a_measurement_is_refused_beside_another_process(gpus: Make) -> None:
    other = {"device": 0, "pid": 4242, "bytes": "2 GiB"}
    with pytest.raises(UserError, match="--mbmem-gpu: invalid: before the measurement other processes use GPU 0"):
        gpus(foreign=[other], count=1).call_all([("os:getcwd", {})], {}, 30)


@pytest.mark.parametrize(
    ("result", "about_peers"),
    [
        (CallResult(failure="lost peer"), True),
        (
            CallResult(failure="error", message="Traceback\n  use_gloo_process_groups=False)\nValueError: NCCL error"),
            False,
        ),
        (CallResult(failure="error", message="Traceback\ntorch.distributed.DistBackendError: NCCL error in: x"), True),
        (
            CallResult(failure="died", message="the worker was killed by SIGABRT", output="ProcessGroupNCCL watchdog"),
            True,
        ),
        (CallResult(failure="died", message="the worker was killed by SIGABRT", output="free(): invalid"), False),
        (CallResult(failure="died", message="the worker was killed by SIGKILL", output="ProcessGroupNCCL"), False),
    ],
)
def test_the_failure_of_a_peer_is_told_from_a_failure_of_ones_own(result: CallResult, about_peers: bool) -> None:
    assert is_about_peers(result) is about_peers
