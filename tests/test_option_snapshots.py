"""--mbmem-snapshots, and the snapshots of gates that fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from _pytest.pytester import RunResult

from pytest_mbmem import snapshots
from pytest_mbmem.cli import main
from pytest_mbmem.errors import UserError
from pytest_mbmem.history.snapshot import Snapshot, read_snapshot
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measure.snapshot_files import write_snapshot

KEPT = ".pytest_cache/d/mbmem-snapshots"

MEASURES = """
from pytest_mbmem import Recipe
import pytest

RECIPE = Recipe.from_dict(
    {{
        "model": {{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}},
        "parallelism": {{"pp": 2}},
        "training": {{"seq_length": 64}},
    }},
    "recipe",
)

{test}
"""

REGRESSION = """
@pytest.mark.peak_memory(limit="1 MiB")
def test_a(mbmem):
    mbmem.measure(RECIPE)
"""

OUT_OF_MEMORY = """
def test_a(mbmem):
    mbmem.measure(RECIPE.but(vocab_size=50_000_000, hidden_size=4096))
"""

WHOLE = """
@pytest.mark.peak_memory(limit="1 MiB")
def test_a():
    import torch
    held = torch.empty(2**20, device="cuda")
"""

WHOLE_OUT_OF_MEMORY = """
@pytest.mark.peak_memory(limit="1 MiB")
def test_a():
    import torch
    torch.empty(2**40, device="cuda")
"""


def run(project: pytest.Pytester, test: str, *arguments: str, cache: bool = True) -> RunResult:
    if cache:
        ini = project.path / "tox.ini"
        ini.write_text(ini.read_text().replace("-p no:cacheprovider ", ""))
    project.makepyfile(MEASURES.format(test=test))
    return project.runpytest_inprocess(*arguments)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (".gitignore", "__pycache__"))


def only(folder: Path) -> Snapshot:
    (name,) = files(folder)
    return read_snapshot(folder / name)


@pytest.mark.parametrize(
    ("test", "rank"),
    [
        pytest.param(REGRESSION, 1, id="regression"),
        pytest.param(OUT_OF_MEMORY, 0, id="out of memory"),
        pytest.param(WHOLE, 0, id="whole test"),
        pytest.param(WHOLE_OUT_OF_MEMORY, 0, id="whole test out of memory"),
    ],
)
def test_a_failing_gate_leaves_the_snapshot_of_the_rank_that_failed(
    real_project: pytest.Pytester, test: str, rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(real_project, test)
    result.assert_outcomes(failed=1)
    folder = real_project.path / KEPT
    (name,) = files(folder)
    assert name.startswith("test_it.py_test_a-")
    assert name.endswith(f"-rank{rank}.pickle")
    result.stdout.fnmatch_lines(
        [
            "*- memory snapshot -*",
            f"memory snapshot of rank {rank}: {KEPT}/{name}",
            f"  mbmem snapshot {KEPT}/{name}",
        ]
    )
    assert ("oom" in {e["action"] for e in only(folder).events}) == ("OUT OF MEMORY" in result.stdout.str())
    capsys.readouterr()
    assert main(["snapshot", str(folder / name)]) == 0
    assert "peak allocated: " in capsys.readouterr().out


def test_a_gpu_that_is_too_small_leaves_the_snapshot_of_the_run_on_it(real_project: pytest.Pytester) -> None:
    """The headroom leaves 9 MiB, which are less than the 19 MiB that are live."""
    test = "def test_a(mbmem):\n    mbmem.measure(RECIPE)\n"
    result = run(real_project, f'@pytest.mark.fits("l4-24gb", headroom="21.49 GiB")\n{test}')
    result.assert_outcomes(failed=1)
    assert [e["action"] for e in only(real_project.path / KEPT).events].count("oom") == 1


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("def test_a(mbmem):\n    mbmem.measure(RECIPE)\n    assert False", id="another failure"),
        pytest.param("@pytest.mark.peak_memory\ndef test_a(mbmem):\n    mbmem.measure(RECIPE)", id="no baseline"),
        pytest.param(f"@pytest.mark.xfail\n{REGRESSION}", id="expected"),
        pytest.param(REGRESSION.replace("1 MiB", "1 GiB"), id="passes"),
        pytest.param(WHOLE.replace("1 MiB", "1 GiB"), id="whole test passes"),
    ],
)
def test_other_tests_leave_none(real_project: pytest.Pytester, test: str) -> None:
    result = run(real_project, test)
    assert "memory snapshot" not in result.stdout.str()
    assert not (real_project.path / KEPT).exists()


@pytest.mark.parametrize("test", [REGRESSION, WHOLE])
def test_without_a_cache_the_failure_says_how_to_get_one(real_project: pytest.Pytester, test: str) -> None:
    result = run(real_project, test, cache=False)
    expected = "no memory snapshot: pytest runs without its cache; name a folder with --mbmem-snapshots DIR"
    result.stdout.fnmatch_lines([expected])


def test_a_folder_that_cannot_be_made_is_said_in_the_failure(real_project: pytest.Pytester) -> None:
    folder = real_project.path / KEPT
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    passing = WHOLE.replace("1 MiB", "1 GiB").replace("test_a", "test_c")
    result = run(real_project, REGRESSION + WHOLE.replace("test_a", "test_b") + passing)
    result.assert_outcomes(failed=2, passed=1)
    said = [line for line in result.outlines if line.startswith("no memory snapshot: ")]
    assert said == [f"no memory snapshot: {folder}: cannot be made (File exists)"] * 2


def test_what_keeps_a_rank_from_running_again_is_said_in_the_failure(
    real_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no virtual GPU here")

    monkeypatch.setattr(snapshots, "_call", refuse)
    result = run(real_project, REGRESSION)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["REGRESSION: *", "no memory snapshot: no virtual GPU here"])


def test_a_whole_test_without_a_snapshot_says_so_and_names_none_of_before(real_project: pytest.Pytester) -> None:
    run(real_project, WHOLE_OUT_OF_MEMORY, "--mbmem-snapshots=s").assert_outcomes(failed=1)
    assert len(files(real_project.path / "s")) == 1
    growing = WHOLE_OUT_OF_MEMORY.replace('peak_memory(limit="1 MiB")', "no_memory_growth")
    result = run(real_project, growing, "--mbmem-snapshots=s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "no memory snapshot: PyTorch's allocator did not record its history *",
            "note: *::test_a: --mbmem-snapshots: none of this test, as PyTorch's allocator did not record *",
        ]
    )
    assert "memory snapshot of rank" not in result.stdout.str()


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    file, left = tmp_path / "a[1].pickle", tmp_path / f".a[1].pickle.{2**31}.part"
    others = {f".a[1].pickle.{os.getppid()}.part", f".b.pickle.{2**31}.part"}
    for name in (left.name, *others):
        (tmp_path / name).write_text("")
    write_snapshot({"segments": []}, file)
    assert set(files(tmp_path)) == {file.name, *others}


def test_every_measured_rank_of_every_measurement_is_written(real_project: pytest.Pytester) -> None:
    result = run(
        real_project,
        """
