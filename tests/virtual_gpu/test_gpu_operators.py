"""PyTorch's operators run on the virtual GPU, or say what is not possible there."""

from __future__ import annotations

import pytest

from pytest_mbmem.virtual_gpu.gpus import load_gpus

# name -> (expression or statements that set `r`, what it must be)
WORKING = {
    "random numbers and a value read back": ("r = torch.randn(1000, device=c).sum().item()", 0.0),
    "generator": ("g = torch.Generator(c).manual_seed(1); r = list(torch.rand(3, device=c, generator=g).shape)", [3]),
    "generator state": ("s = torch.cuda.get_rng_state(); torch.cuda.set_rng_state(s); r = s.numel() > 0", True),
    "sort": ("r = list(torch.randn(100000, device=c).sort()[1].shape)", [100000]),
    "topk": ("r = list(torch.rand(10, 100, device=c).topk(5)[0].shape)", [10, 5]),
    "cumsum": ("r = list(torch.rand(10, 100, device=c).cumsum(1).shape)", [10, 100]),
    "multinomial": ("r = list(torch.rand(10, 100, device=c).multinomial(2).shape)", [10, 2]),
    "index and its gradient": (
        "x = torch.ones(100, 8, device=c, requires_grad=True); x[torch.arange(10).cuda()].sum().backward(); "
        "r = list(x.grad.shape)",
        [100, 8],
    ),
    # a size that a kernel counts is 0 in a fresh process
    "nonzero": ("r = list(torch.ones(10, device=c).nonzero().shape)", [0, 1]),
    "unique": ("r = list(torch.randint(0, 9, (100,), device=c).unique().shape)", [0]),
    "masked_select": ("x = torch.ones(10, device=c); r = list(x[x > 0].shape)", [0]),
    "autocast": (
        "x = torch.ones(8, 8, device=c)\nwith torch.autocast(c, dtype=torch.bfloat16):\n    r = str((x @ x).dtype)",
        "torch.bfloat16",
    ),
    "embedding gradient": (
        "e = torch.nn.Embedding(50304, 64, device=c); "
        "e(torch.zeros(4, 4096, dtype=torch.long, device=c)).sum().backward(); r = list(e.weight.grad.shape)",
        [50304, 64],
    ),
    "cross entropy": (
        "x = torch.randn(64, 1000, device=c, requires_grad=True); "
        "F.cross_entropy(x, torch.zeros(64, dtype=torch.long, device=c)).backward(); r = list(x.grad.shape)",
        [64, 1000],
    ),
    "layer and RMS norm": (
        "x = torch.randn(64, 512, device=c, requires_grad=True); "
        "(F.layer_norm(x, (512,)) + F.rms_norm(x, (512,))).sum().backward(); r = list(x.grad.shape)",
        [64, 512],
    ),
    "linear with a fused GELU": (
        "z = lambda *s: torch.zeros(*s, device=c, dtype=torch.bfloat16); "
        "r = list(torch._addmm_activation(z(64), z(64, 64), z(64, 64), use_gelu=True).shape)",
        [64, 64],
    ),
    "convolution": (
        "m = torch.nn.Conv2d(3, 64, 3, device=c); y = m(torch.randn(2, 3, 32, 32, device=c)); y.sum().backward(); "
        "r = [*y.shape]",
        [2, 64, 30, 30],
    ),
    "batch norm": (
        "m = torch.nn.BatchNorm2d(8).cuda().half(); y = m(torch.randn(2, 8, 4, 4, device=c).half()); "
        "y.sum().backward(); r = [*y.shape]",
        [2, 8, 4, 4],
    ),
    "kernels compiled at run time": ("r = list(torch.special.bessel_j0(torch.randn(3, device=c)).shape)", [3]),
    "printing": ("r = 'cuda:0' in str(torch.ones(3, device=c))", True),
}
for dtype in ("bfloat16", "float16", "float32", "float64"):
    WORKING[f"matrix products in {dtype}"] = (
        f"a, b = torch.ones(4, 64, 64, device=c, dtype=torch.{dtype}), torch.zeros(64, device=c, dtype=torch.{dtype}); "
        "r = [list(t.shape) for t in (a @ a, F.linear(a, a[0], b), torch.addmm(b, a[0], a[1]), a[0] @ b, b @ b)]",
        [[4, 64, 64], [4, 64, 64], [64, 64], [64], []],
    )
