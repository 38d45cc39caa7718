"""Loading is strict: what is missing, left over, misshapen or cut short is named, and nothing is half-loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard.checkpoint.entry import Checkpoint
from steelyard.checkpoint.find import open_checkpoint
from steelyard.errors import CheckpointError
from steelyard.kernels.reference import ReferenceBackend
from steelyard.layers.linear import Place
from steelyard.models.decoder import Decoder
from steelyard.models.families import decoder_config
from steelyard.models.load import load_weights, unpermute
from tests import tiny_model

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model.write(tmp_path / "tiny")


def load(folder: Path, change: dict[str, object] | None = None) -> Decoder:
    checkpoint = open_checkpoint(str(folder))
    if change:
        checkpoint = replace(checkpoint, config={**checkpoint.config, **change})
    return fill(checkpoint)


def fill(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    place = Place(dtype, torch.device("cpu"), ReferenceBackend())
    decoder = Decoder(decoder_config(checkpoint.config), place, 64)
    load_weights(decoder, checkpoint)
    return decoder


def weights_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def test_fused_weights_are_the_parts_in_order(folder: Path) -> None:
    weights, layer = weights_of(folder), load(folder).layers[1]
    parts = [weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in ("q", "k", "v")]
    assert torch.equal(layer.attention.qkv.weight, torch.cat(parts))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = weights_of(folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_without_a_place_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.\S+ and 8 more that its config has no place for"):
        load(folder, {"num_hidden_layers": 1})


def test_a_wrong_shape_names_the_tensor_and_both_shapes(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"mlp\.\w+_proj\.weight: the file holds shape \[.*128.*asks for \[.*96"):
        load(folder, {"intermediate_size": 96})


def test_rotary_buffers_and_a_tied_head_may_be_left_over(folder: Path) -> None:
    weights = weights_of(folder)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors")
    decoder = load(folder, {"tie_word_embeddings": True})
    assert decoder.head.weight is decoder.embedding.weight


def test_shards_load_like_one_file(folder: Path) -> None:
    whole = load(folder).targets()
    weights = weights_of(folder)
    names = sorted(weights)
    index: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({n: weights[n] for n in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert all(torch.equal(t.view, whole[name].view) for name, t in load(folder).targets().items())


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_kinds_are_read_exactly(folder: Path, stored: torch.dtype) -> None:
    weights = {name: w.to(stored) for name, w in weights_of(folder).items()}
    save_file(weights, folder / "model.safetensors")
    found = load(folder).targets()
    assert all(torch.equal(found[name].view, w.float()) for name, w in weights.items())


def test_a_file_cut_short_names_the_tensor(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    name = "model.layers.0.mlp.up_proj.weight"
    entry = replace(checkpoint.tensors[name], offset=10**9)
    with pytest.raises(CheckpointError, match=rf"{name}.*cut short"):
        fill(replace(checkpoint, tensors={**checkpoint.tensors, name: entry}))


def test_an_unknown_kind_is_named(folder: Path) -> None:
    checkpoint = open_checkpoint(str(folder))
    name = "model.norm.weight"
    entry = replace(checkpoint.tensors[name], kind="IQ4_XS")
    with pytest.raises(CheckpointError, match=rf"{name}: kind IQ4_XS cannot be read"):
        fill(replace(checkpoint, tensors={**checkpoint.tensors, name: entry}))


def test_unpermuting_undoes_the_interleaving_of_rotary_pairs() -> None:
    heads, dim, width = 3, 8, 5
    weight = torch.randn(heads * dim, width)
    stored = weight.view(heads, 2, dim // 2, width).swapaxes(1, 2).reshape(weight.shape)
    assert torch.equal(unpermute(stored, heads), weight) and not torch.equal(stored, weight)


@pytest.mark.slow
def test_the_embedded_model_holds_what_the_gguf_library_reads() -> None:
    checkpoint = open_checkpoint("smollm2")
    decoder = fill(checkpoint)
    reader = gguf.GGUFReader(checkpoint.path)
    by_name = {t.name: t for t in reader.tensors}
    picked = ("model.layers.3.self_attn.k_proj.weight", "model.layers.29.mlp.down_proj.weight", "model.norm.weight")
    for name in picked:
        entry, view = checkpoint.tensors[name], decoder.targets()[name].view
        raw = by_name[entry.source_name]
        expected = torch.from_numpy(gguf.quants.dequantize(raw.data, raw.tensor_type).astype(np.float32).copy())
        if entry.permuted_heads:
            expected = unpermute(expected, entry.permuted_heads)
        assert torch.equal(view, expected.view(view.shape)), name
    assert checkpoint.tensors[picked[0]].permuted_heads == 3
