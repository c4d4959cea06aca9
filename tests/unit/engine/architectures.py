"""Small configurations of the architectures that the engine is proved on, as many as are cheap to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

from engine.models import COMMON, MAX_MODEL_LEN, VOCABULARY, WINDOW

Configs = dict[str, Callable[[], hf.PretrainedConfig]]


def _common(*without: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in without} | changes


_PLAIN = _common("head_dim")
_PADDED = _common(pad_token_id=0)
_NO_SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}
_OLD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    **_NO_SPECIAL,
}
_ALTERNATING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}

#: Paged attention computes these. Besides those of models.CONFIGS.
PAGED: Configs = {
    "apertus": lambda: hf.ApertusConfig(**_PLAIN),
    "arcee": lambda: hf.ArceeConfig(**COMMON),
    "biogpt": lambda: hf.BioGptConfig(**_common("head_dim", pad_token_id=1)),
    "codegen": lambda: hf.CodeGenConfig(**_OLD, rotary_dim=4),
    "cohere": lambda: hf.CohereConfig(**_PLAIN),
    "cohere2": lambda: hf.Cohere2Config(**COMMON, **_ALTERNATING),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**_common(num_key_value_heads=4), **_DEEPSEEK, **_LATENT),
    "doge": lambda: hf.DogeConfig(**_PLAIN),
    "ernie4_5": lambda: hf.Ernie4_5Config(**COMMON),
    "exaone4": lambda: hf.Exaone4Config(**COMMON, **_ALTERNATING, sliding_window_pattern=2),
    "gemma": lambda: hf.GemmaConfig(**COMMON),
    "gemma3": lambda: hf.Gemma3TextConfig(**COMMON, **_ALTERNATING, query_pre_attn_scalar=8),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **_common(num_hidden_layers=4),
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "glm": lambda: hf.GlmConfig(**_PADDED),
    "glm4": lambda: hf.Glm4Config(**_PADDED),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**COMMON, **_DEEPSEEK),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_OLD),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_common("head_dim", "num_key_value_heads")),
    "gpt_oss": lambda: hf.GptOssConfig(**COMMON, **_ALTERNATING, **_LOCAL_EXPERTS),
    "gptj": lambda: hf.GPTJConfig(**_OLD, rotary_dim=4),
    "granite": lambda: hf.GraniteConfig(**_PLAIN),
    "granitemoe": lambda: hf.GraniteMoeConfig(**_PLAIN, **_LOCAL_EXPERTS),
    "helium": lambda: hf.HeliumConfig(**COMMON),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**COMMON),
    "jetmoe": lambda: hf.JetMoeConfig(
        **_common("head_dim", "num_attention_heads"), kv_channels=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**COMMON, **_LOCAL_EXPERTS),
    "ministral": lambda: hf.MinistralConfig(**COMMON, **_ALTERNATING),
    "mixtral": lambda: hf.MixtralConfig(**COMMON, **_LOCAL_EXPERTS),
    "modernbert_decoder": lambda: hf.ModernBertDecoderConfig(
        **_common("head_dim", "num_key_value_heads", pad_token_id=0, bos_token_id=1, eos_token_id=2),
        local_attention=8,
    ),
    "nanochat": lambda: hf.NanoChatConfig(**_PLAIN),
    "olmo": lambda: hf.OlmoConfig(**_PLAIN),
    "olmo2": lambda: hf.Olmo2Config(**_PLAIN),
    "olmo3": lambda: hf.Olmo3Config(**_PLAIN, **_ALTERNATING),
    "olmoe": lambda: hf.OlmoeConfig(**_PLAIN, **_EXPERTS),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        init_std=0.3,
        pad_token_id=1,
        **_NO_SPECIAL,
    ),
    "persimmon": lambda: hf.PersimmonConfig(**_common("head_dim", "num_key_value_heads")),
    "phi": lambda: hf.PhiConfig(**_PLAIN),
    "phi3": lambda: hf.Phi3Config(**_PADDED),
    "phimoe": lambda: hf.PhimoeConfig(**_PLAIN, **_LOCAL_EXPERTS),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**_PLAIN, **_EXPERTS, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**COMMON, **_EXPERTS, norm_topk_prob=True),
    "seed_oss": lambda: hf.SeedOssConfig(**COMMON),
    "smollm3": lambda: hf.SmolLM3Config(**_PADDED, no_rope_layers=[1, 0]),
    "starcoder2": lambda: hf.Starcoder2Config(**_PLAIN, sliding_window=WINDOW),
}

_MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "state_size": 4,
    "num_hidden_layers": 2,
    "time_step_rank": 4,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_FALCON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    **_NO_SPECIAL,
}
_FEW_EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}

#: The compat runner computes these, in the way that the name of a Mode says.
COMPAT: dict[str, tuple[str, Callable[[], hf.PretrainedConfig]]] = {
    "bamba": ("CHUNKED", lambda: hf.BambaConfig(**_PLAIN, **_MAMBA2, attn_layer_indices=[1])),
    "bloom": ("CHUNKED", lambda: hf.BloomConfig(**_common("head_dim"), n_layer=2, n_head=4)),
    "diffllama": ("CHUNKED", lambda: hf.DiffLlamaConfig(**COMMON)),
    "falcon": ("CHUNKED", lambda: hf.FalconConfig(**_FALCON, alibi=False)),
    "falcon with ALiBi": ("CHUNKED", lambda: hf.FalconConfig(**_FALCON, alibi=True)),
    "falcon_h1": (
        "CHUNKED",
        lambda: hf.FalconH1Config(**COMMON, **_MAMBA2 | {"mamba_n_heads": 4}, mamba_d_ssm=32),
    ),
    "falcon_mamba": ("STEPWISE", lambda: hf.FalconMambaConfig(**_MAMBA)),
    "gpt_neo": (
        "CHUNKED",
        lambda: hf.GPTNeoConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=WINDOW,
            max_position_embeddings=MAX_MODEL_LEN,
            initializer_range=0.3,
            **_NO_SPECIAL,
        ),
    ),
    "granitemoehybrid": (
        "CHUNKED",
        lambda: hf.GraniteMoeHybridConfig(
            **_PLAIN, **_MAMBA2, **_FEW_EXPERTS, layer_types=["mamba", "attention"], shared_intermediate_size=16
        ),
    ),
    "jamba": (
        "STEPWISE",
        lambda: hf.JambaConfig(
            **_PLAIN,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=2,
            num_experts_per_tok=1,
            mamba_d_state=4,
            mamba_dt_rank=4,
        ),
    ),
    "lfm2": ("CHUNKED", lambda: hf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"])),
    "lfm2_moe": (
        "CHUNKED",
        lambda: hf.Lfm2MoeConfig(**COMMON, **_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    ),
    "llama4": (
        "CHUNKED",
        lambda: hf.Llama4TextConfig(
            **COMMON,
            **_FEW_EXPERTS,
            intermediate_size_mlp=48,
            interleave_moe_layer_step=1,
            attention_chunk_size=16,
            no_rope_layers=[1, 0],
        ),
    ),
    "mamba": ("STEPWISE", lambda: hf.MambaConfig(**_MAMBA)),
    "mamba2": (
        "CHUNKED",
        lambda: hf.Mamba2Config(
            **{**_MAMBA, "state_size": 8}, num_heads=8, head_dim=8, n_groups=1, chunk_size=8, bos_token_id=None
        ),
    ),
    "minimax": (
        "STEPWISE",
        lambda: hf.MiniMaxConfig(
            **COMMON, **_FEW_EXPERTS, layer_types=["linear_attention", "full_attention"], block_size=8
        ),
    ),
    "mpt": (
        "CHUNKED",
        lambda: hf.MptConfig(
            vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.3
        ),
    ),
    "nemotron": ("CHUNKED", lambda: hf.NemotronConfig(**COMMON)),
    "nemotron_h": (
        "CHUNKED",
        lambda: hf.NemotronHConfig(
            **_common("num_hidden_layers"),
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=8,
            mamba_head_dim=8,
            n_groups=1,
            ssm_state_size=8,
            chunk_size=8,
        ),
    ),
    "qwen3_5": ("CHUNKED", lambda: hf.Qwen3_5TextConfig(**COMMON, **_DELTA)),
    "qwen3_next": (
        "CHUNKED",
        lambda: hf.Qwen3NextConfig(**COMMON, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=16),
    ),
    "recurrent_gemma": (
        "RECOMPUTE",
        lambda: hf.RecurrentGemmaConfig(
            **_common("head_dim", "initializer_range", num_hidden_layers=3), lru_width=32, attention_window_size=16
        ),
    ),
    "rwkv": (
        "CHUNKED",
        lambda: hf.RwkvConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            attention_hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            **_NO_SPECIAL,
        ),
    ),
    "stablelm": ("CHUNKED", lambda: hf.StableLmConfig(**_PLAIN)),
    "xglm": (
        "CHUNKED",
        lambda: hf.XGLMConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            ffn_dim=48,
            num_layers=2,
            attention_heads=4,
            max_position_embeddings=MAX_MODEL_LEN,
            init_std=0.3,
            pad_token_id=1,
            **_NO_SPECIAL,
        ),
    ),
    "zamba2": (
        "CHUNKED",
        lambda: hf.Zamba2Config(
            **_PLAIN,
            mamba_d_state=8,
            n_mamba_heads=8,
            mamba_ngroups=1,
            chunk_size=8,
            layers_block_type=["mamba", "hybrid"],
            num_mem_blocks=1,
        ),
    ),
}
