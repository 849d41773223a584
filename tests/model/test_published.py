"""Published models, from the figures of their public configs alone."""

from __future__ import annotations

from typing import Any

import pytest

from pipeplan.model.huggingface import layers_from_config

_ZAMBA2_HYBRID = (6, 11, 17, 23, 29, 35, 41, 47, 53, 59, 65, 71, 77)
_NEMOTRON_H_56B = "M-M-M-M*-M-M-M-M-M*-" + "M-M-M-M-M*-" * 8 + "M-M-M-M-M-"

PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "jamba-1.5-large": (
        398.56,
        {
            "model_type": "jamba", "hidden_size": 8192, "intermediate_size": 24576, "num_hidden_layers": 72,
            "num_attention_heads": 64, "num_key_value_heads": 8, "mamba_dt_rank": 512, "vocab_size": 65536,
        },
    ),
    "nemotron-h-56b": (
        56.32,
        {
            "model_type": "nemotron_h", "hidden_size": 8192, "hybrid_override_pattern": _NEMOTRON_H_56B,
            "intermediate_size": 32768, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
            "mamba_num_heads": 256, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 256, "vocab_size": 131072,
        },
    ),
    "nemotron-3-nano-30b-a3b": (
        31.58,
        {
            "model_type": "nemotron_h", "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "intermediate_size": 1856, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
            "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
            "ssm_state_size": 128, "vocab_size": 131072,
        },
    ),
    "zamba2-7b": (
        7.3,
        {
            "model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 81,
            "layers_block_type": ["hybrid" if index in _ZAMBA2_HYBRID else "mamba" for index in range(81)],
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 32,
            "attention_head_dim": 224, "num_mem_blocks": 2, "adapter_rank": 128, "n_mamba_heads": 112,
            "mamba_headdim": 64, "mamba_ngroups": 2, "mamba_d_state": 64, "chunk_size": 256, "vocab_size": 32000,
            "use_mem_rope": True,
        },
    ),
    "bamba-9b": (
        9.78,
        {
            "model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27],
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128,
            "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "vocab_size": 128256,
        },
    ),
    "deepseek-v3": (
        671.03,
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432,
            "vocab_size": 129280, "num_attention_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "gemma-3-27b": (
        27.01,
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
                "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 21504, "vocab_size": 262208,
                "sliding_window": 1024,
            },
        },
    ),
    "gemma-2-9b": (
        9.24,
        {
            "model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000,
        },
    ),
    "qwen3-next-80b-a3b": (
        79.67,
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "vocab_size": 151936,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_models_add_up(name: str) -> None:
    """Parameter totals from the config alone, shared weights counted once, are within 1 % of the published figures."""
    billion, config = PUBLISHED[name]
    model = layers_from_config(config, name=name)
    assert model.num_parameters == pytest.approx(billion * 1e9, rel=0.01)
