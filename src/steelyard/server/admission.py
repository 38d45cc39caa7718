"""What may be taken in: the queue's places for all, and each tenant's own limits. Counted before the engine is asked.

    tenant's requests and rate (429) -> a place in the queue (503) -> tokenise -> tenant's tokens (429), queue's (503)

What is over a limit by itself is never told to come again: 400, with the limit's name.
A place in the queue is given back with the first token; what counts against a tenant, at the request's end. Both are
taken before the prompt is encoded, so that many requests at once cannot all see the same free place. The counts are
in a `Usage`, which several front ends of one engine share; what is usual (waits, outputs) each observes for itself.
"""

from __future__ import annotations

from collections.abc import Callable

from steelyard.errors import ContextLengthExceeded, Overloaded
from steelyard.server.errors import TenantLimit
from steelyard.server.tenants import Tenant
from steelyard.server.usage import QUEUE, OwnUsage, Usage

_SMOOTHING = 0.2
_FIRST_GUESS_NS = 1e9
_FIRST_GUESS_TOKENS = 128.0
_MINUTE_NS = 60e9


class TenantLoad:
    """What one tenant uses now, and its limits. The rate is a bucket of tokens that fills over a minute.

    num_tokens  prompts and outputs of requests being served, as admitted
    level       tokens left in the bucket; below zero after a request that took more than there was
    """

    def __init__(self, tenant: Tenant, clock_ns: Callable[[], int], usage: Usage) -> None:
        self.tenant = tenant
        self._usage = usage
        self._clock_ns = clock_ns
        self._mean_output_tokens = _FIRST_GUESS_TOKENS
        self._mean_ns = _FIRST_GUESS_NS

    @property
    def num_requests(self) -> int:
        return self._usage.total(self.tenant.name)[0]

    @property
    def num_tokens(self) -> int:
        return self._usage.total(self.tenant.name)[1]

    @property
    def level(self) -> float:
        level, at_ns = self._usage.bucket(self.tenant.name)
        return level if at_ns else float(self.tenant.max_tokens_per_minute or 0)

    @level.setter
    def level(self, level: float) -> None:
        self._usage.fill(self.tenant.name, level, self._clock_ns())

    def check(self) -> None:
        """Raises TenantLimit if this tenant may not have one more request now."""
        tenant = self.tenant
        limit = tenant.max_concurrent_requests
        if limit is not None and self.num_requests >= limit:
            raise self._limited(f"{self.num_requests} requests are being served, the limit is {limit}", self._mean_ns)
        rate = tenant.max_tokens_per_minute
        if rate is not None:
            self._fill(rate)
            if self.level <= 0:
                wait_ns = (1 - self.level) / rate * _MINUTE_NS
                raise self._limited(f"the limit of {rate} tokens a minute is used up", wait_ns)

    def tokens_of(self, num_prompt: int, num_output: int | None) -> int:
        """What a request is charged while it is served; an output that is not limited, by what is usual.

        That is a guess, and keeps nobody out for good: it takes at most what the prompt leaves of the limit.
        """
        if num_output is not None:
            return num_prompt + num_output
        usual, limit = int(self._mean_output_tokens), self.tenant.max_in_flight_tokens
        return num_prompt + (usual if limit is None else min(usual, max(limit - num_prompt, 1)))

    def check_tokens(self, num_tokens: int, num_prompt: int) -> None:
        """Raises TenantLimit if so many may not be served now, ContextLengthExceeded if they never may."""
        limit = self.tenant.max_in_flight_tokens
        if limit is not None and num_tokens > limit:
            raise ContextLengthExceeded(
                f"prompts of {num_prompt} tokens and outputs of {num_tokens - num_prompt} are {num_tokens}, but the "
                f"limit of this tenant is {limit} (max_in_flight_tokens); shorten the prompt or lower max_tokens or n",
                param="prompt" if num_prompt >= limit else "max_tokens",
            )
        if limit is not None and self.num_tokens + num_tokens > limit:
            what = f"{self.num_tokens} tokens are being served, the limit is {limit}, and this request has {num_tokens}"
            raise self._limited(what, self._mean_ns)

    def ended(self, since_ns: int, num_output_tokens: int) -> None:
        self.spend(num_output_tokens)
        self._mean_output_tokens += _SMOOTHING * (num_output_tokens - self._mean_output_tokens)
        self._mean_ns += _SMOOTHING * (self._clock_ns() - since_ns - self._mean_ns)

    def spend(self, num_tokens: int) -> None:
        if self.tenant.max_tokens_per_minute is not None:
            self._fill(self.tenant.max_tokens_per_minute)
            self.level -= num_tokens

    def _fill(self, rate: int) -> None:
        level, at_ns = self._usage.bucket(self.tenant.name)
        grown = rate * (self._clock_ns() - at_ns) / _MINUTE_NS
        self.level = min(float(rate), level + grown) if at_ns else float(rate)

    def _limited(self, what: str, wait_ns: float) -> TenantLimit:
        seconds = wait_ns / 1e9
        return TenantLimit(f"tenant {self.tenant.name}: {what}; try again in {seconds:.1f} s", retry_after_s=seconds)


