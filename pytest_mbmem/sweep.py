"""Several settings of one recipe against one control: a table, and the rows that nothing in it beats.

Knows neither pytest nor torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compare import Comparison, Costs, matched
from .errors import UserError
from .gates import GatedMetric
from .measurement import Measurement, read_plain
from .recipe import Recipe
from .savings import changed, changes_label, settings_of
from .validation import show

CONTROL = "control"
"""Name of the control where it is none of the settings: the recipe itself."""


@dataclass(frozen=True)
class Row:
    """One setting of a sweep; of the control, `comparison` is None."""

    name: str
    measurement: Measurement
    comparison: Comparison | None
    unbeaten: bool = False
    """No other row has nowhere higher and somewhere lower costs (see `beats`). Rows without figures and rows without
    effect take no part."""

    @property
    def verdict(self) -> str:
        """The comparison's verdict; of the control "control", or why it did not run."""
        if self.comparison is not None:
            return self.comparison.verdict
        failure = self.measurement.failure
        return CONTROL if failure is None else failure.kind

    @property
    def ran(self) -> bool:
        """Whether there are figures."""
        return self.measurement.failure is None and bool(self.measurement.ranks)

    def explain(self) -> str:
        """The comparison in one or two sentences."""
        return self.comparison.explain() if self.comparison is not None else f"{self.name}: {self.verdict}"


