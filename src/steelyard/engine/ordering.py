"""Who goes first, from the configuration. The orders themselves are the scheduler's; only here they meet the ledger."""

from __future__ import annotations

from steelyard.engine.ledgers import Ledgers
from steelyard.ledger.charges import LearnedCost
from steelyard.scheduler.policies.fair import Fair
from steelyard.scheduler.policies.fcfs import Fcfs
from steelyard.scheduler.policies.priority import Priority
from steelyard.scheduler.policies.slo import Slo
from steelyard.scheduler.protocols import Order


def order_of(policy: str, ledgers: Ledgers, max_tokens: int) -> Order:
    """`policy` is one of `config.SCHEDULING_POLICIES`; `max_tokens` those of a step."""
    if policy == "slo":
        return Slo(LearnedCost(ledgers.book, max_tokens))
    orders: dict[str, type[Fcfs]] = {"fcfs": Fcfs, "priority": Priority, "fair": Fair}
    return orders[policy]()
