"""Settings of PyTorch's caching allocator: the text of PYTORCH_CUDA_ALLOC_CONF, read as PyTorch reads it.

PyTorch drops all white space, cuts the text at `,` `:` `[` `]`, and takes pairs of key and value one after the other, a
later one of the same key over an earlier one. It does not look whether a pair is written with `:` and ended with `,`,
and takes "64abc" for 64: what depends on that is refused here. Names of keys and ranges of values are PyTorch's to
judge, when CUDA starts; `not_in_effect` is about what it then has. Imports neither torch nor pytest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .errors import UserError
from .units import format_bytes
from .validation import show

ROUNDUP = "roundup_power2_divisions"

_COLLECTION, _FRACTION = "garbage_collection_threshold", "per_process_memory_fraction"

_MIB = 2**20
_WHITE = " \t\n\v\f\r"
_BOOLS = ("True", "False")


def parse(text: str, source: str) -> dict[str, str]:
    """The settings by key, values as PyTorch sees them: without white space, lists with their brackets.

    Raises `UserError`, with `source` in front, for a text that is not made of pairs, and for a value of another kind
    than the key has. A key that is not known here is kept as it is.
    """
    tokens = re.findall(r"[][,:]|[^][,:]+", text.translate(dict.fromkeys(map(ord, _WHITE))))
    settings: dict[str, str] = {}
    for key, value in _pairs(tokens, f"{source}: {show(text)}"):
        where = f"{source}: {key}:{value}"
        _KINDS.get(key, _as_it_is)(value, where)
        if key == ROUNDUP and settings.get(key, value) != value:
            raise UserError(f"{where}: given before as {settings[key]}; PyTorch merges the two, write one list")
        settings[key] = value
    return settings


def has_expandable_segments(text: str) -> bool:
    """Whether the settings turn expandable segments on. Raises `UserError` as `parse` does."""
    return parse(text, "allocator settings").get("expandable_segments") == "True"


def _pairs(tokens: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    """Key and value of each pair; one comma may stand at the end."""
    rest = list(tokens)
    while rest:
        key = rest.pop(0)
        if key in (*",:[]",):
            raise UserError(f"{where}: a key is missing before {key!r}; write key:value pairs separated by commas")
        if rest[:1] != [":"] or rest[1:2] in ([], [","], [":"], ["]"]):
            raise UserError(f"{where}: {show(key)} has no value; write {key}:VALUE")
        value, rest = rest[1], rest[2:]
        if value == "[":
            if "]" not in rest or "[" in rest[: rest.index("]")]:
                raise UserError(f"{where}: the list of {show(key)} is not closed with ']'")
            end = rest.index("]")
            value, rest = f"[{''.join(rest[:end])}]", rest[end + 1 :]
        yield key, value
        if rest and rest.pop(0) != ",":
            raise UserError(f"{where}: a comma is missing after {key}:{value}")


# What values are, and what the allocator then says it has ------------------------------------------------------------


def _as_it_is(value: str, where: str) -> Any:
    return value


def _bool(value: str, where: str) -> bool:
    if value not in _BOOLS:
        raise UserError(f"{where}: not one of True, False, with this spelling")
    return value == "True"


def _whole(value: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise UserError(f"{where}: not a whole number")
    return int(value)


def _mib(value: str, where: str) -> int:
    return _whole(value, where) * _MIB


def _number(value: str, where: str) -> float:
    if not re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", value):
        raise UserError(f"{where}: not a number, as in 0.8")
    return float(value)


def _divisions(value: str, where: str) -> dict[str, int]:
    """Upper bound in MiB of each size class -> its divisions, as PyTorch fills them in."""
    divisions = dict.fromkeys(_CLASSES, 0)
    if not value.startswith("["):
        return dict.fromkeys(_CLASSES, _whole(value, where))
    before = 0  # the class that was set last, or the first one
    first = True
    for pair in value[1:-1].removesuffix(",").split(",") if value != "[]" else ():
        bound, colon, count = pair.partition(":")
        if not colon:
            raise UserError(f"{where}: {pair!r} is not SIZE:DIVISIONS, as in 256:4 or >:8")
        divided = _whole(count, where)
        if bound == ">":
            divisions.update(dict.fromkeys(_CLASSES[before + 1 :], divided))
            continue
        before = min(max(_whole(bound, where).bit_length() - 1, 0), len(_CLASSES) - 1)
        if first:
            divisions.update(dict.fromkeys(_CLASSES[:before], divided))
        divisions[_CLASSES[before]] = divided
        first = False
    return divisions


_CLASSES = tuple(str(2**power) for power in range(16))

_KINDS: Mapping[str, Callable[[str, str], Any]] = {
    "backend": _as_it_is,
    "max_split_size_mb": _mib,
    "max_non_split_rounding_mb": _mib,
    "large_segment_size_mb": _mib,
    _COLLECTION: _number,
    _FRACTION: _number,
    ROUNDUP: _divisions,
    "expandable_segments": _bool,
    "release_lock_on_cudamalloc": _bool,
    "throw_on_cudamalloc_oom": _bool,
    "graph_capture_record_stream_reuse": _bool,
    "pinned_use_cuda_host_register": _bool,
    "pinned_num_register_threads": _whole,
    "pinned_use_background_threads": _bool,
    "pinned_reserve_segment_size_mb": _mib,
    "pinned_max_round_threshold_mb": _mib,
    "pinned_max_cached_size_mb": _mib,
    "pinned_free_catch_all": _bool,
}
"""Known keys, and how their values are read (torch 2.11 to 2.14)."""

_REPORTED_AS = {
    "max_split_size_mb": "max_split_size",
    "pinned_max_round_threshold_mb": "max_round_threshold",
    "pinned_max_cached_size_mb": "max_cached_size",
}
"""Keys that the allocator reports under another name, in bytes."""


def not_in_effect(settings: Mapping[str, str], reported: Mapping[str, Any]) -> list[str]:
    """A sentence for each setting that the allocator has otherwise, as in "expandable_segments:True: it has False".

    `reported` is what PyTorch says of its allocator, by its names (`measure.allocator.reported`).
    """
    wrong = []
    for key, value in settings.items():
        name = _REPORTED_AS.get(key, key)
        if name not in reported:
            continue
        asked, has = _KINDS.get(key, _as_it_is)(value, key), reported[name]
        if isinstance(asked, float):
            same = abs(asked - has) <= 1e-9
        else:
            same = asked == has or (key not in _KINDS and asked == str(has))
        if not same:
            if name != key:  # bytes, or -1
                has = format_bytes(has) if has >= 0 else "no limit"
            wrong.append(f"{key}:{value}: it has {has}")
    if _COLLECTION in settings and reported.get(_FRACTION) == 1.0:  # torch 2.14; its report says otherwise
        value, others = settings[_COLLECTION], f"write {_FRACTION}:0.99 too"
        wrong.append(f"{_COLLECTION}:{value}: it collects only under a memory fraction below 1; {others}")
    return wrong


def not_reported(settings: Mapping[str, str], reported: Mapping[str, Any]) -> list[str]:
    """The settings that PyTorch took and cannot be asked about, as in "large_segment_size_mb:40"."""
    return [f"{key}:{value}" for key, value in settings.items() if _REPORTED_AS.get(key, key) not in reported]
