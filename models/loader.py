"""A model's name -> a LoadedModel: weights on the device, tokenizer, K/V layout, identity and defaults."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from models.errors import KernelsUnavailable, ModelUnavailable, UnsupportedModel
from models.files import Progress, silent
from models.fingerprint import fingerprint, model_key
from models.layout import DTYPE_NAMES, kv_layout
from models.native import compiler
from models.native.decoder import KERNELS_VERSION, attach, why_not
from models.packing import pack_linears, packs
from models.quiet import quiet_transformers
from models.source import Source, resolve
from models.support import refuse_unsupported, text_config

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from kvstore.types import KVLayout

DtypeName = Literal["auto", "bf16", "fp16", "fp32"]
CompileName = Literal["auto", "on", "off"]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHAPING = ("rope_parameters", "sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar")
"""Fields of a config that shape K/V or attention beside the weights; the whole config is fingerprinted too."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend for requests that do not say."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `max_positions` is the longest context it was made for, in tokens."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    layout: KVLayout
    fingerprint: bytes
    model_key: bytes
    eos_ids: frozenset[int]
    defaults: GenerationDefaults
    max_positions: int
    dtype: torch.dtype
    device: torch.device


def load(
    source: str,
    *,
    revision: str | None = None,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    block_tokens: int = 32,
    cache_dir: Path,
    hf_token: str | None = None,
    attention: str = "dormouse_paged",
    compile: CompileName = "auto",
    progress: Progress = silent,
) -> LoadedModel:
    """Load what `source` names (see source.py); blocking, seconds to minutes.

    `compile` says whether machine code of our own computes it (models/native): auto where that can be.

    Raises:
        ModelUnavailable: the files cannot be had or read.
        KernelsUnavailable: `compile` is on and there can be no such code.
        UnsupportedModel: it would be wrong here; nothing was loaded, or it was given up at once.
    """
    with quiet_transformers():
        found = resolve(source, revision=revision, cache_dir=cache_dir, hf_token=hf_token, progress=progress)
        config, model_class = checked_config(found)
        tokenizer = _tokenizer(found, config)
        chosen = torch.device(device)
        weights_dtype = choose_dtype(dtype, chosen)
        files = found.weight_files()
        progress(f"fingerprinting {found.name}")
        digest = fingerprint([*files, found.folder / "config.json"], cache_dir)
        progress(f"loading {found.name} in {DTYPE_NAMES[weights_dtype]} on {chosen}")
        model = _weights(found, model_class, weights_dtype, chosen)
        layout = kv_layout(model, block_tokens)
        _attach(model, attention)
        is_native = (
            compile != "off"
            and attention == "dormouse_paged"
            and _compiled(model, layout, cache_dir, must=compile == "on", progress=progress)
        )
        if not is_native:
            pack_linears(model)
    generation: GenerationConfig | None = model.generation_config
    return LoadedModel(
        name=found.name,
        model=model,
        tokenizer=tokenizer,
        layout=layout,
        fingerprint=digest,
        model_key=model_key(digest, DTYPE_NAMES[weights_dtype], layout, _shaping(config, attention, is_native)),
        eos_ids=_eos_ids(config, generation, tokenizer),
        defaults=_defaults(generation),
        max_positions=int(text_config(config).max_position_embeddings),
        dtype=weights_dtype,
        device=chosen,
    )


def estimate(
    source: str,
    *,
    revision: str | None = None,
    dtype: DtypeName = "auto",
    device: str = "cpu",
    cache_dir: Path,
    hf_token: str | None = None,
    progress: Progress = silent,
) -> int:
    """Bytes the weights will take in the chosen dtype, packed where they will be; fetches the files, loads nothing.

    Raises:
        ModelUnavailable: the files cannot be had or read.
        UnsupportedModel: it could not be served anyway.
    """
    with quiet_transformers():
        found = resolve(source, revision=revision, cache_dir=cache_dir, hf_token=hf_token, progress=progress)
        config, _ = checked_config(found)
    chosen = torch.device(device)
    weights_dtype = choose_dtype(dtype, chosen)
    total = sum(_file_bytes(file, weights_dtype.itemsize) for file in found.weight_files())
    if packs(chosen, weights_dtype) and getattr(config, "tie_word_embeddings", False):
        # The files have one matrix for embedding and head; packing the head's leaves the embedding's beside it.
        decoder = text_config(config)
        total += int(decoder.vocab_size) * int(decoder.hidden_size) * weights_dtype.itemsize
    return total


