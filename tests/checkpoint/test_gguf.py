from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from steelyard.checkpoint.find import open_checkpoint
from steelyard.checkpoint.gguf import BLOCK_BYTES, read_gguf
from steelyard.errors import CheckpointError
from tests.checkpoint.files import LLAMA_KEYS, llama_tensors, write_gguf


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every supported block format and every kind of metadata value."""
    path = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("t.u8", 200)
    writer.add_int8("t.i8", -5)
    writer.add_uint16("t.u16", 60000)
    writer.add_int16("t.i16", -30000)
    writer.add_int32("t.i32", -7)
    writer.add_uint64("t.u64", 2**40)
    writer.add_int64("t.i64", -(2**40))
    writer.add_float32("t.f32", 0.5)
    writer.add_float64("t.f64", 0.1)
    writer.add_bool("t.yes", True)
    writer.add_string("t.text", "é日👍")
    writer.add_array("t.words", ["a", "", "é"])
    writer.add_array("t.ints", [1, -2, 3])
    writer.add_array("t.floats", [0.5, -1.25])
    writer.add_array("t.bools", [True, False])
    rng = np.random.default_rng(0)
    for name, (block_len, block_bytes) in BLOCK_BYTES.items():
        kind = GGMLQuantizationType[name]
        shape = (3, 5, 2 * block_len // block_len * block_bytes)
        writer.add_tensor(f"x.{name}", rng.integers(0, 255, shape, dtype=np.uint8), raw_dtype=kind)
    writer.add_tensor("odd", np.ones(7, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_names_kinds_shapes_and_places_equal_the_gguf_librarys(mixed: Path) -> None:
    ours, theirs = read_gguf(mixed), gguf.GGUFReader(mixed)
    assert len(ours.tensors) == len(theirs.tensors) == len(BLOCK_BYTES) + 1
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.name == other.name
        assert mine.kind == other.tensor_type.name
        assert mine.shape == tuple(int(n) for n in reversed(other.shape))
        assert (mine.offset, mine.nbytes) == (other.data_offset, other.n_bytes)


def test_metadata_equals_the_gguf_librarys(mixed: Path) -> None:
    ours, theirs = read_gguf(mixed).metadata, gguf.GGUFReader(mixed)
    keys = {k for k in theirs.fields if not k.startswith("GGUF.")}
    assert set(ours) == keys
    for key in keys:
        assert ours[key] == theirs.fields[key].contents(), key
        assert type(ours[key]) is type(theirs.fields[key].contents()), key


def test_block_sizes_are_the_gguf_librarys() -> None:
    for name, sizes in BLOCK_BYTES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] == sizes


def test_the_embedded_models_table_equals_the_gguf_librarys_bytes() -> None:
    """Spot check on the real file: two tensors' bytes by our offsets."""
    found = open_checkpoint("smollm2")
    entry = found.tensors["model.layers.7.mlp.down_proj.weight"]
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        raw = np.frombuffer(file.read(entry.nbytes), np.uint8)
    values = gguf.quants.dequantize(raw.reshape(entry.shape[0], -1), GGMLQuantizationType[entry.kind])
    assert values.shape == entry.shape == (576, 1536)
    assert 0.01 < values.std() < 1


