"""The step book's short way through a step of decodes gives what is counted row by row."""

from __future__ import annotations

import random

import numpy as np

from steelyard.core.step import RowWork, StepPlan, StepTiming, Want
from steelyard.ledger.book import Stay, StepBook
from steelyard.ledger.rates import Load


def test_participants_are_what_a_count_row_by_row_finds() -> None:
    rng = random.Random(3)
    shapes = set()
    for step_id in range(200):
        book = StepBook(32, 0)
        rows = rng.sample(range(32), rng.randint(1, 12))
        works, expected = [], []
        for row in rows:
            known = rng.randint(1, 60)
            again = rng.choice([0, known // 2, known])  # what was computed once was known
            ticket = book.enter(Stay("r", 0, "", row, known, again))
            decodes = rng.random() < 0.7
            start = known + rng.randint(0, 5) if decodes else rng.randrange(known)
            num_new = rng.choice([1, 1, 1, 3]) if decodes else rng.randint(1, 20)
            want = Want.TOKEN if decodes or rng.random() < 0.5 else Want.NOTHING
            works.append(RowWork(row, start, num_new, want))
            num_again = sum(position < again for position in range(start, start + num_new))
            pairs = sum(position + 1 for position in range(start, start + num_new))
            expected.append((ticket, start, num_new, start >= known, num_again, int(want is Want.TOKEN), pairs))
        if rng.random() < 0.6:  # as the scheduler orders them
            order = sorted(range(len(rows)), key=lambda i: (not expected[i][3], expected[i][2] != 1))
            works, expected = [works[i] for i in order], [expected[i] for i in order]
        book.launched(StepPlan(step_id, work=tuple(works)))
        book.committed(step_id, StepTiming(0, 1000, 1000), 1000)
        found, load = book.entries[-1].rows, book.entries[-1].load
        columns = (found.owners, found.starts, found.num_new, found.is_decode, found.num_again, found.sampled)
        assert list(zip(*(c.tolist() for c in columns), found.pairs.tolist())) == expected
        decode_pairs = sum(e[6] for e in expected if e[3])
        all_pairs = sum(e[6] for e in expected)
        num_tokens, num_sampled = sum(e[2] for e in expected), sum(e[5] for e in expected)
        assert load == Load(num_tokens, decode_pairs, all_pairs - decode_pairs, num_sampled)
        assert book.num_tokens[rows].sum() == num_tokens
        shapes.add((found.lead > 0, len(found.tail) > 0))
    assert shapes == {(True, True), (True, False), (False, True)}


def test_steps_that_go_on_as_before_are_what_a_first_look_would_find() -> None:
    again, anew = StepBook(8, 0), StepBook(8, 0)
    for book in (again, anew):
        for row in range(5):
            book.enter(Stay("r", row, "", row, 3, 0))
    for step_id in range(4):
        works = tuple(RowWork(row, 3 + row + step_id, 1, Want.TOKEN) for row in range(5))
        for book in (again, anew):
            book.launched(StepPlan(step_id, work=works))
            book.committed(step_id, StepTiming(0, 10, 10), 10 * (step_id + 1))
        anew._last = None
        one, other = again.entries[-1].rows, anew.entries[-1].rows
        assert np.array_equal(one.owners, other.owners) and np.array_equal(one.starts, other.starts)
        assert one.tail == other.tail == ()
