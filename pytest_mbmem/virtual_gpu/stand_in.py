"""Virtual GPUs that stand in for real ones: what needs real GPUs is tested without any. Only tests ask for them.

They are described by JSON in the variable MBMEM_TEST_STAND_INS. All keys but `gpu` may be left out:

    {"gpu": "l4-24gb", "count": 2, "capacity": "3 GiB",
     "foreign": [{"device": 1, "pid": 4242, "bytes": "2 GiB", "after_launches": 0}],
     "elapsed_ms": [120, 40, 41, 40], "fault": {"kind": "die", "device": 1, "after_launches": 500},
     "driver_cuda": "12.4"}

`device` is NVML's number. `after_launches` counts kernels of the process that looks (foreign) or fails (fault). Each
time between two CUDA events is the next of `elapsed_ms`; the last one is repeated.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError
from ..units import parse_bytes
from . import MOST_DEVICES, environment
from .build import ensure_driver
from .counters import driver_is_loaded
from .gpus import MOST_BYTES, Gpu, load_gpus

VARIABLE = "MBMEM_TEST_STAND_INS"

FAULTS = ("die", "hang", "lose peer")
"""The process is killed by SIGKILL; it sleeps forever; its collectives fail as if another rank were gone."""

_STAGED = ("MBMEM_GPU_FOREIGN", "MBMEM_GPU_ELAPSED_MS", "MBMEM_GPU_FAULT", "MBMEM_GPU_DRIVER_CUDA")
_MOST_FOREIGN, _MOST_ELAPSED = 8, 64  # VGPU_MAX_FOREIGN and VGPU_MAX_ELAPSED in driver/virtual_gpu.h


@dataclass(frozen=True)
class StandIns:
    """Devices that stand in for real GPUs: `count` times `gpu`, with what is staged on them."""

    gpu: Gpu
    count: int
    staged: Mapping[str, str]  # variables that driver/staged.c reads

    def environment(self) -> dict[str, str]:
        """What a process needs in its environment to see them. CUDA_VISIBLE_DEVICES, which is not here, chooses some.

        Raises `UserError` when this machine cannot have a driver.
        """
        described = environment(self.gpu, self.count)
        del described["CUDA_VISIBLE_DEVICES"]
        return {**described, **self.staged, **ensure_driver().environment}

    def load_nvml(self) -> None:
        """Have them in the NVML of this process, which pynvml opens by name. Of no effect where they already are.

        Raises `UserError` when this machine cannot have a driver.
        """
        if driver_is_loaded():
            return
        libc, described = ctypes.CDLL(None), self.environment()
        preload = described.pop("LD_PRELOAD").split(":")
        # For C alone: what this process starts with os.environ is no stand-in.
        for name in _STAGED:
            libc.unsetenv(name.encode())
        for name, value in described.items():
            libc.setenv(name.encode(), value.encode(), 1)
        for path in preload:
            if path.endswith(("libvirtual_gpu.so", "libnvidia-ml.so.1")):
                ctypes.CDLL(path)


def stand_ins() -> StandIns | None:
    """Those that the environment describes. Raises `UserError` for anything wrong in the description."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        described = json.loads(text)
    except ValueError as error:
        raise UserError(f"{VARIABLE}: {text!r} is not JSON ({error})") from None
    top = _Reader(described, "", ("gpu",), ("count", "capacity", "foreign", "elapsed_ms", "fault", "driver_cuda"))
    gpus = load_gpus()
    gpu = gpus[top.one_of("gpu", tuple(gpus))]
    count = top.whole("count", 1, MOST_DEVICES, 1)
    capacity = top.size("capacity", gpu.context_bytes + 1, gpu.capacity)
    foreign = [
        ":".join(
            str(number)
            for number in (
                item.whole("device", 0, count - 1),
                item.whole("pid", 1, 2**31 - 1),
                item.size("bytes", 1),
                item.whole("after_launches", 0, 2**63 - 1, 0),
            )
        )
        for item in top.readers("foreign", ("device", "pid", "bytes"), ("after_launches",), _MOST_FOREIGN)
    ]
    fault = [
        f"{item.one_of('kind', FAULTS)}:{item.whole('device', 0, count - 1)}:"
        f"{item.whole('after_launches', 0, 2**63 - 2)}"
        for item in top.reader("fault", ("kind", "device", "after_launches"))
    ]
    values = (",".join(foreign), top.times("elapsed_ms"), "".join(fault), top.version("driver_cuda"))
    return StandIns(
        # a name and a key of their own, so that no figure is taken for a real GPU's
        gpu=dataclasses.replace(gpu, key=f"stand-in-{gpu.key}", name=f"stand-in {gpu.name}", capacity=capacity),
        count=count,
        staged={name: value for name, value in zip(_STAGED, values, strict=True) if value},
    )


