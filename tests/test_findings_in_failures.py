"""Where a diagnosis is shown: in failures, of tests that run whole in a worker and under xdist too, and in reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from pytest_mbmem.cli import main

FLASH = """
import pytest

@pytest.mark.memory_saving(control={"recompute_granularity": None})
def test_flash(mbmem):
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    training = {"seq_length": 64, "attention_backend": "flash"}
    memory = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    mbmem.measure({"model": model, "training": training, "memory": memory})
"""

RECIPE_YAML = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 1000}
training: {seq_length: 64}
"""

REFUSED = """
import pytest
from pytest_mbmem.errors import UserError

RECIPE = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
    "parallelism": {"pp": 2},
    "training": {"seq_length": 64},
    "memory": {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
}

def test_refused(mbmem):
    mbmem.measure(RECIPE)

def test_caught(mbmem):
    with pytest.raises(UserError):
        mbmem.measure(RECIPE)
"""


def rules_of(project: pytest.Pytester) -> dict[str, Any]:
    data = json.loads((project.path / "o.json").read_text())
    return {test["id"].rpartition("::")[2]: [f["rule"] for f in test["findings"]] for test in data["tests"]}


def properties(project: pytest.Pytester, name: str) -> dict[str, str]:
    cases = ET.parse(project.path / "j.xml").iter("testcase")
    return {c.get("name", ""): p.get("value", "") for c in cases for p in c.iter("property") if p.get("name") == name}


def test_a_failure_has_a_section_and_the_reports_have_the_findings(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(REFUSED)
    result = real_project.runpytest_inprocess("--mbmem-json=o.json", "--junitxml=j.xml")
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*- diagnosis -*",
            "pipeline parallelism with CPU offloading: the recipe is refused before anything runs: cpu-offload-with-pp",
            "  evidence  cpu-offload-with-pp forbids: cpu_offloading and pipeline_model_parallel_size > 1",
            "  confirm   mbmem check RECIPE.yaml; mbmem explain cpu-offload-with-pp",
        ]
    )
    rule = "pipeline parallelism with CPU offloading"
    assert rules_of(real_project) == {"test_refused": [rule], "test_caught": []}
    assert properties(real_project, "mbmem_findings") == {"test_refused": rule}


def test_what_passes_has_findings_in_the_reports_alone(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(
        """
import pytest

@pytest.mark.peak_memory(metric="allocated")
def test_it(mbmem):
    mbmem.measure("recipe.yaml")
"""
    )
    (project.path / "recipe.yaml").write_text(RECIPE_YAML)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "1000")
    project.runpytest_inprocess("--mbmem-update=new").assert_outcomes(passed=1)
    monkeypatch.setenv("FAKE_EXTRA_MIB", "0")
    result = project.runpytest_inprocess("--mbmem-json=o.json")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*diagnosis*")
    assert rules_of(project) == {"test_it": ["loose baseline"]}


def test_under_xdist_they_travel_to_the_controller(project: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    project.makepyfile(FLASH)
    result = project.runpytest_inprocess("-n1", "--mbmem-json=o.json", "--junitxml=j.xml")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*- diagnosis -*", "setting without effect: memory.recompute_granularity and *"])
    assert rules_of(project) == {"test_flash": ["setting without effect"]}
    assert properties(project, "mbmem_findings") == {"test_flash": "setting without effect"}


def test_of_a_test_that_runs_whole_in_a_worker(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
import pytest
from pytest_mbmem.growth import watch

@pytest.mark.no_memory_growth
def test_leak():
    import torch
    kept = []
    watch(lambda: kept.append(torch.empty(2**20, dtype=torch.uint8, device="cuda")))

@pytest.mark.peak_memory("100 GiB")
def test_pieces():
    import torch
    small = [torch.empty(600 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(130)]
    del small[::2]
    torch.empty(30 * 2**30, dtype=torch.uint8, device="cuda")
    torch.empty(70 * 2**30, dtype=torch.uint8, device="cuda")

def test_refused(megatron_model):
    megatron_model({
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
        "parallelism": {"pp": 2},
        "training": {"seq_length": 64},
        "memory": {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
    })
"""
    )
    result = real_project.runpytest_inprocess("--mbmem-json=o.json", "--junitxml=j.xml")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "leak by step: rank 0 keeps 1.00 MiB more with every step",
            "*- diagnosis -*",
            "capacity: rank 0 asked for 70.00 GiB in test; expandable segments were tried and are not enough",
        ]
    )
    assert rules_of(real_project) == {
        "test_leak": ["leak by step"],
        "test_pieces": ["capacity"],
        "test_refused": ["pipeline parallelism with CPU offloading"],
    }
    assert properties(real_project, "mbmem_findings")["test_pieces"] == "capacity"


def test_the_command_says_them_too(real_project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    (real_project.path / "big.yaml").write_text(
        "model: {num_layers: 2, hidden_size: 2048, num_attention_heads: 16, vocab_size: 64000}\n"
        "training: {seq_length: 8192, micro_batch_size: 20, steps: 1, attention_backend: flash}\n"
    )
    assert main(["measure", "big.yaml"]) == 1
    shown = capsys.readouterr().out
    assert "\ndiagnosis:\n\ncapacity: rank 0 asked for" in shown
    assert "estimate exceeds capacity: the closed-form estimate is more than the GPU has" in shown
