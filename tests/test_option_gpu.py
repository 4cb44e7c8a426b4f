"""--mbmem-virtual-gpu, --mbmem-gpus, --mbmem-gpu, --mbmem-timeout and all ini keys' wrong values."""

from __future__ import annotations

import pytest
import yaml

from pytest_mbmem.virtual_gpu.gpus import BUILT_IN

WHICH = "def test_x(mbmem): print('on', mbmem.device.key, 'within', mbmem._run.launcher.timeout)"


def own_gpus(project: pytest.Pytester) -> None:
    known = yaml.safe_load(BUILT_IN.read_text())
    project.path.joinpath("gpus.yaml").write_text(yaml.safe_dump({"own-gpu": known["h100-80gb"]}))


def ini(project: pytest.Pytester, **keys: str) -> None:
    with project.path.joinpath("tox.ini").open("a") as file:
        file.writelines(f"{key} = {value}\n" for key, value in keys.items())


def test_the_default(project: pytest.Pytester) -> None:
    project.makepyfile(WHICH)
    project.runpytest("-s").stdout.fnmatch_lines(["*on virtual-h100-80gb within 600.0*"])


def test_option_goes_before_ini_key(project: pytest.Pytester) -> None:
    project.makepyfile(WHICH)
    ini(project, mbmem_virtual_gpu="l4-24gb", mbmem_timeout="7")
    project.runpytest("-s").stdout.fnmatch_lines(
        ["mbmem device: virtual-l4-24gb, a virtual NVIDIA L4", "*on virtual-l4-24gb within 7.0*"]
    )
    arguments = ["--mbmem-virtual-gpu=a100-40gb", "--mbmem-timeout=2.5"]
    project.runpytest("-s", *arguments).stdout.fnmatch_lines(["*on virtual-a100-40gb within 2.5*"])


def test_each_gpu_has_baselines_of_its_own(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.peak_memory\ndef test_x(mbmem): mbmem.measure('recipe.yaml')")
    project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    other = "--mbmem-virtual-gpu=l4-24gb"
    project.runpytest(other).assert_outcomes(failed=1)
    project.runpytest(other, "--mbmem-update=new").assert_outcomes(passed=1)
    assert project.path.joinpath("baselines/virtual-l4-24gb/test_it.yaml").is_file()


def test_a_file_brings_more_gpus(project: pytest.Pytester) -> None:
    project.makepyfile(WHICH)
    own_gpus(project)
    arguments = ["-s", "--mbmem-gpus=gpus.yaml", "--mbmem-virtual-gpu=own-gpu"]
    project.runpytest(*arguments).stdout.fnmatch_lines(["*on virtual-own-gpu *"])


def test_the_ini_keys_path_is_relative_to_the_ini_file(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project.mkdir("sub")
    own_gpus(project)
    ini(project, mbmem_gpus="gpus.yaml", mbmem_virtual_gpu="own-gpu")
    folder.joinpath("test_x.py").write_text(WHICH)
    monkeypatch.chdir(folder)
    project.runpytest("-s").stdout.fnmatch_lines(["*on virtual-own-gpu *"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mbmem-virtual-gpu=h101"], "--mbmem-virtual-gpu: there is no virtual GPU 'h101'; known are *h100-80gb*"),
        (["--mbmem-gpus=nowhere.yaml"], "--mbmem-gpus: *nowhere.yaml is not a file"),
        (["--mbmem-gpus=recipe.yaml"], "*recipe.yaml:1: model.num_layers: unknown key; *"),
        (["--mbmem-ranks=solo"], "--mbmem-ranks: on a virtual GPU every rank is measured alone; it is for --mbmem-gpu"),
        (["--mbmem-ranks=some", "--mbmem-gpu"], "--mbmem-ranks: 'some' is not one of auto, joint, solo"),
        (
            ["--mbmem-ranks=solo", "--mbmem-host"],
            "--mbmem-ranks: solo: with --mbmem-host all ranks of a job run together",
        ),
        (["--mbmem-require-gpus"], "--mbmem-require-gpus: without --mbmem-gpu no GPU is needed"),
        (["--mbmem-gpu", "--mbmem-host"], "--mbmem-gpu: tests run on the GPU, or with --mbmem-host on the CPU; *"),
        (["--mbmem-gpu", "--mbmem-virtual-gpu=l4-24gb"], "--mbmem-virtual-gpu: with --mbmem-gpu the virtual twin is *"),
        (["--mbmem-timeout=soon"], "--mbmem-timeout: 'soon' is not a number of seconds above 0"),
        (["--mbmem-timeout=0"], "--mbmem-timeout: '0' is not a number of seconds above 0"),
        (["--mbmem-timeout=inf"], "--mbmem-timeout: 'inf' is not a number of seconds above 0"),
        (["--mbmem-timeout=nan"], "--mbmem-timeout: 'nan' is not a number of seconds above 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_options_are_refused(project: pytest.Pytester, arguments: list[str], message: str) -> None:
    before = set(project.path.iterdir())
    result = project.runpytest(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert {p for p in project.path.iterdir() if p.name != "__pycache__"} == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mbmem_virtual_gpu", "h101", "ini key mbmem_virtual_gpu: there is no virtual GPU 'h101'*"),
        ("mbmem_gpus", "nowhere.yaml", "ini key mbmem_gpus: *nowhere.yaml is not a file"),
        ("mbmem_timeout", "-1", "ini key mbmem_timeout: '-1' is not a number of seconds above 0"),
        ("mbmem_tolerance", "3", "ini key mbmem_tolerance: *'3'*"),
        ("mbmem_tolerance", "100%", "ini key mbmem_tolerance: '100%' is not below 100%"),
        ("mbmem_slack", "2", "ini key mbmem_slack: '2' is not a size*"),
        ("mbmem_baselines", "recipe.yaml", "ini key mbmem_baselines: *recipe.yaml is not a folder"),
        ("mbmem_baselines", "", "ini key mbmem_baselines: the path is empty"),
    ],
)
def test_wrong_ini_keys_are_refused(project: pytest.Pytester, key: str, value: str, message: str) -> None:
    ini(project, **{key: value})
    result = project.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
