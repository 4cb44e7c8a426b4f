"""Which GPUs can be measured on: by a made-up NVML for what no stand-in shows, and by stand-ins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from pytest_mbmem.errors import MeasurementFailed, UserError
from pytest_mbmem.measure import nvml
from pytest_mbmem.measure.nvml import Machine, PhysicalGpu, Process, machine, processes, used

GIB, MIB = 2**30, 2**20
H100 = "NVIDIA H100 80GB HBM3"
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 3, 4, 6
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH = 12, 13, 15, 18


@dataclass
class FakeMig:
    """A MIG device."""

    uuid: str
    ids: tuple[int, int]
    slices: tuple[int, int] = (1, 1)  # of the GPU instance, of the compute instance
    mib: int = 9984
    name: str = H100  # as older drivers say it: that of the whole GPU


@dataclass
class FakeGpu:
    """A GPU as NVML tells of it, a handle of itself."""

    uuid: str
    name: str = H100
    mib: int = 81559
    free_mib: int = 81000
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    mig: list[FakeMig] | None = None  # not in MIG mode
    error: int | None = None  # that opening it gives
    memory_error: int | None = None
    processes: list[Process] | int = field(default_factory=list)  # or the error that asking for them gives


class FakeNvml:
    """Takes the place of the library under pynvml's functions."""

    def __init__(self) -> None:
        self.gpus: list[FakeGpu] = []
        self.init_error: int | None = None
        self.cuda: int | pynvml.NVMLError = 13000
        self.initialised = 0

    def handles(self) -> list[FakeGpu | FakeMig]:
        return [*self.gpus, *(mig for gpu in self.gpus for mig in gpu.mig or ())]

    def nvmlInit(self) -> None:
        _raise(self.init_error)
        self.initialised += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        if isinstance(self.cuda, pynvml.NVMLError):
            raise self.cuda
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        _raise(self.gpus[index].error)
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu | FakeMig:
        for handle in self.handles():
            if handle.uuid == uuid:
                return handle
        raise pynvml.NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: FakeGpu | FakeMig) -> str:
        return handle.uuid

    def nvmlDeviceGetName(self, handle: FakeGpu | FakeMig) -> str:
        return handle.name

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeGpu) -> tuple[int, int]:
        assert isinstance(handle, FakeGpu)  # NVML does not say it of a MIG device
        return (9, 0)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu | FakeMig) -> Any:
        if isinstance(handle, FakeMig):
            return SimpleNamespace(total=handle.mib * MIB, free=(handle.mib - 20) * MIB)
        _raise(handle.memory_error)
        return SimpleNamespace(total=handle.mib * MIB, free=handle.free_mib * MIB)

    def nvmlDeviceGetMigMode(self, handle: FakeGpu) -> list[int]:
        if handle.mig is None and handle.name != H100:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return [int(handle.mig is not None)] * 2

    def nvmlDeviceGetComputeMode(self, handle: FakeGpu) -> int:
        return handle.compute_mode

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeGpu, index: int) -> FakeMig:
        assert handle.mig is not None
        if index % 2 or index // 2 >= len(handle.mig):  # NVML's numbers have gaps
            raise pynvml.NVMLError(NOT_FOUND)
        return handle.mig[index // 2]

    def nvmlDeviceGetGpuInstanceId(self, mig: FakeMig) -> int:
        return mig.ids[0]

    def nvmlDeviceGetComputeInstanceId(self, mig: FakeMig) -> int:
        return mig.ids[1]

    def nvmlDeviceGetAttributes_v2(self, mig: FakeMig) -> Any:
        return SimpleNamespace(
            gpuInstanceSliceCount=mig.slices[0], computeInstanceSliceCount=mig.slices[1], memorySizeMB=mig.mib
        )

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: FakeGpu) -> list[Any]:
        if isinstance(handle.processes, int):
            raise pynvml.NVMLError(handle.processes)
        return [SimpleNamespace(pid=process.pid, usedGpuMemory=process.used) for process in handle.processes]


def _raise(code: int | None) -> None:
    if code is not None:
        raise pynvml.NVMLError(code)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeNvml]:
    """No GPU so far, and a torch that is built for CUDA 12.9."""
    fake = FakeNvml()
    for name in dir(fake):
        if name.startswith("nvml"):
            monkeypatch.setattr(pynvml, name, getattr(fake, name))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "MBMEM_TEST_STAND_INS"):
        monkeypatch.delenv(name, raising=False)
    nvml._initialised.cache_clear()
    install_torch(monkeypatch, tmp_path)
    yield fake
    nvml._initialised.cache_clear()


