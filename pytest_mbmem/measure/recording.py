"""Has PyTorch's allocator record its history, and stamps on it which module ran in which phase, and what tensors are.

In a worker, on a real or a virtual GPU. Nothing is allocated on the device and nothing is wrapped: hooks of modules say
where a forward pass is, hooks of the autograd nodes that made their outputs where a backward pass is, and hooks of
optimizers and of accumulated gradients what a tensor is. `history.owners` reads the stamps.
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, ClassVar

import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..garbage import no_collections
from ..history.owners import History, attribute
from ..history.stamps import WORKSPACES, Identity, Mode, Stamp
from ..measurement import Category

MAX_EVENTS = 20_000_000
"""Each takes some hundred bytes of host memory."""

_MODES: tuple[Mode, ...] = ("forward", "backward", "recompute")

_WRAPPERS = re.compile(r"^(module(\.|$))+")

_graph_task = torch._C._current_graph_task_id  # -1 outside of backward passes: a forward pass in one is recomputed
_stamp: Callable[[str], None] = getattr(torch._C, "_cuda_setMemoryMetadata", lambda _: None)


def can_record() -> bool:
    """Whether this torch's allocator keeps what `Recording` stamps on its history (torch 2.14 does)."""
    return hasattr(torch._C, "_cuda_setMemoryMetadata") and hasattr(torch._C, "_cuda_annotateMemory")


def is_running() -> bool:
    """Whether there is a `Recording` that has not stopped: the allocator has one history."""
    return Recording.running is not None


