"""--mbmem-artifacts: what a failed test leaves."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _pytest.pytester import RunResult
from runs_again import runs_again

from pytest_mbmem import artifacts, repeat
from pytest_mbmem.history.snapshot import read_snapshot
from pytest_mbmem.history.summary import Summary
from pytest_mbmem.measure.host import HostLauncher
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Measurement
from pytest_mbmem.recipe import Recipe

OPTION = "--mbmem-artifacts=kept"

MEASURES = """
from pytest_mbmem import Recipe
import pytest

RECIPE = Recipe.from_dict(
    {{
        "name": "ours",
        "model": {{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}},
        "parallelism": {{"pp": 2}},
        "training": {{"seq_length": 64}},
    }},
    "recipe",
)

{test}
"""

# The made-up launcher runs nothing again.
NO_SNAPSHOTS = """
from pytest_mbmem.measure.workers import CallResult

FakeLauncher.call_all = lambda self, calls, environment, timeout: [
    CallResult(failure="error", message="Traceback:\\nValueError: nothing runs here") for _ in calls
]
"""

LIMIT = """
import pytest

@pytest.mark.peak_memory(limit="1 MiB")
def test_a(mbmem):
    mbmem.measure("recipe.yaml")
"""


@pytest.fixture
def fake(project: pytest.Pytester) -> pytest.Pytester:
    with project.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write(NO_SNAPSHOTS)
    return project


def run(project: pytest.Pytester, test: str, *arguments: str) -> RunResult:
    project.makepyfile(MEASURES.format(test=test))
    return project.runpytest_inprocess(OPTION, *arguments)


def folders(project: pytest.Pytester) -> list[Path]:
    folder = project.path / "kept"
    return sorted(folder.iterdir()) if folder.exists() else []


def only(project: pytest.Pytester) -> Path:
    (folder,) = folders(project)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def peak(snapshot: Path) -> int:
    """Bytes, as `mbmem snapshot` reads them."""
    return Summary.of(read_snapshot(snapshot)).peak_allocated


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# What is there --------------------------------------------------------------------------------------------------------


def test_a_failed_gate_leaves_all_there_is_to_know(real_project: pytest.Pytester) -> None:
    result = run(
        real_project,
        """
@pytest.mark.peak_memory(limit="1 MiB")
def test_a(mbmem):
    print("before")
    mbmem.measure(RECIPE)
""",
    )
    result.assert_outcomes(failed=1)
    folder = only(real_project)
    assert folder.name.startswith("test_it.py_test_a-")
    ranks = {f"measurement/rank{rank}{file}" for rank in (0, 1) for file in (".pickle", ".log", "-counting.log")}
    assert files(folder) == {
        "failure.txt",
        "repeat.sh",
        "measurement/measurement.json",
        "measurement/recipe.yaml",
        *ranks,
    }
    recipe = Recipe.from_yaml(folder / "measurement/recipe.yaml")
    measurement = Measurement.load(folder / "measurement/measurement.json")
    assert measurement.recipe == recipe.to_dict()
    assert (recipe.name, recipe.digest) == ("ours", measurement.recipe_digest)
    assert [rank.rank for rank in measurement.ranks] == [0, 1]
    for rank in measurement.ranks:
        assert peak(folder / f"measurement/rank{rank.rank}.pickle") == rank.peak()
    assert "UserWarning" in text(folder / "measurement/rank0.log")
    failure = text(folder / "failure.txt")
    assert "REGRESSION: peak allocated is " in failure
    assert " Captured stdout call " in failure
    assert failure.endswith("before\n\n")
    result.stdout.fnmatch_lines(["*- artifacts -*", f"kept/{folder.name}", f"  sh kept/{folder.name}/repeat.sh"])


def test_a_recipe_that_does_not_fit_leaves_the_snapshot_of_the_failure(real_project: pytest.Pytester) -> None:
    large = "RECIPE.but(vocab_size=50_000_000, hidden_size=4096)"
    run(real_project, f"def test_a(mbmem):\n    mbmem.measure({large})\n").assert_outcomes(failed=1)
    inner = only(real_project) / "measurement"
    measurement = Measurement.load(inner / "measurement.json")
    assert measurement.failure is not None
    assert measurement.failure.shortage is not None
    assert measurement.failure.shortage.diagnosis is not None
    assert "oom" in {event["action"] for event in read_snapshot(inner / "rank0.pickle").events}
    assert Recipe.from_yaml(inner / "recipe.yaml").model.vocab_size == 50_000_000


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("held = torch.empty(2**21, device='cuda')", "REGRESSION"),
        ("torch.empty(2**40, device='cuda')", "OutOfMemoryError"),
        ("torch.empty(2**19, device='cuda'); assert 1 == 2", "assert 1 == 2"),
    ],
)
def test_a_whole_test_leaves_the_same(real_project: pytest.Pytester, body: str, expected: str) -> None:
    test = f"""