def install_torch(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cuda: str = "cuda: Optional[str] = '12.9'", library: bool = True
) -> None:
    torch = folder / "torch"
    (torch / "lib").mkdir(parents=True, exist_ok=True)
    (torch / "__init__.py").write_text("raise AssertionError('torch must not be imported')")
    (torch / "version.py").write_text(f"__version__ = '2.14.1+cu129'\ndebug = False\n{cuda}\nhip = None\n")
    (torch / "lib" / "libtorch_cuda.so").unlink(missing_ok=True)
    if library:
        (torch / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def two(fake: FakeNvml) -> FakeNvml:
    """Two equal GPUs."""
    fake.gpus = [FakeGpu("GPU-5f0b1111-aaaa"), FakeGpu("GPU-5f0b2222-bbbb")]
    return fake


@pytest.fixture
def migs(fake: FakeNvml) -> FakeNvml:
    """A GPU in MIG mode with two devices, and a plain one of the same kind."""
    devices = [FakeMig("MIG-1d00-aa", (1, 0)), FakeMig("MIG-1d01-bb", (2, 0))]
    fake.gpus = [FakeGpu("GPU-5f0b1111-aaaa"), FakeGpu("GPU-77772222-bbbb", mig=devices)]
    return fake


def problem() -> str:
    with pytest.raises(UserError) as raised:
        machine()
    message = str(raised.value)
    assert message.startswith("--mbmem-gpu: ")
    return message


# --- what is found ----------------------------------------------------------------------------------------------------


def test_the_machine(two: FakeNvml) -> None:
    assert machine() == Machine(
        gpus=(
            PhysicalGpu(0, "GPU-5f0b1111-aaaa", H100, 81559 * MIB, (9, 0), False),
            PhysicalGpu(1, "GPU-5f0b2222-bbbb", H100, 81559 * MIB, (9, 0), False),
        ),
        driver="580.65.06",
        cuda="13.0",
    )


def test_nvml_is_initialised_once(two: FakeNvml) -> None:
    for gpu in machine().gpus:
        processes(gpu)
        used(gpu)
    machine()
    assert two.initialised == 1


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [
        (H100, 81559, "nvidia-h100-80gb-hbm3-80gib"),
        ("NVIDIA A100-SXM4-40GB", 40960, "nvidia-a100-sxm4-40gb-40gib"),
        ("NVIDIA H200", 143771, "nvidia-h200-140gib"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 9984, "nvidia-h100-80gb-hbm3-mig-1g.10gb-me-10gib"),
        ("Virtual H100", 81559, "gpu-virtual-h100-80gib"),
        ("../../etc", 1024, "etc-1gib"),
        ("", 1024, "1gib"),
        ("Virtual", 1024, "gpu-virtual-1gib"),
    ],
)
def test_the_key_of_baselines_is_name_and_memory(name: str, mib: int, key: str) -> None:
    assert PhysicalGpu(0, "GPU-1", name, mib * MIB, (9, 0), False).key == key


def test_bytes_that_are_gone_and_who_has_some(two: FakeNvml) -> None:
    two.gpus[1].processes = [Process(42, 3 * GIB), Process(43, None)]
    first, second = machine().gpus
    assert used(first) == 559 * MIB
    assert processes(first) == ()
    assert processes(second) == (Process(42, 3 * GIB), Process(43, None))


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND])
def test_no_process_is_not_the_same_as_not_known(two: FakeNvml, code: int) -> None:
    two.gpus[0].processes = code
    first, second = machine().gpus
    assert (processes(first), processes(second)) == (None, ())


def test_a_gpu_that_is_lost_while_it_is_measured_on(two: FakeNvml) -> None:
    gpu = machine().gpus[0]
    two.gpus[0].processes = two.gpus[0].memory_error = GPU_IS_LOST
    asking: list[Callable[[PhysicalGpu], object]] = [used, processes]
    for ask in asking:
        with pytest.raises(MeasurementFailed) as raised:
            ask(gpu)
        assert str(raised.value) == f"GPU 0: {H100} (GPU-5f0b1111-aaaa) does not answer (NVML: GPU is lost)"


