"""How many bytes numbers take: plain dtypes, quantised blocks of GGUF and others. No model, no tensor names.

A quantised matrix is stored in blocks of a fixed number of elements with their scales inside, so a kind is
(elements per block, bytes per block). Sizes of GGUF kinds: the format's specification (ggml, `ggml-common.h`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from steelyard.errors import StartError
from steelyard.plan.parts import Part, Weight

KINDS: dict[str, tuple[int, int]] = {
    "F64": (1, 8),
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "F8": (1, 1),
    "I8": (1, 1),
    "INT4_G128": (256, 133),  # 4-bit values, per 128 a 16-bit scale and a 4-bit zero point (AWQ, GPTQ)
    "MXFP4": (32, 17),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
"""Elements and bytes of a block, by kind."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Which kind each sort of tensor is stored in.

    body     matrices inside layers; experts: those of experts, if different
    ends     embedding and head
    vectors  norms and biases
    """

    name: str
    body: str
    ends: str
    vectors: str
    experts: str | None = None

    def kind_of(self, weight: Weight) -> str:
        """The kind `weight` is stored in."""
        if not weight.is_matrix:
            return self.vectors
        if weight.part in (Part.EMBEDDING, Part.HEAD):
            return self.ends
        if weight.part is Part.EXPERTS and self.experts:
            return self.experts
        return self.body

    def bits_per_parameter(self) -> float:
        """Bits of one element of the body, scales included."""
        return float(8 * bytes_per_element(self.body))

    @property
    def compute_kind(self) -> str:
        """The arithmetic its matrix products run in: "fp8" where both sides are, else "bf16" (or "fp32")."""
        return {"F8": "fp8", "F32": "fp32"}.get(self.body, "bf16")


def _same(name: str, kind: str) -> WeightFormat:
    return WeightFormat(name, kind, kind, kind)


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    f.name: f
    for f in (
        _same("float32", "F32"),
        _same("bfloat16", "BF16"),
        _same("float16", "F16"),
        WeightFormat("fp8", "F8", "BF16", "BF16"),
        WeightFormat("int8", "I8", "BF16", "BF16"),
        WeightFormat("int4", "INT4_G128", "BF16", "BF16"),
        WeightFormat("mxfp4", "BF16", "BF16", "BF16", experts="MXFP4"),
        WeightFormat("q8_0", "Q8_0", "Q8_0", "F32"),
        WeightFormat("q6_k", "Q6_K", "Q6_K", "F32"),
        WeightFormat("q5_k", "Q5_K", "Q6_K", "F32"),
        WeightFormat("q5_0", "Q5_0", "Q6_K", "F32"),
        WeightFormat("q4_k", "Q4_K", "Q6_K", "F32"),
        WeightFormat("q4_0", "Q4_0", "Q6_K", "F32"),
        WeightFormat("q4_1", "Q4_1", "Q6_K", "F32"),
    )
}
"""Formats by name. The GGUF ones keep embedding and head at six bits, as its quantiser does."""

UNSERVED = frozenset({"fp8", "int8", "int4", "mxfp4"})
"""Formats that can be planned and that `steelyard serve` does not load; it quantises nothing by itself."""

_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}
_ALIASES |= {"fp8_e4m3": "fp8", "awq": "int4", "gptq": "int4"}

KV_DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Bytes of one cached element; scales are per tensor and count as nothing."""


def weight_format(name: str) -> WeightFormat:
    """The format called `name`. Raises StartError naming --dtype and the known ones."""
    key = name.lower()
    found = WEIGHT_FORMATS.get(_ALIASES.get(key, key))
    if found is None:
        raise StartError(f"--dtype must be one of {', '.join(WEIGHT_FORMATS)}, got {name!r}", param="dtype")
    return found


def kv_dtype_bytes(name: str) -> int:
    """Bytes of a cached element of the dtype called `name`. Raises StartError naming --kv-cache-dtype."""
    key = name.lower()
    size = KV_DTYPE_BYTES.get(_ALIASES.get(key, key))
    if size is None:
        known = ", ".join(KV_DTYPE_BYTES)
        raise StartError(f"--kv-cache-dtype must be one of {known}, got {name!r}", param="kv_cache_dtype")
    return size


def bytes_per_element(kind: str) -> Fraction:
    """Exact bytes of an element of a kind, scales included. Raises StartError for an unknown kind."""
    block = KINDS.get(kind)
    if block is None:
        raise StartError(f"weights of kind {kind!r} are unknown; known are {', '.join(KINDS)}", param="dtype")
    return Fraction(block[1], block[0])


def kind_bytes(kind: str, num_elements: int) -> int:
    """Bytes of `num_elements` elements of a kind; the last block counts whole."""
    bytes_per_element(kind)
    block_elements, block_bytes = KINDS[kind]
    return -(-num_elements // block_elements) * block_bytes
