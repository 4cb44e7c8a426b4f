"""pytest --mbmem-gpu as a user sees it, on GPUs that stand in for real ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_stand_ins import stand_ins

from pytest_mbmem.history.snapshot import read_snapshot

MEASURES = """\
import pytest

@pytest.mark.peak_memory
def test_one(mbmem):
    assert mbmem.measure("recipe.yaml").mode == "joint"
"""

PAIR = """\
import pytest

@pytest.mark.peak_memory(limit="1 GiB")
def test_two(mbmem):
    measurement = mbmem.measure(recipe(2))
    print("measured", measurement.mode, [rank.rank for rank in measurement.ranks])

def recipe(tp):
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    return {"model": model, "parallelism": {"tp": tp}, "training": {"seq_length": 64}}
"""


def run_outside(
    folder: Path, *arguments: str, command: tuple[str, ...] = ("-m", "pytest"), **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own; the stand-ins are in the environment, where None removes a variable."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *command, "-p", "no:randomly", *arguments],
        cwd=folder,
        env={name: value for name, value in environment.items() if value is not None},
        capture_output=True,
        text=True,
        check=False,
    )


# One process ----------------------------------------------------------------------------------------------------------


def test_baselines_are_the_gpus_own(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(MEASURES)
    result = gpu_project.runpytest("--mbmem-gpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["mbmem device: stand-in-nvidia-l4-22gib, 2 x stand-in NVIDIA L4, ranks: auto"])
    result.stdout.fnmatch_lines(["MISSING: peak allocated has no baseline on stand-in-nvidia-l4-22gib"])
    gpu_project.runpytest("--mbmem-gpu", "--mbmem-update=new").assert_outcomes(passed=1)
    gpu_project.runpytest("--mbmem-gpu").assert_outcomes(passed=1)
    assert [path.name for path in gpu_project.path.joinpath("baselines").iterdir()] == ["stand-in-nvidia-l4-22gib"]
    gpu_project.runpytest().assert_outcomes(failed=1)  # the virtual GPU has none


def test_the_virtual_twin_is_shown_beside_the_gpu(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(MEASURES)
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-update=new", "--mbmem-json=out.json")
    result.stdout.fnmatch_lines(
        [
            "virtual against real:",
            "test * rank  metric * real * virtual  difference *",
            "*test_one *0  allocated * +0 B  +0.00%",
            "*test_one *0  reserved * +0 B  +0.00%",
        ]
    )
    (test,) = json.loads(gpu_project.path.joinpath("out.json").read_text())["tests"]
    measurement = test["measurements"][0]["measurement"]
    assert (measurement["device"]["virtual"], measurement["twin"]["device"]["virtual"]) == (False, True)


def test_joint_ranks_when_there_are_gpus_enough(gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_project.makepyfile(PAIR)
    gpu_project.runpytest("--mbmem-gpu", "-s").stdout.fnmatch_lines(["*measured joint [[]0, 1]*"])
    gpu_project.runpytest("--mbmem-gpu", "-s", "--mbmem-ranks=solo").stdout.fnmatch_lines(["*measured solo [[]0]*"])
    stand_ins(monkeypatch, gpu="l4-24gb", count=1)
    gpu_project.runpytest("--mbmem-gpu", "-s").stdout.fnmatch_lines(["*measured solo [[]0]*"])


def test_too_few_gpus_are_a_visible_skip_or_a_failure(
    gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb", count=1)
    gpu_project.makepyfile(PAIR)
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-ranks=joint", "-rs")
    result.assert_outcomes(skipped=1)
    reason = "too few GPUs: the recipe's job has 2 ranks, and 1 stand-in NVIDIA L4 can be used here*"
    result.stdout.fnmatch_lines([f"SKIPPED * {reason}"])
    result.stdout.fnmatch_lines(["1 test was skipped: too few GPUs; --mbmem-require-gpus makes that a failure"])
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-ranks=joint", "--mbmem-require-gpus")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"--mbmem-require-gpus: {reason}"])


NEEDS_TWO = (
    PAIR.replace("def test_two(mbmem):", 'def test_two(mbmem):\n    mbmem.measure(recipe(1), name="one")')
    + """
@pytest.mark.peak_memory(limit="1 GiB")
@pytest.mark.memory_saving({"tp": 2})
def test_control(mbmem):
    mbmem.measure(recipe(1))
