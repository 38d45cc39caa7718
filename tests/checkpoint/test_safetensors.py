from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from steelyard.checkpoint.safetensors import read_directory, read_file
from steelyard.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.tensor([[1, 2]], dtype=torch.int64),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "empty": torch.zeros(0, 3),
}


def test_entries_equal_the_safetensors_librarys(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path, metadata={"format": "pt"})
    ours = read_file(path)
    with safetensors.safe_open(path, "pt") as theirs:
        assert set(ours) == set(theirs.keys())
        for name, entry in ours.items():
            assert list(entry.shape) == theirs.get_slice(name).get_shape()
            assert entry.kind == theirs.get_slice(name).get_dtype()
            raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
            assert raw == theirs.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()


def shards(directory: Path) -> Path:
    save_file({"a": TENSORS["a"]}, directory / "m-1.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, directory / "m-2.safetensors")
    index = directory / "model.safetensors.index.json"
    write_index(index, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-2.safetensors"})
    return index


def write_index(index: Path, weight_map: Any) -> None:
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    shards(tmp_path)
    found = read_directory(tmp_path)
    assert {n: e.file.name for n, e in found.items()} == {
        "a": "m-1.safetensors",
        "b": "m-2.safetensors",
        "c": "m-2.safetensors",
    }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    shards(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 weight files are missing.*m-2\.safetensors"):
        read_directory(tmp_path)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    index = shards(tmp_path)
    write_index(index, {"a": "m-1.safetensors", "z": "m-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"'z' is in the index and not in m-2\.safetensors"):
        read_directory(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "m-2.safetensors")
    with pytest.raises(CheckpointError, match=r"'a' is in m-1\.safetensors and m-2\.safetensors"):
        read_directory(tmp_path)


@pytest.mark.parametrize("weight_map", [["a"], {"a": 3}, {"a": "../../etc/passwd"}, 5])
def test_a_damaged_index_is_named(weight_map: Any, tmp_path: Path) -> None:
    write_index(shards(tmp_path), weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: not a safetensors index"):
        read_directory(tmp_path)


def test_pickles_and_loose_files_are_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        read_directory(tmp_path)
    save_file({"a": TENSORS["a"]}, tmp_path / "x.safetensors")
    assert set(read_directory(tmp_path)) == {"a"}
    save_file({"b": TENSORS["b"]}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files and no"):
        read_directory(tmp_path)


def raw_file(table: Any, num_bytes: int, pad: bytes = b"") -> bytes:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes) + pad


def row(begin: int, end: int, dtype: str = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty": (b"", "not a safetensors file"),
    "huge header": (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file"),
    "cut in the header": (struct.pack("<Q", 50) + b"{}", "cut short inside its header"),
    "not JSON": (raw_file(b"\x80\x04pickle", 0), "damaged safetensors header"),
    "not an object": (raw_file([1], 0), "not an object"),
    "deep": (raw_file(b"[" * 100_000, 0), "damaged safetensors header"),
    "name twice": (raw_file(b'{"a": 1, "a": 2}', 0), "appears twice"),
    "entry": (raw_file({"a": 3}, 0), "'a': damaged header entry"),
    "fraction": (raw_file({"a": row(0, 4, shape=[1.0])}, 4), "'a': damaged header entry"),
    "negative": (raw_file({"a": row(-4, 0)}, 4), "'a': damaged header entry"),
    "dtype": (raw_file({"a": row(0, 4, "F77")}, 4), "'a' is stored as F77, which is unknown"),
    "fp8": (raw_file({"a": row(0, 1, "F8_E4M3")}, 1), "'a' is stored as F8_E4M3, which is not supported"),
    "size": (raw_file({"a": row(0, 8)}, 8), "'a'.* needs 4 bytes and has 8"),
    "cut short": (raw_file({"a": row(0, 4)}, 3), "cut short: tensor 'a'"),
    "overlap": (raw_file({"a": row(0, 4), "b": row(0, 4)}, 4), "overlaps the one before it"),
    "hole": (raw_file({"a": row(0, 4), "b": row(8, 12)}, 12), "'b' leaves a hole before it"),
    "more bytes": (raw_file({"a": row(0, 4)}, 4, b"xyz"), "3 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_file(path)
    assert "model.safetensors" in str(caught.value)
