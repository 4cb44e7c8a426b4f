"""Allocator settings are read as the installed torch reads them, and asked for again when its allocator runs."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_mbmem.alloc_conf import has_expandable_segments, not_in_effect, not_reported, parse
from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.launch import Launcher, allocator_environment
from pytest_mbmem.recipe import Recipe

SOURCE = "here"


def refused(text: str) -> str:
    """Why `parse` refuses a text; empty if it does not."""
    try:
        parse(text, SOURCE)
    except UserError as error:
        return str(error)
    return ""


def agrees(text: str, answer: dict[str, Any]) -> bool:
    """Whether PyTorch took the text and has what `parse` says, or both refuse it."""
    if refused(text):
        return "error" in answer
    return "error" not in answer and not not_in_effect(parse(text, SOURCE), answer)


TAKEN = {
    "": {},
    " ": {},
    "expandable_segments:True": {"expandable_segments": "True"},
    " expandable_segments : True ": {"expandable_segments": "True"},
    "expan dable_segments\t:\nTr ue": {"expandable_segments": "True"},
    "expandable_segments:True,": {"expandable_segments": "True"},
    "expandable_segments:True,expandable_segments:False": {"expandable_segments": "False"},
    "expandable_segments:False, expandable_segments:True": {"expandable_segments": "True"},
    "max_split_size_mb:64, expandable_segments:True": {"max_split_size_mb": "64", "expandable_segments": "True"},
    "max_split_size_mb:64,max_split_size_mb:128": {"max_split_size_mb": "128"},
    "garbage_collection_threshold:.5,per_process_memory_fraction:0.25": {
        "garbage_collection_threshold": ".5",
        "per_process_memory_fraction": "0.25",
    },
    "roundup_power2_divisions:4": {"roundup_power2_divisions": "4"},
    "roundup_power2_divisions:[ 256:1, 512 : 2,>:8 ]": {"roundup_power2_divisions": "[256:1,512:2,>:8]"},
    "roundup_power2_divisions:[256:1,],expandable_segments:True": {
        "roundup_power2_divisions": "[256:1,]",
        "expandable_segments": "True",
    },
    "roundup_power2_divisions:[]": {"roundup_power2_divisions": "[]"},
    "roundup_power2_divisions:[>:4,256:2]": {"roundup_power2_divisions": "[>:4,256:2]"},
    "roundup_power2_divisions:[512:2,256:1]": {"roundup_power2_divisions": "[512:2,256:1]"},
    "roundup_power2_divisions:[131072:4,>:8]": {"roundup_power2_divisions": "[131072:4,>:8]"},
    "backend:native": {"backend": "native"},
    "pinned_max_round_threshold_mb:3,pinned_max_cached_size_mb:0": {
        "pinned_max_round_threshold_mb": "3",
        "pinned_max_cached_size_mb": "0",
    },
    "pinned_num_register_threads:4,pinned_use_cuda_host_register:True": {
        "pinned_num_register_threads": "4",
        "pinned_use_cuda_host_register": "True",
    },
    "release_lock_on_cudamalloc:True,graph_capture_record_stream_reuse:True": {
        "release_lock_on_cudamalloc": "True",
        "graph_capture_record_stream_reuse": "True",
    },
}

WRONG = {
    "expandable_segments": "here: 'expandable_segments': 'expandable_segments' has no value; write *",
    "expandable_segments:": "here: 'expandable_segments:': 'expandable_segments' has no value; *",
    "expandable_segments::True": "* has no value; write expandable_segments:VALUE",
    "expandable_segments:true": "here: expandable_segments:true: not one of True, False, with this spelling",
    "expandable_segments:1": "here: expandable_segments:1: not one of True, False, *",
    "expandable_segments:[True]": "here: expandable_segments:[True]: not one of True, False, *",
    "expandable_segments:\u00a0True": "* not one of True, False, *",
    "expandable_segments:True,,": "* a key is missing before ','; write key:value pairs separated by commas",
    ",expandable_segments:True": "* a key is missing before ','; *",
    ",": "* a key is missing before ','; *",
    "[": "* a key is missing before '['; *",
    "]": "* a key is missing before ']'; *",
    ":": "* a key is missing before ':'; *",
    "max_split_size_mb:lots": "here: max_split_size_mb:lots: not a whole number",
    "max_split_size_mb:[64]": "here: max_split_size_mb:[64]: not a whole number",
    "garbage_collection_threshold:nan": "here: garbage_collection_threshold:nan: not a number, as in 0.8",
    "roundup_power2_divisions:[256:1": "* the list of 'roundup_power2_divisions' is not closed with ']'",
    "roundup_power2_divisions:[256": "* is not closed with ']'",
    "roundup_power2_divisions:[256:1,,512:2]": "* '' is not SIZE:DIVISIONS, as in 256:4 or >:8",
    "roundup_power2_divisions:[,]": "* '' is not SIZE:DIVISIONS, *",
    "roundup_power2_divisions:[256]": "* '256' is not SIZE:DIVISIONS, *",
    "expandable_segments:True max_split_size_mb:64": "here: expandable_segments:Truemax_split_size_mb: not one of *",
}
"""Refused by PyTorch too, with messages such as "Index out of bounds in ConfigTokenizer"."""

STRICTER = {
    "expandable_segments,True": "* has no value; write expandable_segments:VALUE",
    "expandable_segments]True": "* has no value; *",
    "expandable_segments:True:max_split_size_mb:64": "* a comma is missing after expandable_segments:True",
    "max_split_size_mb:64]": "* a comma is missing after max_split_size_mb:64",
    "max_split_size_mb:64abc": "* not a whole number",
    "max_split_size_mb:+64": "* not a whole number",
    "max_split_size_mb:-1": "* not a whole number",
    "garbage_collection_threshold:.5x": "* not a number, as in 0.8",
    "garbage_collection_threshold:0x.8": "* not a number, as in 0.8",
    "roundup_power2_divisions:[256:1:512:2]": "* not a whole number",
    "roundup_power2_divisions:[256:1,>:8],roundup_power2_divisions:[512:2]": "* PyTorch merges the two, write one list",
}
"""PyTorch reads on over these, and takes a part of what is written."""


def matches(message: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), message) is not None


@pytest.mark.parametrize("text", TAKEN)
def test_what_pytorch_takes_is_read(text: str) -> None:
    assert parse(text, SOURCE) == TAKEN[text]


@pytest.mark.parametrize(("text", "message"), [*WRONG.items(), *STRICTER.items()])
def test_what_is_not_made_of_settings_is_refused_by_name(text: str, message: str) -> None:
    assert matches(refused(text), message), refused(text)


def test_keys_that_are_not_known_are_kept() -> None:
    assert parse("a : [ b, c:d ], Backend:x", SOURCE) == {"a": "[b,c:d]", "Backend": "x"}


@pytest.mark.parametrize(
    ("text", "on"),
    [
        ("max_split_size_mb:64, expandable_segments:True", True),  # with a space, which some programs overlook
        ("expandable_segments:True,expandable_segments:False", False),
        ("garbage_collection_threshold:0.5", False),
        ("", False),
    ],
)
def test_expandable_segments_are_seen(text: str, on: bool) -> None:
    assert has_expandable_segments(text) is on


# Against PyTorch itself -----------------------------------------------------------------------------------------------


def test_the_installed_torch_reads_the_same_when_cuda_starts(launcher: Launcher) -> None:
    texts = [*TAKEN, *list(WRONG)[:8], "unknown_key:1"]
    for text in texts:
        answer = launcher.call("alloc_conf_answers:at_start", {}, environment=allocator_environment(text)).value
        if text == "unknown_key:1":
            assert "Unrecognized key 'unknown_key'" in answer["error"]
        else:
            assert agrees(text, answer), (text, answer)


def test_the_installed_torch_refuses_and_takes_the_same(launcher: Launcher) -> None:
    texts = [text for text in (*TAKEN, *WRONG) if "per_process" not in text]
    answers = launcher.call("alloc_conf_answers:one_after_the_other", {"texts": texts}).value
    assert [text for text, answer in zip(texts, answers, strict=True) if not agrees(text, answer)] == []


def test_the_installed_torch_reads_on_over_what_is_refused_here(launcher: Launcher) -> None:
    answers = launcher.call("alloc_conf_answers:one_after_the_other", {"texts": list(STRICTER)}).value
    assert [text for text, answer in zip(STRICTER, answers, strict=True) if "error" in answer] == []


_SPACES = st.sampled_from(["", "", "", " ", "  ", "\t"])
_POWERS = st.integers(0, 17).map(lambda power: str(2**power))
_DIVISIONS = st.sampled_from(["0", "1", "2", "4", "8", "16"])
_PAIRS = st.lists(st.tuples(st.one_of(_POWERS, st.just(">")), _DIVISIONS).map(":".join), max_size=4)
_LISTS = st.tuples(_PAIRS.map(",".join), st.sampled_from(["", ","])).map(lambda p: f"[{p[0]}{p[1] if p[0] else ''}]")
_SETTINGS = st.one_of(
    st.sampled_from(["True", "False", "true", "TRUE", "0"]).map("expandable_segments:{}".format),
    st.integers(18, 2**20).map("max_split_size_mb:{}".format),
    st.floats(0.01, 0.99).map("garbage_collection_threshold:{!r}".format),
    st.sampled_from(["1", "2", "4", "8"]).map("roundup_power2_divisions:{}".format),
    _LISTS.map("roundup_power2_divisions:{}".format),
    st.sampled_from(["True", "False"]).map("release_lock_on_cudamalloc:{}".format),
    st.integers(0, 2**20).map("pinned_max_cached_size_mb:{}".format),
    st.sampled_from(["", "backend", "backend:native", ":", "[", "]"]),
)


@st.composite
def _texts(draw: st.DrawFn) -> str:
    """Settings with white space anywhere, repeated keys, and now and then a mistake."""
    text = ",".join(draw(st.lists(_SETTINGS, max_size=5))) + draw(st.sampled_from(["", "", ","]))
    return "".join(character + draw(_SPACES) if character in ":,[]_" else character for character in text)


@settings(max_examples=20, suppress_health_check=[HealthCheck.data_too_large])
@given(st.lists(_texts(), min_size=20, max_size=50))
def test_the_installed_torch_agrees_on_any_settings(launcher: Launcher, texts: list[str]) -> None:
    """But for ranges, which are PyTorch's to judge, and for what it reads on over."""
    answers = launcher.call("alloc_conf_answers:one_after_the_other", {"texts": texts}).value
    stricter = re.compile("a comma is missing|PyTorch merges|has no value")
    for text, answer in zip(texts, answers, strict=True):
        if "error" in answer and re.search("too small|power of 2", answer["error"]):
            continue
        if "error" not in answer and stricter.search(refused(text)):
            continue
        assert agrees(text, answer), (text, answer, refused(text))


