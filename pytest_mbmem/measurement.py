"""The result of a run: integer bytes per rank, step and phase; JSON in and out.

The shared vocabulary of the worker that measures and of the gates, baselines and reports that judge. Imports neither
torch nor pytest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from .errors import NotOnHost, UserError
from .oom import Shortage
from .validation import show

Metric = Literal["allocated", "reserved", "active", "inactive_split"]
METRICS: tuple[Metric, ...] = typing.get_args(Metric)
"""PyTorch's names: live bytes / bytes the caching allocator holds / live or waiting for a stream / free in a split
block."""

PHASES = ("build", "forward", "backward", "grad-sync", "optimizer", "test")
"""In the order of a step. "build" belongs to step 0, "test" is the whole body of a test without a recipe."""

Category = Literal[
    "parameters",
    "gradients",
    "main gradients",
    "optimizer state",
    "buffers",
    "activations",
    "logits",
    "communication buffers",
    "workspaces",
    "temporaries",
    "rounding",
    "unattributed",
]
CATEGORIES: tuple[Category, ...] = typing.get_args(Category)
"""What device memory is held for (see `history.owners` for how each is told). Gradients: of parameters, as autograd
makes them; main gradients: the buffers that they are added up in. Optimizer state includes fp32 main parameters.
Buffers: what modules keep besides parameters. Rounding: what the allocator hands out beyond the bytes asked for."""

FailureKind = Literal[
    "out of memory",
    "error",
    "died",
    "timeout",
    "lost peer",
    "disturbed",
    "refused",
    "no effect",
    "unanswered read",
    "not finite",
    "skipped step",
]
"""Lost peer: ended because another rank of its job did. Disturbed: something else used the GPU, so no figure can be
trusted. Refused: Megatron Core or PyTorch does not take the settings. No effect: a setting that was asked for changed
nothing. Unanswered read: the host read from a virtual GPU what a kernel would have computed. Not finite, skipped step:
of runs whose numbers are real."""

Mode = Literal["solo", "joint"]
"""Solo: each rank alone, and nobody answers its collectives. Joint: all ranks of the job at once, as in training."""

SCHEMA = 1
"""Version of the JSON form; a file with another one is refused."""


@dataclass(frozen=True)
class PhaseFigures:
    """What one rank held during one phase of one step, in bytes.

    A phase that comes several times in a step (forward and backward of each microbatch) is folded: the peak is the
    highest of them, the resting figure the last one.
    """

    step: int  # 1 is the first training step; 0 is what comes before it
    phase: str
    peak: Mapping[Metric, int]
    resting: Mapping[Metric, int]

    @property
    def name(self) -> str:
        """Step and phase as reports and baselines write them: "step-2/backward", "build", "test"."""
        return place(self.step, self.phase)


@dataclass(frozen=True)
class Owner:
    """Who holds device memory, with each number in a module's name written as *."""

    category: Category
    module: str = ""  # "decoder.layers.*.mlp.linear_fc1"; empty where none was running
    line: str = ""  # that allocated, as in "megatron/core/tensor_parallel/layers.py:744 (forward)"; empty: not Python
    modules: int = 1  # that are folded into the name
    phase: str = ""  # in which it was allocated, as in `PHASES`; empty where that is not known


@dataclass(frozen=True)
class Composition:
    """What a rank's allocated bytes were made of, from the allocator's own history."""

    owners: tuple[Owner, ...]
    at_peaks: tuple[tuple[int, ...], ...]  # for each of the rank's `phases`, at its peak: bytes by owner
    timeline: tuple[tuple[int, ...], ...] = ()  # in time: the index of a phase, and the bytes by `CATEGORIES`

    def at(self, phase: int) -> dict[Owner, int]:
        """Bytes by owner at the peak of the phase with this index, the largest first."""
        held = {owner: size for owner, size in zip(self.owners, self.at_peaks[phase], strict=True) if size}
        return dict(sorted(held.items(), key=lambda pair: -pair[1]))

    def categories(self, phase: int) -> dict[Category, int]:
        """Bytes by category at the peak of the phase with this index."""
        found: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for owner, size in self.at(phase).items():
            found[owner.category] += size
        return found


