"""Tiny configs of the families that the adapter promises, each with what makes the family special."""

from __future__ import annotations

from typing import Any

_COMMON = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 32}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "jamba": {
        "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8,
        **_ATTENTION,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-ME*-", "head_dim": 8, "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, **_ATTENTION,
    },
    "llama": {"num_hidden_layers": 2, **_ATTENTION},
    "bamba": {
        "num_hidden_layers": 3, "attn_layer_indices": [1], "z_loss_coefficient": 0.1, **_ATTENTION, **_MAMBA2,
    },
    "zamba2": {
        "num_hidden_layers": 5, "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid", "mamba"],
        "num_mem_blocks": 2, "mamba_ngroups": 1, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8,
        "chunk_size": 8, "adapter_rank": 4, "use_shared_attention_adapter": True, **_ATTENTION,
        "num_key_value_heads": 4,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4,
        "num_experts_per_tok": 2, "shared_intermediate_size": 16, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "output_router_logits": True, "router_aux_loss_coef": 0.2, **_ATTENTION, **_MAMBA2,
    },
    "falcon_h1": {
        "num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 64, "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5, **_ATTENTION, **_MAMBA2,
    },
    "qwen3_next": {
        "num_hidden_layers": 4, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "output_router_logits": True,
        "router_aux_loss_coef": 0.2, **_ATTENTION,
    },
    "deepseek_v3": {
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, **_ATTENTION, "num_key_value_heads": 4,
    },
    "gemma2": {
        "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 0.5, **_ATTENTION,
    },
    "gpt_oss": {
        "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.2, **_ATTENTION,
    },
    "gemma3_text": {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 4, **_ATTENTION},
    "mamba2": {
        "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8,
    },
}  # fmt: skip


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """Return the tiny config of a family, with changes."""
    return {"model_type": family, **_COMMON, **FAMILIES[family], **changes}
