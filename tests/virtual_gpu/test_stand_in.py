"""Virtual GPUs that stand in for real ones: the description, the NVML of this process, what is staged."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.virtual_gpu import build, stand_in
from pytest_mbmem.virtual_gpu.stand_in import VARIABLE, stand_ins

GIB = 2**30
FULL = {
    "gpu": "l4-24gb",
    "count": 2,
    "capacity": "3 GiB",
    "foreign": [{"device": 1, "pid": 4242, "bytes": "2 GiB", "after_launches": 3}, {"device": 1, "pid": 1, "bytes": 1}],
    "elapsed_ms": [120, 40.5, 41],
    "fault": {"kind": "lose peer", "device": 1, "after_launches": 500},
    "driver_cuda": "12.4",
}


def test_without_the_variable_there_are_none(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert stand_ins() is None


def test_a_gpu_alone_is_enough(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"gpu": "h100-80gb"}')
    found = stand_ins()
    assert found.count == 1
    assert found.gpu.name == "stand-in NVIDIA H100 80GB HBM3"
    assert found.gpu.key == "stand-in-h100-80gb"
    assert found.staged == {}


def test_a_full_description(monkeypatch, driver):
    monkeypatch.setenv(VARIABLE, json.dumps(FULL))
    monkeypatch.setattr(stand_in, "ensure_driver", lambda: driver)
    found = stand_ins()
    assert (found.count, found.gpu.capacity, found.gpu.compute_capability) == (2, 3 * GIB, (8, 9))
    described = found.environment()
    assert described["MBMEM_GPU_COUNT"] == "2"
    assert described["MBMEM_GPU_NAME"] == "stand-in NVIDIA L4"
    assert described["MBMEM_GPU_FOREIGN"] == f"1:4242:{2 * GIB}:3,1:1:1:0"
    assert described["MBMEM_GPU_ELAPSED_MS"] == "120 40.5 41"
    assert described["MBMEM_GPU_FAULT"] == "lose peer:1:500"
    assert described["MBMEM_GPU_DRIVER_CUDA"] == "12.4"
    assert described["LD_PRELOAD"] == driver.preload
    assert "CUDA_VISIBLE_DEVICES" not in described


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nonsense", "'nonsense' is not JSON"),
        ([], r"it: \[\] is not a mapping with the keys gpu, count"),
        ({}, "gpu: is missing"),
        ({"gpu": "rtx"}, "gpu: 'rtx' is not one of a100-40gb, "),
        ({"gpus": 2}, "gpus: unknown key; allowed are gpu, count, capacity, "),
        ({"count": 0}, "count: 0 is not a whole number from 1 to 16"),
        ({"count": True}, "count: True is not a whole number"),
        ({"count": None}, "count: None is not a whole number"),
        ({"capacity": "3"}, "capacity: '3' is not a size"),
        ({"capacity": "512 MiB"}, "capacity: '512 MiB' is out of range"),
        ({"foreign": {}}, r"foreign: {} is not a list of at most 8 mappings"),
        ({"foreign": [[]]}, r"foreign\[0\]: \[\] is not a mapping with the keys device, pid"),
        ({"foreign": [{"device": 0, "pid": 1}]}, r"foreign\[0\].bytes: is missing"),
        (
            {"foreign": [{"device": 2, "pid": 1, "bytes": 1}]},
            r"foreign\[0\].device: 2 is not a whole number from 0 to 1",
        ),
        ({"foreign": [{"device": 0, "pid": 0, "bytes": 1}]}, r"foreign\[0\].pid: 0 is not"),
        ({"foreign": [{"device": 0, "pid": 1, "bytes": 0}]}, r"foreign\[0\].bytes: 0 is out of range"),
        ({"foreign": [{"device": 0, "pid": 1, "bytes": 1}] * 9}, "foreign: .* is not a list of at most 8"),
        ({"elapsed_ms": []}, "elapsed_ms: .* is not a list of 1 to 64 numbers"),
        ({"elapsed_ms": [1, "2"]}, "elapsed_ms: .* is not a list of 1 to 64 numbers"),
        ({"elapsed_ms": [-1]}, "elapsed_ms: .* is not a list of 1 to 64 numbers"),
        ({"fault": "die"}, "fault: 'die' is not a mapping with the keys kind, device, after_launches"),
        ({"fault": {"kind": "burn", "device": 0, "after_launches": 1}}, "fault.kind: 'burn' is not one of die, hang, "),
        ({"fault": {"kind": "die", "device": 0}}, "fault.after_launches: is missing"),
        ({"driver_cuda": 12.4}, "driver_cuda: 12.4 is not a version of CUDA"),
    ],
)
def test_a_mistake_names_variable_key_and_value(monkeypatch, change, message):
    whole = isinstance(change, dict) and change and "gpu" not in change
    described = {"gpu": "l4-24gb", "count": 2, **change} if whole else change
    monkeypatch.setenv(VARIABLE, described if isinstance(described, str) else json.dumps(described))
    with pytest.raises(UserError, match=f"^{VARIABLE}: {message}"):
        stand_ins()


def test_the_limits_are_the_drivers():
    header = (build.SOURCES / "virtual_gpu.h").read_text()
    assert f"#define VGPU_MAX_FOREIGN {stand_in._MOST_FOREIGN}\n" in header
    assert f"#define VGPU_MAX_ELAPSED {stand_in._MOST_ELAPSED}\n" in header


# --- NVML in a process without LD_PRELOAD -----------------------------------------------------------------------------

NVML = """
import json, os
from pathlib import Path
from pytest_mbmem.virtual_gpu import stand_in
from pytest_mbmem.virtual_gpu.build import Driver
from pytest_mbmem.virtual_gpu.counters import driver_is_loaded
stand_in.ensure_driver = lambda: Driver(tuple(map(Path, {libraries!r})))
before = dict(os.environ)
stand_in.stand_ins().load_nvml()
import pynvml
pynvml.nvmlInit()
def device(i):
    handle = pynvml.nvmlDeviceGetHandleByIndex(i)
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    memory = [pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)]
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError_NotSupported:
        mig = "not supported"
    assert pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid)) == i
    assert uuid.startswith("GPU-")
    return {{
        "name": pynvml.nvmlDeviceGetName(handle), "mig": mig, "used": [m.used for m in memory],
        "total": [m.total for m in memory], "capability": pynvml.nvmlDeviceGetCudaComputeCapability(handle),
        "processes": [[p.pid, p.usedGpuMemory] for p in processes],
    }}
