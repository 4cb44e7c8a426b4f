"""`mbmem check` and `mbmem explain`, and the documentation's table of constraints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_mbmem.cli import main
from pytest_mbmem.incompatibilities import catalog
from pytest_mbmem.incompatibilities.explain import markdown_table

PAGE = Path(__file__).parents[1] / "docs" / "incompatibilities.md"

TWICE_BROKEN = """\
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4}
parallelism:
  pp: 2
memory:
  cpu_offloading: true
  cpu_offloading_num_layers: 1
  recompute_granularity: selective
"""


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.yaml"
    path.write_text(TWICE_BROKEN)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text("model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\n")
    return path


def test_check_lists_every_broken_constraint_with_its_lines(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(broken)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{broken}: incompatible settings: cpu-offload-with-pp, cpu-offload-with-recompute\n")
    assert "memory.cpu_offloading: true (line 5), parallelism.pp: 2 (line 3)" in said
    assert "memory.recompute_granularity: selective (line 7)" in said
    assert "raises ValueError: Currently there is no support for Pipeline parallelism with CPU offloading" in said
    assert len(re.findall("^  instead ", said, re.MULTILINE)) == 2


def test_check_passes_what_breaks_nothing(good: Path, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(good)]) == 0
    assert "good.yaml: breaks none of the documented constraints (megatron-core 0." in capsys.readouterr().out
    assert main(["check", str(good), str(broken)]) == 1
    said = capsys.readouterr().out
    assert "good.yaml: breaks none" in said
    assert "broken.yaml: incompatible settings" in said


def test_check_says_what_may_have_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "idle.yaml"
    memory = "memory: {recompute_granularity: selective, recompute_modules: [moe]}\n"
    path.write_text(f"model: {{num_layers: 2, hidden_size: 64, num_attention_heads: 4}}\n{memory}")
    assert main(["check", str(path)]) == 0
    assert "a measurement tells  recompute-" in capsys.readouterr().out


def test_check_judges_for_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graphs.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\nmegatron: {cuda_graph_impl: full_iteration}\n"
    )
    assert main(["check", str(path), "--megatron-core", "0.16.1"]) == 1
    assert "megatron.cuda_graph_impl: full_iteration (line 2)" in capsys.readouterr().out
    assert main(["check", str(path), "--megatron-core", "0.20.0"]) == 0
    said = capsys.readouterr().out
    assert "breaks none of the documented constraints (megatron-core 0.20.0" in said
    assert "not documented" not in said
    for unknown in ("0.9", "0.99"):
        assert main(["check", str(path), "--megatron-core", unknown]) in (0, 1)
        said = " ".join(capsys.readouterr().out.split())
        assert f"not documented megatron-core {unknown}; known are megatron-core <0.21" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "none.yaml"], "none.yaml: cannot be read"),
        (["check", "good.yaml", "--megatron-core", "new"], "--megatron-core: 'new' is not a version"),
        (
            ["explain", "cpu-offload-pp"],
            "'cpu-offload-pp' is not a documented constraint; nearest: cpu-offload-with-pp",
        ),
    ],
)
def test_mistakes_are_one_message(
    arguments: list[str],
    message: str,
    good: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(good.parent)
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("mbmem: error: ")
    assert said.count("\n") == 1
    assert message in said


def test_explain_prints_an_entry_and_without_an_id_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cpu-offload-with-pp"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cpu-offload-with-pp\n  why ")
    for key in ("why", "instead", "source", "raises ValueError"):
        assert key in said
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(catalog())


def test_the_documentation_has_the_catalogue_as_a_table() -> None:
    table = markdown_table(catalog())
    assert table.count("\n") == len(catalog()) + 1
    written = PAGE.read_text(encoding="utf-8")
    assert table in written, "run: python -m pytest_mbmem.incompatibilities.explain docs/incompatibilities.md"


def test_a_file_that_is_no_recipe_does_not_hide_the_others(
    tmp_path: Path, broken: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: 3\n")
    assert main(["check", str(wrong), str(broken), str(good)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"mbmem: error: {wrong}:1: model: ")
    assert "broken.yaml: incompatible settings" in said.out
    assert "good.yaml: breaks none" in said.out


def test_check_names_settings_that_megatron_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "typo.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\nmegatron: {cuda_graph_imp: local}\n"
    )
    assert main(["check", str(path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "megatron.cuda_graph_imp: the installed Megatron Core has no such setting; nearest: cuda_graph_impl" in said
    path.write_text(path.read_text().replace("cuda_graph_imp: local", "moe_router_num_groups: 2"))
    assert main(["check", str(path), "--megatron-core", "0.20"]) == 0  # whose names are not known
    capsys.readouterr()


def test_what_this_package_sets_is_not_said_to_be_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sgd.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}\noptimizer: {kind: sgd}\n"
        "parallelism: {dp: 2, distributed_optimizer: true}\nmemory: {optimizer_cpu_offload: true}\n"
    )
    assert main(["check", str(path)]) == 1
    assert "megatron.use_precision_aware_optimizer: true (set by this package)" in capsys.readouterr().out
