"""Out of memory on the virtual GPU: the facts, the verdict by trials, and the figures of the remedies."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem import incompatibilities
from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Failure, Measurement
from pytest_mbmem.oom import Shortage
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.units import parse_bytes
from pytest_mbmem.virtual_gpu.gpus import MOST_BYTES

MIB = 2**20
# Its logits (1000 MiB in fp32) have no piece to go to in step 2, when the optimizer has made its state.
RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=1024, num_attention_heads=8, vocab_size=32000),
    training=Training(seq_length=2048, micro_batch_size=4, steps=2, attention_backend="flash"),
)
EXPANDABLE = {"alloc_conf": "expandable_segments:True"}

At = Callable[[int], Launcher]


@pytest.fixture(scope="module")
def at(launcher: Launcher) -> At:
    """A launcher for a GPU on which PyTorch can have so many bytes."""
    return lambda usable: launcher.on(replace(launcher.gpu, capacity=usable + launcher.gpu.context_bytes))


def measured(launcher: Launcher, recipe: Recipe, rank: int = 0) -> Measurement:
    return launcher.measure(recipe, ranks=[rank], count_flops=False, check_effects=False)


def failed(launcher: Launcher, recipe: Recipe) -> tuple[Measurement, Failure, Shortage]:
    measurement = measured(launcher, recipe)
    failure = measurement.failure
    assert failure is not None
    assert failure.shortage is not None
    return measurement, failure, failure.shortage


def explained(launcher: Launcher, measurement: Measurement) -> Shortage:
    failure = launcher.explain(measurement).failure
    assert failure is not None
    assert failure.shortage is not None
    return failure.shortage


@pytest.fixture(scope="module")
def without_limit(at: At) -> dict[str, int]:
    """Peaks of the recipe where nothing is short, with the default allocator and with expandable segments."""
    most = MOST_BYTES - 2**30
    default, expandable = measured(at(most), RECIPE), measured(at(most), RECIPE.but(**EXPANDABLE))
    return {
        "allocated": default.peak(),
        "reserved": default.peak("reserved"),
        "expandable allocated": expandable.peak(),
        "expandable reserved": expandable.peak("reserved"),
    }


@pytest.fixture(scope="module")
def fragmented(at: At, without_limit: dict[str, int]) -> Launcher:
    """A GPU with just the memory that expandable segments need."""
    return at(without_limit["expandable reserved"])


@pytest.fixture(scope="module")
def too_small(at: At, without_limit: dict[str, int]) -> Launcher:
    """A GPU that lacks 256 MiB whatever the allocator does."""
    return at(without_limit["expandable allocated"] - 256 * MIB)


@pytest.fixture(scope="module")
def in_pieces(fragmented: Launcher) -> Measurement:
    """Of the recipe there."""
    return failed(fragmented, RECIPE)[0]


@pytest.fixture(scope="module")
def lacking(too_small: Launcher) -> Measurement:
    """Of the recipe there."""
    return failed(too_small, RECIPE)[0]


def test_the_facts_are_those_of_pytorch(in_pieces: Measurement, without_limit: dict[str, int]) -> None:
    measurement, failure = in_pieces, in_pieces.failure
    assert failure is not None
    shortage = failure.shortage
    assert shortage is not None
    message = failure.message
    assert (failure.kind, failure.name) == ("out of memory", "step-2/forward")
    assert parse_bytes(_in(message, r"Tried to allocate (\S+ \w+)"), "") == shortage.requested
    assert _in(message, r"Of the allocated memory (\S+ \w+)") == _gib(shortage.allocated)
    assert _in(message, r"and (\S+ \w+) is reserved by PyTorch but unallocated") == _mib(shortage.unusable)
    assert _in(message, r"of which (\S+ \w+) is free") == _mib(shortage.device_free)
    assert shortage.usable == without_limit["expandable reserved"]
    assert 0 < shortage.largest_piece < shortage.requested
    assert shortage.pieces > 1
    assert shortage.line.startswith("megatron/core/tensor_parallel/cross_entropy.py:")
    assert shortage.diagnosis is None
    assert measurement.can_be_explained


def _in(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    assert found is not None
    return found[1]


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def test_the_module_that_ran_in_backward_is_named(at: At) -> None:
    """The gradient of the logits' input has no room beside what the forward pass keeps."""
    recipe = RECIPE.but(vocab_size=1000, ffn_hidden_size=32768, steps=1)
    everything = measured(at(MOST_BYTES - 2**30), recipe)
    forward = everything.peak("reserved", phase="forward")
    assert everything.peak() > forward
    _, failure, shortage = failed(at(forward), recipe)
    assert failure.name == "step-1/backward"
    assert shortage.module == "output_layer"
    assert shortage.line.startswith("megatron/core/tensor_parallel/layers.py:")
    assert shortage.line.endswith(" (backward)")


