"""The labels of the installed Megatron Core, against Megatron's own refusal of a wrong one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_mbmem import incompatibilities, labels
from pytest_mbmem.errors import UserError
from pytest_mbmem.incompatibilities.catalog import Names
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe


@pytest.mark.parametrize(
    ("read", "changes"),
    [
        (labels.recompute_labels, {"recompute_granularity": "selective", "recompute_modules": ["nonsense"]}),
        (labels.offload_labels, {"offload_modules": ["nonsense"]}),
    ],
)
def test_labels_are_those_that_megatron_names_when_it_refuses_one(
    read: object, changes: dict[str, object], launcher: Launcher, small_recipe: Recipe
) -> None:
    wrong = small_recipe.but(**changes).to_dict()
    raised = launcher.call("pytest_mbmem.measure.refusal_worker:configure", {"recipe": wrong}).value["raised"]
    allowed = raised["message"].split("Allowed modules are: ")[1]
    assert read() == tuple(sorted(ast.literal_eval(allowed)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("read", "term"), [(labels.recompute_labels, "recompute_labels"), (labels.offload_labels, "offload_labels")]
)
def test_the_catalogue_of_constraints_has_the_same(read: Callable[[], tuple[str, ...]], term: str) -> None:
    names = Names(incompatibilities.catalog(), {}, incompatibilities.installed())
    assert tuple(sorted(names[term])) == read()


def test_reading_them_imports_nothing() -> None:
    code = "import sys; from pytest_mbmem import labels; labels.recompute_labels(); "
    code += "print([m for m in ('torch', 'megatron') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_version_that_hides_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "transformer_config.py"
    source.write_text("allowed_modules = {'a'}\ninvalid = set(self.other) - allowed_modules\n")
    monkeypatch.setattr(labels, "_config_source", lambda: source)
    with pytest.raises(UserError, match=r"transformer_config\.py: the labels of recompute_modules are not where"):
        labels.recompute_labels()


def test_the_set_nearest_above_its_use_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "transformer_config.py"
    source.write_text(
        "allowed = {'b', 'a'}\nbad = set(self.recompute_modules) - allowed\n"
        "allowed = {'c'}\nbad = set(self.offload_modules) - allowed\n"
    )
    monkeypatch.setattr(labels, "_config_source", lambda: source)
    assert (labels.recompute_labels(), labels.offload_labels()) == (("a", "b"), ("c",))


def test_settings_are_the_fields_of_megatrons_classes(launcher: Launcher) -> None:
    names = labels.setting_names()
    assert {"num_layers", "tensor_model_parallel_size", "q_lora_rank", "nccl_ub", "lr", "cuda_graph_impl"} <= names
    assert "num_layer" not in names