@dataclass(frozen=True)
class Sweep:
    """What `mbmem.sweep` measured; print it for the table.

    Iterating gives the rows of the settings, `sweep["name"]` one of them or the control.
    """

    control: Row
    rows: tuple[Row, ...]
    metric: GatedMetric = "allocated"
    phase: str | None = None
    name: str | None = None

    @classmethod
    def of(
        cls,
        control: tuple[str, Measurement],
        candidates: Sequence[tuple[str, Measurement, Mapping[str, tuple[Any, Any]]]],
        metric: GatedMetric,
        phase: str | None,
        name: str | None,
    ) -> Sweep:
        """Of measurements by name, each candidate with its differences from the control."""
        rows = [Row(*control, None)]
        rows += [Row(n, m, Comparison(control[1], m, diff, metric, phase)) for n, m, diff in candidates]
        taking_part = {row.name: cost_figures(row, metric, phase) for row in rows if _takes_part(row)}
        unbeaten = {
            name
            for name, costs in taking_part.items()
            if not any(beats(other, costs) for other in taking_part.values())
        }
        first, *rest = (Row(r.name, r.measurement, r.comparison, r.name in unbeaten) for r in rows)
        return cls(first, tuple(rest), metric, phase, name)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        for row in (*self.rows, self.control):
            if row.name == name:
                return row
        raise KeyError(f"{name!r} is no row of the sweep; there are {', '.join(row.name for row in self.rows)}")

    @property
    def best(self) -> tuple[Row, ...]:
        """The rows that nothing beats, perhaps the control among them; lowest peak first."""
        rows = [row for row in (self.control, *self.rows) if row.unbeaten]
        return tuple(sorted(rows, key=lambda row: row.measurement.peak(self.metric, self.phase)))

    def __str__(self) -> str:
        from .report.comparisons import sweep_lines

        return "\n".join(sweep_lines(self))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "metric": self.metric,
            "phase": self.phase,
            "control": {
                "name": self.control.name,
                "unbeaten": self.control.unbeaten,
                "measurement": self.control.measurement.to_json(),
            },
            "rows": [
                {
                    "name": row.name,
                    "unbeaten": row.unbeaten,
                    "comparison": row.comparison and row.comparison.to_json(),
                    "measurement": row.measurement.to_json(),
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> Sweep:
        """Read what `to_json` wrote; which rows are unbeaten follows from the figures."""
        metric = read_plain(GatedMetric, data["metric"], f"{source}: metric")
        phase = read_plain(str | None, data["phase"], f"{source}: phase")
        name = read_plain(str | None, data["name"], f"{source}: name")
        control = Measurement.from_json(data["control"]["measurement"], f"{source}: control")
        candidates = []
        for row in data["rows"]:
            label = read_plain(str, row["name"], f"{source}: the name of a row")
            measurement = Measurement.from_json(row["measurement"], f"{source}: {label}")
            comparison = Comparison.from_json(row["comparison"], control, measurement, f"{source}: {label}")
            candidates.append((label, measurement, comparison.differences))
        first = read_plain(str, data["control"]["name"], f"{source}: the control's name")
        return cls.of((first, control), candidates, metric, phase, name)


def _takes_part(row: Row) -> bool:
    """A row without a figure has nothing to compare, and one without effect is the control once more."""
    return row.ran and row.verdict in (CONTROL, "saving", "costs more", "fits")


def cost_figures(row: Row, metric: GatedMetric, phase: str | None) -> tuple[int | None, ...]:
    """What counts when rows are compared: peak of the worst rank, FLOPs, collective and moved bytes, host memory.

    FLOPs, bytes and host memory are a step's, on the rank where they are highest. None is a figure that is not known.
    """
    costs = Costs.of(row.measurement)
    return (
        row.measurement.peak(metric, phase),
        costs.flops,
        sum(costs.collective_bytes.values()),
        sum(costs.moved_bytes.values()),
        costs.host_peak,
    )


def beats(one: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether `one` is nowhere higher than `other` and somewhere lower. An unknown figure only equals another one."""
    lower = False
    for a, b in zip(one, other, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a > b:
            return False
        else:
            lower |= a < b
    return lower


def named_settings(settings: object, source: str) -> dict[str, Mapping[str, object]]:
    """Name -> changes for `Recipe.but`, of a mapping of these, or of a list of changes that name themselves.

    Raises `UserError`, with `source` in front, for anything else, and where two have the same name.
    """
    if isinstance(settings, Mapping):
        pairs = list(settings.items())
    elif isinstance(settings, (list, tuple)):
        pairs = [(changes_label(c) if isinstance(c, Mapping) else "", c) for c in settings]
    else:
        pairs = []
    if not pairs:
        raise UserError(
            f"{source}: {show(settings)} are no settings; allowed are a mapping of names to changes, as in "
            '{"core_attn": {"recompute_granularity": "selective"}}, or a list of changes'
        )
    named: dict[str, Mapping[str, object]] = {}
    for name, changes in pairs:
        if not isinstance(changes, Mapping):
            raise UserError(f"{source}: {show(changes)} is not a mapping of settings to values")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise UserError(f"{source}: the name {show(name)} is not a text on one line")
        if name in named:
            raise UserError(f"{source}: two settings are named {name!r}")
        named[name] = changes
    return named


def recipes_of(
    recipe: Recipe, named: Mapping[str, Mapping[str, object]], control: str | None, source: str
) -> tuple[tuple[str, Recipe], dict[str, tuple[Recipe, dict[str, tuple[Any, Any]]]]]:
    """The control by name, and each other setting's recipe with its differences from it.

    Raises `UserError`, with `source` in front, for an impossible setting, an unknown control, and for two settings that
    are the same recipe.
    """
    if control is not None and control not in named:
        raise UserError(f"{source}: control={show(control)} is none of the settings: {', '.join(named)}")
    if control is None and CONTROL in named:
        raise UserError(f"{source}: a setting is named {CONTROL!r}; write control={CONTROL!r} to make it the control")
    made = {name: changed(recipe, changes, f"{source}: {name}") for name, changes in named.items()}
    first = (CONTROL, recipe) if control is None else (control, made.pop(control))
    of_control = () if control is None else settings_of(named[control])
    others: dict[str, tuple[Recipe, dict[str, tuple[Any, Any]]]] = {}
    for name, other in made.items():
        others[name] = other, matched(first[1], other, (*of_control, *settings_of(named[name])), f"{source}: {name}")
        same = next((n for n, (recipe, _) in others.items() if n != name and recipe.digest == other.digest), None)
        if same is not None:
            raise UserError(f"{source}: {same} and {name} are the same recipe")
    return first, others
