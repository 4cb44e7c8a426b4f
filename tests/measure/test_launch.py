"""Measurements in worker processes: what they yield, and how they end when something goes wrong."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

MIB = 2**20


def test_the_same_recipe_measures_the_same_bytes_every_time(launcher: Launcher, small_recipe: Recipe) -> None:
    assert launcher.measure(small_recipe) == launcher.measure(small_recipe)


def test_a_measurement_survives_json(launcher: Launcher, small_recipe: Recipe) -> None:
    measurement = launcher.measure(small_recipe)
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


def test_every_step_goes_through_its_phases_in_order(launcher: Launcher, small_recipe: Recipe) -> None:
    (rank,) = launcher.measure(small_recipe).ranks
    step = ["forward", "backward", "grad-sync", "optimizer"]
    assert [(p.step, p.phase) for p in rank.phases] == [(0, "build"), *((s, p) for s in (1, 2) for p in step)]
    for phase in rank.phases:
        for metric, peak in phase.peak.items():
            assert peak >= phase.resting[metric]
        assert phase.peak["reserved"] >= phase.peak["active"] >= phase.peak["allocated"] > 0


def test_optimizer_state_appears_in_step_one(launcher: Launcher, small_recipe: Recipe) -> None:
    (rank,) = launcher.measure(small_recipe).ranks
    resting = {(p.step, p.phase): p.resting["allocated"] for p in rank.phases}
    parameters = small_recipe.model.num_parameters
    padding = small_recipe.model.padded_vocab_size(1) - small_recipe.model.vocab_size
    trained = parameters + 2 * padding * small_recipe.model.hidden_size  # two untied embeddings
    grown = resting[1, "optimizer"] - resting[1, "grad-sync"]
    tensors = 4 * 2 + 2 + 1 + 2 * 2 * 2  # a generous count of parameters: each rounds two moments and a step counter up
    assert 0 <= grown - 2 * 4 * trained <= tensors * 4 * 512
    assert abs(resting[2, "optimizer"] - resting[1, "optimizer"]) <= 2 * 512  # scalars alone come and go


def test_flops_are_those_of_the_matrix_multiplications(launcher: Launcher, small_recipe: Recipe) -> None:
    model, training = small_recipe.model, small_recipe.training
    tokens = training.micro_batch_size * training.seq_length
    h, s, vocab = model.hidden_size, training.seq_length, model.padded_vocab_size(1)
    linear = model.num_layers * (4 * h * h + 2 * h * 4 * h) + vocab * h
    attention = model.num_layers * 2 * s * h
    assert launcher.measure(small_recipe).flops_per_step == 3 * 2 * tokens * (linear + attention)


def test_counting_is_left_out_on_request(launcher: Launcher, small_recipe: Recipe) -> None:
    assert launcher.measure(small_recipe, count_flops=False).flops_per_step is None


def test_collectives_are_counted_by_group(launcher: Launcher, small_recipe: Recipe) -> None:
    sent = launcher.measure(small_recipe.but(tp=2, dp=2)).ranks[0].collective_bytes
    assert set(sent) == {"dp", "tp", "model"}  # "model": the gradient norm
    model, training = small_recipe.model, small_recipe.training
    activation = training.seq_length * training.micro_batch_size * model.hidden_size * 2  # bytes, bf16
    # forward: attention, MLP of each layer and the embedding; backward: the layers' inputs and the output layer's
    assert sent["tp"] >= activation * (2 * model.num_layers + 1 + 2 * model.num_layers + 1)


def test_pipeline_stages_hold_less_the_later_they_are(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(num_layers=8, pp=4, global_batch_size=8, vocab_size=128)
    retained = [r.peak_phase(phase="forward").peak["allocated"] for r in launcher.measure(recipe).ranks]
    assert len(retained) == 4
    assert retained[0] > retained[1] > retained[2]


def test_out_of_memory_is_a_failure_with_pytorchs_message(small_recipe: Recipe) -> None:
    tiny = load_gpus()["l4-24gb"]
    launcher = Launcher(tiny, timeout=120)
    try:
        recipe = small_recipe.but(hidden_size=8192, num_attention_heads=64, num_layers=8)
        measurement = launcher.measure(recipe)
    finally:
        launcher.close()
    assert measurement.failure is not None
    assert measurement.failure.kind == "out of memory"
    assert "CUDA out of memory. Tried to allocate" in measurement.failure.message
    assert (measurement.failure.step, measurement.failure.phase) == (0, "build")


def test_the_allocator_follows_the_recipe_and_not_the_callers_shell(
    launcher: Launcher, small_recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = small_recipe.but(hidden_size=1024, seq_length=1024)
    plain = launcher.measure(wide, count_flops=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert launcher.measure(wide, count_flops=False) == plain
    expandable = launcher.measure(wide.but(alloc_conf="expandable_segments:True"), count_flops=False)
    assert expandable.peak("reserved") < plain.peak("reserved")


@pytest.mark.parametrize("settings", ["nonsense:1", "max_non_split_rounding_mb:1", "max_split_size_mb:1"])
def test_allocator_settings_that_pytorch_refuses_are_named(
    launcher: Launcher, small_recipe: Recipe, settings: str
) -> None:
    failure = launcher.measure(small_recipe.but(alloc_conf=settings)).failure
    assert failure is not None
    assert failure.message.startswith(f"memory.alloc_conf: PyTorch refuses {settings!r}: ")
    assert "Traceback" not in failure.message


def test_operators_that_torch_has_in_triton_too_take_their_aten_kernels(
    launcher: Launcher, small_recipe: Recipe
) -> None:
    assert launcher.measure(small_recipe.but(seq_length=1, precision="fp32")).failure is None  # outer products


def test_a_worker_that_dies_is_a_result(launcher: Launcher) -> None:
    assert launcher.call("os:abort", {}).message == "the worker was killed by SIGABRT"
    assert launcher.call("os:_exit", {"status": 3}).failure == "died"
    assert launcher.call("math:sqrt", {}).failure == "error"  # and the server lives on


def test_a_worker_that_hangs_is_ended_with_all_it_started(launcher: Launcher, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; sleep 60"
    result = launcher.call("subprocess:check_call", {"args": ["sh", "-c", script]}, timeout=1.0)
    assert (result.failure, result.message) == ("timeout", "no result within 1 s")
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(pid)


def test_a_worker_that_hangs_says_where(launcher: Launcher) -> None:
    result = launcher.call("subprocess:check_call", {"args": ["sleep", "60"]}, timeout=1.0)
    assert "in check_call" in result.output
    assert "in _run" in result.output


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_closing_leaves_no_process_behind(small_recipe: Recipe) -> None:
    launcher = Launcher(load_gpus()["h100-80gb"])
    launcher.call("builtins:abs", {})  # starts the server (abs itself refuses keyword-free calls)
    assert launcher._server is not None
    pid = launcher._server.pid
    launcher.close()
    assert not _alive(pid)


def test_a_call_after_close_starts_afresh(launcher: Launcher) -> None:
    launcher.close()
    assert launcher.call("os:getcwd", {}).value == os.getcwd()  # noqa: PTH109


def test_what_a_call_prints_is_its_output(launcher: Launcher) -> None:
    assert launcher.call("pprint:pprint", {"object": "héllo"}).output == "'héllo'\n"


def test_a_recipe_that_cannot_be_measured_yet_is_refused_before_anything_starts(small_recipe: Recipe) -> None:
    launcher = Launcher(load_gpus()["h100-80gb"])
    with pytest.raises(UserError, match=r"cannot be measured yet: parallelism\.cp with"):
        launcher.measure(small_recipe.but(cp=2))
    assert launcher._server is None


def test_several_recipes_are_measured_as_each_alone(launcher: Launcher, small_recipe: Recipe) -> None:
    recipes = [small_recipe, small_recipe.but(alloc_conf="expandable_segments:True"), small_recipe.but(seq_length=64)]
    assert launcher.measure_many(recipes) == [launcher.measure(recipe) for recipe in recipes]
    assert launcher.measure_many([]) == []


# Calls that need each other -------------------------------------------------------------------------------------------


def _sh(script: str, environment: Mapping[str, str] | None = None) -> tuple[str, dict[str, Any], Mapping[str, str]]:
    return "subprocess:check_output", {"args": ["sh", "-c", script], "text": True}, environment or {}


def test_calls_that_need_each_other_run_at_once_each_in_its_environment(launcher: Launcher, tmp_path: Path) -> None:
    both = f"[ -e {tmp_path}/a ] && [ -e {tmp_path}/b ]"
    meet = f"echo $WHO > {tmp_path}/$WHO; until {both}; do sleep 0.01; done; echo $WHO"
    results = launcher.call_together([_sh(meet, {"WHO": who}) for who in ("a", "b")], 60, 1)
    assert [result.value for result in results] == ["a\n", "b\n"]


@pytest.mark.parametrize("fault", ["exit 3", "kill -9 $PPID"], ids=["error", "dies"])
def test_when_one_fails_those_that_wait_for_it_are_ended(launcher: Launcher, tmp_path: Path, fault: str) -> None:
    hangs = f"echo $$ > {tmp_path}/pid; sleep 600"
    waits = f"until [ -e {tmp_path}/pid ]; do sleep 0.01; done; {fault}"
    lost, failed, done = launcher.call_together([_sh(hangs), _sh(waits), _sh("echo done")], 300, 0.2)
    assert (lost.failure, lost.message) == ("lost peer", "no result within 0.2 s after another rank had failed")
    assert failed.failure == ("error" if fault == "exit 3" else "died")
    assert failed.order < lost.order
    assert done.value == "done\n"
    assert not _alive(int((tmp_path / "pid").read_text()))


def test_a_failure_among_other_calls_ends_none_of_them(launcher: Launcher) -> None:
    arguments = [{"args": ["sh", "-c", script]} for script in ("exit 3", "sleep 0.3")]
    first, second = launcher.call_all([("subprocess:check_call", a) for a in arguments], {}, 60)
    assert (first.failure, second.failure) == ("error", None)
