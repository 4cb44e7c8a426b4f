"""What the host wrote to a device it can read back, within the stated limits."""

from __future__ import annotations


def test_small_transfers_carry_their_data(on_gpu):
    result = on_gpu("""
x = torch.arange(1000)
d = x.cuda()
other = torch.empty_like(d)
other.copy_(d)
pinned = torch.empty(1000, dtype=torch.long).pin_memory()
pinned.copy_(other, non_blocking=True)
torch.cuda.synchronize()
result = [bool((y == x).all()) for y in (d.cpu(), other.cpu(), pinned, d.clone().cpu())]
result += [d[500].item(), d[500:510].tolist(), d.view(10, 100)[3, 7].item()]
""")
    assert result == [True] * 4 + [500, list(range(500, 510)), 307]


def test_a_copy_of_a_matrix_with_gaps_carries_its_data(on_gpu):
    status, result, refused = on_gpu("""
from ctypes import CDLL, c_size_t, c_void_p
cuda = CDLL(None)
host = torch.arange(24, dtype=torch.uint8)
device = torch.empty(64, dtype=torch.uint8, device="cuda")
def copy(to_pitch, width):
    to, pitch = c_void_p(device.data_ptr()), c_size_t(to_pitch)
    rows = c_void_p(host.data_ptr()), c_size_t(8), c_size_t(width), c_size_t(3)
    return cuda.cudaMemcpy2DAsync(to, pitch, *rows, 1, None)
result = [copy(16, 4), device.cpu().view(4, 16)[:, :6].tolist(), copy(2, 4)]
""")
    assert status == 0
    assert result == [[0, 1, 2, 3, 0, 0], [8, 9, 10, 11, 0, 0], [16, 17, 18, 19, 0, 0], [0, 0, 0, 0, 0, 0]]
    assert refused == 1  # rows wider than the pitch: cudaErrorInvalidValue


MEMSET = """
from ctypes import CDLL, c_size_t, c_void_p
def memset(x, value, size):
    assert CDLL(None).cudaMemsetAsync(c_void_p(x.data_ptr()), value, c_size_t(size), None) == 0
"""


def test_memset_writes(on_gpu):
    assert on_gpu(
        MEMSET
        + """
x = torch.arange(1, 1001, dtype=torch.int32).cuda()
memset(x, 0x01, 8)
result = [x[:4].tolist()]
memset(x, 0, 12)
result.append(x[:4].tolist())
"""
    ) == [[0x01010101, 0x01010101, 3, 4], [0, 0, 0, 4]]


def test_zeroing_reaches_any_size(on_gpu):
    assert on_gpu(
        MEMSET
        + """
x = torch.empty(8 * 2**30, dtype=torch.uint8, device="cuda")
for place in (0, 4097, 3 * 2**30, 8 * 2**30 - 5):
    x[place : place + 5].copy_(torch.full((5,), 7, dtype=torch.uint8))
before = [x[0].item(), x[-1].item()]
memset(x, 0, 8 * 2**30 - 1)
result = [before, [x[0].item(), x[4098].item(), x[3 * 2**30].item(), x[-1].item()]]
"""
    ) == [[7, 7], [0, 0, 0, 7]]


def test_large_transfers_to_the_device_lose_their_data_and_cost_no_host_memory(on_gpu):
    lost, edge, grown = on_gpu("""
import resource
host = torch.ones(2**20 + 1, dtype=torch.uint8)
d = host.cuda()
lost = int(d.cpu().sum())
edge = int(host[1:].cuda().cpu().sum())
big = torch.ones(256 * 2**20, dtype=torch.uint8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
devices = [big.cuda() for _ in range(4)]
result = [lost, edge, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before]
""")
    assert lost == 0
    assert edge == 2**20  # 1 MiB is still carried
    assert grown < 64 * 1024  # KiB


def test_a_dropped_transfer_leaves_zeros_not_old_data(on_gpu):
    assert on_gpu("""
d = torch.ones(2**20, dtype=torch.uint8).cuda().repeat(1)
base = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
base[:1000].copy_(torch.ones(1000, dtype=torch.uint8))
before = int(base.cpu().sum())
base.copy_(torch.ones(3 * 2**20, dtype=torch.uint8))
result = [before, int(base.cpu().sum())]
""") == [1000, 0]


