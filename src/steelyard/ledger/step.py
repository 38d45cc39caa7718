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
_sum = np.add.reduce  # at every step: without ndarray.sum's wrapper


class Part(NamedTuple):
    """A row's part of a step that is not one decoded token.

    num_again  of the positions, those computed once before
    sampled    tokens drawn: none, one, or one more than there are guesses
    """

    start: int
    num_new: int
    is_decode: bool
    num_again: int
    sampled: int

    @property
    def pairs(self) -> int:
        """(query, key) pairs: n * start + n (n + 1) / 2."""
        return self.num_new * self.start + self.num_new * (self.num_new + 1) // 2


class Participants(NamedTuple):
    """The rows of a step. First those that decode one token and draw the next: most of most steps. Then the tail.

    owners   tickets: which request's stay in which row this is
    starts   first position computed, of every row
    tail     the last rows, whatever they do; a step of decodes has none

    The rest is made when asked for, as arrays of one length.
    """

    owners: Ints
    starts: Ints
    tail: tuple[Part, ...] = ()

    @property
    def lead(self) -> int:
        return len(self.owners) - len(self.tail)

    @property
    def num_new(self) -> Ints:
        """Positions computed."""
        return self._column(1, [part.num_new for part in self.tail])

    @property
    def is_decode(self) -> NDArray[np.bool_]:
        """Whether the first position was not known when the request entered its row."""
        return self._column(1, [part.is_decode for part in self.tail]).astype(bool)

    @property
    def num_again(self) -> Ints:
        return self._column(0, [part.num_again for part in self.tail])

    @property
    def sampled(self) -> Ints:
        return self._column(1, [part.sampled for part in self.tail])

    @property
    def pairs(self) -> Ints:
        """(query, key) pairs. A decode's are its context."""
        pairs = self.starts + 1
        pairs[self.lead :] = [part.pairs for part in self.tail]
        return pairs

    def load(self) -> Load:
        num_tokens = num_sampled = self.lead
        contexts, prefill_pairs = int(_sum(self.starts)) + len(self.starts), 0
        for part in self.tail:
            num_tokens += part.num_new
            num_sampled += part.sampled
            contexts -= part.start + 1
            if part.is_decode:
                contexts += part.pairs
            else:
                prefill_pairs += part.pairs
        return Load(num_tokens, contexts, prefill_pairs, num_sampled)

    def _column(self, lead_value: int, tail_values: list[Any]) -> Ints:
        column = np.full(len(self.owners), lead_value, np.int64)
        column[self.lead :] = tail_values
        return column


def weights(rows: Participants, load: Load, rates: Rates) -> NDArray[np.floating[Any]]:
    """Expected nanoseconds of each row, its part of the products by tokens; by tokens alone before any fit."""
    if not rates.is_known:
        return rows.num_new.astype(np.float64)
    token_ns = rates.products_ns / load.num_tokens + rates.token_ns
    context_ns, pair_ns, row_ns = rates.context_ns, rates.pair_ns, rates.row_ns
    each = rows.starts * context_ns
    each += token_ns + context_ns + row_ns
    if rows.tail:
        each[rows.lead :] = [
            token_ns * part.num_new + (context_ns if part.is_decode else pair_ns) * part.pairs + row_ns * part.sampled
            for part in rows.tail
        ]
    return each


def shares(device_ns: int, rows: Participants, rates: Rates, padded_tokens: int = 0) -> tuple[Ints, int, Load]:
    """(nanoseconds of each row, the engine's nanoseconds, the load). Shares and engine sum to `device_ns`.

    A step longer than expected leaves the excess to the engine; in a shorter one all parts shrink alike.
    """
    load = rows.load()
    each = weights(rows, load, rates)
    for_rows_ns = device_ns
    if rates.is_known:
        expected_ns = rates.requests_ns(load)  # what `each` sums to
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
    others_prefill_rows: int = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


def causes(device_ns: int, rows: Participants, index: int, rates: Rates, padded_tokens: int = 0) -> Causes:
    """What made the step as long as it was for row `index`.

    Own work is what the row would have taken alone, the weights read for it; others add what their tokens, context
    and sampling take beyond that.
    """
    num_new, is_decode = rows.num_new, rows.is_decode
    attention_ns = np.where(is_decode, rates.context_ns, rates.pair_ns)
    added = rates.token_ns * num_new + attention_ns * rows.pairs + rates.row_ns * rows.sampled
    others = np.ones(len(added), dtype=bool)
    others[index] = False
    prefill, decode = others & ~is_decode, others & is_decode
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
        others_prefill_tokens=int(num_new[prefill].sum()),
        others_decode_rows=int(decode.sum()),
        others_prefill_rows=int(prefill.sum()),
    )


def tokens_by_kind(rows: Participants) -> dict[str, int]:
    """Tokens of a step: prefill, recompute and decode sum to all that was computed."""
    again = int(rows.num_again.sum())
    decode = int(rows.num_new[rows.is_decode].sum())
    return {"prefill": int(rows.num_new.sum()) - again - decode, "recompute": again, "decode": decode}


def fragments(rows: Participants, pool: tuple[int, int, int], block_size: int) -> dict[str, int]:
    """A pool of (blocks, clean, cached) beside what a step's rows had filled in it, as in a group without a window.

    tail_slots    empty, in the last block of each row
    spare_blocks  active, less what the rows fill: reserved ahead or held by rows that sat out, less what rows share
    """
    num_blocks, clean, cached = pool
    ends = rows.starts + rows.num_new
    row_blocks = int(_sum(-(-ends // block_size)))
    active = num_blocks - clean - cached
    tail_slots = row_blocks * block_size - int(_sum(ends))
    parts = {"clean": clean, "cached": cached, "active": active}
    return {**parts, "row_blocks": row_blocks, "tail_slots": tail_slots, "spare_blocks": active - row_blocks}


def kind_of(rows: Participants, index: int) -> str:
    """What a step did for one of its rows: decode, recompute or prefill."""
    part = rows.tail[index - rows.lead] if index >= rows.lead else None
    if part is None or part.is_decode:
        return "decode"
    return "recompute" if part.num_again else "prefill"


def participants(values: dict[str, list[int]]) -> Participants:
    """From plain lists of owners, starts, num_new, is_decode, num_again and sampled, for tests and readers of a log."""
    owners, starts = (np.array(values[name], np.int64) for name in ("owners", "starts"))
    columns = zip(*(values[name] for name in Part._fields[1:]))
    parts = [Part(start, n, bool(d), a, s) for start, (n, d, a, s) in zip(values["starts"], columns)]
    lead = 0
    while lead < len(parts) and parts[lead][1:] == (1, True, 0, 1):
        lead += 1
    return Participants(owners, starts, tuple(parts[lead:]))
