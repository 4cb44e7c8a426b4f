"""From evidence to a verdict, and which remedies apply to a recipe in which order."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from pytest_mbmem.alloc_conf import has_expandable_segments
from pytest_mbmem.measurement import Failure, read_plain
from pytest_mbmem.oom import Circumstance, Diagnosis, Remedy, Shortage, Trial, diagnose, taken_outside
from pytest_mbmem.recipe import Lora, Memory, Mla, Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.remedies import remedies, with_expandable_segments
from pytest_mbmem.report.oom import failure_lines, message_lines

GIB = 2**30
SHORTAGE = Shortage(
    requested=2 * GIB,
    allocated=70 * GIB,
    reserved=76 * GIB,
    pieces=4,
    largest_piece=GIB,
    device_free=GIB,
    limit=80 * GIB,
    expandable_segments=False,
    module="decoder.layers.*.mlp.linear_fc1",
    line="megatron/core/tensor_parallel/layers.py:744 (forward)",
)
EXPANDABLE = replace(SHORTAGE, expandable_segments=True, alloc_conf="expandable_segments:True")


def trial(under: Circumstance, fits: bool | None, *, replayed: bool = True, need: int = 72) -> Trial:
    return Trial(under, replayed, fits, need * GIB, 78 * GIB, None if fits else 2 * GIB)


NEED = trial("without limit", True, replayed=False)
FAILS = trial("as recorded", False)


def test_what_pytorch_had() -> None:
    assert SHORTAGE.unusable == 6 * GIB
    assert SHORTAGE.usable == 77 * GIB
    assert replace(SHORTAGE, limit=40 * GIB).usable == 40 * GIB  # the process is allowed no more
    assert taken_outside(SHORTAGE, usable=79 * GIB) == 2 * GIB
    assert taken_outside(SHORTAGE, usable=77 * GIB) == 0
    assert taken_outside(replace(SHORTAGE, limit=78 * GIB), usable=79 * GIB) == GIB  # it was allowed no more


@pytest.mark.parametrize(
    ("shortage", "trials", "verdict", "reason"),
    [
        (
            SHORTAGE,
            [NEED, FAILS, trial("expandable segments", True)],
            "fragmentation",
            "the same allocations fit with expandable segments: 72.00 GiB are needed and PyTorch can have 77.00 GiB",
        ),
        (
            SHORTAGE,
            [NEED, FAILS, trial("expandable segments", False)],
            "capacity",
            "expandable segments do not make it fit: 72.00 GiB are needed and PyTorch can have 77.00 GiB",
        ),
        (EXPANDABLE, [NEED, FAILS], "capacity", "expandable segments are on already: 72.00 GiB are needed and"),
        (
            SHORTAGE,
            [NEED, FAILS, trial("expandable segments", False), trial("nothing outside PyTorch", True)],
            "starved",
            "the same allocations fit a device on which nothing outside PyTorch holds memory",
        ),
        (
            SHORTAGE,
            [NEED, FAILS, trial("expandable segments", False), trial("nothing outside PyTorch", False)],
            "capacity",
            "expandable segments do not make it fit",
        ),
    ],
)
def test_verdict(shortage: Shortage, trials: list[Trial], verdict: str, reason: str) -> None:
    found, said = diagnose(shortage, trials, complete=True)
    assert found == verdict
    assert said.startswith(reason)


@pytest.mark.parametrize(
    ("trials", "reason"),
    [
        ([], "the need of the whole run could not be measured"),
        (
            [replace(NEED, fits=None, note="died: killed")],
            "the need of the whole run could not be measured: died: killed",
        ),
        ([NEED, trial("as recorded", None)], "the allocations could not be replayed as recorded"),
        ([NEED, trial("as recorded", True)], "the same allocations fit when they are replayed as recorded"),
        ([NEED, FAILS], "nothing shows what expandable segments would do"),
        ([NEED, FAILS, trial("expandable segments", None)], "nothing shows what expandable segments would do"),
        (
            [NEED, FAILS, trial("expandable segments", False), trial("nothing outside PyTorch", None)],
            "nothing shows what a device without memory outside PyTorch would do",
        ),
        ([FAILS, trial("expandable segments", True)], "the need of the whole run could not be measured"),
        (
            [NEED, FAILS, trial("expandable segments", True), trial("expandable segments", False, replayed=False)],
            "with expandable segments the replay fits and the run does not",
        ),
    ],
)
def test_nothing_is_concluded_without_a_trial(trials: list[Trial], reason: str) -> None:
    found, said = diagnose(SHORTAGE, trials, complete=True)
    assert found == "unknown"
    assert said.startswith(reason)


def test_a_fraction_that_limits_any_device_is_no_capacity() -> None:
    fraction = replace(SHORTAGE, alloc_conf="per_process_memory_fraction:0")
    trials = [trial("without limit", False, replayed=False), FAILS, trial("expandable segments", False)]
    verdict, reason = diagnose(fraction, trials, complete=True)
    assert verdict == "unknown"
    assert reason.startswith("per_process_memory_fraction of the allocator's settings limits any device")


def test_a_history_that_ends_at_the_failure_says_so() -> None:
    fits = trial("expandable segments", True)
    verdict, reason = diagnose(SHORTAGE, [NEED, FAILS, fits], complete=False)
    assert verdict == "fragmentation"
    assert "up to the failed request (what comes after it is not known)" in reason


# Remedies -------------------------------------------------------------------------------------------------------------

MODEL = Model(num_layers=8, hidden_size=64, num_attention_heads=4, vocab_size=1000)
DENSE = Recipe(
    model=MODEL,
    parallelism=Parallelism(tp=2, sequence_parallel=True, pp=2, dp=2),
    training=Training(seq_length=128, global_batch_size=8),
)
MOE = replace(MODEL, moe=Moe(num_moe_experts=4, moe_grouped_gemm=True))


def names(recipe: Recipe, **arguments: bool) -> list[str]:
    return [remedy.name for remedy in remedies(recipe, **{"expandable_segments": False, **arguments})]


def test_remedies_have_the_order_of_the_documents() -> None:
    assert names(DENSE.but(lora=Lora(rank=4))) == [
        "expandable segments",
        "LoRA input re-gather",
        "recompute core_attn",
        "distributed optimizer",
        "PP 2 -> 4, keeping DP",
        "recompute mlp",
        "full recompute",
        "TP 2 -> 4, DP 2 -> 1",
    ]


@pytest.mark.parametrize(
    ("recipe", "absent"),
    [
        (DENSE, "LoRA input re-gather"),
        (DENSE.but(lora=Lora(rank=4, sequence_parallel_input_regather=True)), "LoRA input re-gather"),
        (DENSE.but(lora=Lora(rank=4), sequence_parallel=False), "LoRA input re-gather"),
        (DENSE.but(distributed_optimizer=True), "distributed optimizer"),
        (DENSE.but(dp=1), "distributed optimizer"),
        (DENSE.but(recompute_granularity="selective"), "recompute core_attn"),
        (DENSE.but(recompute_granularity="selective", recompute_modules=["mlp"]), "recompute mlp"),
        (DENSE.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1), "full recompute"),
        (DENSE.but(model=MOE), "recompute mlp"),
        (DENSE.but(model=replace(MODEL, mla=Mla())), "recompute core_attn"),
    ],
)
def test_what_is_on_or_has_no_meaning_is_no_remedy(recipe: Recipe, absent: str) -> None:
    assert absent not in names(recipe)


def test_remedies_of_experts_and_of_latent_attention() -> None:
    model = replace(MOE, mla=Mla())
    found = [name for name in names(DENSE.but(model=model)) if name.startswith("recompute")]
    assert found == ["recompute mla_up_proj", "recompute moe_act", "recompute moe"]
    mixed = replace(MOE, moe=replace(MOE.moe, moe_layer_freq=2))
    assert [n for n in names(DENSE.but(model=mixed)) if n in ("recompute mlp", "recompute moe")] == [
        "recompute mlp",
        "recompute moe",
    ]


def test_expandable_segments_are_a_remedy_once() -> None:
    assert names(DENSE, expandable_segments=True)[0] == "recompute core_attn"
    (first, *_) = remedies(DENSE.but(alloc_conf="garbage_collection_threshold:0.8"), expandable_segments=False)
    assert first.changes == {"alloc_conf": "garbage_collection_threshold:0.8,expandable_segments:True"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:False,expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("max_split_size_mb : 64,", "max_split_size_mb:64,expandable_segments:True"),
        ("roundup_power2_divisions:[256:1,>:4]", "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"),
    ],
)
def test_settings_with_expandable_segments(before: str, after: str) -> None:
    assert with_expandable_segments(before).replace(" ", "") == after
    Memory(alloc_conf=with_expandable_segments(before))
    assert has_expandable_segments(with_expandable_segments(before))


def test_remedies_add_to_what_is_recomputed() -> None:
    recipe = DENSE.but(recompute_granularity="selective", recompute_modules=["layernorm"])
    changes = {r.name: r.changes for r in remedies(recipe, expandable_segments=True)}
    assert changes["recompute core_attn"]["recompute_modules"] == ["layernorm", "core_attn"]


def test_an_impossible_remedy_is_named_with_the_reason() -> None:
    odd = DENSE.but(num_layers=6)
    notes = {r.name: r.note for r in remedies(odd, expandable_segments=True)}
    assert notes["PP 2 -> 4, keeping DP"].startswith("not possible: pp-layers-not-divisible")
    assert notes["recompute core_attn"] == ""


# Texts ----------------------------------------------------------------------------------------------------------------

DIAGNOSIS = Diagnosis(
    "capacity",
    "expandable segments do not make it fit",
    (NEED, FAILS, trial("expandable segments", False)),
    (
        Remedy("expandable segments", "no cost", {"alloc_conf": "expandable_segments:True"}, 72 * GIB, 0, False),
        Remedy("recompute mlp", "-16%", {"recompute_modules": ["mlp"]}, 69 * GIB, 3 * GIB, True),
        Remedy("PP 2 -> 4, keeping DP", "moderate", {"pp": 4}, note="not possible: model.num_layers: 6"),
    ),
    rank=3,
    steps=2,
)


def test_text() -> None:
    failure = Failure("out of memory", 3, "CUDA out of memory.", 2, "backward", replace(SHORTAGE, diagnosis=DIAGNOSIS))
    assert "\n".join(failure_lines(failure)).splitlines() == [
        "OUT OF MEMORY by capacity: rank 3 asked for 2.00 GiB in step-2/backward (decoder.layers.*.mlp.linear_fc1)",
        "",
        "  asked for       2.00 GiB (2147483648 bytes)",
        "  by           megatron/core/tensor_parallel/layers.py:744 (forward)",
        "  allocated      70.00 GiB (75161927680 bytes)",
        "  reserved       76.00 GiB (81604378624 bytes)",
        "  unusable        6.00 GiB (6442450944 bytes) reserved and free: 4 free pieces, the largest 1.00 GiB",
        "  device free     1.00 GiB (1073741824 bytes) of 80.00 GiB",
        "  the rest        3.00 GiB (3221225472 bytes): CUDA context, and what else is outside PyTorch",
        "  allocator    default settings",
        "",
        "capacity: expandable segments do not make it fit",
        "  - the rank run again on a device without limit: peak allocated 72.00 GiB, reserved 78.00 GiB",
        "  - its allocations replayed on this device: out of memory when it asks for 2.00 GiB",
        "  - its allocations replayed on this device with expandable segments: out of memory when it asks for 2.00 GiB",
        "",
        "Remedies in the order of NVIDIA's Megatron Bridge skill perf-memory-tuning, and their cost as it says:",
        "  remedy                    peak     saves  fits  cost",
        "  expandable segments  72.00 GiB       0 B  no    no cost",
        "  recompute mlp        69.00 GiB  3.00 GiB  yes   -16%",
        "  PP 2 -> 4, keeping DP: not possible: model.num_layers: 6",
        "  measured: 2 steps of rank 3, or of the rank with its place in the job; each with expandable segments; other "
        "ranks were not",
    ]


def test_text_without_a_diagnosis_has_the_facts() -> None:
    failure = Failure("out of memory", 0, "CUDA out of memory.", 0, "build", replace(SHORTAGE, module="", line=""))
    head, *rest = failure_lines(failure)
    assert head == "OUT OF MEMORY: rank 0 asked for 2.00 GiB in build"
    assert not any("Remedies" in line or "  by " in line for line in rest)
    assert message_lines(failure)[-1] == "  CUDA out of memory."
    assert message_lines(replace(failure, shortage=None)) == ["  CUDA out of memory."]


def test_the_need_is_not_told_by_a_run_that_failed_itself() -> None:
    trials = [replace(NEED, fits=False), FAILS, trial("expandable segments", False)]
    assert diagnose(SHORTAGE, trials, complete=True) == ("capacity", "expandable segments do not make it fit")


def test_text_of_what_waits_for_a_stream_and_of_a_limit() -> None:
    shortage = replace(SHORTAGE, waiting=2 * GIB, limit=76 * GIB)
    assert shortage.allocated + shortage.waiting + shortage.unusable == shortage.reserved
    text = shortage.explain()
    assert "waiting         2.00 GiB (2147483648 bytes) freed, but a stream is not done with it" in text
    assert "unusable        4.00 GiB (4294967296 bytes) reserved and free: 4 free pieces" in text
    assert "device free     1.00 GiB (1073741824 bytes), but PyTorch may reserve 76.00 GiB in all" in text
    assert "the rest" not in text


def test_json_holds_all_of_it() -> None:
    failure = Failure("out of memory", 3, "CUDA out of memory.", 2, "backward", replace(SHORTAGE, diagnosis=DIAGNOSIS))
    data: Any = json.loads(json.dumps(asdict(failure)))
    assert read_plain(Failure, data, "failure") == failure
    del data["shortage"]  # as an earlier version wrote it
    assert read_plain(Failure, data, "failure") == replace(failure, shortage=None)
