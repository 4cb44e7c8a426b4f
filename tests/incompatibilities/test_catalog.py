"""The catalogue's form: what is wrong in it is said with file, line and id; what it says is looked up by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.incompatibilities import catalog
from pytest_mbmem.incompatibilities.catalog import Catalog, Names
from pytest_mbmem.megatron_settings import settings
from pytest_mbmem.recipe import Recipe

GOOD = """\
documented: ">=0.16"
defaults: {cpu_offloading: false, pipeline_model_parallel_size: 1, alloc_conf: "", nccl_ub: false, modules: null}
terms: {pipelined: pipeline_model_parallel_size > 1}
constraints:
- id: offload-with-pp
  forbids: cpu_offloading and pipelined
  versions: {megatron-core: ">=0.16"}
  megatron:
  - {raises: ValueError, message: no pipelines, at: configuration, versions: {megatron-core: "<0.20"}}
  - {accepts: nothing is offloaded, if: pipeline_model_parallel_size < 3}
  why: A pipeline has no layers to offload.
  instead: Turn one of them off.
  source: made up
  example: {config: TransformerConfig, arguments: {cpu_offloading: true, pipeline_model_parallel_size: 2}}
- id: segments
  forbids: nccl_ub and expandable_segments and older(transformer_engine, '2.6')
  judged: built
  megatron: [{accepts: nothing}]
  needs: [gpu]
  why: a
  instead: b
  source: c
  example: {recipe: {model: {num_layers: 1, hidden_size: 64, num_attention_heads: 4}}}
