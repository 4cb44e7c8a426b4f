"""Figures as OpenMetrics text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report.gitlab import metrics
from pytest_mbmem.report.results import Measured, Results

MIB, GIB = 2**20, 2**30
Make = Callable[..., Measured]
MakeResults = Callable[..., Results]

# The exposition format's own grammar: https://prometheus.io/docs/specs/om/open_metrics_spec/#abnf
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="((?:[^"\\\n]|\\["n\\])*)"'
_SAMPLE = re.compile(rf"([a-z_]+)\{{{_LABEL},{_LABEL},{_LABEL}\}} (-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)")


def samples(text: str) -> Iterator[tuple[str, str, str, str, str]]:
    """Family, test, device, metric and value of each sample; nothing but samples, their families' heads and the end."""
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""]
    for line in lines[:-2]:
        if re.fullmatch(r"# (TYPE \w+ gauge|UNIT \w+ [a-z]+|HELP \w+ .+\.)", line):
            continue
        found = _SAMPLE.fullmatch(line)
        assert found is not None, line
        family, *labels, value = found.groups()
        plain = [re.sub(r'\\(["n\\])', lambda escape: {"n": "\n"}.get(escape[1], escape[1]), label) for label in labels]
        yield family, plain[0], plain[1], plain[2], value


def test_each_figure_is_a_line(measured: Make, results: MakeResults) -> None:
    one = measured(GIB, 2 * GIB, gate=PeakGate(phase="build"), baseline=GIB)
    twin = measured(3 * GIB, name="twin")
    assert list(samples(metrics(results({"t.py::test_a": [one, twin]})))) == [
        ("mbmem_peak_bytes", "t.py::test_a", "virtual-h100-80gb", "allocated", str(2 * GIB)),
        ("mbmem_peak_bytes", "t.py::test_a", "virtual-h100-80gb", "reserved", str(2 * GIB + 2 * MIB)),
        ("mbmem_peak_bytes", "t.py::test_a", "virtual-h100-80gb", "allocated@build", str(MIB)),
        ("mbmem_peak_bytes", "t.py::test_a@twin", "virtual-h100-80gb", "allocated", str(3 * GIB)),
        ("mbmem_peak_bytes", "t.py::test_a@twin", "virtual-h100-80gb", "reserved", str(3 * GIB + 2 * MIB)),
    ]


def test_every_family_has_its_type_and_a_unit_that_its_name_ends_with(measured: Make, results: MakeResults) -> None:
    text = metrics(results({"t.py::test_a": [measured(GIB)]}))
    families = {family for family, *_ in samples(text)}
    for family in families:
        assert f"# TYPE {family} gauge" in text
        assert re.search(rf"# UNIT {family} (\w+)\n", text)[1] == family.rpartition("_")[2]  # type: ignore[index]


def test_a_failed_measurement_has_no_figure(failed: Make, results: MakeResults) -> None:
    assert metrics(results({"t.py::test_a": [failed("out of memory", "no room")]})) == "# EOF\n"


def test_any_test_id_is_one_label(measured: Make, results: MakeResults) -> None:
    name = 't.py::test_a[a"b\\n\n{x="1"} 5,\N{SNOWMAN}]'
    found = list(samples(metrics(results({name: [measured(GIB)], "t.py::test_\udce9": [measured(GIB)]}))))
    assert {test for _, test, *_ in found} == {name, "t.py::test_\\udce9"}


def test_no_figure_comes_twice_and_xdists_groups_are_left_out(measured: Make, results: MakeResults) -> None:
    made = results({"t.py::test_a@group": [measured(GIB), measured(3 * GIB), measured(2 * GIB)]})
    found = {(test, metric): value for _, test, _, metric, value in samples(metrics(made))}
    assert found["t.py::test_a", "allocated"] == str(3 * GIB)
    assert len(list(samples(metrics(made)))) == len(found) == 2
