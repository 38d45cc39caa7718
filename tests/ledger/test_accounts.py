"""Accounts keep what each request's rows were charged, whoever has the row now."""

from __future__ import annotations

import numpy as np

from steelyard.core.request import Request
from steelyard.core.sampling import SamplingParams
from steelyard.ledger.accounts import Accounts
from steelyard.ledger.book import StepBook


def opened(accounts: Accounts, name: str) -> Request:
    request = Request(name, [1, 2, 3], SamplingParams(max_tokens=4), 0)
    accounts.open(request)
    return request


def charge(book: StepBook, row: int, num_tokens: int, cost_ns: int) -> None:
    """What a committed step does to a row."""
    book.num_tokens[row] += np.int64(num_tokens)
    book.cost_ns[row] += np.int64(cost_ns)


def totals(accounts: Accounts, request: Request) -> tuple[int, int]:
    account = accounts.get(request)
    assert account is not None
    return account.computed_tokens, account.cost_ns


def test_a_preempted_request_keeps_what_its_row_was_charged_when_another_takes_the_row() -> None:
    book = StepBook(4, 0)
    accounts = Accounts(book)
    first, second = opened(accounts, "first"), opened(accounts, "second")
    accounts.enter(first, 1, 0)
    charge(book, 1, 30, 300)
    accounts.enter(second, 1, 0)
    charge(book, 1, 7, 70)
    accounts.enter(first, 2, 0)
    charge(book, 2, 5, 50)
    assert totals(accounts, first) == (35, 350)
    assert totals(accounts, second) == (7, 70)


def test_two_requests_that_change_rows_in_one_step_keep_their_own() -> None:
    book = StepBook(4, 0)
    accounts = Accounts(book)
    first, second = opened(accounts, "first"), opened(accounts, "second")
    accounts.enter(first, 0, 0)
    accounts.enter(second, 1, 0)
    charge(book, 0, 10, 100)
    charge(book, 1, 20, 200)
    accounts.enter(first, 1, 0)
    accounts.enter(second, 0, 0)
    charge(book, 1, 1, 1)
    charge(book, 0, 2, 2)
    assert totals(accounts, first) == (11, 101)
    assert totals(accounts, second) == (22, 202)


def test_a_request_that_comes_back_to_its_row_is_charged_once() -> None:
    book = StepBook(4, 0)
    accounts = Accounts(book)
    request = opened(accounts, "only")
    accounts.enter(request, 3, 0)
    charge(book, 3, 4, 40)
    accounts.enter(request, 3, 0)
    charge(book, 3, 6, 60)
    assert totals(accounts, request) == (10, 100)
