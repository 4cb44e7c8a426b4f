"""The command `mbmem`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_stand_ins import share_server, stand_ins
from made_snapshots import small, write

from pytest_mbmem.cli import main
from pytest_mbmem.measure import launch
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Device, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report import json as json_report
from pytest_mbmem.report.results import Measured, Results, TestResult

COMMAND = [sys.executable, "-c", "import sys; from pytest_mbmem.cli import main; sys.exit(main())"]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def recipe_file(tmp_path: Path, small_recipe: Recipe) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(small_recipe.to_yaml(), encoding="utf-8")
    return path


@pytest.fixture
def results_file(tmp_path: Path) -> Path:
    sizes = {"allocated": 2**30, "reserved": 2**31}
    rank = RankMeasurement(0, {}, 1, (PhaseFigures(0, "test", sizes, sizes),))
    measurement = Measurement(Device("virtual-x", "X", 2**33, virtual=True), (rank,))
    test = TestResult("t.py::test_a", measured=[Measured("test_a", None, measurement)])
    path = tmp_path / "results.json"
    path.write_text(json_report.text(Results({}, {test.id: test})), encoding="utf-8")
    return path


def test_measure_shows_and_writes_what_the_launcher_measures(
    launcher: Launcher, small_recipe: Recipe, recipe_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "measurement.json"
    ended = run("measure", recipe_file, "--json", output)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "virtual-h100-80gb" in ended.stdout
    assert "phases of rank 0:" in ended.stdout
    assert Measurement.load(output) == launcher.measure(small_recipe)


def test_measure_fails_for_a_recipe_that_does_not_fit(tmp_path: Path, small_recipe: Recipe) -> None:
    large = small_recipe.but(hidden_size=8192, num_attention_heads=64, num_layers=8)
    path = tmp_path / "large.yaml"
    path.write_text(large.to_yaml(), encoding="utf-8")
    ended = run("measure", path, "--virtual-gpu", "l4-24gb")
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "FAILED: out of memory on rank 0 in build\n  asked for " in ended.stdout
    assert "\ncapacity: expandable segments do not make it fit: " in ended.stdout
    assert "\n  CUDA out of memory. Tried to allocate" in ended.stdout


def test_report_prints_the_table_and_writes_the_page(
    results_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(results_file), "--html", str(page)]) == 0
    assert "t.py::test_a" in capsys.readouterr().out
    assert "t.py::test_a" in page.read_text(encoding="utf-8")


def test_gpus_lists_those_of_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pytest_mbmem.virtual_gpu.gpus import BUILT_IN

    own = tmp_path / "own.yaml"
    block = BUILT_IN.read_text(encoding="utf-8").partition("\nl4-24gb:")[2].partition("\nl40s-48gb:")[0]
    own.write_text(f"mine:{block}\n", encoding="utf-8")
    assert main(["gpus", "--gpus", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("h100-80gb ") for line in lines)
    assert lines[-1].startswith("mine ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "none.yaml"], "none.yaml: cannot be read"),
        (
            ["measure", "{recipe}", "--virtual-gpu", "h1000"],
            "--virtual-gpu: there is no virtual GPU 'h1000'; known are",
        ),
        (["measure", "{recipe}", "--gpus", "none.yaml"], "none.yaml: cannot be read"),
        (["measure", "{recipe}", "--ranks", "first"], "--ranks: 'first' is not distinct, all, or numbers"),
        (["measure", "{recipe}", "--ranks", "0,,1"], "--ranks: '0,,1' is not"),
        (["measure", "{recipe}", "--ranks", "7"], "7 is not in the job"),
        (["measure", "{recipe}", "--timeout", "nan"], "--timeout: 'nan' is not a number of seconds above 0"),
        (["measure", "{recipe}", "--json", "none/x.json"], "--json: the folder none does not exist"),
        (["measure", "{recipe}", "--json", "."], "--json: . is a folder"),
        (["report", "{recipe}"], "cannot be read as JSON"),
        (["report", "none.json"], "none.json: cannot be read"),
        (["gpus", "--gpus", "none.yaml"], "none.yaml: cannot be read"),
        (["snapshot", "none.pickle"], "none.pickle: is not there"),
        (["snapshot", "{recipe}"], "is no pickle, so no snapshot of PyTorch's"),
        (["snapshot", "{recipe}", "--device", "-1"], "--device: '-1' is not a whole number of 0 or more"),
        (["snapshot", "{recipe}", "--top", "many"], "--top: 'many' is not a whole number of 0 or more"),
        (["snapshot", "{recipe}", "--json", "none/x.json"], "--json: the folder none does not exist"),
        (["replay", "none.pickle"], "none.pickle: is not there"),
        (["replay", "{recipe}", "--device", "x"], "--device: 'x' is not a whole number"),
        (["replay", "{recipe}", "--capacity", "0 GiB"], "--capacity: '0 GiB' leaves nothing for PyTorch"),
        (["replay", "{recipe}", "--capacity", "1 PiB"], "--capacity: '1 PiB' is not a size"),
        (["replay", "{recipe}", "--virtual-gpu", "h1000"], "--virtual-gpu: there is no virtual GPU 'h1000'"),
        (["replay", "{recipe}", "--timeout", "0"], "--timeout: '0' is not a number of seconds above 0"),
    ],
)
def test_a_mistake_is_one_message_and_exit_status_2(
    arguments: list[str], message: str, recipe_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([a.format(recipe=recipe_file) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mbmem: error: ")
    assert message in err


def test_a_failing_write_names_the_file(results_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(results_file), "--html", "/dev/full"]) == 2
    assert "mbmem: error: /dev/full: cannot be written (No space left on device)" in capsys.readouterr().err


def test_a_reader_that_leaves_early_sees_no_traceback(results_file: Path) -> None:
    data = json.loads(results_file.read_text(encoding="utf-8"))
    data["tests"] = [{**data["tests"][0], "id": f"t.py::test_{n}"} for n in range(5000)]
    results_file.write_text(json.dumps(data), encoding="utf-8")
    with subprocess.Popen(
        [*COMMAND, "report", str(results_file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


@pytest.mark.parametrize("command", ["report", "snapshot"])
def test_the_command_imports_no_torch(command: str, results_file: Path, tmp_path: Path) -> None:
    file = {"report": results_file, "snapshot": write(tmp_path / "s.pickle", small())}[command]
    code = "import sys; from pytest_mbmem.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code, command, str(file)], capture_output=True, check=False)
    assert ended.returncode == 0


# Snapshots ------------------------------------------------------------------------------------------------------------


def record(launcher: Launcher, file: Path, scenario: str) -> Path:
    """A run of allocations.py on a device of 256 MiB."""
    arguments = {"file": str(file), "scenario": scenario}
    device = {"MBMEM_GPU_CAPACITY": str(256 * 2**20), "MBMEM_GPU_CONTEXT_BYTES": "0"}
    assert launcher.call("allocations:record", arguments, environment=device).message == ""
    return file


def test_snapshot_shows_peaks_owners_and_fragmentation(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = record(launcher, tmp_path / "s.pickle", "fragmented"), tmp_path / "s.json"
    assert main(["snapshot", str(file), "--json", str(output)]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(output.read_text(encoding="utf-8"))
    assert lines[0] == f"{file}: device 0, {summary['events']} events"
    assert lines[1].startswith("peak allocated: 152.00 MiB after event ")
    assert lines[2].startswith("peak reserved:  252.00 MiB after event ")
    assert summary["peak_allocated"] == sum(owner["bytes"] for owner in summary["owners"]) == 152 * 2**20
    line = summary["owners"][0]["line"]
    assert re.search(r"allocations\.py:\d+ \(block\)$", line)
    assert any(shown.endswith(line) for shown in lines)
    (then,) = [held for held in summary["segments"] if held["when"] == "when memory ran out"]
    assert (then["reserved"], then["allocated"], then["segments"]) == (252 * 2**20, 135 * 2**20, 9)
    (row,) = [line for line in lines if "when memory ran out" in line]
    assert row.split()[4:] == ["large", "9", "252.00", "MiB", "135.00", "MiB", "117.00", "MiB", "9", "17.00", "MiB"]
    assert summary["allocator_settings"]["expandable_segments"] is False
    assert "expandable_segments=False" in lines[-2]


def test_snapshot_of_a_stranger_is_shown_in_lines_of_bounded_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small()
    data["device_traces"][0][2]["frames"][0]["name"] = "x\x1b[31m" * 1000
    assert main(["snapshot", str(write(tmp_path / "s.pickle", data))]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 1000


@pytest.fixture
def replaying(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays in forks of this session's own server."""
    monkeypatch.setattr(launch, "Launcher", lambda gpu, *, timeout: launcher)
    monkeypatch.setattr(launcher, "close", lambda: None)


