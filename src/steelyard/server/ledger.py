"""The whole account of each HTTP request, both processes' halves joined, and the store of those that have closed.

    server   auth http_read tokenize [== in engine ==] detokenize stream client_slow
    engine                           wait.. prefill decode ..               its own clock: only lengths cross
    joined   auth http_read tokenize wait.. prefill decode .. wire detokenize stream     sums to wall time

A request that is given up stays open until the engine has let go of it, so that abandoned work is on its account.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import msgspec

from steelyard.core.timed import State, Timed
from steelyard.errors import StartError, reason
from steelyard.server.collector import Collector
from steelyard.wire.messages import Finished

MAX_KEPT = 1000
MAX_STRANGERS = 100
"""Kept of those without a known key, apart: they cannot push out the others."""
SLOW_WRITE_NS = 2_000_000
"""A write that the connection takes later than this waited for the client."""

_log = logging.getLogger("steelyard.server")


def merged_ns(timed: Timed, engine_ledger: Mapping[str, int]) -> dict[str, int]:
    """One ledger of both processes: the time in the engine is replaced by the engine's own account of it.

    What the engine does not account for is the way there and back: `wire`. The buckets sum to the request's time.
    """
    buckets = {state.value: amount_ns for state, amount_ns in timed.buckets_ns.items()}
    inside_ns = buckets.pop(State.IN_ENGINE.value, 0)
    accounted_ns = sum(engine_ledger.values())
    if accounted_ns > inside_ns:  # two clocks: the engine's account is longer than the interval it was given
        engine_ledger, accounted_ns = {}, 0
    for state, amount_ns in engine_ledger.items():
        buckets[state] = buckets.get(state, 0) + amount_ns
    buckets[State.WIRE.value] = buckets.get(State.WIRE.value, 0) + inside_ns - accounted_ns
    return buckets


class Account:
    """One HTTP request's account, from the moment its head was there.

    request_id   as in x-request-id; response_id: as in the response's `id`, if one was begun
    status       of the response; 0: none was sent
    trace_headers  the caller's traceparent and tracestate, if it sent them
    """

    def __init__(self, request_id: str, endpoint: str, tenant: str, now_ns: int, started_s: float) -> None:
        self.request_id = request_id
        self.response_id = ""
        self.endpoint = endpoint
        self.tenant = tenant
        self.started_s = started_s
        self.start_ns = now_ns
        self.timed = Timed(State.AUTH, now_ns)
        self.collector: Collector | None = None
        self.status = 0
        self.error = ""
        self.trace_headers: dict[str, str] = {}

    def opened(self, collector: Collector) -> None:
        """The engine is about to be asked."""
        self.collector = collector

    def wrote(self, began_ns: int, now_ns: int) -> None:
        """A write took from `began_ns` to `now_ns`. What came after the last token and was slow was the client's time.

        Before the last token nothing is charged: the engine went on meanwhile.
        """
        if now_ns - began_ns < SLOW_WRITE_NS:
            return
        collector = self.collector
        if self.timed.state is State.IN_ENGINE and collector is not None and collector.ended_ns:
            began_ns = max(began_ns, collector.ended_ns)
        elif self.timed.state is not State.STREAM:
            return
        began_ns = max(began_ns, self.timed.since_ns)
        if began_ns < now_ns:
            self.timed.to(State.CLIENT_SLOW, began_ns)
            self.timed.to(State.STREAM, now_ns)

    def when_over(self, close: Callable[[], None]) -> None:
        """Call `close` now, or once the engine has let go of every prompt."""
        collector = self.collector
        if collector is not None and collector.num_held:
            collector.when_over = close
        else:
            close()

    def so_far(self, now_ns: int) -> dict[str, Any]:
        """The ledger as if the request ended now: what goes into a response, which is not sent yet."""
        timed = self.timed
        copy = Timed(timed.state, timed.start_ns)
        copy.since_ns, copy.buckets_ns = timed.since_ns, dict(timed.buckets_ns)
        copy.to(State.ENDED, max(now_ns, timed.since_ns))
        return self._sums(copy)

    def record(self) -> dict[str, Any]:
        """Everything there is to know, once it is over."""
        collector = self.collector
        return {
            "id": self.response_id or self.request_id,
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "tenant": self.tenant,
            "started_s": self.started_s,
            "status": self.status,
            "error": self.error,
            "outcome": self._outcome(),
            **self._sums(self.timed),
            "deliveries": [] if collector is None else collector.deliveries,
        }

    def _outcome(self) -> str:
        if self.collector is not None and self.collector.ends:
            return self.collector.outcome
        if self.status == 0:
            return "abort"
        return "refused" if self.status >= 400 else "ok"

    def _sums(self, timed: Timed) -> dict[str, Any]:
        collector = self.collector
        ends: dict[int, Finished] = {} if collector is None else collector.ends
        last = collector.last_end if collector is not None else None
        return {
            "total_ns": timed.total_ns,
            "buckets_ns": merged_ns(timed, last.ledger if last is not None else {}),
            "cost_ns": sum(end.cost_ns for end in ends.values()),
            "ttft_ns": collector.first_ns - self.start_ns if collector is not None and collector.first_ns else None,
            "slowest_gap_ns": 0 if collector is None else max(map(slowest_gap_ns, collector.deliveries), default=0),
            "tokens": _tokens(ends, 1 if collector is None else collector.n),
            "choices": [_choice(index, ends[index]) for index in sorted(ends)],
        }


def slowest_gap_ns(deliveries: array[int]) -> int:
    """The longest time between two deliveries of a choice."""
    times = deliveries[::2]
    return max((b - a for a, b in itertools.pairwise(times)), default=0)


def _choice(index: int, end: Finished) -> dict[str, Any]:
    usage = {name: getattr(end.usage, name) for name in end.usage.__struct_fields__}
    return {
        "index": index,
        "engine_id": end.id,
        "engine_index": end.index,
        "reason": end.reason,
        "total_ns": sum(end.ledger.values()),
        "buckets_ns": end.ledger,
        "cost_ns": end.cost_ns,
        "usage": usage,
    }


def _tokens(ends: Mapping[int, Finished], n: int) -> dict[str, int]:
    """Sums over choices; a prompt counts once, as in `usage`."""
    firsts = [end.usage for index, end in ends.items() if index % n == 0]
    usages = [end.usage for end in ends.values()]
    return {
        "prompt": sum(u.prompt_tokens for u in firsts),
        "cached": sum(u.cached_tokens for u in firsts),
        "generated": sum(u.completion_tokens for u in usages),
        "computed": sum(u.computed_tokens for u in usages),
        "recomputed": sum(u.recomputed_tokens for u in usages),
        "overshoot": sum(u.overshoot_tokens for u in usages),
        "shared": sum(u.shared_tokens for u in usages),
        "lost": sum(u.lost_tokens for u in usages),
        "preemptions": sum(u.preemptions for u in usages),
    }


class Ledgers:
    """The last closed requests, by id, and a log of all of them if one is asked for."""

    def __init__(self, log_path: str | None = None, on_lost: Callable[[], None] = lambda: None) -> None:
        self._known: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._strangers: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self._by_id: dict[str, int] = {}
        self._num_added = 0
        self._log = None if log_path is None else LedgerLog(Path(log_path), on_lost)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; one of the tenant "" is a stranger's."""
        self._num_added += 1
        records, most = (self._known, MAX_KEPT) if record["tenant"] else (self._strangers, MAX_STRANGERS)
        records[self._num_added] = record
        for id in (record["id"], record["request_id"]):
            if record["tenant"] or id not in self._by_id:  # a stranger's id may be a copy of somebody's
                self._by_id[id] = self._num_added
        if len(records) > most:
            number, old = records.popitem(last=False)
            for id in (old["id"], old["request_id"]):
                if self._by_id.get(id) == number:
                    del self._by_id[id]
        if self._log is not None:
            self._log.write(as_json(record))

    def get(self, id: str, tenant: str | None) -> dict[str, Any] | None:
        """A closed request by either id; `tenant`: only that one's, None: anybody's."""
        number = self._by_id.get(id, 0)
        record = self._known.get(number) or self._strangers.get(number)
        return record if record is not None and tenant in (None, record["tenant"]) else None

    def last(self, count: int, tenant: str | None, slowest: bool = False) -> list[dict[str, Any]]:
        """The last `count`, oldest first; or of all that are kept the slowest, slowest first."""
        kept = {**self._known, **self._strangers} if tenant is None else self._known
        found = [kept[number] for number in sorted(kept) if tenant in (None, kept[number]["tenant"])]
        if slowest:
            return sorted(found, key=lambda r: -int(r["total_ns"]))[:count]
        return found[-count:] if count > 0 else []

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


