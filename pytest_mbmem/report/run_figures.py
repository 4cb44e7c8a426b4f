"""The figures of tests by metric, out of any file that a run leaves: --mbmem-json, and JUnit files with properties.

What a figure is called is what a baseline calls it: "allocated", "reserved@optimizer", "counted-flops". Of each, more
is worse: of "throughput" it is the nanoseconds of a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_bytes
from ..gates import DEFAULT_SLACK, DEFAULT_TOLERANCE, GATED_METRICS, GatedMetric
from ..measurement import MOST, Measurement
from ..throughput import DEFAULT_TOLERANCE as OF_STEPS
from ..throughput import STEP_METRICS, Throughput
from ..validation import show
from . import json
from .results import Measured, Results
from .rows import label_of

_PROPERTY = re.compile(
    r"mbmem_(device|failure|peak_allocated_bytes|peak_reserved_bytes|measured_bytes|flops_per_step|step_seconds"
    r"|step_spread_seconds|step_metric|throughput_measured)(?:@([^\[]*))?(?:\[(.*)\])?",
    re.DOTALL,
)

SUFFIXES = (".json", ".xml")
"""Of the files that a folder stands for."""


@dataclass(frozen=True)
class Band:
    """What a figure may differ by."""

    tolerance: float
    slack: int = 0


@dataclass
class Tested:
    """A measurement of a test in a run."""

    __test__ = False  # not a test class, in spite of its name

    label: str  # the test, "@name" behind it
    device: str
    figures: dict[str, int] = field(default_factory=dict)  # by metric
    bands: dict[str, Band] = field(default_factory=dict)  # of the gates, where the file says them
    spread: int | None = None  # of "throughput"
    failure: str | None = None  # how it ended without figures, as in "out of memory"
    started: str = ""  # of its run, in UTC, as in "2026-01-31T12:00:00Z"; empty where the file does not say
    run: str = ""  # the revision's first 10 characters, or the file's name
    has_revision: bool = False  # whether the file says it
    kind: str = "json"  # of the file; a run leaves one of each
    measurement: Measurement | None = None  # a JUnit file has none
    alone: bool = False  # in the file of `mbmem measure`


@dataclass(frozen=True)
class File:
    """A file with measurements of a run, or with a single one."""

    path: Path
    tested: Sequence[Tested]
    is_junit: bool

    @classmethod
    def load(cls, path: Path) -> File:
        """Raises `UserError` naming the file for what is none of the three kinds."""
        content = read_bytes(path)
        if _is_xml(content, path):
            from . import junit_xml

            return cls(path, _of_junit(junit_xml.parse(content, str(path)), path.name), is_junit=True)
        data = json.parse(content, str(path))
        if isinstance(data, dict) and "tests" in data:
            return cls(path, of_results(Results.from_json(data, str(path)), path.name), is_junit=False)
        if isinstance(data, dict) and "device" in data:
            measured = Measured("", None, Measurement.from_json(data, str(path)))
            one = _tested(_recipe_name(measured.measurement), measured)
            one.run, one.alone = path.name, True
            return cls(path, [one], is_junit=False)
        found = show(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise UserError(
            f"{path}: neither what `mbmem measure --json` writes nor what `pytest --mbmem-json` writes (found {found})"
        )

    @property
    def measurements(self) -> dict[str, Measurement]:
        """By label; a JUnit file has none."""
        return {one.label: one.measurement for one in self.tested if one.measurement is not None}

    @property
    def is_single(self) -> bool:
        """Whether it is of `mbmem measure`, which knows no test."""
        return any(one.alone for one in self.tested)


def peak_of(metric_id: str) -> tuple[GatedMetric, str | None] | None:
    """Metric and phase of a peak's figure; None for one of steps."""
    name, _, phase = metric_id.partition("@")
    return next(((metric, phase or None) for metric in GATED_METRICS if metric == name), None)


def band_of(metric_id: str, *tested: Tested) -> Band:
    """By the first test that has a gate for it, or the metric's own."""
    found = next((one.bands[metric_id] for one in tested if metric_id in one.bands), None)
    if found is not None:
        return found
    peak = peak_of(metric_id)
    return Band(OF_STEPS) if peak is None else Band(DEFAULT_TOLERANCE[peak[0]], DEFAULT_SLACK[peak[0]])


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The files, a folder's in the order of their names. Raises `UserError` for a path or folder without any."""
    found: list[Path] = []
    for path in paths:
        try:
            if not path.is_dir():
                found.append(path)
                continue
            inside = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
        if not inside:
            raise UserError(f"{path}: no file in this folder is called *{' or *'.join(SUFFIXES)}")
        found += inside
    return found


def _recipe_name(measurement: Measurement) -> str:
    recipe: Mapping[str, Any] = measurement.recipe or {}
    return str(recipe.get("name") or f"recipe {measurement.recipe_digest}")


def _is_xml(content: bytes, path: Path) -> bool:
    """Whether it begins like XML does, behind a byte order mark; an empty file is what its name says."""
    start = content[:200].lstrip(b"\xef\xbb\xbf\xff\xfe \t\r\n\0")
    return start.startswith(b"<") or (path.suffix == ".xml" and not start)


