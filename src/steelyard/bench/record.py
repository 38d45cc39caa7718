"""What is kept of one request, and the latencies that follow from it. Raw times only; no statistics over requests.

    sched      send   headers      first token                last token   done
      |----------|--------|------------|---- ... gaps ... ---------|---------|
      '- delay --'
                 '-- service TTFT -----'      '---- E2E - TTFT -----'
      '-- user TTFT -------------------'

`sched` is the instant the arrival process wanted the request sent. A service latency starts at `send` (what the server
did), a user latency at `sched` (what somebody waiting would have felt, the MLPerf rule). All times are nanoseconds
since the run began, by one monotonic clock of the process that sent the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path

import msgspec

from steelyard.errors import InvalidRequest


class Clock(Enum):
    """Where a latency starts."""

    SERVICE = "service"
    USER = "user"


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """A stream event that carried generated text or tokens.

    channel     "content", "reasoning" or "tool"
    num_tokens  completion tokens this event brought, if the server says so
    """

    t_ns: int
    channel: str
    num_tokens: int | None
    num_chars: int


class Usage(msgspec.Struct, frozen=True):
    """The server's own counts; None: it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


FAILURES = ("http_4xx", "http_5xx", "connection", "timeout", "truncated", "empty", "server_error", "dropped")
"""How a request can fail. `dropped`: the client never sent it. A wrong output length is a failure of its own."""


class RequestRecord(msgspec.Struct):
    """One request, as measured. `failure` None: it succeeded; `opening`: one of the first of a closed loop's slots."""

    id: int
    group: str
    sched_ns: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    client: int = 0
    send_ns: int | None = None
    headers_ns: int | None = None
    done_ns: int | None = None
    events: list[TokenEvent] = []
    usage: Usage = Usage()
    counted_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    failure: str | None = None
    detail: str = ""
    ignore_eos: bool = True
    opening: bool = False

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def num_tokens(self) -> int | None:
        """Completion tokens: the server's usage, else what token ids or a tokenizer counted. Never a chunk count."""
        return self.usage.completion_tokens if self.usage.completion_tokens is not None else self.counted_tokens

    @property
    def delay_ns(self) -> int | None:
        """How late the client sent it."""
        return None if self.send_ns is None else self.send_ns - self.sched_ns

    def start_ns(self, clock: Clock) -> int:
        start = self.sched_ns if clock is Clock.USER else self.send_ns
        return self.sched_ns if start is None else start

    def ttft_ns(self, clock: Clock = Clock.SERVICE) -> int | None:
        """To the first event that carries a token on any channel."""
        return self.events[0].t_ns - self.start_ns(clock) if self.events else None

    def ttfo_ns(self, clock: Clock = Clock.SERVICE) -> int | None:
        """To the first token of the answer itself: not reasoning, not a tool call."""
        first = next((e for e in self.events if e.channel == "content"), None)
        return None if first is None else first.t_ns - self.start_ns(clock)

    def e2e_ns(self, clock: Clock = Clock.SERVICE) -> int | None:
        """To the last event that carries a token: not [DONE], not the usage chunk."""
        return self.events[-1].t_ns - self.start_ns(clock) if self.events else None

    def tpot_ns(self) -> float | None:
        """(E2E - TTFT) / (n - 1), for two tokens or more."""
        n = self.num_tokens
        if not self.events or n is None or n < 2:
            return None
        return (self.events[-1].t_ns - self.events[0].t_ns) / (n - 1)

    def ntpot_ns(self, clock: Clock = Clock.SERVICE) -> float | None:
        """E2E / n, the normalised latency of the Orca and PagedAttention papers."""
        n, whole = self.num_tokens, self.e2e_ns(clock)
        return None if whole is None or not n else whole / n

    def icl_ns(self) -> list[int]:
        """Gaps between consecutive token-bearing events: what the eye sees."""
        return [b.t_ns - a.t_ns for a, b in pairwise(self.events)]

    def itl_ns(self) -> list[float]:
        """Gaps per token. An event of k tokens after a gap counts k times gap / k; their sum is E2E - TTFT exactly.

        Tokens of the first event beyond its first came with no gap of their own: each is 0.
        """
        if not self.events:
            return []
        counts = self.tokens_by_event()
        gaps: list[float] = [0.0] * max(counts[0] - 1, 0)
        for gap, count in zip(self.icl_ns(), counts[1:]):
            gaps += [gap / count] * count
        return gaps

    @property
    def counts_known(self) -> bool:
        """Whether each event's tokens are known: the server said them, or there are as many events as tokens."""
        said = all(e.num_tokens is not None for e in self.events)
        return said or len(self.events) == self.num_tokens

    def tokens_by_event(self) -> list[int]:
        """Tokens of each event; where the server does not say, the total spread by characters, at least one each."""
        if all(e.num_tokens is not None for e in self.events):
            return [e.num_tokens or 0 for e in self.events]
        total = max(self.num_tokens or 0, len(self.events))
        return spread(total, [e.num_chars for e in self.events])


def spread(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` (at least one a part) by weights, largest remainders first; the parts sum to it."""
    left, whole = total - len(weights), sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    shares = [left * w / whole for w in weights]
    parts = [int(s) for s in shares]
    order = sorted(range(len(parts)), key=lambda i: parts[i] - shares[i])
    for i in order[: left - sum(parts)]:
        parts[i] += 1
    return [1 + p for p in parts]


@dataclass(frozen=True, slots=True)
class Slo:
    """Targets of one request in milliseconds; None: no target."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def asked(self) -> bool:
        return (self.ttft_ms, self.tpot_ms, self.e2e_ms) != (None, None, None)

    def met(self, record: RequestRecord, clock: Clock) -> bool:
        """Whether a request met every target. A failed one never does; one token has no TPOT to miss."""
        if not record.ok:
            return False
        pairs = (
            (self.ttft_ms, record.ttft_ns(clock)),
            (self.e2e_ms, record.e2e_ns(clock)),
            (self.tpot_ms, record.tpot_ns() or 0.0),
        )
        return all(limit is None or (value is not None and value <= limit * 1e6) for limit, value in pairs)


@dataclass(slots=True)
class ClientStats:
    """What the measuring process itself spent: shares and delays that can make a result the client's own."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    lag_ns: list[int] = field(default_factory=list)
    wall_step_ns: int = 0

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s else 0.0


def write_records(path: Path, records: Iterable[RequestRecord]) -> None:
    """One JSON line a request, everything raw."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for record in records:
            file.write(encoder.encode(record) + b"\n")


def read_records(path: Path) -> list[RequestRecord]:
    """Raises InvalidRequest naming file and line."""
    decoder = msgspec.json.Decoder(RequestRecord)
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"{path}:{number}: is no request record ({error})") from error
    return found
