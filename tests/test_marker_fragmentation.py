"""The `fragmentation` marker: what it judges, verdicts that a user sees, reports, and mistakes.

With the made-up launcher every rank reserves twice its peak (see fake_launcher.py).
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.cli import main
from pytest_mbmem.errors import UserError
from pytest_mbmem.fragmentation import FragmentationJudgement, FragmentationRule, judge
from pytest_mbmem.measurement import Device, Failure, Measurement, PhaseFigures, RankMeasurement

MIB, GIB = 2**20, 2**30
CAPACITY = 80 * GIB


def rule(limit: Any, **kwargs: Any) -> FragmentationRule:
    return FragmentationRule.from_marker((limit,), kwargs, CAPACITY, "t")


def measured(*ranks: tuple[int, int], more: tuple[int, int] = (0, 0), **fields: Any) -> Measurement:
    """Of ranks with these peaks allocated and reserved in backward, and `more` in the optimizer's step."""

    def phase(name: str, allocated: int, reserved: int) -> PhaseFigures:
        return PhaseFigures(1, name, {"allocated": allocated, "reserved": reserved}, {})

    found = [
        RankMeasurement(number, {}, 1, (phase("backward", *peaks), phase("optimizer", *more)))
        for number, peaks in enumerate(ranks)
    ]
    return Measurement(Device("virtual-x", "X", CAPACITY, True), tuple(found), **fields)


@given(st.integers(0, 2**40), st.integers(1, 2**40), st.integers(1, 9999))
def test_a_fraction_is_exact_at_any_size(allocated: int, unused: int, hundredths: int) -> None:
    reserved = allocated + unused
    judgement = judge(rule(f"{hundredths / 100}%"), measured((allocated, reserved)))
    assert judgement.passed == (Fraction(unused, reserved) <= Fraction(hundredths, 10000))
    assert judgement.unused == unused
    assert FragmentationJudgement.from_json(json.loads(json.dumps(judgement.to_json())), "t") == judgement


@given(st.integers(0, 2**40), st.integers(0, 2**34), st.integers(2 * MIB, 2**34))
def test_a_size_is_exact(allocated: int, unused: int, limit: int) -> None:
    judgement = judge(rule(limit), measured((allocated + 1, allocated + 1 + unused)))
    assert judgement.passed == (unused <= limit)


def test_the_rank_that_is_worst_by_the_bound_is_judged() -> None:
    ranks = measured((90 * MIB, 100 * MIB), (800 * MIB, 1000 * MIB), (60 * MIB, 100 * MIB))
    assert judge(rule("50%"), ranks).rank == 2
    assert judge(rule(300 * MIB), ranks).rank == 1
    assert judge(rule("50%"), measured((90, 100), (90, 100))).rank == 0


def test_a_phase_is_judged_by_its_own_peaks() -> None:
    both = measured((95, 100), more=(20, 100))
    assert judge(rule("10%"), both).verdict == "pass"
    assert judge(rule("10%", phase="backward"), both).fraction == 0.05
    optimizer = judge(rule("10%", phase="optimizer"), both)
    assert (optimizer.verdict, optimizer.fraction, optimizer.phase) == ("fragmented", 0.8, "step-1/optimizer")
    with pytest.raises(UserError, match="phase='forward' selects nothing that rank 0 went through"):
        judge(rule("10%", phase="forward"), both)


@pytest.mark.parametrize("kind", ["out of memory", "refused", "no effect"])
def test_what_failed_keeps_its_verdict(kind: Any) -> None:
    judgement = judge(rule("10%"), measured((1, 2), failure=Failure(kind, 0, "why", 1, "forward")))
    assert (judgement.verdict, judgement.rank, judgement.phase) == (kind, 0, "step-1/forward")