# --- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        ("GPU-5f0b2222-bbbb", [1]),
        ("GPU-5f0b2,GPU-5f0b1", [1, 0]),
        ("GPU-5f0b2,0", [1, 0]),
    ],
)
def test_visible_gpus_in_their_order(
    two: FakeNvml, monkeypatch: pytest.MonkeyPatch, value: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [gpu.index for gpu in machine().gpus] == indices


@pytest.mark.parametrize("value", ["", " ", "-1", "NoDevFiles"])
def test_all_gpus_are_hidden(two: FakeNvml, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert problem() == (
        f"--mbmem-gpu: CUDA_VISIBLE_DEVICES={value!r} hides all GPUs. Unset it, or name some of these; without "
        f"--mbmem-gpu tests run on the virtual GPU:\n  GPU 0: {H100} (GPU-5f0b1111-aaaa)\n"
        f"  GPU 1: {H100} (GPU-5f0b2222-bbbb)"
    )


@pytest.mark.parametrize(
    ("value", "entry", "what"),
    [
        ("0,2", "2", "is beyond the last GPU"),
        ("99999999999999999999", "99999999999999999999", "is neither an index nor a UUID"),
        ("0,-1", "-1", "is neither an index nor a UUID"),
        ("0,,1", "", "is neither an index nor a UUID"),
        ("0,", "", "is neither an index nor a UUID"),
        ("0;1", "0;1", "is neither an index nor a UUID"),
        ("1gpu", "1gpu", "is neither an index nor a UUID"),
        ("٣", "٣", "is neither an index nor a UUID"),
        ("all", "all", "is neither an index nor a UUID"),
        ("5f0b1111-aaaa", "5f0b1111-aaaa", "is neither an index nor a UUID"),
        ("GPU-9", "GPU-9", "is no GPU of this machine"),
        ("GPU-5f0b1111-aaaa-and-more", "GPU-5f0b1111-aaaa-and-more", "is no GPU of this machine"),
        ("GPU-5f0b", "GPU-5f0b", "is the beginning of several UUIDs"),
        ("MIG-1d", "MIG-1d", "is no MIG device of this machine"),
        ("0,1,0", "0", "names GPU-5f0b1111-aaaa for the second time"),
        ("0,GPU-5f0b1", "GPU-5f0b1", "names GPU-5f0b1111-aaaa for the second time"),
    ],
)
def test_a_wrong_entry(two: FakeNvml, monkeypatch: pytest.MonkeyPatch, value: str, entry: str, what: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert problem() == (
        f"--mbmem-gpu: CUDA_VISIBLE_DEVICES={value!r}: {entry!r} {what}. Indices from 0, UUIDs (GPU-..., MIG-...) and "
        f"beginnings of UUIDs are allowed; there are:\n  GPU 0: {H100} (GPU-5f0b1111-aaaa)\n"
        f"  GPU 1: {H100} (GPU-5f0b2222-bbbb)"
    )


def test_different_gpus_have_no_index_until_their_order_is_set(two: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    two.gpus[0].name = "NVIDIA T400"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (
        "'1' may be another GPU for CUDA, which numbers different GPUs by speed, than for nvidia-smi; set " in problem()
    )
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs" in problem()
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in machine().gpus] == [H100]
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5f0b2222-bbbb")
    assert [gpu.name for gpu in machine().gpus] == [H100]


def test_visible_gpus_are_of_one_kind(two: FakeNvml) -> None:
    two.gpus[0].name = "NVIDIA T400"
    assert problem() == (
        "--mbmem-gpu: the visible GPUs are of different kinds, and figures of one say nothing about another. Choose "
        "equal ones with CUDA_VISIBLE_DEVICES=UUID,...; these are visible:\n  GPU 0: NVIDIA T400 (GPU-5f0b1111-aaaa)\n"
        f"  GPU 1: {H100} (GPU-5f0b2222-bbbb)"
    )


# --- MIG --------------------------------------------------------------------------------------------------------------


def test_mig_devices_are_listed_in_place_of_their_gpu(migs: FakeNvml) -> None:
    del migs.gpus[0]
    name = f"{H100} MIG 1g.10gb"
    assert machine().gpus == (
        PhysicalGpu(0, "MIG-1d00-aa", name, 9984 * MIB, (9, 0), True),
        PhysicalGpu(0, "MIG-1d01-bb", name, 9984 * MIB, (9, 0), True),
    )
    assert used(machine().gpus[0]) == 20 * MIB


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        ("1", ["MIG-1d00-aa", "MIG-1d01-bb"]),
        ("GPU-7777", ["MIG-1d00-aa", "MIG-1d01-bb"]),
        ("MIG-1d01-bb", ["MIG-1d01-bb"]),
        ("MIG-1d01,MIG-1d00", ["MIG-1d01-bb", "MIG-1d00-aa"]),
        ("MIG-GPU-77772222-bbbb/2/0", ["MIG-1d01-bb"]),
        ("0", ["GPU-5f0b1111-aaaa"]),
    ],
)
def test_visible_mig_devices(migs: FakeNvml, monkeypatch: pytest.MonkeyPatch, value: str, uuids: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [gpu.uuid for gpu in machine().gpus] == uuids


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("MIG-1d0", "'MIG-1d0' is the beginning of several UUIDs"),
        ("MIG-2", "'MIG-2' is no MIG device of this machine"),
        ("MIG-GPU-77772222-bbbb/3/0", "'MIG-GPU-77772222-bbbb/3/0' is no MIG device of this machine"),
        ("1,MIG-1d00-aa", "'MIG-1d00-aa' names MIG-1d00-aa for the second time"),
        ("MIG-1d00-aa,MIG-GPU-77772222-bbbb/1/0", "names MIG-1d00-aa for the second time"),
    ],
)
def test_a_wrong_mig_device(migs: FakeNvml, monkeypatch: pytest.MonkeyPatch, value: str, what: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    message = problem()
    assert what in message
    assert message.splitlines()[1:] == [
        f"  GPU 0: {H100} (GPU-5f0b1111-aaaa)",
        f"  GPU 1: {H100} (GPU-77772222-bbbb)",
        f"    {H100} MIG 1g.10gb (MIG-1d00-aa)",
        f"    {H100} MIG 1g.10gb (MIG-1d01-bb)",
    ]


def test_mig_devices_and_whole_gpus_are_of_different_kinds(migs: FakeNvml) -> None:
    assert "the visible GPUs are of different kinds" in problem()


@pytest.mark.parametrize(
    ("mib", "slices", "mig_mib", "name"),
    [
        (81559, (1, 1), 9984, "1g.10gb"),
        (81559, (3, 3), 40448, "3g.40gb"),
        (81559, (7, 7), 80896, "7g.80gb"),
        (81559, (3, 1), 40448, "1c.3g.40gb"),
        (40960, (1, 1), 4864, "1g.5gb"),
        (40960, (3, 3), 19968, "3g.20gb"),
    ],
)
def test_names_of_mig_devices_where_the_driver_tells_none(
    fake: FakeNvml, mib: int, slices: tuple[int, int], mig_mib: int, name: str
) -> None:
    fake.gpus = [FakeGpu("GPU-1", mib=mib, mig=[FakeMig("MIG-1", (1, 0), slices, mig_mib)])]
    assert machine().gpus[0].name == f"{H100} MIG {name}"


def test_names_of_mig_devices_where_the_driver_tells_them(fake: FakeNvml) -> None:
    fake.gpus = [FakeGpu("GPU-1", mig=[FakeMig("MIG-1", (1, 0), name=f"{H100} MIG 1g.10gb+me")])]
    assert machine().gpus[0].name == f"{H100} MIG 1g.10gb+me"


def test_old_drivers_name_mig_devices_by_their_gpu(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [FakeMig(f"MIG-GPU-1/1/{ci}", (1, ci)) for ci in (1, 10)]
    fake.gpus = [FakeGpu("GPU-1", mig=devices)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1/1/1")
    assert [gpu.uuid for gpu in machine().gpus] == ["MIG-GPU-1/1/1"]


# --- GPUs that cannot be used -----------------------------------------------------------------------------------------


def _without_devices(gpu: FakeGpu) -> None:
    gpu.mig = []


def _prohibited(gpu: FakeGpu) -> None:
    gpu.compute_mode = pynvml.NVML_COMPUTEMODE_PROHIBITED


def _shares_memory(gpu: FakeGpu) -> None:
    gpu.memory_error = NOT_SUPPORTED


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_without_devices, "is in MIG mode and has no MIG device (see nvidia-smi mig -cgi)"),
        (_prohibited, "is in compute mode 'prohibited' (see nvidia-smi -c)"),
        (_shares_memory, "has no memory of its own that NVML could tell"),
    ],
)
def test_a_gpu_that_cannot_be_used(
    two: FakeNvml, monkeypatch: pytest.MonkeyPatch, make: Callable[[FakeGpu], None], what: str
) -> None:
    make(two.gpus[0])
    assert [gpu.index for gpu in machine().gpus] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    message = problem()
    assert f"'0' names a GPU that {what}. " in message
    assert f"\n  GPU 0: {H100} (GPU-5f0b1111-aaaa), which {what}\n" in message
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    del two.gpus[1]
    assert problem() == (
        "--mbmem-gpu: no GPU can be used; without --mbmem-gpu tests run on the virtual GPU. There are:\n"
        f"  GPU 0: {H100} (GPU-5f0b1111-aaaa), which {what}"
    )


