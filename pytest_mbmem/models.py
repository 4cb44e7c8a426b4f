"""Shapes of published models.

Vocabularies are unpadded. Positions of models with RoPE are left out, because they take no memory.
"""

from __future__ import annotations

from .errors import UserError
from .recipe import Mla, Model, Moe
from .validation import did_you_mean, show


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Model:
    # "The Llama 3 Herd of Models" (arXiv 2407.21783), table 3
    return Model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=8,
        ffn_hidden_size=ffn,
        vocab_size=128256,
        rotary_base=500000,
        normalization="RMSNorm",
        activation="swiglu",
    )


def _gpt3(layers: int, hidden: int, heads: int) -> Model:
    # "Language Models are Few-Shot Learners" (arXiv 2005.14165), table 2.1: 2048 positions, MLP of four times the
    # hidden size. The rest is GPT-2's: learned positions, biases, tied embeddings, dropout 0.1, 50257 tokens.
    return Model(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        position_embedding_type="learned_absolute",
        add_bias_linear=True,
        share_embeddings_and_output_weights=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )


PRESETS: dict[str, Model] = {
    "llama3-8b": _llama3(32, 4096, 32, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 28672),
    # "Qwen3 Technical Report" (arXiv 2505.09388), tables 1 and 2; sizes from the config.json of Qwen/Qwen3-8B
    "qwen3-8b": Model(
        num_layers=36,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=12288,
        vocab_size=151936,
        rotary_base=1000000,
        normalization="RMSNorm",
        activation="swiglu",
        qk_layernorm=True,
    ),
    # "Mixtral of Experts" (arXiv 2401.04088), table 1; rope_theta from the config.json of mistralai/Mixtral-8x7B-v0.1
    "mixtral-8x7b": Model(
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        vocab_size=32000,
        rotary_base=1000000,
        normalization="RMSNorm",
        activation="swiglu",
        moe=Moe(num_moe_experts=8, moe_router_topk=2),
    ),
    # As qwen3-8b; sizes from the config.json of Qwen/Qwen3-30B-A3B. All layers have experts: the dense size is unused.
    "qwen3-30b-a3b": Model(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=6144,
        vocab_size=151936,
        rotary_base=1000000,
        normalization="RMSNorm",
        activation="swiglu",
        qk_layernorm=True,
        moe=Moe(num_moe_experts=128, moe_router_topk=8, moe_ffn_hidden_size=768),
    ),
    # "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 4.2; vocabulary from the config.json of
    # deepseek-ai/DeepSeek-V3. Without the multi-token prediction module.
    "deepseek-v3": Model(
        num_layers=61,
        hidden_size=7168,
        num_attention_heads=128,
        ffn_hidden_size=18432,
        vocab_size=129280,
        normalization="RMSNorm",
        activation="swiglu",
        qk_layernorm=True,
        moe=Moe(
            num_moe_experts=256,
            moe_router_topk=8,
            moe_ffn_hidden_size=2048,
            moe_shared_expert_intermediate_size=2048,
            moe_layer_freq=(0,) * 3 + (1,) * 58,
        ),
        mla=Mla(q_lora_rank=1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128),
    ),
    # "Muon is Scalable for LLM Training" (arXiv 2502.16982); sizes from the config.json of moonshotai/Moonlight-16B-A3B
    "moonlight-16b": Model(
        num_layers=27,
        hidden_size=2048,
        num_attention_heads=16,
        ffn_hidden_size=11264,
        vocab_size=163840,
        rotary_base=50000,
        normalization="RMSNorm",
        activation="swiglu",
        qk_layernorm=True,
        moe=Moe(
            num_moe_experts=64,
            moe_router_topk=6,
            moe_ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=2 * 1408,
            moe_layer_freq=(0,) + (1,) * 26,
        ),
        mla=Mla(q_lora_rank=None, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128),
    ),
    # "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv 2508.10925), table 1; sizes from the config.json of
    # openai/gpt-oss-120b. All layers have experts. Its SwiGLU is one with a clamp and its attention has sinks (2304
    # parameters in all) and a window of 128 tokens in every other layer: megatron.softmax_type, .window_size and
    # .window_attn_skip_freq.
    "gpt-oss-120b": Model(
        num_layers=36,
        hidden_size=2880,
        num_attention_heads=64,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2880,
        vocab_size=201088,
        rotary_base=150000,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=True,
        moe=Moe(num_moe_experts=128, moe_router_topk=4, moe_ffn_hidden_size=2880),
    ),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    # The table prints 24 heads of 128, which is not 2048 and would make 1.5 billion parameters.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    # The table prints a hidden size of 5140, which is not 40 heads of 128.
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
}


def preset(name: object) -> Model:
    """The published shape of that name. Raises `UserError` listing the names."""
    if isinstance(name, str) and name in PRESETS:
        return PRESETS[name]
    hint = did_you_mean(name, list(PRESETS))
    raise UserError(f"{show(name)} is not a preset; {hint}presets: {', '.join(PRESETS)}")