@dataclass(frozen=True)
class SegmentMap:
    """A segment of PyTorch's caching allocator and what lay in it, in the order of addresses."""

    size: int  # bytes
    small: bool  # of the pool for requests of up to 1 MiB
    blocks: tuple[tuple[int, int], ...]  # bytes, and an index into `CATEGORIES`; -1: free. They add up to `size`


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapters of one kind on a rank: whether their input is gathered again in backward, and if not, why."""

    target: str  # "linear_qkv", ...
    count: int  # adapters of this kind for which the same holds
    regather_requested: bool
    regather_effective: bool
    reason: str = ""  # why a request has no effect


@dataclass(frozen=True)
class Effect:
    """A memory setting that was asked for, and whether anything in a rank's built model acts on it."""

    setting: str  # as verdicts name it: "memory.recompute_modules 'moe'"
    effective: bool
    acting: int  # modules that do; of full recompute and of offload by layers the layers, of the optimizer parameters
    reason: str = ""  # why it is not effective; of one that is, what can keep it from changing anything all the same


@dataclass(frozen=True)
class RankMeasurement:
    """One measured rank."""

    rank: int
    coordinates: Mapping[str, int]  # {"tp": 0, "cp": 0, "dp": 0, "pp": 1}; empty for a test
    stands_for: int  # how many ranks of the job it represents, this one included (see measure.ranks)
    phases: tuple[PhaseFigures, ...]
    retained_after_backward: tuple[int, ...] = ()  # allocated bytes when the last backward of each step is done
    allocation_retries: int = 0  # cudaMalloc failed and the cache was emptied
    largest_allocation: int | None = None  # bytes of the largest single request; None without `composition`
    largest_owner: Owner | None = None  # whose it is
    flops_per_step: int | None = None  # matrix-multiplication and attention FLOPs, counted in a run of their own
    collective_bytes: Mapping[str, int] = field(
        default_factory=dict
    )  # per step, by process group (see measure.counting)
    allocations: int | None = None  # calls for memory up to the end of step 1: a setting that changes nothing keeps it
    moved_in_step_1: int | None = None  # bytes to the host, for the same comparison
    host_peak: int | None = None  # bytes of pinned host memory at their highest
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # of the last step: "to host", "to device"
    adapters: tuple[Adapter, ...] = ()
    effects: tuple[Effect, ...] = field(default=(), compare=False)  # of equal figures, how they were asked for
    composition: Composition | None = None  # None where this torch's allocator does not tell owners
    segments: int | None = None  # that the caching allocator held at most at a time
    segments_at_peak: tuple[SegmentMap, ...] = ()  # when allocated bytes were at their highest; small blocks are joined
    outside: Mapping[str, int] = field(default_factory=dict)  # bytes of the device beside PyTorch's (see `outside`)
    # What only a real GPU has:
    device_used: int | None = None  # most bytes that NVML says are gone since before the process began, between phases
    cold_step: float | None = None  # seconds of the first step, which is recorded as well (see measure.recording)
    step_times: tuple[float, ...] = ()  # seconds of each timed step, after warm-up
    model_flops: int | None = None  # as `flops_per_step`, without what recompute repeats
    losses: tuple[float | None, ...] = ()  # mean of each step on the rank that has it; None: not finite
    skipped_steps: int | None = None  # in which the optimizer left the parameters as they were

    def peak(self, metric: Metric = "allocated", phase: str | None = None) -> int:
        """Highest bytes over all phases, or over those that `phase` selects (see `selects`)."""
        return self.peak_phase(metric, phase).peak[metric]

    def peak_phase(self, metric: Metric = "allocated", phase: str | None = None) -> PhaseFigures:
        """The first phase in which the peak is reached."""
        chosen = [p for p in self.phases if selects(phase, p)]
        if not chosen:
            have = ", ".join(dict.fromkeys(p.name for p in self.phases))
            raise UserError(f"phase={phase!r} selects nothing that rank {self.rank} went through; it has: {have}")
        if not all(metric in p.peak for p in chosen):
            raise UserError(f"metric={metric!r} was not measured on rank {self.rank}")
        return max(chosen, key=lambda p: p.peak[metric])

    def owners(self, phase: str | None = None) -> dict[Owner, int]:
        """Who holds the bytes of the allocated peak, over all phases or those that `phase` selects, the largest first.

        Empty where the allocator did not tell owners.
        """
        if self.composition is None:
            return {}
        peak = self.peak_phase("allocated", phase)
        return self.composition.at(next(i for i, figures in enumerate(self.phases) if figures is peak))

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "rank") -> RankMeasurement:
        """Read plain data. Raises `UserError` naming `source` and the place where they are not of this form."""
        return cast(RankMeasurement, read_plain(cls, data, source))