def test_fragmentation(fragmented: Launcher, in_pieces: Measurement, without_limit: dict[str, int]) -> None:
    shortage = explained(fragmented, in_pieces)
    assert in_pieces.failure is not None
    assert replace(shortage, diagnosis=None) == in_pieces.failure.shortage
    diagnosis = shortage.diagnosis
    assert diagnosis is not None
    assert diagnosis.verdict == shortage.verdict == "fragmentation"
    need, recorded, replayed, again = diagnosis.trials
    assert (need.under, need.fits, need.replayed) == ("without limit", True, False)
    assert (need.peak_allocated, need.peak_reserved) == (without_limit["allocated"], without_limit["reserved"])
    assert (recorded.under, recorded.fits, recorded.failed_request) == ("as recorded", False, shortage.requested)
    for trial in (replayed, again):
        assert (trial.under, trial.fits) == ("expandable segments", True)
        assert trial.peak_allocated == without_limit["expandable allocated"]
        assert trial.peak_reserved == without_limit["expandable reserved"]
    assert (replayed.replayed, again.replayed) == (True, False)

    first, *others = diagnosis.remedies
    changed = measured(fragmented, RECIPE.but(**first.changes))
    assert (first.name, first.fits, changed.failure) == ("expandable segments", True, None)
    assert first.peak_allocated == changed.peak()
    assert first.saved == without_limit["allocated"] - changed.peak()
    assert {remedy.note for remedy in others} == {"not measured: expandable segments are enough"}


def test_a_fraction_of_the_device_is_taken_once(launcher: Launcher, without_limit: dict[str, int]) -> None:
    """PyTorch takes it, and the trials leave that to PyTorch."""
    half = "per_process_memory_fraction:0.5"
    there = launcher.on(replace(launcher.gpu, capacity=2 * without_limit["expandable reserved"]))
    measurement, _, shortage = failed(there, RECIPE.but(alloc_conf=half))
    assert shortage.usable == shortage.limit == without_limit["expandable reserved"]
    diagnosis = explained(there, measurement).diagnosis
    assert diagnosis is not None
    assert diagnosis.verdict == "fragmentation", diagnosis
    need, recorded, replayed, again = diagnosis.trials
    assert (need.fits, need.peak_reserved) == (True, without_limit["reserved"])
    assert (recorded.fits, recorded.failed_request) == (False, shortage.requested)
    assert replayed.fits
    assert replayed.peak_allocated == again.peak_allocated == without_limit["expandable allocated"]


def test_capacity(at: At, too_small: Launcher, lacking: Measurement, without_limit: dict[str, int]) -> None:
    diagnosis = explained(too_small, lacking).diagnosis
    assert diagnosis is not None
    assert diagnosis.verdict == "capacity"
    assert [(t.under, t.fits) for t in diagnosis.trials] == [
        ("without limit", True),
        ("as recorded", False),
        ("expandable segments", False),
    ]
    fits = {remedy.name: remedy.fits for remedy in diagnosis.remedies}
    assert fits == {
        "expandable segments": False,
        "recompute core_attn": False,
        "PP 1 -> 2, keeping DP": True,
        "recompute mlp": True,
        "full recompute": True,
        "TP 1 -> 2": True,
    }
    most = at(MOST_BYTES - 2**30)
    for remedy in map(diagnosis.remedy, ("expandable segments", "recompute core_attn", "PP 1 -> 2, keeping DP")):
        changed = RECIPE.but(**{**EXPANDABLE, **remedy.changes})
        ranks = [0, 1] if "pp" in remedy.changes else [0]  # of the stage that was split, both ends
        assert remedy.peak_allocated == max(measured(most, changed, rank).peak() for rank in ranks), remedy.name
        before = "allocated" if remedy.name == "expandable segments" else "expandable allocated"
        assert remedy.saved == without_limit[before] - remedy.peak_allocated, remedy.name
        assert remedy.fits == all(measured(too_small, changed, rank).failure is None for rank in ranks), remedy.name