def test_a_file_cut_anywhere_is_refused_and_named(mixed: Path, tmp_path: Path) -> None:
    raw = mixed.read_bytes()
    short = tmp_path / "short.gguf"
    for length in [*range(0, 4000, 37), len(raw) // 2]:
        short.write_bytes(raw[:length])
        with pytest.raises(CheckpointError, match=r"short\.gguf"):
            read_gguf(short)


def test_a_cut_in_the_weights_names_the_tensor(mixed: Path, tmp_path: Path) -> None:
    last = max(read_gguf(mixed).tensors, key=lambda t: t.offset)
    short = tmp_path / "short.gguf"
    short.write_bytes(mixed.read_bytes()[: last.offset + last.nbytes - 1])
    with pytest.raises(CheckpointError, match=f"cut short: tensor '{last.name}'"):
        read_gguf(short)


def test_flipped_bytes_in_the_header_are_refused_or_harmless(mixed: Path, tmp_path: Path) -> None:
    """Nothing but CheckpointError, whatever the bytes: no other exception, no endless loop, no huge allocation."""
    raw, rng = mixed.read_bytes(), random.Random(0)
    header_len = min(t.offset for t in read_gguf(mixed).tensors)
    path, refused = tmp_path / "flipped.gguf", 0
    for _ in range(300):
        bad = bytearray(raw)
        for _ in range(rng.choice((1, 1, 4))):
            bad[rng.randrange(header_len)] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        path.write_bytes(bad)
        try:
            read_gguf(path)
        except CheckpointError:
            refused += 1
    assert refused > 50


def header(num_tensors: int, num_pairs: int, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "not GGUF": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "empty": (b"", "damaged"),
    "version": (header(0, 0, bytes(40), version=1), "version 1"),
    "big-endian": (header(0, 0, bytes(40), version=3 << 24), "big-endian"),
    "many tensors": (header(2**60, 0), "number of tensors announces"),
    "many keys": (header(0, 2**60), "number of metadata keys announces"),
    "long key": (header(0, 1, struct.pack("<Q", 2**50) + bytes(40)), "metadata key 0 announces"),
    "key twice": (header(0, 2, (text("a") + struct.pack("<II", 4, 1)) * 2), "'a' appears twice"),
    "long array": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**58)), "metadata 'a' announces"),
    "long strings": (header(0, 1, text("a") + struct.pack("<IIQQ", 9, 8, 1, 2**40)), "entry 0 of metadata 'a'"),
    "array of arrays": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(16)), "unknown type 9"),
    "type": (header(0, 1, text("a") + struct.pack("<IQ", 77, 0)), "unknown type 77"),
    "not UTF-8": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)), "not UTF-8"),
    "no dimension": (header(1, 0, text("t") + struct.pack("<IIQ", 0, 0, 0) + bytes(64)), "'t' has 0 dimensions"),
    "dimensions": (header(1, 0, tensor("t", [2**40, 2**40]) + bytes(64)), "cut short: tensor 't'"),
    "zero": (header(1, 0, tensor("t", [4, 0]) + bytes(64)), "tensor 't'"),
    "half a block": (header(1, 0, tensor("t", [33], kind=2) + bytes(64)), "'t'.*whole Q4_0 blocks"),
    "kind": (header(1, 0, tensor("t", [32], kind=16) + bytes(64)), "'t' is stored as IQ2_XXS"),
    "new kind": (header(1, 0, tensor("t", [32], kind=99) + bytes(64)), "'t' is stored as number 99"),
    "offset": (header(1, 0, tensor("t", [4], offset=2**63) + bytes(64)), "cut short: tensor 't'"),
    "aligned": (header(1, 0, tensor("t", [4], offset=8) + bytes(128)), "'t' is not aligned"),
    "twice": (header(2, 0, tensor("t", [4]) + tensor("t", [4], offset=32) + bytes(128)), "'t' appears twice"),
    "overlap": (header(2, 0, tensor("t", [16]) + tensor("u", [4], offset=32) + bytes(256)), "'t' and 'u' overlap"),
    "alignment": (
        header(0, 1, text("general.alignment") + struct.pack("<II", 4, 24) + bytes(64)),
        "alignment is 24",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_gguf(path)
    assert "hostile.gguf" in str(caught.value)


def test_a_split_model_is_opened_by_its_first_part(tmp_path: Path) -> None:
    tensors = llama_tensors()
    names = sorted(tensors)
    first = {n: tensors[n] for n in names[:9]}
    second = {n: tensors[n] for n in names[9:]}
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(paths[0], keys=LLAMA_KEYS, tensors=first)
    write_gguf(paths[1], keys={}, tensors=second)
    found = open_checkpoint(str(paths[0]))
    assert len(found.tensors) == len(tensors)
    assert {e.file for e in found.tensors.values()} == set(paths)
    assert open_checkpoint(str(tmp_path)).fingerprint == found.fingerprint
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="m-00002-of-00002"):
        open_checkpoint(str(paths[0]))
