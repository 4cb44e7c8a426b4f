"""Accounting: PyTorch's own allocator on the virtual GPU gives the figures it gives on a real one."""

from __future__ import annotations

import pytest

MIB = 2**20
GIB = 2**30

FIGURES = """
def figures():
    s = torch.cuda.memory_stats()
    return [s["allocated_bytes.all.current"], s["reserved_bytes.all.current"]]
"""


def test_allocations_are_rounded_to_512_bytes_in_segments_of_2_and_20_mib(on_gpu):
    result = on_gpu(
        FIGURES
        + """
result = []
for size in (1, 512, 513, 2**20, 2**20 + 1, 10 * 2**20, 11 * 2**20 + 1):
    x = torch.empty(size, dtype=torch.uint8, device="cuda")
    result.append(figures())
    del x
    torch.cuda.empty_cache()
result.append(figures())
"""
    )
    assert result == [
        [512, 2 * MIB],
        [512, 2 * MIB],
        [1024, 2 * MIB],
        [MIB, 2 * MIB],
        [MIB + 512, 20 * MIB],  # a request above 1 MiB is served from a segment of 20 MiB
        [10 * MIB, 10 * MIB],  # from 10 MiB on, a segment of its own, rounded to 2 MiB
        [12 * MIB, 12 * MIB],  # of which a rest below 1 MiB is not split off
        [0, 0],
    ]


@pytest.mark.parametrize(
    ("gpu", "workspace"),
    [("h100-80gb", 32 * MIB), ("a100-80gb", 8 * MIB + 128 * 1024)],  # torch's defaults for both architectures
)
def test_forward_and_autograd_thread_have_a_cublas_workspace_each(on_gpu, gpu, workspace):
    result = on_gpu(
        FIGURES
        + """
x = torch.ones(64, 64, device="cuda", requires_grad=True)
before = figures()[0]
y = x @ x
forward = figures()[0] - before - 64 * 64 * 4
y.sum().backward()
del y
both = figures()[0] - before - x.grad.numel() * 4
torch._C._cuda_clearCublasWorkspaces()
result = [forward, both, figures()[0] - before - x.grad.numel() * 4]
""",
        gpu=gpu,
    )
    assert result == [workspace, 2 * workspace, 0]


def test_a_set_cublas_workspace_is_taken(on_gpu):
    result = on_gpu(
        FIGURES + "x = torch.ones(64, 64, device='cuda'); b = figures()[0]; y = x @ x; result = figures()[0] - b",
        CUBLAS_WORKSPACE_CONFIG=":16:8",
    )
    assert result == 64 * 64 * 4 + 16 * 1024 * 8


FRAGMENTED = (
    FIGURES
    + """
a = [torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(8)]
del a[::2]
b = torch.empty(60 * 2**20, dtype=torch.uint8, device="cuda")
result = [*figures(), any(s["is_expandable"] for s in torch.cuda.memory_snapshot())]
"""
)


def test_freed_segments_cannot_be_joined_by_default(on_gpu):
    # four holes of 30 MiB stay reserved beside the new segment of 60
    assert on_gpu(FRAGMENTED) == [180 * MIB, 300 * MIB, False]


def test_expandable_segments_map_physical_memory_and_give_it_back(on_gpu):
    conf = "expandable_segments:True"
    result = on_gpu(
        FRAGMENTED
        + """
del a, b
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
result += [figures(), total - free]
""",
        PYTORCH_ALLOC_CONF=conf,
        PYTORCH_CUDA_ALLOC_CONF=conf,
    )
    assert result == [180 * MIB, 300 * MIB, True, [0, 0], 512 * MIB]


def test_the_capacity_less_the_context_is_exact_to_the_byte(on_gpu):
    gpu_bytes, used, out_of_memory = on_gpu("""
from ctypes import CDLL, byref, c_size_t, c_void_p
torch.cuda.init()
cuda = CDLL(None)
free, total = torch.cuda.mem_get_info()
pointer = c_void_p()
used = []
granularity = 2 << 20
fitting = free // granularity * granularity
status = [cuda.cudaMalloc(byref(pointer), c_size_t(fitting + 1))]  # rounded up, it is more than there is
status.append(cuda.cudaMalloc(byref(pointer), c_size_t(fitting)))
used.append(torch.cuda.mem_get_info()[0])
other = c_void_p()
status.append(cuda.cudaMalloc(byref(other), c_size_t(1)))
status.append(cuda.cudaFree(pointer))
status.append(cuda.cudaGetLastError())
used.append(torch.cuda.mem_get_info()[0])
result = [[free, total], used, status]
""")
    free, total = gpu_bytes
    assert total == round(79.11 * GIB)
    assert free == total - 512 * MIB
    assert used == [free % (2 * MIB), free]
    assert out_of_memory == [2, 0, 2, 0, 2]  # cudaErrorMemoryAllocation; the last error stays until it is asked for


def test_out_of_memory_reads_as_on_a_gpu(on_gpu):
    message, after = on_gpu("""
keep = torch.empty(70 * 2**30, dtype=torch.uint8, device="cuda")
try:
    torch.empty(10 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    result = [str(error), torch.ones(4, device="cuda").shape[0]]
""")
    assert message.startswith(
        "CUDA out of memory. Tried to allocate 10.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 8.61 GiB is "
        "free. Including non-PyTorch memory, this process has 70.50 GiB memory in use. Of the allocated memory "
        "70.00 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated."
    )
    assert after == 4  # the error does not stick