"""
)


def test_a_gate_that_failed_is_not_skipped_for_want_of_gpus(
    gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb", count=1)
    gpu_project.makepyfile(NEEDS_TWO.replace("1 GiB", "1 MiB"))
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-ranks=joint")
    result.assert_outcomes(failed=2)
    assert result.stdout.str().count("\nREGRESSION: peak allocated ") == 2
    assert result.stdout.str().count("\ntoo few GPUs: the recipe's job has 2 ranks") == 2


def test_what_is_skipped_for_want_of_gpus_gets_no_baseline(
    gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb", count=1)
    gpu_project.makepyfile(NEEDS_TWO.replace('(limit="1 GiB")', ""))
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-ranks=joint", "--mbmem-update=new")
    result.assert_outcomes(skipped=2)
    assert not gpu_project.path.joinpath("baselines").exists()


def test_solo_ranks_that_mean_nothing_are_a_failure(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(
        PAIR.replace('{"tp": tp}', '{"dp": 2, "ep": 2}').replace("1000}", '1000, "moe": {"num_moe_experts": 4}}')
    )
    result = gpu_project.runpytest("--mbmem-gpu", "--mbmem-ranks=solo")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *CannotRunSolo: solo ranks cannot know how many tokens *"])


def test_a_disturbed_run_is_invalid(gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = [{"device": 0, "pid": 4242, "bytes": "2 GiB", "after_launches": 100}]
    stand_ins(monkeypatch, gpu="l4-24gb", foreign=foreign)
    gpu_project.makepyfile(MEASURES)
    result = gpu_project.runpytest("--mbmem-gpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*disturbed on rank 0*other processes use GPU 0*4242 with 2.00 GiB"])
    result.stdout.fnmatch_lines(["*test_one * invalid"])


def test_throughput_is_gated(gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_project.makepyfile(MEASURES.replace("peak_memory", "throughput(steps=4, warmup=1)"))
    gpu_project.runpytest("--mbmem-gpu", "--mbmem-update=new").assert_outcomes(passed=1)
    gpu_project.runpytest("--mbmem-gpu").assert_outcomes(passed=1)
    stand_ins(monkeypatch, gpu="l4-24gb", count=2, elapsed_ms=[500, 120])
    result = gpu_project.runpytest("--mbmem-gpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["REGRESSION: throughput *", "*step *120.00 ms, the median of 4*"])


def test_a_whole_test_runs_on_one_gpu(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(
        """\
        import os
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_it():
            import torch  # in the worker alone: pytester forgets modules, and torch cannot be loaded twice
            assert torch.cuda.device_count() == 1
            assert os.environ["CUDA_VISIBLE_DEVICES"].startswith("GPU-")
            torch.zeros(2**20, device="cuda")
        """
    )
    result = gpu_project.runpytest("--mbmem-gpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_it *<= 1.00 GiB *4.00 MiB * pass"])


def test_a_debugged_test_holds_the_one_gpu_that_it_sees(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(
        """\
        import pytest
        from pytest_mbmem.errors import UserError
        from pytest_mbmem.measure import gpu_locks, nvml

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_it():
            import torch  # in the worker alone, as above

            (gpu,) = nvml.machine().gpus
            assert torch.cuda.device_count() == 1
            with pytest.raises(UserError, match="is held by"), gpu_locks.held([gpu], 1, 0):
                pass
            torch.zeros(2**20, device="cuda")
        """
    )
    gpu_project.runpytest("--mbmem-gpu", "--pdb").assert_outcomes(passed=1)


def test_comparisons_and_growth_run_on_it_too(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(
        """\
        import pytest

        FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

        @pytest.mark.no_memory_growth
        def test_growth(mbmem):
            mbmem.measure("recipe.yaml")

        def test_saving(mbmem):
            comparison = mbmem.compare("recipe.yaml", FULL)
            assert comparison.candidate.device.key == "stand-in-nvidia-l4-22gib"
            assert comparison.after < comparison.before

        @pytest.mark.fits
        @pytest.mark.fits("h100-80gb")
        def test_fits(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    gpu_project.runpytest("--mbmem-gpu").assert_outcomes(passed=3)


# Processes of their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"MBMEM_TEST_STAND_INS": None}, "--mbmem-gpu: there is no NVIDIA driver here *"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "--mbmem-gpu: CUDA_VISIBLE_DEVICES='' hides all GPUs. *"),
        ({"CUDA_VISIBLE_DEVICES": "0,5"}, "--mbmem-gpu: CUDA_VISIBLE_DEVICES='0,5': '5' is beyond the last GPU. *"),
        (
            {"MBMEM_TEST_STAND_INS": '{"gpu": "l4-24gb", "driver_cuda": "11.8"}'},
            "--mbmem-gpu: the NVIDIA driver * is too old*",
        ),
        ({"RANK": "x", "TORCHELASTIC_RUN_ID": "1"}, "RANK='x': torchrun sets it to a whole number*"),
    ],
    ids=["no driver", "hidden", "unknown", "old driver", "torchrun"],
)
def test_an_unusable_machine_is_one_error(
    gpu_project: pytest.Pytester, variables: dict[str, str | None], message: str
) -> None:
    gpu_project.makepyfile(MEASURES)
    before = set(gpu_project.path.iterdir())
    result = run_outside(gpu_project.path, "--mbmem-gpu", **variables)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert result.stdout == ""
    pytest.LineMatcher(result.stderr.splitlines()[:1]).fnmatch_lines([f"ERROR: {message}"])
    assert {path for path in gpu_project.path.iterdir() if path.name != "__pycache__"} == before


