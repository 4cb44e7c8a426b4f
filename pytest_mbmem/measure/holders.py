"""Who holds a piece of device memory: from live blocks of the allocator back to a name that a person can look up.

Blocks are what the allocator says is alive, so nothing can hide from this: a tensor is only a way to name a block.
Names are looked for where people look first, the shortest path winning:

1. attributes of the modules and of all that these hold (dispatchers, lists, caches, closures of hooks);
2. local variables of running functions;
3. the autograd graph of every tensor met so far: saved tensors, attributes of custom functions, leaves and their
   gradients. Python's garbage collector does not see these;
4. every other tensor that Python has, by what refers to it.

What is left has only the line that allocated it. Reading a saved tensor that was packed by a hook would run the hook's
other half, so there the packed object is looked at instead.
"""

from __future__ import annotations

import bisect
import collections
import functools
import gc
import inspect
import re
import site
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..growth import Holder
from ..units import format_bytes
from . import recording

_MAX_EVENTS = 5_000_000


@dataclass
class Block:
    """A live block of the caching allocator."""

    address: int
    size: int  # bytes, as the allocator counts them
    made_at: str  # the innermost line that is not PyTorch's, if Python made it
    holder: str = ""
    example: str = ""


class Recording:
    """The allocator's own history from the making of this to `stop`, which changes no figure. One may be in another."""

    _running = 0

    def __init__(self) -> None:
        if not Recording._running and not recording.is_running():  # starting it again would forget what is there
            torch.cuda.memory._record_memory_history("all", context="state", stacks="python", max_entries=_MAX_EVENTS)
        Recording._running += 1
        self._begin = self.mark()

    def mark(self) -> int:
        """A point in the history, for `alive`."""
        return len(_trace())

    def alive(self, end: int | None = None) -> list[Block]:
        """Blocks that were allocated since the beginning, and before a mark, and are still there."""
        made: dict[int, int] = {}  # address -> the event that allocated it
        for index, event in enumerate(_trace()):
            if event["action"] == "alloc":
                made[event["addr"]] = index
            elif event["action"] == "free_requested":
                made.pop(event["addr"], None)
        last = sys.maxsize if end is None else end
        blocks = []
        for block in _live_blocks():
            if self._begin <= made.get(block["address"], -1) < last:
                blocks.append(Block(block["address"], block["size"], _line(block["frames"])))
        return blocks

    def stop(self) -> None:
        """End the recording."""
        Recording._running -= 1
        if not Recording._running and not recording.is_running():
            torch.cuda.memory._record_memory_history(None)


def _trace() -> list[dict[str, Any]]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    return traces[torch.cuda.current_device()] if traces else []


def _live_blocks() -> Iterator[dict[str, Any]]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    device = torch.cuda.current_device()
    for segment in torch.cuda.memory._snapshot()["segments"]:
        if segment["device"] == device:
            yield from (block for block in segment["blocks"] if block["state"] == "active_allocated")


_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = sorted({*site.getsitepackages(), str(Path(torch.__file__).parents[1])}, key=len, reverse=True)


def _line(frames: Sequence[Mapping[str, Any]]) -> str:
    """As in "megatron/core/transformer/moe/router.py:123 (routing)"."""
    for frame in frames:
        file = frame["filename"]
        if file.startswith(_TORCH) or not file.endswith(".py"):
            continue
        return f"{_short(file)}:{frame['line']} ({frame['name']})"
    return ""


def _short(file: str) -> str:
    for folder in _LIBRARIES:
        if file.startswith(folder + "/"):
            return file[len(folder) + 1 :]
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


# Objects to look into, and where they were found. The object is kept alive until the walk ends, so that no id returns.
_Found = tuple[str, Any]

_LEAVES = (
    str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.CodeType,
    types.BuiltinFunctionType, torch.dtype, torch.device, torch.Size, torch.Generator, torch.cuda.Stream,
    torch.cuda.Event, torch.distributed.ProcessGroup,
)  # fmt: skip
"""Types that hold no tensor, or that lead out of what is looked for."""


