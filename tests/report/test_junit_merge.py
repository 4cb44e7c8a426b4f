"""JUnit files of ranks, shards and reruns as one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junit_shape import checked, properties

from pytest_mbmem.errors import UserError
from pytest_mbmem.report.junit_merge import merge
from pytest_mbmem.report.junit_xml import text

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)

TAGS = {"failed": "failure", "error": "error", "skipped": "skipped"}

Case = tuple[str, str, str, str]
"""Class name and name, outcome, the device ("" if the case does not say it), and what the failure says."""


def a_case(name: str, outcome: str, said: str = "", device: str = "") -> Case:
    return f"tests.{name}", outcome, device, said


def junit(cases: Sequence[Case], begins: int | None = 0, seconds: int = 10, suite: str = "pytest") -> str:
    """A file like pytest's, of a run that begins so many seconds after noon."""
    when = "" if begins is None else f' timestamp="{(NOON + timedelta(seconds=begins)).isoformat()}"'
    lines = [f'<testsuites name="pytest tests"><testsuite name="{suite}" time="{seconds}"{when} tests="0">']
    for name, outcome, device, said in cases:
        classname, _, short = name.partition(".")
        figures = f'<properties><property name="mbmem_device" value="{device}"/></properties>' if device else ""
        tag = TAGS.get(outcome)
        result = f"<{tag} message={quoteattr(said or outcome)}>{said}</{tag}>" if tag else ""
        lines.append(f'<testcase classname="{classname}" name="{short}" time="1.5">{figures}{result}</testcase>')
    return "".join([*lines, "</testsuite></testsuites>"])


def merged(*files: str, same_run: bool = False) -> str:
    with TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.xml") for number in range(len(files))]
        for path, file in zip(paths, files, strict=True):
            path.write_text(file, encoding="utf-8")
        return text(merge(paths, same_run=same_run))


def outcomes(file: str) -> dict[str, str]:
    """By class name and name, with the device behind those that have one."""
    found = {}
    for case in checked(file).iter("testcase"):
        device = properties(case).get("mbmem_device")
        name = f"{case.get('classname')}.{case.get('name')}" + (f" {device}" if device else "")
        assert name not in found
        found[name] = next((o for o, tag in TAGS.items() if case.find(tag) is not None), "passed")
    return found


def only(file: str) -> ElementTree.Element:
    (case,) = checked(file).iter("testcase")
    return case


