"""The catalogue against what Megatron Core was seen to do with 163 settings (published_rows.yaml): nothing is run.

Each row holds for megatron-core 0.16.1 and for Megatron-LM's main branch (0.20), both without Transformer Engine.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_mbmem.incompatibilities import Outcome, broken, catalog, installed

ROWS = yaml.safe_load(Path(__file__).with_name("published_rows.yaml").read_text(encoding="utf-8"))
COLUMNS = {"0.16.1": "megatron_core_0.16.1", "0.20.0": "megatron_lm_main_0.20"}

# 0.16.1 fails in comparing versions with a Transformer Engine that is not there.
TRAP = {"type": "TypeError", "message": "'>=' not supported between instances of 'NoneType' and 'Version'"}
TRAPPED = {
    "recompute.fp8_tensorwise_no_te",
    "fp8.moe_no_te",
    "opt.precision_aware_no_te",
    "silent.opt.cpu_offload_precision_aware_bf16_moments",
}


def value(text: str) -> Any:
    """Of a row's Python repr; what is no literal ("full", "torch.bfloat16") is a text."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def settings(row: dict[str, Any]) -> dict[str, Any]:
    environment = row.get("environment", {})
    found = {name: value(text) for name, text in row["arguments"].items()}
    if row["config"] == "MLATransformerConfig":
        found["multi_latent_attention"] = True
    alloc_conf = environment.get("PYTORCH_ALLOC_CONF", environment.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return {**found, **environment, "alloc_conf": alloc_conf}


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def agrees(outcome: Outcome, raised: dict[str, Any]) -> bool:
    """Whether an outcome documents what was raised; of long messages the rows have the start."""
    seen, documented = one_line(raised["message"]), one_line(outcome.message)
    same_start = seen.startswith(documented[: len(seen)]) and bool(seen) == bool(documented)
    return outcome.raises == raised["type"] and same_start


CASES = [
    pytest.param(row, version, row[column], id=f"{row['id']}-{version}")
    for version, column in COLUMNS.items()
    for row in ROWS
]


def test_all_rows_are_here() -> None:
    assert len(ROWS) == 163
    assert {row["id"] for row in ROWS if row[COLUMNS["0.16.1"]] == TRAP} == TRAPPED
    assert not [row["id"] for row in ROWS if row[COLUMNS["0.20.0"]] == TRAP]


@pytest.mark.parametrize(("row", "version", "seen"), CASES)
def test_the_catalogue_says_what_was_seen(row: dict[str, Any], version: str, seen: Any) -> None:
    found, versions = settings(row), {"megatron-core": version}
    entries = [entry for entry in catalog().values() if entry.breaks(found, versions)]
    documented = {entry.id: entry.outcome(found, versions) for entry in entries}
    if seen != "accepted":
        assert any(outcome and agrees(outcome, seen) for outcome in documented.values()), documented
    else:
        at_once = {id: o for id, o in documented.items() if o and o.raises and o.at == "configuration"}
        assert not at_once
        if row["id"].startswith("silent."):
            assert documented
        if row["id"].startswith("ok."):
            assert not documented


@pytest.mark.parametrize("row", [row for row in ROWS if row["id"].startswith("ok.")], ids=lambda row: row["id"])
def test_what_is_fine_breaks_nothing_with_the_installed_versions_either(row: dict[str, Any]) -> None:
    assert [entry.id for entry in catalog().values() if entry.breaks(settings(row), installed())] == []


def test_what_slips_past_megatron_is_refused() -> None:
    """Three forms of an allocator setting that Megatron's own check does not find."""
    slipped = [row for row in ROWS if row["id"].startswith("silent.ddp.nccl_ub_expandable")]
    assert len(slipped) == 3
    for row in slipped:
        refused = [entry.id for entry in broken(settings(row), {"megatron-core": "0.16.1", "torch": "2.10"})]
        assert refused == ["nccl-ub-with-expandable-segments"]