class Search:
    """Names the holders of blocks; each `through_...` names what it finds first."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = sorted(blocks, key=lambda b: b.address)
        self._addresses = [b.address for b in self._blocks]
        self._seen: dict[int, Any] = {}
        self._graphs: collections.deque[_Found] = collections.deque()  # the last node of each

    def through_objects(self, roots: Iterable[_Found]) -> None:
        """Attributes, items and closures of all that can be reached, the shortest path first."""
        waiting = collections.deque(roots)
        while waiting:
            path, thing = waiting.popleft()
            if isinstance(thing, _LEAVES) or id(thing) in self._seen:
                continue
            if _is_node(thing):
                self._graphs.append((path, thing))
                continue
            self._seen[id(thing)] = thing
            if isinstance(thing, torch.Tensor):
                self._note(path, thing)
                self._graphs.append((path, thing.grad_fn))
            waiting.extend(_children(path, thing))

    def through_graphs(self) -> None:
        """The autograd graphs of the tensors that were met, and of nodes that something refers to."""
        while self._graphs:
            path, last = self._graphs.popleft()
            nodes: collections.deque[Any] = collections.deque([last])
            while nodes:
                node = nodes.popleft()
                if node is None or id(node) in self._seen:
                    continue
                self._seen[id(node)] = node
                nodes.extend(after for after, _ in node.next_functions)
                self.through_objects((f"the autograd graph of {path}, {name}", v) for name, v in _held_by_node(node))

    def through_frames(self) -> None:
        """Local variables of the functions that are running."""
        frame = inspect.currentframe()
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(_PACKAGE):
                place = f"{code.co_name} ({_short(code.co_filename)}:{frame.f_lineno})"
                values = dict(frame.f_locals)
                if sys.version_info < (3, 13) and code.co_flags & inspect.CO_OPTIMIZED:
                    frame.f_locals.clear()  # a copy, which would keep the values alive as long as the function runs
                self.through_objects((f"the local variable {name} of {place}", value) for name, value in values.items())
            frame = frame.f_back

    def through_collector(self) -> None:
        """All tensors that Python's garbage collector knows, those with a graph first, and then all autograd nodes."""
        gc.unfreeze()  # what the fork server loaded may hold something by now
        known = gc.get_objects()
        tensors = [thing for thing in known if _is_tensor(thing)]
        nodes = [thing for thing in known if _is_node(thing)]
        del known
        ours = {id(tensors), id(nodes), id(self._seen)}
        self._through_owners((tensor for tensor in tensors if tensor.grad_fn is not None), ours)
        self._through_owners(nodes, ours)
        self._through_owners((tensor for tensor in tensors if self._block(tensor)), ours)

    def _through_owners(self, things: Iterable[Any], ours: set[int]) -> None:
        """What leads to the things, variables of modules first, and then the autograd graphs that this led to."""
        without_module = []
        for thing in things:
            if id(thing) not in self._seen:
                name, top = _climb(thing, ours)
                if name:
                    self.through_objects([(name, top)])
                    self.through_objects([(name, thing)])  # if that was not the way
                else:
                    without_module.append((f"a {type(top).__qualname__} that no module leads to", top))
        self.through_graphs()
        self.through_objects(without_module)
        self.through_graphs()

    def holders(self) -> tuple[Holder, ...]:
        """All blocks, grouped by holder; most bytes first."""
        groups: dict[str, list[Block]] = {}
        for block in self._blocks:
            path = block.holder or "something that Python does not see"
            groups.setdefault(re.sub(r"\d+(?=[.\]])", "*", path), []).append(block)
        holders = [
            Holder(path, sum(b.size for b in group), len(group), group[0].example, group[0].made_at)
            for path, group in groups.items()
        ]
        return tuple(sorted(holders, key=lambda h: (-h.bytes, h.path)))

    @property
    def unnamed(self) -> list[Block]:
        """Blocks without a holder so far."""
        return [block for block in self._blocks if not block.holder]

    def _note(self, path: str, tensor: torch.Tensor) -> None:
        block = self._block(tensor)
        if block is not None and not block.holder:
            block.holder = path
            block.example = f"{'x'.join(map(str, tensor.shape)) or 'a scalar'} {str(tensor.dtype).rpartition('.')[2]}"
            whole = tensor.untyped_storage().nbytes()
            if tensor.numel() * tensor.element_size() < whole:
                block.example += f" (a view of {format_bytes(whole)})"

    def _block(self, tensor: torch.Tensor) -> Block | None:
        """The block of these that the tensor's storage is in."""
        if tensor.device.type != "cuda":
            return None
        try:
            address = tensor.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # a subclass without a storage: its parts are among its attributes
            return None
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0 or address >= self._addresses[index] + self._blocks[index].size:
            return None
        return self._blocks[index]


