"""The baseline store: keys, strict reading, pasting, updates that are atomic and ask for a reason."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pytest_mbmem import baselines
from pytest_mbmem.baseline_file import BaselineFile, DamagedFile, Entry, Figure, dump, parse, read
from pytest_mbmem.baselines import (
    Baselines,
    Paste,
    Record,
    apply_updates,
    baseline_path,
    clean_nodeid,
    orphans,
    paste,
)
from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import PeakGate, judge
from pytest_mbmem.measurement import (
    Composition,
    Device,
    Failure,
    Measurement,
    Owner,
    PhaseFigures,
    RankMeasurement,
)

H100 = Device("virtual-h100-80gb", "NVIDIA H100 80GB HBM3", 80 * 2**30, virtual=True)
MODULE = "tests/test_x.py"
KEY = "TestX::test_y[tp2-bf16]"
ALLOCATED = PeakGate(tolerance=0.01, slack=0)
RESERVED = PeakGate(metric="reserved", tolerance=0.01, slack=0)
RECIPE = {"model": {"num_layers": 2, "hidden_size": 64}, "training": {"precision": "bf16"}, "optimizer": {"lr": 1e-05}}
TORCH = {"torch": "2.14.1", "megatron-core": "0.16"}


def measured(
    *allocated: int,
    reserved: int = 500,
    digest: str | None = "00d1",
    recipe: Any = RECIPE,
    environment: Any = TORCH,
    **rest: Any,
) -> Measurement:
    ranks = tuple(
        RankMeasurement(n, {}, 1, (PhaseFigures(2, "backward", {"allocated": size, "reserved": reserved}, {}),))
        for n, size in enumerate(allocated)
    )
    return Measurement(H100, ranks, recipe=recipe, recipe_digest=digest, environment=environment, **rest)


def record(peak: int = 1000, key: str = KEY, module: str = MODULE, gate: PeakGate = ALLOCATED, **rest: Any) -> Record:
    return Record.of(module, key, gate, measured(peak, **rest))


def file_of(folder: Path, module: str = MODULE) -> Path:
    return baseline_path(folder, H100.key, module)


def stored(folder: Path, module: str = MODULE) -> Mapping[str, Entry]:
    return read(file_of(folder, module)).entries


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "baselines"


@pytest.fixture(params=["C", "Python"])
def any_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML has two parsers, and which one there is depends on how it was built."""
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)


# Keys and paths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodeid", "module", "key"),
    [
        ("tests/test_x.py::test_y", "tests/test_x.py", "test_y"),
        ("test_x.py::TestA::TestB::test_y[tp2-bf16]", "test_x.py", "TestA::TestB::test_y[tp2-bf16]"),
        ("test_x.py::test_y[a::b]", "test_x.py", "test_y[a::b]"),
        ("test_x.py::test_y[a@b]", "test_x.py", "test_y[a@b]"),
        ("test_x.py::test_y[/data/a b/c.yaml]", "test_x.py", "test_y[/data/a b/c.yaml]"),
        ("test_x.py::test_y[[1]-]]", "test_x.py", "test_y[[1]-]]"),
        ("test_x.py::test_y[gr\u00fc\u00df \U0001f600]", "test_x.py", "test_y[gr\u00fc\u00df \U0001f600]"),
        ("a@b/test_x.py::test_y", "a@b/test_x.py", "test_y"),
        ("test_\udcff.py::test_y", "test_\\udcff.py", "test_y"),
    ],
)
@pytest.mark.parametrize("group", ["", "@gpu", "@a@b", "@a_b::c", "@x/y z"])
def test_the_key_is_the_same_with_and_without_xdist_groups(nodeid: str, group: str, module: str, key: str) -> None:
    assert clean_nodeid(nodeid + group) == (module, key)


def test_the_cases_of_a_parametrised_test_have_their_own_keys(folder: Path) -> None:
    apply_updates(folder, [record(1000, "test_y[tp1]"), record(2000, "test_y[tp2]")], "new")
    assert {key: entry.figures["allocated"].value for key, entry in stored(folder).items()} == {
        "test_y[tp1]": 1000,
        "test_y[tp2]": 2000,
    }


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("test_x.py", "gpu/test_x.yaml"),
        ("tests/sub/test_x.py", "gpu/tests/sub/test_x.yaml"),
        ("tests/recipe.txt", "gpu/tests/recipe.txt.yaml"),
    ],
)
def test_the_path_follows_the_module(module: str, path: str) -> None:
    assert baseline_path(Path("b"), "gpu", module) == Path("b") / path


@pytest.mark.parametrize("module", ["../test_x.py", "/abs/test_x.py", "a/../../test_x.py", ""])
def test_a_module_outside_of_the_rootdir_has_no_baselines(module: str) -> None:
    with pytest.raises(UserError, match="outside of pytest's rootdir"):
        baseline_path(Path("b"), "gpu", module)


# The file -------------------------------------------------------------------------------------------------------------

TEXT = """\
# Accepted peaks in bytes, written by pytest --mbmem-update. Comments of your own do not survive an update.
format: 1
environments:
  e1:
    megatron-core: "0.16"
    torch: 2.14.1
tests:
  TestX::test_y[tp2-bf16]:
    recipe_digest: 00d1
    recipe:
      model:
        num_layers: 2
        hidden_size: 64
      training:
        precision: bf16
      optimizer:
        lr: 1.0e-05
    metrics:
      allocated:
        peak: 4516590080  # 4.21 GiB
        rank: 1
        phase: step-2/backward
        ranks:
          0: 1048576  # 1.00 MiB
          1: 4516590080  # 4.21 GiB
        first: 4516590080  # 4.21 GiB
        updates: 0
        environment: e1
      reserved:
        peak: 6442450944  # 6.00 GiB
        rank: 0
        phase: step-2/backward
        ranks:
          0: 6442450944  # 6.00 GiB
          1: 6442450944  # 6.00 GiB
        first: 6442450944  # 6.00 GiB
        updates: 0
        reason: "fp32 main grads: needed"
        environment: e1
  test_plain:
    recipe_digest: null
    metrics:
      allocated@build:
        peak: 5  # 5 B
        rank: 0
        phase: build
        ranks:
          0: 5  # 5 B
        first: 4  # 4 B
        updates: 2
        split:
          parameters:
            "embedding @": [1, 1]  # 1 B
          activations:
            "layers.*.mlp @ layers.py (forward)": [2, 20]  # 2 B
            other: 1  # 1 B
          rounding: 1  # 1 B
        environment: e1
"""
LINES = TEXT.splitlines()


