"""`pytest --mbmem-conformance`: an item for each documented constraint, which tries it with the installed versions."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import incompatibilities
from .errors import MeasurementFailed, UserError
from .incompatibilities import installed
from .incompatibilities.catalog import Construction
from .refusals import Verdict, make_all, prove, versions_text

if TYPE_CHECKING:
    from .incompatibilities import Entry
    from .measure.workers import CallResult
    from .refusals import Proof
    from .session import Run

NAME = "mbmem-conformance"
"""Of the collector, with which node ids begin."""

MARKER = "mbmem_conformance"

_VERDICT, _HEADLINE, _NOTE = "mbmem_verdict", "mbmem_headline", "mbmem_note"
"""Properties of an item's reports, which xdist carries to its controller."""

_COUNTED: Mapping[str, tuple[Verdict, ...]] = {
    "as documented": ("refused as documented", "accepted silently, as documented"),
    "disagree": ("documentation and code disagree",),
    "not decided": ("cannot be decided",),
}


def begin(run: Run) -> None:
    """Have the hooks of `Conformance` called, and collect no tests unless their paths are named.

    Raises `UserError` where there is nothing to try.
    """
    for package in ("torch", "megatron-core"):
        if package not in installed():
            raise UserError(f"--{NAME}: {package} is not installed, and constraints are tried with it")
    incompatibilities.catalog()  # a mistake in it is said before anything is collected
    config = run.config
    if config.args_source is not config.ArgsSource.ARGS:
        config.args.clear()
    run.collected.complete = False  # of a session without tests, no baseline is an orphan
    config.pluginmanager.register(Conformance(run), NAME)


class Conformance:
    """The hooks of such a session."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._named: list[Entry] = []  # on the command line; none: all are collected
        self._made: Mapping[str, CallResult] = {}  # of configuration classes, by constraint
        self._verdicts: dict[str, str] = {}  # by node id
        self._lines: list[str] = []  # for each that is otherwise than documented

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Take the constraints that are named by their node ids from the paths of tests."""
        args = session.config.args
        named = [arg.partition("::")[2] for arg in args if arg.partition("::")[0] == NAME]
        args[:] = [arg for arg in args if arg.partition("::")[0] != NAME]
        try:
            self._named = [incompatibilities.catalog()[id] for id in named if id]
        except UserError as error:
            raise pytest.UsageError(f"{NAME}: {error}") from None

    @property
    def entries(self) -> Iterable[Entry]:
        """What is collected."""
        return self._named or incompatibilities.catalog().values()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Collect the constraints after the tests that are named."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            mine = Constraints.from_parent(collector, name=NAME, nodeid=NAME, conformance=self)
            report.result = [*report.result, mine]
        return report

    def prove(self, item: Constraint) -> Proof:
        """Try the item's entry. Raises `UserError` where nothing can be tried on this machine."""

        def make() -> Mapping[str, CallResult]:
            if not self._made:  # all at once, which takes a fraction of the time
                entries = [other.entry for other in item.session.items if isinstance(other, Constraint)]
                examples = {e.id: e.example for e in entries if isinstance(e.example, Construction)}
                self._made = make_all(self.run.tried_on, examples)
            return self._made

        return prove(self.run.tried_on, item.entry.example, item.entry, make=make)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the proof on the report, as those of tests are."""
        report = yield
        if isinstance(item, Constraint):
            proofs = [item.proof.summary()] if call.when == "call" and item.proof is not None else []
            report.mbmem = {"proofs": proofs}  # type: ignore[attr-defined]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what came out, in xdist's controller too."""
        found = dict(report.user_properties)
        if report.when == "call" and report.nodeid.startswith(f"{NAME}::") and _VERDICT in found:
            self._verdicts[report.nodeid] = str(found[_VERDICT])
            if report.failed:
                self._lines.append(str(found[_HEADLINE]))
            elif found[_NOTE]:
                self._lines.append(str(found[_NOTE]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """How many constraints are as documented, and which are not."""
        if not self._verdicts:
            return
        found = list(self._verdicts.values())
        counts = ", ".join(f"{sum(map(found.count, verdicts))} {what}" for what, verdicts in _COUNTED.items())
        terminalreporter.section("conformance")
        terminalreporter.write_line(f"mbmem conformance: {versions_text(installed())}: {counts}")
        for line in self._lines:
            terminalreporter.write_line(f"  {line}")


class Constraints(pytest.Collector):
    """All documented constraints."""

    def __init__(self, *, conformance: Conformance, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._conformance = conformance

    def collect(self) -> Iterator[Constraint]:
        """One item each."""
        for entry in self._conformance.entries:
            yield Constraint.from_parent(self, name=entry.id, entry=entry, conformance=self._conformance)


class Constraint(pytest.Item):
    """A documented constraint, tried with its example."""

    obj = None  # as pytest's own items have that are no functions

    def __init__(self, *, entry: Entry, conformance: Conformance, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.entry, self._conformance = entry, conformance
        self.proof: Proof | None = None
        self.add_marker(MARKER)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the catalogue has it."""
        return self.entry.catalog.path, self.entry.line - 1, self.nodeid

    def runtest(self) -> None:
        """Fail where documentation and code disagree, skip what cannot be decided here."""
        try:
            proof = self._conformance.prove(self)
        except UserError as error:  # nothing can be tried on this machine
            self.session.shouldfail = f"{self.name}: {error}"
            pytest.fail(str(error), pytrace=False)
        except MeasurementFailed as error:  # the trial itself broke
            pytest.fail(str(error), pytrace=False)
        self.proof = proof
        note = proof.note and f"note: {self.name}: {proof.note}"
        self.user_properties += [(_VERDICT, proof.verdict), (_HEADLINE, proof.headline), (_NOTE, note)]
        if proof.verdict == "cannot be decided":
            raise pytest.skip.Exception(f"{self.name}: {proof.reason}", _use_item_location=True)
        if not proof.as_documented:
            pytest.fail(proof.explain(), pytrace=False)
