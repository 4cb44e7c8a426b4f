"""The real GPUs of this machine and what is on them, by NVIDIA's management library (NVML).

NVML looks at a GPU without using it: nothing here makes a CUDA context or imports torch. Each question asks for NVML
anew, which is initialised once per process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ..errors import MeasurementFailed, UserError
from ..virtual_gpu import stand_in

_ELSE = "without --mbmem-gpu tests run on the virtual GPU"

_NO_GPUS = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES by which people and batch systems hide every GPU."""


@dataclass(frozen=True)
class PhysicalGpu:
    """A GPU, or a MIG device of one, that CUDA can use."""

    index: int  # NVML's, and nvidia-smi's; that of the whole GPU for a MIG device
    uuid: str  # "GPU-..." or "MIG-...", as CUDA_VISIBLE_DEVICES takes it
    name: str  # "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    capacity: int  # bytes, what NVML calls total
    compute_capability: tuple[int, int]
    is_mig: bool

    @property
    def key(self) -> str:
        """Of its baselines: name and memory to the nearest GiB, as in "nvidia-h100-80gb-hbm3-80gib"."""
        slug = re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")
        key = f"{slug}-{round(self.capacity / 2**30)}gib".lstrip("-")
        return f"gpu-{key}" if key.startswith("virtual-") else key  # those are of virtual GPUs

    def __str__(self) -> str:
        return f"GPU {self.index}: {self.name} ({self.uuid})"


@dataclass(frozen=True)
class Machine:
    """What CUDA can use here."""

    gpus: tuple[PhysicalGpu, ...]  # that CUDA_VISIBLE_DEVICES names, in its order; all of one kind
    driver: str  # version, as in "575.57.08"
    cuda: str  # the latest version that the driver supports, as in "13.0"


@dataclass(frozen=True)
class Process:
    """A process that computes on a GPU."""

    pid: int  # outside the container, where this process is in one
    used: int | None  # bytes; None where NVML does not tell


