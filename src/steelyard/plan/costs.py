"""What a step computes and moves: FLOPs and bytes of each part, on one rank. No rates, no time.

    weights            products with every layer's matrices            2 FLOPs an element and token; read once a step
    experts            the same for experts, those that are touched
    attention_prefill  rows with more than one new token               pairs under the causal mask and the windows
    attention_decode   rows with one new token                         cached keys and values, read once
    head               hidden state to logits, sampled rows only
    links              all-reduces between tensor-parallel ranks

Left out, because a lower bound may: activations between kernels, embedding rows, sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from steelyard.plan.device import Device
from steelyard.plan.formats import WeightFormat, kind_bytes
from steelyard.plan.parts import AttentionShape, ExpertsShape, LayerShape, Part, Weight
from steelyard.plan.shape import ModelShape

PARTS = ("weights", "experts", "attention_prefill", "attention_decode", "head", "links")
Routing = Literal["uniform", "fewest"]


@dataclass(frozen=True, slots=True)
class Setup:
    """A model as it would run: where, in which formats, over how many ranks."""

    shape: ModelShape
    device: Device
    weights: WeightFormat
    kv_dtype_bytes: int = 2
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` rows alike: each computes `num_new` tokens, has `context_len` after them, and samples `num_sampled`."""

    num_new: int
    context_len: int
    count: int = 1
    num_sampled: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.num_new <= self.context_len, f"{self.num_new} new tokens of {self.context_len}"
        assert self.count >= 1 and 0 <= self.num_sampled <= self.num_new, self


def decode(batch: int, context_len: int) -> tuple[Chunk, ...]:
    """A decode step: `batch` rows, one token each, `context_len` tokens with the new one."""
    return (Chunk(1, context_len, batch),)


