"""What runs on the device for a step: fixed tensors, and functions of a bucket's size over them. No plan, no results.

    forward(bucket)   patch the state -> expand inputs -> decoder -> hidden states [T, H] at a fixed address
    head(S, cut)      gather -> logits -> sample -> tokens into the state, results [S] at a fixed address

Everything that differs between steps is read from the frame and the state, so each function can be captured once and
replayed for every step of its bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.kernels.attention import Batch
from steelyard.kernels.step import Inputs, Sampling, StepOperators
from steelyard.layers.batch import StepBatch
from steelyard.models.decoder import Decoder
from steelyard.runner.kv import KvPool
from steelyard.runner.rows import Rows

MAX_LOGIT_ROWS = 256
"""Rows whose logits are held at once."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes a forward runs with. num_decode 0: no row is decoded as such; equal to rows: no row is anything else.

    max_q, max_ctx  of the rows, where a step runs eagerly: baselines of attention read them
    """

    tokens: int
    rows: int
    num_decode: int
    max_q: int = 1
    max_ctx: int = 0

    @classmethod
    def of_bucket(cls, kind: str, size: int, max_rows: int) -> Shape:
        """A captured size: decode rows, or tokens of any rows, of which one alone is never told apart as a decode."""
        if kind == "decode":
            return cls(size, size, size)
        return cls(size, max_rows, 1 if max_rows > 1 else 0)


class DeviceStep:
    """The tensors of one runner's steps, and what is done with them. `kv` may be replaced before the first capture."""

    def __init__(self, decoder: Decoder, rows: Rows, ops: StepOperators, max_tokens: int) -> None:
        self._decoder = decoder
        self._rows = rows
        self._ops = ops
        self.layout = ops.frame
        self.kv: KvPool | None = None
        frame, device, layout = ops.frame, rows.device, rows.layout
        max_rows = frame.max_rows
        self.frame = torch.zeros(frame.num_words, dtype=torch.int32, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._inputs = Inputs(
            positions=zeros(max_tokens),
            token_ids=zeros(max_tokens),
            slots=zeros(layout.num_groups, max_tokens),
            q_start=zeros(max_rows + 1, dtype=torch.int32),
            ctx_len=zeros(max_rows, dtype=torch.int32),
            tables=zeros(layout.num_groups, max_rows, layout.max_blocks, dtype=torch.int32),
        )
        real, whole = torch.float32, torch.int32
        self.sampling = Sampling(
            last=zeros(max_rows),
            target=zeros(max_rows),
            temperature=zeros(max_rows, dtype=real),
            top_k=zeros(max_rows, dtype=whole),
            top_p=zeros(max_rows, dtype=real),
            min_p=zeros(max_rows, dtype=real),
            u=zeros(max_rows, dtype=torch.float64),
            ids=zeros(max_rows),
            result=zeros(max_rows, dtype=whole),
        )
        hidden_size = decoder.config.hidden_size
        self.hidden = torch.zeros(max_tokens, hidden_size, dtype=decoder.place.activations, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the fixed tensors."""
        parts = (self._inputs, self.sampling)
        held = [getattr(p, name) for p in parts for name in p.__dataclass_fields__]
        return sum(t.nbytes for t in (*held, self.frame, self.hidden, self._rows.state))

    @torch.inference_mode()
    def patch(self) -> None:
        """The frame's differences into the state; a second time changes nothing."""
        self._ops.patch_state(self.frame, self._rows.state)

    @torch.inference_mode()
    def forward(self, shape: Shape) -> None:
        """Hidden states of a step that the frame describes, and its KV."""
        assert self.kv is not None
        whole = self._inputs
        part = Inputs(
            positions=whole.positions[: shape.tokens],
            token_ids=whole.token_ids[: shape.tokens],
            slots=whole.slots[:, : shape.tokens],
            q_start=whole.q_start[: shape.rows + 1],
            ctx_len=whole.ctx_len[: shape.rows],
            tables=whole.tables[:, : shape.rows],
        )
        self.patch()
        self._ops.expand(self.frame, self._rows.state, part)
        batch = Batch(
            positions=part.positions,
            slots=tuple(part.slots),
            q_start=part.q_start,
            ctx_len=part.ctx_len,
            tables=tuple(part.tables),
            num_tokens=shape.tokens,
            num_decode=shape.num_decode,
            max_q=shape.max_q,
            max_ctx=shape.max_ctx,
        )
        hidden = self._decoder.forward(StepBatch(part.token_ids, batch, self.kv.layers))
        self.hidden[: shape.tokens].copy_(hidden)

    @torch.inference_mode()
    def head(self, size: int, cut: bool) -> None:
        """Sample the rows that the frame lists; those behind its count are padding."""
        for first in range(0, size, MAX_LOGIT_ROWS):
            rows = self.sampling.part(first, min(first + MAX_LOGIT_ROWS, size))
            self._ops.sampling(self.frame, self._rows.state, rows, first)
            logits = self._decoder.logits(self.hidden.index_select(0, rows.last), as_computed=True)
            self._ops.sample(logits, rows, cut)
            self._ops.finish(self._rows.state, self.hidden, logits, rows)
