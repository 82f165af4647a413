"""Which models may be served: what would be wrong here is refused by name before any weight is read.

The law: K/V of a token must depend on that token and those before it, and on nothing else in the
batch; and every layer must hand its K/V through `cache.update` and attend through transformers'
attention interface. Each rule below names one way of breaking it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from models.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

STORED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layer types whose K/V is one vector per token and head; sliding windows are stored whole and masked."""

REFUSED_ROPES = ("dynamic", "longrope")
"""transformers 5.24 takes their frequencies from the largest position of the whole packed batch."""


def refuse_unsupported(config: PreTrainedConfig, model_class: type[Any] | None, cache_kind: str | None = None) -> None:
    """Return if models of `config`, run by `model_class`, may be served.

    `model_class` is None where transformers has no causal language model for it; `cache_kind` is
    the `cache_implementation` its generation config asks for.

    Raises:
        UnsupportedModel: names the model's type and the first reason found.
    """
    for reason in _reasons(config, model_class, cache_kind):
        raise UnsupportedModel(str(config.model_type), reason)


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of `config` that describes the decoder."""
    return config.get_text_config(decoder=True)


def rope_types(config: PreTrainedConfig) -> set[str]:
    """The rope types of all of a model's layers; they may differ by layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(each.get("rope_type", each.get("type", "default"))) for each in (nested or [parameters])}


def _reasons(config: PreTrainedConfig, model_class: type[Any] | None, cache_kind: str | None) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it has an encoder and a decoder; only decoders are served"
    if model_class is None:
        yield "transformers has no causal language model of this type"
    yield from _layer_reasons(text_config(config))
    if getattr(model_class, "_is_stateful", False):
        yield "it keeps recurrent state instead of K/V per token"
    if not getattr(model_class, "_supports_attention_backend", False):
        yield "its attention does not go through transformers' attention interface"
    if cache_kind == "quantized" or _quantizes_cache(config):
        yield "it asks for a quantized cache"
    if not getattr(text_config(config), "max_position_embeddings", None):
        yield "its config names no context length (max_position_embeddings)"


def _layer_reasons(text: PreTrainedConfig) -> Iterator[str]:
    if not _is_causal(text):
        yield "its attention is not causal"
    for name in sorted(rope_types(text)):
        if any(refused in name for refused in REFUSED_ROPES):
            yield f"rope type {name!r} depends on the other requests in a batch"
    if getattr(text, "num_kv_shared_layers", None):
        yield "some of its layers share K/V with others (num_kv_shared_layers)"
    if getattr(text, "kv_lora_rank", None):
        yield "latent attention (MLA, kv_lora_rank) is not stored yet"
    if getattr(text, "cross_attention_layers", None) or getattr(text, "add_cross_attention", False):
        yield "it has cross-attention layers"
    for kind in sorted(set(getattr(text, "layer_types", None) or ()) - STORED_LAYERS):
        yield f"layers of type {kind!r} are not stored as K/V per token"


def _is_causal(text: PreTrainedConfig) -> bool:
    if getattr(text, "is_causal", True) is False:
        return False
    # Encoders with a language-model head (BERT and its kin) mask nothing unless told to be decoders.
    if hasattr(text, "type_vocab_size") and not getattr(text, "is_decoder", False):
        return False
    return getattr(text, "use_bidirectional_attention", None) not in (True, "all")


def _quantizes_cache(config: PreTrainedConfig) -> bool:
    quantization = getattr(config, "quantization_config", None)
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, dict) else None
    return scheme is not None