def without(blocks: Iterable[Block], owners: Mapping[str, Any]) -> list[Block]:
    """The blocks that nothing in these objects holds, in their autograd graphs either."""
    search = Search(blocks)
    search.through_objects(owners.items())
    search.through_graphs()
    return search.unnamed


def holders_of(blocks: Iterable[Block], modules: Mapping[str, Any]) -> tuple[Holder, ...]:
    """Names all blocks; `modules` are the objects to look into first, by the name to show ("" for none)."""
    search = Search(blocks)
    search.through_objects([(name, module) for name, module in modules.items()])
    search.through_frames()
    search.through_graphs()
    if search.unnamed:
        search.through_collector()
    return search.holders()


def _children(path: str, thing: Any) -> Iterator[_Found]:
    """What the object holds, by path."""
    if isinstance(thing, Mapping):
        try:
            items = list(thing.items())
        except Exception:  # a mapping of someone else's making
            return
        yield from ((f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[...]", v) for key, v in items)
    elif isinstance(thing, (list, tuple, collections.deque)):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(list(thing)))
    elif isinstance(thing, (set, frozenset)):
        yield from ((f"{path}[...]", value) for value in list(thing))
    elif isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=False):
            try:
                yield f"{path}, its variable {name}", cell.cell_contents
            except ValueError:  # not set yet
                continue
        yield from _children(path, (*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()))
    elif isinstance(thing, types.MethodType):
        yield path, thing.__self__
        yield path, thing.__func__
    elif isinstance(thing, functools.partial):
        yield f"{path}.func", thing.func
        yield f"{path}.args", thing.args
        yield f"{path}.keywords", thing.keywords
    if isinstance(thing, torch.Tensor) and (thing.is_leaf or thing.retains_grad):
        yield f"{path}.grad", thing.grad
    yield from ((f"{path}.{name}" if path else name, value) for name, value in _attributes(thing))


def _attributes(thing: Any) -> Iterator[_Found]:
    values = getattr(thing, "__dict__", None)
    if isinstance(values, dict) and not isinstance(thing, types.FunctionType):
        for name, value in list(values.items()):
            if isinstance(thing, torch.nn.Module) and name in ("_parameters", "_buffers", "_modules"):
                yield from list(value.items())
            else:
                yield name, value
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(thing)
                except AttributeError:  # not set
                    continue


def _held_by_node(node: Any) -> Iterator[_Found]:
    """What an autograd node holds, by its name and how."""
    name = str(node.name()).rpartition("::")[2]  # without the C++ namespace
    for attribute in dir(type(node)):
        if attribute == "variable":  # of AccumulateGrad
            yield f"its leaf ({name})", _read(node, attribute)
        elif attribute.startswith("_raw_saved_"):
            yield from ((f"saved by {name}", value) for value in _saved(node, attribute))
    for attribute, value in _attributes(node):
        yield f"{name}.{attribute}", value


def _saved(node: Any, raw_attribute: str) -> list[Any]:
    """Saved tensors, or what a hook made of them; nothing once backward has freed them."""
    raw = _flat(_read(node, raw_attribute))
    if any(getattr(saved, "unpack_hook", None) is not None for saved in raw):
        return [_read(saved, "data") for saved in raw]
    attribute = "saved_tensors" if raw_attribute == "_raw_saved_tensors" else raw_attribute.removeprefix("_raw")
    return _flat(_read(node, attribute))


def _read(thing: Any, attribute: str) -> Any:
    """None for what backward has freed, and for a saved tensor that was changed in place since."""
    try:
        return getattr(thing, attribute)
    except (RuntimeError, AttributeError):
        return None


def _flat(value: Any) -> list[Any]:
    return [part for item in value for part in _flat(item)] if isinstance(value, (list, tuple)) else [value]


# By type(), because asking an object for its class can run its code.
def _is_tensor(thing: Any) -> bool:
    return issubclass(type(thing), torch.Tensor)


