"""What a comparison says: verdicts, figures, costs, and where a saving hides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pytest_mbmem.compare import Comparison, Costs, RankSaving, check_settings, default_metric, matched
from pytest_mbmem.errors import MeasurementFailed, UserError
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.measurement import Adapter, Device, Failure, Measurement, PhaseFigures, RankMeasurement
from pytest_mbmem.recipe import Lora, Model, Recipe, Training

MIB, GIB = 2**20, 2**30
H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * GIB, virtual=True)
DIFFERENCES = {"memory.recompute_modules": ([], ["core_attn"])}

RECIPE = Recipe(model=Model(num_layers=2, hidden_size=64, num_attention_heads=4), training=Training(seq_length=64))
SELECTIVE = RECIPE.but(recompute_granularity="selective")


def job(*ranks: Mapping[str, int], failure: Failure | None = None, **fields: Any) -> Measurement:
    """A rank for each mapping of phases of step 2 to peak allocated; reserved is 20 MiB above it."""
    made = []
    for number, phases in enumerate(ranks):
        figures = tuple(
            PhaseFigures(2, phase, *[{"allocated": peak, "reserved": peak + 20 * MIB if peak else 0}] * 2)
            for phase, peak in phases.items()
        )
        made.append(RankMeasurement(number, {"pp": number}, 1, figures, **fields))
    return Measurement(H100, tuple(made), failure=failure)


def compared(control: Measurement, candidate: Measurement, **fields: Any) -> Comparison:
    return Comparison(control, candidate, DIFFERENCES, **fields)


def both(before: int, after: int) -> Comparison:
    return compared(job({"backward": before}), job({"backward": after}))


# Which settings may differ --------------------------------------------------------------------------------------------


def test_memory_settings_may_differ_without_being_named() -> None:
    assert matched(RECIPE, SELECTIVE, None, "t") == {"memory.recompute_granularity": (None, "selective")}
    lora = RECIPE.but(lora=Lora(), tp=2, sequence_parallel=True)
    regather = lora.but(sequence_parallel_input_regather=True)
    assert list(matched(lora, regather, None, "t")) == ["lora.sequence_parallel_input_regather"]


def test_a_list_of_settings_is_plain_data() -> None:
    control = RECIPE.but(recompute_granularity="selective", recompute_modules=[])
    candidate = control.but(recompute_modules=["core_attn"])
    assert matched(control, candidate, None, "t") == {"memory.recompute_modules": ([], ["core_attn"])}


@pytest.mark.parametrize("settings", [["tp"], ["parallelism.tp"], ["parallelism"], ["memory", "tp"]])
def test_a_setting_is_named_as_a_field_a_key_or_a_part(settings: list[str]) -> None:
    assert matched(RECIPE, RECIPE.but(tp=2), settings, "t") == {"parallelism.tp": (1, 2)}


def test_a_part_that_one_recipe_lacks_is_named_by_its_name() -> None:
    assert "lora.rank" in matched(RECIPE, RECIPE.but(lora=Lora(rank=8)), ["lora"], "t")


def test_all_other_differences_are_listed_in_the_refusal() -> None:
    other = SELECTIVE.but(tp=2, seq_length=128, name="another name")
    with pytest.raises(UserError) as caught:
        matched(RECIPE, other, None, "t.py::test_x: mbmem.compare()")
    assert str(caught.value) == (
        "t.py::test_x: mbmem.compare(): control and candidate differ in more than memory settings: "
        "parallelism.tp: 1 -> 2; training.seq_length: 64 -> 128 (control -> candidate). "
        "Make them equal, or name in settings=[...] all that may differ"
    )
    with pytest.raises(UserError, match=r"differ in more than tp: memory\.recompute_granularity: None -> selective \("):
        matched(RECIPE, SELECTIVE.but(tp=2), ["tp"], "t")


def test_a_name_is_not_a_part_of_another_name() -> None:
    with pytest.raises(UserError, match=r"training\.seq_length"):
        matched(RECIPE, RECIPE.but(seq_length=128), ["rank"], "t")


def test_the_same_recipe_is_no_control() -> None:
    with pytest.raises(UserError, match="t: control and candidate are the same recipe"):
        matched(RECIPE, RECIPE.but(name="other"), ["memory"], "t")


@pytest.mark.parametrize("names", ["memory", ["tp", "model.moe.overload"], ("environment.NCCL_DEBUG", "megatron.fp8")])
def test_names_of_settings_are_taken(names: Any) -> None:
    assert check_settings(names, "t") == ((names,) if isinstance(names, str) else tuple(names))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["memry"], "t: 'memry' is no setting of a recipe; did you mean 'memory'?"),
        (["memory.recompute_module"], "did you mean 'recompute_modules'?"),
        ([3], "t: 3 is no setting of a recipe"),
        ([""], "t: '' is no setting of a recipe"),
        ([], r"t: \[\] is not a list of settings"),
        (7, "t: 7 is not a list of settings"),
    ],
)
def test_a_name_that_is_no_setting_is_refused(names: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        check_settings(names, "t")


# Verdicts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (GIB - MIB - 1, "saving"),
        (GIB - MIB, "no effect"),
        (GIB, "no effect"),
        (GIB + MIB, "no effect"),
        (GIB + MIB + 1, "costs more"),
    ],
)
def test_a_difference_of_up_to_1_mib_allocated_is_no_effect(after: int, verdict: str) -> None:
    assert both(GIB, after).verdict == verdict


def test_reserved_has_the_slack_of_its_gate() -> None:
    control = job({"backward": 1000 * MIB - 20 * MIB})  # 1000 MiB reserved: 3% and 20 MiB are no effect
    for after, verdict in ((950 * MIB, "no effect"), (950 * MIB - 1, "saving")):
        candidate = job({"backward": after - 20 * MIB})
        assert compared(control, candidate, metric="reserved").verdict == verdict


def test_the_worst_rank_of_each_side_decides() -> None:
    comparison = compared(
        job({"backward": 10 * GIB}, {"backward": 8 * GIB}), job({"backward": 6 * GIB}, {"backward": 9 * GIB})
    )
    assert comparison.verdict == "saving"
    assert (comparison.worst_before.rank, comparison.worst_after.rank) == (0, 1)
    assert (comparison.saving, comparison.saving_fraction) == (GIB, 0.1)
    assert comparison.ranks == (RankSaving(0, 10 * GIB, 6 * GIB), RankSaving(1, 8 * GIB, 9 * GIB))
    assert [rank.saving for rank in comparison.ranks] == [4 * GIB, -GIB]
    assert comparison.explain() == (
        "saves 1.00 GiB (10.00%) of peak allocated: 10.00 GiB on rank 0 in step-2/backward -> "
        "9.00 GiB on rank 1 in step-2/backward"
    )


def test_a_phase_is_compared_by_itself() -> None:
    control = job({"forward": GIB, "backward": 3 * GIB})
    candidate = job({"forward": GIB // 2, "backward": 3 * GIB})
    assert compared(control, candidate).verdict == "no effect"
    forward = compared(control, candidate, phase="forward")
    assert (forward.verdict, forward.saving) == ("saving", GIB // 2)
    assert "of peak allocated in forward:" in forward.explain()
    with pytest.raises(UserError, match="phase='optimizer' selects nothing"):
        _ = compared(control, candidate, phase="optimizer").verdict


def test_a_setting_that_changes_no_figure_is_named() -> None:
    assert both(GIB, GIB).explain() == (
        "no effect: no figure of any rank differs; memory.recompute_modules changed nothing here"
    )


def test_a_request_alone_is_no_figure() -> None:
    asked = job({"backward": GIB}, adapters=(Adapter("linear_qkv", 2, True, False, "TP1"),))
    plain = job({"backward": GIB}, adapters=(Adapter("linear_qkv", 2, False, False),))
    assert "no figure of any rank differs" in compared(plain, asked).explain()


def test_figures_that_differ_below_the_slack_say_so() -> None:
    assert both(GIB, GIB - 1024).explain() == (
        "no effect: peak allocated 1.00 GiB on rank 0 in step-2/backward -> 1.00 GiB on rank 0 in step-2/backward; "
        "differences of up to 1.00 MiB can come from another order of allocations"
    )


def test_more_memory_says_how_much() -> None:
    assert both(GIB, GIB + GIB // 2).explain().startswith("costs 512.00 MiB (50.00%) more of peak allocated: 1.00 GiB")


# Where a saving hides -------------------------------------------------------------------------------------------------


def test_a_peak_that_moves_to_another_phase_hides_a_saving() -> None:
    control = job({"backward": 10 * GIB, "optimizer": 9 * GIB})
    candidate = job({"backward": 4 * GIB, "optimizer": 9 * GIB})
    comparison = compared(control, candidate)
    assert (comparison.phase_before, comparison.phase_after) == ("step-2/backward", "step-2/optimizer")
    assert list(comparison.hints()) == [
        "in step-2/backward rank 0 takes 6.00 GiB less; that does not show in full, because the peak is now in "
        "step-2/optimizer"
    ]
    assert comparison.explain().endswith(f". {next(comparison.hints())}")


def test_a_peak_that_stays_in_its_phase_hides_nothing() -> None:
    assert list(both(10 * GIB, 4 * GIB).hints()) == []


def test_a_rank_that_is_not_the_worst_may_save_alone() -> None:
    control = job({"backward": 10 * GIB}, {"backward": 8 * GIB})
    candidate = job({"backward": 10 * GIB}, {"backward": 5 * GIB})
    comparison = compared(control, candidate)
    assert comparison.verdict == "no effect"
    assert list(comparison.hints()) == ["rank 1 saves 3.00 GiB, but it is not the worst one"]


def test_ranks_at_other_places_of_the_job_are_not_matched() -> None:
    control, candidate = job({"backward": GIB}, {"backward": GIB}), job({"backward": GIB // 2})
    moved = RankMeasurement(1, {"pp": 0, "tp": 1}, 1, candidate.ranks[0].phases)
    comparison = compared(control, Measurement(H100, (*candidate.ranks, moved)))
    assert [rank.rank for rank in comparison.ranks] == [0]
    assert (comparison.only_control, comparison.only_candidate) == ((1,), (1,))


# Costs ----------------------------------------------------------------------------------------------------------------


def test_costs_are_those_of_the_rank_where_they_are_highest() -> None:
    ranks = tuple(
        RankMeasurement(n, {}, 1, (), flops_per_step=f, collective_bytes=c, moved_bytes=m, host_peak=h)
        for n, (f, c, m, h) in enumerate(
            [(10, {"tp": 5, "pp": 1}, {"to host": 3}, 7), (20, {"tp": 2}, {"to host": 4, "to device": 1}, 6)]
        )
    )
    costs = Costs.of(Measurement(H100, ranks))
    assert costs == Costs(20, {"tp": 5, "pp": 1}, {"to host": 4, "to device": 1}, 7)
    assert costs - Costs(15, {"tp": 5, "dp": 2}, {}, 7) == Costs(
        5, {"dp": -2, "pp": 1}, {"to host": 4, "to device": 1}, 0
    )
    assert (costs - Costs()).flops is None
    assert (Costs() - costs).host_peak is None


def test_the_explanation_ends_with_what_the_saving_costs() -> None:
    control = job({"backward": 2 * GIB}, flops_per_step=100, collective_bytes={"tp": MIB}, host_peak=0)
    candidate = job(
        {"backward": GIB},
        flops_per_step=107,
        collective_bytes={"tp": 3 * MIB},
        moved_bytes={"to host": 8 * MIB},
        host_peak=MIB,
    )
    comparison = compared(control, candidate)
    assert comparison.slowdown == pytest.approx(0.07)
    assert comparison.extra == Costs(7, {"tp": 2 * MIB}, {"to host": 8 * MIB}, MIB)
    assert comparison.explain().endswith(
        ", for +7.00% FLOPs (modelled, not measured), +2.00 MiB tp collectives, +8.00 MiB moved to host, "
        "+1.00 MiB of pinned host memory"
    )


def test_without_counted_flops_there_is_no_slowdown() -> None:
    assert both(GIB, MIB).slowdown is None
    assert compared(job({"backward": GIB}, flops_per_step=5), job({"backward": MIB})).slowdown is None


# Sides that did not run -----------------------------------------------------------------------------------------------


def failure(kind: Any, message: str = "CUDA out of memory.\nmore") -> Failure:
    return Failure(kind, 0, message, 1, "forward")


def test_a_control_that_is_out_of_memory_where_the_candidate_runs_is_a_gain_without_a_number() -> None:
    comparison = compared(job({"forward": 1}, failure=failure("out of memory")), job({"backward": GIB}))
    assert comparison.verdict == "fits"
    assert comparison.explain() == (
        "fits where the control does not: peak allocated 1.00 GiB on rank 0 in step-2/backward. The control ends out "
        "of memory on rank 0 in step-1/forward, so the saving has no number"
    )
    with pytest.raises(MeasurementFailed, match="fits where the control does not"):
        _ = comparison.saving


def test_a_control_that_ran_with_an_idle_setting_says_so() -> None:
    message = "memory.offload_modules ['moe_act']: it changes nothing"
    comparison = compared(job(failure=failure("no effect", message)), job({"backward": GIB}))
    assert comparison.verdict == "invalid"
    assert comparison.explain() == f"a setting of the control itself has no effect, on rank 0: {message}"


@pytest.mark.parametrize("kind", ["error", "died", "timeout", "refused"])
def test_a_control_that_does_not_run_says_so(kind: Any) -> None:
    comparison = compared(job(failure=failure(kind, "Traceback:\n...\nValueError: oh no")), job({"backward": GIB}))
    assert comparison.verdict == "invalid"
    assert comparison.explain() == (
        f"the control itself does not run: {kind} on rank 0 in step-1/forward: ValueError: oh no"
    )
    assert not comparison.has_figures


def test_when_neither_side_runs_the_control_is_named_first() -> None:
    comparison = compared(job(failure=failure("out of memory")), job(failure=failure("out of memory")))
    assert comparison.verdict == "invalid"
    assert comparison.explain().startswith("the control itself does not run: out of memory on rank 0")
    assert comparison.explain().endswith("; the candidate does not run either")


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("out of memory", "out of memory"),
        ("refused", "refused"),
        ("no effect", "no effect"),
        ("error", "invalid"),
        ("died", "invalid"),
        ("timeout", "invalid"),
    ],
)
def test_a_candidate_that_does_not_run_keeps_its_reason(kind: Any, verdict: str) -> None:
    comparison = compared(job({"backward": GIB}), job(failure=failure(kind)))
    assert comparison.verdict == verdict
    assert "CUDA out of memory." in comparison.explain()
    with pytest.raises(MeasurementFailed):
        _ = comparison.ranks


@pytest.mark.parametrize(
    ("control", "candidate", "reason"),
    [
        (job(), job({"backward": GIB}), "no rank of the control was measured"),
        (job({"backward": GIB}), job({"backward": 0}), "the candidate allocated nothing on the device"),
    ],
)
def test_a_side_without_figures_is_invalid(control: Measurement, candidate: Measurement, reason: str) -> None:
    comparison = compared(control, candidate)
    assert comparison.verdict == "invalid"
    assert comparison.explain() == f"there is nothing to compare: {reason}"


# JSON -----------------------------------------------------------------------------------------------------------------


def test_plain_data_hold_the_figures_and_are_read_back() -> None:
    comparison = compared(
        job({"backward": 2 * GIB}, flops_per_step=100), job({"backward": GIB}, flops_per_step=110), phase="backward"
    )
    data = comparison.to_json()
    assert {key: data[key] for key in ("verdict", "saving", "slowdown", "extra_flops", "phase")} == {
        "verdict": "saving",
        "saving": GIB,
        "slowdown": 0.1,
        "extra_flops": 10,
        "phase": "backward",
    }
    assert data["before"] == {"bytes": 2 * GIB, "rank": 0, "phase": "step-2/backward"}
    assert Comparison.from_json(data, comparison.control, comparison.candidate, "f") == comparison


def test_a_comparison_without_figures_is_plain_data_too() -> None:
    comparison = compared(job(failure=failure("died")), job({"backward": GIB}))
    data = comparison.to_json()
    assert data["verdict"] == "invalid"
    assert "saving" not in data
    assert Comparison.from_json(data, comparison.control, comparison.candidate, "f") == comparison
    with pytest.raises(UserError, match="f: metric: 'active' is not one of allocated, reserved"):
        Comparison.from_json({**data, "metric": "active"}, comparison.control, comparison.candidate, "f")
    with pytest.raises(UserError, match="f: differences: not pairs"):
        Comparison.from_json({**data, "differences": {"a": [1]}}, comparison.control, comparison.candidate, "f")


# The real thing -------------------------------------------------------------------------------------------------------

TWO_LAYERS = RECIPE.but(
    hidden_size=256,
    num_attention_heads=8,
    seq_length=512,
    micro_batch_size=2,
    steps=2,
    recompute_granularity="selective",
    recompute_modules=[],
)
SCORES = 2 * 8 * 512 * 512 * 2  # bytes of a layer's bf16 attention scores: batch, heads, sequence, sequence


def test_recomputing_core_attention_saves_the_scores_of_every_layer_for_two_products_each(launcher: Launcher) -> None:
    candidate = TWO_LAYERS.but(recompute_modules=["core_attn"])
    comparison = Comparison(*launcher.measure_many([TWO_LAYERS, candidate]), matched(TWO_LAYERS, candidate, None, "t"))
    # The vocabulary is so large that the peak is at the loss, where the scores of both layers wait for backward.
    assert (comparison.phase_before, comparison.phase_after) == ("step-2/forward", "step-2/forward")
    assert comparison.saving == 2 * SCORES
    product = 2 * 2 * 8 * 512 * 512 * 32  # FLOPs of queries and keys, or of scores and values: 32 channels a head
    assert comparison.extra.flops == 2 * 2 * product
    assert comparison.extra.collective_bytes == {}
    assert comparison.verdict == "saving"


def test_a_marker_asks_for_just_as_much(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        f"""
        import pytest
        from pytest_mbmem import Recipe

        RECIPE = Recipe.from_dict({TWO_LAYERS.but(recompute_modules=["core_attn"]).to_dict()!r})
        CONTROL = {{"recompute_modules": []}}

        @pytest.mark.memory_saving(CONTROL, at_least={2 * SCORES}, max_slowdown="1.2%")
        def test_enough(mbmem):
            mbmem.measure(RECIPE)

        @pytest.mark.memory_saving(CONTROL, at_least={2 * SCORES + 1})
        def test_too_little(mbmem):
            mbmem.measure(RECIPE)

        @pytest.mark.memory_saving(CONTROL, max_slowdown="1.1%")
        def test_too_slow(mbmem):
            mbmem.measure(RECIPE)
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "SAVES TOO LITTLE: peak allocated falls by 16.00 MiB, 1 B less than asked",
            "TOO SLOW: 1.17% more FLOPs than the control, 1.10% are allowed",
        ]
    )


