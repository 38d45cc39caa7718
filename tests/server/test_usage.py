"""Counts that several front ends share: limits are held against the sum, and a dead one gives back what it held."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest

from steelyard.errors import ContextLengthExceeded, Overloaded, SteelyardError
from steelyard.server import usage as usage_module
from steelyard.server.admission import Admission
from steelyard.server.errors import TenantLimit
from steelyard.server.tenants import Tenant
from steelyard.server.usage import OwnUsage, SharedUsage, Usage


class Both:
    """The same calls on the counts of one process and on those of several, each call on a process by chance."""

    def __init__(self, path: Path) -> None:
        self.own = OwnUsage()
        self.shared = [SharedUsage(path, index, 3) for index in range(3)]


def test_counts_of_several_are_those_of_one(tmp_path: Path) -> None:
    both, rng = Both(tmp_path / "usage"), random.Random(5)
    for _ in range(500):
        account, requests, tokens = rng.choice(["", "a", "b"]), rng.randint(-2, 3), rng.randint(-50, 90)
        level, at_ns = rng.uniform(-5, 100), rng.randrange(2**62)
        for usage in (both.own, rng.choice(both.shared)):
            with usage.locked():
                usage.add(account, requests, tokens)
                usage.fill(account, level, at_ns)
        for usage in both.shared:
            assert usage.total(account) == both.own.total(account)
            assert usage.bucket(account) == both.own.bucket(account)


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "param"),
    [(20, 51, "max_tokens"), (61, 0, "prompt"), (60, 1, "prompt"), (60, None, "prompt")],
)
def test_a_request_over_its_tenants_limit_by_itself_is_not_told_to_come_again(
    num_prompt: int, num_output: int | None, param: str
) -> None:
    admission, tenant = Admission(None, None, lambda: 1), Tenant("t", max_in_flight_tokens=60)
    served = admission.reserve(tenant)
    for num_served in (0, 25):
        with admission.reserve(tenant) as place, pytest.raises(ContextLengthExceeded) as caught:
            place.add_tokens(num_prompt, num_output)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert f"prompts of {num_prompt} tokens" in caught.value.message
        assert "limit of this tenant is 60 (max_in_flight_tokens); shorten" in caught.value.message
        assert admission.load_of(tenant).num_tokens == num_served
        if not num_served:
            served.add_tokens(20, 5)


def test_an_output_without_a_limit_is_charged_what_is_usual_or_what_the_prompt_leaves() -> None:
    admission, tenant = Admission(None, None, lambda: 1), Tenant("t", max_in_flight_tokens=60)
    with admission.reserve(tenant) as place:
        place.add_tokens(20)
        assert admission.load_of(tenant).num_tokens == 60
        with admission.reserve(tenant) as other, pytest.raises(TenantLimit, match="60 tokens are being served"):
            other.add_tokens(1)
    usual = Tenant("u", max_in_flight_tokens=1000)
    with admission.reserve(usual) as place:
        place.add_tokens(20)
        assert admission.load_of(usual).num_tokens == 20 + 128


def test_limits_hold_for_all_front_ends_together_and_a_dead_one_gives_back_its_share(tmp_path: Path) -> None:
    tenant = Tenant("t", max_concurrent_requests=3, max_in_flight_tokens=100)
    shared = [SharedUsage(tmp_path / "usage", index, 2) for index in range(2)]
    first, second = (Admission(4, 1000, lambda: 1, usage) for usage in shared)
    places = [first.reserve(tenant), first.reserve(tenant), second.reserve(tenant)]
    for admission in (first, second):
        with pytest.raises(TenantLimit, match="the limit is 3"):
            admission.reserve(tenant)
    places[0].add_tokens(30, 30)
    with pytest.raises(TenantLimit, match="60 tokens are being served, the limit is 100"):
        places[2].add_tokens(30, 30)
    other = second.reserve(Tenant("u"))
    with pytest.raises(Overloaded, match="4 requests wait, the limit is 4"):
        first.reserve(Tenant("u"))
    shared[1].forget(0)
    assert (second.num_requests, second.num_tokens) == (2, 0)
    assert second.load_of(tenant).num_requests == 1
    places[2].add_tokens(30, 30)
    for place in (places[2], other):
        place.__exit__()
    assert (first.num_requests, first.num_tokens, first.load_of(tenant).num_tokens) == (0, 0, 0)


def test_a_rate_is_one_bucket_for_all(tmp_path: Path) -> None:
    now_ns = [10**9]
    tenant = Tenant("t", max_tokens_per_minute=600)
    loads = [
        Admission(None, None, lambda: now_ns[0], SharedUsage(tmp_path / "usage", index, 2)).load_of(tenant)
        for index in range(2)
    ]
    loads[0].spend(400)
    loads[1].spend(300)
    with pytest.raises(TenantLimit, match="600 tokens a minute is used up"):
        loads[0].check()
    now_ns[0] += 11 * 10**9
    loads[0].check()
    assert loads[0].level == loads[1].level == pytest.approx(10)


def _count(path: Path, index: int, times: int) -> None:
    usage: Usage = SharedUsage(path, index, 3)
    for _ in range(times):
        with usage.locked():
            level, _ = usage.bucket("shared")
            usage.add("shared", 1, 2)
            usage.fill("shared", level + 1, 1)


def test_processes_at_once_lose_no_count(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_count, args=(path, index, 2000)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    usage = SharedUsage(path, 0, 3)
    assert usage.total("shared") == (6000, 12000)
    assert usage.bucket("shared") == (6000.0, 1)


def test_too_many_accounts_are_an_error_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_module, "MAX_ACCOUNTS", 2)
    usage = SharedUsage(tmp_path / "usage", 0, 1)
    usage.add("a", 1, 0)
    usage.add("b", 1, 0)
    with pytest.raises(SteelyardError, match="more than 1 tenants"):
        usage.add("c", 1, 0)
