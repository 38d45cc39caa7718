"""What a step's time is made of, as five rates fitted to the steps themselves: the model behind shares and causes.

    step = overhead + products + token * tokens + context * decode context + pair * prefill pairs + row * sampled rows
           engine     '------ by tokens ------'   owner                      owner                  owner

`products` is what a step costs however few its tokens: the weights are read once. Attention is what its owner's
context costs: a decode reads its context, a prefill chunk of n tokens at `start` has n * start + n (n + 1) / 2 pairs.
Fitted by least squares on relative errors, no rate negative; a rate that would be is dropped and the rest refitted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_STEPS = 64
MAX_STEPS = 512
REFIT_EVERY = 128


class Load(NamedTuple):
    """What a step did, in the model's terms."""

    num_tokens: int
    decode_context: int
    prefill_pairs: int
    num_sampled: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Nanoseconds a unit. `source` says where they come from; `is_known` is False until there is any model."""

    overhead_ns: float = 0.0
    products_ns: float = 0.0
    token_ns: float = 0.0
    context_ns: float = 0.0
    pair_ns: float = 0.0
    row_ns: float = 0.0
    source: str = "no step measured yet: time is divided by tokens"
    is_known: bool = False

    def requests_ns(self, load: Load) -> float:
        """What the requests of a step are expected to cost together: all but the overhead."""
        return (
            self.products_ns
            + self.token_ns * load.num_tokens
            + self.context_ns * load.decode_context
            + self.pair_ns * load.prefill_pairs
            + self.row_ns * load.num_sampled
        )


class Fitter:
    """The last steps, and the rates that explain them. `add` costs a tuple; a fit is made every REFIT_EVERY steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int, int, int]] = deque(maxlen=MAX_STEPS)
        self._num_added = 0
        self.rates = Rates()

    def add(self, load: Load, device_ns: int) -> None:
        if device_ns <= 0:
            return
        self._steps.append((device_ns, *load))
        self._num_added += 1
        if self._num_added == MIN_STEPS or self._num_added % REFIT_EVERY == 0:
            self.rates = fit(np.array(self._steps, dtype=np.float64))


def fit(steps: NDArray[np.float64]) -> Rates:
    """Rates from rows of (device ns, tokens, decode context, prefill pairs, sampled rows), float64 [steps, 5]."""
    matrix = np.concatenate([np.ones((len(steps), 1)), steps[:, 1:]], axis=1) / steps[:, :1]
    scale = np.abs(matrix).max(axis=0)
    used = [i for i in range(5) if scale[i] > 0.0]
    found = np.zeros(5)
    while used:
        solved = np.linalg.lstsq(matrix[:, used] / scale[used], np.ones(len(steps)), rcond=None)[0]
        if solved.min() >= 0.0:
            found[used] = solved / scale[used]
            break
        del used[int(solved.argmin())]
    products, token, context, pair, row = (float(value) for value in found)
    return Rates(0.0, products, token, context, pair, row, f"fitted to the last {len(steps)} steps", True)
