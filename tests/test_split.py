"""What a peak is made of and what grew: sums that are exact, parts that are found again, texts that name most of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.baseline_file import BaselineFile, Entry, Figure, dump, parse
from pytest_mbmem.measurement import CATEGORIES, Composition, Owner, PhaseFigures, RankMeasurement, read_plain
from pytest_mbmem.split import (
    UNALLOCATED,
    Part,
    PeakGrowth,
    Split,
    compact,
    growth,
    parts_lines,
    parts_text,
    places_text,
    split_of,
    total,
)

MIB = 2**20
TIMES = "\u00d7"
FC1 = "megatron/core/tensor_parallel/layers.py:744 (forward)"


def rank_of(owners: Mapping[Owner, int], reserved: int = 0) -> RankMeasurement:
    """A rank whose peak, in the second of its phases, is held by these owners."""
    peak = sum(owners.values())
    phases = (
        PhaseFigures(0, "build", {"allocated": 1, "reserved": 1}, {}),
        PhaseFigures(2, "backward", {"allocated": peak, "reserved": peak + reserved}, {}),
    )
    at_peaks = ((1, *[0] * (len(owners) - 1)), tuple(owners.values()))
    return RankMeasurement(0, {}, 1, phases, composition=Composition(tuple(owners), at_peaks))


def split(owners: Mapping[Owner, int], **rest: int) -> Split:
    found = split_of(rank_of(owners, **rest))
    assert found is not None
    return found


def activations(module: str, line: str = FC1, modules: int = 1) -> Owner:
    return Owner("activations", module, line, modules)


# Splits ---------------------------------------------------------------------------------------------------------------

modules = st.sampled_from(["", "decoder", "decoder.layers.*.mlp", "output_layer"]) | st.text(max_size=5)
lines = st.sampled_from(["", FC1, "layers.py:7 (forward)", "layers.py:8 (forward)", "x.py:1"]) | st.text(max_size=8)
owners = st.builds(Owner, st.sampled_from(CATEGORIES), modules, lines, st.integers(1, 99))
held = st.dictionaries(owners, st.integers(1, 1000) | st.integers(1, 2**40), min_size=1, max_size=30)


@given(held)
def test_a_split_and_its_short_form_add_up_to_the_peak(owners: dict[Owner, int]) -> None:
    whole = split(owners)
    assert total(whole) == total(compact(whole)) == rank_of(owners).peak()
    assert all(part.size > 0 for part in whole)
    assert len({part.identity for part in whole}) == len(whole)
    least = total(whole) // 200
    assert all(part.is_other or part.size >= least for part in compact(whole))


@given(held, st.integers(0, 2**40))
def test_a_split_of_reserved_bytes_adds_up_to_what_is_reserved(owners: dict[Owner, int], more: int) -> None:
    rank = rank_of(owners, reserved=more)
    whole = split_of(rank, "reserved")
    assert whole is not None
    assert total(whole) == rank.peak("reserved")
    assert sum(part.size for part in whole if part.category == UNALLOCATED) == more


def test_the_split_is_that_of_the_gated_phase() -> None:
    rank = rank_of({activations("mlp"): 8 * MIB, Owner("rounding"): 512})
    part = Part("activations", 1, "mlp", "tensor_parallel/layers.py (forward)", 1, FC1)
    assert split_of(rank, "allocated", "build") == (part,)


def test_lines_of_a_function_are_one_part_and_the_largest_is_shown() -> None:
    parts = split({activations("mlp", f"layers.py:{n} (forward)", n): n * MIB for n in (1, 2, 3)})
    assert parts == (Part("activations", 6 * MIB, "mlp", "layers.py (forward)", 3, "layers.py:3 (forward)"),)


def test_the_place_of_parameters_and_their_gradients_is_that_of_their_module() -> None:
    first = split({Owner("parameters", "mlp", "layers.py:1 (__init__)"): MIB})
    second = split({Owner("parameters", "mlp", "buffers.py:9 (grow)"): MIB})
    assert growth(compact(first), second).changes == ()


def test_what_the_owners_do_not_say_is_unattributed() -> None:
    rank = rank_of({activations("mlp"): MIB})
    assert rank.composition is not None
    less = dataclasses.replace(rank, composition=dataclasses.replace(rank.composition, at_peaks=((1,), (MIB - 512,))))
    found = split_of(less)
    assert found is not None
    assert [(part.category, part.size) for part in found] == [("activations", MIB - 512), ("unattributed", 512)]


def test_owners_of_more_than_the_peak_are_not_believed() -> None:
    rank = rank_of({activations("mlp"): MIB})
    assert rank.composition is not None
    more = dataclasses.replace(rank.composition, at_peaks=((1,), (MIB + 1,)))
    assert split_of(dataclasses.replace(rank, composition=more)) is None


def test_without_a_composition_there_is_no_split() -> None:
    assert split_of(dataclasses.replace(rank_of({activations("mlp"): 1}), composition=None)) is None


@given(held, st.integers(0, 2**30))
def test_every_split_comes_back_from_a_baseline_file(owners: dict[Owner, int], reserved: int) -> None:
    parts = split_of(rank_of(owners, reserved=reserved), "reserved")
    assert parts is not None
    peak = total(parts)
    figure = Figure(peak, 0, "build", {0: peak}, peak, split=compact(parts))
    file = BaselineFile({"test": Entry(None, None, {"reserved": figure})})
    assert parse(dump(file), Path("f")).entries == file.entries


# What grew ------------------------------------------------------------------------------------------------------------


@given(held, held)
def test_changes_add_up_to_the_difference_whether_before_is_short_or_whole(
    before: dict[Owner, int], after: dict[Owner, int]
) -> None:
    difference = sum(after.values()) - sum(before.values())
    for then in (split(before), compact(split(before))):
        found = growth(then, split(after))
        assert found.total == difference == sum(found.categories().values())
        sizes = [change.size for change in found.changes]
        assert sizes == sorted(sizes, reverse=True)
        assert 0 not in sizes


@given(held)
def test_against_itself_nothing_grew(owners: dict[Owner, int]) -> None:
    whole = split(owners)
    assert growth(compact(whole), whole) == growth(whole, whole) == PeakGrowth(())


@given(held, held)
def test_growth_survives_the_way_through_json(before: dict[Owner, int], after: dict[Owner, int]) -> None:
    found = growth(compact(split(before)), split(after), "rank 1 now, rank 0 then")
    assert read_plain(PeakGrowth, json.loads(json.dumps(dataclasses.asdict(found))), "growth") == found


BEFORE = {
    Owner("parameters", "decoder.layers.*.mlp", "layers.py:1 (__init__)", 20): 900 * MIB,
    activations("decoder.layers.*.mlp", modules=20): 384 * MIB,
    activations("decoder.layers.*.attention", "attention.py:9 (forward)", 20): 200 * MIB,
    activations("norm", "norm.py:3 (forward)"): 2 * MIB,
    Owner("rounding"): 4096,
}


def grown(changes: Mapping[Owner, int]) -> PeakGrowth:
    return growth(compact(split(BEFORE)), split({**BEFORE, **changes}))


def named(found: PeakGrowth) -> list[tuple[str, int]]:
    return [(change.part.module or change.part.category, change.size) for change in found.changes]


def test_a_part_that_moved_to_another_line_is_the_same() -> None:
    mlp = activations("decoder.layers.*.mlp", modules=20)
    moved = {dataclasses.replace(mlp, line=FC1.replace("744", "751")): 768 * MIB}
    (change,) = growth(compact(split(BEFORE)), split({k: v for k, v in BEFORE.items() if k != mlp} | moved)).changes
    assert (change.size, change.part.line) == (384 * MIB, FC1.replace("744", "751"))


def test_a_renamed_function_or_module_is_the_same_part() -> None:
    mlp = activations("decoder.layers.*.mlp", modules=20)
    rest = {owner: size for owner, size in BEFORE.items() if owner != mlp}
    for new in (activations("decoder.layers.*.mlp", "new.py:1 (run)", 20), activations("decoder.blocks.*", modules=20)):
        assert growth(compact(split(BEFORE)), split(rest | {new: 384 * MIB})).changes == ()
    larger = growth(
        compact(split(BEFORE)), split(rest | {activations("decoder.layers.*.mlp", "x.py:1 (f)"): 500 * MIB})
    )
    assert named(larger) == [("decoder.layers.*.mlp", 116 * MIB)]


def test_a_new_part_and_one_that_is_gone_are_told() -> None:
    found = grown({activations("log", "test_x.py:9 (hook)"): 64 * MIB, activations("norm", "norm.py:3 (forward)"): 0})
    assert named(found) == [("log", 64 * MIB), ("activations", -2 * MIB)]
    assert found.changes[0].was is None
    attention = activations("decoder.layers.*.attention", "attention.py:9 (forward)", 20)
    (change,) = grown({attention: 0}).changes
    assert (change.now, change.size) == (None, -200 * MIB)


def test_a_part_that_may_have_been_too_small_to_be_named_is_no_new_one() -> None:
    # 2 MiB of 1.5 GiB are no part of their own in the baseline; 4 MiB neither.
    assert named(grown({activations("norm", "norm.py:3 (forward)"): 4 * MIB})) == [("activations", 2 * MIB)]
    # Against a control, which is there as a whole, they are.
    assert named(growth(split(BEFORE), split({**BEFORE, activations("norm", "norm.py:3 (forward)"): 4 * MIB}))) == [
        ("norm", 2 * MIB)
    ]


# Texts ----------------------------------------------------------------------------------------------------------------


def test_the_text_names_most_of_the_growth_first_and_the_rest_in_a_sum() -> None:
    found = grown(
        {
            activations("decoder.layers.*.mlp", modules=20): 768 * MIB,
            activations("log", "test_x.py:9 (hook)"): 64 * MIB,
            activations("decoder.layers.*.attention", "attention.py:9 (forward)", 20): 180 * MIB,
            Owner("rounding"): 4096 + 512,
        }
    )
    assert found.lines() == [
        "what grew (+428.00 MiB):",
        f"    +384.00 MiB  activations      decoder.layers.*.mlp {TIMES} 20        {FC1}",
        "     +64.00 MiB  activations      log                              test_x.py:9 (hook)",
        f"     -20.00 MiB  activations      decoder.layers.*.attention {TIMES} 20  attention.py:9 (forward)",
        "         +512 B  everything else",
        "  by category: +428.00 MiB activations, +512 B others",
    ]


def test_a_text_is_short_however_much_changed() -> None:
    more = {activations(f"m{n}", f"f{n}.py:1 (g)"): (n + 20) * MIB for n in range(500)}
    lines = grown(more).lines()
    assert len(lines) <= 12
    assert lines[1].split()[0] == "+519.00"
    assert "everything else" in lines[-2]
    assert len(parts_lines(split(more))) <= 12


def first_lines(found: PeakGrowth) -> list[int]:
    """What the first three lines of a text say has grown, in MiB."""
    return [round(float(line.split()[0])) for line in found.lines()[1:4] if line.split()[0].startswith("+")]


@given(
    st.lists(st.integers(50, 900), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), max_size=9),
    st.lists(st.integers(1, 40), max_size=30),
)
def test_the_first_three_lines_name_most_of_what_few_parts_grew(
    few: list[int], many: list[int], less: list[int]
) -> None:
    grew = {activations(f"few{n}", f"f{n}.py:1 (g)"): size * MIB for n, size in enumerate(few)}
    grew |= {activations(f"many{n}", f"f{n}.py:1 (g)"): size * MIB for n, size in enumerate(many)}
    gone = {activations(f"less{n}", f"f{n}.py:1 (g)"): size * MIB for n, size in enumerate(less)}
    found = growth(split(BEFORE | gone), split(BEFORE | grew))
    if found.total >= 0:
        assert 2 * sum(first_lines(found)) >= sum(few) + sum(many)
        named = [size for size, _, _ in found.named()]
        assert named == sorted(named, reverse=True)


@given(st.lists(st.integers(1, 20), min_size=4, max_size=40), st.lists(st.integers(1, 3), max_size=9))
def test_the_many_places_of_a_layer_are_folded_until_the_first_three_lines_name_most(
    sizes: list[int], less: list[int]
) -> None:
    layers = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "norm")
    grew = {
        activations(f"decoder.layers.*.{layers[n % len(layers)]}", f"f{n}.py:1 (g)", 24): size * MIB
        for n, size in enumerate(sizes)
    }
    gone = {activations(f"decoder.layers.*.x{n}", f"x{n}.py:1 (g)", 24): size * MIB for n, size in enumerate(less)}
    found = growth(split(BEFORE | gone), split(BEFORE | grew))
    lines = found.lines()
    assert len(lines) <= 9
    if found.total > 0:
        net = sum(sizes) - sum(less)
        assert 2 * sum(first_lines(found)) >= net


def test_what_is_gone_does_not_push_what_grew_out_of_the_text() -> None:
    grew = {activations(f"grew{n}", f"f{n}.py:1 (g)"): size * MIB for n, size in enumerate((450, 190, 190, 170))}
    gone = {activations(f"gone{n}", f"g{n}.py:1 (g)"): 195 * MIB for n in range(5)}
    found = growth(split(BEFORE | gone), split(BEFORE | grew))
    assert first_lines(found) == [450, 190, 190]


def test_what_is_folded_says_so_and_where_most_of_it_is() -> None:
    grew = {activations(f"decoder.layers.*.mlp.fc{n % 2}", f"f{n}.py:1 (g)", 24): (n + 10) * MIB for n in range(10)}
    found = growth(split(BEFORE), split(BEFORE | grew))
    assert found.lines()[1:3] == [
        f"    +75.00 MiB  activations  decoder.layers.*.mlp.fc1 {TIMES} 24 (5 places, most of it at)  f9.py:1 (g)",
        f"    +70.00 MiB  activations  decoder.layers.*.mlp.fc0 {TIMES} 24 (5 places, most of it at)  f8.py:1 (g)",
    ]
    assert found.text() == (
        f"+75.00 MiB activations decoder.layers.*.mlp.fc1 {TIMES} 24; +70.00 MiB activations decoder.layers.*.mlp.fc0 "
        f"{TIMES} 24"
    )
    assert PeakGrowth(()).text() == ""


def test_other_ranks_and_phases_are_said() -> None:
    assert places_text((0, "step-2/backward"), (0, "step-2/backward")) == ""
    assert places_text((0, "build"), (3, "build")) == "rank 3 now, rank 0 then"
    assert places_text((0, "build"), (0, "test")) == "in test now, in build then"
    assert places_text((0, "build"), (3, "test")) == "rank 3 in test now, rank 0 in build then"
    found = growth((), split({activations("mlp"): MIB}), "rank 3 now, rank 0 then")
    assert found.lines("against the control")[0] == "against the control (+1.00 MiB; rank 3 now, rank 0 then):"


def test_another_number_of_layers_and_a_part_that_is_gone_are_marked() -> None:
    after = {activations("decoder.layers.*.mlp", modules=24): 460 * MIB, Owner("rounding"): 4096}
    text = "\n".join(growth(compact(split(BEFORE)), split(after)).lines())
    assert f"decoder.layers.*.mlp {TIMES} 24 (was {TIMES} 20)" in text
    assert f"-200.00 MiB  activations      decoder.layers.*.attention {TIMES} 20 (gone)  attention.py (forward)" in text


def test_the_parts_of_a_peak_are_named_from_the_largest_on() -> None:
    lines = parts_lines(split(BEFORE))
    assert lines[0] == "the peak is made of (1.45 GiB):"
    assert [line.split()[0] for line in lines[1:]] == ["900.00", "384.00", "200.00", "2.00", "by"]
    assert parts_text(split(BEFORE)) == "900.00 MiB parameters, 586.00 MiB activations, 4.00 KiB others"


def test_nothing_that_grew_is_said() -> None:
    assert PeakGrowth(()).lines() == ["what grew (+0 B):", "  nothing"]
