"""How much may wait: requests and prompt tokens that have no first token yet. Counted before the engine is asked.

A reservation is taken before the prompt is encoded and given back with the first token, or at the request's end,
so that many requests at once cannot all see the same free place.
"""

from __future__ import annotations

from collections.abc import Callable

from steelyard.errors import Overloaded

_SMOOTHING = 0.2
_FIRST_GUESS_NS = 1e9


class Reservation:
    """A place in the queue, given back at the latest when its context is left. `release` is idempotent."""

    def __init__(self, admission: Admission, now_ns: int) -> None:
        self._admission = admission
        self._since_ns = now_ns
        self._num_tokens = 0
        self._held = True

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release(served=False)

    def add_tokens(self, num_tokens: int) -> None:
        """Charge the prompt, now that its length is known. Raises Overloaded, and then holds nothing more."""
        self._admission.check_tokens(num_tokens)
        self._admission.num_tokens += num_tokens
        self._num_tokens = num_tokens

    def release(self, served: bool) -> None:
        """Give the place back; `served`: because its first token has come."""
        if not self._held:
            return
        self._held = False
        self._admission.num_requests -= 1
        self._admission.num_tokens -= self._num_tokens
        if served:
            self._admission.observe_wait(self._since_ns)


class Admission:
    """The queue's size and its limits; None is no limit."""

    def __init__(self, max_requests: int | None, max_tokens: int | None, clock_ns: Callable[[], int]) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clock_ns = clock_ns
        self._wait_ns = _FIRST_GUESS_NS
        self.num_requests = 0
        self.num_tokens = 0

    def reserve(self) -> Reservation:
        """Take a place. Raises Overloaded if all are taken."""
        if self._max_requests is not None and self.num_requests >= self._max_requests:
            raise self._overloaded(f"{self.num_requests} requests wait, the limit is {self._max_requests}")
        self.num_requests += 1
        return Reservation(self, self._clock_ns())

    def check_tokens(self, num_tokens: int) -> None:
        """Raises Overloaded if that many more prompt tokens may not wait."""
        limit = self._max_tokens
        if limit is not None and self.num_tokens + num_tokens > limit:
            raise self._overloaded(
                f"{self.num_tokens} prompt tokens wait, the limit is {limit}, and this prompt has {num_tokens}"
            )

    def observe_wait(self, since_ns: int) -> None:
        self._wait_ns += _SMOOTHING * (self._clock_ns() - since_ns - self._wait_ns)

    def _overloaded(self, what: str) -> Overloaded:
        seconds = self._wait_ns / 1e9
        return Overloaded(f"{what}; the wait for a first token is about {seconds:.1f} s", retry_after_s=seconds)