@pytest.mark.parametrize("text", ["a/../b"])
def test_a(mbmem, text):
    mbmem.measure(RECIPE)

def test_b(mbmem):
    mbmem.measure(RECIPE)
    mbmem.measure(RECIPE)
    mbmem.measure(RECIPE, name="named")

def test_c(mbmem):
    mbmem.compare(RECIPE.but(seq_length=32), {"alloc_conf": "expandable_segments:True"})

@pytest.mark.peak_memory(limit="1 GiB")
def test_d():
    import torch
    torch.empty(1000, device="cuda")
""",
        "--mbmem-snapshots=s",
        "--mbmem-timeout=300",
    )
    result.assert_outcomes(passed=4)
    folder = real_project.path / "s"
    names = files(folder)
    counts = {letter: sum(f"_test_{letter}" in name for name in names) for letter in "abcd"}
    assert counts == {"a": 2, "b": 6, "c": 4, "d": 1}
    settings = {read_snapshot(folder / name).alloc_conf for name in names if "_test_c" in name}
    assert settings == {"", "expandable_segments:True"}
    ranks = [read_snapshot(folder / name).events for name in names if "_test_b_named" in name]
    assert len(ranks[0]) != len(ranks[1])
    assert not (real_project.path / KEPT).exists()


def test_a_name_is_of_one_file_on_any_file_system() -> None:
    texts = ["a/../b", "a b", "a_b", "y" * 300, "z" + "y" * 300, "\udcff", "é"]
    names = {snapshots._file_name(f"t.py::test_a[{text}]", 0) for text in texts}
    assert len(names) == len(texts)
    assert all(len(name) < 200 and name.isascii() and "/" not in name for name in names)


@pytest.mark.parametrize("test", [REGRESSION, WHOLE, OUT_OF_MEMORY])
def test_a_failing_gate_names_the_file_in_the_folder_that_was_asked_for(
    real_project: pytest.Pytester, test: str
) -> None:
    result = run(real_project, test, "--mbmem-snapshots=s", cache=False)
    result.assert_outcomes(failed=1)
    (line,) = [line for line in result.stdout.lines if line.startswith("  mbmem snapshot ")]
    assert (real_project.path / line.split()[-1]).parent == real_project.path / "s"
    read_snapshot(real_project.path / line.split()[-1])


def test_the_folder_of_the_ini_key_is_relative_to_its_file(real_project: pytest.Pytester) -> None:
    with (real_project.path / "tox.ini").open("a") as ini:
        ini.write("mbmem_snapshots = s\n")
    run(real_project, WHOLE.replace("1 MiB", "1 GiB")).assert_outcomes(passed=1)
    only(real_project.path / "s")


def test_pytorchs_own_viewer_reads_them(real_project: pytest.Pytester, launcher: Launcher) -> None:
    run(real_project, WHOLE)
    (name,) = files(real_project.path / KEPT)
    file, page = str(real_project.path / KEPT / name), real_project.path / "page.html"
    for command in (["trace_plot", file, "-o", str(page)], ["segment_plot", file, "-o", str(page)], ["trace", file]):
        viewed = launcher.call("allocations:view", {"arguments": command})
        assert viewed.failure is None, viewed.message
        assert "<script" in page.read_text(encoding="utf-8")
    assert "= cudaMalloc(" in viewed.output


WRITES = """