# The allocator --------------------------------------------------------------------------------------------------------

EXPANDABLE = {"memory.alloc_conf": ("", "expandable_segments:True")}


def reserving(allocated: int, reserved: int, **fields: Any) -> Measurement:
    figures = {"allocated": allocated, "reserved": reserved}
    return Measurement(
        H100, (RankMeasurement(0, {"pp": 0}, 1, (PhaseFigures(2, "backward", figures, figures),), **fields),)
    )


@pytest.mark.parametrize(
    ("differences", "metric"),
    [
        (EXPANDABLE, "reserved"),
        (EXPANDABLE | DIFFERENCES, "allocated"),
        (DIFFERENCES, "allocated"),
    ],
)
def test_settings_of_the_allocator_alone_are_compared_by_what_is_reserved(
    differences: Mapping[str, Any], metric: str
) -> None:
    assert default_metric(differences) == metric


def test_the_allocators_figures_of_both_sides_are_said() -> None:
    before = reserving(4 * GIB, 6 * GIB, allocation_retries=2, segments=90)
    after = reserving(4 * GIB, 5 * GIB, segments=0)
    comparison = Comparison(before, after, EXPANDABLE, "reserved")
    assert comparison.verdict == "saving"
    figures = "allocated 4.00 GiB -> 4.00 GiB, reserved 6.00 GiB -> 5.00 GiB, retries 2 -> 0, segments 90 -> 0"
    assert f". Allocator: {figures}" in comparison.explain()
    assert comparison.to_json()["allocator"]["before"] == {
        "allocated": 4 * GIB,
        "reserved": 6 * GIB,
        "retries": 2,
        "segments": 90,
    }
    assert Comparison(before, after, EXPANDABLE, "allocated").verdict == "no effect"