def as_json(record: dict[str, Any]) -> dict[str, Any]:
    """A record with its deliveries as pairs: [nanoseconds since arrival, tokens]."""
    pairs = [[list(pair) for pair in zip(d[::2], d[1::2])] for d in record["deliveries"]]
    return {**record, "deliveries": pairs}


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """A record for a list: without deliveries and choices."""
    return {name: value for name, value in record.items() if name not in ("deliveries", "choices")}


class LedgerLog:
    """JSON Lines, written by a thread of its own: a slow disk holds up no stream. Raises StartError at once.

    `on_lost` is called for each line a full disk does not take; the next one is tried again.
    """

    def __init__(self, path: Path, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise StartError(f"--ledger-log {path}: {reason(error)}") from None
        self._lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="ledger-log", daemon=True)
        self._thread.start()

    def write(self, record: dict[str, Any]) -> None:
        self._lines.put(record)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(2.0)

    def _run(self) -> None:
        encode = msgspec.json.Encoder().encode
        torn = False
        with self._file as file:
            while (record := self._lines.get()) is not None:
                line = (b"\n" if torn else b"") + encode(record) + b"\n"
                try:
                    num_written = file.write(line)
                    torn = num_written < len(line)
                except OSError as error:
                    num_written = 0
                    _log.error("the ledger log loses a line: %s", error)
                if num_written < len(line):
                    self._on_lost()