@pytest.mark.peak_memory(limit="4 MiB")
def test_a():
    import os, torch
    os.write(1, b"from below")
    {body}
"""
    result = run(real_project, test, "--capture=sys")
    result.assert_outcomes(failed=1)
    folder = only(real_project)
    assert files(folder) == {
        "failure.txt",
        "repeat.sh",
        "notes.txt",
        "worker.log",
        "measurement/measurement.json",
        "measurement/rank0.pickle",
    }
    assert expected in text(folder / "failure.txt")
    assert "from below" in text(folder / "worker.log")
    assert text(folder / "notes.txt") == "measurement: no recipe: the test built none\n"
    measurement = Measurement.load(folder / "measurement/measurement.json")
    assert peak(folder / "measurement/rank0.pickle") == measurement.peak()
    result.stdout.fnmatch_lines(["*- artifacts -*", f"kept/{folder.name}"])


def test_a_whole_test_that_fails_twice_leaves_both_failures(real_project: pytest.Pytester) -> None:
    test = """
@pytest.fixture
def fails_late():
    yield
    raise ValueError("too late")

@pytest.mark.peak_memory(limit="1 MiB")
def test_a(fails_late):
    import torch
    torch.empty(2**10, device="cuda")
    raise KeyError("too early")
"""
    result = run(real_project, test)
    result.assert_outcomes(failed=1, errors=1)
    failure = text(only(real_project) / "failure.txt")
    assert "KeyError: 'too early'" in failure
    assert "ValueError: too late" in failure
    assert result.stdout.str().count("repeat.sh") == 1


def test_a_whole_test_with_a_model_leaves_its_recipe(real_project: pytest.Pytester) -> None:
    test = """
def test_a(megatron_model):
    megatron_model(RECIPE, rank=1)
    assert False
"""
    run(real_project, test).assert_outcomes(failed=1)
    inner = only(real_project) / "measurement"
    assert Recipe.from_yaml(inner / "recipe.yaml").name == "ours"
    assert "rank1.pickle" in files(inner)


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        ("os._exit(3)", (), "the worker ended with exit code 3"),
        ("import time; time.sleep(600)", ("--mbmem-timeout=3",), "no result within 3 s"),
    ],
)
def test_a_worker_that_came_to_no_end_leaves_what_it_printed(
    real_project: pytest.Pytester, body: str, options: tuple[str, ...], expected: str
) -> None:
    test = f"""
@pytest.mark.peak_memory(limit="1 MiB")
def test_a():
    import os
    os.write(1, b"the last words")
    {body}