def choose_dtype(dtype: DtypeName, device: torch.device) -> torch.dtype:
    """The dtype asked for; `auto` is bf16 where the machine multiplies it natively, else fp32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        has_bf16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)()) or bool(
            getattr(torch.cpu, "_is_amx_tile_supported", bool)()
        )
    return torch.bfloat16 if has_bf16 else torch.float32


def checked_config(source: Source) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """The model's config, and the class of transformers that runs it.

    Raises:
        UnsupportedModel: see support.py; also where only the repository's own code could run it.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    raw = json.loads((source.folder / "config.json").read_bytes())
    model_type = str(raw.get("model_type", "unknown"))
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, StrictDataclassError) as error:
        if "auto_map" in raw:
            raise UnsupportedModel(
                model_type, "only code from its own repository can run it, and such code is never run here"
            ) from error
        raise UnsupportedModel(model_type, f"transformers cannot read its config: {error}") from error
    try:
        cache_kind = GenerationConfig.from_pretrained(source.folder).cache_implementation
    except OSError:
        cache_kind = None
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if isinstance(model_class, tuple):  # several classes for one config; the first is transformers' own choice
        model_class = model_class[0]
    refuse_unsupported(config, model_class, cache_kind)
    assert model_class is not None
    return config, model_class


def _tokenizer(source: Source, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelUnavailable(source.name, f"its tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            str(config.model_type), f"its tokenizer {type(tokenizer).__name__} has no fast form (tokenizer.json)"
        )
    return tokenizer  # type: ignore[no-any-return]


def _weights(
    source: Source, model_class: type[PreTrainedModel], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    try:
        model: Any = model_class.from_pretrained(
            source.folder, dtype=dtype, device_map=None, attn_implementation="eager", use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelUnavailable(source.name, f"its weights cannot be loaded: {error}") from error
    return model.to(device).eval()  # type: ignore[no-any-return]


def _attach(model: PreTrainedModel, attention: str) -> None:
    """Have every layer of the decoder attend through `attention`, registered beforehand where it is ours."""
    from models.attention import ATTENTION_NAME, register

    if attention == ATTENTION_NAME:
        register()
    model.set_attn_implementation(attention)


def _compiled(model: PreTrainedModel, layout: KVLayout, cache_dir: Path, *, must: bool, progress: Progress) -> bool:
    """Have the kernels compute `model`; False where they cannot, and why is told."""
    reason = why_not(model, layout)
    if not reason:
        try:
            attach(model, layout, compiler.library(cache_dir))
        except compiler.NoKernels as error:
            reason = str(error)
    if must and reason:
        raise KernelsUnavailable(reason)
    progress(f"not compiled, so steps take longer: {reason}" if reason else "kernels compiled for this CPU compute it")
    return not reason


def _shaping(config: PreTrainedConfig, attention: str, is_native: bool) -> dict[str, object]:
    text = text_config(config)
    if is_native:
        attention = f"{attention}, kernels {KERNELS_VERSION}"
    return {"attention": attention, **{name: getattr(text, name, None) for name in _SHAPING}}


def _eos_ids(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerFast
) -> frozenset[int]:
    """Every id the model's makers call an end: chat models often end a message by another than they end a text."""
    found: set[int] = set()
    for owner in (generation, config, text_config(config), tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def _defaults(generation: GenerationConfig | None) -> GenerationDefaults:
    values: dict[str, Any] = {}
    for name in GenerationDefaults.__dataclass_fields__:
        value = getattr(generation, name, None)
        if value is not None:
            values[name] = value
    return GenerationDefaults(**values)


def _file_bytes(file: Path, itemsize: int) -> int:
    """Bytes of one safetensors file's tensors once floats have `itemsize` bytes, read off its header.

    Header (https://huggingface.co/docs/safetensors): 8 bytes of little-endian length, then JSON.
    """
    with file.open("rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        header: dict[str, Mapping[str, Any]] = json.loads(handle.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        start, end = tensor["data_offsets"]
        is_float = tensor["dtype"] in {"BF16", "F16", "F32", "F64"}
        total += math.prod(tensor["shape"]) * itemsize if is_float else end - start
    return total
