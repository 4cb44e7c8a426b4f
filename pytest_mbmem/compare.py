"""A candidate against its control: what the settings that differ save in memory, and what that costs.

Knows neither pytest nor torch. All sizes are whole bytes; "before" is the control's, "after" the candidate's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import MeasurementFailed, UserError
from .gates import DEFAULT_SLACK, DEFAULT_TOLERANCE, GatedMetric, band
from .measure.effects import not_effective, worded
from .measurement import Failure, Measurement, RankMeasurement, read_plain
from .recipe import Recipe, setting_names
from .split import PeakGrowth, categories_text, growth, places_text, split_of
from .units import format_bytes, format_fraction
from .validation import did_you_mean, show

Verdict = Literal["saving", "no effect", "costs more", "fits", "out of memory", "refused", "invalid"]
"""Fits: where the control is out of memory, a gain without a number. Out of memory, refused: the candidate is. Invalid:
the control or the candidate did not run, or has no figure to trust."""

NO_EFFECT_TOLERANCE: Mapping[GatedMetric, float] = {"allocated": 0.0, "reserved": DEFAULT_TOLERANCE["reserved"]}
"""With `DEFAULT_SLACK`, how far apart two peaks may be and still be "no effect". Both sides ran the same code, so peak
allocated needs no tolerance, only the slack: PyTorch counts a block that it did not split up to 1 MiB too large, and
another order of allocations alone moves that. Peak reserved depends on addresses, and comes in segments of 20 MiB."""

MEMORY_SETTINGS = ("memory", "lora.sequence_parallel_input_regather")
"""What may differ between a control and a candidate without being named."""

ALLOCATOR_SETTINGS = "memory.alloc_conf"

MODELLED = "modelled, not measured"
"""Said of every slowdown on a virtual GPU: there are no times, so FLOPs stand for them."""


def check_settings(settings: object, source: str) -> tuple[str, ...]:
    """Names of settings as `matched` takes them. Raises `UserError` for anything that names no setting."""
    names = [settings] if isinstance(settings, str) else settings
    if not isinstance(names, (list, tuple)) or not names:
        raise UserError(f"{source}: {show(settings)} is not a list of settings, as in ['recompute_modules', 'tp']")
    known = setting_names()
    for name in names:
        parts = name.split(".") if isinstance(name, str) else []
        if parts and (parts[0] in ("environment", "megatron") or all(part in known for part in parts)):
            continue
        hint = did_you_mean(parts[-1] if parts else name, known)
        raise UserError(
            f"{source}: {show(name)} is no setting of a recipe; {hint}allowed are a field ('tp'), its key "
            "('parallelism.tp') or a part ('memory')"
        )
    return tuple(names)


def matched(
    control: Recipe,
    candidate: Recipe,
    settings: Sequence[str] | None,
    source: str,
    remedy: str = "Make them equal, or name in settings=[...] all that may differ",
) -> dict[str, tuple[Any, Any]]:
    """The settings that differ: dotted key -> (the control's value, the candidate's), plain data.

    Only `settings` may differ: a field ("tp"), its key ("parallelism.tp") or a part ("memory"). None stands for
    `MEMORY_SETTINGS`. Raises `UserError`, with `source` in front, if anything else differs (`remedy`: what to do then),
    or nothing does.
    """
    differences = {key: (_plain(a), _plain(b)) for key, (a, b) in control.differences(candidate).items()}
    if not differences:
        raise UserError(f"{source}: control and candidate are the same recipe, so there is nothing to compare")
    allowed = MEMORY_SETTINGS if settings is None else settings
    others = {key: pair for key, pair in differences.items() if not any(_covers(name, key) for name in allowed)}
    if others:
        listed = "; ".join(differences_lines(others))
        rule = "memory settings" if settings is None else ", ".join(settings)
        raise UserError(
            f"{source}: control and candidate differ in more than {rule}: {listed} (control -> candidate). {remedy}"
        )
    return differences


def default_metric(differences: Mapping[str, object]) -> GatedMetric:
    """What to compare where nobody says it: "reserved" where the allocator's settings alone differ.

    They change what PyTorch reserves, and hardly what is allocated.
    """
    return "reserved" if set(differences) == {ALLOCATOR_SETTINGS} else "allocated"


def _covers(name: str, key: str) -> bool:
    """Whether the setting is the key, or a part of a recipe that it belongs to."""
    return f".{name}." in f".{key}."


def _plain(value: object) -> Any:
    return list(value) if isinstance(value, tuple) else value


def differences_lines(differences: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """As in "memory.recompute_modules: [] -> ['core_attn']"."""
    return [f"{key}: {before} -> {after}" for key, (before, after) in differences.items()]


@dataclass(frozen=True)
class RankSaving:
    """One rank of both jobs: its peak in the control and in the candidate, in bytes."""

    rank: int
    before: int
    after: int

    @property
    def saving(self) -> int:
        """Bytes; negative where the candidate takes more."""
        return self.before - self.after


@dataclass(frozen=True)
class Costs:
    """What a step costs beside GPU memory, each on the rank where it is highest. Or the difference of two of these."""

    flops: int | None = None  # None: not counted
    collective_bytes: Mapping[str, int] = field(default_factory=dict)  # by process group
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # "to host", "to device"
    host_peak: int | None = None  # bytes of pinned host memory; None: not measured

    @classmethod
    def of(cls, measurement: Measurement) -> Costs:
        """Of one job."""
        ranks = measurement.ranks
        return cls(
            measurement.flops_per_step,
            _highest([rank.collective_bytes for rank in ranks]),
            _highest([rank.moved_bytes for rank in ranks]),
            max((rank.host_peak for rank in ranks if rank.host_peak is not None), default=None),
        )

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            _difference(self.flops, other.flops),
            _differences(self.collective_bytes, other.collective_bytes),
            _differences(self.moved_bytes, other.moved_bytes),
            _difference(self.host_peak, other.host_peak),
        )


@dataclass(frozen=True)
class AllocatorFigures:
    """What PyTorch's caching allocator did in one job, each on the rank where it is highest."""

    allocated: int  # peak bytes of the run
    reserved: int
    retries: int  # cudaMalloc failed and the cache was emptied
    segments: int | None  # of cudaMalloc, at a time; expandable ones are none of these. None: not measured

    @classmethod
    def of(cls, measurement: Measurement) -> AllocatorFigures:
        """Of a job with measured ranks."""
        ranks = measurement.ranks
        return cls(
            measurement.peak("allocated"),
            measurement.peak("reserved"),
            max(rank.allocation_retries for rank in ranks),
            max((rank.segments for rank in ranks if rank.segments is not None), default=None),
        )


