"""From probabilities to one token a row: truncation by top-k and top-p, then the inverse CDF. Plain torch.

Penalties, bias and masks are applied before. Tokens are ranked by (probability down, id up) and a prefix of that
order is kept; only the best few hundred are ever ranked, more only for a row whose kept mass does not fit in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = (256, 4096)


@dataclass(frozen=True, slots=True)
class Controls:
    """Per-row numbers [S]; None where no row of the call uses them.

    temperature float32 > 0;  min_p float32;  top_p float32 in (0, 1];  top_k int32, 0: off
    """

    temperature: Tensor
    min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None


def choose(logits: Tensor, u: Tensor, controls: Controls) -> Tensor:
    """One id per row, int64 [S], from logits float [S, V] and uniforms float64 [S] in [0, 1).

    min_p drops tokens below min_p times the best; of the rest the top_k best; of those the shortest prefix with mass
    top_p. The id is the first whose cumulative kept mass, in id order, exceeds u times the whole.
    """
    p = torch.softmax(logits / controls.temperature[:, None], dim=-1)
    if controls.min_p is not None:
        p = torch.where(p >= controls.min_p[:, None] * p.amax(-1, keepdim=True), p, 0.0)
    if controls.top_k is None and controls.top_p is None:
        return inverse_cdf(p, u)
    top_k, top_p = _both(controls, p)
    chosen = torch.empty(p.shape[0], dtype=torch.int64, device=p.device)
    left = torch.arange(p.shape[0], device=p.device)
    for width in (*CANDIDATES, p.shape[1]):
        width = min(width, p.shape[1])
        ids, covered = choose_among_best(p[left], u[left], top_k[left], top_p[left], width)
        chosen[left[covered]] = ids[covered]
        left = left[~covered]
        if not left.numel():
            break
    return chosen


def choose_among_best(p: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(ids [S], covered bool [S]): the choice if all that is kept lies within the `width` best, else not covered.

    top_k int64 (V: off), top_p float64.
    """
    everything = width == p.shape[1]
    values, ids = torch.topk(p, width, dim=-1)
    by_id = ids.argsort(dim=-1)
    ids, values = ids.gather(1, by_id), values.gather(1, by_id)
    ranked, by_rank = values.double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(width, device=p.device)
    within_k = rank < top_k[:, None]
    whole_fits = top_k <= width
    total = torch.where(whole_fits, (ranked * within_k).sum(-1), p.sum(-1, dtype=torch.float64))
    before = ranked.cumsum(-1) - ranked
    kept = within_k & (before < (top_p * total)[:, None])
    num_kept = kept.sum(-1)
    # A value equal to the worst candidate may have equals outside, which a lower id would put first.
    last = ranked.gather(1, (num_kept - 1).clamp(min=0)[:, None])[:, 0]
    clear = (num_kept < width) & (last > ranked[:, -1])
    mass_fits = whole_fits | (top_k >= p.shape[1])
    covered = torch.ones_like(clear) if everything else clear & mass_fits
    weights = torch.zeros_like(values).scatter_(1, by_rank, torch.where(kept, ranked, 0.0).to(values.dtype))
    at = inverse_cdf(weights, u)
    return ids.gather(1, at[:, None])[:, 0], covered


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """First index of each row of weights [S, N] whose cumulative sum exceeds u times the total; int64 [S]."""
    cdf = torch.cumsum(weights, dim=-1, dtype=torch.float64)
    target = u[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _both(controls: Controls, p: Tensor) -> tuple[Tensor, Tensor]:
    vocab_size = p.shape[1]
    top_k = torch.full((p.shape[0],), vocab_size, dtype=torch.int64, device=p.device)
    if controls.top_k is not None:
        top_k = torch.where(controls.top_k > 0, controls.top_k.long().clamp(max=vocab_size), top_k)
    top_p = torch.ones(p.shape[0], dtype=torch.float64, device=p.device)
    return top_k, top_p if controls.top_p is None else controls.top_p.double()
