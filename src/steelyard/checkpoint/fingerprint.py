"""A name for a model that follows from its content: the root of every cache key. Cheap: samples, not whole files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steelyard.checkpoint.entry import TensorEntry

SAMPLE_BYTES = 256


def fingerprint(config: Mapping[str, Any], tensors: Iterable[TensorEntry]) -> str:
    """Hex SHA-256 over config, the table (names, kinds, shapes, sizes) and 256 bytes from each tensor's middle.

    Where files lie and what they are called does not count. A model trained further differs in every tensor it
    trained, so a sample of each is enough; this names models, it does not guard against forgery.
    """
    digest = hashlib.sha256(json.dumps(dict(config), sort_keys=True, default=str).encode())
    by_file: dict[Path, list[TensorEntry]] = {}
    for entry in sorted(tensors, key=lambda e: e.name):
        row = (entry.name, entry.kind, entry.shape, entry.nbytes, entry.permuted_heads, entry.added)
        digest.update(json.dumps(row).encode())
        by_file.setdefault(entry.file, []).append(entry)
    samples: dict[str, bytes] = {}
    for path, entries in by_file.items():
        with path.open("rb", buffering=0) as file:
            for entry in entries:
                file.seek(entry.offset + max(0, entry.nbytes - SAMPLE_BYTES) // 2)
                samples[entry.name] = file.read(min(SAMPLE_BYTES, entry.nbytes))
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()
