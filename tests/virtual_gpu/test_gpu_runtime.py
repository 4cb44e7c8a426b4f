"""Devices, streams, events, errors: what PyTorch asks of the CUDA runtime besides memory."""

from __future__ import annotations

import math

import pytest

from pytest_mbmem.virtual_gpu.gpus import load_gpus

GPUS = load_gpus()


@pytest.mark.parametrize("key", GPUS)
def test_the_device_has_the_properties_of_the_chosen_gpu(on_gpu, key):
    gpu = GPUS[key]
    result = on_gpu(
        """
p = torch.cuda.get_device_properties(0)
result = [p.name, p.total_memory, [p.major, p.minor], p.multi_processor_count, p.max_threads_per_multi_processor]
result += [p.L2_cache_size, p.shared_memory_per_multiprocessor, p.shared_memory_per_block_optin]
result += [torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[0]]
""",
        gpu=key,
    )
    assert result == [
        gpu.name,
        gpu.capacity,
        list(gpu.compute_capability),
        gpu.sm_count,
        gpu.threads_per_sm,
        gpu.l2_cache,
        gpu.shared_memory_per_sm,
        gpu.shared_memory_per_block,
        list(gpu.compute_capability),
        gpu.usable,
    ]


def test_nvml_asked_before_a_fork_does_not_fix_the_configuration(on_gpu_from_start):
    described = {"MBMEM_GPU_COUNT": "1", "CUDA_VISIBLE_DEVICES": "0"}  # incomplete: NVML sees no GPU
    with on_gpu_from_start(**described) as on_gpu:
        script = "p = torch.cuda.get_device_properties(0); result = [torch.cuda.device_count(), p.name]"
        assert on_gpu(script, gpu="l4-24gb", count=2) == [2, "NVIDIA L4"]
        assert on_gpu(script, gpu="b200-180gb") == [1, "NVIDIA B200"]


def test_the_configuration_is_fixed_once_cuda_is_used(on_gpu):
    assert (
        on_gpu("""
import os
torch.cuda.init()
os.environ["MBMEM_GPU_NAME"] = "something else"
result = torch.cuda.get_device_name()
""")
        == GPUS["h100-80gb"].name
    )


def test_without_a_description_there_is_no_gpu(on_gpu):
    available, message = on_gpu(
        """
available = torch.cuda.is_available()
try:
    torch.cuda.init()
except RuntimeError as error:
    result = [available, str(error)]
""",
        MBMEM_GPU_SM_COUNT="many",
    )
    assert available is False
    assert "no CUDA-capable device is detected" in message or "No CUDA GPUs are available" in message


def test_visible_devices_are_obeyed(on_gpu):
    script = """
from ctypes import CDLL, byref, c_int
count = c_int()
CDLL(None).cudaGetDeviceCount(byref(count))
result = [torch.cuda.device_count(), count.value]
"""
    assert on_gpu(script, count=4) == [4, 4]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="1,3") == [2, 2]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="2,-1,3") == [1, 1]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="2,3,2") == [0, 0]


def test_visible_devices_may_be_named_by_the_beginning_of_their_uuid(on_gpu):
    script = """
import uuid
from ctypes import CDLL, byref, c_int
count = c_int()
CDLL(None).cudaGetDeviceCount(byref(count))
numbers = [torch.cuda.get_device_properties(d).uuid.bytes[-1] for d in range(count.value)]
result = [torch.cuda.device_count(), numbers]
"""
    second, fourth = (f"GPU-0{n}000000-6d62-6d65-6d2d-67707500000{n}" for n in (2, 4))
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES=f"{fourth},{second}") == [2, [4, 2]]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="GPU-03,GPU-01") == [2, [3, 1]]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="GPU-02,GPU-09,GPU-01") == [1, [2]]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="GPU-02,1") == [1, [2]]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="1,GPU-03") == [1, [2]]
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="GPU-02,GPU-02") == [0, []]
    assert on_gpu(script, count=1, CUDA_VISIBLE_DEVICES="GPU-") == [1, [1]]


def test_the_beginning_of_two_uuids_names_no_device(on_gpu):
    script = """
from ctypes import CDLL, byref, c_int
count = c_int()
CDLL(None).cudaGetDeviceCount(byref(count))
result = count.value
"""
    assert on_gpu(script, count=4, CUDA_VISIBLE_DEVICES="GPU-0") == 0


