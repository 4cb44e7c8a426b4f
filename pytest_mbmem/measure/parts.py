"""What one process finds out of a measurement on real GPUs, and what its virtual twin says; to plain data and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..measurement import Failure, Measurement
from ..recipe import Recipe
from . import ranks as rank_choice
from .ranks import Work
from .workers import CallResult


def is_about_peers(result: CallResult) -> bool:
    """Whether a rank failed only because another one did: torch.distributed says so, or its watchdog ends it."""
    if result.failure == "died":
        return "SIGABRT" in result.message and "ProcessGroupNCCL" in result.output
    by_torch = re.search(r"^torch\.distributed\.Dist\w*Error", result.message, re.MULTILINE)
    return result.failure == "lost peer" or by_torch is not None


@dataclass
class Twin:
    """What the virtual twin says."""

    measurement: Measurement | None
    model_flops: Mapping[int, int | None]  # by rank
    problem: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.problem,) if self.problem else ()

    @property
    def ran(self) -> bool:
        """Whether it tells which settings change something."""
        failure = self.measurement.failure if self.measurement is not None else None
        return self.measurement is not None and (failure is None or failure.kind == "no effect")

    @property
    def no_effect(self) -> Failure | None:
        """The settings that change nothing there."""
        failure = self.measurement.failure if self.measurement is not None else None
        if failure is None or failure.kind != "no effect":
            return None
        return replace(failure, message=f"on the virtual twin: {failure.message}")

    def counted(self, recipe: Recipe) -> dict[Work, dict[str, Any]]:
        """FLOPs and collective bytes of each kind of rank, as fields of a `RankMeasurement`."""
        found = self.measurement.ranks if self.measurement is not None else ()
        return {
            rank_choice.at(recipe, rank.rank).work: {
                "flops_per_step": rank.flops_per_step,
                "collective_bytes": dict(rank.collective_bytes),
                "model_flops": self.model_flops.get(rank.rank),
            }
            for rank in reversed(found)
            if rank.rank in self.model_flops
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "measurement": self.measurement and self.measurement.to_json(),
            "model_flops": [[rank, flops] for rank, flops in self.model_flops.items()],
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Twin:
        """Read what `to_json` wrote."""
        measurement = data["measurement"] and Measurement.from_json(data["measurement"], "twin")
        return cls(measurement, dict(map(tuple, data["model_flops"])), data["problem"])


@dataclass
class Part:
    """What one process knows of a measurement."""

    results: dict[int, CallResult] = dataclasses.field(default_factory=dict)  # by rank
    disturbed: tuple[int, str] | None = None  # a rank, and what else used its GPU
    error: str | None = None  # of this process, so that it measured nothing
    ended: float = 0.0  # time of day in seconds, to order what fails in several processes
    twin: Twin | None = None

    @property
    def has_failed(self) -> bool:
        """Whether other ranks need not wait."""
        failed = any(r.failure is not None or r.value["failure"] is not None for r in self.results.values())
        return failed or self.disturbed is not None or self.error is not None

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the end of what workers printed."""
        short = {rank: replace(result, output=result.output[-4000:]) for rank, result in self.results.items()}
        results = [[rank, dataclasses.asdict(result)] for rank, result in short.items()]
        more = {"disturbed": self.disturbed, "error": self.error, "ended": self.ended}
        return {"results": results, **more, "twin": self.twin and self.twin.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Part:
        """Read what `to_json` wrote."""
        results = {rank: CallResult(**fields) for rank, fields in data["results"]}
        twin = data["twin"] and Twin.from_json(data["twin"])
        disturbed = data["disturbed"] and (data["disturbed"][0], data["disturbed"][1])
        return cls(results, disturbed, data["error"], data["ended"], twin)
