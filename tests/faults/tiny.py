"""A tiny random Llama in a folder, with the embedded model's tokenizer: a server on it starts in about a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    # Large enough that random logits differ by more than rounding.
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
"""A block of 16 tokens takes 8 KiB in fp32."""


def save(folder: Path, embedded: Path, **shape: Any) -> Path:
    """Make the model in `folder`, which bears its name; the same weights each time for the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes((embedded / name).read_bytes())
    return folder


def perturb(folder: Path) -> None:
    """Change one tensor, enough to be heard."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, path, metadata={"format": "pt"})