def test_a_file_is_sorted_block_style_with_sizes_in_bytes_and_for_people(folder: Path) -> None:
    run = measured(2**20, 4516590080, reserved=6 * 2**30)
    apply_updates(folder, [Record.of(MODULE, KEY, gate, run) for gate in (RESERVED, ALLOCATED)], "new")
    start, end = LINES.index("      reserved:"), LINES.index("  test_plain:")
    expected = [line for line in LINES[:end] if "reason" not in line]
    assert file_of(folder).read_text().splitlines() == expected
    assert start < end


def test_reading_gives_what_writing_wrote(any_parser: None) -> None:
    assert dump(parse(TEXT, Path("f"))) == TEXT


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
environments = st.dictionaries(names, names, max_size=3)


@st.composite
def figure_values(draw: st.DrawFn) -> Figure:
    ranks = draw(st.dictionaries(st.integers(0, 10**6), st.integers(1, 2**62), min_size=1, max_size=3))
    peak = max(ranks.values())
    updates = draw(st.integers(0, 99))
    return Figure(
        value=peak,
        rank=next(rank for rank, size in ranks.items() if size == peak),
        phase=draw(st.sampled_from(["build", "test", "step-1/forward", "steady/optimizer"])),
        ranks=ranks,
        first=draw(st.integers(1, 2**62)) if updates else peak,
        updates=updates,
        environment=draw(environments),
        reason=draw(st.none() | names),
    )


