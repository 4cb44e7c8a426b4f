"""--mbmem-snapshots, and the snapshots of gates that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.pytester import RunResult

from pytest_mbmem.cli import main
from pytest_mbmem.history.snapshot import Snapshot, read_snapshot
from pytest_mbmem.measure.launch import Launcher

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
    return sorted(path.name for path in folder.iterdir())


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
    run(real_project, f'@pytest.mark.fits("l4-24gb", headroom="21.45 GiB")\n{test}').assert_outcomes(passed=1)
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


def test_every_measured_rank_of_every_measurement_is_written(real_project: pytest.Pytester) -> None:
    result = run(
        real_project,
        """
@pytest.mark.parametrize("text", ["a/../b", "a b", "y" * 300])
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
    result.assert_outcomes(passed=6)
    folder = real_project.path / "s"
    names = files(folder)
    counts = {letter: sum(f"_test_{letter}" in name for name in names) for letter in "abcd"}
    assert counts == {"a": 6, "b": 6, "c": 4, "d": 1}
    assert all(len(name) < 200 and name.isascii() and "/" not in name for name in names)
    settings = {read_snapshot(folder / name).alloc_conf for name in names if "_test_c" in name}
    assert settings == {"", "expandable_segments:True"}
    ranks = [read_snapshot(folder / name).events for name in names if "_test_b_named" in name]
    assert len(ranks[0]) != len(ranks[1])
    assert not (real_project.path / KEPT).exists()


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


def test_a_worker_of_xdist_writes_them(real_project: pytest.Pytester) -> None:
    ini = real_project.path / "tox.ini"
    ini.write_text(ini.read_text().replace("-p no:cacheprovider ", ""))
    real_project.makepyfile(MEASURES.format(test=REGRESSION + WHOLE.replace("test_a", "test_b")))
    result = real_project.runpytest_subprocess("-n", "1")
    result.assert_outcomes(failed=2)
    assert len(files(real_project.path / KEPT)) == 2
    commands = [line for line in result.stdout.lines if line.startswith("  mbmem snapshot ")]
    assert {Path(line.split()[-1]).name for line in commands} == set(files(real_project.path / KEPT))


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
    run(real_project, test, "--mbmem-snapshots=s").assert_outcomes(passed=1)
    folder = real_project.path / "s"
    name = files(folder)[0]
    (folder / name).unlink()
    (folder / name).mkdir()
    result = run(real_project, test, "--mbmem-snapshots=s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*--mbmem-snapshots: {folder / name}: cannot be written (Is a directory)"])
    assert not [other for other in files(folder) if other.endswith(".part")]
