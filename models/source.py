"""Where a model's files come from: the embedded model, a local folder, a .gguf file, a Hugging Face id."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import embedded
from models.errors import ModelUnavailable
from models.files import Progress, locked
from models.gguf import convert, is_whole

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
OTHER_PATTERNS = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
PROGRESS_STEP = 0.05
"""A download says where it is each time this part of it has arrived."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Source:
    """A folder with config, tokenizer and safetensors, and the name to serve it under."""

    folder: Path
    name: str

    def weight_files(self) -> list[Path]:
        """The safetensors files that hold the weights: those of the index, or all there are.

        Raises:
            ModelUnavailable: there are none; other formats are not read.
        """
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            names: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return [self.folder / name for name in sorted(set(names.values()))]
        single = self.folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ModelUnavailable(
                self.name, f"no *.safetensors in {self.folder}; pickled weights (*.bin) are not read, as they run code"
            )
        return files


def resolve(source: str, *, revision: str | None, cache_dir: Path, hf_token: str | None, progress: Progress) -> Source:
    """Find, fetch or convert what `--model` names; blocking.

    Raises:
        ModelUnavailable: it cannot be had; the message says what to do.
    """
    if source == "embedded":
        return Source(embedded.fetch(cache_dir, progress=progress), embedded.NAME)
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        return Source(_gguf(path, cache_dir, progress), path.stem)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(source, "this folder has no config.json, so it is no Hugging Face model")
        return Source(path.resolve(), path.resolve().name)
    if path.exists() or not _HUB_ID.fullmatch(source):
        raise ModelUnavailable(source, "is neither a folder, a .gguf file, a Hugging Face id nor 'embedded'")
    return Source(_snapshot(source, revision, hf_token, progress), source)


def _gguf(path: Path, cache_dir: Path, progress: Progress) -> Path:
    if not path.is_file():
        raise ModelUnavailable(str(path), "there is no such file")
    from models.fingerprint import file_digest

    progress(f"reading {path.name}")
    digest = file_digest(path, cache_dir)
    name = hashlib.blake2b(path.stem.encode() + digest, digest_size=6).hexdigest()
    target = cache_dir / "models" / f"gguf-{name}-bf16"
    if not is_whole(target):
        with locked(cache_dir / "models" / f".gguf-{name}.lock", progress, f"unpacking {path.name}"):
            if not is_whole(target):
                convert(path, target, origin={"file": path.name, "xxh3_128": digest.hex()}, extra={}, progress=progress)
    return target


def _snapshot(repo: str, revision: str | None, token: str | None, progress: Progress) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = [*WEIGHT_PATTERNS, *OTHER_PATTERNS]
    progress(f"looking for {repo} on the Hugging Face hub")
    try:
        folder = snapshot_download(
            repo, revision=revision, token=token, allow_patterns=patterns, tqdm_class=download_bars(repo, progress)
        )
    except errors.GatedRepoError as error:
        raise ModelUnavailable(repo, "its owners ask for consent: give it on the model's page, set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelUnavailable(repo, f"has no revision {revision!r}; see --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelUnavailable(
            repo, "no such model on the hub, or it is private: check the id, set HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        raise ModelUnavailable(
            repo,
            f"could not be downloaded and is not wholly in the local cache ({error}). On a machine without a network: "
            f"`hf download {repo}` elsewhere, carry the folder over, and serve it with --model FOLDER",
        ) from error
    return Path(folder)


def download_bars(repo: str, progress: Progress) -> Any:
    """A tqdm that draws nothing and tells `progress` how many of the bytes are here."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bars(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub counts bytes twice, as they arrive and as files are put together; once is enough.
            self._is_told = kwargs.get("unit") == "B" and kwargs.get("desc") == "Downloading bytes"
            self._said = 0.0
            super().__init__(*args, **{**kwargs, "file": _Nowhere(), "mininterval": 0})

        def display(self, *_: Any, **__: Any) -> None:
            if not self._is_told or not self.total or self.n < self._said + PROGRESS_STEP * self.total:
                return
            self._said = self.n
            progress(f"downloading {repo}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB")

    return Bars


class _Nowhere:
    """A file that takes everything."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""