entries = st.builds(
    Entry,
    recipe_digest=st.none() | names,
    recipe=st.none() | st.dictionaries(names, values, max_size=3),
    figures=st.dictionaries(
        st.sampled_from(["allocated", "reserved", "allocated@steady/optimizer", "reserved@build"]),
        figure_values(),
        min_size=1,
        max_size=2,
    ),
)
files = st.builds(BaselineFile, st.dictionaries(names | st.text("ab[]:# -'\"@", max_size=1500), entries, max_size=3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files)
@example(BaselineFile({"k": Entry("1e5", {"a": 1e16, "b": "1e5", "c": -0.0, "d": "null", "e": "12:30"}, {})}))
@example(BaselineFile({"x" * 1100: Entry("0", {"y" * 1100: {"z" * 1100: 1}}, {})}))
def test_every_key_text_and_number_comes_back(any_parser: None, file: BaselineFile) -> None:
    figure = Figure(1, 0, "build", {0: 1}, 1)
    file = BaselineFile(
        {k: e if e.figures else replace(e, figures={"allocated": figure}) for k, e in file.entries.items()}
    )
    text = dump(file)
    again = parse(text, Path("f"))
    assert again.entries == file.entries
    assert dump(again) == text


def test_environments_are_recorded_once_and_keep_their_ids(folder: Path) -> None:
    apply_updates(folder, [record(key=f"test_{n}", environment={"torch": f"2.{n % 3}"}) for n in range(9)], "new")
    assert read(file_of(folder)).environments == {f"e{n + 1}": {"torch": f"2.{n}"} for n in range(3)}
    # The last one is used no more, the others stay what they are, and a new one gets an id that none had.
    moved = [record(1001, key=f"test_{n}", environment={"torch": "2.9"}) for n in (2, 5, 8)]
    apply_updates(folder, moved, "all", "newer torch")
    assert read(file_of(folder)).environments == {
        "e1": {"torch": "2.0"},
        "e2": {"torch": "2.1"},
        "e4": {"torch": "2.9"},
    }


def test_an_empty_version_and_odd_texts_in_the_environment_are_kept(folder: Path) -> None:
    environment = {"PYTORCH_ALLOC_CONF": "", "odd \udcff": "a: b # c"}
    apply_updates(folder, [record(environment=environment)], "new")
    figure = stored(folder)[KEY].figures["allocated"]
    assert figure.environment == {"PYTORCH_ALLOC_CONF": "", "odd \\udcff": "a: b # c"}


# Strict reading -------------------------------------------------------------------------------------------------------


def refused(text: str) -> bool:
    """Whether the text is refused, as it must be: with file and line."""
    try:
        parse(text, Path("f"))
    except DamagedFile as error:
        message = str(error)
    else:
        return False
    assert re.match(r"f:\d+: ", message)
    return True


def damaged(text: str) -> str:
    with pytest.raises(DamagedFile) as raised:
        parse(text, Path("b/test_x.yaml"))
    return str(raised.value)


EDITS: list[tuple[str, str, int, str]] = [
    # what stands in the file, what stands there instead, the line of the message, the message
    ("format: 1", "format: 2", 2, "format is '2'; allowed: 1"),
    ("format: 1", "format: true", 2, "format is 'true'; allowed: a whole number, 0 or more"),
    ("format: 1\n", "", 1, "the key 'format' is missing"),
    ("format: 1", "format: 1\nformat: 1", 3, "'format' is there twice; remove one"),
    ("format: 1", "format: 1\nextra: 1", 3, "unknown key 'extra'; allowed: format, environments, tests"),
    ("  e1:", "  one:", 4, "the environment's id 'one' is not one of e1, e2"),
    ("torch: 2.14.1", "torch: 2.14", 6, "torch is '2.14'; allowed: a text, in quotes"),
    ("torch: 2.14.1", "torch: [2]", 6, "torch is a list; allowed: a text"),
    ("recipe_digest: 00d1", "recipe_digest: 17", 9, "recipe_digest is '17'; allowed: a text"),
    ("    recipe_digest: 00d1\n", "", 8, "the key 'recipe_digest' is missing"),
    ("precision: bf16", "precision: 2001-01-01", 15, "precision is '2001-01-01'; allowed: a text, a decimal number"),
    ("lr: 1.0e-05", "lr: .nan", 17, "lr is '.nan'; allowed: a text, a decimal number"),
    ("num_layers: 2", "num_layers: 0x2", 12, "num_layers is '0x2'; allowed: a text, a decimal number"),
    ("num_layers: 2", "num_layers: 2\n        num_layers: 3", 13, "'num_layers' is there twice"),
    (
        "peak: 4516590080",
        "peak: 4516590081",
        20,
        "peak is '4516590081'; allowed: the highest of the ranks' peaks, 4516590080",
    ),
    ("peak: 4516590080", "peak: true", 20, "peak is 'true'; allowed: a whole number, 1 or more"),
    ("peak: 4516590080", "peak: 0", 20, "peak is '0'; allowed: a whole number, 1 or more"),
    ("peak: 4516590080", "peak: -1", 20, "peak is '-1'; allowed: a whole number, 1 or more"),
    ("peak: 4516590080", "peak: .nan", 20, "peak is '.nan'; allowed: a whole number"),
    ("peak: 4516590080", "peak: .inf", 20, "peak is '.inf'; allowed: a whole number"),
    ("peak: 4516590080", "peak: 4516590080.0", 20, "peak is '4516590080.0'; allowed: a whole number"),
    ("peak: 4516590080", "peak: 4_516_590_080", 20, "peak is '4_516_590_080'; allowed: a whole number"),
    ("peak: 4516590080", "peak: '4516590080'", 20, "peak is '4516590080'; allowed: a whole number"),
    ("peak: 4516590080", "peak: 4.21 GiB", 20, "peak is '4.21 GiB'; allowed: a whole number"),
    ("peak: 4516590080", "peak: " + "9" * 5000, 20, "allowed: a whole number"),
    ("peak: 4516590080", "peak:", 20, "peak is ''; allowed: a whole number"),
    ("peak: 4516590080", "peak: [1]", 20, "peak is a list; allowed: a whole number"),
    ("peak: 4516590080", "peak: {a: 1}", 20, "peak is a mapping; allowed: a whole number"),
    ("peak: 4516590080", "peak: !!python/name:os.system 1", 20, "allowed: a whole number"),
    ("rank: 1", "rank: 0", 21, "rank is '0'; allowed: a rank that reached the peak: 1"),
    ("rank: 1", "rank: 7", 21, "rank is '7'; allowed: a rank that reached the peak: 1"),
    ("rank: 1", "rank: -1", 21, "rank is '-1'; allowed: a whole number, 0 or more"),
    ("        rank: 1\n", "", 19, "allocated: the key 'rank' is missing"),
    ("rank: 1", "rank: 1\n        ranck: 1", 22, "unknown key 'ranck'; allowed: peak, rank, phase"),
    ("phase: step-2/backward", "phase: step-9/backward", 22, "phase is 'step-9/backward'; allowed: a phase as in"),
    ("phase: step-2/backward", "phase: 7", 22, "phase is '7'; allowed: a text"),
    ("0: 1048576", "0: -5", 24, "0 is '-5'; allowed: a whole number, 0 or more"),
    ("0: 1048576", "zero: 1048576", 24, "rank 'zero'; allowed: a whole number, 0 or more"),
    ("0: 1048576", "-1: 1048576", 24, "rank '-1'; allowed: a whole number, 0 or more"),
    ("0: 1048576", "1: 1048576", 25, "ranks: '1' is there twice"),
    ("0: 1048576", "? [0]\n          : 1048576", 24, "ranks: a key is a list; allowed: a text"),
    ("first: 4516590080", "first: 5", 26, "first is '5'; allowed: the peak, 4516590080, as long as updates is 0"),
    ("updates: 0", "updates: -1", 27, "updates is '-1'; allowed: a whole number, 0 or more"),
    ("updates: 0", "updates: 1.5", 27, "updates is '1.5'; allowed: a whole number, 0 or more"),
    ("environment: e1", "environment: e2", 28, "environment is 'e2'; allowed: an id under environments: (e1)"),
    ("environment: e1", "environment: 1", 28, "environment is '1'; allowed: a text"),
    ("environment: e1", "environment: {torch: 2}", 28, "torch is '2'; allowed: a text"),
    ("      reserved:", "      allocated:", 29, "'allocated' is there twice"),
    ("      reserved:", "      active:", 29, "'active' is no figure; allowed: allocated or reserved"),
    ("      reserved:", "      reserved@nowhere:", 29, "'reserved@nowhere' is no figure"),
    ('reason: "fp32 main grads: needed"', "reason: 5", 38, "reason is '5'; allowed: a text"),
    ('reason: "fp32 main grads: needed"', "reason: fp32: needed", 38, "not YAML: mapping values are not allowed"),
    ("  test_plain:", "  TestX::test_y[tp2-bf16]:", 40, "'TestX::test_y[tp2-bf16]' is there twice"),
    ("  test_plain:", "\ttest_plain:", 40, "indent with spaces, not with tabs"),
    ("  test_plain:", " test_plain:", 40, "not YAML"),
    ("  test_plain:", "<<<<<<< HEAD\n  test_plain:", 40, "a merge conflict (<<<<<<<); choose one side"),
    ("  test_plain:", "=======\r\n  test_plain:", 40, "a merge conflict (=======); choose one side"),
    ("  test_plain:", ">>>>>>> branch\n  test_plain:", 40, "a merge conflict (>>>>>>>); choose one side"),
    ("  test_plain:", "||||||| base\n  test_plain:", 40, "a merge conflict (|||||||); choose one side"),
    ("  test_plain:", "---\n  test_plain:", 40, "not YAML"),
    ("  test_plain:", "  true:", 40, "a key is 'true'; allowed: a text, in quotes"),
    ("    torch: 2.14.1", "    <<: {torch: a}", 6, "a key is '<<'; allowed: a text, in quotes"),
    ("rounding: 1", "rounding: 2", 51, "the sizes under split add up to 6; allowed: the peak, 5, or no split"),
    ("rounding: 1", "rounding: 0", 57, "rounding is '0'; allowed: a whole number, 1 or more"),
    ("rounding: 1", "rounding: [1]", 57, "rounding is a list; allowed: a whole number, 1 or more"),
    ("rounding: 1", "roundings: 1", 57, "'roundings' is no category; allowed: parameters, gradients, main"),
    ("rounding: 1", "activations: 1", 57, "split: 'activations' is there twice"),
    ("other: 1", "others: 1", 56, "'others' names no part; allowed: 'module @ file (function)', 'other'"),
    ("other: 1", "other: -1", 56, "other is '-1'; allowed: a whole number, 1 or more"),
    ("embedding @", "embedding@", 53, "'embedding@' names no part; allowed: 'module @ file (function)', 'other'"),
    ("[2, 20]", "[2, 0]", 55, "is '0'; allowed: a whole number, 1 or more"),
    ("[2, 20]", "[2]", 55, "is a list; allowed: a list of 2 whole numbers, 1 or more"),
    ("[2, 20]", "2", 55, "is '2'; allowed: a list of 2 whole numbers, 1 or more"),
    ("precision: bf16", "precision: &a bf16\n        x: *a", 15, "an alias ('*name') stands for this value"),
    ("precision: bf16", "precision: &a [*a]", 15, "an alias ('*name') stands for this value"),
    ("precision: bf16", "precision: " + "[" * 30 + "]" * 30, 15, "more than 20 levels"),
]


@pytest.mark.parametrize(("old", "new", "line", "message"), EDITS, ids=lambda value: str(value)[:30])
def test_an_edit_that_makes_no_sense_is_refused_with_file_and_line(
    any_parser: None, old: str, new: str, line: int, message: str
) -> None:
    assert TEXT.count(old) >= 1
    found = damaged(TEXT.replace(old, new, 1))
    assert found.startswith(f"b/test_x.yaml:{line}: ")
    assert message in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty or cut short"),
        ("\n", "the file holds nothing"),
        ("# only a comment\n", "the file holds nothing"),
        ("[]\n", "the file is a list; allowed: a mapping"),
        ("5\n", "the file is '5'; allowed: a mapping"),
        ("format: 1\nenvironments:\ntests: {}\n", "environments is ''; allowed: a mapping"),
        (
            "format: 1\nenvironments: {}\ntests: {a: {recipe_digest: null, metrics: {}}}\n",
            "no figure; allowed: at least one",
        ),
        ("[" * 100_000 + "\n", "not YAML"),
        ('a: "\\UFFFFFFFF"\n', "not YAML"),
        ("%YAML 99999999999999999999.1\n---\na\n", "not YAML"),
        ("a: \0\n", "not YAML"),
    ],
)
def test_what_is_no_baseline_file_is_refused(any_parser: None, text: str, message: str) -> None:
    assert message in damaged(text)