def test_shards_are_put_together() -> None:
    file = merged(junit([a_case("b", "passed")]), junit([a_case("a", "failed", "no")], begins=3))
    assert outcomes(file) == {"tests.a": "failed", "tests.b": "passed"}
    (suite,) = checked(file)
    assert (suite.get("name"), suite.get("timestamp"), suite.get("time")) == (
        "pytest",
        "2026-01-31T12:00:00+00:00",
        "3.0",
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_runs_the_last_one_counts_and_the_first_is_noted(swapped: bool) -> None:
    files = [junit([a_case("a", "failed", "out of luck")]), junit([a_case("a", "passed")], begins=60)]
    case = only(merged(*reversed(files)) if swapped else merged(*files))
    assert case.find("failure") is None
    (flaky,) = case.iterfind("flakyFailure")
    assert (flaky.get("message"), flaky.findtext("stackTrace")) == ("out of luck", "out of luck")
    noted = [p.get("value") for p in case.iterfind("properties/property") if p.get("name") == "mbmem_result"]
    assert noted == ["2026-01-31T12:00:00+00:00 failed", "2026-01-31T12:01:00+00:00 passed"]


def test_a_case_that_fails_in_the_last_run_is_no_flaky_one() -> None:
    case = only(merged(junit([a_case("a", "error", "first")]), junit([a_case("a", "failed", "second")], begins=60)))
    assert [failure.get("message") for failure in case.iterfind("failure")] == ["second"]
    assert [failure.get("message") for failure in case.iterfind("rerunError")] == ["first"]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("apart", [0, 4])
def test_a_case_that_fails_on_a_rank_stays_failed_though_another_passed(swapped: bool, apart: int) -> None:
    files = [junit([a_case("a", "failed", "rank 0")]), junit([a_case("a", "passed")], begins=apart)]
    assert outcomes(merged(*reversed(files)) if swapped else merged(*files)) == {"tests.a": "failed"}


def test_files_can_be_said_to_be_of_one_run() -> None:
    files = [junit([a_case("a", "failed", "rank 0")], begins=None), junit([a_case("a", "passed")], begins=None)]
    assert outcomes(merged(*files)) == {"tests.a": "passed"}
    assert outcomes(merged(*files, same_run=True)) == {"tests.a": "failed"}


def test_files_without_times_come_in_their_order() -> None:
    first, second = junit([a_case("a", "passed")], begins=None), junit([a_case("a", "failed", "no")], begins=None)
    assert outcomes(merged(first, second)) == {"tests.a": "failed"}
    assert outcomes(merged(second, first)) == {"tests.a": "passed"}


def test_cases_of_different_devices_are_different() -> None:
    case = "a", "passed", ""
    file = merged(junit([a_case(*case, "virtual-x")]), junit([a_case("a", "failed", "no", "real-x")], begins=60))
    assert outcomes(file) == {"tests.a real-x": "failed", "tests.a virtual-x": "passed"}


def test_a_case_without_a_device_is_that_of_the_only_one() -> None:
    file = merged(junit([a_case("a", "error", "no setup")]), junit([a_case("a", "passed", "", "virtual-x")], begins=60))
    assert outcomes(file) == {"tests.a virtual-x": "passed"}


def test_a_case_that_is_twice_in_a_file_comes_once() -> None:
    """As pytest writes one that failed, and whose teardown failed as well."""
    case = only(merged(junit([a_case("a", "failed", "call"), a_case("a", "error", "teardown")], begins=None)))
    assert case.find("error") is not None
    assert case.find("rerunFailure") is not None


def test_suites_inside_suites_and_a_suite_as_root_are_read() -> None:
    inner = '<testsuite name="in"><testcase name="a" classname="c" time="0"/></testsuite>'
    nested = f'<testsuite name="out">{inner}<testcase name="b" classname="c" time="0"/></testsuite>'
    assert outcomes(merged(nested)) == {"c.a": "passed", "c.b": "passed"}


def test_what_a_suite_says_is_kept() -> None:
    one = '<testsuite name="s" hostname="h1"><properties><property name="p" value="1"/></properties></testsuite>'
    (suite,) = checked(merged(one, one.replace("h1", "h2")))
    assert properties(suite) == {"p": "1"}
    assert suite.get("hostname") == "h1, h2"


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><testsuites><testsuite name="&b;"/></testsuites>'
OUTSIDE = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><testsuites><testsuite name="&a;"/></testsuites>'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", "cannot be read as XML (no element found", id="empty"),
        pytest.param(b"<testsuites>", "cannot be read as XML (no element found", id="cut"),
        pytest.param(b"\xff\xfe\x00", "cannot be read as XML", id="binary"),
        pytest.param(b"<?xml version='1.0' encoding='no-such'?><testsuites/>", "cannot be read as XML", id="encoding"),
        pytest.param(b"{}", "cannot be read as XML", id="json"),
        pytest.param(b"<html/>", "not a JUnit file: its first element is neither", id="html"),
        pytest.param(BOMB.encode(), "has a document type", id="bomb"),
        pytest.param(OUTSIDE.encode(), "has a document type", id="outside"),
        pytest.param(BOMB.encode("utf-16"), "has a document type", id="bomb-utf-16"),
        pytest.param(b"<testsuite>" * 90 + b"</testsuite>" * 90, "more than 50 deep", id="deep"),
        pytest.param(b"<testsuite><testcase/></testsuite>", "a testcase of class None has no name", id="nameless"),
        pytest.param(
            b"<testsuite><testcase name='a' time='soon'/></testsuite>", "the time of testcase 'a' is not", id="time"
        ),
        pytest.param(b"<testsuite name='s' timestamp='2026-01-31' time='nan'/>", None, id="no-case"),
        pytest.param(
            b"<testsuite name='s' timestamp='2026-01-31' time='nan'><testcase name='a'/></testsuite>",
            "the time of suite 's' is not a number",
            id="suite-time",
        ),
        pytest.param(
            b"<testsuite><testcase name='a'><properties><property name='mbmem_run' value='now'/></properties>"
            b"</testcase></testsuite>",
            "property mbmem_run: 'now' is not two times",
            id="run",
        ),
    ],
)
def test_what_is_no_junit_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str | None) -> None:
    path = tmp_path / "x.xml"
    path.write_bytes(content)
    if message is None:
        merge([path])
        return
    with pytest.raises(UserError) as error:
        merge([path])
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.xml: cannot be read \(No such file or directory\)"):
        merge([tmp_path / "none.xml"])


CASES = st.lists(
    st.tuples(
        st.sampled_from(["t.a", "t.b", "u.a"]),
        st.sampled_from(["passed", "skipped", "failed", "error"]),
        st.sampled_from(["", "virtual-x", "real-x"]),
        st.sampled_from(["", "one", "two"]),
    ),
    max_size=4,
)
FILES = st.lists(
    st.builds(
        junit, CASES, st.integers(0, 30), st.integers(0, 20), st.sampled_from(["pytest", "pytest", "pytest-mbmem"])
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=30)
@given(FILES, st.randoms(use_true_random=False))
def test_merging_is_the_same_in_any_order_and_again(files: list[str], order: random.Random) -> None:
    file = merged(*files)
    assert merged(file) == file
    shuffled = list(files)
    order.shuffle(shuffled)
    assert merged(*shuffled) == file


@settings(max_examples=30)
@given(FILES)
def test_no_case_is_lost_and_none_comes_twice(files: list[str]) -> None:
    def names(file: str) -> list[tuple[str | None, ...]]:
        return [
            (suite.get("name"), case.get("classname"), case.get("name"))
            for suite in ElementTree.fromstring(file)
            for case in suite.iter("testcase")
        ]

    file = merged(*files)
    checked(file)
    assert set(names(file)) == {name for one in files for name in names(one)}
    by_device = [
        (suite.get("name"), case.get("classname"), case.get("name"), properties(case).get("mbmem_device"))
        for suite in checked(file)
        for case in suite
        if case.tag == "testcase"
    ]
    assert len(set(by_device)) == len(by_device)


@settings(max_examples=30)
@given(FILES, st.data())
def test_a_file_that_is_in_it_already_changes_nothing(files: list[str], data: st.DataObject) -> None:
    file = merged(*files)
    assert merged(file, data.draw(st.sampled_from(files))) == file
