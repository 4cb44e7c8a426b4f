"""Memory that grows or stays: the `no_memory_growth` rule, what it is judged by, and its verdict.

Knows neither pytest nor torch. All figures are allocated bytes of one rank, taken with Python's automatic garbage
collection off, so that they do not depend on when it would have run:

- resting: what is there after each step. Growth per step is `slope` of it.
- retained: what is there when the last backward of a step is done. More than the control has is a finding, and so is
  what grows with the number of microbatches, as the step's peak must not either.
- freed by gc: what only a garbage collection frees. Needing one is a finding: peaks then depend on when it runs.

On the virtual GPU the same step allocates the same bytes every time, so any growth is real and the slack may be small.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from .errors import UserError
from .measurement import read_plain
from .units import format_bytes, parse_bytes
from .validation import did_you_mean, show

if TYPE_CHECKING:
    from .recipe import Recipe

MARKER = "no_memory_growth"

MIN_STEPS = 5
"""Two or three figures cannot tell a leak from buffers that are made when they are first needed."""

DEFAULT_SLACK = 4096
"""Bytes per step, per microbatch, over the control and freed by gc that are not a finding: eight of the allocator's
smallest blocks (512 bytes). Megatron keeps the reported loss of every microbatch until its step ends, one to three."""

_SHOWN_HOLDERS = 6
_KEYWORDS = ("control", "steps", "microbatches", "slack")


@dataclass(frozen=True)
class Holder:
    """Who holds some of the bytes that stayed: tensors under one name, in which each number is written as *."""

    path: str  # "decoder.layers.*.mlp.token_dispatcher.probs", or a sentence where no module holds them
    bytes: int  # as allocated, all tensors together
    count: int  # allocations
    example: str = ""  # shape and type of one of them, as in "128x4 bfloat16"
    allocated_at: str = ""  # the line that made it, as in "megatron/core/transformer/moe/router.py:123 (routing)"

    def describe(self) -> str:
        """All but the path, in one line."""
        tensors = "1 tensor" if self.count == 1 else f"{self.count} tensors"
        example = f", {'' if self.count == 1 else 'as in '}{self.example}" if self.example else ""
        made = f", made at {self.allocated_at}" if self.allocated_at else ""
        return f"{tensors}, {format_bytes(self.bytes)}{example}{made}"


@dataclass(frozen=True)
class Trace:
    """What one rank held over some steps, in allocated bytes."""

    resting: tuple[int, ...] = ()  # after each step, the first of them before the steps that count
    retained: tuple[int, ...] = ()  # when the last backward of each step is done; empty where nothing says when that is
    peak: int = 0  # over all steps that count
    freed_by_gc: int = 0  # what a garbage collection frees when the steps are done
    left: int | None = None  # of a test's body: what stays afterwards, without what its fixtures hold
    cycles: tuple[str, ...] = ()  # the classes in reference cycles that held what gc freed
    kept: tuple[Holder, ...] = ()  # of what one step's forward and backward made: alive after its last backward
    kept_freed_by_gc: int = 0  # of that
    grown: tuple[Holder, ...] = ()  # of what one step made: alive after the next step

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Read plain data, as `dataclasses.asdict` makes them."""
        return cast(Trace, read_plain(cls, data, "trace"))


FindingKind = Literal["per step", "after backward", "per microbatch", "gc", "left"]


@dataclass(frozen=True)
class Finding:
    """One way in which memory grows or stays on one rank."""

    kind: FindingKind
    rank: int
    bytes: int
    headline: str
    detail: str
    holders: tuple[Holder, ...] = ()

    def lines(self) -> Iterator[str]:
        """What was found and who holds the bytes."""
        yield f"MEMORY GROWTH: {self.headline}"
        yield f"  {self.detail}"
        for holder in self.holders[:_SHOWN_HOLDERS]:
            yield f"  held by {holder.path}"
            yield f"    {holder.describe()}"
        if len(self.holders) > _SHOWN_HOLDERS:
            rest = self.holders[_SHOWN_HOLDERS:]
            yield f"  and {format_bytes(sum(h.bytes for h in rest))} by {len(rest)} more"


def slope(figures: Sequence[int]) -> int:
    """Bytes by which the figures grow from one to the next, 0 or more.

    The mean change from the last lowest figure on, without the largest change: a single rise, such as a buffer that is
    made late, is not growth, and neither is a figure that goes up and down.
    """
    if not figures:
        return 0
    lowest = max(i for i, figure in enumerate(figures) if figure == min(figures))
    rises = sorted(b - a for a, b in zip(figures[lowest:], figures[lowest + 1 :], strict=False))[:-1]
    return sum(rises) // len(rises) if rises else 0


