"""Attention under context parallelism, with real numbers on the CPU: each rank's share is that of the whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.mark.usefixtures("megatron_model")  # in a worker, where torch is loaded once
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_context_parallel_chunks_attend_as_the_whole_sequence_does(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from pytest_mbmem.megatron import layers

    def attend(query, key, value):
        """Causal attention whose queries are the last of the keys' positions, [sequence, batch, heads, channels]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).permute(2, 0, 1, 3)

    torch.manual_seed(1)
    query, key, value = torch.randn(3, 16, 2, 3, 8).unbind()
    whole = attend(query, key, value)
    chunks = torch.arange(16).chunk(2 * ranks)
    owned = [torch.cat([chunks[r], chunks[2 * ranks - 1 - r]]) for r in range(ranks)]
    everyone = torch.cat(owned)
    for rank in range(ranks):
        shards = iter([key[everyone], value[everyone]])
        monkeypatch.setattr(layers._GatherSequence, "apply", lambda *_, shards=shards: next(shards))
        group = SimpleNamespace(size=lambda: ranks, rank=lambda rank=rank: rank)
        attention = SimpleNamespace(cp_group=group, _attend=attend)
        mine = (t[owned[rank]] for t in (query, key, value))
        share = layers.FlashAttention._attend_over_chunks(attention, *mine)
        torch.testing.assert_close(share, whole[owned[rank]])
