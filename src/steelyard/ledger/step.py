"""One step's account: who took part, what each is charged, and what made a request's step as long as it was.

    cost     device time = shares of the participants + engine (padding, overhead, residual)      exactly
    causes   step = own work + others' prefill + others' decode + padding + overhead + residual    exactly

Two decompositions that are never mixed: the first divides a step among all, the second explains it to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steelyard.ledger.rates import Load, Rates
from steelyard.ledger.split import split

Ints = NDArray[np.int64]


class Participants(NamedTuple):
    """The rows of a step, arrays of one length. A named tuple: one is made at every step.

    owners      tickets: which request's stay in which row this is
    starts      first position computed; num_new: positions computed
    is_decode   whether the position was not known when the request entered its row
    num_again   of the positions, those computed once before
    sampled     1 where a token is drawn
    plain       every row is a decode of one token that draws one: most steps, and the short way through here
    """

    owners: Ints
    starts: Ints
    num_new: Ints
    is_decode: NDArray[np.bool_]
    num_again: Ints
    sampled: Ints
    plain: bool = False

    @property
    def pairs(self) -> Ints:
        """(query, key) pairs of each row: n * start + n (n + 1) / 2. A decode's are its context."""
        if self.plain:
            return self.starts + 1
        return self.num_new * self.starts + self.num_new * (self.num_new + 1) // 2

    def load(self, pairs: Ints) -> Load:
        if self.plain:
            num_rows = len(pairs)
            return Load(num_rows, int(np.add.reduce(pairs)), 0, num_rows)
        decode_context = int(pairs[self.is_decode].sum())
        return Load(int(self.num_new.sum()), decode_context, int(pairs.sum()) - decode_context, int(self.sampled.sum()))


def weights(rows: Participants, pairs: Ints, load: Load, rates: Rates) -> NDArray[np.floating[Any]]:
    """Expected nanoseconds of each row, its part of the products by tokens; by tokens alone before any fit."""
    if not rates.is_known:
        return rows.num_new.astype(np.float64)
    token_ns = rates.products_ns / load.num_tokens + rates.token_ns
    if rows.plain:
        return pairs * rates.context_ns + (token_ns + rates.row_ns)
    attention_ns = np.where(rows.is_decode, rates.context_ns, rates.pair_ns)
    return token_ns * rows.num_new + attention_ns * pairs + rates.row_ns * rows.sampled


def shares(device_ns: int, rows: Participants, rates: Rates, padded_tokens: int = 0) -> tuple[Ints, int, Load]:
    """(nanoseconds of each row, the engine's nanoseconds, the load). Shares and engine sum to `device_ns`.

    A step longer than expected leaves the excess to the engine; in a shorter one all parts shrink alike.
    """
    pairs = rows.pairs
    load = rows.load(pairs)
    each = weights(rows, pairs, load, rates)
    for_rows_ns = device_ns
    if rates.is_known:
        expected_ns = float(each.sum())
        padding_ns = rates.token_ns * padded_tokens
        whole_ns = max(expected_ns + padding_ns + rates.overhead_ns, 1e-9)
        for_rows_ns = min(device_ns, round(expected_ns * min(1.0, device_ns / whole_ns)))
    return split(for_rows_ns, each), device_ns - for_rows_ns, load


@dataclass(frozen=True, slots=True)
class Causes:
    """A step's device nanoseconds as one row met them. They sum to the step; the residual may be negative."""

    own_ns: int
    others_prefill_ns: int
    others_decode_ns: int
    padding_ns: int
    overhead_ns: int
    residual_ns: int
    others_prefill_tokens: int = 0
    others_decode_rows: int = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


def causes(device_ns: int, rows: Participants, index: int, rates: Rates, padded_tokens: int = 0) -> Causes:
    """What made the step as long as it was for row `index`.

    Own work is what the row would have taken alone, the weights read for it; others add what their tokens, context
    and sampling take beyond that.
    """
    pairs = rows.pairs
    attention_ns = np.where(rows.is_decode, rates.context_ns, rates.pair_ns)
    added = rates.token_ns * rows.num_new + attention_ns * pairs + rates.row_ns * rows.sampled
    others = np.ones(len(added), dtype=bool)
    others[index] = False
    prefill, decode = others & ~rows.is_decode, others & rows.is_decode
    own_ns = round(rates.products_ns + float(added[index]))
    prefill_ns, decode_ns = round(float(added[prefill].sum())), round(float(added[decode].sum()))
    padding_ns, overhead_ns = round(rates.token_ns * padded_tokens), round(rates.overhead_ns)
    return Causes(
        own_ns=own_ns,
        others_prefill_ns=prefill_ns,
        others_decode_ns=decode_ns,
        padding_ns=padding_ns,
        overhead_ns=overhead_ns,
        residual_ns=device_ns - own_ns - prefill_ns - decode_ns - padding_ns - overhead_ns,
        others_prefill_tokens=int(rows.num_new[prefill].sum()),
        others_decode_rows=int(decode.sum()),
    )


def tokens_by_kind(rows: Participants) -> dict[str, int]:
    """Tokens of a step: prefill, recompute and decode sum to all that was computed."""
    again = int(rows.num_again.sum())
    decode = int(rows.num_new[rows.is_decode].sum())
    return {"prefill": int(rows.num_new.sum()) - again - decode, "recompute": again, "decode": decode}


def participants(values: dict[str, list[int]]) -> Participants:
    """From plain lists, for tests and readers of a log."""
    found: dict[str, Any] = {name: np.array(list_, dtype=np.int64) for name, list_ in values.items()}
    found["is_decode"] = found["is_decode"].astype(bool)
    plain = bool((found["is_decode"] & (found["num_new"] == 1) & (found["sampled"] == 1)).all())
    return Participants(**found, plain=plain)