def test_devices_keep_their_own_accounts(on_gpu):
    result = on_gpu(
        """
from pytest_mbmem.virtual_gpu.counters import read_counters
x = torch.empty(6 * 2**20, dtype=torch.uint8, device="cuda:1")
result = [torch.cuda.memory_reserved(d) for d in (0, 1)]
result += [read_counters(d).bytes_used for d in (0, 1)]
result += [torch.cuda.get_device_properties(d).uuid.bytes[-1] for d in (0, 1)]
result += [torch.cuda.can_device_access_peer(0, 1), torch.cuda.current_device()]
torch.cuda.set_device(1)
import threading
seen = []
thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
thread.start()
thread.join()
result += [torch.cuda.current_device(), seen[0]]
""",
        count=2,
    )
    mib20 = 20 * 2**20
    assert result == [0, mib20, 0, mib20, 1, 2, True, 0, 1, 0]  # the current device belongs to a thread


def test_a_device_that_does_not_exist_is_an_error(on_gpu):
    assert "invalid device ordinal" in on_gpu("""
try:
    torch.cuda.set_device(3)
except RuntimeError as error:
    result = str(error)
""")


def test_streams_differ_and_are_done_at_once(on_gpu):
    result = on_gpu("""
a, b = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
with torch.cuda.stream(b):
    x = torch.arange(3).cuda()
    current = torch.cuda.current_stream() == b
a.wait_stream(b)
x.record_stream(a)
result = [a.cuda_stream != b.cuda_stream, a.priority, b.priority, current, b.query(), x.tolist()]
a.synchronize()
""")
    assert result == [True, 0, -1, True, True, [0, 1, 2]]


def test_elapsed_time_between_events_is_not_a_number(on_gpu):
    elapsed, done, order = on_gpu("""
a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
a.record()
torch.ones(1000, device="cuda").sum()
b.record()
b.synchronize()
elapsed = a.elapsed_time(b)
untimed = torch.cuda.Event()
untimed.record()
try:
    a.elapsed_time(untimed)
    order = "accepted"
except (RuntimeError, ValueError):
    order = "refused"
result = [elapsed, b.query(), order]
""")
    assert math.isnan(elapsed)
    assert done is True
    assert order == "refused"


def test_errors_are_kept_per_thread_until_asked_for(on_gpu):
    assert on_gpu("""
from ctypes import CDLL, c_char_p, c_void_p
import threading
torch.cuda.init()
cuda = CDLL(None)
cuda.cudaGetErrorName.restype = cuda.cudaGetErrorString.restype = c_char_p
result = [cuda.cudaSetDevice(7)]
thread = threading.Thread(target=lambda: result.append(cuda.cudaPeekAtLastError()))
thread.start()
thread.join()
result += [cuda.cudaPeekAtLastError(), cuda.cudaGetLastError(), cuda.cudaGetLastError()]
result += [cuda.cudaGetErrorName(101).decode(), cuda.cudaGetErrorString(2).decode()]
""") == [101, 0, 101, 101, 0, "cudaErrorInvalidDevice", "out of memory"]


def test_nvml_and_the_runtime_agree(on_gpu):
    result = on_gpu(
        """
from ctypes import CDLL, byref, c_int, c_uint, c_void_p, create_string_buffer
nvml = CDLL("libnvidia-ml.so.1")
text = lambda: create_string_buffer(96)
count, handle = c_uint(), c_void_p()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetCount_v2(byref(count))
bus, uuid, name = text(), text(), text()
CDLL(None).cudaDeviceGetPCIBusId(bus, 96, 1)
result = [count.value, nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, byref(handle))]
nvml.nvmlDeviceGetUUID(handle, uuid, 96)
nvml.nvmlDeviceGetName(handle, name, 96)
result += [uuid.value.decode() == f"GPU-{torch.cuda.get_device_properties(1).uuid}", name.value.decode()]
result += [nvml.nvmlDeviceGetHandleByIndex_v2(2, byref(handle))]
""",
        count=2,
        gpu="l4-24gb",
    )
    assert result == [2, 0, True, "NVIDIA L4", 2]  # 2: NVML_ERROR_INVALID_ARGUMENT


def test_pinned_memory_is_known_as_such(on_gpu):
    assert on_gpu("""
x = torch.zeros(1000).pin_memory()
result = [x.is_pinned(), torch.zeros(1000).is_pinned(), x[10:].is_pinned()]
del x
""") == [True, False, True]


def test_counters_need_the_driver():
    from pytest_mbmem.errors import UserError
    from pytest_mbmem.virtual_gpu.counters import read_counters

    with pytest.raises(UserError, match="does not run on the virtual GPU"):
        read_counters()