def prefill(num_tokens: int, count: int = 1, *, all_logits: bool = False) -> tuple[Chunk, ...]:
    """Whole prompts of `num_tokens` in one step. Logits of the last token, or of all (prompt logprobs)."""
    return (Chunk(num_tokens, num_tokens, count, num_tokens if all_logits else 1),)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs, bytes moved, and bytes sent to each neighbour. `kind` is the arithmetic: "bf16", "fp8", "fp32"."""

    flops: float = 0.0
    bytes: float = 0.0
    kind: str = "bf16"
    link_bytes: float = 0.0

    @property
    def intensity(self) -> float:
        """FLOPs per byte; infinite where nothing is moved."""
        return self.flops / self.bytes if self.bytes else float("inf")


FEW_COLUMNS = 4096
"""The longest rows of matrices whose products with a few tokens go through tiles: as the kernels have it."""
_PROCESSOR_FLOPS = 50e12
"""A device with less 16-bit arithmetic is a processor, which has no tiles."""


class CostModel:
    """Costs of any step of a setup. Sums over layers are taken once, here; a step then costs a few products.

    has_tiles  products of a few tokens take norms and gates with them, in tiles on a GPU's matrix units
    """

    def __init__(self, setup: Setup) -> None:
        shape, tp = setup.shape, setup.tp
        shape.check_tp(tp)
        self.setup = setup
        layer_weights = Counter(w for layer in shape.layers for w in layer.weights)
        self._dense_elements = sum(n * self._elements(w) for w, n in layer_weights.items() if w.is_matrix)
        self._dense_bytes = sum(n * self._bytes(w) for w, n in layer_weights.items())
        self._experts = Counter(layer.experts for layer in shape.layers if layer.experts)
        self._attention = Counter(layer.attention for layer in shape.layers)
        head = Weight("lm_head", shape.head_parameters, Part.HEAD)
        self._head_elements, self._head_bytes = self._elements(head), self._bytes(head)
        self._between = Counter(_between_elements(layer, shape.hidden_size) for layer in shape.layers)
        self._experts_kind = setup.weights.experts or setup.weights.body
        on_gpu = setup.device.bf16_flops >= _PROCESSOR_FLOPS
        self.has_tiles = on_gpu and setup.weights.body == "BF16" and shape.widest <= FEW_COLUMNS and shape.is_plain

    def parts(self, chunks: Sequence[Chunk], routing: Routing = "uniform") -> dict[str, Cost]:
        """Cost of each part that the step has, in the order of PARTS.

        `routing`: "uniform" counts the experts that independent uniform routing is expected to touch, "fewest" the
        number that one token alone touches, which no step can be under.
        """
        assert chunks, "a step without work"
        num_tokens = sum(c.num_new * c.count for c in chunks)
        kind = self.setup.weights.compute_kind
        found = {
            "weights": Cost(2.0 * self._dense_elements * num_tokens, self._dense_bytes, kind),
            "experts": self._expert_cost(num_tokens, routing),
            "attention_prefill": self._attention_cost([c for c in chunks if c.num_new > 1], is_decode=False),
            "attention_decode": self._attention_cost([c for c in chunks if c.num_new == 1], is_decode=True),
            "head": self._head_cost(sum(c.num_sampled * c.count for c in chunks)),
            "links": self._link_cost(num_tokens),
        }
        return {name: cost for name, cost in found.items() if cost.flops or cost.bytes or cost.link_bytes}

    def passed_bytes(self, num_tokens: int, num_sampled: int) -> float:
        """Bytes that the kernels between products write and read: no bound counts them, an estimate must.

        A token and layer, 16-bit: two norms with the residual (8 hidden sizes), rotary embedding with the KV write
        (queries, keys, values in and out), the gate (two inputs, one output). A sampled row: float32 logits, written
        once and read three times.
        """
        shape, tp = self.setup.shape, self.setup.tp
        elements = sum(n * (8 * shape.hidden_size + wide / tp) for wide, n in self._between.items())
        return 2.0 * num_tokens * elements + 16.0 * num_sampled * shape.vocab_size / tp

    def kv_bytes(self, context_len: int) -> int:
        """Cached bytes of one sequence on a rank, windows applied."""
        return self.setup.shape.kv_bytes_per_sequence(context_len, self.setup.kv_dtype_bytes, self.setup.tp)

    def _elements(self, weight: Weight) -> int:
        return weight.elements_per_rank(self.setup.tp, self.setup.shape.num_kv_heads)

    def _bytes(self, weight: Weight) -> int:
        return kind_bytes(self.setup.weights.kind_of(weight), self._elements(weight))

    def _expert_cost(self, num_tokens: int, routing: Routing) -> Cost:
        flops = moved = 0.0
        for experts, layers in self._experts.items():
            assert experts is not None
            elements = sum(self._elements(w) for w in experts.weights if w.is_matrix)
            size = sum(self._bytes(w) for w in experts.weights)
            flops += 2.0 * layers * num_tokens * experts.num_per_token * elements
            moved += layers * size * _touched(experts, num_tokens, routing)
        kind = "fp8" if self._experts_kind == "F8" else "bf16"
        return Cost(flops, moved, kind)

    def _attention_cost(self, chunks: Iterable[Chunk], is_decode: bool) -> Cost:
        flops = moved = 0.0
        size, tp = self.setup.kv_dtype_bytes, self.setup.tp
        for chunk in chunks:
            for attention, layers in self._attention.items():
                per_pair = attention.decode_flops_per_pair if is_decode else attention.prefill_flops_per_pair
                pairs = attention.causal_pairs(chunk.num_new, chunk.context_len)
                flops += layers * chunk.count * pairs * per_pair / tp
                moved += (
                    layers * chunk.count * _tokens_moved(attention, chunk) * attention.kv_elements_per_token(tp) * size
                )
        return Cost(flops, moved)

    def _head_cost(self, num_sampled: int) -> Cost:
        if not num_sampled:
            return Cost()
        kind = "fp8" if self.setup.weights.ends == "F8" else "bf16"
        return Cost(2.0 * self._head_elements * num_sampled, self._head_bytes, kind)

    def _link_cost(self, num_tokens: int) -> Cost:
        """Two all-reduces of 16-bit hidden states a layer; a ring sends 2 (n - 1) / n of them through each link."""
        tp, shape = self.setup.tp, self.setup.shape
        if tp == 1:
            return Cost()
        hidden_bytes = 2.0 * shape.hidden_size * num_tokens
        return Cost(link_bytes=2 * shape.num_layers * hidden_bytes * 2 * (tp - 1) / tp)


def _between_elements(layer: LayerShape, hidden_size: int) -> float:
    """Elements of a token that rotary embedding and gate read and write, all heads and used experts."""
    a = layer.attention
    heads = a.num_heads * a.qk_dim + a.num_kv_heads * (a.qk_dim + a.v_dim)
    return 2.0 * heads + 1.5 * layer.wide_elements(hidden_size)


def _tokens_moved(attention: AttentionShape, chunk: Chunk) -> int:
    """Tokens whose KV a row reads or writes once: its new ones and what the first of them can still see."""
    if attention.most_seen is None:
        return chunk.context_len
    return min(chunk.context_len, attention.most_seen + chunk.num_new - 1)


def _touched(experts: ExpertsShape, num_tokens: int, routing: Routing) -> float:
    return experts.num_per_token if routing == "fewest" else experts.expected_touched(num_tokens)


def attention_traffic(shape: ModelShape, num_tokens: int, query_tile: int = 128) -> tuple[float, float]:
    """Bytes that a prefill's attention moves, all layers, 16-bit: (scores written out, tiled).

    Written out: the score matrix is written, read by the softmax, written again and read by the weighted sum. Tiled
    (FlashAttention, arXiv 2205.14135, section 3): no score leaves the chip; keys and values are read once per tile
    of queries, those behind the diagonal only.
    """
    naive = tiled = 0.0
    for layer in shape.layers:
        a = layer.attention
        ends = 2.0 * num_tokens * (a.num_heads * (a.qk_dim + a.v_dim) + a.num_kv_heads * (a.qk_dim + a.v_dim))
        tiles = -(-num_tokens // query_tile)
        per_pass = 2.0 * num_tokens * a.num_kv_heads * (a.qk_dim + a.v_dim)
        naive += ends + 4 * 2.0 * a.num_heads * num_tokens * num_tokens
        tiled += ends - per_pass + per_pass * (tiles + 1) / 2
    return naive, tiled
