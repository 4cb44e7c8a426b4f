"""The layers that a model is made of: attention with real numbers on the CPU, and the parameters of every preset."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from pytest_mbmem.models import PRESETS
from pytest_mbmem.recipe import Model, Recipe, Training


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


@pytest.mark.usefixtures("megatron_model")
@pytest.mark.parametrize(("groups", "channels"), [(4, 32), (2, 32), (4, 16)], ids=["plain", "grouped", "latent"])
def test_both_attentions_are_the_textbook_formula(groups: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from megatron.core.transformer import TransformerConfig, dot_product_attention
    from megatron.core.transformer.enums import AttnMaskType

    from pytest_mbmem.megatron import layers

    tracker = SimpleNamespace(fork=nullcontext)
    monkeypatch.setattr(layers, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(dot_product_attention.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    buffer = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(dot_product_attention.parallel_state, "get_global_memory_buffer", lambda: buffer)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=groups,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
    )
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    sizes = {} if channels == 32 else {"k_channels": 32, "v_channels": channels}
    arguments = {
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "softmax_scale": 0.2,
        "pg_collection": SimpleNamespace(tp=group, cp=group),
    }
    torch.manual_seed(1)
    query = torch.randn(6, 2, 4, 32)
    key = torch.randn(6, 2, groups, 32)
    value = torch.randn(6, 2, groups, channels)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)

    k, v = (t.repeat_interleave(4 // groups, dim=2) for t in (key, value))
    scores = torch.einsum("ibhc,jbhc->bhij", query, k) * 0.2
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    expected = torch.einsum("bhij,jbhc->ibhc", weights, v).flatten(2)

    for attention in (layers.UnfusedAttention, layers.FlashAttention):
        result = attention(config, **arguments, **sizes)(query, key, value, hidden[None, None])
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_shrunk_preset_has_the_parameters_of_its_recipe(megatron_model, name: str) -> None:
    hidden = 320 if name == "gpt3-2.7b" else 384  # a multiple of the head size
    model = PRESETS[name].shrunk(layers=3, hidden=hidden)
    recipe = Recipe(model=model, training=Training(seq_length=64)).but(vocab_size=1024)
    chunks = megatron_model(recipe).chunks
    assert sum(p.numel() for chunk in chunks for p in chunk.parameters()) == recipe.model.num_parameters


@pytest.mark.parametrize("pattern", [2, (0, 0, 1, 1)], ids=["every-other", "last-two"])
def test_layers_have_experts_by_the_pattern(megatron_model, pattern) -> None:
    moe = {"num_moe_experts": 2, "moe_ffn_hidden_size": 64, "moe_layer_freq": pattern}
    sizes = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 1024, "moe": moe}
    live = megatron_model({"model": sizes, "training": {"seq_length": 64}})
    kinds = [layer.is_moe_layer for layer in live.chunks[0].module.module.decoder.layers]
    assert kinds == ([True, False, True, False] if pattern == 2 else [False, False, True, True])


def test_all_norms_are_marked_under_sequence_parallelism(megatron_model) -> None:
    model = Model(
        num_layers=2, hidden_size=64, num_attention_heads=2, vocab_size=1024, qk_layernorm=True, mtp_num_layers=1
    )
    recipe = Recipe(model=model, training=Training(seq_length=64)).but(tp=2, sequence_parallel=True)
    modules = dict(megatron_model(recipe).chunks[0].named_modules())
    norms = [module for name, module in modules.items() if name.endswith("norm") and list(module.parameters())]
    # two of each layer and two of its queries and keys; the decoder's last; three of the prediction layer
    assert len(norms) == 4 * 3 + 1 + 3
    assert all(p.sequence_parallel for norm in norms for p in norm.parameters())