@dataclass(frozen=True)
class HostStep:
    """What came out of one training step with real numbers on the host, over all ranks."""

    loss: float | None  # mean over all tokens; None: not finite
    grad_norm: float | None  # before clipping; None: not finite, or the optimizer does not ask for it
    skipped: bool  # the optimizer left the parameters as they were, on some rank
    not_finite: str = ""  # what first held NaN or infinity: "the loss", "the gradient of ...", "parameter ..."


@dataclass(frozen=True)
class Device:
    """What was measured on. `key` names the baseline folder; a virtual and a real GPU never share one."""

    key: str  # "virtual-h100-80gb"
    name: str  # "NVIDIA H100 80GB HBM3"
    capacity: int  # bytes
    virtual: bool


@dataclass(frozen=True)
class Failure:
    """Why a measurement has no result."""

    kind: FailureKind
    rank: int
    message: str  # complete text: PyTorch's out-of-memory message, a traceback, or what the launcher saw
    step: int | None = None
    phase: str | None = None
    shortage: Shortage | None = None  # of "out of memory", where PyTorch's allocator had none left

    @property
    def name(self) -> str | None:
        """Step and phase as in `PhaseFigures.name`, as far as they are known."""
        if self.step is None or self.phase is None:
            return self.phase if self.step is None else step_name(self.step)
        return place(self.step, self.phase)