def test_a_file_cut_short_anywhere_never_holds_another_figure() -> None:
    whole = parse(TEXT, Path("f")).entries
    refused = 0
    for end in range(len(TEXT)):
        try:
            rest = parse(TEXT[:end], Path("f")).entries
        except DamagedFile:
            refused += 1
            continue
        for key, entry in rest.items():
            assert (entry.recipe_digest, entry.recipe) == (whole[key].recipe_digest, whole[key].recipe)
            assert entry.figures.items() <= whole[key].figures.items()
    # What remains is the two ends of a figure; the figures behind them are missing, and missing fails.
    assert refused == len(TEXT) - 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.text() | st.text("abt:- \n\t#[]{}&*!|>'\"%@`,?<=0123456789"))
def test_any_text_is_a_baseline_file_or_refused(any_parser: None, text: str) -> None:
    if not refused(text):
        assert parse(dump(parse(text, Path("f"))), Path("f")) == parse(text, Path("f"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(0, len(TEXT)), st.integers(0, 40), st.text(max_size=3) | st.sampled_from(LINES)),
        min_size=1,
        max_size=3,
    )
)
def test_any_mutation_of_a_file_is_a_consistent_file_or_refused(
    any_parser: None, edits: list[tuple[int, int, str]]
) -> None:
    text = TEXT
    for start, length, new in edits:
        text = text[:start] + new + text[start + length :]
    if refused(text):
        return
    file = parse(text, Path("f"))
    for entry in file.entries.values():
        for figure in entry.figures.values():
            assert max(figure.ranks.values()) == figure.ranks[figure.rank] == figure.value > 0
    assert parse(dump(file), Path("f")).entries == file.entries


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_bytes(b"format: 1\nx: \xff\n")
    with pytest.raises(DamagedFile, match=r"f\.yaml:2: not UTF-8"):
        read(path)


def test_windows_line_ends_are_read() -> None:
    assert parse(TEXT.replace("\n", "\r\n"), Path("f")).entries == parse(TEXT, Path("f")).entries


def test_a_missing_file_has_no_entries(folder: Path) -> None:
    assert Baselines(folder, H100.key).get(MODULE, KEY) is None


def test_a_file_is_read_once(folder: Path) -> None:
    apply_updates(folder, [record()], "new")
    store = Baselines(folder, H100.key)
    entry = store.get(MODULE, KEY)
    file_of(folder).unlink()
    assert entry is not None
    assert store.get(MODULE, KEY) is entry


