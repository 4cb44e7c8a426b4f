"""torch's own ProcessGroupNCCL, between processes, on communicators that move nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pytest_mbmem.virtual_gpu import environment
from pytest_mbmem.virtual_gpu.gpus import load_gpus

PRELUDE = """
import os, torch.distributed as dist
from pytest_mbmem.virtual_gpu.counters import read_counters
def join(backend="nccl"):
    dist.init_process_group(backend, rank=rank, world_size=world, store=dist.FileStore(path, world))
"""

FORK = """
import json, os, tempfile, traceback, warnings
world, prelude, body = {world!r}, {prelude!r}, compile({body!r}, "rank", "exec")
with tempfile.TemporaryDirectory() as folder:
    def run(rank):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        warnings.simplefilter("ignore")
        scope = dict(torch=torch, rank=rank, world=world, path=folder + "/store")
        try:
            exec(prelude, scope)
            exec(body, scope)
            answer = scope["result"]
        except BaseException:
            answer = traceback.format_exc()
        with open(folder + "/" + str(rank), "w") as file:
            json.dump(answer, file)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            run(rank)
            os._exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    result = [json.load(open(folder + "/" + str(r))) if code == 0 else code for r, code in enumerate(codes)]
"""


@pytest.fixture
def on_ranks(on_gpu: Callable[..., Any]) -> Callable[..., list[Any]]:
    """on_ranks(body, world=2, **environment): each rank's `result`, text of its error, or its exit code if not 0.

    The body finds `torch`, `dist`, `rank`, `world`, `read_counters` and join(), which makes it a rank of the job. Each
    rank is a process with a device of its own.
    """

    def run(body: str, world: int = 2, **environment: str) -> list[Any]:
        script = FORK.format(world=world, prelude=PRELUDE, body=body)
        return on_gpu(script, gpu="l4-24gb", count=world, **environment)  # type: ignore[no-any-return]

    return run


COLLECTIVES = """
join()
x, parts = torch.ones(4, 256, device="cuda"), torch.empty(4 * world, 256, device="cuda")
torch.cuda.synchronize()
before = read_counters()
free = torch.cuda.mem_get_info()[0]
everyone = dist.new_group(list(range(world)))
for group in (None, everyone):
    dist.all_reduce(x, group=group)
    dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    dist.all_gather_into_tensor(parts, x, group=group)
    dist.reduce_scatter_tensor(x, parts, group=group)
    dist.all_to_all_single(torch.empty_like(parts), parts, group=group)
    dist.all_to_all_single(torch.empty_like(parts), parts, [4] * world, [4] * world, group=group)
    dist.broadcast(x, 0, group=group)
    dist.reduce(x, 0, group=group)
    dist.all_gather([torch.empty_like(x) for _ in range(world)], x, group=group)
    pieces = [torch.empty_like(x) for _ in range(world)]
    dist.gather(x, pieces if rank == 0 else None, group=group)
    dist.scatter(x, pieces if rank == 0 else None, group=group)
    there, back = (rank + 1) % world, (rank - 1) % world
    sent = [dist.P2POp(dist.isend, x, there, group), dist.P2POp(dist.irecv, torch.empty_like(x), back, group)]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    dist.barrier(group)
assert work.is_completed()
after = read_counters()
dist.destroy_process_group()
result = [after.bytes_used - before.bytes_used, free - torch.cuda.mem_get_info()[0], dist.is_initialized()]
"""


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_collective_of_torch_is_answered_and_takes_no_device_memory(on_ranks, world):
    assert on_ranks(COLLECTIVES, world) == [[0, 0, False]] * world


def test_a_result_is_what_was_in_memory(on_ranks):
    body = """
join()
x = torch.full((3,), float(rank + 1)).cuda()
parts = torch.full((world, 3), 9.0).cuda()
dist.all_reduce(x)
dist.all_gather_into_tensor(parts, x)
result = [x.tolist(), parts.tolist()]
"""
    assert on_ranks(body) == [[[rank + 1.0] * 3, [[9.0] * 3] * 2] for rank in range(2)]


def test_what_stays_on_the_host_can_go_over_gloo(on_ranks):
    body = """
