"""The parts a decoder is made of, as counts: weights, attention, experts, layers. No config, no bytes, no time.

model = embedding + layer * num_layers + final norm + head (absent where it is the embedding again)
layer = attention + weights (read by every token) + experts (each token reads some)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from steelyard.errors import StartError


class Part(Enum):
    """What a weight belongs to; the roofline reports by these."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    NORM = "norm"
    HEAD = "head"


class Split(Enum):
    """How tensor parallelism divides a weight over ranks."""

    EVEN = "even"  # columns or rows of it
    KV = "kv"  # by KV head; a head is the smallest piece, so it is replicated beyond num_kv_heads ranks
    WHOLE = "whole"  # every rank has all of it


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor by its number of elements. Vectors (norms, biases) stay unquantised, matrices may be quantised."""

    name: str
    num_elements: int
    part: Part
    split: Split = Split.EVEN
    is_matrix: bool = True

    def elements_per_rank(self, tp: int, num_kv_heads: int) -> int:
        """Elements one of `tp` ranks holds, the fullest rank where it does not divide."""
        if self.split is Split.WHOLE:
            return self.num_elements
        ways = min(tp, num_kv_heads) if self.split is Split.KV else tp
        return -(-self.num_elements // ways)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and what of them is cached.

    qk_dim, v_dim  sizes of a head's query/key and value, as computed in prefill
    window         a token attends to at most this many latest tokens, itself included; None: to all
    keep_first     and, with a window, to so many tokens at the beginning
    latent_dim     multi-head latent attention: elements cached per token for all heads together (latent and
                   rotary key); 0: a key and a value per KV head
    latent_rank    the part of it that is the compressed value, read again by absorbed decode; 0 without a latent
    """

    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None
    latent_dim: int = 0
    latent_rank: int = 0
    keep_first: int = 0

    @property
    def most_seen(self) -> int | None:
        """Keys that a query sees at most; None: all."""
        return None if self.window is None else self.window + self.keep_first

    def kv_elements_per_token(self, tp: int = 1) -> int:
        """Cached elements per token and layer on one rank: a latent is on every rank, KV heads are divided."""
        if self.latent_dim:
            return self.latent_dim
        return kv_heads_per_rank(self.num_kv_heads, tp) * (self.qk_dim + self.v_dim)

    @property
    def prefill_flops_per_pair(self) -> int:
        """FLOPs for one query against one key, all heads: scores and weighted sum, two FLOPs a multiply-add."""
        return 2 * self.num_heads * (self.qk_dim + self.v_dim)

    @property
    def decode_flops_per_pair(self) -> int:
        """The same in decode, where latent attention works in the compressed space."""
        if self.latent_dim:
            return 2 * self.num_heads * (self.latent_dim + self.latent_rank)
        return self.prefill_flops_per_pair

    def cached_tokens(self, context_len: int) -> int:
        """Tokens of a sequence of `context_len` whose KV this layer must keep."""
        return context_len if self.most_seen is None else min(context_len, self.most_seen)

    def causal_pairs(self, num_new: int, context_len: int) -> int:
        """(query, key) pairs when the last `num_new` of `context_len` tokens are queries under the causal mask.

        Query at position p (from 0) sees min(p + 1, window + keep_first) keys.
        """
        first = context_len - num_new + 1
        if self.most_seen is None or context_len <= self.most_seen:
            return (first + context_len) * num_new // 2
        full = max(self.most_seen - first + 1, 0)  # queries that still see everything before them
        return (first + first + full - 1) * full // 2 + (num_new - full) * self.most_seen


def kv_heads_per_rank(num_kv_heads: int, tp: int) -> int:
    """KV heads one of `tp` ranks holds. Raises StartError where heads cannot be divided evenly."""
    if num_kv_heads % tp and tp % num_kv_heads:
        raise StartError(
            f"--tensor-parallel-size {tp} neither divides nor is a multiple of the model's {num_kv_heads} KV heads",
            param="tensor_parallel_size",
        )
    return max(num_kv_heads // tp, 1)


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """`num_experts` copies of `weights` in a layer, of which each token uses `num_per_token`."""

    num_experts: int
    num_per_token: int
    weights: tuple[Weight, ...]

    @property
    def parameters_per_expert(self) -> int:
        return count(self.weights)

    def expected_touched(self, num_tokens: int) -> float:
        """Expected number of distinct experts that `num_tokens` tokens use, under uniform independent routing.

        An expert is missed by one token with probability 1 - k/E, hence E * (1 - (1 - k/E)^n).
        """
        missed = (1.0 - self.num_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1.0 - missed)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer."""

    attention: AttentionShape
    weights: tuple[Weight, ...]
    experts: ExpertsShape | None = None

    @property
    def parameters(self) -> int:
        experts = self.experts
        return count(self.weights) + (experts.num_experts * experts.parameters_per_expert if experts else 0)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token's forward reads."""
        experts = self.experts
        return count(self.weights) + (experts.num_per_token * experts.parameters_per_expert if experts else 0)

    def wide_elements(self, hidden_size: int) -> int:
        """Outputs of gate and up for one token, those of the experts it uses included."""
        ups = sum(w.num_elements for w in self.weights if w.part is Part.MLP and w.name in _WIDE)
        if self.experts:
            ups += self.experts.num_per_token * sum(w.num_elements for w in self.experts.weights if w.name in _WIDE)
        return ups // hidden_size


_WIDE = ("gate_proj", "up_proj")


def count(weights: Iterable[Weight]) -> int:
    """Elements of all weights together."""
    return sum(w.num_elements for w in weights)
