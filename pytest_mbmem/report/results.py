"""The results of a run, test by test: what every report is made from. Plain data in and out.

Under xdist they travel from the workers to the controller on pytest's own test reports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from ..diagnosis import Finding
from ..errors import UserError
from ..fits import FitJudgement
from ..fragmentation import FragmentationJudgement
from ..gates import Judgement
from ..growth import GrowthSummary
from ..measurement import Measurement, RankMeasurement, read_plain
from ..savings import SavingJudgement
from ..sweep import Sweep
from ..throughput import ThroughputJudgement

SCHEMA = 1
"""Version of the file that --mbmem-json writes; a file with another one is refused."""

DISAGREE = "documentation and code disagree"
"""The verdict of a proof that fails its test."""

J = TypeVar("J", Judgement, ThroughputJudgement)


@dataclass
class Judged(Generic[J]):
    """A verdict against a bound or a baseline, and whether --mbmem-update accepts what it is about."""

    judgement: J
    accepted: bool = False

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.judgement.passed or self.accepted

    def to_json(self) -> dict[str, Any]:
        """The judgement's fields and what follows from them."""
        judgement = self.judgement
        return {
            **dataclasses.asdict(judgement),
            "change": judgement.change,
            "passed": judgement.passed,
            "accepted": self.accepted,
            "explanation": judgement.explain(),
        }

    @classmethod
    def from_json(cls, kind: type[J], data: Mapping[str, Any], source: str) -> Judged[J]:
        """Read what `to_json` wrote of a judgement of this kind."""
        fields = {f.name: data[f.name] for f in dataclasses.fields(kind) if f.name in data}
        judgement = cast(J, read_plain(kind, fields, source))
        return Judged(judgement, read_plain(bool, data["accepted"], f"{source}: accepted"))