def machine() -> Machine:
    """The GPUs that can be measured on.

    CUDA takes CUDA_VISIBLE_DEVICES up to the first wrong entry and says nothing; here a wrong entry is an error. An
    index or the UUID of a GPU in MIG mode means all its MIG devices, and so does no CUDA_VISIBLE_DEVICES. (CUDA itself
    shows a process one MIG device at most: give each worker the UUID of its own.)

    Raises `UserError` where there is nothing to measure on, or the visible GPUs are of different kinds.
    """
    needed = _torch_cuda()
    nvml = _nvml()
    driver, cuda = _driver(nvml)
    if _major(cuda) < _major(needed):
        raise UserError(
            f"--mbmem-gpu: the NVIDIA driver {driver} is too old: it supports CUDA {cuda}, and the installed torch is "
            f"built for CUDA {needed}, which needs a driver for CUDA {_major(needed)}.0 or later. Update the driver, "
            f"or install a torch that is built for CUDA {_major(cuda)}; {_ELSE}"
        )
    gpus = _visible(_boards(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if len({gpu.key for gpu in gpus}) > 1:
        raise UserError(
            "--mbmem-gpu: the visible GPUs are of different kinds, and figures of one say nothing about another. "
            f"Choose equal ones with CUDA_VISIBLE_DEVICES=UUID,...; these are visible:{_listed(gpus)}"
        )
    return Machine(gpus, driver, cuda)


def processes(gpu: PhysicalGpu) -> tuple[Process, ...] | None:
    """The processes that compute on the GPU; None where NVML does not tell (some containers, WSL, vGPUs).

    In a container that hides the host's processes, NVML may tell of none: only if this process is among them while it
    has a CUDA context can an empty list be believed. Processes that only draw are left out.

    Raises `MeasurementFailed` when the GPU does not answer.
    """
    nvml = _nvml()
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v3(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
        return None
    except nvml.NVMLError as error:
        _no_answer(gpu, error)
    return tuple(Process(process.pid, process.usedGpuMemory) for process in found)


def used(gpu: PhysicalGpu) -> int:
    """Bytes of the device that are gone, whoever has them: all processes, their contexts, and the driver's reserve.

    Raises `MeasurementFailed` when the GPU does not answer.
    """
    nvml = _nvml()
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except nvml.NVMLError as error:
        _no_answer(gpu, error)
    return int(memory.total - memory.free)


def _no_answer(gpu: PhysicalGpu, error: Exception) -> NoReturn:
    raise MeasurementFailed(f"{gpu} does not answer (NVML: {error})") from None


# --- torch, driver and NVML -------------------------------------------------------------------------------------------


def _torch_cuda() -> str:
    """The version of CUDA that the installed torch is built for, found without importing torch."""
    install = "install one with 'pip install torch' on Linux, without a '+cpu' index"
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise UserError(f"--mbmem-gpu: needs a CUDA build of torch, and torch is not installed: {install}")
    folder = Path(spec.origin).parent
    text = ""
    with contextlib.suppress(OSError):
        text = (folder / "version.py").read_text()
    cuda = re.search(r"^cuda\b.*?=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        found = f"torch {version[1]}" if version else "torch"
        raise UserError(f"--mbmem-gpu: needs a CUDA build of torch, and {found} in {folder} is none: {install}")
    return cuda[1]


def _major(version: str) -> int:
    """CUDA's minor versions are compatible with each other."""
    return int(version.split(".")[0])


def _nvml() -> Any:
    """The module pynvml, ready to be asked."""
    return _initialised(os.environ.get(stand_in.VARIABLE))


@functools.lru_cache(maxsize=1)
def _initialised(_described: str | None) -> Any:
    """Once per process, and in tests for every description of stand-ins."""
    standing_in = stand_in.stand_ins()
    if standing_in is not None:
        standing_in.load_nvml()
    try:
        import pynvml
    except ImportError:
        raise UserError("--mbmem-gpu: needs the package nvidia-ml-py: run 'pip install nvidia-ml-py'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise UserError(
            "--mbmem-gpu: there is no NVIDIA driver here (libnvidia-ml.so.1 is not found). Install it, or start the "
            f"container with its GPUs (docker run --gpus all); {_ELSE}"
        ) from None
    except pynvml.NVMLError_LibRmVersionMismatch:
        raise UserError(
            "--mbmem-gpu: the NVIDIA driver in the kernel has another version than its libraries, as after an update. "
            f"Reboot the machine; {_ELSE}"
        ) from None
    except pynvml.NVMLError as error:
        raise UserError(
            f"--mbmem-gpu: the NVIDIA driver does not answer (NVML: {error}). See what nvidia-smi says; {_ELSE}"
        ) from None
    return pynvml


def _driver(nvml: Any) -> tuple[str, str]:
    """The versions of the driver and of its CUDA."""
    try:
        driver = str(nvml.nvmlSystemGetDriverVersion())
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())  # 12040 is 12.4
    except nvml.NVMLError as error:  # NVML is there, libcuda.so.1 is not
        raise UserError(
            f"--mbmem-gpu: the NVIDIA driver has no usable CUDA library, libcuda.so.1 (NVML: {error}). Install it, or "
            f"start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility; {_ELSE}"
        ) from None
    return driver, f"{number // 1000}.{number % 1000 // 10}"


# --- what there is ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Board:
    """A GPU that this user may use."""

    index: int
    uuid: str
    name: str
    devices: tuple[PhysicalGpu, ...]  # what CUDA can use of it: itself, or its MIG devices
    problem: str = ""  # why there are none
    old_names: dict[str, PhysicalGpu] = field(default_factory=dict)  # of MIG devices: "MIG-GPU-<uuid>/<gi>/<ci>"

    def __str__(self) -> str:
        return f"GPU {self.index}: {self.name} ({self.uuid})" + (f", which {self.problem}" if self.problem else "")


def _boards(nvml: Any) -> list[_Board]:
    """In the order of NVML, which is that of the PCI bus."""
    boards = []
    asked = "the NVIDIA driver"
    try:
        count = nvml.nvmlDeviceGetCount()
        for index in range(count):
            asked = f"GPU {index}"
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError_NoPermission:  # CUDA does not count it either
                continue
            boards.append(_board(nvml, handle, index))
    except nvml.NVMLError as error:
        raise UserError(
            f"--mbmem-gpu: {asked} does not answer (NVML: {error}). See what nvidia-smi says; {_ELSE}"
        ) from None
    if not boards:
        found = "no GPU that this user may use" if count else "no GPU"
        raise UserError(f"--mbmem-gpu: the NVIDIA driver finds {found}. See what nvidia-smi -L lists; {_ELSE}")
    return boards


def _board(nvml: Any, handle: Any, index: int) -> _Board:
    uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    capacity = _optional(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    if capacity is None:
        return _Board(index, uuid, name, (), "has no memory of its own that NVML could tell")
    if _optional(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0]) == nvml.NVML_DEVICE_MIG_ENABLE:
        devices, old_names = [], {}
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
                continue
            device = PhysicalGpu(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(mig),
                name=_mig_name(nvml, mig, name, capacity),
                capacity=nvml.nvmlDeviceGetMemoryInfo(mig).total,
                compute_capability=capability,
                is_mig=True,
            )
            devices.append(device)
            ids = (nvml.nvmlDeviceGetGpuInstanceId(mig), nvml.nvmlDeviceGetComputeInstanceId(mig))
            old_names[f"MIG-{uuid}/{ids[0]}/{ids[1]}"] = device
        problem = "" if devices else "is in MIG mode and has no MIG device (see nvidia-smi mig -cgi)"
        return _Board(index, uuid, name, tuple(devices), problem, old_names)
    if _optional(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle)) == nvml.NVML_COMPUTEMODE_PROHIBITED:
        return _Board(index, uuid, name, (), "is in compute mode 'prohibited' (see nvidia-smi -c)")
    return _Board(index, uuid, name, (PhysicalGpu(index, uuid, name, capacity, capability, is_mig=False),))


def _optional(nvml: Any, ask: Callable[[], int]) -> int | None:
    """None where a GPU does not have what is asked for."""
    with contextlib.suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return ask()
    return None


def _mig_name(nvml: Any, mig: Any, board: str, capacity: int) -> str:
    """As newer drivers say it, and NVIDIA's tools for older ones: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"."""
    name = str(nvml.nvmlDeviceGetName(mig))
    if " MIG " in name:
        return name
    found = nvml.nvmlDeviceGetAttributes_v2(mig)
    eighths = math.ceil(8 * found.memorySizeMB * 2**20 / capacity)
    memory = round(eighths / 8 * math.ceil(capacity / 2**30))
    compute = f"{found.computeInstanceSliceCount}c."
    if found.computeInstanceSliceCount == found.gpuInstanceSliceCount:
        compute = ""
    return f"{board} MIG {compute}{found.gpuInstanceSliceCount}g.{memory}gb"


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------


def _visible(boards: Sequence[_Board], value: str | None) -> tuple[PhysicalGpu, ...]:
    """What CUDA_VISIBLE_DEVICES names, in its order; without a value everything. Never empty."""
    if value is None:
        everything = tuple(device for board in boards for device in board.devices)
        if not everything:
            raise UserError(f"--mbmem-gpu: no GPU can be used; {_ELSE}. There are:{_listed(boards)}")
        return everything
    if value.strip() in _NO_GPUS:
        raise UserError(
            f"--mbmem-gpu: CUDA_VISIBLE_DEVICES={value!r} hides all GPUs. Unset it, or name some of these; {_ELSE}:"
            f"{_listed(boards)}"
        )
    chosen: list[PhysicalGpu] = []
    for entry in value.split(","):
        try:
            devices = _named(boards, entry.strip())
            if taken := next((device for device in devices if device in chosen), None):
                raise _Wrong(f"names {taken.uuid} for the second time")
        except _Wrong as problem:
            raise UserError(
                f"--mbmem-gpu: CUDA_VISIBLE_DEVICES={value!r}: {entry.strip()!r} {problem}. Indices from 0, UUIDs "
                f"(GPU-..., MIG-...) and beginnings of UUIDs are allowed; there are:{_listed(boards)}"
            ) from None
        chosen += devices
    return tuple(chosen)


class _Wrong(Exception):
    """What is wrong with an entry, as the rest of a sentence."""


def _named(boards: Sequence[_Board], entry: str) -> tuple[PhysicalGpu, ...]:
    """The devices that one entry of CUDA_VISIBLE_DEVICES names. Raises `_Wrong`."""
    if entry.startswith("MIG-"):
        names = {device.uuid: device for board in boards for device in board.devices if device.is_mig}
        names |= {name: device for board in boards for name, device in board.old_names.items()}
        if entry in names:
            return (names[entry],)
        found = {device for name, device in names.items() if name.startswith(entry)}
        if len(found) != 1:
            raise _Wrong("is the beginning of several UUIDs" if found else "is no MIG device of this machine")
        return tuple(found)
    if entry.startswith("GPU-"):
        alike = [board for board in boards if board.uuid.startswith(entry)]
        if len(alike) != 1:
            raise _Wrong("is the beginning of several UUIDs" if alike else "is no GPU of this machine")
        (board,) = alike
    elif re.fullmatch("[0-9]{1,9}", entry):
        if int(entry) >= len(boards):
            raise _Wrong("is beyond the last GPU")
        _check_order(boards)
        board = boards[int(entry)]
    else:
        raise _Wrong("is neither an index nor a UUID")
    if board.problem:
        raise _Wrong(f"names a GPU that {board.problem}")
    return board.devices


def _check_order(boards: Sequence[_Board]) -> None:
    """Different GPUs have no index before CUDA_DEVICE_ORDER says which: CUDA's default is the fastest one first."""
    if len({board.name for board in boards}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise _Wrong(
            "may be another GPU for CUDA, which numbers different GPUs by speed, than for nvidia-smi; "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"
        )


def _listed(things: Sequence[_Board] | Sequence[PhysicalGpu]) -> str:
    """A line for each GPU, and each MIG device."""
    lines = []
    for thing in things:
        lines.append(f"\n  {thing}")
        if isinstance(thing, _Board):
            lines += [f"\n    {device.name} ({device.uuid})" for device in thing.devices if device.is_mig]
    return "".join(lines)