@pytest.mark.parametrize("kind", ["folder", "loop", "dangling link", "file for a folder"])
def test_what_cannot_be_read_is_an_error_and_not_missing(folder: Path, kind: str) -> None:
    path = file_of(folder)
    path.parent.mkdir(parents=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "dangling link":
        path.symlink_to(folder / "gone")
    else:
        path.parent.rmdir()
        path.parent.write_text("")
    with pytest.raises(UserError, match=re.escape(str(path))):
        Baselines(folder, H100.key).get(MODULE, KEY)
    with pytest.raises(UserError, match=re.escape(str(folder))):
        apply_updates(folder, [record()], "all", "why")


# Records --------------------------------------------------------------------------------------------------------------


def test_a_record_keeps_every_ranks_peak_and_the_worst() -> None:
    figure = Record.of(MODULE, KEY, ALLOCATED, measured(5, 9, 7)).figure
    assert (figure.value, figure.rank, figure.phase) == (9, 1, "step-2/backward")
    assert figure.ranks == {0: 5, 1: 9, 2: 7}


def test_a_record_survives_the_way_between_processes() -> None:
    sent = Record.of(MODULE, KEY, RESERVED, measured(5, 9))
    assert Record.from_json(json.loads(json.dumps(sent.to_json()))) == sent


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (measured(5, failure=Failure("out of memory", 0, "")), "failed .out of memory. is no baseline"),
        (measured(0), "a peak allocated of 0 bytes is no baseline"),
        (measured(5, -1), "a peak allocated of -1 bytes is no baseline"),
        (measured(5, recipe={"a": float("nan")}), "the recipe holds nan"),
        (measured(5, recipe={"a": object()}), "the recipe holds <object"),
    ],
)
def test_what_is_no_baseline_makes_no_record(run: Measurement, message: str) -> None:
    with pytest.raises(UserError, match=rf"tests/test_x\.py::.*{message}"):
        Record.of(MODULE, KEY, ALLOCATED, run)


# Pasting --------------------------------------------------------------------------------------------------------------


def put(pasted: Paste) -> None:
    pasted.path.parent.mkdir(parents=True, exist_ok=True)
    if pasted.after_line is None:
        pasted.path.write_text(pasted.text, encoding="utf-8")
        return
    lines = pasted.path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines.insert(pasted.after_line, pasted.text)
    pasted.path.write_text("".join(lines), encoding="utf-8")


def start_empty(folder: Path) -> None: ...


def start_with_another_test(folder: Path) -> None:
    apply_updates(folder, [record(7, "test_other", environment={"torch": "1"})], "new")


def start_with_another_metric(folder: Path) -> None:
    apply_updates(folder, [record(gate=PeakGate(phase="backward"))], "new")


def start_with_braces(folder: Path) -> None:
    file_of(folder).parent.mkdir(parents=True)
    file_of(folder).write_text("format: 1\nenvironments: {}\ntests: {}\n")


def start_edited_by_hand(folder: Path) -> None:
    start_with_another_test(folder)
    lines = file_of(folder).read_text().splitlines()
    tests = lines.index("tests:")
    lines = [*lines[:tests], "tests:", "", "  # mine", *(f"   {line}" for line in lines[tests + 1 :])]
    file_of(folder).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "start", [start_empty, start_with_another_test, start_with_another_metric, start_with_braces, start_edited_by_hand]
)
@pytest.mark.parametrize("key", [KEY, "test_a[: #]", "aaa", "zzz[" + "x" * 1200 + "]", "test[\u00fc\n\t\0]"])
def test_pasted_lines_make_the_test_pass(folder: Path, start: Callable[[Path], None], key: str) -> None:
    start(folder)
    before = dict(stored(folder))
    run = measured(5, 9)
    for gate in (ALLOCATED, RESERVED):
        put(paste(folder, [Record.of(MODULE, key, gate, run)]))
    for gate in (ALLOCATED, RESERVED):
        judgement = judge(gate, run, Baselines(folder, H100.key).get(MODULE, key), key)
        assert (judgement.verdict, judgement.notes) == ("pass", ())
    after = dict(stored(folder))
    for other, entry in before.items():
        assert entry.figures.items() <= after[other].figures.items()
    # The next update gives the environment an id.
    apply_updates(folder, [Record.of(MODULE, key, ALLOCATED, replace(run, environment={"torch": "9"}))], "all")
    assert "environment: e" in file_of(folder).read_text()


def test_several_figures_of_a_test_are_pasted_at_once(folder: Path) -> None:
    run = measured(5, 9)
    put(paste(folder, [Record.of(MODULE, KEY, gate, run) for gate in (RESERVED, ALLOCATED)]))
    assert set(stored(folder)[KEY].figures) == {"allocated", "reserved"}


def test_the_text_to_paste_says_where(folder: Path) -> None:
    path = file_of(folder)
    assert str(paste(folder, [record()])).startswith(f"{path}, as the whole file:\n# Accepted peaks")
    apply_updates(folder, [record(key="test_other")], "new")
    assert str(paste(folder, [record()])).startswith(f"{path}, after line 7:\n  {KEY}:\n    recipe_digest: 00d1\n")


def test_nothing_is_pasted_into_a_damaged_file(folder: Path) -> None:
    apply_updates(folder, [record()], "new")
    file_of(folder).write_text("tests: [\n")
    with pytest.raises(DamagedFile):
        paste(folder, [record()])


# Updating -------------------------------------------------------------------------------------------------------------

BASE = 10_000


@pytest.fixture
def started(folder: Path) -> Path:
    """Baselines of five tests, whose next run is missing, equal, within the band, worse, better and stale."""
    names = ["equal", "within", "worse", "better", "stale"]
    apply_updates(folder, [record(BASE, f"test_{name}") for name in names], "new")
    return folder


