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
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
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