@dataclass(frozen=True)
class Measurement:
    """All measured ranks of one recipe (or of one test without a recipe) on one device."""

    device: Device
    ranks: tuple[RankMeasurement, ...]
    recipe: Mapping[str, Any] | None = None  # as in the recipe's YAML; None for a test without a recipe
    recipe_digest: str | None = None
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # versions of torch, megatron-core, ..., settings
    assumptions: tuple[str, ...] = ()  # stated values that kernels would have computed, and stand-ins used
    notes: tuple[str, ...] = ()  # what a reader must know to trust the figures; shown beside every verdict
    failure: Failure | None = None  # ranks that finished before it are kept
    steps: tuple[HostStep, ...] = ()  # of a host run, which measures no memory and so has no ranks
    mode: Mode = "solo"
    twin: Measurement | None = None  # of a real GPU's: the same recipe and ranks on a virtual GPU like it
    logs: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """What workers printed, by what they did ("rank0"). Stays in the process that measured: it is not in the JSON."""

    def worst(self, metric: Metric = "allocated", phase: str | None = None) -> RankMeasurement:
        """The measured rank with the highest peak; the lowest rank number among equals."""
        if self.steps:
            raise NotOnHost(f"host: memory is not measured, and the test asks for a peak of {metric} bytes")
        if not self.ranks:
            raise UserError("a measurement without a measured rank has no peak")
        return max(self.ranks, key=lambda r: (r.peak(metric, phase), -r.rank))

    def peak(self, metric: Metric = "allocated", phase: str | None = None) -> int:
        """Peak bytes of the worst rank."""
        return self.worst(metric, phase).peak(metric, phase)

    @property
    def can_be_explained(self) -> bool:
        """Whether it ran out of memory in a way that a launcher's `explain` can say more of."""
        return self.failure is not None and self.failure.shortage is not None and self.recipe is not None

    @property
    def flops_per_step(self) -> int | None:
        """FLOPs of the rank that computes most."""
        counted = [r.flops_per_step for r in self.ranks if r.flops_per_step is not None]
        return max(counted) if counted else None

    def to_json(self) -> dict[str, Any]:
        """Plain data that `json.dumps` takes and `from_json` reads back."""
        return {"schema": SCHEMA, **_without_logs(as_plain(self))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str = "measurement") -> Measurement:
        """Read what `to_json` wrote. Raises `UserError` naming `source` when the data is not that."""
        found = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
        if type(found) is not int or found != SCHEMA:
            raise UserError(f"{source}: not a measurement of schema {SCHEMA} (found {show(found)})")
        return cast(Measurement, read_plain(cls, {k: v for k, v in data.items() if k != "schema"}, source))

    @classmethod
    def load(cls, path: Path) -> Measurement:
        """Read one measurement from a JSON file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read as JSON ({error})") from None
        return cls.from_json(data, str(path))


def _without_logs(measurement: dict[str, Any]) -> dict[str, Any]:
    del measurement["logs"]
    if measurement["twin"] is not None:
        _without_logs(measurement["twin"])
    return measurement


def step_name(step: int) -> str:
    """The name of a step in reports and in `phase=`: "build", "step-1", "step-2", "steady" (step 3 and later)."""
    return {0: "build", 1: "step-1", 2: "step-2"}.get(step, "steady")


def place(step: int, phase: str) -> str:
    """The name of a phase of a step. "build" and "test" are no part of a step and stand alone."""
    return phase if phase in ("build", "test") else f"{step_name(step)}/{phase}"


def selects(phase: str | None, figures: PhaseFigures) -> bool:
    """Whether the selector names these figures: None (all), a phase, a step name, or "step/phase"."""
    if phase is None:
        return True
    if figures.phase == "test":  # no part of a step
        return phase == "test"
    step, slash, name = phase.partition("/")
    if slash:
        return step == step_name(figures.step) and name == figures.phase
    return phase in (figures.phase, step_name(figures.step))


def check_phase(phase: str, source: str) -> None:
    """Raise `UserError` if the selector can name nothing."""
    steps = ("step-1", "step-2", "steady")
    step, slash, name = phase.partition("/")
    of_a_step = [p for p in PHASES if place(1, p) != p]
    if (slash and step in steps and name in of_a_step) or (not slash and phase in (*PHASES, *steps)):
        return
    allowed = ", ".join((*PHASES, *steps))
    raise UserError(f"{source}: phase={phase!r} is not one of {allowed}, or a step and a phase as in 'step-2/backward'")


@functools.cache
def _fields(cls: type) -> dict[str, tuple[Any, bool]]:
    """Name of each field -> its type, and whether it has a default."""
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is not missing or f.default_factory is not missing)
        for f in dataclasses.fields(cls)
    }


def as_plain(value: Any) -> Any:
    """Data that `read_plain` takes, with every dataclass in it as a dict; as `dataclasses.asdict`, and much faster."""
    if isinstance(value, tuple):
        return value if all(type(part) is int for part in value) else tuple(as_plain(part) for part in value)
    if isinstance(value, Mapping):
        return {key: as_plain(part) for key, part in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def read_plain(hint: Any, value: Any, where: str) -> Any:
    """Plain data as the type that a dataclass's field has; `where` is the path to the value, for messages.

    Raises `UserError` for data of another form.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is types.UnionType:  # "X | None" is the only one in use
        return None if value is None else read_plain(arguments[0], value, where)
    if origin is Literal:
        if isinstance(value, str) and value in arguments:
            return value
        raise UserError(f"{where}: {show(value)} is not one of {', '.join(arguments)}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            if arguments[0] is int and all(
                type(part) is int and -MOST < part < MOST for part in value
            ):  # thousands of them
                return tuple(value)
            return tuple(read_plain(arguments[0], part, f"{where}[{index}]") for index, part in enumerate(value))
        raise UserError(f"{where}: {show(value)} is not a list")
    if origin is not None or dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: {show(value)} is not an object")
        if origin is not None:
            return {
                read_plain(arguments[0], key, f"{where}: a key"): read_plain(arguments[1], part, f"{where}.{key}")
                for key, part in value.items()
            }
        fields = _fields(hint)
        for key in value:
            if key not in fields:
                raise UserError(f"{where}: unknown key {show(key)}; allowed: {', '.join(fields)}")
        for key, (_, optional) in fields.items():
            if key not in value and not optional:
                raise UserError(f"{where}: the key {key!r} is missing")
        return hint(**{key: read_plain(fields[key][0], part, f"{where}.{key}") for key, part in value.items()})
    if hint is float and type(value) is int and abs(value) < MOST:  # some programs rewrite 0.0 as 0
        return float(value)
    # exactly: True is not 1, and NaN is no number
    if type(value) is hint and value == value and (hint is not int or abs(value) < MOST):
        return value
    raise UserError(f"{where}: {show(value)} is not {_NAMES[hint]}")


MOST = 10**30
"""No count of bytes, FLOPs or nanoseconds is as high."""

_NAMES = {int: "a whole number of 30 digits or less", float: "a number", str: "a text", bool: "true or false"}
