"""The structs of kernels.h and decoder.c, field by field; whoever changes one changes the other."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int64, c_void_p

PLAIN, ADD, GATE = range(3)
"""How a matmul finishes (`enum finish`)."""


class Matmul(ctypes.Structure):
    """`struct matmul`."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "y")),
        *((name, c_int64) for name in ("rows", "k", "n", "stride_x", "stride_y")),
        ("finish", c_int),
    )


class Attention(ctypes.Structure):
    """`struct attention`."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "out", "arena", "sequences", "sinks", "partial", "scratch")),
        *((name, c_int64) for name in ("num_sequences", "stride_query", "slot_elements", "block_tokens")),
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "window", "scratch_bytes")),
        ("scaling", c_float),
        ("softcap", c_float),
    )


class Layer(ctypes.Structure):
    """`struct layer`."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("qkv", "qkv_bias", "o", "o_bias", "gate_up", "down")),
        ("arena_offset", c_int64),
        ("window", c_int64),
    )


class Model(ctypes.Structure):
    """`struct model`."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "embedding", "norm", "head")),
        *((name, c_int64) for name in ("num_layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocabulary")),
        ("epsilon", c_float),
        ("scaling", c_float),
    )


class Step(ctypes.Structure):
    """`struct step`."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "write", "cos", "sin", "sequences", "wanted")),
        *((name, c_void_p) for name in ("arena", "logits", "hidden", "normed", "qkv", "attended", "inner")),
        ("partial", c_void_p),
        ("scratch", c_void_p),
        *((name, c_int64) for name in ("tokens", "num_sequences", "num_wanted", "slot_elements", "block_tokens")),
        ("scratch_bytes", c_int64),
        ("threads", c_int64),
    )
