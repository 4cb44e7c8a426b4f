"""The rule of a `fragmentation` marker: how much of what PyTorch reserves holds no tensor.

Per rank it is peak reserved less peak allocated, in bytes or as a fraction of peak reserved, each peak of the whole run
(NVIDIA's documents compare the same two figures), and the rank with the largest is judged. What PyTorch reserved
beyond the most that was ever alive is waste, whatever was alive when it did so: at that moment it was this or more.

With a phase both peaks are of that phase. PyTorch keeps what earlier phases reserved, so in a phase that needs little
most of it is cache, which is not lost: a bound on one phase is a bound on cache and fragmentation together.

Imports neither torch nor pytest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from .errors import UserError
from .gates import figure_arguments, marker_arguments
from .measurement import Measurement, RankMeasurement, read_plain
from .units import format_bytes, format_fraction, parse_bytes, parse_fraction

FragmentationVerdict = Literal["pass", "fragmented", "out of memory", "refused", "no effect", "invalid"]

_KEYWORDS = ("limit", "phase")

_SMALLEST_SEGMENT = 2 * 2**20


@dataclass(frozen=True)
class FragmentationRule:
    """The bound, of which one is given, and where it is judged."""

    limit_fraction: float | None = None  # of peak reserved
    limit: int | None = None  # bytes
    phase: str | None = None

    @property
    def metric_id(self) -> str:
        """What is judged: "fragmentation", "fragmentation@backward", ..."""
        return "fragmentation" if self.phase is None else f"fragmentation@{self.phase}"

    @property
    def bound(self) -> str:
        """In words."""
        return format_bytes(self.limit) if self.limit is not None else format_fraction(self.limit_fraction or 0.0)

    @classmethod
    def from_marker(
        cls, args: Sequence[object], kwargs: Mapping[str, object], capacity: int, source: str
    ) -> FragmentationRule:
        """The rule that a marker's arguments describe; one positional argument is taken as `limit`.

        Raises `UserError` with `source` (the test's node id) for anything that is no rule on a GPU of this capacity.
        """
        where = f"{source}: fragmentation(limit=...)"
        given = marker_arguments("fragmentation", args, kwargs, _KEYWORDS, source)
        if "limit" not in given:
            raise UserError(f'{source}: fragmentation() needs a limit, as in fragmentation(limit="10%")')
        _, phase = figure_arguments("fragmentation", given, source)
        value = given["limit"]
        size, fraction = None, None
        if isinstance(value, float) or (isinstance(value, str) and value.rstrip().endswith("%")):
            fraction = parse_fraction(value, where)
        else:
            try:
                size = parse_bytes(value, where)
            except UserError:
                problem = f"{value!r} is neither a percentage (as in '10%') nor a size (as in '4 GiB')"
                raise UserError(f"{where}: {problem}") from None
        if (size or 0) < _SMALLEST_SEGMENT and not fraction:
            raise UserError(f"{where}: {value!r} cannot be kept: PyTorch reserves whole segments, of 2 MiB and more")
        if (fraction is not None and fraction >= 1) or (size is not None and size >= capacity):
            most = "100%" if size is None else f"the GPU's capacity of {format_bytes(capacity)}"
            raise UserError(f"{where}: {value!r} can never fail; write less than {most}")
        return cls(fraction, size, phase)

    def allowed(self, reserved: int) -> int:
        """Bytes without a tensor that a rank with this peak reserved may have, a fraction of one rounded down."""
        if self.limit is not None:
            return self.limit
        exact = Fraction(repr(self.limit_fraction)) * reserved
        return exact.numerator // exact.denominator


@dataclass(frozen=True)
class FragmentationJudgement:
    """What a rule said about a measurement. Figures are bytes, of the worst rank."""

    verdict: FragmentationVerdict
    rule: FragmentationRule
    rank: int | None = None
    phase: str | None = None  # where that rank has its peak reserved, or where it failed
    allocated: int | None = None
    reserved: int | None = None
    notes: tuple[str, ...] = ()  # sentences for the report, beside the verdict

    @property
    def passed(self) -> bool:
        """Whether the test may pass."""
        return self.verdict == "pass"

    @property
    def unused(self) -> int | None:
        """Bytes that were reserved beyond the most that was alive."""
        if self.reserved is None or self.allocated is None:
            return None
        return self.reserved - self.allocated

    @property
    def fraction(self) -> float | None:
        """The same as a fraction of peak reserved."""
        return self.unused / self.reserved if self.unused is not None and self.reserved else None

    def explain(self) -> str:
        """The verdict in one sentence."""
        where = f" in {self.rule.phase}" if self.rule.phase else ""
        if self.unused is None or self.reserved is None or self.fraction is None:
            return f"fragmentation{where}: {self.verdict}" + (f" ({self.notes[0]})" if self.notes else "")
        return (
            f"fragmentation{where} {format_fraction(self.fraction)} on rank {self.rank}: {format_bytes(self.unused)} "
            f"of {format_bytes(self.reserved)} reserved hold no tensor, {self.rule.bound} are allowed"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, and what follows from it."""
        follows = {"passed": self.passed, "unused": self.unused, "fraction": self.fraction}
        return {**dataclasses.asdict(self), **follows, "explanation": self.explain()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> FragmentationJudgement:
        """Read what `to_json` wrote."""
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if f.name in data}
        judgement: FragmentationJudgement = read_plain(cls, fields, source)
        return judgement


def judge(rule: FragmentationRule, measurement: Measurement) -> FragmentationJudgement:
    """Judge the rank that is furthest over the bound, or nearest to it.

    Raises `UserError` if the rule's phase selects nothing in the measurement.
    """
    failure = measurement.failure
    if failure is not None:
        verdicts: dict[str, FragmentationVerdict] = {
            "out of memory": "out of memory",
            "refused": "refused",
            "no effect": "no effect",
        }
        note = f"rank {failure.rank} ended with: {failure.kind}" + (f" in {failure.name}" if failure.name else "")
        return FragmentationJudgement(
            verdicts.get(failure.kind, "invalid"), rule, failure.rank, failure.name, notes=(note,)
        )
    if not measurement.ranks:
        return FragmentationJudgement("invalid", rule, notes=("no rank was measured",))

    def unused(rank: RankMeasurement) -> tuple[Fraction, int]:
        """By what the bound is about."""
        reserved = rank.peak("reserved", rule.phase)
        size = reserved - rank.peak("allocated", rule.phase)
        return Fraction(size if rule.limit is not None else Fraction(size, max(reserved, 1))), -rank.rank

    worst = max(measurement.ranks, key=unused)
    reserved, allocated = worst.peak("reserved", rule.phase), worst.peak("allocated", rule.phase)
    place = worst.peak_phase("reserved", rule.phase).name
    if reserved <= 0:
        note = "nothing was allocated on the device"
        return FragmentationJudgement("invalid", rule, worst.rank, place, notes=(note,))
    over = reserved - allocated > rule.allowed(reserved)
    verdict: FragmentationVerdict = "fragmented" if over else "pass"
    return FragmentationJudgement(verdict, rule, worst.rank, place, allocated, reserved, measurement.notes)