def _highest(by_name: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for sizes in by_name for name in sizes)
    return {name: max(sizes.get(name, 0) for sizes in by_name) for name in names}


def _difference(after: int | None, before: int | None) -> int | None:
    return None if after is None or before is None else after - before


def _differences(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """By name, without those that are equal."""
    names = dict.fromkeys([*before, *after])
    return {n: after.get(n, 0) - before.get(n, 0) for n in names if after.get(n, 0) != before.get(n, 0)}


@dataclass(frozen=True)
class Comparison:
    """Two measurements whose recipes differ in named settings alone.

    Figures are of `metric` in `phase` (None: the whole run), and of the worst rank of each side: it decides whether a
    job fits. Those of a comparison that has none (`verdict` is "fits", "out of memory", "refused" or "invalid") raise
    `MeasurementFailed` with `explain()` as its message.
    """

    control: Measurement
    candidate: Measurement
    differences: Mapping[str, tuple[Any, Any]]  # dotted key -> (the control's value, the candidate's)
    metric: GatedMetric = "allocated"
    phase: str | None = None

    @property
    def verdict(self) -> Verdict:
        """What the settings do to the worst rank's peak: "saving", "no effect", "costs more", or why that is not known.

        "No effect" are two peaks no further apart than `slack`, and a candidate that was found to be without effect
        when it was measured.
        """
        control, candidate = self.control.failure, self.candidate.failure
        if candidate is not None and control is None:
            kinds: dict[str, Verdict] = {"out of memory": "out of memory", "refused": "refused"}
            return "no effect" if candidate.kind == "no effect" else kinds.get(candidate.kind, "invalid")
        if control is not None:
            return "fits" if control.kind == "out of memory" and candidate is None else "invalid"
        if self._nothing_measured():
            return "invalid"
        difference = self.before - self.after
        if abs(difference) <= self.slack:
            return "no effect"
        return "saving" if difference > 0 else "costs more"

    @property
    def has_figures(self) -> bool:
        """Whether both sides ran: only then there is a `saving`."""
        return self.control.failure is None and self.candidate.failure is None and not self._nothing_measured()

    def _nothing_measured(self) -> str:
        for name, measurement in (("control", self.control), ("candidate", self.candidate)):
            if not measurement.ranks:
                return f"no rank of the {name} was measured"
            if measurement.peak(self.metric, self.phase) <= 0:
                return f"the {name} allocated nothing on the device"
        return ""

    def _need_figures(self) -> None:
        if not self.has_figures:
            raise MeasurementFailed(self.explain())

    @property
    def worst_before(self) -> RankMeasurement:
        """The control's worst rank."""
        self._need_figures()
        return self.control.worst(self.metric, self.phase)

    @property
    def worst_after(self) -> RankMeasurement:
        """The candidate's worst rank, perhaps another one."""
        self._need_figures()
        return self.candidate.worst(self.metric, self.phase)

    @property
    def before(self) -> int:
        """Peak bytes of the control's worst rank."""
        return self.worst_before.peak(self.metric, self.phase)

    @property
    def after(self) -> int:
        """Peak bytes of the candidate's worst rank."""
        return self.worst_after.peak(self.metric, self.phase)

    @property
    def saving(self) -> int:
        """Bytes that the worst rank saves; negative if the candidate takes more."""
        return self.before - self.after

    @property
    def saving_fraction(self) -> float:
        """The saving as a fraction of the control's peak: 0.05 is 5%."""
        return self.saving / self.before

    @property
    def slack(self) -> int:
        """Bytes up to which a difference is "no effect" (see `NO_EFFECT_TOLERANCE`)."""
        return band(self.before, NO_EFFECT_TOLERANCE[self.metric], DEFAULT_SLACK[self.metric])

    @property
    def phase_before(self) -> str:
        """Where the control's worst rank has its peak, as in "step-2/backward"."""
        return self.worst_before.peak_phase(self.metric, self.phase).name

    @property
    def phase_after(self) -> str:
        """Where the candidate's worst rank has its peak."""
        return self.worst_after.peak_phase(self.metric, self.phase).name

    @property
    def growth(self) -> PeakGrowth | None:
        """What the candidate's peak has more and less than the control's; None where the allocator did not tell."""
        then, now = self.worst_before, self.worst_after
        before, after = (split_of(rank, self.metric, self.phase) for rank in (then, now))
        if before is None or after is None:
            return None
        return growth(before, after, places_text((then.rank, self.phase_before), (now.rank, self.phase_after)))

    @property
    def ranks(self) -> tuple[RankSaving, ...]:
        """The ranks that were measured on both sides and stand at the same place of the job."""
        self._need_figures()
        after = {rank.rank: rank for rank in self.candidate.ranks}
        return tuple(
            RankSaving(rank.rank, rank.peak(self.metric, self.phase), after[rank.rank].peak(self.metric, self.phase))
            for rank in self.control.ranks
            if rank.rank in after and rank.coordinates == after[rank.rank].coordinates
        )

    @property
    def only_control(self) -> tuple[int, ...]:
        """Measured ranks of the control that the candidate has no counterpart of: its parallelism differs."""
        both = {rank.rank for rank in self.ranks}
        return tuple(rank.rank for rank in self.control.ranks if rank.rank not in both)

    @property
    def only_candidate(self) -> tuple[int, ...]:
        """Measured ranks of the candidate that the control has no counterpart of."""
        both = {rank.rank for rank in self.ranks}
        return tuple(rank.rank for rank in self.candidate.ranks if rank.rank not in both)

    @property
    def extra(self) -> Costs:
        """What the candidate costs more than the control, a step; negative where it costs less."""
        return Costs.of(self.candidate) - Costs.of(self.control)

    @property
    def allocator(self) -> tuple[AllocatorFigures, AllocatorFigures]:
        """The control's and the candidate's."""
        self._need_figures()
        return AllocatorFigures.of(self.control), AllocatorFigures.of(self.candidate)

    @property
    def is_about_the_allocator(self) -> bool:
        """Whether its settings differ, or one side had to empty its cache more often."""
        before, after = self.allocator
        return ALLOCATOR_SETTINGS in self.differences or before.retries != after.retries

    @property
    def slowdown(self) -> float | None:
        """Extra FLOPs as a fraction of the control's, of the ranks that compute most. None where they were not counted.

        It stands for the extra time of a step where there are no times; communication and moved bytes are not in it.
        """
        control, extra = self.control.flops_per_step, self.extra.flops
        return extra / control if control and extra is not None else None

    @property
    def more_traffic(self) -> bool:
        """Whether the candidate communicates more in some process group, or moves more one way: `slowdown` is blind."""
        extra = self.extra
        return any(size > 0 for size in (*extra.collective_bytes.values(), *extra.moved_bytes.values()))

    def explain(self) -> str:
        """The verdict in one or two sentences."""
        verdict = self.verdict
        control, candidate = self.control.failure, self.candidate.failure
        if verdict == "fits":
            assert control is not None
            worst = self.candidate.worst(self.metric, self.phase)
            figures = worst.peak_phase(self.metric, self.phase)
            place = f"{format_bytes(figures.peak[self.metric])} on rank {worst.rank} in {figures.name}"
            return (
                f"fits where the control does not: peak {self.metric} {place}. The control ends {how(control)}, so "
                "the saving has no number"
            )
        if control is not None:
            too = "; the candidate does not run either" if candidate is not None else ""
            return f"{control_failed(control)}: {said_of_all(control)}{too}"
        if candidate is not None and verdict == "no effect":
            return f"no effect: {said_of_all(candidate)}"
        if candidate is not None:
            return f"the candidate does not run: {how(candidate)}: {said(candidate)}"
        if verdict == "invalid":
            return f"there is nothing to compare: {self._nothing_measured()}"
        return f"{self._what_happened(verdict)}{''.join(f'. {note}' for note in self.hints())}"

    def _what_happened(self, verdict: Verdict) -> str:
        if verdict == "no effect" and self.is_identical:
            text = f"no effect: no figure of any rank differs; {' and '.join(self.differences)} changed nothing here"
            reasons = not_effective(self.candidate.ranks)
            here = {name: reason for name, reason in reasons.items() if name.split()[0] in self.differences}
            return "; ".join([text, *worded(here)])
        places = (
            f"{format_bytes(self.before)} on rank {self.worst_before.rank} in {self.phase_before} -> "
            f"{format_bytes(self.after)} on rank {self.worst_after.rank} in {self.phase_after}"
        )
        where = f" in {self.phase}" if self.phase else ""
        if verdict == "no effect":
            text = (
                f"no effect: peak {self.metric}{where} {places}; differences of up to {format_bytes(self.slack)} can "
                "come from another order of allocations"
            )
        else:
            size = f"{format_bytes(abs(self.saving))} ({format_fraction(abs(self.saving_fraction))})"
            word = f"saves {size}" if verdict == "saving" else f"costs {size} more"
            text = f"{word} of peak {self.metric}{where}: {places}"
        costs = self.costs_text()
        text = f"{text}, for {costs}" if costs else text
        text += f". Allocator: {self.allocator_text()}" if self.is_about_the_allocator else ""
        growth = self.growth if verdict != "no effect" else None
        return f"{text}. By category: {categories_text(growth.categories(), signed=True)}" if growth else text

    def allocator_text(self) -> str:
        """As in "allocated 1.00 GiB -> 1.00 GiB, reserved 3.00 GiB -> 2.00 GiB, retries 0 -> 0, segments 12 -> 3"."""
        before, after = self.allocator
        sizes = [
            f"{name} {format_bytes(getattr(before, name))} -> {format_bytes(getattr(after, name))}"
            for name in ("allocated", "reserved")
        ]
        segments = ["not measured" if n is None else str(n) for n in (before.segments, after.segments)]
        return ", ".join([*sizes, f"retries {before.retries} -> {after.retries}", f"segments {' -> '.join(segments)}"])

    def costs_text(self) -> str:
        """The extra costs, as in "+3.20% FLOPs (modelled, not measured), +1.00 GiB tp collectives"; empty if none."""
        note = f" ({MODELLED})" if self.candidate.device.virtual else ""
        flops = f"{format_fraction(self.slowdown, signed=True)} FLOPs{note}" if self.slowdown else ""
        return ", ".join(filter(None, (flops, self.traffic_text())))

    def traffic_text(self) -> str:
        """The same without FLOPs."""
        extra = self.extra
        parts = [f"{format_bytes(n, signed=True)} {group} collectives" for group, n in extra.collective_bytes.items()]
        parts += [f"{format_bytes(n, signed=True)} moved {way}" for way, n in extra.moved_bytes.items()]
        if extra.host_peak:
            parts.append(f"{format_bytes(extra.host_peak, signed=True)} of pinned host memory")
        return ", ".join(parts)

    @property
    def is_identical(self) -> bool:
        """Whether no figure of any rank differs, beside the one that is compared."""
        control, candidate = (
            # without what was requested, and the lines that did the same work
            [dataclasses.replace(rank, adapters=(), composition=None, largest_owner=None) for rank in side.ranks]
            for side in (self.control, self.candidate)
        )
        return control == candidate

    def hints(self) -> Iterator[str]:
        """Sentences on a saving that does not show in the worst rank's peak. Only for comparisons with figures."""
        if self.is_identical:
            return
        before, place = self.worst_before, self.phase_before
        same = next((r for r in self.candidate.ranks if r.rank == before.rank), None)
        if same is not None and self.phase_after != place and any(p.name == place for p in same.phases):
            there = self.before - same.peak(self.metric, place)
            if there > self.saving + self.slack:
                yield (
                    f"in {place} rank {before.rank} takes {format_bytes(there)} less; that does not show in full, "
                    f"because the peak is now in {self.phase_after}"
                )
        if self.verdict == "no effect":
            best = max(self.ranks, key=lambda rank: rank.saving, default=None)
            if best is not None and best.saving > self.slack:
                yield f"rank {best.rank} saves {format_bytes(best.saving)}, but it is not the worst one"

    def to_json(self) -> dict[str, Any]:
        """Plain data: the figures, without the measurements that they come from."""
        data: dict[str, Any] = {
            "verdict": self.verdict,
            "explanation": self.explain(),
            "metric": self.metric,
            "phase": self.phase,
            "differences": {key: list(pair) for key, pair in self.differences.items()},
        }
        if not self.has_figures:
            return data
        extra = self.extra
        return {
            **data,
            "before": {"bytes": self.before, "rank": self.worst_before.rank, "phase": self.phase_before},
            "after": {"bytes": self.after, "rank": self.worst_after.rank, "phase": self.phase_after},
            "saving": self.saving,
            "saving_fraction": self.saving_fraction,
            "growth": None if (growth := self.growth) is None else dataclasses.asdict(growth),
            "ranks": [{"rank": r.rank, "before": r.before, "after": r.after, "saving": r.saving} for r in self.ranks],
            "only_control": list(self.only_control),
            "only_candidate": list(self.only_candidate),
            "extra_flops": extra.flops,
            "slowdown": self.slowdown,
            "extra_collective_bytes": dict(extra.collective_bytes),
            "extra_moved_bytes": dict(extra.moved_bytes),
            "extra_host_bytes": extra.host_peak,
            "allocator": dict(zip(("before", "after"), map(dataclasses.asdict, self.allocator), strict=True)),
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], control: Measurement, candidate: Measurement, source: str
    ) -> Comparison:
        """Read what `to_json` wrote. Raises `UserError` naming `source` for anything else."""
        differences = read_plain(Mapping[str, tuple[Any, ...]], data["differences"], f"{source}: differences")
        if any(len(pair) != 2 for pair in differences.values()):
            raise UserError(f"{source}: differences: not pairs of values")
        metric = read_plain(GatedMetric, data["metric"], f"{source}: metric")
        return cls(control, candidate, differences, metric, read_plain(str | None, data["phase"], f"{source}: phase"))


def how(failure: Failure) -> str:
    """As in "out of memory on rank 3 in step-1/forward"."""
    return f"{failure.kind} on rank {failure.rank}" + (f" in {failure.name}" if failure.name else "")


def control_failed(failure: Failure) -> str:
    """What is wrong with a control that ended so. One whose own setting is idle did run."""
    if failure.kind == "no effect":
        return f"a setting of the control itself has no effect, on rank {failure.rank}"
    return f"the control itself does not run: {how(failure)}"


def said(failure: Failure) -> str:
    """The line of the message that says most: a traceback's last one, of others the first."""
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()] or ["no message"]
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def said_of_all(failure: Failure) -> str:
    """The same on one line; of settings without effect, which have a line each, what is said of all of them."""
    return "; ".join(failure.message.splitlines()) if failure.kind == "no effect" else said(failure)
