"""The one decoder: embedding, layers, final norm, head. Every family is a DecoderConfig of it.

hidden = decoder.forward(batch)      [T, hidden], KV of the new tokens written
logits = decoder.logits(hidden[i])   float32 [S, V], only for the positions that are asked for
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from steelyard.layers.attention import HeadShape, SelfAttention
from steelyard.layers.batch import StepBatch
from steelyard.layers.embedding import Embedding, Head
from steelyard.layers.linear import Linear, Place, Stored, Target
from steelyard.layers.mlp import GatedMlp, MixtureOfExperts
from steelyard.layers.norm import RmsNorm
from steelyard.layers.rotary import rotary_table
from steelyard.layers.whole import WholeLayer, whole_layer
from steelyard.models.config import DecoderConfig


class DecoderLayer:
    """Attention and MLP, each between its norms, added to the residual stream.

    The stream travels as (branch, residual): the sum is taken by the next norm, in one operator.
    """

    __slots__ = (
        "_plain",
        "_whole",
        "_widest",
        "after_attn",
        "after_mlp",
        "attention",
        "before_attn",
        "before_mlp",
        "config",
        "mlp",
        "rope",
        "scale",
    )

    def __init__(self, place: Place, config: DecoderConfig, index: int) -> None:
        layer = config.layers[index]
        self.config = config
        self.rope = layer.rope
        self.scale = config.residual_scale
        shape = HeadShape(
            index=index,
            hidden_size=config.hidden_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            norm_stored_minus_one=config.norm_stored_minus_one,
            scale=config.attn_scale if config.attn_scale is not None else 1 / math.sqrt(layer.head_dim),
            softcap=config.attn_softcap,
            window=layer.window,
            keep_first=layer.keep_first,
            group=config.windows.index(layer.window),
        )
        self.attention = SelfAttention(place, shape)
        self.mlp: GatedMlp | MixtureOfExperts
        if layer.moe is not None:
            self.mlp = MixtureOfExperts(place, config.hidden_size, layer.moe, config.activation)
        else:
            self.mlp = GatedMlp(place, config.hidden_size, layer.inner_size, config.activation, config.mlp_bias)
        names = config.norms
        self.before_attn, self.after_attn, self.before_mlp, self.after_mlp = (
            RmsNorm(place, config.hidden_size, config.norm_eps, config.norm_stored_minus_one)
            if name is not None
            else None
            for name in (names.before_attn, names.after_attn, names.before_mlp, names.after_mlp)
        )

        self._plain: tuple[RmsNorm, RmsNorm, GatedMlp] | None = None
        adds_as_is = self.scale == 1.0 and self.after_attn is None and self.after_mlp is None
        if adds_as_is and self.before_attn and self.before_mlp and isinstance(self.mlp, GatedMlp):
            self._plain = (self.before_attn, self.before_mlp, self.mlp)
        self._whole: WholeLayer | None = None
        self._widest = max(layer.inner_size, layer.num_heads * layer.head_dim, config.hidden_size)

    def __call__(
        self, branch: Tensor | None, residual: Tensor, batch: StepBatch, cos_sin: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """(branch or None, residual) [T, hidden] in, the same out; the stream's value is their sum.

        The first of three ways that takes the step:

            whole   [ norm  qkv  rotate  attend  out  norm  mlp  add ]   a plain layer, one token, a backend that has it
            fused   [ norm  qkv  rotate ]  attend  [ out  add ]          a plain layer, as few tokens as the backend
                    [ norm  gate up  act ]  [ down  add ]                wants in fused products
            parts   add and norm, attention, add and norm, mlp           every layer and every step

        Plain: norms only before attention and mlp, one gated mlp, no residual scale. The first two add to the stream
        in place and leave no branch, so that the next layer can be either again.
        """
        if branch is None:
            whole, kv = self._whole, batch.kv[self.attention.shape.index]
            if whole is not None and cos_sin is not None and whole(residual, kv, batch.attn, cos_sin):
                return None, residual
            plain, fusions = self._plain, self.attention.backend.fusions
            if plain is not None and fusions is not None and fusions.takes(residual, self._widest):
                before_attn, before_mlp, mlp = plain
                self.attention.add_to(residual, before_attn, batch, cos_sin)
                mlp.add_to(residual, before_mlp)
                return None, residual
        x, residual = add_then_norm(self.before_attn, branch, residual)
        branch = self._leave(self.after_attn, self.attention(x, batch, cos_sin))
        x, residual = add_then_norm(self.before_mlp, branch, residual)
        return self._leave(self.after_mlp, self.mlp(x)), residual

    def fuse(self) -> None:
        """After packing: let the backend have the whole layer as one operator, if it has one."""
        if self._plain is not None:
            before_attn, before_mlp, mlp = self._plain
            self._whole = whole_layer(self.attention, mlp, (before_attn, before_mlp))

    def _leave(self, norm: RmsNorm | None, branch: Tensor) -> Tensor:
        if norm is not None:
            branch = norm(branch)
        return branch if self.scale == 1.0 else branch * self.scale

    def targets(self, name: str) -> dict[str, Target]:
        """Checkpoint name -> view."""
        found = self.attention.targets(f"{name}.self_attn", self.config.fused_names)
        if isinstance(self.mlp, MixtureOfExperts):
            found |= self.mlp.targets(name)
        else:
            found |= self.mlp.targets(f"{name}.mlp", self.config.fused_names)
        names = self.config.norms
        for norm, norm_name in (
            (self.before_attn, names.before_attn),
            (self.after_attn, names.after_attn),
            (self.before_mlp, names.before_mlp),
            (self.after_mlp, names.after_mlp),
        ):
            if norm is not None:
                found |= norm.targets(f"{name}.{norm_name}")
        return found


def add_then_norm(norm: RmsNorm | None, branch: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(residual + branch), residual + branch); no norm: the sum twice."""
    if branch is None:
        return (residual if norm is None else norm(residual)), residual
    if norm is None:
        total = residual + branch
        return total, total
    return norm.after_add(branch, residual)


