"""Has PyTorch's allocator record its history, and stamps on it which module ran in which phase, and what tensors are.

In a worker, on a real or a virtual GPU. Nothing is allocated on the device and nothing is wrapped: hooks of modules say
where a forward pass is, hooks of the autograd nodes that made their outputs where a backward pass is, and hooks of
optimizers and of accumulated gradients what a tensor is. `history.owners` reads the stamps.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, get_args

import torch
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..garbage import no_collections
from ..history.owners import History, attribute
from ..history.stamps import WORKSPACES, Identity, Mode, Stamp
from ..measurement import Category

MAX_EVENTS = 20_000_000
"""Each takes some hundred bytes of host memory."""


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
    """

    running: ClassVar[Recording | None] = None
    snapshot: dict[str, Any]  # once it has stopped

    def __init__(self, phase: str = "build", *, full: bool) -> None:
        self._serial = 0
        self._running: list[str] = []  # modules, outermost first
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._prehooks: dict[str, Callable[[Any], None]] = {}  # by module
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
        self._stamps = {mode: Stamp(self._serial, step, phase, mode, "").text() for mode in get_args(Mode)}
        self._stamp("forward", "")

    def _stamp(self, mode: Mode, module: str) -> None:
        torch._C._cuda_setMemoryMetadata(self._stamps[mode] + module)

    def _enter(self, module: torch.nn.Module, arguments: Any) -> None:
        outer = self._running[-1] if self._running else ""
        if self._running:
            self._on_backward(arguments, outer)
        elif module not in self._known:
            self._meet(module)
        name = self._names.get(module)
        if name is None:  # a module that its owner keeps outside of its own modules
            name = f"{outer}.{type(module).__name__}" if outer else type(module).__name__
            self._names[module] = name
        self._running.append(name)
        self._stamp(_mode(), name)

    def _leave(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if not self._running:  # entered before the recording began
            return
        name = self._running.pop()
        self._on_backward(output, name)
        self._stamp(_mode(), self._running[-1] if self._running else "")

    def _on_backward(self, tensors: Any, module: str) -> None:
        """Stamp the module when a backward pass comes to the nodes that made these tensors; the first one stays."""
        if isinstance(tensors, torch.Tensor):
            node: Any = tensors.grad_fn
            if node is not None and "mbmem" not in (marks := node.metadata):
                marks["mbmem"] = True
                if module not in self._prehooks:
                    self._prehooks[module] = lambda _: self._stamp("backward", module)
                node.register_prehook(self._prehooks[module])
        elif isinstance(tensors, (list, tuple)):
            for tensor in tensors:
                self._on_backward(tensor, module)
        elif isinstance(tensors, dict):
            self._on_backward(list(tensors.values()), module)

    # What tensors are -------------------------------------------------------------------------------------------------

    def _meet(self, root: torch.nn.Module) -> None:
        """Learn the names of a model's modules, and what its parameters are."""
        self._known[root] = True
        for path, module in root.named_modules():
            self._names.setdefault(module, _plain(path) or type(module).__name__)
        for path, parameter in root.named_parameters():
            name = _plain(path)
            self._is("parameters", name, parameter)
            if (main := getattr(parameter, "main_grad", None)) is not None:
                self._is("main gradients", name, main)
            if parameter.requires_grad and parameter.is_leaf:
                self._watch_gradient(parameter, name)
        for path, buffer in root.named_buffers():
            self._is("buffers", _plain(path), buffer)

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
            on_device = isinstance(tensor, torch.Tensor) and tensor.is_cuda
            if on_device and tensor.untyped_storage().data_ptr() not in models:
                self._is("optimizer state", "", tensor)

    def _is(self, category: Category, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_cuda and (address := tensor.untyped_storage().data_ptr()):
            torch._C._cuda_annotateMemory(address, Identity(category, name, tensor.nbytes).text())

    # The end ----------------------------------------------------------------------------------------------------------

    def stop(self) -> History:
        """End the recording. Frees cuBLAS's workspaces, so every figure must have been taken before.

        The snapshot that it read is in `snapshot` then, in PyTorch's format.
        """
        torch._C._cuda_setMemoryMetadata(WORKSPACES)
        torch._C._cuda_clearCublasWorkspaces()
        torch._C._cuda_setMemoryMetadata("")
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


def _mode() -> Mode:
    return "forward" if torch._C._current_graph_task_id() == -1 else "recompute"


def _plain(path: str) -> str:
    """Without the wrappers' own names: "module.module.decoder" is "decoder"."""
    return re.sub(r"^(module(\.|$))+", "", path)
