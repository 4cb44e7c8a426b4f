"""The conditions of the catalogue: Python expressions without loops, attributes or calls but of the functions below."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import CodeType
from typing import Any

from packaging.version import InvalidVersion, Version

from ..errors import UserError
from ..validation import did_you_mean


def as_list(value: Any) -> list[Any]:
    """None: nothing; a text: its parts between commas; a list as it is; any other value: a list of it alone."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def is_number(value: Any) -> bool:
    """Whether it is one, as true and false are in Python."""
    return isinstance(value, int | float)


def is_text(value: Any) -> bool:
    """Whether it is one, and no list."""
    return isinstance(value, str)


def any_of(some: Collection[Any], others: Collection[Any]) -> bool:
    """Whether the two share an element."""
    return any(one in others for one in some)


def all_of(some: Collection[Any], others: Collection[Any]) -> bool:
    """Whether each of the first is among the second."""
    return all(one in others for one in some)


def all_divisible(numbers: Collection[int], by: int) -> bool:
    """Whether each is a multiple of it."""
    return all(number % by == 0 for number in numbers)


def largest(numbers: Collection[int]) -> int:
    """The largest of some numbers; 0 for none."""
    return max(numbers, default=0)


def first(numbers: Sequence[int]) -> int:
    """The first of some numbers; 0 for none."""
    return numbers[0] if numbers else 0


def older(version: str, than: str) -> bool:
    """Whether a package is not installed (no version), or has a version below the second one."""
    return not version or Version(version) < Version(than)


def layout_stages(layout: Any) -> int:
    """Stages of a pipeline layout, Megatron's text ("Ett|(tt|)*2,L") or a list of one list for each stage."""
    return len(_stages(layout))


def layout_layers(layout: Any, kind: str) -> int:
    """Layers of a pipeline layout of kind "t" (transformer) or "m" (multi-token prediction)."""
    return sum(stage_layers(layout, kind))


def stage_layers(layout: Any, kind: str) -> list[int]:
    """How many layers of that kind each stage of a pipeline layout has."""
    names = (kind, {"t": "decoder", "m": "mtp"}[kind])
    return [sum(layer in names for layer in stage) for stage in _stages(layout)]


def _stages(layout: Any) -> Sequence[Sequence[str]]:
    if not isinstance(layout, str):
        return [[layer.strip().lower() for layer in stage] for stage in layout]
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):  # in Megatron's order
        text = re.sub(repeated, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(len, as_list, is_number, is_text, any_of, all_of, all_divisible, largest, first, older),
    *(layout_stages, layout_layers, stage_layers),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}

_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.IfExp),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod),
    *(ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot),
    *(ast.Name, ast.Load, ast.Constant, ast.List, ast.Tuple, ast.Call),
)


class Expression:
    """A condition over settings.

    Args:
        text: as the catalogue has it.
        known: the names that it may read.
        where: of the text, for messages.

    Raises `UserError` for a text that is no such expression, for a name that is not known, and for a call with too
    few or too many arguments, or of `older` without a version.
    """

    def __init__(self, text: object, known: Collection[str], where: str) -> None:
        if not isinstance(text, str):
            raise UserError(f"{where}: {text!r} is not an expression")
        self.text = text
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"{where}: {text!r} is not an expression: {error}") from None
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Call) and node.keywords):
                raise UserError(f"{where}: {text!r}: {type(node).__name__} is not possible in an expression")
            if isinstance(node, ast.Call):
                if not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
                    raise UserError(f"{where}: {text!r} calls something else than {', '.join(FUNCTIONS)}")
                if problem := _problem(node.func.id, node.args):
                    raise UserError(f"{where}: {text!r}: {problem}")
        self.names = tuple(dict.fromkeys(node.id for node in names if id(node) not in called))
        for name in self.names:
            if name not in known:
                raise UserError(f"{where}: unknown setting {name!r}; {did_you_mean(name, list(known))}".rstrip("; "))
        self._code: CodeType = compile(tree, where, "eval")

    def value(self, names: Mapping[str, Any]) -> Any:
        """What it comes to. Raises what Python raises for values of the wrong kind."""
        return eval(self._code, {"__builtins__": {}, **FUNCTIONS}, names)  # of the nodes above alone

    def holds(self, names: Mapping[str, Any]) -> bool:
        """Whether it is true. One that cannot be evaluated for values of the wrong kind is not."""
        try:
            return bool(self.value(names))
        except (TypeError, ValueError, AttributeError, ZeroDivisionError):
            return False


def _problem(name: str, arguments: list[ast.expr]) -> str:
    """What is wrong with the call of a function; "" if nothing is."""
    needed = len(inspect.signature(FUNCTIONS[name]).parameters)
    if len(arguments) != needed:
        return f"{name} takes {needed} argument{'s' * (needed != 1)}, not {len(arguments)}"
    if name != "older":
        return ""
    version = getattr(arguments[1], "value", None)
    try:
        Version(version if isinstance(version, str) else "")
    except InvalidVersion:
        return f'{ast.unparse(arguments[1])} is not a version, as in older(torch, "2.6")'
    return ""
