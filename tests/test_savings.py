"""The rule of a memory_saving marker: its arguments, and what it says about a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.compare import Comparison
from pytest_mbmem.errors import IncompatibleSettings, UserError
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Model, Recipe, Training
from pytest_mbmem.savings import SavingGate, SavingJudgement, SavingRule, judge_failed, judge_saving

MIB, GIB = 2**20, 2**30
RECIPE = Recipe(model=Model(num_layers=2, hidden_size=64, num_attention_heads=4), training=Training(seq_length=64))
SELECTIVE = RECIPE.but(recompute_granularity="selective")
SOURCE = "t.py::test_x"


def job(
    peak: int, flops: int | None = None, failure: Any = None, notes: tuple[str, ...] = (), tp: int = 0, moved: int = 0
) -> Measurement:
    device = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=True)
    phases = (PhaseFigures(2, "backward", *[{"allocated": peak, "reserved": peak}] * 2),)
    traffic = {"collective_bytes": {"tp": tp}, "moved_bytes": {"to host": moved}}
    rank = RankMeasurement(0, {}, 1, phases, flops_per_step=flops, **traffic)
    reason = failure and Failure(failure, 0, "CUDA out of memory.", 1, "forward")
    return Measurement(device, (rank,), failure=reason, notes=notes)


def judged(before: Measurement, after: Measurement, **rule: Any) -> SavingJudgement:
    comparison = Comparison(before, after, {"memory.recompute_modules": ([], ["core_attn"])})
    return judge_saving(SavingRule("control", **rule), comparison)


def marker(*args: object, **kwargs: object) -> SavingGate:
    return SavingGate.from_marker(args, kwargs, SOURCE, Path())


# Arguments ------------------------------------------------------------------------------------------------------------


def test_a_bare_marker_asks_for_any_effect_on_peak_allocated() -> None:
    assert marker(control=RECIPE) == SavingGate(SavingRule(RECIPE.digest), RECIPE, metric_is_given=False)
    assert marker(RECIPE, at_least=None, max_slowdown=None, metric=None, phase=None, settings=None) == marker(RECIPE)


def test_the_metric_follows_the_settings_that_differ_unless_it_is_given() -> None:
    conf, both = {"memory.alloc_conf": ("", "a:b")}, {"memory.alloc_conf": ("", "a:b"), "parallelism.tp": (1, 2)}
    assert marker(RECIPE).rule_for(conf).metric == "reserved"
    assert marker(RECIPE).rule_for(both).metric == "allocated"
    assert marker(RECIPE, metric="allocated").rule_for(conf).metric == "allocated"


def test_every_argument_is_used() -> None:
    gate = marker(
        {"tp": 1}, at_least="1 GiB", max_slowdown="7%", metric="reserved", phase="step-2/backward", settings=["tp"]
    )
    assert gate == SavingGate(SavingRule("tp=1", "reserved", "step-2/backward", GIB, None, 0.07), {"tp": 1}, ("tp",))
    assert gate.rule.metric_id == "reserved@step-2/backward"


@pytest.mark.parametrize(
    ("at_least", "expected"),
    [("5%", (None, 0.05)), (0.05, (None, 0.05)), ("512 MiB", (512 * MIB, None)), (7, (7, None))],
)
def test_the_saving_is_a_size_or_a_share_of_the_control(at_least: object, expected: tuple[Any, Any]) -> None:
    rule = marker(RECIPE, at_least=at_least).rule
    assert (rule.at_least, rule.at_least_fraction) == expected


def test_a_control_is_a_recipe_a_file_or_a_mapping(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.but(name="plain").to_yaml())
    from_file = SavingGate.from_marker(("recipe.yaml",), {}, SOURCE, tmp_path)
    assert (from_file.control, from_file.rule.control) == (RECIPE.but(name="plain"), "recipe.yaml")
    assert marker(RECIPE.to_dict()).control == RECIPE
    assert marker({"recompute_modules": [], "alloc_conf": ""}).rule.control == "recompute_modules=[], alloc_conf="


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "memory_saving() needs a control: a recipe, or the settings that it has instead"),
        ({"control": None}, "memory_saving() needs a control"),
        ({"control": 3}, "memory_saving(control=...): 3 is no control; allowed are a Recipe, the path"),
        ({"control": {}}, "memory_saving(control=...): {} is no control"),
        ({"control": {"tpp": 2}}, "memory_saving(control=...): 'tpp' is not a field of a recipe; did you mean 'tp'?"),
        ({"control": {"model": {"layers": 2}}}, "memory_saving(control=...): model.layers: unknown key"),
        ({"control": "nowhere.yaml"}, "nowhere.yaml: "),
        ({"atleast": "1 GiB"}, "memory_saving() has no argument 'atleast'; did you mean 'at_least'?"),
        ({"at_least": "1 GB/s"}, "memory_saving(at_least=...): '1 GB/s' is neither a size (as in '1 GiB') nor a perce"),
        ({"at_least": "200%"}, "memory_saving(at_least=...): '200%' is not a fraction"),
        (
            {"at_least": "0 B"},
            "memory_saving(at_least=...): '0 B' is not more than 0; leave it out to ask for any effect",
        ),
        ({"at_least": "0%"}, "memory_saving(at_least=...): '0%' is not more than 0"),
        ({"at_least": True}, "memory_saving(at_least=...): True is neither a size"),
        ({"max_slowdown": 7}, "memory_saving(max_slowdown=...): 7 is not a fraction"),
        ({"metric": "active"}, "memory_saving(metric=...): 'active' is not one of allocated, reserved"),
        ({"phase": "bakward"}, "memory_saving(): phase='bakward' is not one of"),
        ({"phase": 2}, "memory_saving(phase=...): 2 is not a text"),
        ({"settings": ["tpp"]}, "memory_saving(settings=...): 'tpp' is no setting of a recipe"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(arguments: dict[str, object], message: str) -> None:
    given = {"control": RECIPE, **arguments} if arguments else {}
    with pytest.raises(UserError) as caught:
        marker(**given)
    assert message in str(caught.value)
    assert str(caught.value).startswith((SOURCE, "nowhere.yaml"))


def test_only_the_control_may_be_positional() -> None:
    for args, kwargs in (((RECIPE, "1 GiB"), {}), ((RECIPE,), {"control": RECIPE})):
        with pytest.raises(UserError, match="takes one positional argument at most, the control"):
            marker(*args, **kwargs)


# Controls -------------------------------------------------------------------------------------------------------------


def test_changes_make_the_control_of_whatever_is_measured() -> None:
    control, differences = marker({"recompute_granularity": None}).control_of(SELECTIVE, SOURCE)
    assert control == RECIPE
    assert differences == {"memory.recompute_granularity": (None, "selective")}
    control, _ = marker({"tp": 1}).control_of(RECIPE.but(tp=2), SOURCE)  # naming it is enough
    assert control == RECIPE


@pytest.mark.parametrize(
    "candidate",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_a_setting_that_the_control_has_off_takes_along_what_depends_on_it(candidate: dict[str, Any]) -> None:
    control, differences = marker({"recompute_granularity": None}).control_of(RECIPE.but(**candidate), SOURCE)
    assert control == RECIPE
    assert list(differences) == sorted(f"memory.{name}" for name in candidate)


def test_a_recipe_must_be_matched() -> None:
    assert marker(RECIPE).control_of(SELECTIVE, SOURCE)[0] is RECIPE
    with pytest.raises(UserError, match=r"t.py::test_x: memory_saving\(control=.*differ in more than memory settings"):
        marker(RECIPE).control_of(SELECTIVE.but(tp=2), SOURCE)
    assert marker(RECIPE, settings=["memory", "tp"]).control_of(SELECTIVE.but(tp=2), SOURCE)[0] is RECIPE


def test_a_control_that_is_impossible_or_the_same_is_refused() -> None:
    with pytest.raises(
        IncompatibleSettings, match=r"^t.py::test_x: memory_saving\(control=.*: incompatible settings: "
    ):
        marker({"recompute_modules": ["mlp"]}).control_of(RECIPE, SOURCE)
    with pytest.raises(UserError, match=r"control=.*: memory\.recompute_modules: \['mlp', 'mlp'\] names mlp twice"):
        marker({"recompute_modules": ["mlp"] * 2}).control_of(RECIPE, SOURCE)
    with pytest.raises(UserError, match="control and candidate are the same recipe"):
        marker({"recompute_granularity": None}).control_of(RECIPE, SOURCE)


# Verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "rule", "verdict"),
    [
        (GIB, {}, "no effect"),
        (GIB - MIB, {}, "no effect"),
        (GIB - MIB - 1, {}, "pass"),
        (2 * GIB, {}, "costs more"),
        (GIB - 100 * MIB, {"at_least": 100 * MIB}, "pass"),
        (GIB - 100 * MIB + 1, {"at_least": 100 * MIB}, "saves too little"),
        (GIB, {"at_least": 100 * MIB}, "no effect"),
        (2 * GIB, {"at_least": 100 * MIB}, "costs more"),
        (GIB * 9 // 10, {"at_least_fraction": 0.1}, "pass"),
        (GIB * 9 // 10 + 1, {"at_least_fraction": 0.1}, "saves too little"),
    ],
)
def test_a_saving_is_judged_by_the_worst_ranks_peak(after: int, rule: dict[str, Any], verdict: str) -> None:
    judgement = judged(job(GIB), job(after), **rule)
    assert judgement.verdict == verdict
    assert judgement.passed == (verdict == "pass")


def test_a_share_of_a_byte_is_rounded_up() -> None:
    assert SavingRule("c", at_least_fraction=0.1).needed(101) == 11
    assert SavingRule("c", at_least_fraction=0.1).needed(110) == 11
    assert SavingRule("c", at_least=5).needed(100) == 5
    assert SavingRule("c").needed(100) is None


def test_a_saving_that_was_asked_for_passes_however_small_it_is_with_a_note() -> None:
    judgement = judged(job(GIB), job(GIB - 512 * 1024), at_least=512 * 1024)
    assert judgement.verdict == "pass"
    assert any("at_least is no more than 1.00 MiB" in note for note in judgement.notes)


@pytest.mark.parametrize(("flops", "verdict"), [(107, "pass"), (108, "too slow"), (90, "pass")])
def test_extra_flops_stand_for_the_slowdown(flops: int, verdict: str) -> None:
    judgement = judged(job(GIB, 100), job(GIB // 2, flops), max_slowdown=0.07)
    assert judgement.verdict == verdict
    if verdict == "pass":
        assert judgement.notes == (
            "the slowdown is modelled, not measured: FLOPs of a step of the rank that computes most stand for its time",
        )


@pytest.mark.parametrize("traffic", [{"tp": MIB}, {"moved": MIB}])
def test_a_slowdown_by_traffic_alone_cannot_be_judged(traffic: dict[str, int]) -> None:
    what = "+1.00 MiB tp collectives" if "tp" in traffic else "+1.00 MiB moved to host"
    judgement = judged(job(GIB, 100), job(GIB // 2, 100, **traffic), max_slowdown=0.07)
    assert judgement.verdict == "invalid"
    assert judgement.notes == (
        "max_slowdown: a slowdown by communicated or moved bytes cannot be judged without a real GPU; FLOPs stay the "
        f"same, for {what}",
    )
    assert judged(job(GIB, 100), job(GIB // 2, 100, **traffic)).verdict == "pass"
    assert judged(job(GIB, 100, **traffic), job(GIB // 2, 100), max_slowdown=0.07).verdict == "pass"  # less of it


@pytest.mark.parametrize(("flops", "verdict"), [(101, "pass"), (110, "too slow")])
def test_more_traffic_beside_more_flops_is_said(flops: int, verdict: str) -> None:
    judgement = judged(job(GIB, 100), job(GIB // 2, flops, tp=MIB), max_slowdown=0.07)
    assert judgement.verdict == verdict
    assert judgement.notes[-1] == ("FLOPs alone cannot judge the slowdown here; it also costs +1.00 MiB tp collectives")


def test_too_little_saved_is_said_before_too_slow() -> None:
    assert judged(job(GIB, 100), job(GIB, 200), max_slowdown=0.07).verdict == "no effect"


def test_a_slowdown_without_flops_is_invalid() -> None:
    judgement = judged(job(GIB), job(GIB // 2), max_slowdown=0.07)
    assert judgement.verdict == "invalid"
    assert judgement.notes[0] == "max_slowdown cannot be judged: FLOPs were not counted"


def test_a_control_that_does_not_fit_is_enough_only_where_no_number_is_asked_for() -> None:
    control, candidate = job(1, failure="out of memory"), job(GIB)
    assert judged(control, candidate).verdict == "fits"
    assert judged(control, candidate).passed
    for rule in ({"at_least": 1}, {"at_least_fraction": 0.1}, {"max_slowdown": 0.1}):
        judgement = judged(control, candidate, **rule)
        assert judgement.verdict == "invalid"
        assert judgement.notes[0].startswith("ask for no number")


@pytest.mark.parametrize("kind", ["error", "died", "refused", "no effect"])
def test_a_control_that_does_not_run_is_invalid(kind: str) -> None:
    assert judged(job(1, failure=kind), job(GIB)).verdict == "invalid"


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("out of memory", "out of memory"),
        ("refused", "refused"),
        ("no effect", "no effect"),
        ("died", "invalid"),
        ("error", "invalid"),
    ],
)
def test_a_measurement_that_failed_needs_no_control(kind: str, verdict: str) -> None:
    judgement = judge_failed(SavingRule("control"), job(1, failure=kind))
    assert (judgement.verdict, judgement.passed, judgement.comparison) == (verdict, False, None)
    assert judgement.notes == (f"rank 0 ended with: {kind} in step-1/forward",)


def test_notes_of_both_measurements_are_kept_once() -> None:
    judgement = judged(job(GIB, notes=("a", "b")), job(GIB // 2, notes=("b", "c")))
    assert judgement.notes == ("a", "b", "c")


def test_plain_data_are_read_back() -> None:
    candidate = job(GIB // 2, 110)
    judgement = judged(job(GIB, 100), candidate, at_least=5, max_slowdown=0.2)
    assert SavingJudgement.from_json(judgement.to_json(), candidate, "f") == judgement
    failed = judge_failed(SavingRule("control"), job(1, failure="died"))
    assert SavingJudgement.from_json(failed.to_json(), candidate, "f") == failed
    with pytest.raises(UserError, match="f: verdict: 'fine' is not one of"):
        SavingJudgement.from_json({**judgement.to_json(), "verdict": "fine"}, candidate, "f")


# On a real GPU --------------------------------------------------------------------------------------------------------


def timed(measurement: Measurement, *milliseconds: float) -> Measurement:
    """The same on a real GPU, where the timed steps took so long."""
    ranks = tuple(replace(rank, step_times=tuple(ms / 1000 for ms in milliseconds)) for rank in measurement.ranks)
    device = Device("nvidia-h100-80gb-hbm3-80gib", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=False)
    return replace(measurement, device=device, ranks=ranks)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ((104, 105, 106), "pass"),  # 5% longer
        ((108, 109, 110), "too slow"),  # 9% longer
        ((60, 109, 160), "pass"),  # within the spread
        ((80, 81, 82), "pass"),
    ],
)
def test_the_slowdown_is_one_of_time_and_beyond_the_spread(after: tuple[float, ...], verdict: str) -> None:
    control, candidate = job(4 * GIB, flops=100), job(2 * GIB, flops=100, moved=GIB)
    judgement = judged(timed(control, 99, 100, 101), timed(candidate, *after), max_slowdown=0.07)
    assert judgement.verdict == verdict
    assert judgement.notes[0].startswith(f"a step takes {after[1]:.2f} ms and the control's 100.00 ms, spread ")


def test_without_times_a_slowdown_on_a_real_gpu_is_invalid() -> None:
    judgement = judged(timed(job(4 * GIB), 99, 100), timed(job(2 * GIB)), max_slowdown=0.07)
    assert (judgement.verdict, judgement.notes[0]) == (
        "invalid",
        "max_slowdown cannot be judged: no step was timed on rank 0",
    )
