"""What a virtual GPU can pretend to be: the GPUs of gpus.yaml, and more from a file of the user."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..strict_yaml import read_yaml
from ..units import parse_bytes

BUILT_IN = Path(__file__).with_name("gpus.yaml")

# The driver hands out addresses for each device from a window of 1 TiB; half of it leaves room for fragmentation.
MOST_BYTES = 2**39


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as CUDA's device properties show it. Sizes in bytes."""

    key: str  # "h100-80gb"
    name: str  # "NVIDIA H100 80GB HBM3"
    capacity: int  # what cudaMemGetInfo calls total
    context_bytes: int  # of the capacity, taken by each process that uses the GPU; an assumption
    nccl_per_communicator: int = 2**27  # that NCCL takes for a process group; an estimate, of NVLink (see gpus.yaml)
    compute_capability: tuple[int, int]
    sm_count: int
    threads_per_sm: int
    l2_cache: int
    shared_memory_per_sm: int
    shared_memory_per_block: int  # the most a kernel can opt in to
    bf16_tflops: float  # dense peak, 10^12 FLOP/s
    memory_gb_per_s: float  # peak, 10^9 bytes/s

    @property
    def usable(self) -> int:
        """Bytes that PyTorch can have."""
        return self.capacity - self.context_bytes


def load_gpus(extra: Path | None = None) -> dict[str, Gpu]:
    """All known GPUs by key: the built-in ones and those of the file `extra`, which may state assumptions anew.

    Raises `UserError` that names file, line, key, value and what is allowed for anything wrong in the file.
    """
    gpus = _read(BUILT_IN, {})
    return gpus if extra is None else gpus | _read(extra, gpus)


def _read(path: Path, known: Mapping[str, Gpu]) -> dict[str, Gpu]:
    """The GPUs of a file; `known` are those that its own may be like."""
    data, lines = read_yaml(path)
    if not isinstance(data, Mapping) or not data:
        raise UserError(f"{path}: must hold GPUs by name, each with the keys {', '.join(_READERS)}")
    return {str(key): _gpu(str(key), values, path, lines, known) for key, values in data.items()}


def _gpu(key: str, values: object, path: Path, lines: Mapping[str, int], known: Mapping[str, Gpu]) -> Gpu:
    def where(name: str = "") -> str:
        dotted = f"{key}.{name}" if name else key
        line = lines.get(dotted)
        return f"{path}:{line}: {dotted}" if line else f"{path}: {dotted}"

    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", key):
        raise UserError(f"{where()}: a GPU's name is made of lower-case letters, digits, '-' and '.'")
    if not isinstance(values, Mapping):
        raise UserError(f"{where()}: {values!r} is not a GPU; it needs the keys {', '.join(_READERS)}")
    allowed = [*_READERS, *(["like"] if known else [])]
    for name in values:
        if name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, 1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise UserError(f"{where(str(name))}: unknown key{hint}; allowed are {', '.join(allowed)}")
    fields = {name: read(values[name], where(name)) for name, read in _READERS.items() if name in values}
    if "context" in fields:
        fields["context_bytes"] = fields.pop("context")
    if key in known and (values.get("like") != key or set(values) - {"like", *_ASSUMED}):
        raise UserError(
            f"{where()}: is built in; give your GPU another name, or write like: {key} and no other keys than "
            f"{', '.join(_ASSUMED)}"
        )
    if "like" in values:
        if not isinstance(values["like"], str) or values["like"] not in known:
            raise UserError(f"{where('like')}: {values['like']!r} is not one of {', '.join(known)}")
        gpu = dataclasses.replace(known[values["like"]], key=key, **fields)
    else:
        missing = [name for name in _READERS if name not in values and name != "nccl_per_communicator"]
        if missing:
            raise UserError(f"{where()}: lacks {', '.join(missing)}" + (", or like: NAME" if known else ""))
        gpu = Gpu(key=key, **fields)
    if gpu.usable <= 0:
        raise UserError(
            f"{where('context')}: {gpu.context_bytes} bytes leave nothing of the capacity of {gpu.capacity} bytes"
        )
    return gpu


def _size(smallest: int, largest: int) -> Callable[[object, str], int]:
    def read(value: object, where: str) -> int:
        size = parse_bytes(value, where)
        if not smallest <= size <= largest:
            raise UserError(f"{where}: {value!r} is out of range; {smallest} to {largest} bytes are allowed")
        return size

    return read


def _whole(smallest: int, largest: int) -> Callable[[object, str], int]:
    def read(value: object, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
            raise UserError(f"{where}: {value!r} is not a whole number from {smallest} to {largest}")
        return value

    return read


def _rate(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise UserError(f"{where}: {value!r} is not a number above 0")
    return float(value)


def _name(value: object, where: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,90}", value):
        raise UserError(f"{where}: {value!r} is not a text of 1 to 90 printable ASCII characters")
    return value


def _capability(value: object, where: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d?)\.(\d)", value) if isinstance(value, str) else None
    if not match or int(match[1]) < 7:
        raise UserError(
            f'{where}: {value!r} is not a compute capability; write one from "7.0" on, in quotes, as in "9.0"'
        )
    return int(match[1]), int(match[2])


_ASSUMED = ("context", "nccl_per_communicator")
"""What may be stated anew for a built-in GPU: it stays the same one, and so its baselines do."""

_READERS: dict[str, Callable[[object, str], Any]] = {
    "name": _name,
    "capacity": _size(2**30, MOST_BYTES),
    "context": _size(0, MOST_BYTES),
    "nccl_per_communicator": _size(0, MOST_BYTES),
    "compute_capability": _capability,
    "sm_count": _whole(1, 1024),
    "threads_per_sm": _whole(1024, 4096),
    "l2_cache": _size(0, 2**31 - 1),
    "shared_memory_per_sm": _size(48 * 1024, 2**30),
    "shared_memory_per_block": _size(48 * 1024, 2**30),
    "bf16_tflops": _rate,
    "memory_gb_per_s": _rate,
}