"""
    result = run(real_project, test, "--capture=sys", *options)
    result.assert_outcomes(failed=1)
    folder = only(real_project)
    assert files(folder) == {"failure.txt", "repeat.sh", "notes.txt", "worker.log"}
    assert "the last words" in text(folder / "worker.log")
    assert expected in text(folder / "failure.txt")
    assert text(folder / "notes.txt") == "no measurement: the worker ended before there was one\n"
    result.stdout.fnmatch_lines([f"artifacts: kept/{folder.name}"])


def test_a_host_run_leaves_no_snapshot_and_says_so(host_project: pytest.Pytester, host_launcher: HostLauncher) -> None:
    run(host_project, "def test_a(mbmem):\n    mbmem.measure(RECIPE)\n    assert False\n", "--mbmem-host")
    folder = only(host_project)
    assert {"measurement/measurement.json", "measurement/recipe.yaml"} <= files(folder)
    assert not [name for name in files(folder) if name.endswith(".pickle")]
    assert "measurement: no memory snapshot: a run on the host has no GPU memory\n" in text(folder / "notes.txt")


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("dies", ["rank 1: its run ended with: died", "rank 0: ValueError: nothing runs here"]),
        ("hangs", ["rank 1: its run ended with: timeout", "rank 0: ValueError: nothing runs here"]),
        ("raises", ["rank 0: ValueError: nothing runs here", "rank 1: ValueError: nothing runs here"]),
        ("oom", ["rank 0: ValueError: nothing runs here", "rank 1: ValueError: nothing runs here"]),
    ],
)
def test_why_a_snapshot_is_missing_is_said(fake: pytest.Pytester, name: str, notes: list[str]) -> None:
    test = f"def test_a(mbmem):\n    mbmem.measure(RECIPE.but(name={name!r}))\n"
    run(fake, test).assert_outcomes(failed=1)
    folder = only(fake)
    assert text(folder / "notes.txt").splitlines() == [f"measurement: no memory snapshot of {note}" for note in notes]
    failure = Measurement.load(folder / "measurement/measurement.json").failure
    assert failure is not None
    assert failure.message.splitlines()[-1] in text(folder / "failure.txt")


def test_each_measurement_of_a_test_has_a_folder(fake: pytest.Pytester) -> None:
    test = """
@pytest.mark.memory_saving(control={"recompute_granularity": None, "recompute_modules": None}, at_least="1 GiB")
def test_a(mbmem):
    candidate = RECIPE.but(recompute_granularity="selective", recompute_modules=["core_attn"])
    mbmem.measure(candidate)
    mbmem.measure(candidate, name="../second one")
    mbmem.measure(candidate, name="../second one")
    mbmem.sweep(RECIPE, {"attn": {"recompute_granularity": "selective"}}, name="settings")
"""
    run(fake, test).assert_outcomes(failed=1)
    assert {path.name for path in only(fake).iterdir() if path.is_dir()} == {
        "measurement",
        "measurement-control",
        "measurement-second_one",
        "measurement-second_one-2",
        "measurement-settings_attn",
    }


def test_a_test_that_passes_or_measures_nothing_leaves_nothing(fake: pytest.Pytester) -> None:
    test = """
def test_passes(mbmem):
    mbmem.measure(RECIPE)

def test_measures_nothing(mbmem):
    assert False

@pytest.mark.xfail
def test_fails_as_expected(mbmem):
    mbmem.measure(RECIPE)
    assert False

def test_skips(mbmem):
    mbmem.measure(RECIPE)
    pytest.skip("not today")
"""
    run(fake, test).assert_outcomes(passed=1, failed=1, xfailed=1, skipped=1)
    assert not fake.path.joinpath("kept").exists()


def test_a_failing_teardown_leaves_a_folder_too(fake: pytest.Pytester) -> None:
    test = """
@pytest.fixture
def fails_late():
    yield
    raise ValueError("too late")

def test_passes(mbmem, fails_late):
    mbmem.measure(RECIPE)

def test_fails_as_well(mbmem, fails_late):
    mbmem.measure(RECIPE)
    raise KeyError("too early")
