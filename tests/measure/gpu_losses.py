"""For a worker of test_on_gpu.py: what `OnGpu` keeps of a step with real numbers, and the loss of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pytest_mbmem.measure.on_gpu import OnGpu
from pytest_mbmem.megatron import host
from pytest_mbmem.megatron.model import DeviceBatches
from pytest_mbmem.recipe import Recipe


def both(recipe: dict[str, Any], folder: str, spoil: bool) -> dict[str, Any]:
    """One step; with `spoil` a parameter is infinite."""
    host.install()
    model = host.host_model(Recipe.from_dict(recipe, "recipe"), 0, Path(folder, "store"), 60.0)
    if spoil:
        with torch.no_grad():
            next(model.chunks[0].parameters()).fill_(float("inf"))
    tokens: list[torch.Tensor] = []
    model.chunks[0].register_forward_hook(lambda module, arguments, output: tokens.append(output.detach()))
    on_gpu = OnGpu.__new__(OnGpu)
    on_gpu._losses = []
    model.on_losses = on_gpu._keep_loss
    model.step()
    return {"kept": on_gpu._losses, "mean": float(torch.cat(tokens).float().mean()), "microbatches": len(tokens)}


def filled(recipe: dict[str, Any], folder: str) -> dict[str, Any]:
    """A microbatch of a real GPU's run: the values that each tensor has, and the tensors of another one."""
    host.install()
    model = host.host_model(Recipe.from_dict(recipe, "recipe"), 0, Path(folder, "store"), 60.0)
    load = DeviceBatches()
    first, second = (load(model.recipe, model.chunks[0]) for _ in range(2))
    tokens, labels, mask = first["tokens"], first["labels"], first["attention_mask"]
    assert tokens is not None
    assert labels is not None
    assert mask is not None
    return {
        "follows": bool(torch.equal(tokens[:, 1:], labels[:, :-1])),
        "different": len(tokens.unique()),
        "again": bool(torch.equal(tokens, second["tokens"])),  # type: ignore[arg-type]
        "hidden": mask[0, 0].int().tolist(),
    }