def test_workers_of_xdist_take_turns(gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb", count=1)
    gpu_project.makepyfile(
        """\
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        @pytest.mark.parametrize("number", range(3))
        def test_it(mbmem, number):
            mbmem.measure("recipe.yaml")
        """
    )
    result = run_outside(gpu_project.path, "--mbmem-gpu", "-p", "xdist", "-n", "2", "--dist", "worksteal")
    assert "3 passed" in result.stdout, result.stdout


TOGETHER = (
    PAIR
    + """
import os
import torch

@pytest.mark.peak_memory(limit="1 GiB")
def test_whole():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.zeros((1 + int(os.environ["RANK"])) * 2**20, device="cuda")

@pytest.mark.peak_memory(limit="1 GiB")
def test_model(megatron_model):
    megatron_model(recipe(2), rank=int(os.environ["RANK"])).step()

@pytest.mark.peak_memory
def test_recorded(mbmem):
    mbmem.measure("recipe.yaml")
"""
)


def together(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes of torchrun."""
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest")
    return run_outside(folder, "--mbmem-gpu", *arguments, command=command)


def test_torchruns_processes_are_the_ranks(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(TOGETHER)
    options = ("--mbmem-update=new", "--mbmem-json=out.json", "--mbmem-snapshots=snapshots", "-s")
    result = together(gpu_project.path, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("4 passed") == 1
    assert "2 processes of torchrun" in result.stdout
    results = {test["id"]: test["measurements"][0]["measurement"] for test in _tests(gpu_project.path / "out.json")}
    modes = {name.partition("::test_")[2]: measurement["mode"] for name, measurement in results.items()}
    assert modes == {"two": "joint", "whole": "joint", "model": "solo", "recorded": "joint"}
    assert [rank["rank"] for rank in results["test_it.py::test_two"]["ranks"]] == [0, 1]
    whole = results["test_it.py::test_whole"]
    assert [rank["phases"][0]["peak"]["allocated"] for rank in whole["ranks"]] == [4 * 2**20, 8 * 2**20]
    assert gpu_project.path.joinpath("baselines/stand-in-nvidia-l4-22gib/test_it.yaml").is_file()
    snapshots = sorted(gpu_project.path.joinpath("snapshots").iterdir())
    names = [re.sub("-[0-9a-f]{8}-", " ", path.stem.partition("test_it.py_test_")[2]) for path in snapshots]
    virtual = ["two rank0-virtual", "two rank1-virtual"]
    assert names == [
        "model rank0",
        "recorded rank0",
        *virtual,
        "whole rank0",
    ]  # a whole test's other rank ran elsewhere
    assert [event["size"] for event in read_snapshot(snapshots[-1]).events if event["action"] == "alloc"] == [4 * 2**20]
    (note,) = whole["notes"]
    assert note.startswith("--mbmem-snapshots: of rank 0 alone")


def test_without_the_option_torchrun_is_no_matter(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)  # with a store that pytest's processes could not share
    project.makepyfile("def test_x(): pass")
    project.runpytest("--mbmem-json=out.json").assert_outcomes(passed=1)
    assert project.path.joinpath("out.json").is_file()


def test_torchruns_processes_agree_on_a_rank_that_dies(
    gpu_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {"kind": "die", "device": 1, "after_launches": 100}
    stand_ins(monkeypatch, gpu="l4-24gb", count=2, fault=fault)
    gpu_project.makepyfile(PAIR)
    result = together(gpu_project.path, "--mbmem-timeout=60")
    assert "died on rank 1 (stand-in NVIDIA L4): the worker was killed by SIGKILL" in result.stdout, result.stdout
    assert result.stdout.count("1 failed") == 1
    assert "[rank 1] FAILED test_it.py::test_two" in result.stderr


APART = """\
import os

MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}

def measure(mbmem):
    mbmem.measure({"model": MODEL, "parallelism": {"tp": 2}, "training": {"seq_length": 64}})

def test_first(mbmem):
    assert os.environ["RANK"] == "0", "too early"
    measure(mbmem)

def test_second(mbmem):
    measure(mbmem)

def test_last(mbmem):
    assert os.environ["RANK"] == "0", "only here"
    measure(mbmem)
"""


def test_what_fails_in_one_process_of_torchrun_is_reported_by_the_first(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(APART)
    result = together(gpu_project.path, "--mbmem-timeout=60", "--mbmem-json=out.json")
    # It learns at once that the other one is elsewhere, and meets it there.
    assert "torchrun: this rank is at test_it.py::test_first, and rank 1 at test_it.py::test_second" in result.stdout
    assert "2 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "this rank is at test_it.py::test_last, and rank 1 at the end of its tests" in result.stdout
    assert "rank 1: test_it.py::test_last failed" in result.stdout
    assert "AssertionError: only here" in result.stdout
    assert gpu_project.path.joinpath("out.json").is_file()


def _tests(path: Path) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = json.loads(path.read_text())["tests"]
    return tests