def _is_node(thing: Any) -> bool:
    return hasattr(type(thing), "next_functions")


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, types.CellType)
_MOST_STEPS, _MOST_ABOVE = 8, 50


def _climb(thing: Any, ours: set[int]) -> _Found:
    """The variable of a module that leads to an object, with its name; or else what has the object, without one."""
    seen = {*ours, id(thing)}
    level, owner = [thing], None
    for _ in range(_MOST_STEPS):
        seen.add(id(level))
        below = {id(part) for part in level}
        above = [h for h in gc.get_referrers(*level) if id(h) not in seen and not isinstance(h, types.FrameType)]
        seen.update(id(holder) for holder in above)
        for holder in above:
            module = sys.modules.get(str(holder.get("__name__"))) if isinstance(holder, dict) else None
            if module is not None and vars(module) is holder:
                name = next(key for key, value in vars(module).items() if id(value) in below)
                return f"{module.__name__}.{name}", vars(module)[name]
        if owner is None:
            owner = next((h for h in above if not isinstance(h, _CONTAINERS)), None)
        level = above[:_MOST_ABOVE]
        seen.add(id(above))
        if not level:
            break
    return "", thing if owner is None else owner


# Reference cycles ----------------------------------------------------------------------------------------------------


@dataclass
class Collected:
    """What a garbage collection freed."""

    bytes: int = 0
    cycles: list[str] = field(default_factory=list)  # classes of the objects in its cycles that led to device memory


def collect() -> Collected:
    """Collect garbage, and say how many bytes of device memory that freed and which classes' cycles held them."""
    before = allocated()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        garbage = list(gc.garbage)
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
    cycles = _cycle_classes(garbage) if any(_on_device(thing) for thing in garbage) else []
    del garbage
    gc.collect()
    return Collected(max(0, before - allocated()), cycles)


def allocated() -> int:
    """Allocated bytes of the device; does not start CUDA."""
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]


def _on_device(thing: Any) -> bool:
    return _is_tensor(thing) and thing.device.type == "cuda"


_PLUMBING = (dict, list, tuple, set, types.CellType, types.FunctionType, types.MethodType, torch.Tensor)


def _cycle_classes(garbage: list[Any]) -> list[str]:
    """Classes of the objects in cycles that lead to a tensor on the device, without those that only connect."""
    position = {id(thing): index for index, thing in enumerate(garbage)}
    after = [[position[id(r)] for r in gc.get_referents(thing) if id(r) in position] for thing in garbage]
    leads = _leading_to([i for i, thing in enumerate(garbage) if _on_device(thing)], after)
    names: dict[str, None] = {}
    for component in _components(after):
        if (len(component) > 1 or component[0] in after[component[0]]) and component[0] in leads:
            things = [garbage[index] for index in component]
            told = [t for t in things if not isinstance(t, _PLUMBING)] or [
                t for t in things if isinstance(t, types.FunctionType)
            ]
            names.update(dict.fromkeys(sorted(_class_name(t) for t in told)))
    return list(names)


def _class_name(thing: Any) -> str:
    name = f"{thing.__qualname__}()" if isinstance(thing, types.FunctionType) else type(thing).__qualname__
    return name.rpartition("<locals>.")[2]


def _leading_to(targets: list[int], after: list[list[int]]) -> set[int]:
    before: list[list[int]] = [[] for _ in after]
    for index, others in enumerate(after):
        for other in others:
            before[other].append(index)
    found, waiting = set(targets), list(targets)
    while waiting:
        for index in before[waiting.pop()]:
            if index not in found:
                found.add(index)
                waiting.append(index)
    return found


def _components(after: list[list[int]]) -> Iterator[list[int]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    number: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    for start in range(len(after)):
        if start in number:
            continue
        calls = [(start, iter(after[start]))]
        number[start] = lowest[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while calls:
            node, others = calls[-1]
            for other in others:
                if other not in number:
                    number[other] = lowest[other] = len(number)
                    stack.append(other)
                    on_stack.add(other)
                    calls.append((other, iter(after[other])))
                    break
                if other in on_stack:
                    lowest[node] = min(lowest[node], number[other])
            else:
                calls.pop()
                if calls:
                    lowest[calls[-1][0]] = min(lowest[calls[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    yield component