"""
    run(fake, test).assert_outcomes(passed=1, failed=1, errors=2)
    both, late = folders(fake)
    assert "ValueError: too late" in text(late / "failure.txt")
    assert "KeyError: 'too early'" in text(both / "failure.txt")
    assert "ValueError: too late" in text(both / "teardown.txt")
    assert "teardown.txt" not in files(late)


def test_a_strict_xfail_that_passes_leaves_one(fake: pytest.Pytester) -> None:
    test = "@pytest.mark.xfail(strict=True)\ndef test_a(mbmem):\n    mbmem.measure(RECIPE)\n"
    result = run(fake, test)
    assert "[XPASS(strict)]" in text(only(fake) / "failure.txt")
    result.stdout.fnmatch_lines(["artifacts: kept/test_it.py_test_a-*"])


# Whole or not at all --------------------------------------------------------------------------------------------------


def test_a_new_failure_takes_the_place_of_the_last_one(fake: pytest.Pytester) -> None:
    for number in (1, 2):
        test = f"def test_a(mbmem):\n    mbmem.measure(RECIPE, name='number {number}')\n    assert False\n"
        fake.makepyfile(MEASURES.format(test=test))
        fake.runpytest_subprocess(OPTION).assert_outcomes(failed=1)
    assert [path.name for path in only(fake).iterdir() if path.is_dir()] == ["measurement-number_2"]


@pytest.mark.parametrize(("extra", "left"), [(0, 0), (60, 1)])
def test_of_a_test_that_runs_again_only_the_last_run_counts(
    fake: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, extra: int, left: int
) -> None:
    """As pytest-rerunfailures does it."""
    runs_again(fake, monkeypatch, extra)
    test = '@pytest.mark.peak_memory(limit="100 MiB")\ndef test_a(mbmem):\n    mbmem.measure(RECIPE)\n'
    run(fake, test)
    assert len(folders(fake)) == left
    for folder in folders(fake):
        assert Measurement.load(folder / "measurement/measurement.json").peak() == (64 + extra) * 2**20


def test_a_run_that_is_killed_leaves_no_half_folder_and_the_next_clears_up(fake: pytest.Pytester) -> None:
    fake.makepyfile(LIMIT)
    conftest = fake.path / "conftest.py"
    before = conftest.read_text()
    conftest.write_text(
        before
        + """
from pytest_mbmem import artifacts
artifacts._replace = lambda part, target: os.kill(os.getpid(), 9)
"""
    )
    assert fake.runpytest_subprocess(OPTION).ret != 1
    (part,) = folders(fake)
    assert part.name.startswith(".")
    assert "failure.txt" in files(part)
    conftest.write_text(before)
    fake.runpytest_subprocess(OPTION).assert_outcomes(failed=1)
    assert not only(fake).name.startswith(".")


def test_a_folder_that_cannot_be_written_is_said_in_the_failure(fake: pytest.Pytester) -> None:
    test = "def test_a(mbmem):\n    mbmem.measure(RECIPE)\n    open('kept', 'w').close()\n    assert False, 'mine'\n"
    result = run(fake, test)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert False*", "none: *kept: cannot be written (File exists)"])


def test_several_processes_that_leave_the_same_folder_all_come_to_an_end(tmp_path: Path) -> None:
    target = tmp_path / "target"
    script = """
import os, sys
from pathlib import Path
from pytest_mbmem.artifacts import _replace
target = Path(sys.argv[1])
for number in range(100):
    part = target.with_name(f".target.{os.getpid()}.part")
    part.mkdir()
    (part / "whole").write_text(str(os.getpid()))
    _replace(part, target)
"""
    running = [subprocess.Popen([sys.executable, "-c", script, str(target)]) for _ in range(4)]
    assert [process.wait(timeout=120) for process in running] == [0] * 4
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert files(target) == {"whole"}


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        ("file", "there", "*there is not a folder"),
        ("nothing", "gone/there", "*the folder *gone does not exist"),
        ("nothing", "", "*the path is empty"),
    ],
)
@pytest.mark.parametrize("way", ["option", "ini key"])
def test_a_bad_folder_is_one_error_before_collection(
    fake: pytest.Pytester, make: str, given: str, message: str, way: str
) -> None:
    fake.makepyfile("raise SystemExit('collected')")
    if make == "file":
        fake.path.joinpath("there").touch()
    if way == "option":
        result = fake.runpytest(f"--mbmem-artifacts={given}")
        name = "--mbmem-artifacts"
    else:
        result = fake.runpytest("-o", f"mbmem_artifacts={given}")
        name = "ini key mbmem_artifacts"
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {name}: {message}"])
    assert len([line for line in result.stderr.lines if line.startswith("ERROR")]) == 1


def test_the_ini_keys_folder_is_relative_to_the_ini_file(
    fake: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake.path.joinpath("tox.ini").open("a") as ini:
        ini.write("mbmem_artifacts = kept\n")
    fake.makepyfile(LIMIT)
    folder = fake.mkdir("elsewhere")
    monkeypatch.chdir(folder)
    fake.runpytest("..").assert_outcomes(failed=1)
    assert only(fake).is_dir()
    assert not list(folder.iterdir())


# Several processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["load", "loadscope", "loadfile", "loadgroup", "worksteal", "each"])
def test_under_xdist_every_failed_test_leaves_one_folder(fake: pytest.Pytester, mode: str) -> None:
    test = """
