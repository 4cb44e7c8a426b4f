"""JSON in and out, selectors, and who is the worst rank."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.measurement import (
    METRICS,
    PHASES,
    Device,
    Failure,
    Measurement,
    PhaseFigures,
    RankMeasurement,
    check_phase,
    selects,
    step_name,
)

H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=True)


def figures(step: int, phase: str, allocated: int, reserved: int = 0) -> PhaseFigures:
    return PhaseFigures(step, phase, {"allocated": allocated, "reserved": reserved}, {"allocated": 0, "reserved": 0})


def rank(number: int, *phases: PhaseFigures) -> RankMeasurement:
    return RankMeasurement(number, {"tp": 0, "pp": number}, 1, phases)


sizes = st.integers(min_value=-(2**40), max_value=2**63 - 1)
peaks = st.dictionaries(st.sampled_from(METRICS), sizes)
phase_figures = st.builds(
    PhaseFigures, step=st.integers(0, 9), phase=st.sampled_from(PHASES), peak=peaks, resting=peaks
)
ranks = st.builds(
    RankMeasurement,
    rank=st.integers(0, 10**6),
    coordinates=st.dictionaries(st.text(), st.integers(0, 64)),
    stands_for=st.integers(1, 10**6),
    phases=st.lists(phase_figures, max_size=3).map(tuple),
    retained_after_backward=st.lists(sizes, max_size=3).map(tuple),
    allocation_retries=st.integers(0, 9),
    largest_allocation=sizes,
    flops_per_step=st.none() | sizes,
    collective_bytes=st.dictionaries(st.text(), sizes, max_size=3),
    device_used=st.none() | sizes,
    cold_step=st.none() | st.floats(0, 1e6),
    step_times=st.lists(st.floats(0, 1e6), max_size=3).map(tuple),
    losses=st.lists(st.none() | st.floats(0, 1e6), max_size=3).map(tuple),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
failures = st.builds(
    Failure,
    kind=st.sampled_from(["out of memory", "error", "died", "timeout"]),
    rank=st.integers(0, 9),
    message=st.text(),
    step=st.none() | st.integers(0, 9),
    phase=st.none() | st.sampled_from(PHASES),
)
measurements = st.builds(
    Measurement,
    device=st.just(H100),
    ranks=st.lists(ranks, max_size=2).map(tuple),
    recipe=st.none() | st.dictionaries(st.text(), plain, max_size=3),
    recipe_digest=st.none() | st.text(),
    world_size=st.integers(1, 10**6),
    environment=st.dictionaries(st.text(), st.text(), max_size=3),
    assumptions=st.lists(st.text(), max_size=3).map(tuple),
    failure=st.none() | failures,
    mode=st.sampled_from(["solo", "joint"]),
)

COMPLETE = Measurement(
    device=H100,
    ranks=(rank(0, figures(0, "build", 5), figures(1, "backward", 9, 20)),),
    recipe={"model": {"num_layers": 2}},
    recipe_digest="0123456789abcdef",
    world_size=8,
    environment={"torch": "2.14.1"},
    assumptions=("balanced routing",),
    failure=Failure("out of memory", 0, "CUDA out of memory", 1, "backward"),
)


# JSON -----------------------------------------------------------------------------------------------------------------


@given(measurements, st.none() | measurements)
def test_json_gives_back_what_was_written(measurement: Measurement, twin: Measurement | None) -> None:
    measurement = replace(measurement, twin=twin)
    assert Measurement.from_json(json.loads(json.dumps(measurement.to_json()))) == measurement


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(COMPLETE.to_json()), encoding="utf-8")
    assert Measurement.load(path) == COMPLETE


def every_place(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    # What a recipe holds is the recipe's to judge.
    places = [p for key, part in inner if key != "recipe" for p in every_place(part, (*path, key))]
    return [path, *places] if path else places


PLAIN = json.loads(json.dumps(COMPLETE.to_json()))


@pytest.mark.parametrize("path", every_place(PLAIN), ids=lambda path: ".".join(map(str, path)))
@pytest.mark.parametrize("wrong", [[None], {"a": None}, 1.5, float("nan")], ids=repr)
def test_a_wrong_value_anywhere_is_refused_with_its_place(path: tuple[Any, ...], wrong: object) -> None:
    data = copy.deepcopy(PLAIN)
    *way, last = path
    holder = data
    for key in way:
        holder = holder[key]
    right = (last == "cold_step" and wrong == 1.5) or (last == "losses" and wrong == [None])
    holder[last] = "text" if right else wrong
    with pytest.raises(UserError, match=r"^m\.json"):
        Measurement.from_json(data, "m.json")


@given(st.data())
def test_anything_in_place_of_anything_is_a_measurement_or_a_user_error(data: st.DataObject) -> None:
    damaged = copy.deepcopy(PLAIN)
    *way, last = data.draw(st.sampled_from(every_place(damaged)))
    holder = damaged
    for key in way:
        holder = holder[key]
    if data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(plain)
    try:
        read = Measurement.from_json(damaged)
    except UserError:
        return
    assert Measurement.from_json(read.to_json()) == read


@given(plain)
def test_any_other_json_is_refused(data: Any) -> None:
    with pytest.raises(UserError, match="not a measurement of schema 1"):
        Measurement.from_json(data)


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1', "[" * 100_000, '{"schema": NaN}', "\ufeff{}", "null"])
def test_a_file_that_is_no_measurement_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"m\.json"):
        Measurement.load(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x80"])
def test_a_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"m\.json"):
        Measurement.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.json"):
        Measurement.load(tmp_path / "gone.json")


def test_the_message_names_the_place_and_what_belongs_there() -> None:
    data = copy.deepcopy(PLAIN)
    data["ranks"][0]["phases"][1]["peak"]["allocated"] = "9 GiB"
    with pytest.raises(UserError, match=r"ranks\[0\]\.phases\[1\]\.peak\.allocated: '9 GiB' is not a whole number"):
        Measurement.from_json(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("device"), "the key 'device' is missing"),
        (lambda data: data.update(extra=1), "unknown key 'extra'; allowed: device, ranks"),
        (
            lambda data: data["failure"].update(kind="tired"),
            "'tired' is not one of out of memory, error, died, timeout",
        ),
        (lambda data: data.update(world_size=True), r"world_size: True is not a whole number"),
        (lambda data: data["device"].update(virtual=1), r"device\.virtual: 1 is not true or false"),
        (lambda data: data.update(schema=True), "not a measurement of schema 1 .found True"),
        (lambda data: data.update(schema=2), "not a measurement of schema 1 .found 2"),
    ],
)
def test_keys_and_names_are_checked(change: Any, message: str) -> None:
    data = copy.deepcopy(PLAIN)
    change(data)
    with pytest.raises(UserError, match=message):
        Measurement.from_json(data)


# Selectors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "name"), [(0, "build"), (1, "step-1"), (2, "step-2"), (3, "steady"), (99, "steady")])
def test_steps_have_names(step: int, name: str) -> None:
    assert step_name(step) == name


@pytest.mark.parametrize(
    ("step", "phase", "name"),
    [
        (0, "build", "build"),
        (0, "test", "test"),
        (1, "test", "test"),
        (1, "forward", "step-1/forward"),
        (7, "optimizer", "steady/optimizer"),
    ],
)
def test_phases_of_a_step_have_names(step: int, phase: str, name: str) -> None:
    assert figures(step, phase, 1).name == name


@pytest.mark.parametrize(
    ("step", "phase", "name"),
    [(None, None, None), (None, "build", "build"), (2, None, "step-2"), (2, "backward", "step-2/backward")],
)
def test_a_failure_names_what_is_known_of_its_place(step: int | None, phase: str | None, name: str | None) -> None:
    assert Failure("died", 0, "", step, phase).name == name


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (None, {"build", "step-1/backward", "step-2/forward", "steady/backward"}),
        ("build", {"build"}),
        ("backward", {"step-1/backward", "steady/backward"}),
        ("step-2", {"step-2/forward"}),
        ("steady", {"steady/backward"}),
        ("step-1/backward", {"step-1/backward"}),
        ("step-1/forward", set()),
    ],
)
def test_a_selector_chooses_phases_and_steps(selector: str | None, chosen: set[str]) -> None:
    phases = [figures(0, "build", 1), figures(1, "backward", 1), figures(2, "forward", 1), figures(5, "backward", 1)]
    assert {p.name for p in phases if selects(selector, p)} == chosen


@pytest.mark.parametrize("selector", [*PHASES, "step-1", "step-2", "steady", "step-2/backward", "steady/optimizer"])
def test_selectors_that_can_choose_something_are_accepted(selector: str) -> None:
    check_phase(selector, "x")


@pytest.mark.parametrize(
    "selector",
    ["", "/", "step-3", "backwards", "backward/step-1", "step-1/", "/backward", "step-1/backward/x", "Backward"],
)
def test_selectors_that_can_choose_nothing_are_refused(selector: str) -> None:
    with pytest.raises(UserError, match=r"t\.py::test: phase=.* is not one of build, forward"):
        check_phase(selector, "t.py::test")


@given(st.text() | st.builds("/".join, st.lists(st.sampled_from([*PHASES, "step-1", "steady", ""]), max_size=3)))
def test_a_selector_that_is_accepted_selects_something_of_a_full_run(selector: str) -> None:
    run = [figures(step, phase, 1) for step in range(4) for phase in PHASES]
    try:
        check_phase(selector, "x")
    except UserError:
        return
    assert any(selects(selector, p) for p in run)


# Peaks ----------------------------------------------------------------------------------------------------------------


def test_the_worst_rank_has_the_highest_peak_of_the_metric() -> None:
    measurement = Measurement(
        H100,
        (
            rank(0, figures(1, "forward", 5, 90)),
            rank(1, figures(1, "forward", 7, 80)),
            rank(2, figures(1, "forward", 6, 70)),
        ),
    )
    assert (measurement.worst().rank, measurement.peak()) == (1, 7)
    assert (measurement.worst("reserved").rank, measurement.peak("reserved")) == (0, 90)


@pytest.mark.parametrize("order", [(0, 3, 5), (5, 3, 0), (3, 5, 0)])
def test_among_equal_ranks_the_lowest_is_named(order: tuple[int, ...]) -> None:
    assert Measurement(H100, tuple(rank(r, figures(1, "forward", 7)) for r in order)).worst().rank == 0


def test_a_peak_belongs_to_the_first_phase_that_reaches_it() -> None:
    one = rank(0, figures(1, "forward", 5), figures(1, "backward", 8), figures(2, "backward", 8))
    assert one.peak_phase().name == "step-1/backward"
    assert one.peak(phase="step-2") == 8
    assert one.peak(phase="forward") == 5


def test_a_phase_that_never_ran_is_named_with_those_that_did() -> None:
    one = rank(3, figures(0, "build", 5), figures(1, "forward", 5))
    with pytest.raises(UserError, match=r"'optimizer' selects nothing that rank 3 .* has: build, step-1/forward"):
        one.peak(phase="optimizer")


def test_a_metric_that_was_not_measured_is_named() -> None:
    with pytest.raises(UserError, match="metric='active' was not measured on rank 0"):
        rank(0, figures(1, "forward", 5)).peak("active")


def test_without_ranks_there_is_no_peak() -> None:
    with pytest.raises(UserError, match="without a measured rank"):
        Measurement(H100, ()).peak()


@pytest.mark.parametrize(("counts", "most"), [((None, None), None), ((None, 5), 5), ((7, 5), 7), ((), None)])
def test_flops_are_those_of_the_rank_that_computes_most(counts: tuple[int | None, ...], most: int | None) -> None:
    ranks = tuple(RankMeasurement(i, {}, 1, (), flops_per_step=count) for i, count in enumerate(counts))
    assert Measurement(H100, ranks).flops_per_step == most