# In a measurement -----------------------------------------------------------------------------------------------------


def test_a_setting_that_did_not_reach_the_allocator_is_refused(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.but(alloc_conf="expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:4")
    arguments = {"recipe": recipe.to_dict(), "rank": 0, "coordinates": {}, "stands_for": 1}
    for environment in ({}, allocator_environment("max_split_size_mb:128")):
        result = launcher.call("pytest_mbmem.measure.worker:measure_rank", arguments, environment=environment)
        assert result.value["failure"]["kind"] == "refused"
        message = result.value["failure"]["message"]
        has = "128.00 MiB" if environment else "no limit"
        assert re.match(
            r"memory\.alloc_conf: torch 2\.\S+ ignores expandable_segments:True: it has False; "
            rf"max_split_size_mb:64: it has {has}; roundup_power2_divisions:4: it has \{{'1': 0, ",
            message,
        )


def test_what_the_allocator_does_says_more_than_its_settings(launcher: Launcher) -> None:
    """As with a torch that knows the setting, says that it has it, and has it on no path to the driver."""
    arguments = {"texts": ["expandable_segments:True"]}
    result = launcher.call("alloc_conf_answers:one_after_the_other", arguments)
    assert result.value[0]["expandable_segments"] is True
    assert not_in_effect({"expandable_segments": "True"}, {**result.value[0], "expandable_segments": False}) == [
        "expandable_segments:True: it has False"
    ]
    answer = launcher.call("alloc_conf_answers:segments_of_before", {}).value
    assert not_in_effect({"expandable_segments": "True"}, answer) == ["expandable_segments:True: it has False"]


def test_settings_that_are_in_effect_are_measured_with(launcher: Launcher, small_recipe: Recipe) -> None:
    conf = "max_split_size_mb:64, expandable_segments:True,per_process_memory_fraction:0.9"
    measurement = launcher.measure(small_recipe.but(alloc_conf=conf), count_flops=False)
    assert measurement.failure is None
    assert not any("memory.alloc_conf" in text for text in measurement.assumptions)


def test_a_setting_that_pytorch_does_not_report_is_an_assumption(launcher: Launcher, small_recipe: Recipe) -> None:
    conf = "large_segment_size_mb:40,throw_on_cudamalloc_oom:True,backend:native"
    measurement = launcher.measure(small_recipe.but(alloc_conf=conf), count_flops=False)
    assert measurement.failure is None
    (text,) = [text for text in measurement.assumptions if "memory.alloc_conf" in text]
    assert text == (
        "memory.alloc_conf: PyTorch accepted large_segment_size_mb:40, throw_on_cudamalloc_oom:True and does not "
        "report it, so it is taken to be in effect"
    )


def test_a_number_that_pytorch_cannot_hold_is_refused(launcher: Launcher, small_recipe: Recipe) -> None:
    failure = launcher.measure(small_recipe.but(alloc_conf="max_split_size_mb:17592186044416")).failure
    assert failure is not None
    assert failure.kind == "refused"
    assert failure.message.endswith("ignores max_split_size_mb:17592186044416: it has no limit")


@pytest.mark.parametrize("fraction", ["", ",per_process_memory_fraction:1", ",per_process_memory_fraction:0.99"])
def test_a_collection_threshold_that_never_collects_is_refused(
    launcher: Launcher, small_recipe: Recipe, fraction: str
) -> None:
    """The installed torch collects only under a memory fraction, though it always reports the threshold."""
    conf = f"garbage_collection_threshold:0.5{fraction}"
    environment = {**allocator_environment(conf), "MBMEM_GPU_CAPACITY": str(4 * 2**30)}
    collects = launcher.call("alloc_conf_answers:collects_early", {}, environment=environment).value
    assert collects == fraction.endswith("0.99")
    failure = launcher.measure(small_recipe.but(alloc_conf=conf), count_flops=False).failure
    assert (failure is None) == collects
    if failure is not None:
        assert "garbage_collection_threshold:0.5: it collects only under a memory fraction below 1" in failure.message


def test_a_model_of_a_whole_test_has_its_settings_checked(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        from pytest_mbmem import Recipe

        RECIPE = Recipe.from_yaml("recipe.yaml")

        def test_in_effect(megatron_model):
            megatron_model(RECIPE.but(alloc_conf="expandable_segments:True")).step()

        def test_ignored(megatron_model):
            megatron_model(RECIPE.but(alloc_conf="max_split_size_mb:17592186044416"))
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*memory.alloc_conf: torch 2.* ignores max_split_size_mb:17592186044416: it has no limit"]
    )


def test_not_reported() -> None:
    asked = {"large_segment_size_mb": "40", "max_split_size_mb": "64", "new_key": "[1,2]"}
    assert not_reported(asked, {"max_split_size": 1}) == ["large_segment_size_mb:40", "new_key:[1,2]"]


def test_settings_of_the_allocator_are_compared_by_what_is_reserved(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest
        from pytest_mbmem import Model, Parallelism, Recipe, Training

        RECIPE = Recipe(  # of a published run of Megatron-LM, with fewer layers
            model=Model(
                num_layers=4,
                hidden_size=512,
                num_attention_heads=8,
                position_embedding_type="learned_absolute",
                add_bias_linear=True,
                share_embeddings_and_output_weights=True,
                attention_dropout=0.1,
                hidden_dropout=0.1,
            ),
            parallelism=Parallelism(dp=8, distributed_optimizer=True),
            training=Training(micro_batch_size=4, seq_length=1024),
        )
        EXPANDABLE = {"alloc_conf": "expandable_segments:True"}

        def test_compare(mbmem):
            found = mbmem.compare(RECIPE, EXPANDABLE)
            assert (found.metric, found.verdict) == ("reserved", "saving"), found.explain()
            assert abs(mbmem.compare(RECIPE, EXPANDABLE, metric="allocated").saving_fraction) < 0.01

        def test_sweep(mbmem):
            settings = {"on": EXPANDABLE, "off": {"alloc_conf": "max_split_size_mb:64"}}
            assert mbmem.sweep(RECIPE, settings).metric == "reserved"
            assert mbmem.sweep(RECIPE, settings | {"more": {"num_layers": 2}}).metric == "allocated"

        @pytest.mark.memory_saving(control={"alloc_conf": ""}, at_least="5%")
        def test_marker(mbmem):
            mbmem.measure(RECIPE.but(**EXPANDABLE))

        @pytest.mark.memory_saving(control=RECIPE, at_least="5%")
        def test_whole_recipe(mbmem):
            mbmem.measure(RECIPE.but(**EXPANDABLE))

        @pytest.mark.memory_saving(control={"alloc_conf": ""}, at_least="5%", metric="allocated")
        def test_said_otherwise(mbmem):
            mbmem.measure(RECIPE.but(**EXPANDABLE))
        """
    )
    result = real_project.runpytest("--junitxml=r.xml")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(
        [
            "SAVES TOO LITTLE: peak allocated falls by *",
            "  allocator   allocated * -> *, reserved * -> *, retries 0 -> 0, segments * -> 0",
            "*st_marker saving reserved * vs *",
            "*::test_compare:",
            "setting * peak reserved * saved * peak allocated * verdict*",
        ]
    )
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_saving_segments@reserved"] == "0"
    assert int(properties["mbmem_saving_control_segments@reserved"]) > 10
    assert int(properties["mbmem_sweep_control_reserved_bytes[candidate]"]) > int(
        properties["mbmem_sweep_reserved_bytes[candidate]"]
    )
