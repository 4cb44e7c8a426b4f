"""What grew, in the failures of gates and of memory_saving, in plain data and on the page."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping

import pytest

from pytest_mbmem.baseline_file import Entry
from pytest_mbmem.baselines import Record
from pytest_mbmem.compare import Comparison
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.measurement import Composition, Owner
from pytest_mbmem.report.comparisons import saving_failure_text
from pytest_mbmem.report.html import page
from pytest_mbmem.report.junit import properties
from pytest_mbmem.report.results import Judged, Measured, Results
from pytest_mbmem.report.terminal import failure_text
from pytest_mbmem.savings import SavingRule, judge_saving

MIB, GIB = 2**20, 2**30
TIMES = "\u00d7"
Make = Callable[..., Measured]
MLP = Owner("activations", "decoder.layers.*.mlp", "megatron/core/transformer/mlp.py:88 (forward)", 20)
LOG = Owner("activations", "decoder.layers.*", "test_x.py:9 (hook)", 20)
WEIGHTS = Owner("parameters", "decoder.layers.*.mlp", "layers.py:1 (__init__)", 20)
BEFORE = {WEIGHTS: 600 * MIB, MLP: 399 * MIB, Owner("rounding"): MIB}
AFTER = {**BEFORE, MLP: 391 * MIB, LOG: 384 * MIB}


def holding(measured: Make, *ranks: Mapping[Owner, int]) -> Measured:
    """A measurement whose ranks have their peaks, in step-2/backward, held by these owners."""
    plain = measured(*(sum(owners.values()) for owners in ranks))
    made = []
    for rank, owners in zip(plain.measurement.ranks, ranks, strict=True):
        at_peaks = ((MIB, *[0] * (len(owners) - 1)), tuple(owners.values()))
        made.append(dataclasses.replace(rank, composition=Composition(tuple(owners), at_peaks)))
    return dataclasses.replace(plain, measurement=dataclasses.replace(plain.measurement, ranks=tuple(made)))


def judged(before: Measured, after: Measured, gate: PeakGate | None = None) -> Measured:
    """`after`, judged against the baseline that `before` makes."""
    gate = gate or PeakGate()
    record = Record.of("t.py", "test_x", gate, before.measurement)
    entry = Entry(record.recipe_digest, record.recipe, {gate.metric_id: record.figure})
    return dataclasses.replace(after, judged=[Judged(judge(gate, after.measurement, entry, "test_x"))])


def section(measured: Measured) -> list[str]:
    """The part of the failure that is about owners, and how long the whole is."""
    text = failure_text("t.py::test_x", measured, measured.judged[0].judgement, None)
    return next((part.splitlines() for part in text.split("\n\n") if "by category" in part), [])


def test_a_regression_says_what_grew_against_the_baseline(measured: Make) -> None:
    assert section(judged(holding(measured, BEFORE), holding(measured, AFTER))) == [
        "what grew (+376.00 MiB):",
        f"    +384.00 MiB  activations  decoder.layers.* {TIMES} 20      test_x.py:9 (hook)",
        f"      -8.00 MiB  activations  decoder.layers.*.mlp {TIMES} 20  megatron/core/transformer/mlp.py:88 (forward)",
        "  by category: +376.00 MiB activations",
    ]


def test_a_stale_baseline_tells_what_the_changed_recipe_holds_more(measured: Make) -> None:
    after = holding(measured, AFTER)
    changed = dataclasses.replace(after.measurement, recipe_digest="another")
    lines = section(judged(holding(measured, BEFORE), dataclasses.replace(after, measurement=changed)))
    assert lines[0] == "against the other recipe (+376.00 MiB):"
    assert lines[1].split()[:2] == ["+384.00", "MiB"]


def test_a_worst_rank_that_is_another_one_is_said(measured: Make) -> None:
    one, two = holding(measured, BEFORE, {MLP: MIB}), holding(measured, BEFORE, AFTER)
    assert section(judged(one, two))[0] == "what grew (+376.00 MiB; rank 1 now, rank 0 then):"


def test_reserved_bytes_grow_in_what_is_not_allocated_too(measured: Make) -> None:
    after = judged(holding(measured, BEFORE), holding(measured, AFTER), PeakGate(metric="reserved"))
    rank = after.measurement.ranks[0]
    figures = rank.phases[1]
    more = dataclasses.replace(figures, peak={**figures.peak, "reserved": figures.peak["reserved"] + 64 * MIB})
    rank = dataclasses.replace(rank, phases=(rank.phases[0], more))
    after.measurement = dataclasses.replace(after.measurement, ranks=(rank,))
    lines = section(judged(holding(measured, BEFORE), after, PeakGate(metric="reserved")))
    assert lines[0] == "what grew (+440.00 MiB):"
    assert lines[2].split("  ")[2:] == [" +64.00 MiB", "reserved, not allocated"]


def test_a_baseline_without_a_split_says_how_to_get_one_and_what_there_is_now(measured: Make) -> None:
    lines = section(judged(measured(1000 * MIB), holding(measured, AFTER)))
    assert lines[0] == "the peak is made of (1.34 GiB):"
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["600.00", "MiB", "parameters"],
        ["391.00", "MiB", "activations"],
    ]
    assert lines[-1] == "  the baseline does not say what it was made of; --mbmem-update records that from now on"


def test_over_a_limit_the_largest_parts_are_named(measured: Make) -> None:
    lines = section(judged(measured(1), holding(measured, AFTER), PeakGate(limit=MIB)))
    assert lines[0] == "the peak is made of (1.34 GiB):"
    assert lines[-1] == "  by category: 775.00 MiB activations, 600.00 MiB parameters, 1.00 MiB others"


def test_without_a_baseline_to_compare_with_a_line_must_do(measured: Make) -> None:
    missing = holding(measured, AFTER)
    missing.judged.append(Judged(judge(PeakGate(), missing.measurement, None, "test_x")))
    line = "  by category: 775.00 MiB activations, 600.00 MiB parameters, 1.00 MiB others"
    assert section(missing) == [line]


@pytest.mark.parametrize("before", [BEFORE, None], ids=["split", "none"])
def test_a_measurement_that_was_not_told_owners_has_no_section(measured: Make, before: Mapping[Owner, int]) -> None:
    then = holding(measured, before) if before else measured(1000 * MIB)
    now = judged(then, measured(1400 * MIB))
    assert (section(now), now.judged[0].judgement.growth) == ([], None)


def test_a_section_is_short_whatever_grew(measured: Make) -> None:
    many = {Owner("activations", f"m{'x' * n}", "a.py:1 (f)"): (200 - n) * MIB for n in range(99)}
    assert len(section(judged(holding(measured, BEFORE), holding(measured, BEFORE | many)))) <= 12


def test_a_saving_that_fails_says_what_the_candidate_holds_more_and_less(measured: Make) -> None:
    control, candidate = holding(measured, BEFORE), holding(measured, {**BEFORE, MLP: 199 * MIB, LOG: 150 * MIB})
    comparison = Comparison(control.measurement, candidate.measurement, {"memory.x": (1, 2)})
    text = saving_failure_text(candidate, judge_saving(SavingRule("c", at_least=100 * MIB), comparison))
    assert text.startswith("SAVES TOO LITTLE: peak allocated falls by 50.00 MiB, 50.00 MiB less than asked")
    assert text.splitlines()[-4:] == [
        "against the control (-50.00 MiB):",
        f"    +150.00 MiB  activations  decoder.layers.* {TIMES} 20      test_x.py:9 (hook)",
        f"    -200.00 MiB  activations  decoder.layers.*.mlp {TIMES} 20  megatron/core/transformer/mlp.py:88 (forward)",
        "  by category: -50.00 MiB activations",
    ]
    assert "step-2/backward. By category: -50.00 MiB activations" in comparison.explain()
    data = json.loads(json.dumps(comparison.to_json()))
    assert [change["now"]["module"] for change in data["growth"]["changes"]] == [LOG.module, MLP.module]
    assert Comparison.from_json(data, control.measurement, candidate.measurement, "c") == comparison


def test_a_comparison_with_one_side_that_was_not_told_is_as_before(measured: Make) -> None:
    comparison = Comparison(
        measured(1000 * MIB).measurement, holding(measured, AFTER).measurement, {"memory.x": (1, 2)}
    )
    assert comparison.growth is None
    assert "By category" not in comparison.explain()
    assert comparison.to_json()["growth"] is None


def test_what_grew_is_in_the_plain_data_and_comes_back(
    measured: Make, results: Callable[[Mapping[str, list[Measured]]], Results]
) -> None:
    after = judged(holding(measured, BEFORE), holding(measured, AFTER))
    run = results({"t.py::test_x": [after]})
    data = json.loads(json.dumps(run.to_json()))
    assert Results.from_json(data, "o.json") == run
    judgement = data["tests"][0]["measurements"][0]["judgements"][0]
    assert [(change["was"] is None, change["now"]["size"]) for change in judgement["growth"]["changes"]] == [
        (True, 384 * MIB),
        (False, 391 * MIB),
    ]
    del judgement["growth"]  # as an older version wrote it
    (old,) = Results.from_json(data, "o.json").tests["t.py::test_x"].measured
    assert old.judged[0].judgement == dataclasses.replace(after.judged[0].judgement, growth=None)


def test_the_page_shows_what_grew(measured: Make, results: Callable[[Mapping[str, list[Measured]]], Results]) -> None:
    after = judged(holding(measured, BEFORE), holding(measured, {**AFTER, Owner("logits", "<b>"): 300 * MIB}))
    text = page(results({"t.py::test_x": [after]}))
    assert "Against the baseline: +676.00 MiB</figcaption>" in text
    assert re.search(r"<td>\+384\.00 MiB<i [^>]+></i><th><span [^>]+></span>activations", text)
    assert "&lt;b&gt;" in text
    passing = judged(holding(measured, AFTER), holding(measured, AFTER))
    assert "what grew" not in page(results({"t.py::test_x": [passing]}))


def test_what_grew_is_a_property_of_the_junit_report(measured: Make) -> None:
    control, after = holding(measured, BEFORE), judged(holding(measured, BEFORE), holding(measured, AFTER))
    comparison = Comparison(control.measurement, after.measurement, {"memory.x": (1, 2)})
    after.savings.append(judge_saving(SavingRule("c"), comparison))
    found = dict(properties([after]))
    text = f"+384.00 MiB activations decoder.layers.* {TIMES} 20; -8.00 MiB activations decoder.layers.*.mlp {TIMES} 20"
    assert found["mbmem_growth"] == found["mbmem_saving_growth"] == text
    same = dict(properties([judged(control, control), judged(measured(GIB), measured(GIB))]))
    assert "mbmem_growth" not in same