class Decoder:
    """Weights are uninitialised until models/load.py has filled every target."""

    def __init__(self, config: DecoderConfig, place: Place, max_model_len: int) -> None:
        self.config = config
        self.place = place
        self.embedding = Embedding(place, config.vocab_size, config.hidden_size, config.embed_scale)
        self.layers = [DecoderLayer(place, config, index) for index in range(len(config.layers))]
        self.norm = RmsNorm(place, config.hidden_size, config.norm_eps, stored_minus_one=config.norm_stored_minus_one)
        head = self.embedding.weight if config.tied else place.empty(config.vocab_size, config.hidden_size)
        self.head = Head(place, head, config.logits_divisor, config.logits_softcap)
        self.ropes = tuple(rotary_table(rope, max_model_len, place.device) for rope in config.ropes)

    def forward(self, batch: StepBatch) -> Tensor:
        """Final hidden states [T, hidden], normed; the new tokens' K and V are in the pool afterwards."""
        self.place.backend.attention.prepare(batch.attn)
        rotary = [torch.index_select(table, 0, batch.attn.positions) for table in self.ropes]
        residual = self.embedding(batch.token_ids)
        branch: Tensor | None = None
        for layer in self.layers:
            cos_sin = None if layer.rope is None else rotary[layer.rope]
            branch, residual = layer(branch, residual, batch, cos_sin)
        hidden, _ = add_then_norm(self.norm, branch, residual)
        return hidden

    def logits(self, hidden: Tensor, as_computed: bool = False) -> Tensor:
        """[S, hidden] -> float32 [S, V]; `as_computed`: see Head."""
        return self.head(hidden, as_computed)

    def targets(self) -> dict[str, Target]:
        """Every checkpoint name this decoder needs, and the view it fills."""
        config = self.config
        found = self.embedding.targets(f"{config.prefix}.embed_tokens")
        for i, layer in enumerate(self.layers):
            found |= layer.targets(f"{config.prefix}.layers.{i}")
        found |= self.norm.targets(f"{config.prefix}.norm")
        if not config.tied:
            found[f"{config.head_name}.weight"] = Target(self.head.weight)
        return found

    def pack(self, stored: Mapping[str, Stored]) -> None:
        """After loading: every product's weight in the form that is fastest here; `stored` by checkpoint name."""
        parts: dict[int, dict[int, Stored]] = {}
        for name, target in self.targets().items():
            if name in stored and target.view.dim() == 2:
                place = target.view.untyped_storage().data_ptr()
                parts.setdefault(place, {})[int(target.view.storage_offset())] = stored[name]
        for product in self._products():
            of_product = parts.get(product.weight.untyped_storage().data_ptr(), {})
            product.pack([of_product[first] for first in sorted(of_product)])
        for layer in self.layers:
            layer.fuse()

    def _products(self) -> list[Linear | Head]:
        products: list[Linear | Head] = [self.head]
        for layer in self.layers:
            products += [layer.attention.qkv, layer.attention.out]
            if isinstance(layer.mlp, GatedMlp):
                products += [layer.mlp.gate_up, layer.mlp.down]
        return products

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in every form they are held in, a tied head once."""
        held = [target.view for target in self.targets().values() if not target.view.is_meta]
        for product in self._products():
            if product.packed is not product.weight:
                held += product.packed.tensors
        # A tensor in a library's own layout has no storage that could be asked, and is nobody's view.
        places = {id(t) if t.is_mkldnn else t.untyped_storage().data_ptr(): t for t in held}
        return sum(
            t.numel() * t.element_size() if t.is_mkldnn else t.untyped_storage().nbytes() for t in places.values()
        )
