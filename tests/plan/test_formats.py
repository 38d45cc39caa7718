"""Sizes of stored numbers, against the library that owns the GGUF format."""

from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES

from steelyard.errors import StartError
from steelyard.plan.formats import KINDS, bytes_per_element, kind_bytes, kv_dtype_bytes, weight_format
from steelyard.plan.parts import Part, Weight

OWN = {"F8", "INT4_G128"}


def test_every_gguf_kind_has_the_librarys_block() -> None:
    theirs = {kind.name: size for kind, size in GGML_QUANT_SIZES.items()}
    for kind, block in KINDS.items():
        if kind not in OWN:
            assert block == theirs[kind], kind


def test_four_bits_in_groups_of_128_carry_a_scale_and_a_zero_point() -> None:
    assert float(8 * bytes_per_element("INT4_G128")) == 4 + (16 + 4) / 128


def test_the_last_block_counts_whole() -> None:
    assert kind_bytes("Q8_0", 32) == 34
    assert kind_bytes("Q8_0", 33) == 68
    assert kind_bytes("BF16", 33) == 66


def test_vectors_stay_unquantised_and_ends_have_a_kind_of_their_own() -> None:
    q4 = weight_format("Q4_K")
    assert q4.kind_of(Weight("norm", 8, Part.NORM, is_matrix=False)) == "F32"
    assert q4.kind_of(Weight("lm_head", 8, Part.HEAD)) == "Q6_K"
    assert q4.kind_of(Weight("q_proj", 8, Part.ATTENTION)) == "Q4_K"
    assert weight_format("mxfp4").kind_of(Weight("up_proj", 8, Part.EXPERTS)) == "MXFP4"
    assert weight_format("bf16") is weight_format("bfloat16")


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(StartError, match="--dtype must be one of float32"):
        weight_format("bf17")
    with pytest.raises(StartError, match="--kv-cache-dtype must be one of"):
        kv_dtype_bytes("q4")
