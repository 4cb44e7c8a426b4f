"""What the tests of Transformer Engine do inside of a worker."""

from __future__ import annotations

import os
from typing import Any

import torch

from pytest_mbmem.measure.worker import refusals
from pytest_mbmem.megatron import process, te_flash
from pytest_mbmem.megatron.model import live_model
from pytest_mbmem.recipe import Recipe


def in_one_process(recipes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Build, train and close one model after the other: what each held, and what is left of it."""
    torch.set_num_threads(1)
    found = []
    for recipe in recipes:
        torch.cuda.reset_peak_memory_stats()
        parsed = Recipe.from_dict(recipe)
        with refusals(parsed.megatron):
            model = live_model(parsed)
            for _ in range(parsed.training.steps):
                model.step()
        peak = torch.cuda.max_memory_allocated()
        model.close()
        del model
        torch._C._cuda_clearCublasWorkspaces()
        chosen = {name: os.environ[name] for name in process._VARIABLES if name in os.environ}
        found.append({"peak": peak, "left": torch.cuda.memory_allocated(), "environment": chosen})
    return found


def flash_attention(shape: tuple[int, int, int, int], groups: int) -> dict[str, int]:
    """What flash-attn's stand-in holds from its forward to its backward, and takes in its backward, in bytes.

    `shape`: [batch, sequence, heads, channels], bf16; `groups`: heads of the keys and values.
    """
    batch, sequence, heads, channels = shape
    query, key, value = (
        torch.empty(batch, sequence, h, channels, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        for h in (heads, groups, groups)
    )
    before = torch.cuda.memory_allocated()
    with te_flash.stand_in():
        output = te_flash._backends().flash_attn_func(query, key, value, 0.0, causal=True)
    retained = torch.cuda.memory_allocated() - before
    gradient = torch.empty_like(output)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output.backward(gradient)
    return {"retained": retained, "backward": torch.cuda.max_memory_allocated() - before}


def no_attention() -> str:
    """Why there is none, as told of the last inputs."""
    message = "No dot product attention backend is available for the provided inputs. Please run with NVTE_DEBUG=1"
    process._reasons.texts[:] = ["Disabling FusedAttention due to NVTE_FUSED_ATTN=0", "Disabling A for B"]
    return process.why_no_attention(message)
