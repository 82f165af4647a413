"""Decoders of Llama's kind, computed by the kernels: which models those are, and one step of one.

The law: what is refused here runs as transformers' modules, so a model is taken only when every part of it is one that
decoder.c computes: names of classes decide, since the same fields may mean another thing elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import byref, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from models.native.structs import Attention, Layer, Model, Step
from models.native.weights import Packed, pack, pack_gated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvstore.types import KVLayout
    from models.attention import Arena
    from models.runner import Chunk

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Each compared with transformers in tests/golden/test_native.py."""

KERNELS_VERSION = 1
"""Raise when the kernels compute anything differently: K/V of older ones must not be taken for theirs."""

HEAD_DIM_MOST = 256
_ATTRIBUTE = "dormouse_native"


def native_of(model: PreTrainedModel) -> NativeDecoder | None:
    """What computes `model` in place of its own modules; None where those do."""
    found: NativeDecoder | None = getattr(model, _ATTRIBUTE, None)
    return found


def why_not(model: PreTrainedModel, layout: KVLayout) -> str:
    """Why the kernels cannot compute `model`; empty where they can."""
    return next(_reasons(model, layout), "")


def _reasons(model: Any, layout: KVLayout) -> Iterator[str]:
    config = model.config
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        yield f"the kernels compute in bf16 on a CPU, and this is {model.dtype} on {model.device}".replace("torch.", "")
    if type(model).__name__ not in ARCHITECTURES:
        yield f"the kernels do not compute {type(model).__name__}"
        return
    shape = layout.layers[0]
    if set(layout.layers) != {shape} or shape.head_dim % 32 or shape.head_dim > HEAD_DIM_MOST:
        yield f"heads have {shape.head_dim} dimensions, and not a multiple of 32"
    if layout.block_tokens % 16:
        yield f"blocks have {layout.block_tokens} tokens, and not a multiple of 16"
    if config.hidden_act != "silu":
        yield f"the activation is {config.hidden_act!r}"
    if config.hidden_size % 32 or config.intermediate_size % 32:
        yield "its rows are no multiples of 32"
    if getattr(config, "mlp_bias", False):
        yield "its MLP has biases"
    if not all(type(part) is nn.Linear for layer in model.model.layers for part in _linears(layer)):
        yield "its linear layers are not plain"
    if type(model.lm_head) is not nn.Linear or model.lm_head.bias is not None:
        yield "its head is not plain"


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def attach(model: PreTrainedModel, layout: KVLayout, library: ctypes.CDLL) -> None:
    """Have `model` computed by the kernels from now on. Its linear layers are packed, and their modules gone."""
    # No submodule: it holds no parameters of its own.
    object.__setattr__(model, _ATTRIBUTE, NativeDecoder(model, layout, library))


def _forget(owner: Any) -> None:
    """Leave out linear layers that are packed, so that weights are there once."""
    for name, child in list(owner.named_children()):
        if type(child) is nn.Linear:
            setattr(owner, name, _Gone())


class _Gone(nn.Module):
    """Where a linear layer was whose weights the kernels have."""

    def forward(self, *_: Any) -> Tensor:
        raise RuntimeError("this model is computed by its kernels; load it with compile='off' to run its modules")


@dataclass(frozen=True, slots=True)
class _LayerWeights:
    qkv: Packed
    o: Packed
    gate_up: Packed
    down: Packed


