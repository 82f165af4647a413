"""The shape of a model's K/V, layer by layer, as its own forward hands it to the cache.

Read off a forward of two tokens rather than off the config: names of fields differ by architecture,
what is passed to `cache.update` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvstore.types import KVLayout, LayerKV
from models.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def kv_layout(model: PreTrainedModel, block_tokens: int) -> KVLayout:
    """Layout of `model`'s K/V in blocks of `block_tokens`; runs one forward of two tokens.

    Call it while the model still has transformers' own attention.

    Raises:
        UnsupportedModel: a layer stores nothing, or K and V of different shapes.
    """
    shapes = [_layer_shape(model, layer, keys, values) for layer, (keys, values) in enumerate(_probe(model))]
    return KVLayout(tuple(shapes), block_tokens, DTYPE_NAMES[model.dtype], model.dtype.itemsize)


def _probe(model: PreTrainedModel) -> list[tuple[Any, Any]]:
    from transformers import DynamicCache

    cache = DynamicCache()
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, cache=cache, use_cache=True)
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(cache.layers) != num_layers:
        raise UnsupportedModel(
            model.config.model_type, f"{len(cache.layers)} of its {num_layers} layers store K/V; all must"
        )
    return [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]


def _layer_shape(model: PreTrainedModel, layer: int, keys: Any, values: Any) -> LayerKV:
    """Shape of one layer from its K and V, each [1, kv_heads, 2, head_dim]."""
    if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
        raise UnsupportedModel(model.config.model_type, f"layer {layer} stores no K/V per token")
    if keys.shape != values.shape or keys.dim() != 4 or keys.shape[2] != 2:
        raise UnsupportedModel(
            model.config.model_type,
            f"layer {layer} stores K of shape {tuple(keys.shape)} and V of shape {tuple(values.shape)}",
        )
    return LayerKV(kv_heads=keys.shape[1], head_dim=keys.shape[3])