def test_gpus_of_other_users_do_not_count(two: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    two.gpus[0].error = NO_PERMISSION
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.index for gpu in machine().gpus] == [1]
    two.gpus[1].error = NO_PERMISSION
    assert "the NVIDIA driver finds no GPU that this user may use. See what nvidia-smi -L lists; " in problem()


def test_a_gpu_is_lost(two: FakeNvml) -> None:
    two.gpus[1].error = GPU_IS_LOST
    assert "GPU 1 does not answer (NVML: GPU is lost). See what nvidia-smi says; " in problem()


def test_no_gpu(fake: FakeNvml) -> None:
    assert problem() == (
        "--mbmem-gpu: the NVIDIA driver finds no GPU. See what nvidia-smi -L lists; without --mbmem-gpu tests run on "
        "the virtual GPU"
    )


# --- driver and torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (LIBRARY_NOT_FOUND, "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found). Install it, or start"),
        (
            VERSION_MISMATCH,
            "the NVIDIA driver in the kernel has another version than its libraries, as after an update",
        ),
        (9, "the NVIDIA driver does not answer (NVML: Driver Not Loaded). See what nvidia-smi says"),
        (NO_PERMISSION, "the NVIDIA driver does not answer (NVML: Insufficient Permissions)"),
    ],
)
def test_no_driver(two: FakeNvml, code: int, what: str) -> None:
    two.init_error = code
    for _ in range(2):  # a failure is not remembered as a success
        assert problem().startswith(f"--mbmem-gpu: {what}")
    two.init_error = None
    assert len(machine().gpus) == 2


