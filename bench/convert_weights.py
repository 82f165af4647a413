"""The embedded model for other servers: the same weights in the files that they read.

    dormouse bench convert DIR          DIR/hf      safetensors, bf16: vLLM, transformers
                                        DIR/*.gguf  bf16: llama.cpp

The folder is the one that Dormouse serves, linked or copied. The GGUF file is the one that the weights were unpacked
from, with every quantized tensor written as bf16, which is what Dormouse computes with; small vectors stay fp32 there,
as llama.cpp wants them. Names, vocabulary and everything else it says of itself are taken over.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.errors import BenchFailed
from models import embedded

if TYPE_CHECKING:
    from gguf import GGUFWriter, ReaderField, ReaderTensor

FILE_NAME = "smollm2-135m-instruct-bf16.gguf"
BF16_FILE_TYPE = 32
"""llama.cpp's LLAMA_FTYPE_MOSTLY_BF16."""


@dataclass(frozen=True, slots=True)
class Converted:
    """Where other servers find the weights."""

    folder: Path
    gguf: Path


def convert(cache_dir: Path, target: Path, tell: Callable[[str], None]) -> Converted:
    """Write both under `target`, unless they are there.

    Raises:
        ModelUnavailable: the embedded model cannot be had.
        BenchFailed: its file is of an architecture that is not known to be copied right.
    """
    source = embedded.fetch(cache_dir, progress=tell)
    folder, file = target / "hf", target / FILE_NAME
    target.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").is_file():
        tell(f"copying {source} to {folder}")
        shutil.copytree(source, folder, copy_function=_link_or_copy, dirs_exist_ok=True)
    if not file.is_file():
        with embedded.package(cache_dir, tell) as package:
            tell(f"writing {file}")
            part = file.with_suffix(".part")
            to_bf16(package / embedded.GGUF_NAME, part)
            os.replace(part, file)
    return Converted(folder, file)


def to_bf16(source: Path, target: Path) -> None:
    """A copy of the GGUF file `source` in which matrices are bf16 and vectors fp32.

    Raises:
        BenchFailed: it says nothing of its architecture.
    """
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise BenchFailed(f"{source} does not say which architecture it holds")
    writer = GGUFWriter(target, str(architecture.contents()))
    for field in reader.fields.values():
        _take_over(writer, field)
    writer.add_file_type(BF16_FILE_TYPE)
    for tensor in reader.tensors:
        _add(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _take_over(writer: GGUFWriter, field: ReaderField) -> None:
    """A key as it is, but for those that the writer makes itself."""
    from gguf import GGUFValueType

    own = ("general.architecture", "general.file_type", "general.quantization_version")
    if field.name.startswith("GGUF.") or field.name in own:
        return
    kind = field.types[0]
    element = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=element)


def _add(writer: GGUFWriter, tensor: ReaderTensor) -> None:
    from gguf import GGMLQuantizationType, quants

    values = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    if values.ndim < 2:
        writer.add_tensor(tensor.name, values)
        return
    kind = GGMLQuantizationType.BF16
    writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)


def _link_or_copy(source: str, target: str) -> Any:
    """A hard link costs no space; another file system needs a copy."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        return shutil.copy2(source, target)
    return target
