"""Dataclasses whose values are checked against their type hints, with messages a person can act on."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from .errors import UserError

_INT_MAX = 2**63 - 1  # the largest size that torch can hold


class BadKey(UserError):
    """A wrong value at a dotted key. Who knows the file and the line puts them in front."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


class Part:
    """A frozen dataclass whose fields are checked against their type hints when it is made.

    The hints it may use: int (1 or more), str (printable), bool, `Annotated[float, Allowed(...)]` and likewise of int,
    Literal, Mapping[str, str], Mapping[str, Any] (identifiers to plain values), a tuple of any length, another part,
    and unions of these. Lists become tuples there, and whole numbers floats.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    _prefix: ClassVar[str] = ""  # of the keys in messages

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            value, key = getattr(self, name), self._prefix + name
            accepted = _plain_values(key, value) if hint == Mapping[str, Any] else _accept(value, hint)
            if accepted is _WRONG:
                raise BadKey(key, f"{show(value)} is not {_describe(hint)}")
            object.__setattr__(self, name, accepted)


class Allowed(NamedTuple):
    """The range of a number: in words, and as a test."""

    words: str
    test: Callable[[float], bool]


_WRONG = object()


def hints_of(part: type) -> Mapping[str, Any]:
    """Field name -> type hint."""
    return _hints_of(part)


@functools.cache
def _hints_of(cls: type) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls)}


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _accept(value: object, hint: Any) -> object:
    """The value as the hint's type, or `_WRONG`. A whole number is a float too; a bool is never a number."""
    for alternative in alternatives(hint):
        accepted = _accept_one(value, alternative)
        if accepted is not _WRONG:
            return accepted
    return _WRONG


def _accept_one(value: object, hint: Any) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        # A bool is an int too; NaN fails the comparison; a larger int may not fit into a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _INT_MAX:
            return _WRONG
        if arguments[0] is int:
            return value if type(value) is int and arguments[1].test(value) else _WRONG
        number = float(value) + 0.0  # no negative zero
        return number if arguments[1].test(number) else _WRONG
    if origin is Literal:
        return value if any(type(value) is type(a) and value == a for a in arguments) else _WRONG
    if origin is tuple:
        items = [_accept(item, arguments[0]) for item in value] if isinstance(value, (list, tuple)) else [_WRONG]
        return _WRONG if _WRONG in items else tuple(items)
    if origin is not None:  # Mapping[str, str]
        if not isinstance(value, Mapping):
            return _WRONG
        texts = [_accept(text, str) for pair in value.items() for text in pair]
        return _WRONG if _WRONG in texts else dict(value)
    if hint is int:
        return value if type(value) is int and 1 <= value <= _INT_MAX else _WRONG
    if hint is str:
        return value if type(value) is str and value.isprintable() else _WRONG
    return value if isinstance(value, hint) else _WRONG


def _plain_values(key: str, values: object) -> object:
    """A copy of a mapping of identifiers to plain values, lists as tuples; `_WRONG` for what is no mapping.

    Raises for the name or value in it that is wrong.
    """
    if not isinstance(values, Mapping):
        return _WRONG
    accepted = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise BadKey(key, f"{show(name)} is not a name of letters, digits and underscores")
        items = [_plain(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
        if any(item is _WRONG for item in items):
            problem = f"{show(value)} is not null, true or false, a number, text on one line, or a list of these"
            raise BadKey(f"{key}.{name}", problem)
        accepted[name] = tuple(items) if isinstance(value, (list, tuple)) else items[0]
    return accepted


def _plain(value: object) -> object:
    """Null, true or false, a number or text; or `_WRONG`. A whole number is an int, however it was written."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) not in (int, float):
        return _accept(value, str)
    number = typing.cast(float, value)
    if not abs(number) <= _INT_MAX:  # NaN fails the comparison
        return _WRONG
    return int(number) if number == int(number) else number


def _describe(hint: Any) -> str:
    return " or ".join(_describe_one(alternative) for alternative in alternatives(hint))


def _describe_one(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return f"a {'whole ' if arguments[0] is int else ''}number {arguments[1].words}"
    if origin is Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        items = alternatives(arguments[0])
        literal = typing.get_args(items[0]) if typing.get_origin(items[0]) is Literal else ()
        return f"a list of {', '.join(map(repr, literal)) or 'texts'}"
    if origin is not None:
        return f"a mapping of names to {'plain values' if arguments[1] is Any else 'text (numbers in quotes)'}"
    words = {
        int: "a whole number from 1 to 2**63 - 1",
        bool: "true or false",
        str: "text on one line",
        type(None): "null",
    }
    return words.get(hint, f"a mapping with the keys of {hint.__name__}")


def show(value: object) -> str:
    """A value of any kind, short enough for a message."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    try:
        return short.repr(value)
    except ValueError:  # an int of more than 4300 digits
        return f"a very long {type(value).__name__}"


def check_multiple(key: str, value: int, factors: Mapping[str, int], note: str = "") -> None:
    """Raise unless the value at the key is a multiple of the factors' product."""
    if value % math.prod(factors.values()):
        product = " * ".join(f"{name} ({factor})" for name, factor in factors.items())
        raise BadKey(key, f"{value}{f' ({note})' if note else ''} is not a multiple of {product}")


def nearest(name: object, allowed: Iterable[str]) -> str:
    """The end of a message that names what is close, as in "; nearest: a, b"; empty if nothing is."""
    close = difflib.get_close_matches(name, list(allowed), 3, 0.4) if isinstance(name, str) else []
    return f"; nearest: {', '.join(close)}" if close else ""


def did_you_mean(name: object, allowed: Sequence[str]) -> str:
    """The part of a message that names what is close; empty if nothing is."""
    close = difflib.get_close_matches(name, allowed, 1) if isinstance(name, str) else []
    return f"did you mean {close[0]!r}? " if close else ""