class NativeDecoder:
    """One model's weights as the kernels read them; takes them out of its modules.

    Not for two threads at once: a step has one set of workspaces.
    """

    def __init__(self, model: PreTrainedModel, layout: KVLayout, library: ctypes.CDLL) -> None:
        parts: Any = model
        config = parts.config
        self._library = library
        self._layout = layout
        self._rotary = _RotaryTable(parts.model.rotary_emb, layout.layers[0].head_dim)
        self._workspaces = _Workspaces()
        first = parts.model.layers[0].self_attn
        heads = first.q_proj.out_features // first.head_dim
        self.vocabulary = int(parts.lm_head.out_features)
        self._head = pack(library, [parts.lm_head])
        _forget(parts)
        self._weights = [_packed(library, layer) for layer in parts.model.layers]
        self._kept: list[Tensor] = []  # what the structs point to beside the packed weights
        self._layers = (Layer * len(self._weights))(
            *(self._layer(number, layer, config) for number, layer in enumerate(parts.model.layers))
        )
        self._model = Model(
            ctypes.addressof(self._layers),
            self._pointer(parts.model.embed_tokens.weight),
            self._pointer(parts.model.norm.weight),
            self._head.weight.data_ptr(),
            len(self._weights),
            config.hidden_size,
            config.intermediate_size,
            heads,
            layout.layers[0].kv_heads,
            first.head_dim,
            self.vocabulary,
            parts.model.norm.variance_epsilon,
            first.scaling,
        )
        library.dormouse_scratch_bytes.restype = ctypes.c_int64
        library.dormouse_partial_floats.restype = ctypes.c_int64
        self._scratch_bytes = -(-library.dormouse_scratch_bytes(ctypes.c_int64(first.head_dim)) // 64) * 64

    @property
    def packed_bytes(self) -> int:
        """Of the matrices that are parameters of no module any more."""
        layers = [part for each in self._weights for part in (each.qkv, each.o, each.gate_up, each.down)]
        return sum(part.weight.nbytes for part in (self._head, *layers))

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.data.contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _layer(self, number: int, layer: Any, config: Any) -> Layer:
        weights, attention = self._weights[number], layer.self_attn
        window = getattr(attention, "sliding_window", None)
        if type(attention).__name__ == "MistralAttention":
            window = config.sliding_window  # of all its layers; the others say it on each
        return Layer(
            self._pointer(layer.input_layernorm.weight),
            self._pointer(layer.post_attention_layernorm.weight),
            self._pointer(attention.q_norm.weight if hasattr(attention, "q_norm") else None),
            self._pointer(attention.k_norm.weight if hasattr(attention, "k_norm") else None),
            weights.qkv.weight.data_ptr(),
            weights.qkv.bias_pointer,
            weights.o.weight.data_ptr(),
            weights.o.bias_pointer,
            weights.gate_up.weight.data_ptr(),
            weights.down.weight.data_ptr(),
            self._layout.layer_offset(number),
            window or 0,
        )

    def step(self, arena: Arena, chunks: Sequence[Chunk], wanted: Sequence[int]) -> Tensor:
        """K/V of the chunks, packed in their order; logits [wanted, vocabulary] of those rows, ascending. Blocking.

        Raises:
            IndexError: a token is beyond the vocabulary.
        """
        block, dim = self._layout.block_tokens, self._layout.layers[0].head_dim
        counts = [len(chunk.token_ids) for chunk in chunks]
        tables = [np.asarray(chunk.slots, dtype=np.int64) for chunk in chunks]
        positions = np.concatenate(
            [np.arange(chunk.position, chunk.position + count) for chunk, count in zip(chunks, counts, strict=True)]
        )
        slots = np.concatenate(
            [
                table[np.arange(chunk.position, chunk.position + count) // block]
                for chunk, table, count in zip(chunks, tables, counts, strict=True)
            ]
        )
        write = slots * arena.slot_elements + positions % block * dim
        token_ids = np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in chunks])
        if token_ids.max() >= self.vocabulary:  # C would read what lies behind the table
            raise IndexError(f"token {token_ids.max()} is none of {self.vocabulary}")
        starts = np.cumsum([0, *counts[:-1]])
        sequences = np.array(
            [
                (start, count, chunk.position, table.ctypes.data)
                for start, count, chunk, table in zip(starts, counts, chunks, tables, strict=True)
            ],
            dtype=np.int64,
        )
        rows = np.asarray(wanted, dtype=np.int64)
        cos, sin = self._rotary.upto(int(positions.max()) + 1)
        logits = torch.empty((len(rows), self.vocabulary), dtype=torch.bfloat16)
        step = Step(
            *(part.ctypes.data for part in (token_ids, positions, write)),
            cos.data_ptr(),
            sin.data_ptr(),
            sequences.ctypes.data,
            rows.ctypes.data,
            arena.data.data_ptr(),
            logits.data_ptr(),
        )
        self._lend(step, len(positions), sequences, arena)
        step.num_wanted = len(rows)
        self._library.dormouse_step(byref(self._model), byref(step))
        return logits

    def _lend(self, step: Step, tokens: int, sequences: np.ndarray, arena: Arena) -> None:
        """Workspaces for a step of `tokens`, and its sizes."""
        model, threads = self._model, torch.get_num_threads()
        wide = model.heads * model.head_dim
        bf16 = {
            "hidden": model.hidden,
            "normed": model.hidden,
            "qkv": wide + 2 * model.kv_heads * model.head_dim,
            "attended": wide,
            "inner": model.inner,
        }
        for name, width in bf16.items():
            setattr(step, name, self._workspaces.pointer(name, 2 * tokens * width))
        shape = Attention(
            heads=model.heads,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            num_sequences=len(sequences),
            sequences=c_void_p(sequences.ctypes.data),
        )
        step.partial = self._workspaces.pointer("partial", 4 * self._library.dormouse_partial_floats(byref(shape)))
        step.scratch = self._workspaces.pointer("scratch", threads * self._scratch_bytes)
        step.tokens, step.num_sequences, step.threads = tokens, len(sequences), threads
        step.slot_elements, step.block_tokens = arena.slot_elements, self._layout.block_tokens
        step.scratch_bytes = self._scratch_bytes


def _packed(library: ctypes.CDLL, layer: Any) -> _LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    packed = _LayerWeights(
        qkv=pack(library, [attention.q_proj, attention.k_proj, attention.v_proj]),
        o=pack(library, [attention.o_proj]),
        gate_up=pack_gated(library, mlp.gate_proj, mlp.up_proj),
        down=pack(library, [mlp.down_proj]),
    )
    _forget(attention)
    _forget(mlp)
    return packed


class _RotaryTable:
    """cos and sin of every position so far, [positions, head_dim]: transformers' own, computed once each."""

    STEP = 2048

    def __init__(self, rotary: nn.Module, head_dim: int) -> None:
        self._rotary = rotary
        self._cos = torch.empty((0, head_dim), dtype=torch.bfloat16)
        self._sin = self._cos

    def upto(self, positions: int) -> tuple[Tensor, Tensor]:
        while len(self._cos) < positions:
            first = len(self._cos)
            ids = torch.arange(first, first + self.STEP)[None]
            cos, sin = self._rotary(self._cos.new_empty(1), ids)
            self._cos = torch.cat((self._cos, cos[0]))
            self._sin = torch.cat((self._sin, sin[0]))
        return self._cos, self._sin


class _Workspaces:
    """Buffers that grow to the largest step so far: fresh ones would cost page faults in every step."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def pointer(self, name: str, size: int) -> int:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = torch.zeros(max(size, 64), dtype=torch.uint8)
        return buffer.data_ptr()
