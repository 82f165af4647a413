"""A .gguf file -> a folder of bf16 safetensors, tokenizer and config, made once.

On a CPU transformers would dequantise packed GGUF weights again in every forward, so they are
unpacked once and kept.
"""

from __future__ import annotations

import json
from pathlib import Path

from models.errors import ModelUnavailable
from models.files import Progress, folder_whole_or_absent
from models.quiet import quiet_transformers

MANIFEST = "dormouse.json"
"""Names and sizes of a copy's files: what a copy must look like to be used."""


def convert(source: Path, target: Path, *, origin: dict[str, str], extra: dict[str, bytes], progress: Progress) -> None:
    """Make `target` a copy of `source` in bf16, with the files of `extra` beside it; whole or not at all.

    Raises:
        ModelUnavailable: `source` is no GGUF file that transformers can read.
    """
    progress(f"unpacking {source.name} into bf16 safetensors, once")
    with folder_whole_or_absent(target) as building:
        _unpack(source, building)
        for name, content in extra.items():
            (building / name).write_bytes(content)
        sizes = {file.name: file.stat().st_size for file in sorted(building.iterdir())}
        (building / MANIFEST).write_text(json.dumps({"origin": origin, "files": sizes}, indent=1))


def is_whole(folder: Path) -> bool:
    """`folder` is a copy made by `convert` with every file at its full length."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_bytes())["files"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _unpack(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
        except (ValueError, KeyError, OSError, NotImplementedError, ImportError) as error:
            raise ModelUnavailable(str(source), f"cannot be read as a GGUF model: {error}") from error
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
