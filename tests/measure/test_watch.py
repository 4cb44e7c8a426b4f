"""`growth.watch` on training steps of a test's own. Each test runs whole in a worker."""

from __future__ import annotations

import pytest

from pytest_mbmem import growth
from pytest_mbmem.errors import UserError

pytestmark = pytest.mark.usefixtures("megatron_model")  # of which only the worker is needed in most

KIB = 1024
CACHE: list[object] = []


def a_model():
    import torch

    return torch.nn.Linear(256, 256, device="cuda")


def an_input():
    import torch

    return torch.ones(64, 256, device="cuda")


OUTPUT = 64 * 256 * 4


def test_a_sound_step_does_not_grow() -> None:
    import torch

    model = a_model()
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(an_input()).sum().backward()
        optimizer.step()

    sound = growth.watch(step, modules=model)
    assert sound.passed
    assert len(sound.ranks[0].run.resting) == 6


def test_a_view_kept_every_step_holds_the_whole_storage() -> None:
    model, kept = a_model(), []

    def step() -> None:
        kept.append(model(an_input()).detach()[0, :1])

    leak = growth.watch(step, modules=model)
    assert leak.per_step == OUTPUT
    (holder,) = leak.findings[0].holders
    assert holder.path == "the watched step, its variable kept[*]"
    assert holder.example == "1 float32 (a view of 64.00 KiB)"
    assert holder.allocated_at.startswith("tests/measure/test_watch.py:")
    assert holder.allocated_at.endswith(" (step)")


def a_function_with_a_mask():
    import torch

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.mask = torch.empty(100 * KIB, dtype=torch.uint8, device="cuda")
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    return Masked


@pytest.mark.parametrize("backward", [True, False], ids=["after-backward", "without-backward"])
def test_losses_that_are_not_detached_hold_their_graph(backward) -> None:
    model, masked, losses = a_model(), a_function_with_a_mask(), []

    def step() -> None:
        loss = masked.apply(model(an_input())).sum()
        if backward:
            loss.backward()
        losses.append(loss)

    leak = growth.watch(step)
    assert leak.per_step >= 100 * KIB
    paths = {holder.path: holder.bytes for holder in leak.findings[0].holders}
    graph = "the autograd graph of the watched step, its variable losses[*]"
    assert paths[f"{graph}, MaskedBackward.mask"] == 100 * KIB
    saved = [path for path in paths if path.startswith(f"{graph}, saved by ")]
    assert bool(saved) is not backward  # backward frees what the graph saved, but no attribute of a node
    assert sum(paths.values()) == leak.per_step


def test_what_only_an_autograd_node_holds_is_found_without_a_tensor_in_reach() -> None:
    masked = a_function_with_a_mask()

    def step() -> None:
        CACHE.append((masked.apply(a_model().weight) + 1).grad_fn)

    leak = growth.watch(step)
    CACHE.clear()
    mask = next(holder for holder in leak.findings[0].holders if holder.bytes == 100 * KIB)
    assert mask.path == "the autograd graph of test_watch.CACHE[*], MaskedBackward.mask"


def test_a_cache_of_a_module_is_named() -> None:
    def step() -> None:
        CACHE.append({"output": a_model()(an_input()).detach()})

    leak = growth.watch(step)
    CACHE.clear()
    (holder,) = leak.findings[0].holders
    assert holder.path == "test_watch.CACHE[*]['output']"


def test_a_hook_that_keeps_outputs_is_named_by_its_module(megatron_model) -> None:
    from pytest_mbmem.recipe import Model, Recipe, Training

    model = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000)
    live = megatron_model(Recipe(model=model, training=Training(seq_length=128)))
    outputs = []
    layer = live.chunks[0].module.module.decoder.layers[1]
    layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].detach()))
    leak = growth.watch(live.step, modules=live)
    assert leak.per_step == 128 * 64 * 2
    (holder,) = leak.findings[0].holders
    assert holder.path == "decoder.layers.*._forward_hooks[*], its variable outputs[*]"


def test_a_cycle_needs_gc_and_names_its_classes() -> None:
    class Wrapper:
        def __init__(self, model: object) -> None:
            self.model, self.hooks = model, [self.forward]

        def forward(self) -> None: ...

    def step() -> None:
        Wrapper(a_model())

    leak = growth.watch(step)
    weights = 256 * 256 * 4 + 1024
    assert (leak.per_step, leak.freed_by_gc) == (weights, 7 * weights)
    assert leak.ranks[0].run.cycles == ("Wrapper",)


def test_a_rise_in_one_step_is_no_growth() -> None:
    import torch

    kept, calls = [], iter(range(100))

    def step() -> None:
        if next(calls) in (1, 4):  # the second step, as an optimizer's state, and one that counts
            kept.append(torch.empty(KIB, device="cuda"))

    assert growth.watch(step).per_step == 0


def test_microbatches_are_compared_by_peak() -> None:
    model = a_model()

    def step(microbatches: int) -> None:
        outputs = [model(an_input()) for _ in range(microbatches)]
        for output in outputs:
            output.sum().backward()

    leak = growth.watch(step, microbatches=(4, 16), modules=model)
    assert leak.per_step == 0
    assert OUTPUT <= leak.per_microbatch <= 3 * OUTPUT  # output, and input, which its graph saves

    def one_after_the_other(microbatches: int) -> None:
        for _ in range(microbatches):
            model(an_input()).sum().backward()

    assert growth.watch(one_after_the_other, microbatches=(4, 16), modules=model).per_microbatch == 0


def test_watching_leaves_garbage_collection_and_the_history_as_they_were() -> None:
    import gc

    import torch

    def events() -> int:
        return len(torch.cuda.memory._snapshot()["device_traces"][0])

    def an_empty_tensor_is_recorded() -> bool:
        before = events()
        torch.empty(1, device="cuda")
        return events() > before + 1  # a snapshot is an event too

    kept = [torch.empty(1, device="cuda")]  # CUDA has started
    assert gc.isenabled()
    assert an_empty_tensor_is_recorded()  # what the peak of this test is made of
    before = events()
    assert not growth.watch(lambda: kept.append(torch.empty(2**20, device="cuda"))).passed
    assert gc.isenabled()
    assert not gc.garbage
    assert events() > before
    assert an_empty_tensor_is_recorded()


def test_a_saved_tensor_that_a_hook_packed_is_not_unpacked() -> None:
    import torch

    kept = []

    def never(packed):
        raise AssertionError("unpacked")

    def step() -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: {"packed": tensor.detach()}, never):
            value = torch.ones(KIB, device="cuda", requires_grad=True)
            kept.append((value.exp() * 2).sum())

    leak = growth.watch(step)
    packed = [holder for holder in leak.findings[0].holders if "['packed']" in holder.path]
    assert [holder.bytes for holder in packed] == [4 * KIB]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 3}, "growth.watch.steps=....: 3 is not a whole number from 5"),
        ({"slack": "much"}, "growth.watch.slack=....: 'much' is not a size"),
        ({"microbatches": 4}, "growth.watch.microbatches=....: 4 is not two whole numbers"),
        ({"modules": 3}, "growth.watch.modules=....: 3 is neither a module"),
    ],
)
def test_wrong_arguments(arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        growth.watch(lambda: None, **arguments)
