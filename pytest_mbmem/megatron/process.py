"""What Transformer Engine and Megatron keep in a process beyond the life of a model, and how the next is free of it.

Transformer Engine's caches hold device memory (workspaces, constants, gradients of no meaning) and answers that depend
on the model before (the attention that was chosen, sizes of process groups). Megatron chooses the attention by three
environment variables, which the next model would find set, and keeps the angles of RoPE for each length of a sequence.
Names are those of Transformer Engine 2.10 to 2.20 and core 0.16.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from . import te_flash, te_layers

_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_APPLY_QK_LAYER_SCALING")
"""That are set while a model is built."""

_ATTENTION = "attention.dot_product_attention"
_COLLECTIONS = {
    "module.base": ("_dummy_wgrads",),
    f"{_ATTENTION}.utils": ("_cu_seqlens_cache",),
    f"{_ATTENTION}.softmax": ("_default_causal_mask",),
    f"{_ATTENTION}.dot_product_attention": ("_thd_policy_backend_cache", "_thd_policy_validation_cache"),
    f"{_ATTENTION}.context_parallel": (
        "_cu_seqlens_info_with_cp_cache",
        "_seq_chunk_ids_cache_for_reordering_before_attn",
        "_seq_chunk_ids_cache_for_reordering_after_attn",
        "_softmax_offset_chunk_ids_cache",
    ),
}
"""Modules of transformer_engine.pytorch -> their caches that are dictionaries or lists."""


class _Reasons(logging.Handler):
    """What Transformer Engine's log says of each attention that it does not take for the last inputs it looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("Running with config"):
            self.texts.clear()
        elif text.startswith("Disabling"):
            self.texts.append(text)


_reasons = _Reasons()

_after = ExitStack()
"""What is to be done when the model is gone."""


def enter(config: TransformerConfig, virtual: bool) -> None:
    """Before a model of this configuration is built, in a process that may build others."""
    _after.callback(_restore, {name: os.environ.get(name) for name in _VARIABLES})
    _after.callback(_forget_angles)
    if not HAVE_TE:
        return
    _after.callback(_empty_caches)
    _listen()
    # As Megatron-LM's training script does: Transformer Engine takes it from the environment alone, and Megatron
    # refuses a configuration that differs.
    os.environ.setdefault("NVTE_APPLY_QK_LAYER_SCALING", str(int(config.apply_query_key_layer_scaling)))
    asks_for_flash = te_layers.are_used(config) and config.attention_backend is AttnBackend.flash
    if virtual and asks_for_flash and te_flash.is_missing():
        _after.enter_context(te_flash.stand_in())


def leave() -> None:
    """After it: free what is cached, and restore the environment. A second call does nothing."""
    _after.close()


def why_no_attention(message: str) -> str:
    """An error's message, and why Transformer Engine found no attention if that is what it says."""
    if not message.startswith("No dot product attention backend is available"):
        return message
    by_megatron = ("_ATTN=0", "_ATTN_V2=0", "_ATTN_V3=0", "_ATTN_V4=0")  # which follow from attention_backend
    told = [text for text in _reasons.texts if not text.endswith(by_megatron)]
    return f"{message.partition('. ')[0]}: {'; '.join(told) or 'none that training.attention_backend allows is there'}"


def _listen() -> None:
    logger, level = logging.getLogger("DotProductAttention"), _module(f"{_ATTENTION}.utils").AttentionLogging
    _after.callback(setattr, level, "_log_level", level._log_level)
    _after.callback(setattr, logger, "propagate", logger.propagate)
    _after.callback(logger.removeHandler, _reasons)
    level._log_level, logger.propagate = logging.DEBUG, False
    logger.addHandler(_reasons)


def _forget_angles() -> None:
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        clear: Callable[[], None] = getattr(embedding.forward, "cache_clear", lambda: None)
        clear()


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _empty_caches() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine."):
            for value in list(vars(module).values()):
                if callable(clear := getattr(value, "cache_clear", None)):  # functools.lru_cache
                    clear()
    for name, collections in _COLLECTIONS.items():
        module = _module(name)
        for collection in collections:
            getattr(module, collection, {}).clear()
    _module(f"{_ATTENTION}.dot_product_attention")._attention_backends.update(
        attention_params=None, backend_selection_requires_update=False
    )
    _module("permutation")._moe_permute_index_map_workspace = None
    _module("permutation")._moe_permute_index_map_max_expanded_token_num = 0
    _module("fp8").FP8GlobalStateManager.reset()


def _module(name: str) -> Any:
    return import_module(f"transformer_engine.pytorch.{name}")
