"""A model as numbers: parameters, weight bytes, KV bytes. From its config.json alone; no device, no time.

shape = ModelShape.from_config(config)
shape.kv_bytes_per_token()            2 * layers * KV heads * head dim * bytes per element
shape.kv_bytes_per_sequence(32768)    windows cap what a layer keeps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from steelyard.core.step import KvGroup
from steelyard.errors import StartError
from steelyard.plan.families import Decoder, read_decoder
from steelyard.plan.formats import WeightFormat, kind_bytes, weight_format
from steelyard.plan.parts import LayerShape, Part, Weight


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides its cost. `decoder` has the parts; `native_format` is how its checkpoint stores them."""

    name: str
    decoder: Decoder
    native_format: str = "bfloat16"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> ModelShape:
        """Read a Hugging Face config.json (its text part, where multimodal).

        Raises CheckpointError naming the field that is missing, out of range or of an unknown family.
        """
        decoder = read_decoder(config)
        return cls(name or str(config.get("_name_or_path") or decoder.family), decoder, _native_format(config))

    @property
    def hidden_size(self) -> int:
        return self.decoder.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.decoder.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.decoder.layers)

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.decoder.layers

    @property
    def max_position(self) -> int:
        """The longest context the config claims, in tokens."""
        return self.decoder.max_position

    @property
    def num_heads(self) -> int:
        return self.layers[0].attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].attention.qk_dim

    @property
    def is_latent(self) -> bool:
        return self.layers[0].attention.latent_dim > 0

    @property
    def is_sparse(self) -> bool:
        return any(layer.experts for layer in self.layers)

    @property
    def parameters(self) -> int:
        """All parameters, a tied head counted once: the published number."""
        return sum(w.num_elements * copies for w, copies in self.weights())

    @property
    def active_parameters(self) -> int:
        """Parameters less the experts that a token does not use; the whole input embedding counted."""
        ends = sum(w.num_elements for w in self.decoder.ends)
        return ends + sum(layer.active_parameters for layer in self.layers)

    @property
    def read_parameters(self) -> int:
        """Parameters less an untied input embedding, of which a step reads only its tokens' rows."""
        return self.parameters - self._unread

    @property
    def active_read_parameters(self) -> int:
        """`active_parameters` less an untied input embedding: what one token's forward multiplies with."""
        return self.active_parameters - self._unread

    @property
    def _unread(self) -> int:
        unread = (w.num_elements for w in self.decoder.ends if w.part is Part.EMBEDDING)
        if not self.decoder.tied:
            return sum(unread)
        return sum(w.num_elements for w in self.decoder.ends if w.name == "embed_positions")

    @property
    def is_plain(self) -> bool:
        """Whether a layer is norm, attention, sum, norm, gated mlp, sum: what the runner has in fused products."""
        if self.decoder.family in ("granite", "olmo2", "olmo3"):  # sums that are scaled, norms behind
            return False
        names = [{w.name for w in layer.weights} for layer in self.layers]
        return all({"norm0", "norm1", "gate_proj"} <= n and "norm2" not in n for n in names) and not self.is_sparse

    @property
    def widest(self) -> int:
        """Columns of the widest matrix inside the layers."""
        inward = (w for layer in self.layers for w in layer.weights if w.name in ("o_proj", "down_proj"))
        return max(self.hidden_size, *(w.num_elements // self.hidden_size for w in inward))

    @property
    def head_parameters(self) -> int:
        """Elements of the matrix from hidden state to logits, whether or not it is the embedding again."""
        return self.vocab_size * self.hidden_size

    def weights(self) -> Iterator[tuple[Weight, int]]:
        """Every tensor with how many copies the model has, layer by layer; a tied head does not appear."""
        for weight in self.decoder.ends:
            yield weight, 1
        for layer in self.layers:
            for weight in layer.weights:
                yield weight, 1
            if layer.experts:
                for weight in layer.experts.weights:
                    yield weight, layer.experts.num_experts

    def weight_bytes(self, dtype: str | WeightFormat = "bfloat16", tp: int = 1) -> int:
        """Bytes of all weights on one of `tp` ranks, the fullest.

        `dtype` is a name of formats.WEIGHT_FORMATS or a format. Raises StartError for an unknown name or a `tp`
        that heads cannot be divided by.
        """
        fmt = weight_format(dtype) if isinstance(dtype, str) else dtype
        self.check_tp(tp)
        total = 0
        for weight, copies in self.weights():
            elements = weight.elements_per_rank(tp, self.num_kv_heads)
            total += copies * kind_bytes(fmt.kind_of(weight), elements)
        return total

    def kv_bytes_per_token(self, dtype_bytes: int = 2, tp: int = 1) -> int:
        """Bytes that one token within every window adds to the cache of one rank."""
        return dtype_bytes * sum(layer.attention.kv_elements_per_token(tp) for layer in self.layers)

    def kv_bytes_per_token_beyond(self, dtype_bytes: int = 2, tp: int = 1) -> int:
        """What a token adds once every window is full: the layers without one."""
        full = (layer.attention for layer in self.layers if layer.attention.window is None)
        return dtype_bytes * sum(a.kv_elements_per_token(tp) for a in full)

    def kv_bytes_per_sequence(self, context_len: int, dtype_bytes: int = 2, tp: int = 1) -> int:
        """Bytes of cache that a sequence of `context_len` tokens needs on one rank, windows applied, no rounding."""
        attentions = (layer.attention for layer in self.layers)
        return dtype_bytes * sum(a.cached_tokens(context_len) * a.kv_elements_per_token(tp) for a in attentions)

    def group_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layer indexes of each KV group (layers that share a window), groups in order of their first layer."""
        groups: dict[int | None, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer.attention.window, []).append(index)
        return tuple(tuple(indexes) for indexes in groups.values())

    def kv_groups(self) -> tuple[KvGroup, ...]:
        """The KV groups in the same order, as the runner and scheduler see them."""
        firsts = ((len(g), self.layers[g[0]].attention) for g in self.group_layers())
        return tuple(KvGroup(count, attention.window, attention.keep_first) for count, attention in firsts)

    def bounded(self, window: int, keep_first: int) -> ModelShape:
        """The model with every layer held to a window and its first tokens. Raises StartError where it has windows."""
        if any(layer.attention.window is not None for layer in self.layers):
            raise StartError("--kv-window: this model has attention windows of its own; drop it", param="kv_window")
        layers = tuple(
            replace(layer, attention=replace(layer.attention, window=window, keep_first=keep_first))
            for layer in self.layers
        )
        return replace(self, decoder=replace(self.decoder, layers=layers))

    def check_tp(self, tp: int) -> None:
        """Raises StartError where query or KV heads cannot be divided over `tp` ranks."""
        if tp < 1 or self.num_heads % tp:
            heads = self.num_heads
            raise StartError(
                f"--tensor-parallel-size {tp} must divide the model's {heads} heads", param="tensor_parallel_size"
            )
        if not self.is_latent:
            self.layers[0].attention.kv_elements_per_token(tp)


def _native_format(config: Mapping[str, Any]) -> str:
    """The name in WEIGHT_FORMATS nearest to how the checkpoint stores its matrices."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = str(quantized.get("quant_method", ""))
        bits = quantized.get("bits", quantized.get("w_bit"))
        if method == "fp8":
            return "fp8"
        if method == "mxfp4":
            return "mxfp4"
        if bits == 4 or method == "awq":
            return "int4"
        if bits == 8:
            return "int8"
    text = config.get("text_config")
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is None and isinstance(text, dict):
        dtype = text.get("dtype") or text.get("torch_dtype")
    return {"float32": "float32", "float16": "float16"}.get(str(dtype).removeprefix("torch."), "bfloat16")