join("cpu:gloo,cuda:nccl")
objects = [None] * world
dist.all_gather_object(objects, {"rank": rank})
x = torch.ones(3, device="cuda")
dist.all_reduce(x)
result = objects
dist.destroy_process_group()
"""
    assert on_ranks(body) == [[{"rank": 0}, {"rank": 1}]] * 2


def test_a_group_can_be_split_but_a_part_does_not_know_its_size(on_ranks):
    body = """
dist.init_process_group("nccl", rank=rank, world_size=world, store=dist.FileStore(path, world),
                        device_id=torch.device("cuda", 0))
part = dist.new_group([0, 1])
x = torch.ones(4, device="cuda")
dist.all_reduce(x, group=part)
dist.all_gather_into_tensor(torch.empty(8, device="cuda"), x, group=part)
try:
    dist.all_to_all_single(torch.empty_like(x), x, [1, 3], [3, 1], group=part)
    result = "done"
except RuntimeError as error:
    result = str(error)
"""
    for message in on_ranks(body):
        assert "invalid usage (virtual GPU)" in message


def test_memory_of_nccl_is_on_the_device_and_freed(on_gpu):
    result = on_gpu("""
from ctypes import CDLL, byref, c_size_t, c_void_p
from pytest_mbmem.virtual_gpu.counters import read_counters
torch.cuda.init()
nccl, memory = CDLL(None), c_void_p()
result = [nccl.ncclMemAlloc(byref(memory), c_size_t(3 << 20)), read_counters().bytes_used]
result += [nccl.ncclMemFree(memory), read_counters().bytes_used, nccl.ncclMemFree(memory)]
result += [nccl.ncclMemAlloc(byref(memory), c_size_t(1 << 40))]
""")
    assert result == [0, 4 << 20, 0, 0, 4, 1]


@pytest.mark.parametrize("leaves", [True, False])
def test_processes_with_watchdogs_end_cleanly(driver, tmp_path, leaves):
    script = f"rank, world, path = {{}}, 2, {str(tmp_path / 'store')!r}\nimport torch{PRELUDE}\njoin()\n"
    script += "dist.all_reduce(torch.ones(3, device='cuda'))\n"
    script += "dist.destroy_process_group()\n" if leaves else ""
    described = {**os.environ, **environment(load_gpus()["l4-24gb"]), "LD_PRELOAD": driver.preload}
    ranks = [
        subprocess.Popen([sys.executable, "-c", script.format(rank)], env=described, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        errors = rank.communicate(timeout=120)[1]
        assert rank.returncode == 0, errors
        assert "Error" not in errors


# --- faults -----------------------------------------------------------------------------------------------------------


LAUNCH = """
join()
x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
launches = read_counters().kernel_launches
while launches < 20:
    x + y
    launches += 1
dist.all_reduce(x)
result = [launches, read_counters().kernel_launches]
"""


def test_a_process_dies_after_so_many_kernels_on_that_device(on_ranks):
    assert on_ranks(LAUNCH, MBMEM_GPU_FAULT="die:1:19") == [[20, 20], -signal.SIGKILL]
    assert on_ranks(LAUNCH, MBMEM_GPU_FAULT="die:1:20") == [[20, 20], [20, 20]]


def test_a_process_that_lost_its_peer_gets_torchs_own_error(on_ranks):
    body = f"""
try:
    exec({LAUNCH!r})
except dist.DistBackendError as error:
    result = str(error)
    dist.destroy_process_group()
"""
    fine, message = on_ranks(body, MBMEM_GPU_FAULT="lose peer:1:19")
    assert fine == [20, 20]
    assert "ncclRemoteError" in message
    assert "remote process exited" in message


def test_a_process_hangs_after_so_many_kernels(on_ranks):
    body = """
import threading, time
x, y = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")
def launch():
    while read_counters().kernel_launches < 20:
        x + y
thread = threading.Thread(target=launch, daemon=True)
thread.start()
while read_counters().kernel_launches < 20:
    time.sleep(0.01)
thread.join(1)
result = thread.is_alive()
"""
    assert on_ranks(body, MBMEM_GPU_FAULT="hang:1:19") == [False, True]
