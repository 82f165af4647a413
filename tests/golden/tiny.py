"""Tiny random models of other architectures, from a config: fp32, a vocabulary of 320, four layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models import attention

VOCABULARY = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    # Large enough that random logits differ by more than rounding.
    "initializer_range": 0.2,
}


def qwen3() -> PreTrainedModel:
    """Query and key norms, no window."""
    return _built(Qwen3ForCausalLM, Qwen3Config(**_COMMON))


def gemma2() -> PreTrainedModel:
    """Every other layer a sliding window; softcaps on scores and logits; its own query scale."""
    config = Gemma2Config(**_COMMON, sliding_window=96, query_pre_attn_scalar=24, attn_logit_softcapping=5.0)
    return _built(Gemma2ForCausalLM, config)


def gpt_oss() -> PreTrainedModel:
    """Attention sinks, sliding windows, a mixture of experts."""
    config = GptOssConfig(**_COMMON, sliding_window=96, num_local_experts=4, num_experts_per_tok=2)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    return _built(GptOssForCausalLM, config)


def mistral() -> PreTrainedModel:
    """A sliding window in every layer."""
    return _built(MistralForCausalLM, MistralConfig(**_COMMON, sliding_window=200))


_WIDE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "head_dim": 32,
    "initializer_range": 0.1,
}
"""Rows and heads of a multiple of 32, as the kernels need them."""


def wide_llama(*, heads: int, kv_heads: int, head_dim: int) -> PreTrainedModel:
    shape: dict[str, Any] = {
        "hidden_size": 32 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "initializer_range": 0.05,  # rows are wider: with more, rounding alone changes what it says
    }
    return _built(LlamaForCausalLM, LlamaConfig(**{**_WIDE, **shape}))


def wide_qwen2() -> PreTrainedModel:
    """Biases on query, key and value, which a fresh model has at zero; every other layer a window."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 2}
    model = _built(Qwen2ForCausalLM, Qwen2Config(**{**_WIDE, "hidden_size": 192}, **windows))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def wide_qwen3() -> PreTrainedModel:
    model = _built(Qwen3ForCausalLM, Qwen3Config(**_WIDE))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a fresh model has ones, which would hide a norm that is left out
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def wide_mistral() -> PreTrainedModel:
    return _built(MistralForCausalLM, MistralConfig(**_WIDE, sliding_window=200))


def in_bf16(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with bf16 weights; rotary frequencies stay fp32, as in a model that is loaded in bf16."""
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data = parameter.data.bfloat16()
    return twin


def _built(model_class: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config._attn_implementation = "eager"
    model: PreTrainedModel = model_class(config).float().eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    return model


def paged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of `model` that attends through the arena."""
    attention.register()
    twin = copy.deepcopy(model)
    twin.set_attn_implementation(attention.ATTENTION_NAME)
    return twin