class _Reader:
    """Values of one mapping in the description, each read strictly. `where` is its place, as in "foreign[0]." """

    def __init__(self, values: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        self._where = where
        allowed = (*required, *optional)
        if not isinstance(values, dict):
            name = where.rstrip(".") or "it"
            raise UserError(f"{VARIABLE}: {name}: {values!r} is not a mapping with the keys {', '.join(allowed)}")
        self._values = values
        for key in values:
            if key not in allowed:
                raise UserError(f"{VARIABLE}: {where}{key}: unknown key; allowed are {', '.join(allowed)}")
        for key in required:
            if key not in values:
                raise UserError(f"{VARIABLE}: {where}{key}: is missing")

    def _read(self, key: str, right: Callable[[Any], bool], what: str) -> Any:
        value = self._values[key]
        if not right(value):
            raise UserError(f"{VARIABLE}: {self._where}{key}: {value!r} is not {what}")
        return value

    def whole(self, key: str, least: int, most: int, default: int | None = None) -> int:
        if key not in self._values and default is not None:
            return default
        what = f"a whole number from {least} to {most}"
        return int(self._read(key, lambda v: type(v) is int and least <= v <= most, what))

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        return str(self._read(key, lambda v: v in choices, f"one of {', '.join(choices)}"))

    def size(self, key: str, least: int, default: int | None = None) -> int:
        if key not in self._values and default is not None:
            return default
        size = parse_bytes(self._values[key], f"{VARIABLE}: {self._where}{key}")
        if not least <= size <= MOST_BYTES:
            raise UserError(
                f"{VARIABLE}: {self._where}{key}: {self._values[key]!r} is out of range; {least} to {MOST_BYTES} bytes "
                "are allowed"
            )
        return size

    def times(self, key: str) -> str:
        """Milliseconds, or "" for none."""
        if key not in self._values:
            return ""
        what = f"a list of 1 to {_MOST_ELAPSED} numbers, 0 or more"
        times = self._read(key, lambda v: isinstance(v, list) and 1 <= len(v) <= _MOST_ELAPSED, what)
        if not all(type(t) in (int, float) and 0 <= t < 1e9 and math.isfinite(t) for t in times):
            raise UserError(f"{VARIABLE}: {self._where}{key}: {times!r} is not {what}")
        return " ".join(map(str, times))

    def version(self, key: str) -> str:
        """A version of CUDA, or "" for the driver's own."""
        if key not in self._values:
            return ""
        what = 'a version of CUDA, in quotes, as in "12.4"'
        return str(self._read(key, lambda v: isinstance(v, str) and bool(re.fullmatch(r"\d{1,3}\.\d", v)), what))

    def reader(self, key: str, required: tuple[str, ...]) -> list[_Reader]:
        """Of a mapping in here; none for none."""
        return [_Reader(self._values[key], f"{self._where}{key}.", required)] if key in self._values else []

    def readers(self, key: str, required: tuple[str, ...], optional: tuple[str, ...], most: int) -> list[_Reader]:
        """Of a list of mappings in here."""
        if key not in self._values:
            return []
        items = self._read(key, lambda v: isinstance(v, list) and len(v) <= most, f"a list of at most {most} mappings")
        return [_Reader(item, f"{self._where}{key}[{i}].", required, optional) for i, item in enumerate(items)]