"""


@pytest.fixture
def nvml(driver):
    """nvml(description, code): what the code prints as JSON, in a process whose NVML sees the stand-ins."""

    def run(description, code):
        script = NVML.format(libraries=[str(path) for path in driver.libraries]) + code
        described = {**os.environ, VARIABLE: json.dumps(description)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=described, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_pynvml_sees_them(nvml):
    code = """
versions = [pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()]
print(json.dumps([versions, [device(i) for i in range(pynvml.nvmlDeviceGetCount())]]))
"""
    versions, (first, second) = nvml(FULL, code)
    assert versions == ["0.0-virtual", 12040]
    same = {"name": "stand-in NVIDIA L4", "mig": "not supported", "total": [3 * GIB] * 2, "capability": [8, 9]}
    assert first == {**same, "used": [0, 0], "processes": []}
    # the other one comes after three kernels of this process, which launches none
    assert second == {**same, "used": [1, 1], "processes": [[1, 1]]}


def test_loading_nvml_leaves_the_rest_of_the_process_alone(nvml):
    code = "print(json.dumps([dict(os.environ) == before, driver_is_loaded()]))"
    assert nvml({"gpu": "l4-24gb"}, code) == [True, False]


def test_others_can_follow_in_the_same_process(nvml):
    code = """
os.environ["MBMEM_TEST_STAND_INS"] = '{"gpu": "h100-80gb", "count": 3}'
found = [device(1)["used"][0]]
stand_in.stand_ins().load_nvml()
print(json.dumps([*found, pynvml.nvmlDeviceGetCount(), device(1)["name"], device(1)["used"][0]]))
"""
    assert nvml(FULL, code) == [1, 3, "stand-in NVIDIA H100 80GB HBM3", 0]


# --- what is staged, in a process on the device -----------------------------------------------------------------------


def test_a_foreign_process_comes_after_so_many_kernels_and_takes_memory(on_gpu):
    result = on_gpu(
        """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
def seen():
    processes = {p.pid: p.usedGpuMemory >> 20 for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    own = processes.pop(__import__("os").getpid())
    return [own, processes, pynvml.nvmlDeviceGetMemoryInfo(handle).used >> 20, torch.cuda.mem_get_info()[0] >> 20]
x, y = torch.ones(3).cuda(), torch.ones(3).cuda()
result = [seen()]
for _ in range(2):
    x + y
result += [seen()]
total = torch.cuda.mem_get_info()[1]
try:
    torch.empty(total - (2 << 30), dtype=torch.uint8, device="cuda")
    result += ["fits"]
except torch.OutOfMemoryError:
    result += ["out of memory"]
""",
        gpu="l4-24gb",
        MBMEM_GPU_FOREIGN=f"0:7:{GIB}:0,0:8:{2 * GIB}:2,1:9:{GIB}:0",
    )
    before, after, large = result
    assert before[:3] == [514, {"7": 1024}, 514 + 1024]
    assert after[:3] == [514, {"7": 1024, "8": 2048}, 514 + 3072]
    assert before[3] - after[3] == 2048
    assert large == "out of memory"


def test_a_foreign_process_larger_than_the_device_leaves_nothing(on_gpu):
    script = "result = torch.cuda.mem_get_info()[0]"
    assert on_gpu(script, gpu="l4-24gb", MBMEM_GPU_FOREIGN=f"0:7:{100 * GIB}:0") == 0


def test_times_are_scripted(on_gpu):
    script = """
a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
a.record(), b.record()
result = [a.elapsed_time(b) for _ in range(4)]
"""
    assert on_gpu(script, MBMEM_GPU_ELAPSED_MS="120 40.5 41") == [120, 40.5, 41, 41]


def test_the_driver_may_be_older(on_gpu):
    script = """
from ctypes import CDLL, byref, c_int
version = c_int()
CDLL(None).cudaDriverGetVersion(byref(version))
result = version.value
"""
    assert on_gpu(script, MBMEM_GPU_DRIVER_CUDA="12.4") == 12040
    assert on_gpu(script) >= 12000


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MBMEM_GPU_FOREIGN", "0:1:2"),
        ("MBMEM_GPU_FOREIGN", ",".join(["0:1:2:3"] * 9)),
        ("MBMEM_GPU_ELAPSED_MS", "1 two"),
        ("MBMEM_GPU_FAULT", "burn:0:1"),
        ("MBMEM_GPU_DRIVER_CUDA", "new"),
    ],
)
def test_what_the_driver_cannot_read_leaves_no_gpu(on_gpu, variable, value):
    assert on_gpu("result = torch.cuda.device_count()", **{variable: value}) == 0
