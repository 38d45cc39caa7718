"""A decoder layer for a step of one token on a CPU, as one straight run of calls. No other step, and no other layer.

A token's products take microseconds each, and so does every call around them: a layer that asks nobody anything saves
a quarter of a token's time. What calls need is worked out once, for the layer or for all layers of a step. The same
layer out of cpu_fused.py and cpu_attention.py is what it is held to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from steelyard.kernels.attention import Batch, KvLayer
from steelyard.kernels.backend import LayerParts
from steelyard.kernels.cpu_attention import CpuAttention, Keys
from steelyard.kernels.cpu_fused import CpuFusions, gated, norm_of_one
from steelyard.kernels.cpu_kv import KvWriter, Runs
from steelyard.kernels.cpu_linear import dtype_of, operator_for_few
from steelyard.kernels.cpu_products import OneThread, attend_few

NARROW = {torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float}
"""A product's dtype -> what casts to it."""


@dataclass(frozen=True, slots=True)
class Token:
    """What all layers of a KV group and rotation share in a step of one token.

    rotation  [D, D]
    at        rows of Runs.tokens that it is written to
    keys      what it attends to; None: more than `attend_few` is for, or not the plain way
    """

    rotation: Tensor
    at: Tensor
    keys: Keys | None


def rotation(cos_sin: Tensor, dim: int) -> Tensor:
    """The matrix [D, D] that a token's heads are multiplied by from the right; beyond cos_sin [1, rot] they stay."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[0, :half], cos_sin[0, half:]
    matrix = torch.zeros(dim, dim)
    diagonal = matrix.diagonal()
    diagonal[:half] = cos
    diagonal[half : 2 * half] = cos
    diagonal[2 * half :] = 1
    matrix.diagonal(half)[:half] = sin
    matrix.diagonal(-half)[:half] = -sin
    return matrix


class Arranged(NamedTuple):
    """A token as layers that share it want it; None: it is not theirs. cos_sin is kept so that its id stays its own."""

    token: Token | None
    cos_sin: Tensor


Place = tuple[int, int | None, int]
"""(KV group, window, id of the rotary rows): what layers have in common that share a token."""


class Tokens:
    """Arranges a step's token once for all layers; `arranged` holds those of the step, and is emptied by the next."""

    def __init__(self, attention: CpuAttention, writer: KvWriter) -> None:
        self.attention = attention
        self.writer = writer
        self.arranged: dict[Place, Arranged] = {}
        attention.at_each_step(self.arranged.clear)

    def arrange(self, kv: KvLayer, batch: Batch, cos_sin: Tensor, parts: LayerParts) -> Arranged:
        """The step as `OneTokenLayer` wants it; without a token if that is padding, or K and V lie apart."""
        token = None
        places = self.writer.places(kv, batch.slots[parts.spec.group])
        if places.kept is None and len(self.writer.runs(kv).tokens) == 1:
            keys = self.attention.keys_of_one(kv, batch, parts.spec)
            token = Token(rotation(cos_sin, parts.heads[2]), places.both, keys)
        found = self.arranged[parts.spec.group, parts.spec.window, id(cos_sin)] = Arranged(token, cos_sin)
        return found


class OneTokenLayer:
    """See WholeLayers.layer."""

    def __init__(self, parts: LayerParts, tokens: Tokens) -> None:
        self._parts = parts
        self._tokens = tokens
        self._runs: Runs | None = None
        self._arranged = tokens.arranged
        self._group, self._window = parts.spec.group, parts.spec.window
        weights = (parts.qkv, parts.out, parts.gate_up, parts.down)
        self._products = tuple(operator_for_few(weight) for weight in weights)
        self._narrow = NARROW[dtype_of(parts.qkv)]
        self._normed = torch.empty(1, parts.before_attn.numel(), dtype=dtype_of(parts.qkv))

    def __call__(self, stream: Tensor, kv: KvLayer, batch: Batch, cos_sin: Tensor) -> bool:
        """stream float32 [T, hidden] becomes the layer's output and True is returned, or nothing is done and False."""
        if stream.size(0) > 1:
            return False
        found = self._arranged.get((self._group, self._window, id(cos_sin)))
        if found is None:
            found = self._tokens.arrange(kv, batch, cos_sin, self._parts)
        token = found[0]
        if token is None:
            return False
        runs = self._runs
        if runs is None or runs.kv is not kv:
            runs = self._runs = self._tokens.writer.runs(kv)
        parts, (qkv, out, gate_up, down) = self._parts, self._products
        normed = norm_of_one(stream, parts.before_attn, parts.eps, self._normed)
        attended = self._attend(qkv[0](normed, *qkv[1]), runs, token, batch)
        stream.add_(out[0](attended, *out[1]))
        normed = norm_of_one(stream, parts.before_mlp, parts.eps, self._normed)
        inner = gated(gate_up[0](normed, *gate_up[1]), parts.activation)
        stream.add_(down[0](inner, *down[1]))
        return True

    def _attend(self, qkv: Tensor, runs: Runs, token: Token, batch: Batch) -> Tensor:
        """Projections [1, (Hq + 2 Hkv) D] -> [1, Hq D]."""
        num_q, num_kv, dim = self._parts.heads
        heads, keys = qkv.view(-1, dim), token.keys
        with OneThread():
            part = heads.narrow(0, 0, num_q + num_kv)
            turned = torch.mm(part.float(), token.rotation)
            part.copy_(turned)
            runs.tokens[0].index_copy_(0, token.at, heads.narrow(0, num_q, 2 * num_kv))
            if keys is not None:
                q = turned.narrow(0, 0, num_q)
                gathered = runs.blocks[0].index_select(0, keys.index).view(2, 1, num_kv, -1, dim)
                found = attend_few(q, gathered, keys.num_keys, self._parts.spec.scale, keys.visible)
                return self._narrow(found).view(1, -1)
        q = heads.narrow(0, 0, num_q).view(1, num_q, dim)
        out = torch.empty_like(q)
        self._tokens.attention.forward(q, None, None, runs.kv, batch, self._parts.spec, out)
        return out.view(1, -1)


class LayerFusions(CpuFusions):
    """CpuFusions beside an attention whose steps can be one token's: the WholeLayers protocol."""

    def __init__(self, attention: CpuAttention, writer: KvWriter) -> None:
        super().__init__(writer)
        self._tokens = Tokens(attention, writer)

    def layer(self, parts: LayerParts) -> OneTokenLayer | None:
        """See WholeLayers.layer; only bfloat16 and float32 weights have it."""
        if dtype_of(parts.qkv) not in NARROW or parts.before_attn.dtype != torch.float32 or parts.eps <= 0:
            return None
        return OneTokenLayer(parts, self._tokens)
