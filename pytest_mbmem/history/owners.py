"""Who held the allocated bytes: from the events of the allocator's history to owners, by category, module and line.

What a piece of memory was for is told by, in this order:

1. its identity, stamped on it by `measure.recording`: parameters, gradients, main gradients, optimizer state, buffers;
2. cuBLAS giving it back as a workspace when the run is over;
3. the code that asked for it: receive buffers of pipeline stages, Megatron's global buffer, the loss;
4. its lifetime: made in a forward pass and freed by a backward or later, it is an activation; made in the optimizer and
   kept, its state; freed where it was made, temporary.

What has no stamp, and no line of Python either, is unattributed, and so is what only its line is known of.

Bytes are those that were asked for; what the allocator handed out beyond is "rounding": blocks are multiples of 512
bytes (kMinBlockSize), and a large block that has less than 1 MiB left over is not split (CUDACachingAllocator.cpp).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from ..measurement import CATEGORIES, Category, Composition, Owner, PhaseFigures, place
from .stamps import WORKSPACES, Identity, Mode, read_identity, read_stamp

_KNOWN = frozenset[str](CATEGORIES)
ROUNDING, UNATTRIBUTED = Owner("rounding"), Owner("unattributed")

_BLOCK = 512
_UNSPLIT = 2**20
_POINTS = 120
"""Of a timeline, each the highest level of an equal share of the events."""

_Event = Mapping[str, Any]


Fate = Literal["kept", "freed there", "freed later", "workspace"]


@dataclass(slots=True)
class Where:
    """Where the run was."""

    module: str
    mode: Mode | None  # None: without a stamp
    phase: int  # index of the phase
    serial: int


@dataclass(slots=True)
class Block:
    """A piece of memory from its allocation to its being freed; `made` and `freed` are indices of events."""

    address: int
    size: int  # as asked for
    rounded: int  # what the allocator takes at least
    made: int
    freed: int  # the number of events if it is kept
    where: Where  # it was made
    frames: Sequence[Mapping[str, Any]]
    fate: Fate = "kept"
    identities: list[Identity] | None = None
    parts: Sequence[tuple[int, int]] = ()  # its owners, by number, and their bytes; all of one category


@dataclass
class History:
    """What `attribute` found. Levels are rounded bytes."""

    blocks: list[Block]
    phases: list[tuple[int, str]]  # step and phase, in the order of their first event
    peaks: list[int]  # index of the event after which each phase was at its highest; -1: before its first
    peak: int  # the highest level of all
    peak_event: int
    segment_events: list[tuple[int, _Event]]  # with their indices
    _points: list[int]  # events of the timeline
    _begins: list[tuple[int, int]]  # the event from which on a phase, by its index, runs
    _events: int = 0
    _owners: list[Owner] = field(default_factory=list)
    _held: dict[int, Mapping[int, int]] = field(default_factory=dict)  # event of a peak -> bytes by owner
    _most_rounding: dict[int, int] = field(default_factory=dict)  # event of a peak -> bytes
    _levels: list[list[int]] = field(default_factory=list)  # at the points: bytes by category

    @cached_property
    def owners(self) -> list[Owner]:
        """Of all blocks."""
        self._attribute()
        return self._owners

    @property
    def largest(self) -> tuple[int, Owner | None]:
        """Bytes of the largest single allocation, and whose it is; 0 and None if there was none."""
        if not self.blocks:
            return 0, None
        largest = max(self.blocks, key=lambda block: block.size)
        return largest.size, self.owners[largest.parts[0][0]]

    @property
    def at_peak(self) -> dict[Owner, int]:
        """Bytes by owner at the highest level of all, the largest first."""
        owners = self.owners
        held = {owners[number]: size for number, size in self._held[self.peak_event].items() if size}
        held[ROUNDING] = held.get(ROUNDING, 0) + self.peak - sum(held.values())
        return dict(sorted(held.items(), key=lambda pair: -pair[1]))

    def phase_at(self, event: int) -> str:
        """Name of the phase that ran then; empty without stamps."""
        return next((place(*self.phases[phase]) for begin, phase in reversed(self._begins) if begin <= event), "")

    def composition(self, phases: Sequence[PhaseFigures]) -> Composition:
        """Of measured phases, whose peaks are what the allocator itself counted."""
        own = self.owners
        # a piece of memory may have neither module nor line
        owners = [*own, *(owner for owner in (ROUNDING, UNATTRIBUTED) if owner not in own)]
        rounding, unattributed = owners.index(ROUNDING), owners.index(UNATTRIBUTED)
        index = {key: i for i, key in enumerate(self.phases)}
        at_peaks = []
        for figures in phases:
            held, most = [0] * len(owners), 0
            if (i := index.get((figures.step, figures.phase))) is not None:
                most = self._most_rounding[self.peaks[i]]
                for number, size in self._held[self.peaks[i]].items():
                    held[number] = size
            beyond = figures.peak["allocated"] - sum(held)
            held[rounding] += min(beyond, most)
            held[unattributed] += max(0, beyond - most)
            at_peaks.append(tuple(held))
        used = [o for o in range(len(owners)) if any(held[o] for held in at_peaks)]
        measured = {(figures.step, figures.phase): i for i, figures in enumerate(phases)}
        return Composition(
            owners=tuple(owners[o] for o in used),
            at_peaks=tuple(tuple(held[o] for o in used) for held in at_peaks),
            timeline=tuple(self._timeline(measured)),
        )

    def _timeline(self, phases: Mapping[tuple[int, str], int]) -> Iterable[tuple[int, ...]]:
        begins = iter([*self._begins, (self._events, -1)])
        phase, (coming, following) = -1, next(begins)
        for event, level in zip(self._points, self._levels, strict=True):
            while event >= coming:
                phase = following
                coming, following = next(begins)
            if phase >= 0 and self.phases[phase] in phases:
                yield phases[self.phases[phase]], *level

    def _attribute(self) -> None:
        """Find each block's owner, and what all of them held at the events that are asked for."""
        numbers: dict[tuple[Category, str, str, str], int] = {}
        names: list[set[str]] = []
        categories: list[int] = []  # of the owners

        def number(category: Category, module: str, line: str, phase: str) -> int:
            found = numbers.setdefault((category, fold(module), line, phase), len(numbers))
            if found == len(names):
                names.append(set())
                categories.append(CATEGORIES.index(category))
            names[found].add(module)
            return found

        lines = _Lines()
        with_logits = any(block.where.module.endswith("output_layer") for block in self.blocks)
        phase_names = [*(phase for _, phase in self.phases), ""]  # the last one is -1's
        alike: dict[object, int] = {}  # what decides on an owner -> its number
        peaks, points = sorted({*self.peaks, self.peak_event}), self._points
        peaks_before, points_before = _numbers_before(peaks, self._events), _numbers_before(points, self._events)
        # Changes from one peak to the next, and from one point to the next; after the last ones, what nobody asks for.
        held: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(len(peaks) + 1)]
        rounding = [0] * len(held)
        levels = [[0] * len(CATEGORIES) for _ in range(len(points) + 1)]
        for block in self.blocks:
            where, size = block.where, block.size
            line, phase = lines.of(block.frames), phase_names[where.phase]
            if block.identities:
                block.parts = [(number(c, module, line, phase), part) for c, module, part in _identified(block)]
            else:
                key = (where.module, where.mode, phase, block.fate, line)
                owner = alike.get(key)
                if owner is None:
                    owner = number(_category(block, phase, line, with_logits), where.module, line, phase)
                    if not line.endswith(_GLOBAL_BUFFER):  # whose callers decide
                        alike[key] = owner
                block.parts = ((owner, size),)
            made, freed = block.made, block.freed
            first, end = peaks_before[made], peaks_before[freed]
            if first < end:
                for owner, part in block.parts:
                    held[first][owner] += part
                    held[end][owner] -= part
                most = block.rounded - size + (_UNSPLIT if size > _UNSPLIT else 0)
                rounding[first] += most
                rounding[end] -= most
            first, end = points_before[made], points_before[freed]
            if first < end and block.parts:
                category = categories[block.parts[0][0]]
                levels[first][category] += size
                levels[end][category] -= size
        for before, after in pairwise(levels):
            after[:] = map(int.__add__, before, after)
        self._levels = levels[:-1]
        for index, event in enumerate(peaks):
            if index:
                for owner, size in held[index - 1].items():
                    held[index][owner] += size
                rounding[index] += rounding[index - 1]
            self._held[event], self._most_rounding[event] = held[index], rounding[index]
        self._owners = [
            Owner(category, module, line, len(names[found]), phase)
            for (category, module, line, phase), found in numbers.items()
        ]