def of_results(results: Results, name: str) -> list[Tested]:
    """Of a run; `name` stands for it where it has no revision. Several of a test with one name are numbered."""
    found = [
        _tested(label_of(test.id, measured), measured) for test in results.tests.values() for measured in test.measured
    ]
    for one in found:
        one.started, one.run = results.started, results.revision[:10] or name
        one.has_revision = bool(results.revision)
    return _numbered(found)


def figure(measurement: Measurement, metric_id: str) -> int | None:
    """Of peaks, the whole run's or a phase's; None where the measurement has none."""
    peak = peak_of(metric_id)
    if peak is None or not measurement.ranks or measurement.steps:
        return None
    try:
        return measurement.peak(*peak)
    except UserError:  # no such phase
        return None


def _numbered(tested: list[Tested]) -> list[Tested]:
    seen: Counter[str] = Counter()
    for one in tested:
        label = one.label
        seen[label] += 1
        one.label += f" {seen[label]}" if seen[label] > 1 else ""
    return tested


def _tested(label: str, measured: Measured) -> Tested:
    measurement = measured.measurement
    found = Tested(label, measurement.device.key, measurement=measurement)
    for judged in measured.judged:
        gate = judged.judgement.gate
        if gate.limit is None:
            found.bands[gate.metric_id] = Band(gate.tolerance, gate.slack)
    for steps in measured.throughputs:
        found.bands[steps.judgement.metric_id] = Band(steps.judgement.gate.tolerance)
    if measurement.failure is not None:
        found.failure = measurement.failure.kind
        return found
    metrics: list[GatedMetric] = list(GATED_METRICS)
    for metric_id in (*metrics, *(judged.judgement.gate.metric_id for judged in measured.judged)):
        value = figure(measurement, metric_id)
        if value is not None:
            found.figures[metric_id] = value
    throughput = Throughput.of(measurement)
    if throughput is not None:
        found.figures[throughput.metric_id], found.spread = throughput.step, throughput.spread
    if measurement.flops_per_step is not None:
        found.figures["counted-flops"] = measurement.flops_per_step
    for steps in measured.throughputs:
        if steps.judgement.measured is not None:
            found.figures[steps.judgement.metric_id] = steps.judgement.measured
    return found


# JUnit ----------------------------------------------------------------------------------------------------------------


def _of_junit(xml: Any, name: str) -> list[Tested]:
    """A test has one case in pytest's file, and one for each verdict in that of --mbmem-junit."""
    from . import junit_file, junit_xml
    from .junit import TEST

    found: dict[tuple[str, str], Tested] = {}
    for suite, case in junit_xml.cases_of(xml):
        about = dict(junit_xml.properties_of(suite))
        properties = junit_xml.properties_of(case)
        given = dict(properties)
        began = junit_xml.time_of(given.get(junit_file.RUN, "").partition("/")[0] or suite.timestamp)
        started = began.strftime("%Y-%m-%dT%H:%M:%SZ") if began else ""
        revision = about.get(junit_file.REVISION, "")[:10]
        kind = "junit" if suite.name == junit_file.SUITE else "pytest's junit"
        nodeid = given.get(TEST) or _nodeid(case)
        for of, one in _measurements(properties).items():
            label = nodeid + (f"@{of}" if of else "")
            device = str(one.pop("device", about.get(junit_file.DEVICE, "")))
            new = Tested(label, device, started=started, run=revision or name, has_revision=bool(revision), kind=kind)
            tested = found.setdefault((label, device), new)
            tested.spread = one.pop("spread", tested.spread)
            failure = one.pop("failure", None)
            tested.failure = str(failure) if failure is not None else tested.failure
            tested.figures.update({metric: int(value) for metric, value in one.items()})
    return list(found.values())


def _measurements(properties: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Figures by metric of each measurement of a test by its name, and "device" and "failure"."""
    found: dict[str, dict[str, Any]] = {}
    step: dict[str, dict[str, str]] = {}
    for name, value in properties:
        match = _PROPERTY.fullmatch(name)
        if match is None:
            continue
        kind, gate, measurement = match[1], match[2], match[3] or ""
        one = found.setdefault(measurement, {})
        if kind in ("device", "failure"):
            one[kind] = value
        elif kind.startswith("step_"):
            step.setdefault(measurement, {})[kind] = value
        else:
            metric = _METRICS.get(kind) or gate or ("allocated" if kind == "measured_bytes" else "")
            number = _number(value)
            if metric and number is not None:
                one[metric] = number
    for measurement, said in step.items():
        metric, nanoseconds = said.get("step_metric", "throughput"), _number(said.get("step_seconds", ""), 10**9)
        if metric in STEP_METRICS and nanoseconds is not None:
            found[measurement][metric] = nanoseconds
            found[measurement]["spread"] = _number(said.get("step_spread_seconds", ""), 10**9)
    return {name: one for name, one in found.items() if "device" in one}


_METRICS: Mapping[str, str] = {
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "flops_per_step": "counted-flops",
}


def _number(text: str, factor: int = 1) -> int | None:
    """None for what another program, or another version of this one, wrote under this name."""
    try:
        number = round(float(text) * factor) if factor > 1 else int(text)
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < MOST else None


def _nodeid(case: Any) -> str:
    """As well as class name and name tell it: what follows the module begins with a capital letter."""
    *folders, last = (case.classname or "").split(".")
    classes: list[str] = []
    while folders and last[:1].isupper():
        classes.insert(0, last)
        last = folders.pop()
    module = "/".join([*folders, last]) + ".py"
    return "::".join([module, *classes, case.name])