@pytest.mark.parametrize("number", range(4))
@pytest.mark.xdist_group("ours")
@pytest.mark.peak_memory(limit="1 MiB")
def test_a(mbmem, number):
    mbmem.measure(RECIPE)
"""
    fake.makepyfile(MEASURES.format(test=test))
    workers = ["--tx=2*popen"] if mode == "each" else ["-n2"]
    result = fake.runpytest_inprocess(OPTION, "-p", "xdist", f"--dist={mode}", *workers)
    assert result.ret == 1
    assert len(folders(fake)) == 4
    assert not [folder for folder in folders(fake) if folder.name.startswith(".")]
    for folder in folders(fake):
        result.stdout.fnmatch_lines_random([f"kept/{folder.name}"])
        assert Measurement.load(folder / "measurement/measurement.json").peak() == 64 * 2**20
    fake.runpytest_inprocess(OPTION).assert_outcomes(failed=4)
    assert len(folders(fake)) == 4  # under the same names


# Repeating ------------------------------------------------------------------------------------------------------------

ODD = """
import os
import pytest

@pytest.mark.parametrize("case", ["plain", "it's $HOME [a::b]"])
def test_a(mbmem, case, flavour):
    print("flavour", flavour, "devices", os.environ.get("CUDA_VISIBLE_DEVICES"))
    mbmem.measure("recipe.yaml")
    assert case == "plain"
"""

FLAVOURS = """
def pytest_addoption(parser):
    parser.addoption("--flavour", nargs=2)
    parser.addoption("--level", type=int, default=1)
    parser.addoption("--fast", action="store_true")

@pytest.fixture
def flavour(pytestconfig):
    return (*pytestconfig.getoption("flavour"), pytestconfig.getoption("level"), pytestconfig.getoption("fast"))