@dataclass(frozen=True)
class RankGrowth:
    """One rank: the run itself, its control's and those with fewer and more microbatches."""

    rank: int
    run: Trace
    coordinates: Mapping[str, int] = field(default_factory=dict)
    control: Trace | None = None
    microbatches: Mapping[int, Trace] = field(default_factory=dict)  # by their number: none, or two

    @property
    def per_step(self) -> int:
        """Growth of what rests after a step, or of what is retained after backward."""
        return max(slope(self.run.resting), slope(self.run.retained))

    @property
    def over_control(self) -> int:
        """Retained after backward beyond what the control retains; 0 without one."""
        if self.control is None or not self.run.retained or not self.control.retained:
            return 0
        return max(0, self.run.retained[-1] - self.control.retained[-1])

    @property
    def per_microbatch(self) -> int:
        """Growth of the peak, or of what is retained after backward, with each microbatch more."""
        if len(self.microbatches) < 2:
            return 0
        (few, fewer), (many, more) = sorted(self.microbatches.items())
        grown = [more.peak - fewer.peak]
        if fewer.retained and more.retained:
            grown.append(more.retained[-1] - fewer.retained[-1])
        return max(0, *grown) // (many - few)

    def findings(self, slack: int) -> Iterator[Finding]:
        """All above the slack."""

        def finding(kind: FindingKind, size: int, what: str, detail: str, holders: tuple[Holder, ...] = ()) -> Finding:
            return Finding(kind, self.rank, size, f"rank {self.rank} {what}", detail, holders)

        run = self.run
        if self.per_step > slack:
            resting = slope(run.resting) == self.per_step
            figures = run.resting if resting else run.retained
            yield finding(
                "per step",
                self.per_step,
                f"grows by {format_bytes(self.per_step)} a step",
                f"{'at rest' if resting else 'after backward'}, {len(figures) - 1} steps: "
                f"{' -> '.join(map(str, figures))} bytes",
                run.grown,
            )
        if self.over_control > slack and self.control is not None:
            yield finding(
                "after backward",
                self.over_control,
                f"keeps {format_bytes(self.over_control)} more than its control after backward",
                f"{run.retained[-1]} bytes stay when the last backward of a step is done, {self.control.retained[-1]} "
                f"in the control; a garbage collection frees {format_bytes(run.kept_freed_by_gc)} of them",
                _beyond(run.kept, self.control.kept),
            )
        if self.per_microbatch > slack:
            (few, fewer), (many, more) = sorted(self.microbatches.items())
            yield finding(
                "per microbatch",
                self.per_microbatch,
                f"takes {format_bytes(self.per_microbatch)} more with every microbatch of a step",
                f"the peak is {fewer.peak} bytes with {few} microbatches and {more.peak} with {many}",
                _beyond(more.kept, fewer.kept),
            )
        if run.freed_by_gc > slack:
            through = f" through {', '.join(run.cycles)}" if run.cycles else ""
            yield finding(
                "gc",
                run.freed_by_gc,
                f"needs a garbage collection to free {format_bytes(run.freed_by_gc)}",
                f"reference cycles{through}: the bytes stay allocated until Python's gc happens to run",
            )
        if run.left is not None and run.left > slack:
            yield finding(
                "left",
                run.left,
                f"still has {format_bytes(run.left)} that the test allocated",
                "after the test's body and a garbage collection, without what its fixtures hold",
                run.kept,
            )


def _beyond(holders: Sequence[Holder], control: Sequence[Holder]) -> tuple[Holder, ...]:
    """What is held beyond what the same holders hold in the control; most first."""
    known = {holder.path: holder for holder in control}
    none = Holder("", 0, 0)
    rest = []
    for holder in holders:
        before = known.get(holder.path, none)
        if holder.bytes > before.bytes:
            count = max(1, holder.count - before.count)
            rest.append(dataclasses.replace(holder, bytes=holder.bytes - before.bytes, count=count))
    return tuple(sorted(rest, key=lambda h: -h.bytes))


