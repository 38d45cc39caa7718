"""Small model files for tests, written by the libraries that own the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLAMA_KEYS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def write_gguf(
    path: Path,
    *,
    arch: str = "llama",
    keys: dict[str, Any] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """`keys` go below `{arch}.`, `metadata` as they are; a tensor may come with its block format."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in ({f"{arch}.{k}": v for k, v in (keys or {}).items()} | (metadata or {})).items():
        add_value(writer, key, value)
    for name, data in (tensors or {}).items():
        if isinstance(data, tuple):
            writer.add_tensor(name, data[0], raw_dtype=data[1])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def llama_tensors(num_layers: int = 2, vocab_size: int = 32, tied: bool = True) -> dict[str, np.ndarray]:
    """A whole tiny Llama of the sizes in LLAMA_KEYS, float32."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return rng.standard_normal((rows, cols), dtype=np.float32)

    out = {"token_embd.weight": matrix(vocab_size, 64), "output_norm.weight": np.ones(64, np.float32)}
    if not tied:
        out["output.weight"] = matrix(vocab_size, 64)
    for i in range(num_layers):
        out |= {
            f"blk.{i}.attn_norm.weight": np.ones(64, np.float32),
            f"blk.{i}.attn_q.weight": matrix(64, 64),
            f"blk.{i}.attn_k.weight": matrix(32, 64),
            f"blk.{i}.attn_v.weight": matrix(32, 64),
            f"blk.{i}.attn_output.weight": matrix(64, 64),
            f"blk.{i}.ffn_norm.weight": np.ones(64, np.float32),
            f"blk.{i}.ffn_gate.weight": matrix(96, 64),
            f"blk.{i}.ffn_up.weight": matrix(96, 64),
            f"blk.{i}.ffn_down.weight": matrix(64, 96),
        }
    return out


def write_llama(path: Path, vocabulary: dict[str, Any] | None = None, **keys: Any) -> Path:
    """A tiny Llama with, perhaps, a vocabulary (metadata below tokenizer.)."""
    tokens = (vocabulary or {}).get("ggml.tokens")
    metadata = {f"tokenizer.{k}": v for k, v in (vocabulary or {}).items()}
    tensors = llama_tensors(vocab_size=len(tokens) if tokens else 32)
    return write_gguf(path, keys=LLAMA_KEYS | keys, metadata=metadata, tensors=tensors)
