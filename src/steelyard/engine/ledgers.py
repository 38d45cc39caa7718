"""The engine's hooks into its ledgers, and the answers to questions about them.

    submit -> opened      launch -> launched      collect -> committed -> scheduler.commit -> (moves are watched)

A hook costs microseconds; what people read is made when they ask. Nothing here changes what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from steelyard.cache.manager import CacheManager
from steelyard.core.request import Request
from steelyard.core.step import StepPlan, StepResult
from steelyard.core.timed import State
from steelyard.engine.prompts import PromptHashes
from steelyard.ledger.accounts import Account, Accounts, Held
from steelyard.ledger.book import PoolState, StepBook, StepEntry
from steelyard.ledger.charges import tenant_charges
from steelyard.ledger.little import merged
from steelyard.ledger.step import causes, fragments, kind_of, tokens_by_kind
from steelyard.plan.calibration import Calibration
from steelyard.plan.costs import Chunk
from steelyard.plan.roofline import Roofline
from steelyard.scheduler.scheduler import Scheduler

MAX_ASKED = 1024
_SLOWEST = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """What steps are held against, where the device is known: floor and reach from the roofline, estimate."""

    roofline: Roofline
    calibration: Calibration

    def of(self, entry: StepEntry) -> dict[str, int | None]:
        chunks = _chunks(entry)
        roofline = self.roofline
        return {
            "floor_ns": roofline.floor(chunks, routing="fewest").ns,
            "reach_ns": roofline.reach(chunks).ns if roofline.measured is not None else None,
            "estimate_ns": self.calibration.estimate(roofline, chunks).ns,
        }


class Ledgers:
    """Request, step and population ledgers of one engine."""

    def __init__(self, max_rows: int, now_ns: int, measure: Measure | None = None) -> None:
        self.book = StepBook(max_rows, now_ns)
        self.accounts = Accounts(self.book)
        self.padded_tokens = 0
        self.prompts = PromptHashes()
        self._measure = measure
        self._pools: Callable[[], Sequence[PoolState]] = tuple
        self._block_size = 1

    def over(self, cache: CacheManager, scheduler: Scheduler) -> Ledgers:
        """Itself, told how to find who has the blocks that a request waits for."""

        def held(request: Request) -> Held:
            own = [sum(map(bool, table)) for table in cache.tables(request)] or [0] * len(cache.pools())
            active = [total - clean - cached for total, clean, cached in cache.pools()]
            return Held(scheduler.num_running - (request.row >= 0), tuple(a - mine for a, mine in zip(active, own)))

        self.accounts.held = held
        self._pools, self._block_size = cache.pools, cache.block_size
        return self

    # hooks

    def opened(self, request: Request, was_idle: bool) -> None:
        """Before the scheduler is told of it."""
        self.accounts.open(request)
        if was_idle:
            self.book.work_came(request.start_ns)

    def launched(self, plan: StepPlan, request_at: Callable[[int], Request]) -> None:
        for enter in plan.enter:
            self.accounts.enter(request_at(enter.row), enter.row, enter.start)
        self.book.launched(plan)

    def committed(self, result: StepResult, now_ns: int, request_at: Callable[[int], Request]) -> None:
        """Before the scheduler commits: its ends must find their costs complete."""
        self.book.committed(result.id, result.timing, now_ns, self._pools())
        self.padded_tokens += result.timing.padded_tokens
        for row, _ in result.failed:
            entry = self.book.entries[-1]
            at = [self.book.stays[int(t)].row for t in entry.rows.owners].index(row)
            request = request_at(row)
            if request.reason is None:  # the row of a request that has ended is overshoot
                self.accounts.lose(request, int(entry.rows.num_new[at]))

    def charge(self, charge: Callable[[str, int, int], None]) -> None:
        """Tell what the step that was committed last cost each tenant: its name, nanoseconds, tokens."""
        for tenant, (amount_ns, num_tokens) in tenant_charges(self.book.entries[-1], self.book.stays).items():
            charge(tenant, amount_ns, num_tokens)

    def account(self, request: Request) -> Account | None:
        """The account of a request, live or lately closed, its costs up to date."""
        return self.accounts.get(request)

    # answers

    def steps(self, last: int) -> list[dict[str, Any]]:
        """The last steps, oldest first."""
        entries = list(self.book.entries)[-max(1, min(last, MAX_ASKED)) :]
        return [self._step(entry) for entry in entries]

    def step(self, step_id: int) -> dict[str, Any] | None:
        """One step with every participant's share, or None if it is not kept any more."""
        entry = next((e for e in self.book.entries if e.id == step_id), None)
        if entry is None:
            return None
        rows, num_new = entry.rows, entry.rows.num_new
        shares = []
        for i, ticket in enumerate(rows.owners):
            stay = self.book.stays[int(ticket)]
            shares.append(
                {
                    "request": stay.request_id,
                    "index": stay.choice,
                    "tenant": stay.tenant,
                    "row": stay.row,
                    "start": int(rows.starts[i]),
                    "tokens": int(num_new[i]),
                    "kind": kind_of(rows, i),
                    "cost_ns": int(entry.shares_ns[i]),
                }
            )
        return {**self._step(entry), "shares": shares}

    def request(self, request_id: str, now_ns: int) -> list[dict[str, Any]]:
        """All choices of a request: final where they have closed, and what made their slowest tokens slow."""
        return [
            {**account.as_dict(now_ns), "slowest_steps": self._slowest(account)}
            for account in self.accounts.of(request_id)
        ]

    def little(self, now_ns: int) -> dict[str, Any]:
        """Both sides of Little's law by state, in integers, and how busy the device was against who was charged."""
        spent = dict(self.accounts.closed_ns)
        for account in self.accounts.live:
            request = account.request
            self.accounts.settle(account)
            for state, amount_ns in request.buckets_ns.items():
                spent[state] += amount_ns
            spent[request.state] += now_ns - request.since_ns
        requests_ns, integral_ns = merged(spent), self.accounts.census.integral_ns(now_ns)
        names = sorted({*requests_ns, *integral_ns} - {State.ENDED.value})
        book, totals = self.book, self.book.totals
        window_ns = now_ns - book.start_ns
        return {
            "window_ns": window_ns,
            "states": {
                name: {
                    "requests_ns": requests_ns.get(name, 0),
                    "integral_ns": integral_ns.get(name, 0),
                    "difference_ns": requests_ns.get(name, 0) - integral_ns.get(name, 0),
                    "mean_number": integral_ns.get(name, 0) / max(window_ns, 1),
                }
                for name in names
            },
            "device": {
                "steps": totals.num_steps,
                "busy_ns": totals.device_ns,
                "requests_ns": totals.requests_ns,
                "engine_ns": totals.engine_ns,
                "closed_cost_ns": self.accounts.closed_cost_ns,
                "live_cost_ns": sum(account.cost_ns for account in self.accounts.live),
                "gaps_ns": dict(totals.gaps_ns),
                "since_last_step_ns": now_ns - book.commit_ns,
                "utilisation": totals.device_ns / max(window_ns, 1),
                "throughput_times_cost": self._offered(window_ns),
            },
        }

    # inside

    def _offered(self, window_ns: int) -> float:
        """Requests closed a second times what one cost, the engine's own part on top: utilisation by other means."""
        closed = max(self.accounts.num_closed, 1)
        rate = self.accounts.num_closed / max(window_ns, 1)
        live_ns = sum(account.cost_ns for account in self.accounts.live)
        own = (self.book.totals.engine_ns + live_ns) / max(window_ns, 1)
        return rate * self.accounts.closed_cost_ns / closed + own

    def _step(self, entry: StepEntry) -> dict[str, Any]:
        rows, timing = entry.rows, entry.timing
        values: dict[str, Any] = {
            "id": entry.id,
            "launch_ns": entry.launch_ns,
            "commit_ns": entry.commit_ns,
            "span_ns": entry.span_ns,
            "device_ns": entry.device_ns,
            "gaps_ns": entry.gaps_ns,
            "rows": len(rows.owners),
            "tokens": tokens_by_kind(rows),
            "context_tokens": int((rows.starts + rows.num_new).sum()),
            "pools": [fragments(rows, pool, self._block_size) for pool in entry.pools],
            "padded_tokens": timing.padded_tokens,
            "padded_rows": timing.padded_rows,
            "graph": timing.graph,
            "requests_ns": entry.device_ns - entry.engine_ns,
            "engine_ns": entry.engine_ns,
            "expected_ns": round(entry.rates.requests_ns(entry.load)) if entry.rates.is_known else None,
            "rates": entry.rates.source,
        }
        measured = self._measure.of(entry) if self._measure is not None else {}
        return {**values, "floor_ns": None, "reach_ns": None, "estimate_ns": None, **measured}

    def _slowest(self, account: Account) -> list[dict[str, Any]]:
        """The longest kept steps the request took part in, and what made them long for it.

        Those that brought it a token after its first come first: they are the gaps its reader saw. A step from before
        there were rates is explained by those of now.
        """

        def order(item: tuple[StepEntry, int]) -> tuple[bool, int]:
            entry, at = item
            return kind_of(entry.rows, at) != "decode", -entry.span_ns

        found = sorted(self.book.steps_of(account.tickets), key=order)[:_SLOWEST]
        rates = [entry.rates if entry.rates.is_known else self.book.rates for entry, _ in found]
        return [
            {
                **self._step(entry),
                "rates": by.source,
                "own_cost_ns": int(entry.shares_ns[at]),
                "start": int(entry.rows.starts[at]),
                "kind": kind_of(entry.rows, at),
                "causes": causes(entry.device_ns, entry.rows, at, by, entry.timing.padded_tokens).as_dict(),
            }
            for (entry, at), by in zip(found, rates)
        ]


def _chunks(entry: StepEntry) -> tuple[Chunk, ...]:
    """The step as the plan knows it: decodes of one mean context, each prefill by itself."""
    rows = entry.rows
    ends = rows.starts + rows.num_new
    decode = rows.is_decode
    chunks: list[Chunk] = []
    if decode.any():
        chunks.append(Chunk(1, max(1, int(ends[decode].sum()) // int(decode.sum())), int(decode.sum())))
    for new, end, sampled in zip(rows.num_new[~decode], ends[~decode], rows.sampled[~decode]):
        chunks.append(Chunk(int(new), int(end), 1, int(sampled)))
    return tuple(chunks)