def test_a_remedy_whose_reserve_is_more_than_there_is_runs_there(at: At) -> None:
    """Whether it fits is then not told by its peaks: PyTorch may give back what it does not use."""
    recipe = RECIPE.but(recompute_granularity="selective", recompute_modules=["mlp"], **EXPANDABLE)
    peak = measured(at(MOST_BYTES - 2**30), recipe)
    assert peak.peak() < peak.peak("reserved")
    between = at((peak.peak() + peak.peak("reserved")) // 2)
    measurement, *_ = failed(between, RECIPE)
    diagnosis = explained(between, measurement).diagnosis
    assert diagnosis is not None
    assert diagnosis.remedy("recompute mlp").peak_allocated == peak.peak()
    assert diagnosis.remedy("recompute mlp").fits == (measured(between, recipe).failure is None)


def test_with_expandable_segments_it_is_capacity(too_small: Launcher) -> None:
    measurement, _, before = failed(too_small, RECIPE.but(**EXPANDABLE))
    assert before.expandable_segments
    assert before.alloc_conf == "expandable_segments:True"
    diagnosis = explained(too_small, measurement).diagnosis
    assert diagnosis is not None
    assert diagnosis.verdict == "capacity"
    assert [t.under for t in diagnosis.trials] == ["without limit", "as recorded"]
    assert "expandable segments" not in [remedy.name for remedy in diagnosis.remedies]


def test_a_failure_is_explained_once_and_its_history_is_gone(
    too_small: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    measurement, *_ = failed(too_small, RECIPE.but(micro_batch_size=8, steps=1))
    first = too_small.explain(measurement)
    assert list(tmp_path.iterdir()) == []

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(type(too_small), "call_all", never)
    assert too_small.explain(measurement) == first
    assert too_small.explain(first) is first


def test_a_remedy_that_megatron_refuses_is_named_with_its_reason(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers and the embedding make two equal stages, and no four; as if no document said so."""
    monkeypatch.setattr(incompatibilities, "check", lambda *_: None)
    split = Parallelism(pp=2, account_for_embedding_in_pipeline_split=True)
    recipe = RECIPE.but(parallelism=split, num_layers=5, global_batch_size=8)
    small = at(512 * MIB)
    measurement, failure, _ = failed(small, recipe)
    assert failure.name == "build"
    diagnosis = explained(small, measurement).diagnosis
    assert diagnosis is not None
    refused = diagnosis.remedy("PP 2 -> 4, keeping DP")
    assert (refused.peak_allocated, refused.fits) == (None, None)
    assert refused.note.startswith("refused: Megatron Core refuses it: ")
    assert diagnosis.remedy("recompute mlp").peak_allocated is not None


def test_a_rank_of_the_last_stage_is_compared_with_the_last_stage(launcher: Launcher, at: At) -> None:
    recipe = RECIPE.but(parallelism=Parallelism(tp=2, pp=2, dp=2), global_batch_size=8, num_layers=8)
    last = 7  # tp 1, dp 1, pp 1
    small = at(512 * MIB)
    measurement = measured(small, recipe, last)
    diagnosis = explained(small, measurement).diagnosis
    assert diagnosis is not None
    assert diagnosis.rank == last
    more = diagnosis.remedy("PP 2 -> 4, keeping DP")
    changed = recipe.but(**{**EXPANDABLE, **more.changes})
    assert more.peak_allocated == measured(launcher, changed, 15).peak()
    assert more.peak_allocated != measured(launcher, changed, 0).peak()


def test_experts_have_remedies_of_their_own(at: At) -> None:
    moe = Moe(num_moe_experts=4, moe_grouped_gemm=True)
    model = Model(num_layers=2, hidden_size=512, num_attention_heads=4, vocab_size=1000, moe=moe)
    recipe = Recipe(model=model, training=Training(seq_length=1024, micro_batch_size=4, steps=1))
    small = at(300 * MIB)
    measurement, *_ = failed(small, recipe)
    diagnosis = explained(small, measurement).diagnosis
    assert diagnosis is not None
    for name in ("recompute moe_act", "recompute moe"):
        saved = diagnosis.remedy(name).saved
        assert saved is not None
        assert saved > 0, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"failure": None}, "the measurement did not fail; only one that ran out of memory can be explained"),
        ({"failure": Failure("died", 0, "killed")}, "the measurement failed otherwise: died; only one"),
        ({"failure": Failure("out of memory", 0, "as another version wrote it")}, "the measurement does not say what"),
        ({"recipe": None}, "the measurement is of no recipe"),
    ],
)
def test_what_cannot_be_explained(
    too_small: Launcher, lacking: Measurement, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        too_small.explain(replace(lacking, **change))
