"""Fair share: the gap of backlogged tenants is within the bound of the virtual token counter, and costs no speed."""

from __future__ import annotations

from collections import defaultdict

import pytest

from steelyard.core.request import Request
from steelyard.ledger.charges import tenant_charges
from steelyard.scheduler.policies.fair import Fair
from tests.scheduler.load_rig import STEP_NS, TOKEN_NS, Arrival, Load
from tests.scheduler.scheduler_rig import Rig, make_request

RIG = Rig(num_blocks=4000, max_num_seqs=8, budget=64, max_model_len=4096)
LONG, SHORT, OUTPUT = 100, 30, 4
UNTIL_NS = 600_000_000


class Watched(Load):
    """Adds up what the ledger charges, and the gap of two tenants since both began to wait."""

    def __init__(self, policy: str, weights: tuple[float, float]) -> None:
        super().__init__(RIG, policy)
        self.weights = weights
        self.num_tokens = 0
        self.spent_ns: dict[str, int] = defaultdict(int)
        self.gaps_ns: list[float] = []
        self._begin: tuple[float, float] | None = None

    def after_step(self) -> None:
        books, waiting = self.simulation.books, self.simulation.scheduler._live.waiting.tenants
        for tenant, (amount_ns, num) in tenant_charges(books.book.entries[-1], books.book.stays).items():
            self.spent_ns[tenant] += amount_ns
            self.num_tokens += num
        have = (self.spent_ns["1"] / self.weights[0], self.spent_ns["2"] / self.weights[1])
        if waiting.keys() >= {"1", "2"}:
            self._begin = self._begin or have
            self.gaps_ns.append((have[0] - self._begin[0]) - (have[1] - self._begin[1]))

    def serve(self) -> Watched:
        """Tenant 1 sends long prompts at ten times the rate at which tenant 2 sends short ones; both more than half."""
        arrivals = [Arrival(i * 250_000, LONG, OUTPUT, 1, {"weight": self.weights[0]}) for i in range(2400)]
        arrivals += [Arrival(i * 2_500_000, SHORT, OUTPUT, 2, {"weight": self.weights[1]}) for i in range(240)]
        self.run(arrivals, UNTIL_NS)
        return self


def bound_ns(weights: tuple[float, float]) -> float:
    """2 U: what all rows can cost at once, each request alone in its steps' worth of tokens, over the lesser weight."""
    token_ns = TOKEN_NS + STEP_NS / RIG.budget
    dearest_ns = LONG * token_ns + OUTPUT * (TOKEN_NS + STEP_NS / RIG.max_num_seqs)
    return 2 * RIG.max_num_seqs * dearest_ns / min(weights)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_the_gap_of_backlogged_tenants_is_bounded_under_fair_and_grows_under_fcfs_at_the_same_throughput(
    weights: tuple[float, float],
) -> None:
    fair, fcfs = Watched("fair", weights).serve(), Watched("fcfs", weights).serve()
    assert len(fair.gaps_ns) > 200, "both waited for hundreds of steps"
    assert max(map(abs, fair.gaps_ns)) <= bound_ns(weights)
    gaps = fcfs.gaps_ns
    assert gaps[-1] > 2 * bound_ns(weights) and gaps[-1] > 1.5 * gaps[len(gaps) // 2]
    assert fair.num_tokens == pytest.approx(fcfs.num_tokens, rel=0.02)
    share = fair.spent_ns["1"] / sum(fair.spent_ns.values())
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.03)


def order_of(*tenants: str) -> Fair:
    order = Fair()
    for i, tenant in enumerate(tenants):
        order.activate(tenant, 1.0, tenants[:i])
    return order


def test_a_tenant_that_was_idle_is_lifted_to_the_least_of_those_that_wait_and_brings_no_credit() -> None:
    order = order_of("a", "b")
    order.charge("a", 1000, 10)
    order.charge("b", 700, 7)
    order.activate("c", 1.0, ["a", "b"])
    assert order.counter("c") == 700
    order.charge("c", 900, 9)
    order.activate("c", 1.0, ["a", "b"])
    assert order.counter("c") == 1600, "a tenant that had more keeps it"


def test_with_nobody_waiting_a_tenant_is_lifted_to_the_one_that_was_admitted_last() -> None:
    order = order_of("a")
    order.entered(_request("a"))
    order.charge("a", 5000, 10)
    order.activate("b", 1.0, [])
    assert order.counter("b") == 5000


def test_a_prompt_is_charged_when_it_is_admitted_and_not_again_when_it_is_computed() -> None:
    order = order_of("a")
    order.charge("a", 1000, 10)
    assert order.entered(_request("a"))
    assert order.counter("a") == 1000 + 20 * 100
    order.charge("a", 1500, 15)
    assert order.counter("a") == 3000
    order.charge("a", 700, 7)
    assert order.counter("a") == 1000 + 1500 + 700


def test_what_a_preemption_computes_again_is_charged_to_nobody() -> None:
    simulation = Rig(num_blocks=8, caching=False).simulation(policy="fair")
    requests = [make_request(str(i), [i + 1] * 32, 60, tenant=i + 1) for i in range(2)]
    for request in requests:
        simulation.add(request)
    simulation.run()
    again = sum(r.num_recomputed for r in requests)
    books = simulation.books
    charged = [tenant_charges(entry, books.book.stays) for entry in books.book.entries]
    num_tokens = sum(num for step in charged for _, num in step.values())
    spent_ns = sum(ns for step in charged for ns, _ in step.values())
    assert again > 0 and num_tokens == books.book.totals.num_tokens - again
    assert spent_ns < books.book.totals.requests_ns


def test_a_weight_of_three_takes_three_turns_to_one() -> None:
    order = Fair()
    order.activate("a", 3.0, [])
    order.activate("b", 1.0, ["a"])
    taken = []
    for _ in range(8):
        tenant = min("ab", key=order.counter)
        order.charge(tenant, 300, 1)
        taken.append(tenant)
    assert taken.count("a") == 6


def _request(tenant: str) -> Request:
    request = make_request("r", [1] * 20, 4)
    request.tenant = tenant
    return request


def test_one_tenants_flood_of_prompts_leaves_the_cached_prefix_of_another() -> None:
    simulation = Rig(num_blocks=40, max_num_seqs=2).simulation()
    prefix = list(range(128))
    for i, (tenant, ids) in enumerate([(1, prefix), *((2, [600 + i] * 100) for i in range(12)), (1, prefix)]):
        last = make_request(str(i), [*ids, 1], 2, tenant=tenant)
        simulation.add(last)
        simulation.run()
    assert last.cached_tokens == 128