def test_no_library_of_the_driver_in_this_process(monkeypatch: pytest.MonkeyPatch, fake: FakeNvml) -> None:
    """pynvml's own way to it, with a loader that finds nothing."""
    monkeypatch.undo()
    monkeypatch.delenv("MBMEM_TEST_STAND_INS", raising=False)

    def missing(name: str, *arguments: object) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(pynvml, "CDLL", missing)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    assert "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found)" in problem()


def test_pynvml_is_not_installed(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert problem() == "--mbmem-gpu: needs the package nvidia-ml-py: run 'pip install nvidia-ml-py'"


@pytest.mark.parametrize(
    ("driver", "torch", "fits"),
    [
        (13000, "13.0", True),
        (12020, "12.9", True),
        (13010, "12.6", True),
        (12080, "13.0", False),
        (9020, "13.0", False),
    ],
)
def test_the_driver_must_know_the_cuda_of_torch(
    two: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: int, torch: str, fits: bool
) -> None:
    two.cuda = driver
    install_torch(monkeypatch, tmp_path, f"cuda: Optional[str] = '{torch}'")
    cuda = f"{driver // 1000}.{driver % 1000 // 10}"
    if fits:
        assert machine().cuda == cuda
    else:
        assert problem() == (
            f"--mbmem-gpu: the NVIDIA driver 580.65.06 is too old: it supports CUDA {cuda}, and the installed torch is "
            f"built for CUDA {torch}, which needs a driver for CUDA 13.0 or later. Update the driver, or install a "
            f"torch that is built for CUDA {driver // 1000}; without --mbmem-gpu tests run on the virtual GPU"
        )


def test_a_driver_without_cuda(two: FakeNvml) -> None:
    two.cuda = pynvml.NVMLError(LIBRARY_NOT_FOUND)
    assert problem().startswith("--mbmem-gpu: the NVIDIA driver has no usable CUDA library, libcuda.so.1 (NVML: ")


@pytest.mark.parametrize(
    ("cuda", "library"),
    [("cuda: Optional[str] = None", True), ("cuda = None", True), ("cuda = '12.9'", False), ("", True)],
)
def test_a_build_of_torch_without_cuda(
    two: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cuda: str, library: bool
) -> None:
    install_torch(monkeypatch, tmp_path, cuda, library)
    assert problem() == (
        f"--mbmem-gpu: needs a CUDA build of torch, and torch 2.14.1+cu129 in {tmp_path}/torch is none: install one "
        "with 'pip install torch' on Linux, without a '+cpu' index"
    )


def test_a_torch_without_a_version(two: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch" / "version.py").unlink()
    assert f"needs a CUDA build of torch, and torch in {tmp_path}/torch is none" in problem()


def test_torch_is_not_installed(two: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert problem().startswith("--mbmem-gpu: needs a CUDA build of torch, and torch is not installed: install one ")


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.9'", "cuda = '12.9'", 'cuda : str = "12.9"'])
def test_forms_of_torch_s_version(two: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    two.cuda = 12000
    install_torch(monkeypatch, tmp_path, line)
    assert machine().cuda == "12.0"


# --- devices that stand in for real ones, in a process of their own -------------------------------------------------


def on_stand_ins(described: dict[str, Any], program: str, **environment: str) -> Any:
    """What the program leaves in `result`, as plain data."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    found = subprocess.run(
        [sys.executable, "-c", f"import sys\n{STAND_IN_PROGRAM}{program}\nprint(json.dumps(result))"],
        env={**clean, "MBMEM_TEST_STAND_INS": json.dumps(described), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


STAND_IN_PROGRAM = """
import json
from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.nvml import machine, processes, used

def problem():
    try:
        machine()
    except UserError as error:
        return str(error)
"""


def test_stand_ins_are_found_as_real_gpus_are() -> None:
    described = {
        "gpu": "l4-24gb",
        "count": 3,
        "capacity": "3 GiB",
        "foreign": [{"device": 1, "pid": 4242, "bytes": "2 GiB", "after_launches": 0}],
    }
    result = on_stand_ins(
        described,
        """
gpus = machine().gpus
result = {
    "gpus": [[gpu.index, gpu.name, gpu.capacity, gpu.compute_capability, gpu.is_mig, gpu.key] for gpu in gpus],
    "uuids": [gpu.uuid for gpu in gpus],
    "processes": [[[process.pid, process.used] for process in processes(gpu)] for gpu in gpus],
    "used": [used(gpu) for gpu in gpus],
    "torch": "torch" in sys.modules,
}
""",
    )
    expected = ["stand-in NVIDIA L4", 3 * GIB, [8, 9], False, "stand-in-nvidia-l4-3gib"]
    assert result["gpus"] == [[index, *expected] for index in range(3)]
    assert len(set(result["uuids"])) == 3
    assert all(uuid.startswith("GPU-") for uuid in result["uuids"])
    assert result["processes"] == [[], [[4242, 2 * GIB]], []]
    assert result["used"] == [0, 2 * GIB, 0]
    assert result["torch"] is False
    visible = on_stand_ins(
        described,
        "result = [gpu.index for gpu in machine().gpus]",
        CUDA_VISIBLE_DEVICES=f"{result['uuids'][2]},{result['uuids'][0][:12]}",
    )
    assert visible == [2, 0]


def test_stand_ins_with_an_old_driver_or_out_of_sight() -> None:
    (too_old, hidden, beyond) = on_stand_ins(
        {"gpu": "l4-24gb", "driver_cuda": "9.2"},
        """
import os
result = [problem()]
os.environ["MBMEM_TEST_STAND_INS"] = '{"gpu": "l4-24gb"}'
for value in ("", "1"):
    os.environ["CUDA_VISIBLE_DEVICES"] = value
    result.append(problem())
""",
    )
    assert "is too old: it supports CUDA 9.2, and the installed torch is built for CUDA " in too_old
    assert "CUDA_VISIBLE_DEVICES='' hides all GPUs" in hidden
    assert "CUDA_VISIBLE_DEVICES='1': '1' is beyond the last GPU" in beyond