@dataclass(frozen=True, repr=False)
class Growth:
    """Whether memory grows or stays, on every rank that was run; the figures are those of the worst rank.

    `assert growth.passed, growth.explain()` fails with all that was found.
    """

    ranks: tuple[RankGrowth, ...]
    slack: int = DEFAULT_SLACK
    name: str = ""  # of the measurement or the watched step

    @property
    def per_step(self) -> int:
        """Bytes by which resting memory, or what is retained after backward, grows with every step."""
        return max((r.per_step for r in self.ranks), default=0)

    @property
    def over_control(self) -> int:
        """Bytes that stay after backward beyond those that stay in the control."""
        return max((r.over_control for r in self.ranks), default=0)

    @property
    def per_microbatch(self) -> int:
        """Bytes by which the peak, or what is retained after backward, grows with every microbatch of a step."""
        return max((r.per_microbatch for r in self.ranks), default=0)

    @property
    def freed_by_gc(self) -> int:
        """Bytes that only a garbage collection frees."""
        return max((r.run.freed_by_gc for r in self.ranks), default=0)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All above the slack, rank by rank."""
        return tuple(finding for rank in self.ranks for finding in rank.findings(self.slack))

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def headline(self) -> str:
        """The largest finding in one sentence, or that there is none."""
        if self.passed:
            return f"no memory growth{self._of()} (slack {format_bytes(self.slack)})"
        return f"memory growth{self._of()}: {max(self.findings, key=lambda f: f.bytes).headline}"

    def explain(self) -> str:
        """What was found, the largest first, with who holds it; or in one sentence that nothing was."""
        if self.passed:
            return self.headline()
        lines: list[str] = []
        for finding in sorted(self.findings, key=lambda f: -f.bytes):
            lines += [*finding.lines(), ""]
        what = f"{self._of().strip()}, " if self.name else ""
        return "\n".join([*lines, f"{what}slack {format_bytes(self.slack)}"])

    def summary(self) -> GrowthSummary:
        """What reports say of it."""
        largest_first = tuple(sorted(self.findings, key=lambda f: -f.bytes))
        figures = (self.per_step, self.over_control, self.per_microbatch, self.freed_by_gc)
        return GrowthSummary(self.name, self.passed, self.headline(), self.slack, *figures, largest_first)

    def __repr__(self) -> str:
        return f"<Growth: {self.headline()}>"

    def _of(self) -> str:
        return f" of {self.name!r}" if self.name else ""


@dataclass(frozen=True)
class GrowthSummary:
    """The verdict of a `no_memory_growth` marker and its figures in bytes, for reports."""

    name: str  # of the measurement or the watched step
    passed: bool
    headline: str
    slack: int
    per_step: int
    over_control: int
    per_microbatch: int
    freed_by_gc: int
    findings: tuple[Finding, ...] = ()  # the largest first

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> GrowthSummary:
        """Read what `to_json` wrote. Raises `UserError` naming `source` for anything else."""
        return cast(GrowthSummary, read_plain(cls, data, source))


@dataclass(frozen=True)
class GrowthRule:
    """The rule of a `no_memory_growth` marker."""

    steps: int = MIN_STEPS
    slack: int = DEFAULT_SLACK
    control: Recipe | Mapping[str, object] | None = None
    """A recipe, or the settings that it has instead of the one that is run. None: that one without recompute and
    activation offload, where it has any."""
    microbatches: tuple[int, int] | None = None
    """Two numbers of microbatches a step that are compared. None: see `microbatch_pair`."""
    given: frozenset[str] = frozenset()  # the arguments that were named

    @classmethod
    def make(
        cls,
        arguments: Mapping[str, object],
        where: str,
        as_control: Callable[[Any], Recipe | Mapping[str, object]] | None = None,
    ) -> GrowthRule:
        """Check arguments; None stands for one that is not given. Raises `UserError` with `where` in front.

        `as_control` makes a recipe, or changes of one, of what `control` may be.
        """
        for name in arguments:
            if name not in _KEYWORDS:
                hint = did_you_mean(name, _KEYWORDS)
                raise UserError(f"{where}() has no argument {name!r}; {hint}allowed: {', '.join(_KEYWORDS)}")
        given = {name: value for name, value in arguments.items() if value is not None}
        steps = given.get("steps", MIN_STEPS)
        if type(steps) is not int or not MIN_STEPS <= steps <= 1000:
            raise UserError(f"{where}(steps=...): {show(steps)} is not a whole number from {MIN_STEPS} to 1000")
        slack = parse_bytes(given.get("slack", DEFAULT_SLACK), f"{where}(slack=...)")
        control = as_control(given["control"]) if as_control and "control" in given else None
        pair = _pair(given["microbatches"], where) if "microbatches" in given else None
        return cls(steps, slack, control, pair, frozenset(given))

    @classmethod
    def from_marker(
        cls,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        source: str,
        as_control: Callable[[Any], Recipe | Mapping[str, object]],
    ) -> GrowthRule:
        """The rule that a marker's arguments describe; `source` is the test's node id."""
        if args:
            raise UserError(f"{source}: {MARKER}() takes no positional argument; name it: {', '.join(_KEYWORDS)}")
        return cls.make(kwargs, f"{source}: {MARKER}", as_control)

    def check_in_worker(self, source: str) -> None:
        """Raise `UserError` for arguments that need recipes, where the whole test is measured instead."""
        needless = sorted(self.given - {"slack"})
        if needless:
            raise UserError(
                f"{source}: {MARKER}({needless[0]}=...) is about recipes that the test measures with mbmem; "
                "here the whole test is measured, in which pytest_mbmem.growth.watch() takes steps and microbatches"
            )


def _pair(value: object, where: str) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair) or pair[0] >= pair[1]:
        raise UserError(
            f"{where}(microbatches=...): {show(value)} is not two whole numbers, 1 or more, the smaller one first, "
            "as in (4, 16)"
        )
    return cast("tuple[int, int]", pair)


WATCHED: list[Growth] = []
"""What `watch` saw in this process; a marked test takes its own out when it ends."""


def watch(
    step: Callable[..., object],
    *,
    steps: int = MIN_STEPS,
    slack: int | str = DEFAULT_SLACK,
    modules: Any = None,
    microbatches: tuple[int, int] | None = None,
    name: str = "",
) -> Growth:
    """Call a training step again and again and see what stays, in a test that runs in a worker.

    With the marker `no_memory_growth` the test fails by what is found; without it, look at the result.

    Args:
        step: does one whole step: forward, backward, optimizer.
        steps: how many of them count, 5 or more. Two run before, and a few afterwards where there are holders to name.
        slack: bytes per step, per microbatch and freed by gc that are not a finding, or text as in "1 MiB".
        modules: where to look for holders first: a module, a model of `megatron_model`, or a mapping of names to any
            objects.
        microbatches: two numbers of microbatches, the smaller first, to compare: `step` is called with the number.
        name: for messages.

    Raises:
        UserError: for wrong arguments, or in a test that does not run in a worker.
    """
    item = sys.modules.get("pytest_mbmem.item")
    if item is None or item.WORKER is None:
        raise UserError(
            "growth.watch() needs the device of a worker: give the test the marker no_memory_growth or peak_memory, or "
            "the fixture megatron_model"
        )
    from .measure.retention import watch as watch_in_worker

    rule = GrowthRule.make({"steps": steps, "slack": slack, "microbatches": microbatches}, "growth.watch")
    run, by_number = watch_in_worker(step, rule.steps, modules, rule.microbatches)
    growth = Growth((RankGrowth(item.WORKER.rank, run, microbatches=by_number),), rule.slack, name)
    WATCHED.append(growth)
    return growth


_NO_SAVING: Mapping[str, Any] = {
    "recompute_granularity": None,
    "recompute_modules": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "distribute_saved_activations": False,
    "cpu_offloading": False,
    "cpu_offloading_num_layers": None,
    "cpu_offloading_weights": False,
    "cpu_offloading_activations": True,
    "offload_modules": (),
}
"""Memory settings after which nothing more may stay behind than without them."""


def default_control(recipe: Recipe) -> Recipe | None:
    """The recipe without recompute and activation offload; None for one that has neither."""
    plain = recipe.but(**_NO_SAVING)
    return None if plain.digest == recipe.digest else plain


def with_microbatches(recipe: Recipe, number: int) -> Recipe:
    """The recipe with that many microbatches a step."""
    return recipe.but(global_batch_size=number * recipe.training.micro_batch_size * recipe.parallelism.dp)


def microbatch_pair(recipe: Recipe) -> tuple[int, int]:
    """Two numbers of microbatches between which memory may not differ, whatever the pipeline's schedule.

    A stage has as many microbatches in flight as there are stages after it, with interleaving up to twice as many and
    some for the other chunks; more of them wait. The smaller number is enough to fill all stages.
    """
    parallelism = recipe.parallelism
    in_flight = 2 * parallelism.pp * (2 if parallelism.vpp else 1)
    rounds = -(-max(recipe.num_microbatches, in_flight) // parallelism.pp)
    few = rounds * parallelism.pp  # interleaving takes multiples of the stages
    return few, 2 * few