@dataclass
class Measured:
    """One measurement of a test and what its gates said."""

    key: str  # as in the baseline file: the node id without its module, with "@name" behind it
    name: str | None
    measurement: Measurement
    judged: list[Judged[Judgement]] = field(default_factory=list)
    savings: list[SavingJudgement] = field(default_factory=list)  # of its memory_saving markers
    fits: list[FitJudgement] = field(default_factory=list)  # of its fits markers, one for each GPU
    fragmentations: list[FragmentationJudgement] = field(default_factory=list)  # of its fragmentation markers
    throughputs: list[Judged[ThroughputJudgement]] = field(default_factory=list)  # of its throughput markers
    ranks: Any = field(default="distinct", compare=False)  # which ones were asked for, to measure a control alike

    @property
    def is_judged(self) -> bool:
        """Whether there is any verdict on it."""
        return bool(self.judged or self.savings or self.fits or self.fragmentations or self.throughputs)

    @property
    def stated(self) -> list[FitJudgement | FragmentationJudgement]:
        """The verdicts that speak for themselves, of its fits and fragmentation markers."""
        return [*self.fits, *self.fragmentations]

    def rank(self, number: int | None) -> RankMeasurement | None:
        """The measured rank of that number."""
        return next((r for r in self.measurement.ranks if r.rank == number), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "key": self.key,
            "name": self.name,
            "judgements": [j.to_json() for j in self.judged],
            "savings": [s.to_json() for s in self.savings],
            "fits": [f.to_json() for f in self.fits],
            "fragmentations": [f.to_json() for f in self.fragmentations],
            "throughputs": [t.to_json() for t in self.throughputs],
            "measurement": self.measurement.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> Measured:
        """Read what `to_json` wrote."""
        measurement = Measurement.from_json(data["measurement"], source)
        judged = [Judged.from_json(Judgement, j, source) for j in data["judgements"]]
        savings = [SavingJudgement.from_json(s, measurement, source) for s in data.get("savings", ())]
        fits = [FitJudgement.from_json(f, f"{source}: fits") for f in data.get("fits", ())]
        fragmentations = [
            FragmentationJudgement.from_json(f, f"{source}: fragmentation") for f in data.get("fragmentations", ())
        ]
        throughputs = [
            Judged.from_json(ThroughputJudgement, t, f"{source}: throughput") for t in data.get("throughputs", ())
        ]
        key = read_plain(str, data["key"], f"{source}: key")
        name = read_plain(str | None, data["name"], f"{source}: name")
        return cls(key, name, measurement, judged, savings, fits, fragmentations, throughputs)


@dataclass
class TestResult:
    """A test that measures, and how it ended."""

    __test__ = False  # not a test class, in spite of its name

    id: str
    outcome: str = "passed"  # passed, failed, error, skipped, xfailed, xpassed
    duration: float = 0.0  # seconds, setup and teardown included
    measured: list[Measured] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)  # those of mbmem.compare too, which have one row
    growths: list[GrowthSummary] = field(default_factory=list)  # of its no_memory_growth marker
    proofs: list[dict[str, str]] = field(default_factory=list)  # of refusals: id, verdict and headline of each
    findings: list[Finding] = field(default_factory=list)  # of the diagnosis
    failure: str = ""  # pytest's text of what failed, in setup, call and teardown; of a skipped test the reason
    artifacts: list[str] = field(default_factory=list)  # paths of what the failure left: folder, snapshots
    earlier: list[str] = field(default_factory=list)  # texts of its failures before it was run again

    @property
    def has_failed(self) -> bool:
        """In its last run."""
        return self.outcome in ("failed", "error")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "id": self.id,
            "outcome": self.outcome,
            "duration": self.duration,
            "measurements": [m.to_json() for m in self.measured],
            "sweeps": [s.to_json() for s in self.sweeps],
            "growths": [g.to_json() for g in self.growths],
            "proofs": self.proofs,
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "failure": self.failure,
            "artifacts": self.artifacts,
            "earlier": self.earlier,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> TestResult:
        """Read what `to_json` wrote."""
        test = read_plain(str, data["id"], f"{source}: id")
        outcome = read_plain(str, data["outcome"], f"{source}: {test}: outcome")
        duration = read_plain(float, data["duration"], f"{source}: {test}: duration")
        measured = [Measured.from_json(m, f"{source}: {test}") for m in data["measurements"]]
        sweeps = [Sweep.from_json(s, f"{source}: {test}") for s in data.get("sweeps", ())]
        growths = [GrowthSummary.from_json(g, f"{source}: {test}: growth") for g in data.get("growths", ())]
        proofs = [dict(read_plain(Mapping[str, str], p, f"{source}: {test}: proof")) for p in data.get("proofs", ())]
        findings = [
            cast(Finding, read_plain(Finding, f, f"{source}: {test}: finding")) for f in data.get("findings", ())
        ]
        failure = read_plain(str, data.get("failure", ""), f"{source}: {test}: failure")
        artifacts, earlier = (
            list(read_plain(tuple[str, ...], data.get(key, ()), f"{source}: {test}: {key}"))
            for key in ("artifacts", "earlier")
        )
        return cls(test, outcome, duration, measured, sweeps, growths, proofs, findings, failure, artifacts, earlier)


@dataclass
class Results:
    """All tests of a run that measure, in the order in which they ended."""

    header: Mapping[str, str] = field(default_factory=dict)  # what the report header says, by name
    tests: dict[str, TestResult] = field(default_factory=dict)
    started: str = ""  # in UTC, as in "2026-01-31T12:00:00Z"
    revision: str = ""  # of the code under test, as its version control or CI names it; empty where that is not known

    def to_json(self) -> dict[str, Any]:
        """Plain data, the form of the --mbmem-json file."""
        return {
            "schema": SCHEMA,
            "header": dict(self.header),
            "started": self.started,
            "revision": self.revision,
            "tests": [t.to_json() for t in self.tests.values()],
        }

    @classmethod
    def from_json(cls, data: Any, source: str) -> Results:
        """Read what `to_json` wrote. Raises `UserError` naming `source` for anything else."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA or "tests" not in data:
            raise UserError(f"{source}: not a file of --mbmem-json, schema {SCHEMA}")
        try:
            tests = [TestResult.from_json(test, source) for test in data["tests"]]
            header = read_plain(Mapping[str, str], data["header"], f"{source}: header")
            started, revision = (
                read_plain(str, data.get(key, ""), f"{source}: {key}") for key in ("started", "revision")
            )
            return cls(header, {test.id: test for test in tests}, started, revision)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{source}: a damaged file of --mbmem-json ({error!r})") from None
