"""The sampler without a sort: against the full sort of the reference, in distribution edges, and under splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged import DEVICE

from steelyard.kernels.reference import sample_row
from steelyard.kernels.triton_sample import Cut, Draw, Sampler
from steelyard.runner.philox import uniform_words

V = 5000


def draw_for(num_rows: int, temperature: float = 1.0) -> Draw:
    return Draw(
        temperature=torch.full((num_rows,), temperature, device=DEVICE),
        seeds=torch.arange(num_rows, device=DEVICE) * 7919 + (1 << 40),
        positions=torch.arange(num_rows, device=DEVICE) * 31,
        draws=torch.zeros(num_rows, dtype=torch.int32, device=DEVICE),
    )


def uniforms(draw: Draw) -> list[float]:
    seeds, positions = draw.seeds.cpu().numpy().astype(np.uint64), draw.positions.cpu().numpy()
    return [word / 2**32 for word in uniform_words(seeds, positions).tolist()]


def sample(logits: torch.Tensor, draw: Draw | None, cut: Cut | None = None) -> list[int]:
    out = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=DEVICE)
    return Sampler(16, DEVICE, splits=4)(logits, draw, cut, out).tolist()


def cuts(num_rows: int, top_k: int, top_p: float, min_p: float) -> Cut:
    return Cut(
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((num_rows,), top_p, device=DEVICE),
        min_p=torch.full((num_rows,), min_p, device=DEVICE),
    )


def test_greedy_takes_the_lowest_of_equal_best_ids_and_ignores_nan() -> None:
    logits = torch.randn(3, V, device=DEVICE)
    logits[0, [4100, 4200]] = 9.0
    logits[1, 77], logits[1, 5] = 8.0, float("nan")
    logits[2] = -5.0
    assert sample(logits, None) == [4100, 77, 0]
    assert sample(logits, draw_for(3, 0.0)) == [4100, 77, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_without_cuts_it_is_the_inverse_cdf_in_id_order(temperature: float) -> None:
    torch.manual_seed(0)
    logits, draw = torch.randn(3, V, device=DEVICE) * 3, draw_for(3, temperature)
    expected = [
        sample_row(row.double().cpu(), u, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        for row, u in zip(logits, uniforms(draw))
    ]
    assert sample(logits, draw) == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (40, 0.7, 0.01), (1, 1.0, 0.0)]
)
def test_cuts_keep_what_a_full_sort_keeps(top_k: int, top_p: float, min_p: float) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(3, V) * 4).to(DEVICE)
    logits[1] = (logits[1] * 2).round() / 2  # many equal logits: ties at every threshold
    draw = draw_for(3)
    expected = [
        sample_row(row.double().cpu(), u, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        for row, u in zip(logits, uniforms(draw))
    ]
    assert sample(logits, draw, cuts(3, top_k, top_p, min_p)) == expected


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    logits, draw = torch.randn(4, V, device=DEVICE), draw_for(4)
    alone = Draw(*(x[2:3] for x in (draw.temperature, draw.seeds, draw.positions, draw.draws)))
    assert sample(logits, draw)[2] == sample(logits[2:3], alone)[0]


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.full((4, V), float("-inf"), device=DEVICE)
    logits[:, 3000:3003] = 0.0
    assert set(sample(logits, draw_for(4))) <= {3000, 3001, 3002}