"""


def load(folder: Path, text: str) -> Catalog:
    path = folder / "made_up.yaml"
    path.write_text(text)
    return Catalog(path)


@pytest.fixture
def made(tmp_path: Path) -> Catalog:
    return load(tmp_path, GOOD)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cpu_offloading and", "cpu_ofloading and", r":6: offload-with-pp: forbids: unknown setting 'cpu_ofloading'"),
        ("  why: A", "  because: A", r":11: offload-with-pp: because: unknown key"),
        (
            '{megatron-core: ">=0.16"}',
            '{megatron-core: "0.16 or so"}',
            r":7: offload-with-pp: versions: megatron-core: '0.16 or so' is not a version",
        ),
        (
            '{megatron-core: ">=0.16"}',
            "{megatron-core: 0.16}",
            r":7: offload-with-pp: versions: megatron-core: 0.16 is not a version range",
        ),
        (
            '{megatron-core: ">=',
            '{megatron: ">=',
            r":7: offload-with-pp: versions: 'megatron' is not one of megatron-c",
        ),
        ("at: configuration", "at: night", r":9: offload-with-pp: megatron.0.at: 'night' is not one of configuration"),
        ("pipeline_model_parallel_size < 3", "pp < 3", r":10: offload-with-pp: megatron.1.if: unknown setting 'pp'"),
        ("needs: [gpu]", "needs: [luck]", r":19: segments: needs: 'luck' is not one of"),
        ("judged: built", "judged: later", r":17: segments: judged: 'later' is not one of before, built"),
        ("accepts: nothing}", "accepts: nothing, raises: E}", r":18: segments: megatron.0: .* neither or both"),
        ("raises: ValueError, message: no pipelines, ", "raises: ValueError, ", r"megatron.0.message: is missing"),
        ("config: TransformerConfig", "config: Transformer", r"example.config: 'Transformer' is not one of"),
        ("{cpu_offloading: true,", "{cpu_offload: true,", r"example.arguments.cpu_offload: unknown setting; did you"),
        ("id: segments", "id: offload-with-pp", r":15: offload-with-pp: given before on line 5"),
        ("id: segments", "id: Segments!", r"constraint 2 has no id"),
        ("  source: c\n", "", r":15: segments: source: is missing"),
        ("pipelined: pipe", "nccl_ub: pipe", r":3: terms.nccl_ub: is the name of a setting or function already"),
        ("nccl_ub and exp", "open('x') and exp", r"calls something else than len"),
        ("nccl_ub and exp", "nccl_ub.real and exp", r"Attribute is not possible"),
        ("nccl_ub and exp", "nccl_ub and and exp", r"is not an expression"),
        (
            "{cpu_offloading: true, pipeline_model_parallel_size: 2}",
            "[cpu_offloading]",
            r"example.arguments: .* is not a mapping of names",
        ),
        ("model: {num_layers: 1,", "modell: {num_layers: 1,", r":23: segments: example.recipe: modell: unknown key"),
        ("accepts: nothing}", "accepts: ''}", r":18: segments: megatron.0.accepts: '' is not a text"),
        ("accepts: nothing}", "accepts: nothing, at: run}", r":18: segments: megatron.0.at: unknown key"),
        ("raises: ValueError,", "raises: '',", r":9: offload-with-pp: megatron.0.raises: '' is not a text"),
        ("{cpu_offloading: false,", "{1: false, cpu_offloading: false,", r"defaults: .* is not a mapping of names"),
        ("terms: {pipelined", "terms: {1", r"terms: .* is not a mapping of names"),
        ('documented: ">=0.16"', "documented: all", r":1: documented: megatron-core: 'all' is not a version range"),
        ("constraints:", "limits:", r"must hold the keys documented, defaults, terms and constraints"),
    ],
)
def test_a_wrong_entry_is_named_with_line_and_id(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(UserError, match=message):
        load(tmp_path, GOOD.replace(old, new, 1))


def test_what_breaks_and_what_megatron_does_depend_on_versions(made: Catalog) -> None:
    entry = made["offload-with-pp"]
    settings = {"cpu_offloading": True, "pipeline_model_parallel_size": 2}
    assert entry.breaks(settings, {"megatron-core": "0.16.1"})
    assert entry.breaks(settings, {"megatron-core": "0.16.0rc1"}) is False
    assert entry.breaks(settings, {})  # not installed: as documented
    assert not entry.breaks({"cpu_offloading": True}, {})
    old, new = (entry.outcome(settings, {"megatron-core": v}) for v in ("0.16.1", "0.20.0"))
    assert old is not None
    assert (old.raises, old.message, old.accepts) == ("ValueError", "no pipelines", "")
    assert new is not None
    assert new.accepts == "nothing is offloaded"
    assert entry.outcome({**settings, "pipeline_model_parallel_size": 4}, {"megatron-core": "0.20.0"}) is None
    assert entry.reads == ("cpu_offloading", "pipeline_model_parallel_size")


@pytest.mark.parametrize(
    ("alloc_conf", "breaks"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments: True", True),
        ("expandable_segments:True,expandable_segments:False", False),
        ("", False),
    ],
)
def test_allocator_settings_are_read_as_pytorch_reads_them(made: Catalog, alloc_conf: str, breaks: bool) -> None:
    settings = {"nccl_ub": True, "alloc_conf": alloc_conf}
    assert made["segments"].breaks(settings, {}) is breaks
    assert made["segments"].breaks(settings, {"transformer-engine": "2.5"}) is breaks
    assert not made["segments"].breaks(settings, {"transformer-engine": "2.6"})


def test_values_of_the_wrong_kind_break_nothing(made: Catalog) -> None:
    settings = {"cpu_offloading": True, "pipeline_model_parallel_size": "two"}
    assert not made["offload-with-pp"].breaks(settings, {})


def test_an_unknown_id_lists_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"'cpu-offload-pp' is not a documented constraint; nearest: .*cpu-offload-with-pp"
    ):
        catalog()["cpu-offload-pp"]
    with pytest.raises(UserError, match="3 is not a documented constraint"):
        catalog()[3]  # type: ignore[index]


def test_each_example_breaks_its_own_entry() -> None:
    wrong = []
    for entry in catalog().values():
        example = entry.example
        found = settings(example) if isinstance(example, Recipe) else example.settings
        if not entry.forbids.holds(Names(catalog(), found, {})):
            wrong.append(entry.id)
    assert wrong == []
