"""Log-probabilities of tokens and of the best alternatives: the model's own distribution, before any sampling rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steelyard.core.step import RowWork, TokenLogprobs, Want
from steelyard.runner.rows import HostRow, Rows

CHUNK_ELEMENTS = 2**22


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """own float [S]; values float and ids int64 [S, K], best first (K may be 0)."""

    own: Tensor
    values: Tensor
    ids: Tensor

    def to_host(self) -> TopLogprobs:
        """See Sampled.to_host."""
        return TopLogprobs(pinned(self.own), pinned(self.values), pinned(self.ids))

    def rows(self) -> Iterator[tuple[float, list[int], list[float]]]:
        """Host values, row by row; the tensors must have been copied to the host."""
        yield from zip(self.own.tolist(), self.ids.tolist(), self.values.tolist())


def pinned(values: Tensor) -> Tensor:
    """A copy in pinned host memory that does not wait for the device."""
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def top_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> TopLogprobs:
    """Natural log-probabilities under logits [S, V] of tokens [S], and the num_top best."""
    log_total = _log_total(logits)
    own = logits.gather(1, tokens[:, None])[:, 0] - log_total
    values, ids = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return TopLogprobs(own, values - log_total[:, None], ids)


def _log_total(logits: Tensor) -> Tensor:
    """log of the sum of exponentials of each row [S]. On a CPU row by row: torch sums a lone row in other pieces."""
    if logits.device.type != "cpu":
        return torch.logsumexp(logits, dim=-1)
    return torch.stack([torch.logsumexp(row, dim=0) for row in logits])


def prompt_logprobs(
    hidden: Tensor, tokens: Tensor, num_top: int, logits_of: Callable[[Tensor], Tensor], vocab_size: int
) -> TopLogprobs:
    """The same for hidden states [S, H] and their next tokens [S], some rows at a time: S x V is never held."""
    at_once = max(CHUNK_ELEMENTS // vocab_size, 1)
    parts = [
        top_logprobs(logits_of(hidden[i : i + at_once]), tokens[i : i + at_once], num_top)
        for i in range(0, hidden.shape[0], at_once)
    ]
    return TopLogprobs(
        torch.cat([p.own for p in parts]), torch.cat([p.values for p in parts]), torch.cat([p.ids for p in parts])
    )


class PromptScorer:
    """Log-probabilities of the prompt tokens that follow a step's positions, for the rows that ask."""

    def __init__(self, rows: Rows, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> None:
        self._rows = rows
        self._logits_of = logits_of
        self._vocab_size = vocab_size

    def __call__(
        self, work: Sequence[RowWork], hosts: Sequence[HostRow], hidden: Tensor
    ) -> list[tuple[int, TopLogprobs]]:
        """(index of the work item, of each new position's next prompt token); the prompt's last position has none.

        hidden [T, H]: the items' positions one behind the other, in the order of `work`.
        """
        found, first = list[tuple[int, TopLogprobs]](), 0
        for i, (item, host) in enumerate(zip(work, hosts)):
            count = min(item.start + item.num_new, host.prompt_len - 1) - item.start
            if Want.PROMPT_LOGPROBS in item.want and count > 0:
                following = self._rows.tokens[item.row, item.start + 1 : item.start + 1 + count].long()
                num_top, own = host.sampling.prompt_logprobs or 0, hidden[first : first + count]
                found.append((i, prompt_logprobs(own, following, num_top, self._logits_of, self._vocab_size)))
            first += item.num_new
        return found


def as_token_logprobs(own: float, ids: list[int], values: list[float], num_top: int) -> TokenLogprobs:
    """The public form of one position, `num_top` of the alternatives kept."""
    return TokenLogprobs(own, tuple(zip(ids[:num_top], values[:num_top])))
