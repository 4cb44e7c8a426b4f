"""A step on the virtual GPU fails where the host reads from the device what no assumption states."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mbmem.recipe import Model, Moe, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=1, hidden_size=64, num_attention_heads=4, vocab_size=1000),
    training=Training(seq_length=64, steps=1),
)
EXPERTS = RECIPE.but(moe=Moe(num_moe_experts=4), overload=1.0)

WAYS = {
    "item": "x.sum().item()",
    "bool": "bool((x > 0).any())",
    "tolist": "x[0, 0].tolist()",
    "cpu": "x[0].cpu()",
    "asynchronous": "x[0].to('cpu', non_blocking=True)",
    "pinned": "torch.empty(4, dtype=x.dtype, pin_memory=True).copy_(x.flatten()[:4])",
    "nonzero": "x.nonzero()",
    "masked_select": "x.masked_select(x > 0)",
    "indexing by a mask": "x[x > 0]",
    "repeat_interleave": "torch.repeat_interleave(torch.ones(4, dtype=torch.long, device='cuda'))",
}


def reader(way: str) -> Any:
    """A module whose forward reads from the device in this way and returns its input."""
    import torch

    code = compile(f"def forward(self, x):\n    {way}\n    return x\n", "tests/reader.py", "exec")
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return type("Reader", (torch.nn.Module,), {"forward": names["forward"]})()


def read_in_forward(live: Any, module: Any) -> None:
    """Have the first layer's input go through this module."""
    import torch

    layer = live.chunks[0].module.module.decoder.layers[0]
    layer.input_layernorm = torch.nn.Sequential(module, layer.input_layernorm)


@pytest.mark.parametrize("way", WAYS)
def test_a_read_in_forward_fails_with_its_place(megatron_model: Any, way: str) -> None:
    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(RECIPE)
    read_in_forward(live, reader(WAYS[way]))
    place = r"the host read \d+ bytes from the device at .*reader\.py:2 \(forward\), which a kernel would have computed"
    with pytest.raises(UnansweredRead, match=place):
        live.step()


def test_stale_values_are_no_answer(megatron_model: Any) -> None:
    import torch

    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(RECIPE)
    module = reader("self.was = self.state.mul_(2).tolist()")
    module.state = torch.tensor([3, 4]).cuda()
    read_in_forward(live, module)
    with pytest.raises(UnansweredRead, match="read 16 bytes"):
        live.step()
    assert module.was == [3, 4]  # what the host wrote there before a kernel would have doubled it


def test_a_read_in_backward_fails_with_its_place(megatron_model: Any) -> None:
    import torch

    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * float(grad.abs().max())

    live = megatron_model(RECIPE)
    module = reader("return self.reads(x)")
    module.reads = Reads.apply
    read_in_forward(live, module)
    with pytest.raises(UnansweredRead, match=r"test_assumptions_reads\.py:\d+ \(backward\)"):
        live.step()


LED_TO = {"ZeroDivisionError": "1 // int(x.count_nonzero())", "OutOfMemoryError": "x.sum().item(); x.new_empty(2**40)"}


@pytest.mark.parametrize("error", LED_TO)
def test_what_such_a_read_led_to_is_told_with_it(megatron_model: Any, error: str) -> None:
    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(RECIPE)
    read_in_forward(live, reader(LED_TO[error]))
    with pytest.raises(UnansweredRead, match=rf"reader\.py:2 \(forward\).*; it ended in {error}"):
        live.step()


def test_more_places_are_named(megatron_model: Any) -> None:
    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(RECIPE)
    read_in_forward(live, reader("x.sum().item()\n    x.max().item()"))
    with pytest.raises(UnansweredRead, match=r"reader\.py:2 \(forward\).* \(and then at .*reader\.py:3 \(forward\)\)"):
        live.step()


@pytest.mark.parametrize("elements", [16 * 1024, 16 * 1024 + 1])
def test_a_copy_of_much_data_decides_nothing(megatron_model: Any, elements: int) -> None:
    from pytest_mbmem.virtual_gpu import reads

    live = megatron_model(RECIPE)
    read_in_forward(live, reader(f"torch.empty({elements}, device='cuda').cpu()"))
    if elements * 4 > reads.LARGEST_DECISION:
        live.step()
    else:
        with pytest.raises(reads.UnansweredRead):
            live.step()


def test_outside_of_a_step_everything_may_be_read(megatron_model: Any) -> None:
    import torch

    live = megatron_model(RECIPE)
    live.step()
    assert torch.ones(1, device="cuda").item() == 0
    live.step()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_routing_counts_without_an_answer_fail(
    megatron_model: Any, monkeypatch: pytest.MonkeyPatch, dispatcher: str
) -> None:
    from pytest_mbmem.virtual_gpu import assumptions
    from pytest_mbmem.virtual_gpu.reads import UnansweredRead

    live = megatron_model(EXPERTS.but(moe_token_dispatcher_type=dispatcher))
    monkeypatch.setattr(assumptions, "answer_read", lambda *_: None)
    with pytest.raises(UnansweredRead, match=r"megatron/core/transformer/moe/\w+\.py:\d+ .*\d reads had none"):
        live.step()


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize("recipe", [RECIPE, EXPERTS], ids=["dense", "experts"])
def test_a_measurement_with_such_a_read_fails(monkeypatch: pytest.MonkeyPatch, recipe: Recipe) -> None:
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe.router import TopKRouter

    from pytest_mbmem.measure.worker import measure_rank

    owner = mlp.MLP if recipe.model.moe is None else TopKRouter
    original = owner.forward

    def forward(self: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        hidden.isnan().any().item()
        return original(self, hidden, *args, **kwargs)

    monkeypatch.setattr(owner, "forward", forward)
    failure = measure_rank(recipe.to_dict(), 0, {}, 1, record=False)["failure"]
    assert (failure["kind"], failure["step"]) == ("unanswered read", 1)
    assert "read 1 bytes from the device at " in failure["message"]
    assert "test_assumptions_reads.py:" in failure["message"]
