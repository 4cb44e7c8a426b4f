"""Offload to host memory, where Megatron Core looks for it in Transformer Engine and pip has none.

- Layer offload (`cpu_offloading`) is Transformer Engine's `get_cpu_offload_context`. `LayerOffload` is an equivalent
  for memory: the same tensors leave and come back at the same layers. Of two tensors that share memory and are no views
  of each other it moves one, where the original moves both.
- Fine-grained offload by module (`offload_modules`) is Megatron's own. It sets a flag in Transformer Engine for that
  library's modules and refuses to run without the library; here it sets a flag that nobody reads.
- Optimizer offload (`optimizer_cpu_offload`) is Megatron's `HybridDeviceOptimizer` over torch's optimizers. On a
  virtual GPU its host half holds its memory and computes nothing.

With Transformer Engine installed, Megatron finds the original and the equivalents stay out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import megatron.core.extensions.transformer_engine as te_extension
import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.optimizer import optimizer_config
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer import transformer_block
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..recipe import Recipe


def install() -> None:
    """Put what is missing without Transformer Engine where Megatron looks for it. Once per process."""
    if te_extension.HAVE_TE:
        _choose_context()
        return
    transformer_block.get_cpu_offload_context = _get_cpu_offload_context
    te_extension.cpu_offload = types.SimpleNamespace(CPUOffloadEnabled=False)
    # OptimizerConfig compares the version of a library that is not there (core 0.16 to 0.19).
    optimizer_config.is_te_min_version = lambda *_: False


_OLDER = "NVTE_CPU_OFFLOAD_V1"
"""Variable with which Transformer Engine takes its older layer offload, and the name it remembers that by."""


def _choose_context() -> None:
    """Have Transformer Engine's layer offload be the one that the environment asks for.

    It reads the variable when it is imported, which the server of the workers does before a recipe sets it (2.20).
    """
    for name in ("cpu_offload", "attention.dot_product_attention.backends"):
        module = importlib.import_module(f"transformer_engine.pytorch.{name}")
        if hasattr(module, _OLDER):
            setattr(module, _OLDER, os.environ.get(_OLDER, "0") == "1")


def is_older_context() -> bool:
    """Whether layer offload is Transformer Engine's older one, which moves what its modules mark, of any size."""
    if not te_extension.HAVE_TE:
        return False
    module = importlib.import_module("transformer_engine.pytorch.cpu_offload")
    return bool(getattr(module, _OLDER, True))


def assumptions(recipe: Recipe, virtual: bool) -> tuple[str, ...]:
    """What a measurement of the recipe must state about offload."""
    stated = []
    if recipe.memory.cpu_offloading and not te_extension.HAVE_TE:
        stated.append("layer offload: saved-tensor hooks in place of Transformer Engine's")
    if recipe.memory.offload_modules and not te_extension.HAVE_TE:
        stated.append("offload by module: a flag in place of Transformer Engine's, which its own modules alone read")
    if recipe.memory.optimizer_cpu_offload and virtual:
        stated.append("optimizer offload: the optimizer on the host holds its memory and computes nothing")
    if recipe.memory.optimizer_cpu_offload and recipe.parallelism.distributed_optimizer:
        stated.append("optimizer offload: with the precision-aware optimizer, as Megatron-LM's script demands")
    return tuple(stated)


# --- layers ----------------------------------------------------------------------------------------------------------

FEWEST_ELEMENTS = 256 * 1024
"""Smaller tensors stay on the device (as in Transformer Engine 2.20)."""