def next_run() -> list[Record]:
    return [
        record(BASE, "test_missing"),
        record(BASE, "test_equal"),
        record(BASE - 50, "test_within"),
        record(BASE + 500, "test_worse"),
        record(BASE - 500, "test_better"),
        record(BASE + 900, "test_stale", digest="00d2"),
    ]


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("new", {"missing": "new"}),
        ("changed", {"missing": "new", "worse": "regression", "better": "improvement", "stale": "stale"}),
        (
            "all",
            {"missing": "new", "worse": "regression", "better": "improvement", "stale": "stale", "within": "refreshed"},
        ),
    ],
)
def test_each_mode_accepts_its_kinds_and_touches_nothing_else(started: Path, mode: Any, kinds: dict[str, str]) -> None:
    before = dict(stored(started))
    run = {new.key: new for new in next_run()}
    changes = apply_updates(started, run.values(), mode, "why")
    assert {change.key.removeprefix("test_"): change.kind for change in changes} == kinds
    after = stored(started)
    assert after.keys() == before.keys() | {"test_missing"}
    for key, entry in after.items():
        if key.removeprefix("test_") in kinds:
            assert entry.figures["allocated"].value == run[key].figure.value
        else:
            assert entry == before[key]


def test_changes_name_the_figures_before_and_after(started: Path) -> None:
    (change,) = apply_updates(started, [record(BASE + 500, "test_worse")], "changed", "why")
    assert (change.path, change.metric_id, change.old, change.new) == (file_of(started), "allocated", BASE, BASE + 500)


def test_other_modules_and_metrics_stay(started: Path) -> None:
    apply_updates(started, [record(5, "test_o", "tests/test_other.py"), record(key="test_equal", gate=RESERVED)], "new")
    before = snapshot(started)
    apply_updates(started, [record(BASE + 500, "test_equal")], "changed", "why")
    after = snapshot(started)
    assert [path for path in after if after[path] != before[path]] == [str(file_of(started))]
    assert stored(started)["test_equal"].figures["reserved"].value == 500


@pytest.mark.parametrize("mode", ["new", "changed", "all"])
def test_an_update_without_a_change_touches_no_file(started: Path, mode: Any) -> None:
    path = file_of(started)
    path.write_text(path.read_text() + "# a note of mine\n")
    before = snapshot(started)
    assert apply_updates(started, [record(BASE, "test_equal")], mode, "why") == []
    assert snapshot(started) == before


def test_an_update_without_records_makes_no_folder(folder: Path) -> None:
    assert apply_updates(folder, [], "all", "why") == []
    assert not folder.exists()


def test_a_stale_entry_loses_figures_of_the_old_recipe_that_were_not_measured(folder: Path) -> None:
    apply_updates(folder, [record(), record(gate=RESERVED), record(gate=PeakGate(phase="backward"))], "new")
    new = [record(9, digest="00d2", recipe={"a": 1}), record(digest="00d2", recipe={"a": 1}, gate=RESERVED)]
    changes = apply_updates(folder, new, "changed")
    assert [(change.metric_id, change.kind) for change in changes] == [("allocated", "stale"), ("reserved", "stale")]
    entry = stored(folder)[KEY]
    assert (entry.recipe_digest, entry.recipe, set(entry.figures)) == ("00d2", {"a": 1}, {"allocated", "reserved"})


def test_new_leaves_a_stale_entry_alone_even_where_it_lacks_a_figure(folder: Path) -> None:
    apply_updates(folder, [record()], "new")
    assert apply_updates(folder, [record(digest="00d2", gate=RESERVED)], "new") == []


# Reasons and drift ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["changed", "all"])
def test_a_higher_peak_needs_a_reason_and_without_one_nothing_is_written(started: Path, mode: Any) -> None:
    before = snapshot(started)
    others = [record(5, "test_o", f"tests/test_{name}.py") for name in "az"]
    with pytest.raises(UserError, match=r"test_x\.yaml: test_worse: allocated: .* rise from .* give --mbmem-reason"):
        apply_updates(started, [*others, *next_run()], mode, "  ")
    assert snapshot(started) == before


def test_even_a_rise_within_the_band_needs_a_reason(started: Path) -> None:
    with pytest.raises(UserError, match="give --mbmem-reason"):
        apply_updates(started, [record(BASE + 1, "test_within")], "all")
    assert apply_updates(started, [record(BASE + 1, "test_within")], "changed") == []


def test_less_memory_and_a_new_recipe_need_none(started: Path) -> None:
    apply_updates(started, [new for new in next_run() if new.key != "test_worse"], "all")
    assert stored(started)["test_better"].figures["allocated"].value == BASE - 500


def test_the_reason_is_kept_until_the_figure_changes(started: Path) -> None:
    apply_updates(started, [record(BASE + 500, "test_worse")], "changed", "bigger:\n  a # b\t\u00fc")
    figure = stored(started)["test_worse"].figures["allocated"]
    assert figure.reason == "bigger: a # b \u00fc"
    apply_updates(started, [record(BASE + 500, "test_worse", environment={"torch": "3"})], "all", "other")
    assert stored(started)["test_worse"].figures["allocated"].reason == figure.reason
    apply_updates(started, [record(BASE, "test_worse")], "all")
    assert stored(started)["test_worse"].figures["allocated"].reason is None


def test_ten_refreshes_keep_the_first_figure_and_show_the_drift(folder: Path) -> None:
    peak = 10**9
    apply_updates(folder, [record(peak)], "new")
    for _ in range(10):
        peak += peak * 3 // 100
        apply_updates(folder, [record(peak)], "changed", "a little more")
    entry = stored(folder)[KEY]
    assert (entry.figures["allocated"].first, entry.figures["allocated"].updates) == (10**9, 10)
    assert "drift: +34.39%" in "".join(judge(ALLOCATED, measured(peak), entry, KEY).notes)


