"""A test that uses torch itself, and no recipe: the whole test runs in a worker on the chosen device."""

from __future__ import annotations

import pytest


@pytest.mark.peak_memory(limit="1.5 GiB")
def test_cross_entropy_in_chunks():
    """Logits of 16 chunks are never alive together: 16 times 256 MiB would not fit the limit."""
    import torch

    hidden = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(131072, 1024, device="cuda", dtype=torch.bfloat16)
    labels = torch.zeros(8192, dtype=torch.long, device="cuda")
    for rows, targets in zip(hidden.split(512), labels.split(512), strict=True):
        loss = torch.nn.functional.cross_entropy(rows @ weight.T, targets)
        loss.backward()
    assert hidden.grad is not None
