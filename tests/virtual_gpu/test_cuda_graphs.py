"""Capturing CUDA graphs: PyTorch's private pools, and the errors where CUDA forbids something meanwhile."""

from __future__ import annotations

import pytest

MIB = 2**20

SETUP = """
MIB = 2**20
allocated = lambda: torch.cuda.memory_allocated() // MIB
reserved = lambda: torch.cuda.memory_reserved() // MIB
count = lambda: torch.cuda.memory_stats()["allocation.all.allocated"]
x = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
graph = torch.cuda.CUDAGraph()
"""


def test_a_private_pool_stays_until_its_graph_and_its_tensors_are_gone(on_gpu):
    """As PyTorch documents it ("Graph memory management" in its notes on CUDA semantics)."""
    assert on_gpu(f"""{SETUP}
figures = lambda: [allocated(), reserved()]
result = [figures()]
with torch.cuda.graph(graph):
    y = (x + 1) + 1
result.append(figures())  # one sum is live, the other's memory is the pool's
before = count()
for _ in range(3):
    graph.replay()
z = torch.empty_like(x)   # has to be taken from elsewhere
result += [figures(), count() - before]
del y, z
torch.cuda.empty_cache()
result.append(figures())  # the graph still needs it
del graph
torch.cuda.empty_cache()
result.append(figures())
""") == [[64, 64], [128, 192], [192, 256], 1, [64, 192], [64, 64]]


def test_graphs_that_share_a_pool_use_its_memory_in_turn(on_gpu):
    script = f"""{SETUP}
others = [torch.cuda.CUDAGraph() for _ in range(2)]
for each in (graph, *others):
    with torch.cuda.graph(each, pool=POOL):
        x + 1
result = reserved()
"""
    assert on_gpu(script.replace("POOL", "graph.pool() if each is not graph else None")) == 128
    assert on_gpu(script.replace("POOL", "None")) == 256


def test_a_stream_joins_a_capture_by_waiting_for_it_and_allocates_from_its_pool(on_gpu):
    assert on_gpu(f"""{SETUP}
side, apart = torch.cuda.Stream(), torch.cuda.Stream()
seen = []
with torch.cuda.graph(graph):
    side.wait_stream(torch.cuda.current_stream())
    for stream in (side, apart):
        with torch.cuda.stream(stream):
            seen.append(torch.cuda.is_current_stream_capturing())
            if stream is side:
                y = x + 1
    torch.cuda.current_stream().wait_stream(side)
    z = y + 1
with torch.cuda.stream(side):
    seen.append(torch.cuda.is_current_stream_capturing())
pools = {{tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot() if s["total_size"] >= 64 * MIB}}
result = [seen, len(pools), tuple(graph.pool()) in pools]
""") == [[True, False, False], 2, True]


def test_work_is_done_at_each_replay_and_not_while_capturing(on_gpu):
    assert on_gpu("""
from pytest_mbmem.virtual_gpu.counters import read_counters
launches = lambda: read_counters().kernel_launches
source, target = torch.arange(4).pin_memory(), torch.zeros(4, dtype=torch.long, device="cuda")
graph, twice = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
before = launches()
with torch.cuda.graph(graph):
    target.copy_(source, non_blocking=True)
    target + 1
captured = [launches() - before, target.tolist()]
graph.replay()
replayed = [launches() - before, target.tolist()]
source += 1
with torch.cuda.graph(twice):  # a graph of graphs
    graph.replay()
    graph.replay()
before = launches()
twice.replay()
result = [captured, replayed, [launches() - before, target.tolist()]]
""") == [[0, [0, 0, 0, 0]], [1, [0, 1, 2, 3]], [2, [1, 2, 3, 4]]]


def test_graphed_callables_train_from_their_pool(on_gpu):
    plain, graphed, allocations = on_gpu("""
layer = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024)).cuda()
x = torch.zeros(4096, 1024, device="cuda", requires_grad=True)

def step():
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    layer(x).sum().backward()
    layer.zero_grad()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before

step()
few, plain = step(), torch.cuda.memory_reserved()
layer = torch.cuda.make_graphed_callables(layer, (x.detach().requires_grad_(),))
step()
result = [plain, torch.cuda.memory_reserved(), [few, step()]]
""")
    assert graphed >= plain + 3 * 16 * MIB  # the activations between the layers, the output, the input's gradient
    assert allocations[1] < allocations[0]