def _get_cpu_offload_context(
    enabled: bool, num_layers: int, model_layers: int, activations: bool, weights: bool, *_: object
) -> tuple[contextlib.AbstractContextManager[Any], Callable[[torch.Tensor], torch.Tensor] | None]:
    """The context to run each layer in, and the function that its output goes through."""
    if not enabled:
        return contextlib.nullcontext(), None
    offload = LayerOffload(num_layers, model_layers)
    return offload, offload.commit


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a copy in the same order of dimensions takes the tensor's bytes, no more and no less."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def move_whole(*tensors: torch.Tensor) -> None:
    """Have views that layer offload moves leave as the tensors they are views of, and so even if they have gaps.

    Transformer Engine's attention marks queries, keys and values so (`start_offload`), all parts of one projection.
    Where it is installed nothing is marked: its own context takes no tensor in another order of dimensions.
    """
    if te_extension.HAVE_TE:
        return
    for tensor in tensors:
        tensor.offload_base_tensor = True  # type: ignore[attr-defined]


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


@dataclass
class _Layer:
    """What one offloaded layer saves for backward: on the device, on the host, and on the device again.

    Each tensor is moved once, however often it is saved; views of a tensor are saved as that tensor.
    """

    stream: torch.cuda.Stream
    device: list[torch.Tensor] = field(default_factory=list)
    host: list[torch.Tensor] = field(default_factory=list)
    views: list[tuple[int, Any]] = field(default_factory=list)  # index of the tensor; shape, stride, offset in it
    copied: torch.cuda.Event | None = None

    def save(self, tensor: torch.Tensor) -> int | torch.Tensor:
        """A number to `load` it by, or the tensor itself if it stays on the device."""
        marked = getattr(tensor, "offload_base_tensor", False)
        base = tensor if tensor._base is None else tensor._base
        whole = marked or base.numel() == tensor.numel()
        moved = base if whole and base.dtype is tensor.dtype else tensor
        stays = tensor.numel() < FEWEST_ELEMENTS or isinstance(tensor, torch.nn.Parameter)
        # PyTorch's flash kernel saves its output, which is no view, in another order of dimensions
        is_other_order = tensor._base is not None and not (marked or tensor.is_contiguous())
        if stays or is_other_order or not moved.is_cuda or not _is_dense(moved):
            return tensor
        index = next((i for i, known in enumerate(self.device) if _is_same(known, moved)), len(self.device))
        if index == len(self.device):
            self.device.append(moved)
        offset = tensor.storage_offset() - moved.storage_offset()
        self.views.append((index, None if moved is tensor else (tensor.shape, tensor.stride(), offset)))
        return len(self.views) - 1

    def load(self, saved: int | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        index, view = self.views[saved]
        tensor = self.device[index]
        if view is None:
            return tensor
        shape, stride, offset = view
        return tensor.as_strided(shape, stride, tensor.storage_offset() + offset)

    def start_offload(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for tensor in self.device:
                self.host.append(torch.empty_like(tensor, device="cpu", pin_memory=True))
                self.host[-1].copy_(tensor, non_blocking=True)
        self.copied = self.stream.record_event()

    def finish_offload(self) -> None:
        self.wait()
        self.device = []

    def start_reload(self) -> None:
        # allocated on the main stream, whose cache the tensors came from
        self.device = [torch.empty_like(tensor, device="cuda") for tensor in self.host]
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for tensor, host in zip(self.device, self.host, strict=True):
                tensor.copy_(host, non_blocking=True)
        self.copied = self.stream.record_event()

    def wait(self) -> None:
        """Have the current stream wait for the copies that were started last."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)

    def clear(self) -> None:
        self.device, self.host, self.views, self.copied = [], [], [], None


class LayerOffload:
    """Offloads what the first `offloaded` of `layers` layers save for backward, as Transformer Engine 2.20 does.

    A layer's copies start when the next layer starts. Its device memory is free when the layer `layers - offloaded`
    places later starts, and it is copied back when the backward of the layer before that one starts; so a forward ends
    with `layers - offloaded` layers on the device.

    Used as a context around each layer in turn, whose output goes through `commit`.
    """

    inside_context = False
    """Where true, Megatron's linear layers mark their inputs for Transformer Engine; nothing here reads marks."""

    def __init__(self, offloaded: int, layers: int) -> None:
        self.count, self.distance = layers, layers - offloaded
        stream = torch.cuda.Stream()
        self.offloaded = [_Layer(stream) for _ in range(offloaded)]
        self.current = -1  # the layer that runs forward
        self._in_backward: _Layer | None = None
        self._hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __deepcopy__(self, memo: object) -> LayerOffload:
        return self  # it hangs on the configuration, which Megatron copies for experts

    def _layer(self, number: int) -> _Layer | None:
        return self.offloaded[number] if 0 <= number < len(self.offloaded) else None

    def __enter__(self) -> None:
        self.current += 1
        if self.current == self.count:
            self.current = 0
        if self.current == 0:
            for layer in self.offloaded:
                layer.clear()
        elif before := self._layer(self.current - 1):
            before.start_offload()
        if done := self._layer(self.current - self.distance):
            done.finish_offload()
        here = self._layer(self.current)
        self._hooks = saved_tensors_hooks(here.save, here.load) if here else contextlib.nullcontext()
        self._hooks.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)

    def commit(self, output: torch.Tensor) -> torch.Tensor:
        """Have the backward of the layer that just ran begin with what it and later ones need."""
        number = self.current
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(lambda _: self._begin_backward(number))
        return output

    def _begin_backward(self, number: int) -> None:
        Variable._execution_engine.queue_callback(self._end_backward)
        self._end_backward()
        if coming := self._layer(number - self.distance + 1):
            coming.start_reload()
        self._in_backward = self._layer(number)
        if self._in_backward:
            self._in_backward.wait()

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward.clear()
        self._in_backward = None


# --- modules ---------------------------------------------------------------------------------------------------------


def forget_modules() -> None:
    """Free what fine-grained offload keeps in this process: a new model learns its own groups in its first step."""
    PipelineOffloadManager.OFFLOAD_MGR = None


# --- optimizer -------------------------------------------------------------------------------------------------------


def leave_out_host_values() -> None:
    """Have the optimizer's half on the host take memory and no time. Virtual GPU only; once per process.

    Its values come from the device, which computes none. Memory that nobody writes costs the machine nothing, so a
    share that fills the host of a real job fits here too.
    """
    # deterministic algorithms fill it with NaN
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    megatron_optimizer.CPUAdam, megatron_optimizer.CPUSGD = _HostAdam, _HostSGD
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _sub_optimizer_param_groups


class _HostAdam(torch.optim.AdamW):
    """AdamW whose state has its memory and whose step does nothing."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter] = {
                        "step": torch.zeros(()),
                        "exp_avg": torch.empty_like(parameter),
                        "exp_avg_sq": torch.empty_like(parameter),
                    }


class _HostSGD(torch.optim.SGD):
    """SGD likewise."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["momentum"] and not self.state[parameter]:
                    self.state[parameter] = {"momentum_buffer": torch.empty_like(parameter)}


_COPIES: dict[Any, dict[str, Any]] = {
    torch.Tensor.cpu: {"device": "cpu"},
    torch.Tensor.pin_memory: {"pin_memory": True},
    torch.Tensor.clone: {},
    torch.Tensor.float: {"dtype": torch.float},
}


class _LargeHostCopiesWithoutValues(TorchFunctionMode):
    """Copies on the host or to it, of more bytes than the virtual GPU's own copies carry, are left unwritten."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and len(args) == 1 and not kwargs:
            source: torch.Tensor = args[0]
            if source.nbytes > 2**20 and (not source.is_cuda or func is torch.Tensor.cpu):
                return torch.empty_like(source, **_COPIES[func])
        return func(*args, **kwargs)


_with_values = HybridDeviceOptimizer._get_sub_optimizer_param_groups


def _sub_optimizer_param_groups(self: HybridDeviceOptimizer, offload_fraction: float) -> Any:
    with _LargeHostCopiesWithoutValues():
        return _with_values(self, offload_fraction)