def test_the_allocator_empties_its_cache_and_retries(on_gpu):
    retries, ooms, reserved, failed = on_gpu("""
from pytest_mbmem.virtual_gpu.counters import read_counters
del_me = torch.empty(50 * 2**30, dtype=torch.uint8, device="cuda")
del del_me
x = torch.empty(60 * 2**30, dtype=torch.uint8, device="cuda")
s = torch.cuda.memory_stats()
result = [s["num_alloc_retries"], s["num_ooms"], s["reserved_bytes.all.current"], read_counters().failed_allocations]
""")
    assert (retries, ooms, reserved) == (1, 0, 60 * GIB)
    assert failed >= 1


def test_the_driver_keeps_the_figures_that_the_runtime_reports(on_gpu):
    counters, nvml_used, after = on_gpu("""
import ctypes
from dataclasses import astuple
from pytest_mbmem.virtual_gpu.counters import read_counters
x = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
y = torch.empty(100, dtype=torch.uint8, device="cuda")
nvml, handle, info = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
nvml.nvmlInit_v2()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle))
nvml.nvmlDeviceGetMemoryInfo(handle, info)
result = [astuple(read_counters()), info[2]]
del x, y
torch.cuda.empty_cache()
z = torch.empty(100, dtype=torch.uint8, device="cuda").fill_(1)
result.append(astuple(read_counters()))
""")
    launches, allocations, frees, failed, used, peak, *read_and_moved = counters
    assert (launches, allocations, frees, failed, used, peak) == (0, 2, 0, 0, 32 * MIB, 32 * MIB)
    assert read_and_moved == [0, 0, 0, 0]
    assert nvml_used == (32 + 512) * MIB
    assert after == [1, 3, 2, 0, 2 * MIB, 32 * MIB, 0, 0, 0, 0]


def test_reads_of_what_kernels_would_have_computed_are_counted(on_gpu) -> None:
    assert on_gpu("""
from pytest_mbmem.virtual_gpu.counters import read_counters
mine = torch.arange(1, 100).cuda()
mine.cpu()
result = [read_counters().zero_reads]
computed = torch.randn(1000, device="cuda")
computed.sum().item()
result.append(read_counters().zero_reads)
computed[computed > 0]
result.append(read_counters().zero_reads)
""") == [0, 1, 2]


POINTERS = """
from ctypes import CDLL, byref, c_size_t, c_void_p
torch.cuda.init()
cuda = CDLL(None)
def malloc(size):
    pointer = c_void_p()
    assert cuda.cudaMalloc(byref(pointer), c_size_t(size)) == 0
    return pointer
"""


def test_the_same_calls_give_the_same_addresses_and_holes_are_reused(on_gpu):
    script = (
        POINTERS
        + """
a, b, c = malloc(1), malloc(3 << 20), malloc(1)
result = [a.value, b.value, c.value]
cuda.cudaFree(b)
d, e = malloc(1), malloc(5 << 20)
result += [d.value, e.value]
"""
    )
    first = on_gpu(script)
    assert on_gpu(script) == first
    a, b, c, d, e = first
    assert [b - a, c - b] == [2 * MIB, 4 * MIB]  # in order, 2 MiB at a time
    assert d == b  # the lowest hole
    assert e == c + 2 * MIB  # the rest of the hole is too small


def test_freeing_twice_or_something_unknown_is_an_error(on_gpu):
    script = (
        POINTERS
        + """
a = malloc(4 << 20)
host = c_void_p()
cuda.cudaHostAlloc(byref(host), c_size_t(100), 0)
inside = c_void_p(a.value + 512)
result = [cuda.cudaFree(inside), cuda.cudaFree(a), cuda.cudaFree(a), cuda.cudaFree(None), cuda.cudaFree(c_void_p(64))]
result += [cuda.cudaFreeHost(host), cuda.cudaFreeHost(host), cuda.cudaMemset(a, 0, c_size_t(8))]
"""
    )
    assert on_gpu(script) == [1, 0, 1, 0, 1, 0, 1, 1]  # 1 is cudaErrorInvalidValue


def test_a_memory_pool_is_charged_in_steps_of_2_mib(on_gpu_from_start):
    conf = "backend:cudaMallocAsync"
    with on_gpu_from_start(PYTORCH_ALLOC_CONF=conf, PYTORCH_CUDA_ALLOC_CONF=conf) as on_gpu:
        held, charged, left, message = on_gpu("""
free, total = torch.cuda.mem_get_info()
x = torch.empty(1000, dtype=torch.uint8, device="cuda")
y = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
s = torch.cuda.memory_stats()
held = [s["allocated_bytes.all.current"], s["reserved_bytes.all.current"]]
charged = free - torch.cuda.mem_get_info()[0]
del x, y
torch.cuda.synchronize()
torch.cuda.empty_cache()
left = free - torch.cuda.mem_get_info()[0]
try:
    torch.empty(90 * 2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    result = [held, charged, left, str(error)]
""")
    assert held == [3 * MIB + 1024, 4 * MIB]
    assert charged == 4 * MIB
    assert left == 0
    assert "would exceed allowed memory" in message


def test_threads_can_allocate_at_once(on_gpu):
    result = on_gpu("""
import threading
def work():
    for _ in range(200):
        x = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
torch.cuda.empty_cache()
from pytest_mbmem.virtual_gpu.counters import read_counters
c = read_counters()
result = [c.bytes_used, c.allocations == c.frees, torch.cuda.memory_allocated()]
""")
    assert result == [0, True, 0]
