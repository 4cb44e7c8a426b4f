"""The texts that are stamped on events of the allocator's history, written in a worker and read by anyone.

PyTorch keeps a text of the running thread with every event ("user_metadata"), and a text for a piece of memory in an
event of its own ("annotate"), so they are part of every snapshot file.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple, cast

Mode = Literal["forward", "backward", "recompute"]


class Stamp(NamedTuple):
    """Where a thread was."""

    serial: int  # of the phase's begin, counted through the run: a thread that lags behind has an older one
    step: int
    phase: str
    mode: Mode
    module: str  # "decoder.layers.0.mlp.linear_fc1"; empty between modules

    def text(self) -> str:
        return f"mbmem|{self.serial}|{self.step}|{self.phase}|{self.mode}|{self.module}"


class Identity(NamedTuple):
    """What a tensor in a piece of memory is; a piece may hold several."""

    category: str
    name: str  # of a parameter, "decoder.layers.0.mlp.linear_fc1.weight"; may be empty
    size: int  # bytes of the tensor

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    def text(self) -> str:
        return f"mbmem-is|{self.category}|{self.size}|{self.name}"


WORKSPACES = "mbmem-workspaces"
"""On what is freed when cuBLAS is asked to give back its workspaces."""


def read_stamp(text: str) -> Stamp | None:
    """The stamp that a text is, or None."""
    parts = text.split("|", 5)
    if len(parts) != 6:
        return None
    mark, serial, step, phase, mode, module = parts
    if mark != "mbmem" or not (_is_number(serial) and _is_number(step)):
        return None
    if mode in ("forward", "backward", "recompute"):
        return Stamp(int(serial), int(step), phase, cast(Mode, mode), module)
    return None


@functools.cache
def read_identity(text: str) -> Identity | None:
    """The identity that a text is, or None."""
    parts = text.split("|", 3)
    if len(parts) != 4 or parts[0] != "mbmem-is" or not _is_number(parts[2]):
        return None
    return Identity(parts[1], parts[3], int(parts[2]))


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) <= 18