FORBIDDEN = {
    "waiting for the device": "torch.cuda.synchronize()",
    "waiting for the capturing stream": "torch.cuda.current_stream().synchronize()",
    "asking the capturing stream": "torch.cuda.current_stream().query()",
    "reading a value": "x.sum().item()",
    "a size that a kernel computes": "x.nonzero()",
}


@pytest.mark.parametrize("call", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_waits_for_a_capture_makes_it_invalid(on_gpu, call):
    first, ended, after = on_gpu(f"""{SETUP}
try:
    with torch.cuda.graph(graph):
        {call}
except RuntimeError as error:
    result = [str(error.__context__), str(error), (x + 1).shape[0] // MIB]
""")
    assert "operation not permitted when stream is capturing" in first
    assert "operation failed due to a previous error during capture" in ended
    assert after == 64  # everything goes on


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("ends", ["waits", "gives up"])
def test_what_ends_a_capture_is_told_with_its_place(ends):
    import torch

    from pytest_mbmem.errors import UserError
    from pytest_mbmem.megatron.cuda_graphs import capturable

    x, side = torch.zeros(1, device="cuda"), torch.cuda.Stream()

    def waits():
        torch.cuda.current_stream().synchronize()

    def gives_up():  # with unjoined work, so that the capture cannot be ended either
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
        raise AssertionError

    function = waits if ends == "waits" else gives_up
    problem = "operation not permitted when stream is capturing" if ends == "waits" else "AssertionError"
    place = rf"\S*test_cuda_graphs\.py:\d+ \({function.__name__}\)"
    said = f"^the CUDA graph cannot be captured: {place}: {problem}; leave that part out"
    with pytest.raises(UserError, match=said), capturable(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        function()


CUDA = """
from ctypes import CDLL, byref, c_int, c_uint, c_ulonglong, c_void_p
import threading
torch.cuda.init()
cuda = CDLL(None)

def stream(flags=1):
    made = c_void_p()
    assert cuda.cudaStreamCreateWithFlags(byref(made), flags) == 0
    return made

def event():
    made = c_void_p()
    assert cuda.cudaEventCreateWithFlags(byref(made), 2) == 0
    return made

def status(of):
    found = c_int()
    cuda.cudaStreamIsCapturing(of, byref(found))
    return found.value

def end(of):
    graph = c_void_p()
    return [cuda.cudaStreamEndCapture(of, byref(graph)), bool(graph.value)]

def malloc():
    pointer = c_void_p()
    return cuda.cudaMalloc(byref(pointer), 64)

memory = torch.zeros(64, device="cuda")
work = lambda on: cuda.cudaMemsetAsync(c_void_p(memory.data_ptr()), 0, 64, on)

def elsewhere(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
a, b, e = stream(), stream(), event()
begin = lambda on, mode=GLOBAL: cuda.cudaStreamBeginCapture(on, mode)
"""


def test_beginning_and_ending_follow_cudas_rules(on_gpu):
    assert on_gpu(f"""{CUDA}
result = [end(a), begin(None), begin(a, 7), begin(a), begin(a), status(a), status(b)]
result += [elsewhere(lambda: end(a)), status(a), end(a), status(a)]
begin(a, RELAXED)
result += [elsewhere(lambda: end(a))]
""") == [[401, False], 900, 1, 0, 401, 1, 0, [908, False], 1, [0, True], 0, [0, True]]


def test_a_capture_ends_in_its_own_stream_and_with_all_work_joined(on_gpu):
    assert on_gpu(f"""{CUDA}
def fork():
    begin(a)
    work(a)
    cuda.cudaEventRecord(e, a)
    return [cuda.cudaStreamWaitEvent(b, e, 0), status(b), work(b)]

def join():
    return [cuda.cudaEventRecord(e, b), cuda.cudaStreamWaitEvent(a, e, 0)]

result = [fork(), end(a), status(b), fork(), join(), end(a), status(b), fork(), join()]
work(b)  # again, after the join
result += [end(a), fork(), end(b), status(a), end(a)]
""") == [
        *([0, 1, 0], [904, False], 0),
        *([0, 1, 0], [0, 0], [0, True], 0),
        *([0, 1, 0], [0, 0], [904, False]),
        *([0, 1, 0], [903, False], 2, [901, False]),
    ]


def test_a_capture_takes_no_order_from_outside_and_gives_none(on_gpu):
    assert on_gpu(f"""{CUDA}
c, f = stream(), event()
cuda.cudaEventRecord(e, b)
begin(a)
result = [cuda.cudaStreamWaitEvent(a, e, 0), end(a)]  # uncaptured work
begin(a), begin(c)
cuda.cudaEventRecord(e, a)
result += [cuda.cudaStreamWaitEvent(c, e, 0), status(a), end(c)]  # work of another capture
result += [cuda.cudaEventQuery(e), status(a), end(a)]
result += [cuda.cudaEventSynchronize(e), cuda.cudaStreamWaitEvent(b, e, 0)]  # never done outside of it
begin(a)
cuda.cudaEventRecord(f, a)
result += [cuda.cudaStreamWaitEvent(None, f, 0), end(a)]  # the default stream cannot join
""") == [905, [901, False], 902, 1, [901, False], 907, 2, [901, False], 907, 907, 906, [901, False]]


def test_the_default_stream_is_forbidden_while_a_blocking_stream_captures(on_gpu):
    assert on_gpu(f"""{CUDA}
blocking = stream(flags=0)
begin(blocking)
result = [work(None), end(blocking)]
begin(a)
result += [work(None), end(a)]
""") == [906, [901, False], 0, [0, True]]


def test_unsafe_calls_depend_on_the_modes_of_the_capture_and_of_the_thread(on_gpu):
    """The table of cudaThreadExchangeStreamCaptureMode: which thread may call cudaMalloc meanwhile."""
    assert on_gpu(f"""{CUDA}
def relaxed():
    mode = c_int(RELAXED)
    cuda.cudaThreadExchangeStreamCaptureMode(byref(mode))
    found = malloc()
    cuda.cudaThreadExchangeStreamCaptureMode(byref(mode))
    return [found, mode.value]

result = [malloc()]
for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
    for call in (malloc, lambda: elsewhere(malloc), relaxed):
        begin(a, mode)
        result.append([call(), end(a)[0]])
begin(a)
result.append([cuda.cuMemAlloc_v2(byref(c_ulonglong()), c_ulonglong(64)), end(a)[0]])
wrong = c_int(5)
result.append(cuda.cudaThreadExchangeStreamCaptureMode(byref(wrong)))
""") == [
        0,
        *([900, 901], [900, 901], [[0, 2], 0]),
        *([900, 901], [0, 0], [[0, 2], 0]),
        *([0, 0], [0, 0], [[0, 2], 0]),
        [900, 901],
        1,
    ]


def test_a_graph_keeps_what_its_user_gave_it_until_the_last_use(on_gpu):
    assert on_gpu(f"""{CUDA}
from ctypes import CFUNCTYPE
freed = []
destroy = CFUNCTYPE(None, c_void_p)(freed.append)
kept, graph, executable, count = c_void_p(), c_void_p(), c_void_p(), c_ulonglong()
begin(a)
work(a)
cuda.cudaStreamEndCapture(a, byref(graph))
cuda.cudaUserObjectCreate(byref(kept), c_void_p(7), destroy, 1, 1)
cuda.cudaGraphRetainUserObject(graph, kept, 1, 0)
cuda.cudaGraphGetNodes(graph, None, byref(count))
result = [cuda.cudaGraphInstantiateWithFlags(byref(executable), graph, c_ulonglong(0)), count.value]
result += [cuda.cudaUserObjectRelease(kept, 1), list(freed), cuda.cudaGraphDestroy(graph), list(freed)]
result += [cuda.cudaGraphLaunch(executable, a), cuda.cudaGraphExecDestroy(executable), list(freed)]
result += [cuda.cudaGraphLaunch(None, a), cuda.cudaGraphDestroy(None)]
""") == [0, 1, 0, [], 0, [], 0, 0, [7], 1, 1]


def test_what_a_graph_cannot_hold_here_is_refused_and_leaves_the_capture(on_gpu):
    assert on_gpu(f"""{CUDA}
pointer = c_void_p()
begin(a)
result = [cuda.cudaMallocAsync(byref(pointer), 64, a), end(a)]
result += [cuda.cudaMallocAsync(byref(pointer), 64, a)]
""") == [801, [0, True], 0]
