"""Loading: what comes out, and who is refused by name before a weight is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore.types import LayerKV
from models.errors import ModelUnavailable, UnsupportedModel
from models.loader import GenerationDefaults, LoadedModel, choose_dtype, estimate, load
from models.packing import packs
from models.source import download_bars

if TYPE_CHECKING:
    from pathlib import Path

TINY: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}


@pytest.fixture(scope="module")
def loaded(cache_dir: Path, embedded_folder: Path) -> LoadedModel:
    assert embedded_folder.is_dir()
    return load("embedded", dtype="bf16", cache_dir=cache_dir)


def folder_of(tmp_path: Path, **config: Any) -> Path:
    """A folder with no more than a config: what is refused is refused before anything else is read."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    values = {name: value for name, value in {**TINY, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def tiny(tmp_path: Path, embedded_folder: Path, **config: Any) -> Path:
    """A whole tiny model of random weights, with the embedded model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = folder_of(tmp_path, **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((embedded_folder / name).read_bytes())
    return folder


def test_the_embedded_model_comes_with_its_layout_ends_and_limits(loaded: LoadedModel) -> None:
    assert loaded.name == "smollm2-135m-instruct"
    assert loaded.layout.layers == (LayerKV(kv_heads=3, head_dim=64),) * 30
    assert loaded.layout.token_bytes == 23_040
    assert loaded.layout.slot_bytes == 737_280
    assert loaded.eos_ids == {2}
    assert loaded.max_positions == 8192
    assert loaded.dtype == torch.bfloat16
    assert not loaded.model.training
    assert (loaded.defaults.temperature, loaded.defaults.top_p) == (0.2, 0.9)
    assert loaded.model.config._attn_implementation == "dormouse_paged"


def test_weights_are_estimated_without_loading_them(cache_dir: Path, tmp_path: Path, embedded_folder: Path) -> None:
    parameters = 134_515_008  # with the embedding once: it is the head's weight too
    packed_head = 49_152 * 576 if packs(torch.device("cpu"), torch.bfloat16) else 0
    assert estimate("embedded", dtype="bf16", cache_dir=cache_dir) == 2 * (parameters + packed_head)
    assert estimate("embedded", dtype="fp32", cache_dir=cache_dir) == 4 * parameters
    folder = tiny(tmp_path, embedded_folder, model_type="qwen3")
    assert estimate(str(folder), dtype="fp16", cache_dir=cache_dir) * 2 == estimate(
        str(folder), dtype="fp32", cache_dir=cache_dir
    )


def test_model_keys_differ_by_dtype_and_block_size(loaded: LoadedModel, cache_dir: Path) -> None:
    wide = load("embedded", dtype="bf16", block_tokens=16, cache_dir=cache_dir)
    assert wide.fingerprint == loaded.fingerprint
    assert wide.model_key != loaded.model_key


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "qwen3"}, (LayerKV(2, 16),) * 2),
        ({"model_type": "mistral", "sliding_window": 8}, (LayerKV(2, 16),) * 2),
        ({"model_type": "granite", "head_dim": None, "num_attention_heads": 8}, (LayerKV(2, 8),) * 2),
        ({"model_type": "phi3", "head_dim": None}, (LayerKV(2, 16),) * 2),
        ({"model_type": "gemma2", "sliding_window": 8}, (LayerKV(2, 16),) * 2),
        ({"model_type": "gemma3_text", "sliding_window": 8}, (LayerKV(2, 16),) * 2),
        ({"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}, (LayerKV(2, 16),) * 2),
        (
            {
                "model_type": "gemma4_text",
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 32,
                "num_kv_shared_layers": 0,
                "vocab_size_per_layer_input": 49152,
                "hidden_size_per_layer_input": 0,
            },
            (LayerKV(2, 16), LayerKV(2, 32)),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_layout_is_what_each_layer_hands_to_its_cache(
    tmp_path: Path, embedded_folder: Path, cache_dir: Path, config: dict[str, Any], layers: tuple[LayerKV, ...]
) -> None:
    folder = tiny(tmp_path, embedded_folder, **config)
    found = load(str(folder), dtype="fp32", block_tokens=8, cache_dir=cache_dir)
    assert found.layout.layers == layers
    assert found.layout.dtype == "fp32"
    assert found.model.config._attn_implementation == "dormouse_paged"
    assert found.name == "model"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5"}, "encoder and a decoder"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "clip"}, "no causal language model"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        (
            {
                "model_type": "phi3",
                "head_dim": None,
                "original_max_position_embeddings": 256,
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
            "rope type 'longrope'",
        ),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 1}, "num_kv_shared_layers"),
        ({"model_type": "mamba"}, "recurrent|layers of type"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layers of type 'conv'"),
        ({"model_type": "qwen3_next"}, "layers of type 'linear_attention'"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 32}, "MLA"),
        ({"model_type": "llama4_text"}, "layers of type 'chunked_attention'"),
        ({"model_type": "bloom"}, "attention interface"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}},
            "quantized cache",
        ),
        ({"model_type": "made_up"}, "transformers cannot read its config"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers cannot read its config"),
        (
            {"model_type": "made_up", "auto_map": {"AutoConfig": "configuration_made_up.MadeUpConfig"}},
            "code from its own repository",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value.split()[0],
)
def test_what_would_be_wrong_is_refused_by_name(
    tmp_path: Path, cache_dir: Path, config: dict[str, Any], reason: str
) -> None:
    folder = folder_of(tmp_path, **config)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load(str(folder), cache_dir=cache_dir)
    assert caught.value.model_type == config["model_type"]
    assert repr(config["model_type"]) in str(caught.value)


def test_a_generation_config_that_asks_for_a_quantized_cache_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    folder = folder_of(tmp_path, model_type="llama")
    (folder / "generation_config.json").write_text(json.dumps({"cache_implementation": "quantized"}))
    with pytest.raises(UnsupportedModel, match="quantized cache"):
        load(str(folder), cache_dir=cache_dir)


def test_a_model_without_a_fast_tokenizer_is_refused(tmp_path: Path, cache_dir: Path, embedded_folder: Path) -> None:
    folder = tiny(tmp_path, embedded_folder, model_type="llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CanineTokenizer"}))
    with pytest.raises(UnsupportedModel, match="CanineTokenizer has no fast form"):
        load(str(folder), cache_dir=cache_dir)


def test_defaults_and_every_end_come_from_the_generation_config(
    tmp_path: Path, cache_dir: Path, embedded_folder: Path
) -> None:
    folder = tiny(tmp_path, embedded_folder, model_type="llama", eos_token_id=0)
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [5, 7]}
    (folder / "generation_config.json").write_text(json.dumps(values))
    found = load(str(folder), cache_dir=cache_dir, attention="eager")
    assert found.defaults == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert found.eos_ids == {0, 2, 5, 7}


def test_a_config_that_is_native_needs_no_code_of_its_own(
    tmp_path: Path, cache_dir: Path, embedded_folder: Path
) -> None:
    folder = tiny(tmp_path, embedded_folder, model_type="llama")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of a repository was run')")
    assert load(str(folder), cache_dir=cache_dir, attention="eager").max_positions == 512


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("no/such/folder/here", "neither a folder"),
        ("missing.gguf", "no such file"),
        (".", "no config.json"),
        ("someone/some-model", "could not be downloaded"),
    ],
)
def test_a_source_that_is_not_there_says_what_to_do(tmp_path: Path, cache_dir: Path, source: str, problem: str) -> None:
    named = str(tmp_path) if source == "." else source
    with pytest.raises(ModelUnavailable, match=problem):
        load(named, cache_dir=cache_dir)


def test_a_folder_with_pickled_weights_only_is_refused(tmp_path: Path, cache_dir: Path) -> None:
    folder = folder_of(tmp_path, model_type="llama")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match="run code"):
        estimate(str(folder), cache_dir=cache_dir)


def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "noise.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelUnavailable, match="cannot be read as a GGUF model"):
        load(str(file), cache_dir=tmp_path / "cache")


def test_a_download_tells_how_far_it_is_and_draws_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    bars = download_bars("someone/some-model", lines.append)
    told, other = bars(total=0, unit="B", desc="Downloading bytes"), bars(total=0, unit="B", desc="Reconstructing")
    told.total = other.total = 400_000_000
    for _ in range(100):
        told.update(4_000_000)
        other.update(4_000_000)
    told.close()
    other.close()
    assert 15 <= len(lines) <= 21
    assert lines[-1] == "downloading someone/some-model: 400 of 400 MB"
    assert capfd.readouterr() == ("", "")


def test_an_explicit_dtype_is_taken_and_auto_is_one_the_machine_multiplies() -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("fp16", cpu) == torch.float16
    assert choose_dtype("auto", cpu) in {torch.bfloat16, torch.float32}