for options in ("foreach=True", "fused=True", "foreach=False, fused=False", "capturable=True"):
    WORKING[f"AdamW with {options}"] = (
        f"m = torch.nn.Linear(64, 64, device=c); o = torch.optim.AdamW(m.parameters(), {options})\n"
        "for _ in range(2):\n"
        "    m(torch.randn(8, 64, device=c)).sum().backward()\n"
        "    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n"
        "    o.step(); o.zero_grad()\n"
        "r = [*o.state[m.weight]['exp_avg'].shape]",
        [64, 64],
    )


@pytest.fixture
def outcome(on_gpu):
    """outcome(code): what the code sets `r` to, in a process of its own."""

    def run(code):
        return on_gpu(f"import torch.nn.functional as F\nc = 'cuda'\n{code}\nresult = r")

    return run


@pytest.mark.parametrize("name", WORKING)
def test_operator_works(outcome, name):
    code, expected = WORKING[name]
    assert outcome(code) == expected


# torch has no kernels of their own for some, as the L4: there its kernels for an older GPU run
@pytest.mark.parametrize("gpu", load_gpus())
def test_operators_that_are_tuned_for_each_gpu_work_on_all(on_gpu, gpu):
    script = """
x = torch.zeros(5000, device="cuda")
result = [list(y.shape) for y in (x.masked_select(x > 0), x.sort()[0], x.cumsum(0))]
"""
    assert on_gpu(script, gpu=gpu) == [[0], [5000], [5000]]


@pytest.mark.parametrize(
    ("backend", "gradient"),
    [
        ("FLASH_ATTENTION", "ScaledDotProductFlashAttentionBackward0"),
        ("EFFICIENT_ATTENTION", "ScaledDotProductEfficientAttentionBackward0"),
        ("CUDNN_ATTENTION", "ScaledDotProductCudnnAttentionBackward0"),
    ],
)
def test_fused_attention_keeps_no_scores(on_gpu, backend, gradient):
    name, peak = on_gpu(f"""
from torch.nn.attention import SDPBackend, sdpa_kernel
q = torch.randn(2, 8, 2048, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
before = torch.cuda.memory_allocated()
with sdpa_kernel(SDPBackend.{backend}):
    o = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
name = o.grad_fn.name()
o.sum().backward()
result = [name, torch.cuda.max_memory_allocated() - before]
""")
    assert name == gradient
    scores = 2 * 8 * 2048 * 2048 * 2
    assert 4 * 2**20 < peak < scores / 2


NOT_POSSIBLE = {
    "torch.linalg.inv(torch.eye(8, device=c))": "cusolver error",
    "torch.fft.fft(torch.ones(8, device=c))": "CUFFT_NOT_SUPPORTED",
    "torch.nn.LSTM(8, 8, device=c)(torch.ones(3, 2, 8, device=c))": "CUDNN_STATUS_NOT_SUPPORTED",
}


@pytest.mark.parametrize("code", NOT_POSSIBLE)
def test_what_is_not_possible_says_so(outcome, code):
    message = outcome(f"try:\n    {code}\n    r = 'no error'\nexcept RuntimeError as e:\n    r = str(e)")
    assert NOT_POSSIBLE[code] in message


def test_the_profiler_goes_on_without_device_events(outcome):
    assert outcome("""
with torch.profiler.profile() as p:
    torch.ones(3, device=c) + 1
r = "aten::add" in [e.key for e in p.key_averages()]
""")


def test_the_allocators_history_is_recorded(outcome):
    assert (
        outcome("""
torch.cuda.memory._record_memory_history()
x = torch.ones(3, device=c)
r = torch.cuda.memory._snapshot()["segments"][0]["total_size"]
""")
        == 2 * 2**20
    )
