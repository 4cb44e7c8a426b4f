"""--mbmem-metrics and what is judged but has no peak: the file of a whole session."""

from __future__ import annotations

import pytest

TESTS = """
    import pytest

    SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    RECIPE = {"model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
              "training": {"seq_length": 64}}

    @pytest.mark.throughput
    @pytest.mark.fragmentation("90%")
    @pytest.mark.memory_saving({"recompute_granularity": None, "recompute_modules": None})
    def test_all(mbmem):
        mbmem.measure({**RECIPE, "memory": SELECTIVE})

    def test_fails(mbmem):
        mbmem.measure({**RECIPE, "name": "dies"})
"""
MIB = 2**20


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_controller_alone_writes_it(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile(TESTS)
    project.runpytest_subprocess("--mbmem-update=new", "--mbmem-metrics=o.txt", "-n", workers)
    text = project.path.joinpath("o.txt").read_text()
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    labels = 'test="test_it.py::test_all",device="virtual-h100-80gb"'
    control = "recompute_granularity=None, recompute_modules=None"
    assert figures == {
        f'mbmem_peak_bytes{{{labels},metric="allocated"}}': str(48 * MIB),
        f'mbmem_peak_bytes{{{labels},metric="reserved"}}': str(96 * MIB),
        f'mbmem_saved_bytes{{{labels},metric="allocated against {control}"}}': str(16 * MIB),
        f'mbmem_unused_bytes{{{labels},metric="fragmentation"}}': str(48 * MIB),
        f'mbmem_step_flops{{{labels},metric="counted-flops"}}': "1050",
        f'mbmem_step_bytes{{{labels},metric="collective-bytes"}}': str(MIB),
        f'mbmem_step_bytes{{{labels},metric="moved-bytes"}}': "0",
    }


def test_a_step_time_is_in_seconds(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makepyfile("def test_a(mbmem): mbmem.measure('recipe.yaml')")
    monkeypatch.setenv("FAKE_STEP_MS", "500 100 102 104")
    project.runpytest("--mbmem-metrics=o.txt").assert_outcomes(passed=1)
    text = project.path.joinpath("o.txt").read_text()
    line = 'mbmem_step_seconds{test="test_it.py::test_a",device="h100-80gb",metric="solo-throughput"} 0.102'
    assert line in text.splitlines()


def test_a_folder_is_refused_before_anything_runs(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    result = project.runpytest("--mbmem-metrics=.")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-metrics: * is a folder; name a file"])


def test_the_file_must_be_its_own(project: pytest.Pytester) -> None:
    result = project.runpytest("--mbmem-json=o", "--mbmem-metrics=o")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-json and --mbmem-metrics name the same file: */o"])