class Recording:
    """The allocator's history of this process, from the making of this to `stop`.

    Begin it before anything is allocated. `begin` is told when a phase begins. `full` also records when freed memory
    can be used again, which is later where another stream uses it: only a replay needs to know.

    What runs for every module and every node is written for speed: it is most of what a recording costs.
    """

    running: ClassVar[Recording | None] = None
    snapshot: dict[str, Any]  # once it has stopped

    def __init__(self, phase: str = "build", *, full: bool) -> None:
        self._serial = self._step = 0
        self._running: list[str] = []  # modules, outermost first
        self._names: dict[int, tuple[str, weakref.ref[torch.nn.Module]]] = {}  # by the module's `id`, while it lives
        self._prehooks: dict[str, Callable[[Any], None]] = {}  # by module
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._told: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # address of an optimizer's tensor, by `id`
        # Numbers of the nodes that have a hook, in this step, by the thread that made them and counted them.
        self._hooked: defaultdict[int, set[int]] = defaultdict(set)
        self._hooks = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
            module_hooks.register_module_parameter_registration_hook(self._parameter_made),
            register_optimizer_step_post_hook(self._optimizer_stepped),
        ]
        # Not before CUDA starts: PyTorch would read the allocator's settings for it, which a test may still set.
        torch.cuda._lazy_call(partial(_record, full))  # type: ignore[no-untyped-call]
        Recording.running = self
        self.begin(0, phase)

    # Where the run is -------------------------------------------------------------------------------------------------

    def begin(self, step: int, phase: str) -> None:
        """A phase begins."""
        self._serial += 1
        if step != self._step:
            self._step = step
            self._hooked.clear()
        self._forward, self._backward, self._recompute = (
            Stamp(self._serial, step, phase, mode, "").text() for mode in _MODES
        )
        _stamp(self._forward)

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        running = self._running
        if running:
            self._on_backward(arguments, running[-1])
        elif module not in self._known:
            self._meet(module)
        known = self._names.get(id(module))
        name = known[0] if known is not None and known[1]() is module else self._met_late(module)
        running.append(name)
        _stamp((self._forward if _graph_task() == -1 else self._recompute) + name)

    def _met_late(self, module: torch.nn.Module) -> str:
        """A name for a module that its owner keeps outside of its own modules."""
        name = type(module).__name__
        if self._running:
            name = f"{self._running[-1]}.{name}"
        self._names[id(module)] = name, weakref.ref(module)
        return name

    def _leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        running = self._running
        if not running:  # entered before the recording began
            return
        self._on_backward(output, running.pop())
        mode = self._forward if _graph_task() == -1 else self._recompute
        _stamp(mode + running[-1] if running else mode)

    def _on_backward(self, tensors: Any, module: str) -> None:
        """Stamp the module when a backward pass comes to the nodes that made these tensors; the first one stays."""
        for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            if tensor is None:
                continue
            if isinstance(tensor, torch.Tensor):
                node: Any = tensor.grad_fn
                if node is not None:
                    hooked, number = self._hooked[get_ident()], node._sequence_nr()
                    if number not in hooked:
                        hooked.add(number)
                        node.register_prehook(self._prehooks.get(module) or self._prehook(module))
            elif isinstance(tensor, dict):
                self._on_backward(list(tensor.values()), module)
            elif isinstance(tensor, (tuple, list)):
                self._on_backward(tensor, module)

    def _prehook(self, module: str) -> Callable[[Any], None]:
        def come_to(_: Any) -> None:
            _stamp(self._backward + module)

        self._prehooks[module] = come_to
        return come_to

    # What tensors are -------------------------------------------------------------------------------------------------

    def _meet(self, root: torch.nn.Module) -> None:
        """Learn the names of a model's modules, and what its parameters are."""
        self._known[root] = True
        seen = set()
        for path, module in root.named_modules():
            path = _plain(path)
            known = self._names.get(id(module))
            if known is None or known[1]() is not module:
                self._names[id(module)] = path or type(module).__name__, weakref.ref(module)
            prefix = f"{path}." if path else ""
            for own, parameter in module._parameters.items():
                if parameter is None or parameter in seen:
                    continue
                seen.add(parameter)
                name = prefix + own
                self._is("parameters", name, parameter)
                if (main := getattr(parameter, "main_grad", None)) is not None:
                    self._is("main gradients", name, main)
                if parameter.requires_grad and parameter.is_leaf:
                    self._watch_gradient(parameter, name)
            for own, buffer in module._buffers.items():
                if buffer is not None:
                    self._is("buffers", prefix + own, buffer)

    def _watch_gradient(self, parameter: torch.nn.Parameter, name: str) -> None:
        def accumulated(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self._is("gradients", name, parameter.grad)

        self._hooks.append(parameter.register_post_accumulate_grad_hook(accumulated))  # type: ignore[no-untyped-call]

    def _parameter_made(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None:
            self._is("parameters", "", parameter)

    def _optimizer_stepped(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Only a few first times: later steps make no state that is kept."""
        times = self._optimizers[optimizer] = self._optimizers.get(optimizer, 0) + 1
        if times > 2:
            return
        models = {p.untyped_storage().data_ptr() for m in self._known for p in m.parameters() if p.is_cuda}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        held += [value for state in list(optimizer.state.values()) for value in state.values()]
        for tensor in held:
            if not (isinstance(tensor, torch.Tensor) and tensor.is_cuda):
                continue
            address = tensor.untyped_storage().data_ptr()
            before, told = self._told.get(id(tensor), (0, None))
            if address not in models and not (before == address and told is not None and told() is tensor):
                self._told[id(tensor)] = address, weakref.ref(tensor)
                self._is("optimizer state", "", tensor)

    def _is(self, category: Category, name: str, tensor: torch.Tensor) -> None:
        for part in _parts(tensor):
            if part.is_cuda and (address := part.untyped_storage().data_ptr()):
                torch._C._cuda_annotateMemory(address, Identity(category, name, part.nbytes).text())

    # The end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> History:
        """End the recording. Frees cuBLAS's workspaces, so every figure must have been taken before.

        The snapshot that it read is in `snapshot` then, in PyTorch's format.
        """
        _stamp(WORKSPACES)
        torch._C._cuda_clearCublasWorkspaces()
        _stamp("")
        for hook in self._hooks:
            hook.remove()
        try:
            with no_collections():
                self.snapshot = torch.cuda.memory._snapshot()
                return attribute(self.snapshot["device_traces"][torch.cuda.current_device()])
        finally:
            Recording.running = None
            torch.cuda.memory._record_memory_history(None)


def _record(full: bool) -> None:
    skipped = None if full else ["free_completed"]
    torch.cuda.memory._record_memory_history(
        "all", context="alloc", stacks="python", max_entries=MAX_EVENTS, skip_actions=skipped
    )


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What holds its bytes: one of Transformer Engine's in 8 or 4 bits has several tensors (2.10 to 2.20)."""
    if not hasattr(tensor, "_quantizer"):
        return [tensor]
    return [part for name, part in vars(tensor).items() if name.startswith("_") and isinstance(part, torch.Tensor)]


def _plain(path: str) -> str:
    """Without the wrappers' own names: "module.module.decoder" is "decoder"."""
    return _WRAPPERS.sub("", path) if path.startswith("module") else path