def test_nothing_measured_is_invalid() -> None:
    assert judge(rule("10%"), measured()).verdict == "invalid"
    assert judge(rule("10%"), measured((0, 0))).verdict == "invalid"
    assert judge(rule("10%"), measured((1, 2), failure=Failure("died", 0, "why"))).verdict == "invalid"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", 'fragmentation() needs a limit, as in fragmentation(limit="10%")'),
        ("'100%'", "fragmentation(limit=...): '100%' can never fail; write less than 100%"),
        (
            "'80 GiB'",
            "fragmentation(limit=...): '80 GiB' can never fail; write less than the GPU's capacity of 79.11 GiB",
        ),
        ("'0%'", "fragmentation(limit=...): '0%' cannot be kept: PyTorch reserves whole segments, of 2 MiB and more"),
        ("0", "fragmentation(limit=...): 0 cannot be kept: *"),
        ("2 * 2**20 - 1", "fragmentation(limit=...): 2097151 cannot be kept: *"),
        ("0.0", "fragmentation(limit=...): 0.0 cannot be kept: *"),
        ("'120%'", "fragmentation(limit=...): '120%' is not a fraction; *"),
        ("'ten'", "fragmentation(limit=...): 'ten' is neither a percentage (as in '10%') nor a size (as in '4 GiB')"),
        ("'10%', phase='lunch'", "fragmentation() takes *"),
        ("limit='10%', phase='lunch'", "fragmentation(): phase='lunch' is not one of build, *"),
        ("limits='10%'", "fragmentation() has no argument 'limits'; did you mean 'limit'? allowed: limit, phase"),
    ],
)
def test_mistakes_are_errors_of_the_module(project: pytest.Pytester, arguments: str, message: str) -> None:
    if "takes" in message:
        arguments = "'10%', 'backward'"
    project.makepyfile(
        f"""
        import pytest

        @pytest.mark.fragmentation({arguments})
        def test_it(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_it.py::test_it: {message}"])


TESTS = """
    import pytest

    @pytest.mark.fragmentation(limit="51%")
    @pytest.mark.fragmentation("60 MiB", phase="backward")
    def test_it(mbmem):
        mbmem.measure("recipe.yaml", name="a")
"""


def test_a_failure_has_the_arithmetic_and_the_remedies(project: pytest.Pytester) -> None:
    project.makepyfile(TESTS)
    result = project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "FRAGMENTED: fragmentation in backward of 'a' is 50.00%, 60.00 MiB are allowed",
            "",
            "  reserved     128.00 MiB (134217728 bytes)",
            "  allocated     64.00 MiB (67108864 bytes)",
            "  unused        64.00 MiB (67108864 bytes)",
            "  allowed       60.00 MiB (62914560 bytes)",
            "  worst rank  0",
            "  phase       step-2/backward",
            "  device      virtual-h100-80gb, capacity 79.11 GiB",
            "",
            "What gives unused memory back, the documents' remedy first:",
            '  - memory.alloc_conf "expandable_segments:True" lets free pieces join',
            "*st_it@a fragmentation@backward * <= 60.00 MiB * 64.00 MiB * fragmented",
            "*test_it@a fragmentation * <= 51.00% * 50.00% * pass",
            "note: *::test_it@a: fragmentation 50.00% on rank 0: 64.00 MiB of 128.00 MiB reserved hold no tensor, *",
        ]
    )


def test_reports_have_the_verdict(project: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> None:
    project.makepyfile(TESTS)
    project.runpytest("--mbmem-json=r.json", "--mbmem-html=r.html", "--junitxml=r.xml").assert_outcomes(failed=1)
    (one,) = json.loads(Path("r.json").read_text())["tests"][0]["measurements"]
    verdicts = {
        j["rule"]["phase"]: (j["verdict"], j["passed"], j["unused"], j["fraction"]) for j in one["fragmentations"]
    }
    assert verdicts == {None: ("pass", True, 64 * MIB, 0.5), "backward": ("fragmented", False, 64 * MIB, 0.5)}
    properties = {p.get("name"): p.get("value") for p in ElementTree.parse("r.xml").iter("property")}
    assert properties["mbmem_fragmentation_verdict[a]"] == "pass"
    assert properties["mbmem_fragmentation[a]"] == "0.5"
    assert properties["mbmem_fragmentation_verdict@backward[a]"] == "fragmented"
    assert properties["mbmem_fragmentation_bytes@backward[a]"] == str(64 * MIB)
    assert "64.00 MiB of 128.00 MiB reserved hold no tensor" in Path("r.html").read_text()
    capsys.readouterr()
    assert main(["report", "r.json"]) == 0
    assert "fragmentation@backward" in capsys.readouterr().out


FRAGMENTING = """
    import pytest

    @pytest.mark.fragmentation(limit="{limit}")
    def test_it():
        import torch

        held = [torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del held[::2]
        torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda")
"""


def test_pytorchs_own_allocator_is_judged(real_project: pytest.Pytester) -> None:
    # Four holes of 30 MiB stay reserved beside a new segment of 60: of 300 MiB, at most 240 were alive.
    real_project.makepyfile(FRAGMENTING.format(limit="19.9%"))
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FRAGMENTED: fragmentation is 20.00%, 19.90% are allowed"])
    real_project.makepyfile(FRAGMENTING.format(limit="20%"))
    real_project.runpytest().assert_outcomes(passed=1)