def test_a_new_recipe_starts_a_new_record(started: Path) -> None:
    apply_updates(started, [record(BASE + 500, "test_stale")], "changed", "why")
    apply_updates(started, next_run(), "changed", "why")
    figure = stored(started)["test_stale"].figures["allocated"]
    assert (figure.first, figure.updates) == (BASE + 900, 0)


def test_a_newer_environment_alone_is_no_update_of_the_peak(started: Path) -> None:
    (change,) = apply_updates(started, [record(BASE, "test_equal", environment={"torch": "3"})], "all")
    figure = stored(started)["test_equal"].figures["allocated"]
    assert (change.kind, figure.updates, figure.environment) == ("refreshed", 0, {"torch": "3"})


# What the peak is made of ---------------------------------------------------------------------------------------------


def split_run(*sizes: int, line: str = "layers.py:7 (forward)", told: bool = True, **rest: Any) -> Record:
    """Of one rank whose peak is held by as many modules as there are sizes, of which the allocator told or not."""
    run = measured(sum(sizes), **rest)
    owners = tuple(Owner("activations", f"mlp{'x' * n}", line) for n in range(len(sizes)))
    rank = replace(run.ranks[0], composition=Composition(owners, (sizes,)) if told else None)
    return Record.of(MODULE, KEY, ALLOCATED, replace(run, ranks=(rank,)))


def stored_split(folder: Path) -> list[tuple[str, int]] | None:
    split = stored(folder)[KEY].figures["allocated"].split
    return None if split is None else [(part.module, part.size) for part in split]


def test_a_figure_keeps_what_its_peak_is_made_of_and_so_does_its_way_between_processes(folder: Path) -> None:
    sent = split_run(600, 398, 2)
    assert Record.from_json(json.loads(json.dumps(sent.to_json()))) == sent
    apply_updates(folder, [sent], "new")
    assert stored(folder)[KEY].figures["allocated"] == sent.figure
    assert stored_split(folder) == [("", 2), ("mlp", 600), ("mlpx", 398)]


def test_a_split_is_written_with_its_figure_and_never_alone_by_new_and_changed(folder: Path) -> None:
    apply_updates(folder, [split_run(600, 400)], "new")
    before = snapshot(folder)
    for mode in ("new", "changed"):
        assert apply_updates(folder, [split_run(500, 500)], mode, "why") == []
    assert snapshot(folder) == before
    (change,) = apply_updates(folder, [split_run(900, 500)], "changed", "why")
    assert (change.kind, stored_split(folder)) == ("regression", [("mlp", 900), ("mlpx", 500)])


def test_all_adds_a_split_to_a_figure_that_lacks_one_and_the_peak_counts_as_unchanged(folder: Path) -> None:
    apply_updates(folder, [split_run(1000, told=False)], "new")
    assert stored_split(folder) is None
    assert apply_updates(folder, [split_run(600, 400)], "changed", "why") == []
    (change,) = apply_updates(folder, [split_run(600, 400)], "all")
    assert (change.kind, change.old, change.new) == ("refreshed", 1000, 1000)
    assert stored_split(folder) == [("mlp", 600), ("mlpx", 400)]
    assert stored(folder)[KEY].figures["allocated"].updates == 0
    assert apply_updates(folder, [split_run(600, 400)], "all") == []


def test_a_split_goes_with_its_peak_but_stays_while_nothing_tells_a_newer_one(folder: Path) -> None:
    apply_updates(folder, [split_run(600, 400)], "new")
    assert apply_updates(folder, [split_run(1000, told=False)], "all") == []
    apply_updates(folder, [split_run(990, told=False)], "all")
    assert stored_split(folder) is None


def test_another_line_of_the_same_code_is_no_change(folder: Path) -> None:
    apply_updates(folder, [split_run(600, 400)], "new")
    assert apply_updates(folder, [split_run(600, 400, line="layers.py:99 (forward)")], "all") == []


def test_lines_to_paste_have_no_split(folder: Path) -> None:
    pasted = paste(folder, [split_run(600, 400)])
    assert "split" not in pasted.text
    put(pasted)
    assert stored_split(folder) is None


# Several runs of one test ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_runs_the_highest_peak_counts_whatever_the_order(folder: Path, order: int) -> None:
    apply_updates(folder, [record(n) for n in (5, 9, 7)][::order], "new")
    assert stored(folder)[KEY].figures["allocated"].value == 9


def test_two_recipes_under_one_key_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="two different recipes were measured under this one key"):
        apply_updates(folder, [record(5), record(5, digest="00d2")], "all", "why")
    assert not folder.exists()


# Damaged files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["new", "changed"])
def test_a_damaged_file_is_refused_by_name_and_line_and_nothing_is_written(started: Path, mode: Any) -> None:
    file_of(started).write_text(TEXT.replace("rank: 1", "rank: 7"))
    before = snapshot(started)
    with pytest.raises(UserError, match=r"test_x\.yaml:21: rank is '7'.*\n.*--mbmem-update=" + mode):
        apply_updates(started, [record(5, "test_o", "tests/test_a.py"), record()], mode, "why")
    assert snapshot(started) == before


def test_all_replaces_a_damaged_file_and_reports_it(started: Path) -> None:
    file_of(started).write_text("<<<<<<< HEAD\n")
    with pytest.raises(UserError, match=r"the file is damaged.*give --mbmem-reason"):
        apply_updates(started, [record()], "all")
    assert file_of(started).read_text() == "<<<<<<< HEAD\n"
    (change,) = apply_updates(started, [record()], "all", "merged")
    assert (change.kind, change.old, change.new) == ("damaged file replaced", None, 1000)
    assert stored(started).keys() == {KEY}