def _numbers_before(some: Sequence[int], events: int) -> list[int]:
    """Of each of the events, and of their end: how many of the sorted `some` come before it."""
    numbers: list[int] = []
    for number, event in enumerate([*some, events]):
        numbers += [number] * (event + 1 - len(numbers))
    return numbers


def attribute(events: Sequence[_Event]) -> History:
    """Owners and levels of the events of one device, in PyTorch's form.

    Blocks that were there before the first event are not known of here.
    """
    alive: dict[int, Block] = {}
    blocks: list[Block] = []
    phases: list[tuple[int, str]] = []
    index_of: dict[tuple[int, str], int] = {}
    peaks: list[int] = []
    levels: list[int] = []
    begins: list[tuple[int, int]] = []
    points: list[int] = []
    segment_events: list[tuple[int, _Event]] = []
    level = peak = in_phase = 0  # the last: the highest level of the phase that runs
    peak_event = -1
    serial, phase = -1, -1
    last, mode = "", cast("Mode | None", None)  # of the stamp that was met last
    where = Where("", mode, phase, serial)
    known: dict[str, Where] = {}  # what stamps say in the phase that runs
    bucket_end, bucket_best, bucket_level = 0, -1, -1
    share, number = max(1, len(events) // _POINTS), len(events)
    for i, event in enumerate(events):
        action = event["action"]
        text = event.get("user_metadata") or ""
        if text != last and action != "annotate":
            last = text
            met = known.get(text)
            if met is None:
                stamp = read_stamp(text)
                if stamp is not None and stamp.serial > serial:
                    serial = stamp.serial
                    known.clear()
                    key = (stamp.step, stamp.phase)
                    if phase >= 0:
                        levels[phase] = in_phase
                    phase = index_of.setdefault(key, len(phases))
                    if phase == len(phases):
                        phases.append(key)
                        peaks.append(i - 1)
                        levels.append(level)
                    begins.append((i, phase))
                    in_phase = levels[phase]
                    if level > in_phase:
                        in_phase, peaks[phase] = level, i - 1
                if stamp is not None and stamp.serial == serial:
                    met = Where(stamp.module, stamp.mode, phase, serial)
                else:  # of a thread that lags behind: autograd's, before it comes to a module
                    met = Where("", "backward" if serial >= 0 else None, phase, serial)
                known[text] = met
            where, mode = met, met.mode
        if action == "alloc":
            size, address = event["size"], event["addr"]
            rounded = -(-size // _BLOCK) * _BLOCK
            block = Block(address, size, rounded, i, number, where, event.get("frames") or ())
            alive[address] = block
            blocks.append(block)
            level += rounded
            if level > in_phase and phase >= 0:
                in_phase, peaks[phase] = level, i
            if level > peak:
                peak, peak_event = level, i
        elif action == "free_requested":
            freed = alive.pop(event["addr"], None)
            if freed is not None:
                level -= freed.rounded
                freed.freed = i
                made = freed.where
                if text == WORKSPACES:
                    freed.fate = "workspace"
                elif serial > made.serial or (mode == "backward" and made.mode != "backward"):
                    freed.fate = "freed later"
                else:
                    freed.fate = "freed there"
        elif action == "annotate":
            holder, identity = alive.get(event["addr"]), read_identity(text)
            if holder is not None and identity is not None and identity.category in _KNOWN:
                if holder.identities is None:
                    holder.identities = [identity]
                else:
                    holder.identities.append(identity)
        elif action != "free_completed":
            segment_events.append((i, event))
        if level > bucket_level:
            bucket_best, bucket_level = i, level
        if i >= bucket_end:
            points.append(bucket_best)
            bucket_end, bucket_level = i + share, -1
    if bucket_level >= 0:
        points.append(bucket_best)
    return History(
        blocks=blocks,
        phases=phases,
        peaks=peaks,
        peak=peak,
        peak_event=peak_event,
        segment_events=segment_events,
        _points=points,
        _begins=begins,
        _events=number,
    )


def _identified(block: Block) -> Iterable[tuple[Category, str, int]]:
    """Category, module and bytes of each tensor in a block."""
    left = block.size
    assert block.identities
    # Of a tensor that became another thing (a gradient that is added up in place), the last word counts.
    category = block.identities[-1].category
    named = {i.name: i for i in block.identities if i.category == category and i.name}
    for identity in named.values():
        size = min(identity.size, left)
        left -= size
        yield cast(Category, category), identity.module, size
    if left:
        yield cast(Category, category), "", left


_TE_WORKSPACE = re.compile(
    r"transformer_engine/.*\(\w*workspace\w*\)$|.*/te_equivalents\.py:\d+ \((hold_workspaces|get_tensor)\)$"
)
"""A function of Transformer Engine that makes one, as in gemm.py's get_cublas_workspace (2.10 to 2.20), or of the
equivalents for memory."""

_TE_STATE = re.compile(r"transformer_engine/pytorch/(quantization|fp8)\.py:")
"""Where Transformer Engine makes scales and histories of largest values, which last (2.20 and before 2.9)."""

_GLOBAL_BUFFER = "(get_tensor)"
"""Megatron's global memory buffer (megatron/core/utils.py), which is handed out to whoever asks for it."""


def _category(block: Block, phase: str, line: str, with_logits: bool) -> Category:
    """By fate and by code; `with_logits`: the model has an output layer."""
    if block.fate == "workspace":
        return "workspaces"
    if (told := _by_code(block, line, with_logits)) is not None:
        return told
    if block.where.mode is None or not (line or block.where.module):
        return "unattributed"
    if block.fate == "kept":
        if phase == "optimizer":
            return "optimizer state"
        return "activations" if block.where.module and block.where.mode != "backward" else "buffers"
    if block.where.mode == "backward" or phase in ("build", "grad-sync", "optimizer"):
        return "temporaries"
    return "activations" if block.fate == "freed later" else "temporaries"


def _by_code(block: Block, line: str, with_logits: bool) -> Category | None:
    """What the place in Megatron Core says (0.16 to 0.19); None where it says nothing."""
    if "/p2p_communication.py:" in line:
        return "communication buffers"
    if _TE_WORKSPACE.match(line):
        return "workspaces"
    if _TE_STATE.match(line):
        return "buffers"
    if "megatron/core/utils.py:" in line and line.endswith(_GLOBAL_BUFFER):
        callers = [f["filename"].rpartition("/")[2] for f in block.frames[:12]]
        return "workspaces" if any("attention" in file for file in callers) else "communication buffers"
    if "/mappings.py:" in line:
        brief = block.fate == "freed there" or block.where.mode == "backward"
        return "communication buffers" if brief else None
    if "cross_entropy" in line or (block.where.module.endswith("output_layer") and block.where.mode != "backward"):
        return "logits"
    # Between the loss and the output layer, where autograd's own nodes run.
    if with_logits and block.where.module.endswith("Model") and block.where.mode == "backward" and not line:
        return "logits"
    return "main gradients" if "/param_and_grad_buffer.py:" in line else None


# Names ----------------------------------------------------------------------------------------------------------------


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@cache
def fold(module: str) -> str:
    """The name with each number written as *: what repeated layers have in common."""
    return _NUMBER.sub("*", module)


class _Lines:
    """Lines of stacks whose frames live as long as this; PyTorch makes one object for each frame that occurs."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def of(self, frames: Sequence[Mapping[str, Any]]) -> str:
        for frame in frames:
            text = self._texts.get(id(frame))
            if text is None:
                file = _shown(frame["filename"])
                text = f"{file}:{frame['line']} ({frame['name']})" if file is not None else ""
                self._texts[id(frame)] = text
            if text:
                return text
        return ""


def line_of(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost line that is not PyTorch's, as in "megatron/core/transformer/moe/router.py:123 (routing)"."""
    return _Lines().of(frames)


_INSTALLED = re.compile(r"/(?:site|dist)-packages/(.*)")
_TORCH = re.compile(r"/torch/(nn|_\w+|utils|autograd|cuda|distributed|optim)/")


_STAND_INS = ("pytest_mbmem/megatron/stand_ins.py", "pytest_mbmem/megatron/jit_fusion.py")


@cache
def _shown(file: str) -> str | None:
    """A file's name for people: as it is imported, or from where pytest runs. None for PyTorch's own and no Python."""
    if not file.endswith(".py"):
        return None
    installed = _INSTALLED.search(file)
    name = installed[1] if installed else file
    if name.startswith("torch/") or _TORCH.search(name):
        return None
    if "pytest_mbmem/measure/" in name or "/pytest-mbmem/inductor/" in name or name.endswith(_STAND_INS):
        return None  # what records this, and what is or stands in for a kernel of the line that called it
    if installed:
        return name
    for package in ("megatron/core/", "megatron/bridge/", "megatron/training/", "transformer_engine/", "pytest_mbmem/"):
        if (at := name.rfind(f"/{package}")) >= 0:
            return name[at + 1 :]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else "/".join(path.parts[-2:])