@pytest.mark.usefixtures("replaying")
def test_replay_says_whether_it_would_have_fitted(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = record(launcher, tmp_path / "s.pickle", "fragmented")
    both = ["--alloc-conf", "", "--alloc-conf", "expandable_segments:True"]
    assert main(["replay", str(file), *both]) == 0
    out = capsys.readouterr().out
    assert "replayed as recorded, with the 256.00 MiB for PyTorch that it had:" in out
    assert "The replay reproduces the recorded segments exactly." in out
    assert "replayed with changes, 256.00 MiB for PyTorch, as the recorded run had:" in out
    assert "  PyTorch's default settings  no " in out
    assert "  expandable_segments:True    yes " in out
    assert "With PyTorch's default settings it runs out of memory at event" in out
    assert re.search(r"allocations\.py:\d+ \(block\):$", out, re.MULTILINE)
    assert "free but unusable: 117.00 MiB in the allocator's segments; the device had 4.00 MiB left" in out
    assert "ran out of memory at event" in out.splitlines()[-1]  # what comes after it is unknown

    assert main(["replay", str(file), "--alloc-conf", "expandable_segments:True", "--alloc-conf", ""]) == 1
    assert main(["replay", str(file), "--capacity", "1 GiB"]) == 0
    assert "1.00 GiB of capacity, of which the CUDA context of h100-80gb takes 512.00 MiB: 512.00 MiB for" in (
        capsys.readouterr().out
    )
    assert main(["replay", str(file), "--virtual-gpu", "l4-24gb"]) == 0
    assert main(["replay", str(file), "--alloc-conf", "nonsense:1"]) == 2
    assert capsys.readouterr().err.startswith("mbmem: error: --alloc-conf: 'nonsense:1': PyTorch refuses")


# Real GPUs ------------------------------------------------------------------------------------------------------------


def test_measure_on_real_gpus(
    launcher: Launcher,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    share_server(monkeypatch, launcher)
    stand_ins(monkeypatch, gpu="l4-24gb", elapsed_ms=[500, 100])
    file = tmp_path / "real.json"
    assert main(["measure", str(recipe_file), "--gpu", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert "device: stand-in-nvidia-l4-22gib, stand-in NVIDIA L4" in output
    assert "virtual against real (virtual-stand-in-nvidia-l4-22gib):" in output
    assert "a step takes 100.00 ms" in output
    assert Measurement.load(file).mode == "joint"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "joint"], "--mode: on a virtual GPU every rank is measured alone; it is for --gpu"),
        (["--gpu", "--mode", "some"], "--mode: 'some' is not one of auto, joint, solo"),
        (["--gpu", "--virtual-gpu", "l4-24gb"], "--virtual-gpu: with --gpu the virtual twin is of the real GPU"),
        (["--gpu", "--mode", "joint"], "too few GPUs: the recipe's job has 2 ranks, and 1 stand-in NVIDIA L4"),
    ],
)
def test_measure_refuses_what_is_impossible_on_real_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb")
    file = tmp_path / "two.yaml"
    file.write_text("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\nparallelism: {tp: 2}\n")
    assert main(["measure", str(file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_solo_ranks_that_mean_nothing_are_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(monkeypatch, gpu="l4-24gb", count=2)
    file = tmp_path / "experts.yaml"
    model = "{num_layers: 2, hidden_size: 64, num_attention_heads: 4, moe: {num_moe_experts: 4}}"
    file.write_text(f"model: {model}\nparallelism: {{dp: 2, ep: 2}}\n")
    assert main(["measure", str(file), "--gpu", "--mode", "solo"]) == 1
    assert capsys.readouterr().err.startswith("mbmem: error: solo ranks cannot know how many tokens ")
