"""The step's tables: Triton kernels equal their plain twins, and the twins equal what the frame says, row by row."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from steelyard.kernels import step
from steelyard.kernels.step import FrameLayout, Inputs, Sampling, StateLayout, TorchStep, uniform
from steelyard.kernels.triton_step import TritonStep
from steelyard.runner.philox import uniform_words
from tests.kernels.paged import DEVICE

FRAME = FrameLayout(max_rows=8, max_patches=40)
STATE = StateLayout(max_rows=8, max_len=50, max_blocks=13, num_groups=2, block_size=4)
WORK = [(5, 17, 1), (2, 0, 1), (7, 12, 5), (0, 3, 9), (3, 30, 2)]  # row, start, new tokens


def frame(work: list[tuple[int, int, int]], sampled: list[int], pairs: list[tuple[int, int]]) -> torch.Tensor:
    words = np.full(FRAME.num_words, 12345, np.int32)  # what is behind the counts is old
    q_start = np.cumsum([0, *(new for _, _, new in work)])
    words[: step.HEADER_WORDS] = [len(work), q_start[-1], len(sampled), len(pairs), 0, 0, 0, 0]
    words[FRAME.rows : FRAME.rows + len(work)] = [row for row, _, _ in work]
    words[FRAME.starts : FRAME.starts + len(work)] = [start for _, start, _ in work]
    words[FRAME.q_start : FRAME.q_start + len(work) + 1] = q_start
    words[FRAME.sampled : FRAME.sampled + len(sampled)] = sampled
    words[FRAME.patches : FRAME.patches + 2 * len(pairs)] = np.array(pairs, np.int32).reshape(-1)
    return torch.from_numpy(words).to(DEVICE)


def random_state(seed: int) -> torch.Tensor:
    words = torch.randint(1, 90, (STATE.num_words,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    numbers = words[STATE.numbers :].view(STATE.max_rows, step.NUM_WORDS)
    real = torch.rand(STATE.max_rows, 6, generator=torch.Generator().manual_seed(seed))
    numbers[:, :6] = real.view(torch.int32)
    numbers[:, step.SEED_LOW] = torch.arange(8, dtype=torch.int32) - 4
    numbers[:, step.SEED_HIGH] = 2**31 - 1 - torch.arange(8, dtype=torch.int32)
    return words.to(DEVICE)


def inputs(num_tokens: int, num_rows: int) -> Inputs:
    def full(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.full(shape, -77, dtype=dtype, device=DEVICE)

    return Inputs(
        full(num_tokens),
        full(num_tokens),
        full(2, num_tokens + 3)[:, :num_tokens],
        full(num_rows + 1, dtype=torch.int32),
        full(num_rows, dtype=torch.int32),
        full(2, STATE.max_rows, STATE.max_blocks, dtype=torch.int32)[:, :num_rows],
    )


def sampling(size: int) -> Sampling:
    kinds = {"last": torch.int64, "target": torch.int64, "top_k": torch.int32, "u": torch.float64}
    kinds |= {"ids": torch.int64, "result": torch.int32}
    made = {f.name: torch.full((size,), 7, dtype=kinds.get(f.name, torch.float32)) for f in fields(Sampling)}
    return Sampling(**{name: values.to(DEVICE) for name, values in made.items()})


def operators() -> list[TorchStep | TritonStep]:
    return [TorchStep(FRAME, STATE), TritonStep(FRAME, STATE, 8, DEVICE)]


def test_patches_change_what_they_name_and_nothing_else() -> None:
    pairs = [(3, -1), (STATE.num_words - 1, 5), (STATE.tables + 2, 9)]
    for ops in operators():
        state = random_state(0)
        expected = state.clone()
        for at, value in pairs:
            expected[at] = value
        ops.patch_state(frame([], [], pairs), state)
        assert torch.equal(state, expected)


@pytest.mark.parametrize("bucket", [(18, 5), (24, 8)], ids=str)
def test_a_step_is_expanded_row_by_row_and_padded(bucket: tuple[int, int]) -> None:
    state, words = random_state(1), frame(WORK, [], [])
    found = []
    for ops in operators():
        out = inputs(*bucket)
        ops.expand(words, state, out)
        found.append(out)
    tokens = state[: STATE.tables].view(8, 50).cpu()
    tables = state[STATE.tables : STATE.numbers].view(2, 8, 13).cpu()
    for out in found:
        at = 0
        for i, (row, start, new) in enumerate(WORK):
            assert int(out.q_start[i]) == at and int(out.ctx_len[i]) == start + new
            for position in range(start, start + new):
                assert int(out.positions[at]) == position and int(out.token_ids[at]) == int(tokens[row, position])
                for g in range(2):
                    block = int(tables[g, row, position // 4])
                    assert int(out.slots[g, at]) == block * 4 + position % 4
                at += 1
            used = -(-(start + new) // 4)
            assert torch.equal(out.tables[:, i, :used].cpu(), tables[:, row, :used])
        assert out.q_start[len(WORK) :].tolist() == [at] * (bucket[1] + 1 - len(WORK))
        assert out.ctx_len[len(WORK) :].tolist() == [0] * (bucket[1] - len(WORK))
        assert (out.slots[:, at:] == -1).all() and (out.positions[at:] == 0).all() and (out.token_ids[at:] == 0).all()


def test_rows_to_sample_get_their_numbers_and_the_uniform_of_seed_and_position() -> None:
    state, words = random_state(2), frame(WORK, [0, 3, 4], [])
    results = []
    for ops in operators():
        out = sampling(6)
        ops.sampling(words, state, out.part(0, 2), first=0)
        ops.sampling(words, state, out.part(2, 6), first=2)
        results.append(out)
    ours, plain = results[1], results[0]
    for name in (f.name for f in fields(Sampling) if f.name not in ("ids", "result")):
        assert torch.equal(getattr(ours, name), getattr(plain, name)), name
    assert plain.last.tolist() == [0, 15, 17, 0, 0, 0]
    assert plain.target.tolist() == [5 * 50 + 18, 12, 3 * 50 + 32, -1, -1, -1]
    numbers = state[STATE.numbers :].view(8, step.NUM_WORDS).cpu()
    for i, (row, position) in enumerate([(5, 18), (0, 12), (3, 32)]):
        assert plain.temperature[i] == numbers[row, step.TEMPERATURE].view(torch.float32)
        low, high = int(numbers[row, step.SEED_LOW]) % 2**32, int(numbers[row, step.SEED_HIGH]) % 2**32
        word = uniform_words(np.array([high << 32 | low], np.uint64), np.array([position]))[0]
        assert float(plain.u[i]) == float(word) / 2**32
    assert plain.temperature[3:].tolist() == [0, 0, 0]


def test_finish_writes_tokens_and_reports_rows_that_are_not_finite() -> None:
    words = frame(WORK, [0, 2, 3], [])
    hidden = torch.randn(18, 24, device=DEVICE)
    hidden[6, 3] = torch.nan  # the last token of the second sampled row
    logits = torch.randn(4, 60, device=DEVICE)
    logits[2, 33] = torch.inf
    for ops in operators():
        state, out = random_state(3), sampling(4)
        before = state.clone()
        ops.sampling(words, state, out)
        out.ids.copy_(torch.tensor([11, 22, 33, 44]))
        ops.finish(state, hidden, logits, out)
        assert out.result.tolist() == [11, -1, -1, 44]
        before[out.target[:3]] = torch.tensor([11, 0, 0], dtype=torch.int32, device=DEVICE)
        assert torch.equal(state, before)


@pytest.mark.parametrize("cut", [False, True])
def test_both_sample_the_same_tokens(cut: bool) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(4)).to(DEVICE) * 2
    found = []
    for ops in operators():
        out = sampling(5)
        out.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0]))
        out.top_k.copy_(torch.tensor([0, 0, 5, 0, 1]))
        out.top_p.copy_(torch.tensor([1.0, 0.5, 1.0, 0.9, 1.0]))
        out.min_p.copy_(torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0]))
        out.u.copy_(uniform(torch.arange(5), torch.arange(5)))
        ops.sample(logits, out, cut)
        found.append(out.ids.tolist())
    assert found[0] == found[1] and found[0][0] == int(logits[0].argmax())
