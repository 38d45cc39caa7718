"""Finds a model of the Hugging Face hub: in the local cache, else by download.

A copy that is whole is used as it is, without asking the network: a server starts the same way each time.
HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from steelyard.checkpoint.safetensors import INDEX
from steelyard.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SURROUNDINGS = ("*.json", "*.jinja", "tokenizer.model")


def is_hub_id(model: str) -> bool:
    """`owner/name`, or `owner/name/file.gguf`."""
    repo, file = split_id(model)
    return _ID.fullmatch(repo) is not None and ".." not in model and (file is None or file.endswith(".gguf"))


def split_id(model: str) -> tuple[str, str | None]:
    owner, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    return f"{owner}/{name}", file or None


def cache_directory() -> Path:
    """Where the hub's clients keep files, by their own rules."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def cached(model: str, with_weights: bool) -> Path | None:
    """The whole local copy of a hub id: a snapshot directory or a GGUF file in one; else None."""
    repo, file = split_id(model)
    root = cache_directory() / f"models--{repo.replace('/', '--')}"
    try:
        revision = (root / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = root / "snapshots" / revision
    if file:
        return snapshot / file if (snapshot / file).exists() else None
    if not (snapshot / "config.json").exists() or (with_weights and not _has_weights(snapshot)):
        return None
    return snapshot


def _has_weights(snapshot: Path) -> bool:
    index = snapshot / INDEX
    if not index.exists():
        return any(snapshot.glob("*.safetensors"))
    try:
        files = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return True  # damaged: the reader says so better than another download
    return all((snapshot / f).exists() for f in files)


def download(model: str, with_weights: bool) -> Path:
    """Fetches a model's files into the cache. Raises CheckpointError in one line: offline, unknown or gated."""
    import huggingface_hub
    from huggingface_hub import errors

    repo, file = split_id(model)
    patterns = [file] if file else [*_SURROUNDINGS, *(("*.safetensors",) if with_weights else ())]
    ignored = None if file else ["*/*", "consolidated*"]
    try:
        snapshot = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, ignore_patterns=ignored))
    except errors.GatedRepoError:
        raise CheckpointError(f"{repo}: the hub wants its licence accepted and HF_TOKEN set") from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
        raise CheckpointError(f"{repo}: the hub has no such model, or HF_TOKEN does not allow it") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        raise _offline(repo) from None
    except Exception as error:  # a full disk, an answer of the hub, a line that breaks: several libraries' classes
        why = " ".join(str(error).split())
        raise CheckpointError(f"{repo}: the download failed ({type(error).__name__}: {why})") from None
    if file and not (snapshot / file).exists():
        raise CheckpointError(f"{repo}: the hub's model has no file '{file}'")
    return snapshot / file if file else snapshot


def _offline(repo: str) -> CheckpointError:
    where = os.environ.get("HF_ENDPOINT") or "huggingface.co"
    return CheckpointError(
        f"{repo}: not in the cache {cache_directory()}, and {where} cannot be reached; give a directory instead"
    )