def call_all(self, calls, environment, timeout):
    from pytest_mbmem.measure.workers import CallResult

    for _, arguments in calls:
        Path(arguments["file"]).write_bytes(b"")
    return [CallResult(value=None) for _ in calls]


FakeLauncher.call_all = call_all
"""


def test_a_worker_of_xdist_has_them_written(project: pytest.Pytester) -> None:
    ini = project.path / "tox.ini"
    ini.write_text(ini.read_text().replace("-p no:cacheprovider ", ""))
    with project.path.joinpath("conftest.py").open("a") as conftest:
        conftest.write(WRITES)
    project.makepyfile(MEASURES.format(test=REGRESSION + REGRESSION.replace("test_a", "test_b")))
    result = project.runpytest_subprocess("-n", "1")
    result.assert_outcomes(failed=2)
    assert len(files(project.path / KEPT)) == 2
    commands = [line for line in result.stdout.lines if line.startswith("  mbmem snapshot ")]
    assert {Path(line.split()[-1]).name for line in commands} == set(files(project.path / KEPT))


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("test_it.py", "--mbmem-snapshots: {path}/test_it.py is not a folder"),
        ("none/s", "--mbmem-snapshots: the folder {path}/none does not exist"),
        ("", "--mbmem-snapshots: the path is empty"),
    ],
)
def test_a_folder_that_cannot_be_is_one_message(project: pytest.Pytester, value: str, message: str) -> None:
    project.makepyfile("def test_a(): pass")
    before = files(project.path)
    result = project.runpytest_inprocess(f"--mbmem-snapshots={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message.format(path=project.path)}"])
    assert files(project.path) == before


@pytest.mark.parametrize("test", [REGRESSION.replace("1 MiB", "1 GiB"), WHOLE.replace("1 MiB", "1 GiB")])
def test_a_file_that_cannot_be_written_fails_the_test(real_project: pytest.Pytester, test: str) -> None:
    folder = real_project.path / "s"
    name = snapshots._file_name("test_it.py::test_a", 0)
    (folder / name).mkdir(parents=True)
    result = run(real_project, test, "--mbmem-snapshots=s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*--mbmem-snapshots: {folder / name}: cannot be written (Is a directory)"])
    assert not [other for other in files(folder) if other.endswith(".part")]


# Real GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "suffix"), [("solo", ""), ("joint", "-virtual")])
@pytest.mark.parametrize("option", ["--mbmem-snapshots=s", ""])
def test_on_real_gpus_joint_ranks_leave_the_snapshots_of_their_twins(
    gpu_project: pytest.Pytester, ranks: str, suffix: str, option: str
) -> None:
    result = run(gpu_project, REGRESSION, "--mbmem-gpu", f"--mbmem-ranks={ranks}", *filter(None, [option]))
    result.assert_outcomes(failed=1)
    folder = "s" if option else KEPT
    names = files(gpu_project.path / folder)
    assert [name.partition("-rank")[2] for name in names] == [
        f"{rank}{suffix}.pickle" for rank in ([0, 1] if option else [1])
    ]
    of = "rank 1 on a virtual GPU" if ranks == "joint" else "rank 1"
    result.stdout.fnmatch_lines([f"memory snapshot of {of}: {folder}/{names[-1]}"])
    assert all(read_snapshot(gpu_project.path / folder / name).events for name in names)


@pytest.mark.parametrize("name", ["", '"l4-24gb", '])
def test_on_a_real_gpu_the_snapshot_of_what_does_not_fit_is_a_virtual_gpus(
    gpu_project: pytest.Pytester, name: str
) -> None:
    test = f'@pytest.mark.fits({name}headroom="21.49 GiB")\ndef test_a(mbmem):\n    mbmem.measure(RECIPE)\n'
    result = run(gpu_project, test, "--mbmem-gpu", "--mbmem-ranks=solo")
    result.assert_outcomes(failed=1)
    (file,) = files(gpu_project.path / KEPT)
    assert file.endswith("-rank1-virtual.pickle")
    result.stdout.fnmatch_lines([f"memory snapshot of rank 1 on a virtual GPU: {KEPT}/{file}"])
    assert [e["action"] for e in only(gpu_project.path / KEPT).events].count("oom") == 1