def test_the_allocator_is_named_where_its_settings_or_its_retries_differ() -> None:
    one, retried = reserving(GIB, 2 * GIB, segments=5), reserving(GIB, 2 * GIB, allocation_retries=1, segments=9)
    assert not Comparison(one, reserving(GIB, 3 * GIB, segments=7), DIFFERENCES).is_about_the_allocator
    assert Comparison(one, retried, DIFFERENCES).is_about_the_allocator
    assert Comparison(one, one, EXPANDABLE).is_about_the_allocator
    old = reserving(GIB, 2 * GIB)
    assert Comparison(old, one, EXPANDABLE).allocator_text().endswith("segments not measured -> 5")


def test_expandable_segments_reserve_less_on_the_virtual_gpu(launcher: Launcher) -> None:
    model = Model(num_layers=2, hidden_size=1024, num_attention_heads=4, vocab_size=1000)
    control = Recipe(model=model, training=Training(seq_length=1024, steps=2))
    candidate = control.but(alloc_conf="expandable_segments:True")
    comparison = Comparison(
        launcher.measure(control), launcher.measure(candidate), matched(control, candidate, None, "t"), "reserved"
    )
    before, after = comparison.allocator
    assert before.segments is not None
    assert before.segments > 10
    assert (after.segments, after.retries) == (0, 0)
    assert abs(before.allocated / after.allocated - 1) < 0.01  # what PyTorch does not split off counts as allocated
    assert after.allocated <= after.reserved < before.reserved