def test_device_memory_that_nothing_wrote_reads_as_zeros(on_gpu):
    result = on_gpu("""
x = torch.empty(1000, device="cuda")
pinned = torch.ones(3 * 2**20, dtype=torch.uint8).pin_memory()
pinned.copy_(torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda"))
ordinary = torch.ones(3 * 2**20, dtype=torch.uint8)
ordinary.copy_(torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda"))
result = [x.cpu().abs().sum().item(), int(pinned.sum()), int(ordinary.sum())]
y = torch.ones(1000).cuda()
del y, x
torch.cuda.empty_cache()  # back to the driver, and from it again
result.append(torch.empty(1000, device="cuda").cpu().abs().sum().item())
""")
    assert result == [0, 0, 0, 0]


def test_copies_between_devices_carry_their_data(on_gpu):
    result = on_gpu(
        """
x = torch.arange(1000, device="cpu").to("cuda:1")
y = x.to("cuda:0")
z = torch.empty(1000, dtype=torch.long, device="cuda:1").copy_(y)
result = [y.device.index, y.tolist() == list(range(1000)), z.tolist() == list(range(1000))]
""",
        count=2,
    )
    assert result == [0, True, True]


def test_data_survives_in_expandable_segments(on_gpu):
    conf = "expandable_segments:True"
    result = on_gpu(
        """
xs = [torch.arange(i, i + 1000).cuda() for i in range(3000)]
result = all(x[0].item() == i and x[-1].item() == i + 999 for i, x in enumerate(xs))
""",
        PYTORCH_ALLOC_CONF=conf,
        PYTORCH_CUDA_ALLOC_CONF=conf,
    )
    assert result is True


def test_kernels_compute_nothing(on_gpu):
    assert on_gpu("""
from pytest_mbmem.virtual_gpu.counters import read_counters
before = read_counters().kernel_launches
x = torch.full((4,), 3.0, device="cuda")
y = x * 2
result = [x.tolist(), y.tolist(), read_counters().kernel_launches - before]
""") == [[0, 0, 0, 0], [0, 0, 0, 0], 2]


def test_bytes_between_host_and_device_are_counted_by_direction_and_device(on_gpu):
    counted, elsewhere = on_gpu(
        """
from pytest_mbmem.virtual_gpu.counters import read_counters
from ctypes import CDLL, c_size_t, c_void_p
def moved(device=0):
    counters = read_counters(device)
    return [counters.bytes_to_host, counters.bytes_to_device]
result = [[moved()]]
large = torch.ones(3 * 2**20, dtype=torch.uint8)
device = large.cuda()
result[0].append(moved())
pinned = torch.empty(3 * 2**20, dtype=torch.uint8, pin_memory=True)
pinned[:1000].copy_(device[5:1005], non_blocking=True)
result[0].append(moved())
device.clone()
torch.zeros(1000, device="cuda")
large.clone()
result[0].append(moved())
to, from_ = c_void_p(device.data_ptr()), c_void_p(large.data_ptr())
assert CDLL(None).cudaMemcpy2D(to, c_size_t(16), from_, c_size_t(8), c_size_t(4), c_size_t(3), 1) == 0
assert CDLL(None).cudaMemcpy(from_, to, c_size_t(2**40), 2) == 1  # not all of it is there
CDLL(None).cudaGetLastError()
result[0].append(moved())
torch.arange(10, device="cuda:0").to("cuda:1")
torch.ones(10, dtype=torch.uint8).to("cuda:1")
result.append([moved(0), moved(1)])
""",
        count=2,
    )
    large = 3 * 2**20
    assert counted == [[0, 0], [0, large], [1000, large], [1000, large], [1000, large + 12]]
    assert elsewhere == [[1000, large + 12], [0, 10]]


def test_copies_into_expandable_segments_are_counted_too(on_gpu):
    conf = "expandable_segments:True"
    assert on_gpu(
        """
from pytest_mbmem.virtual_gpu.counters import read_counters
x = torch.ones(30 * 2**20, dtype=torch.uint8).cuda()
x[7:1007].cpu()
counters = read_counters()
result = [counters.bytes_to_host, counters.bytes_to_device]
""",
        PYTORCH_ALLOC_CONF=conf,
        PYTORCH_CUDA_ALLOC_CONF=conf,
    ) == [1000, 30 * 2**20]


def test_memory_that_pytorch_hands_out_again_holds_what_the_host_wrote_there(on_gpu):
    assert on_gpu("""
old = torch.full((1,), 7).cuda()
address = old.data_ptr()
del old
new = torch.empty(1, dtype=torch.long, device="cuda")
new.fill_(3)  # a kernel: does nothing
result = [new.data_ptr() == address, new.item()]
""") == [True, 7]
