"""Layers of Transformer Engine, where it is installed: Megatron's own specification as it is."""

from __future__ import annotations

from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from ..recipe import Recipe, Training
from . import te_flash


def are_used(asked: TransformerConfig | Training) -> bool:
    """Whether the model has Transformer Engine's own layers; equivalents for memory where it is not installed."""
    return bool(HAVE_TE) and asked.transformer_impl == "transformer_engine"


def block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one model chunk of this rank's pipeline stage. May be empty."""
    multi_latent_attention.TELinear = TELinear  # which `layers` replaces
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=True, normalization=config.normalization, vp_stage=vp_stage
    )


def mtp_spec(config: TransformerConfig, vp_stage: int | None) -> MultiTokenPredictionBlockSubmodules | None:
    """The multi-token prediction layers of one model chunk, of the last layer's make; None where there are none."""
    if config.mtp_num_layers is None:
        return None
    last = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, use_transformer_engine=True, normalization=config.normalization
    )[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=True, vp_stage=vp_stage)


def assumptions(recipe: Recipe) -> tuple[str, ...]:
    """What a measurement on a virtual GPU states of a recipe with these layers."""
    training = recipe.training
    if not are_used(training):
        return ()
    found: tuple[str, ...] = ()
    if training.attention_backend == "flash" and te_flash.is_missing():
        found += (te_flash.ASSUMPTION,)
    is_half = training.precision != "fp32"  # without which there is no fused attention to choose
    if training.attention_backend == "fused" or (training.attention_backend == "auto" and is_half):
        found += ("cuDNN's fused attention: its plans take a workspace of 0 bytes",)
    if training.attention_backend == "auto" and te_flash.is_missing():
        found += ("attention_backend auto: chosen by Transformer Engine without flash-attn installed",)
    return found