# The disk -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fsync", "fchmod"])
def test_a_disk_that_fails_leaves_every_file_as_it_was(
    started: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_updates(started, [record(BASE, "test_o", "tests/test_a.py")], "new")
    before = snapshot(started)
    calls = []

    def fails_the_second_time(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, failing, fails_the_second_time)
    new = [record(BASE - 900, "test_o", "tests/test_a.py"), record(BASE - 900, "test_equal")]
    with pytest.raises(UserError, match=r"test_x\.yaml: cannot be written.*No space left"):
        apply_updates(started, new, "changed", "why")
    assert snapshot(started) == before


def test_a_link_is_not_replaced(started: Path, tmp_path: Path) -> None:
    path = file_of(started)
    target = path.rename(tmp_path / "elsewhere.yaml")
    path.symlink_to(target)
    with pytest.raises(UserError, match="is a symbolic link"):
        apply_updates(started, next_run(), "new", "why")
    assert path.is_symlink()


def test_a_files_mode_is_kept(started: Path) -> None:
    file_of(started).chmod(0o640)
    apply_updates(started, next_run(), "new")
    assert file_of(started).stat().st_mode & 0o777 == 0o640


def test_only_baseline_files_are_left_and_strays_of_a_killed_update_go(started: Path) -> None:
    stray = file_of(started).with_name(".test_x.yaml.1.tmp")
    stray.write_text("half")
    apply_updates(started, next_run(), "new")
    assert [path for path in started.rglob("*") if path.is_file()] == [file_of(started)]


WRITER = """
import sys
from pathlib import Path
from pytest_mbmem.baselines import Record, apply_updates
import json
folder, records = Path(sys.argv[1]), [[Record.from_json(r) for r in run] for run in json.loads(sys.argv[2])]
print("ready", flush=True)
for n in range(int(sys.argv[3])):
    apply_updates(folder, records[n % len(records)], "all", "why")
"""


def start_writer(folder: Path, runs: list[list[Record]], times: int) -> subprocess.Popen[str]:
    data = json.dumps([[one.to_json() for one in run] for run in runs])
    command = [sys.executable, "-c", WRITER, str(folder), data, str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(folder: Path) -> None:
    runs = [[record(peak, f"test_{n}") for n in range(20)] for peak in (1000, 2000)]
    apply_updates(folder, runs[0], "new")
    chance = random.Random(0)
    for _ in range(6):
        with start_writer(folder, runs, 10**6) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
        peaks = {entry.figures["allocated"].value for entry in stored(folder).values()}
        assert len(stored(folder)) == 20
        assert peaks in ({1000}, {2000})
    apply_updates(folder, [record(3000, "test_0")], "all", "why")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["test_x.yaml"]


KILLED_AT_EVERY_LINE = """
import json, os, signal, sys
from pathlib import Path
from pytest_mbmem.baseline_file import read
from pytest_mbmem.baselines import Record, apply_updates
folder, path, records = Path(sys.argv[1]), Path(sys.argv[2]), [Record.from_json(r) for r in json.loads(sys.argv[3])]
old = path.read_bytes()

def kill_at(line):  # counted from where files begin to be written
    writing = False
    def trace(frame, event, argument):
        nonlocal line, writing
        writing = writing or frame.f_code.co_name == "_replace_all"
        code = frame.f_code
        line -= writing and event == "line"
        if line < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        # Of the standard library only what can write: looking for strays takes many lines.
        return trace if "baselines" in code.co_filename or "write" in code.co_name else None
    return trace

line, status = 0, signal.SIGKILL
while status == signal.SIGKILL:
    child = os.fork()
    if child == 0:
        sys.settrace(kill_at(line))
        apply_updates(folder, records, "all", "why")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(sorted({entry.figures["allocated"].value for entry in read(path).entries.values()}))
    path.write_bytes(old)
    line += 1
"""


def test_a_kill_at_any_line_leaves_the_old_file_or_the_new_one(folder: Path) -> None:
    apply_updates(folder, [record(1000, f"test_{n}") for n in range(5)], "new")
    new = json.dumps([record(2000, f"test_{n}").to_json() for n in range(5)])
    command = [sys.executable, "-c", KILLED_AT_EVERY_LINE, str(folder), str(file_of(folder)), new]
    peaks = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    changed = peaks.index("[2000]")
    assert changed > 10
    assert peaks == ["[1000]"] * changed + ["[2000]"] * (len(peaks) - changed)


def test_sessions_that_update_at_once_lose_nothing(folder: Path) -> None:
    writers = [start_writer(folder, [[record(key=f"test_{w}_{n}")] for n in range(6)], 6) for w in range(4)]
    assert [writer.wait(timeout=60) for writer in writers] == [0] * 4
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.close()
    assert len(stored(folder)) == 24


def test_a_session_that_holds_the_folder_too_long_is_named(started: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "LOCK_TIMEOUT", 0.0)
    with baselines._lock(started), pytest.raises(UserError, match="another pytest has been updating"):
        apply_updates(started, next_run(), "new")


# Orphans --------------------------------------------------------------------------------------------------------------


def test_entries_without_a_test_are_orphans(started: Path) -> None:
    apply_updates(
        started, [record(key="test_gone"), record(key="test_equal@control"), record(key="test_gone@control")], "new"
    )
    apply_updates(started, [record(module="tests/test_removed.py")], "new")
    seen = {
        MODULE: {f"test_{name}" for name in ("equal", "within", "worse", "better", "stale")},
        "../test_z.py": {"test"},
    }
    found = orphans(started, H100.key, seen)
    assert [(orphan.path.name, orphan.key) for orphan in found] == [
        ("test_removed.yaml", KEY),
        ("test_x.yaml", "test_gone"),
        ("test_x.yaml", "test_gone@control"),
    ]
    assert found[1].path.read_text().splitlines()[found[1].line - 1] == "  test_gone:"


def test_without_baselines_there_are_no_orphans(folder: Path) -> None:
    assert orphans(folder, H100.key, {MODULE: {"test"}}) == []


def test_another_devices_entries_are_no_orphans(started: Path) -> None:
    assert orphans(started, "virtual-a100-80gb", {}) == []