"""


@pytest.mark.parametrize("workers", [(), ("-n1", "--dist=loadgroup")])
def test_repeat_runs_the_one_test_again_as_it_ran(
    fake: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("MBMEM_TEST_SOMETHING", "it's $HOME")
    with fake.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write(FLAVOURS)
    fake.makepyfile(ODD)
    options = ["--flavour", "sweet  and", "$our", "--fast", "--level=3", "-p", "no:doctest", "-o", "addopts=-v"]
    chosen = ["-k", "test_a", "-x", "--mbmem-json=all.json", "--mbmem-timeout", "77", "test_it.py"]
    fake.runpytest_subprocess(OPTION, "--junitxml=all.xml", *options, *chosen, *workers)
    folder = only(fake)
    for name in ("all.json", "all.xml"):
        fake.path.joinpath(name).unlink()
    command = text(folder / "repeat.sh")
    assert " CUDA_VISIBLE_DEVICES=3,1 " in command
    assert "--mbmem-timeout=77" in command
    for gone in ("--mbmem-json", "--junitxml", "--mbmem-artifacts", " -n1", "--numprocesses", "--dist", " -k", "-x "):
        assert gone not in command
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.chdir("/")
    again = subprocess.run(["sh", str(folder / "repeat.sh"), "-rN"], capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stderr
    assert "1 failed in" in again.stdout
    assert "test_it.py::test_a[it's $HOME [a::b]] FAILED" in again.stdout
    assert "flavour ('sweet  and', '$our', 3, True) devices 3,1" in again.stdout
    assert not fake.path.joinpath("all.json").exists()


def test_a_test_cannot_change_which_variables_repeat_it(fake: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    test = """
def test_a(mbmem, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    mbmem.measure(RECIPE)
    assert False
"""
    run(fake, test)
    assert " CUDA_VISIBLE_DEVICES=3 " in text(only(fake) / "repeat.sh")


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["-vv"], ["--verbose", "--verbose"]),
        (["-q"], ["--verbosity=-1"]),
        (["--tb=short", "-l"], ["--showlocals", "--tb=short"]),
        (["-p", "no:doctest", "-pno:nose"], ["-p", "no:doctest", "-p", "no:nose"]),
        (["-W", "error", "-Wignore::UserWarning"], ["--pythonwarnings=error", "--pythonwarnings=ignore::UserWarning"]),
        (["-o", "xfail_strict=true"], ["--override-ini=xfail_strict=true"]),
        (["--mbmem-host"], ["--mbmem-host"]),
        (["--mbmem-update", "--mbmem-reason=why"], []),
        (["--maxfail=2", "-x", "--lf", "--deselect=a", "-k", "x", "-m", "y", "test_it.py"], []),
        (["-s"], ["--capture=no"]),
        (["--import-mode=importlib", "-c", "tox.ini"], ["--import-mode=importlib", "--config-file=tox.ini"]),
    ],
)
def test_options_that_change_the_test_are_kept(pytester: pytest.Pytester, given: list[str], kept: list[str]) -> None:
    pytester.makepyfile(test_it="")
    pytester.makeini("[pytest]\n")
    config = pytester.parseconfig("-p", "no:randomly", *given)
    found = repeat.arguments(config)
    assert sorted(found) == sorted(["-p", "no:randomly", *kept])
    again = pytester.parseconfig(*found)
    for name in ("verbose", "tbstyle", "showlocals", "plugins", "pythonwarnings", "override_ini", "mbmem_host"):
        assert getattr(again.option, name) == getattr(config.option, name), name


def test_the_seed_of_a_random_order_is_kept(fake: pytest.Pytester) -> None:
    pytest.importorskip("pytest_randomly")
    fake.path.joinpath("tox.ini").write_text("[pytest]\n")
    fake.makepyfile(LIMIT)
    result = fake.runpytest_subprocess(OPTION)
    (line,) = [line for line in result.stdout.lines if line.startswith("Using --randomly-seed=")]
    seed = line.partition("=")[2]
    assert f" --randomly-seed={seed} " in text(only(fake) / "repeat.sh")


def test_torchrun_repeats_all_its_processes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    (item,) = pytester.getitems("def test_a(): pass")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    options: Any = SimpleNamespace(torchrun=SimpleNamespace(world_size=8))
    lines = repeat.script(item, options, {"A": "b c"}).splitlines()
    assert lines[2].startswith("# To be started on each machine")
    words = shlex.split(lines[-1])
    run_by = ["-m", "torch.distributed.run", "--nproc-per-node=4", "-m", "pytest"]
    assert words[:10] == ["exec", "env", "A=b c", sys.executable, *run_by, f"{item.path}::test_a"]
    assert words[-1] == "$@"


# Real GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "suffix"), [("solo", ""), ("joint", "-virtual")])
def test_on_real_gpus_joint_ranks_leave_the_snapshots_of_their_twins(
    gpu_project: pytest.Pytester, ranks: str, suffix: str
) -> None:
    run(
        gpu_project,
        "def test_a(mbmem):\n    mbmem.measure(RECIPE)\n    assert False\n",
        "--mbmem-gpu",
        f"--mbmem-ranks={ranks}",
    ).assert_outcomes(failed=1)
    folder = only(gpu_project)
    inner = folder / "measurement"
    measurement = Measurement.load(inner / "measurement.json")
    assert (measurement.mode, measurement.device.virtual) == (ranks, False)
    for rank in (0, 1):
        assert read_snapshot(inner / f"rank{rank}{suffix}.pickle").events
        assert "UserWarning" in text(inner / f"rank{rank}.log")
    if ranks == "joint":
        assert "cannot run again alone" in text(folder / "notes.txt")
        assert not (inner / "rank0.pickle").exists()
    command = text(folder / "repeat.sh")
    assert f"--mbmem-gpu --mbmem-ranks={ranks}" in command
    assert "MBMEM_TEST_STAND_INS=" in command


def test_logs_are_not_in_the_json(launcher: Launcher, small_recipe: Recipe) -> None:
    measurement = launcher.measure(small_recipe, count_flops=False)
    assert set(measurement.logs) == {"rank0"}
    assert "logs" not in measurement.to_json()
    assert Measurement.from_json(measurement.to_json()) == measurement


def test_names_of_folders_say_nothing_to_a_shell() -> None:
    assert artifacts._readable("../a b;$(c)") == "a_b_c"
    assert os.sep not in artifacts._readable("/etc/passwd")