class Place:
    """One request's share of all limits, given back at the latest when its context is left."""

    def __init__(self, admission: Admission, load: TenantLoad, now_ns: int) -> None:
        self._admission = admission
        self._load = load
        self._since_ns = now_ns
        self._num_prompt = 0
        self._num_charged = 0
        self._queued = True
        self.num_output_tokens = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._admission.usage.locked():
            self.release(served=False)
            self._admission.usage.add(self._load.tenant.name, -1, -self._num_charged)
            if self._num_charged:
                self._load.ended(self._since_ns, self.num_output_tokens)

    def add_tokens(self, num_prompt: int, num_output: int | None = None) -> None:
        """Charge the prompt and the output it may have at most, now that they are known.

        Raises TenantLimit or Overloaded, or ContextLengthExceeded for more than a limit allows one request alone; it
        holds nothing more then.
        """
        charged = self._load.tokens_of(num_prompt, num_output)
        usage = self._admission.usage
        with usage.locked():
            self._load.check_tokens(charged, num_prompt)
            self._admission.check_tokens(num_prompt)
            usage.add(QUEUE, 0, num_prompt)
            usage.add(self._load.tenant.name, 0, charged)
            self._load.spend(num_prompt)
        self._num_prompt, self._num_charged = num_prompt, charged

    def release(self, served: bool) -> None:
        """Give the place in the queue back; `served`: because its first token has come. Idempotent."""
        if not self._queued:
            return
        self._queued = False
        with self._admission.usage.locked():
            self._admission.usage.add(QUEUE, -1, -self._num_prompt)
        if served:
            self._admission.observe_wait(self._since_ns)


class Admission:
    """The queue's size and its limits; None is no limit."""

    def __init__(
        self,
        max_requests: int | None,
        max_tokens: int | None,
        clock_ns: Callable[[], int],
        usage: Usage | None = None,
    ) -> None:
        self.usage = usage or OwnUsage()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock_ns = clock_ns
        self._wait_ns = _FIRST_GUESS_NS
        self._loads: dict[str, TenantLoad] = {}

    @property
    def num_requests(self) -> int:
        return self.usage.total(QUEUE)[0]

    @property
    def num_tokens(self) -> int:
        return self.usage.total(QUEUE)[1]

    def reserve(self, tenant: Tenant) -> Place:
        """Take a place. Raises TenantLimit or Overloaded if there is none."""
        load = self.load_of(tenant)
        with self.usage.locked():
            load.check()
            if self._max_requests is not None and self.num_requests >= self._max_requests:
                raise self._overloaded(f"{self.num_requests} requests wait, the limit is {self._max_requests}")
            self.usage.add(QUEUE, 1, 0)
            self.usage.add(tenant.name, 1, 0)
        return Place(self, load, self._clock_ns())

    def load_of(self, tenant: Tenant) -> TenantLoad:
        load = self._loads.get(tenant.name)
        if load is None:
            load = self._loads[tenant.name] = TenantLoad(tenant, self._clock_ns, self.usage)
        load.tenant = tenant  # its limits may have changed since
        return load

    def check_tokens(self, num_tokens: int) -> None:
        """Raises Overloaded if so many more prompt tokens may not wait now, ContextLengthExceeded if they never may."""
        limit = self._max_tokens
        if limit is not None and num_tokens > limit:
            raise ContextLengthExceeded(
                f"the prompt has {num_tokens} tokens, but at most {limit} may wait (--max-num-queued-tokens); "
                "shorten it",
                param="prompt",
            )
        if limit is not None and self.num_tokens + num_tokens > limit:
            raise self._overloaded(
                f"{self.num_tokens} prompt tokens wait, the limit is {limit}, and this prompt has {num_tokens}"
            )

    def observe_wait(self, since_ns: int) -> None:
        self._wait_ns += _SMOOTHING * (self._clock_ns() - since_ns - self._wait_ns)

    def _overloaded(self, what: str) -> Overloaded:
        seconds = self._wait_ns / 1e9
        return Overloaded(f"{what}; the wait for a first token is about {seconds:.1f} s", retry_after_s=seconds)
