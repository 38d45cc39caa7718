"""The sampler without a sort: against the full sort of the reference, in distribution edges, and under splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.kernels.reference import sample_row
from steelyard.kernels.triton_sample import Cut, Sampler, uniforms
from steelyard.runner.philox import uniform_words
from tests.kernels.paged import DEVICE

V = 5000


def seeds_and_positions(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(num_rows, device=DEVICE)
    return index * 7919 + (1 << 40), index * 31


def draws(num_rows: int) -> torch.Tensor:
    return uniforms(*seeds_and_positions(num_rows), torch.full((num_rows,), -1.0, dtype=torch.float64, device=DEVICE))


def sample(
    logits: torch.Tensor, u: torch.Tensor, temperature: float = 1.0, cut: Cut | None = None, few: int = 64
) -> list[int]:
    out = torch.full((logits.shape[0],), -1, dtype=torch.int64, device=DEVICE)
    temperatures = torch.full((logits.shape[0],), temperature, device=DEVICE)
    return Sampler(16, DEVICE, splits=4, few=few)(logits, u, temperatures, cut, out).tolist()


def cuts(num_rows: int, top_k: int, top_p: float, min_p: float) -> Cut:
    return Cut(
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32, device=DEVICE),
        top_p=torch.full((num_rows,), top_p, device=DEVICE),
        min_p=torch.full((num_rows,), min_p, device=DEVICE),
    )


def test_uniforms_are_the_hosts_philox() -> None:
    seeds, positions = seeds_and_positions(5)
    words = uniform_words(seeds.cpu().numpy().astype(np.uint64), positions.cpu().numpy())
    assert draws(5).tolist() == [word / 2**32 for word in words.tolist()]


def test_greedy_takes_the_lowest_of_equal_best_ids_and_ignores_nan() -> None:
    logits = torch.randn(3, V, device=DEVICE)
    logits[0, [4100, 4200]] = 9.0
    logits[1, 77], logits[1, 5] = 8.0, float("nan")
    logits[2] = -5.0
    assert sample(logits, draws(3), 0.0) == [4100, 77, 0]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_without_cuts_it_is_the_inverse_cdf_in_id_order(temperature: float) -> None:
    torch.manual_seed(0)
    logits, u = torch.randn(3, V, device=DEVICE) * 3, draws(3)
    expected = [
        sample_row(row.double().cpu(), v, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        for row, v in zip(logits, u.tolist())
    ]
    assert sample(logits, u, temperature) == expected


@pytest.mark.parametrize("few", [1, 512], ids=["bisected over all", "bisected over few"])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (40, 0.7, 0.01), (1, 1.0, 0.0)]
)
def test_cuts_keep_what_a_full_sort_keeps(top_k: int, top_p: float, min_p: float, few: int) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(3, V) * 6).to(DEVICE)
    logits[1] = (logits[1] * 2).round() / 2  # many equal logits: ties at every threshold
    u = draws(3)
    expected = [
        sample_row(row.double().cpu(), v, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
        for row, v in zip(logits, u.tolist())
    ]
    assert sample(logits, u, cut=cuts(3, top_k, top_p, min_p), few=few) == expected


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    logits, u = torch.randn(4, V, device=DEVICE), draws(4)
    assert sample(logits, u)[2] == sample(logits[2:3], u[2:3])[0]


def test_masked_tokens_are_never_chosen() -> None:
    logits = torch.full((4, V), float("-inf"), device=DEVICE)
    logits[:, 3000:3003] = 0.0
    assert set(sample(logits, draws(4))) <= {3000, 3001, 3002}
