"""What is being served now, counted: by one process for itself, or by several together in a file they all map.

    front end 0 --lock--> [account: bucket | 0: requests, tokens | 1: requests, tokens | ...] <--lock-- front end 1

An account is a tenant's name, or QUEUE for all that wait. Each process adds to its own column, and a limit is held
against the sum, so a process that dies takes nothing with it that `forget` does not give back. Decides nothing.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from steelyard.errors import SteelyardError

QUEUE = ""
MAX_ACCOUNTS = 4096
_DIGEST, _LEVEL, _AT, _COLUMNS = 0, 4, 5, 6
"""Places in an account's row, in words of 8 bytes."""


class Usage(Protocol):
    """Counts of accounts. What is read and then added to is done under `locked`."""

    def locked(self) -> AbstractContextManager[None]: ...

    def total(self, account: str) -> tuple[int, int]:
        """(requests, tokens) of all processes."""
        ...

    def add(self, account: str, requests: int, tokens: int) -> None: ...

    def bucket(self, account: str) -> tuple[float, int]:
        """(tokens left, at which instant in ns); the instant is 0 before the first `fill`."""
        ...

    def fill(self, account: str, level: float, at_ns: int) -> None: ...


class OwnUsage:
    """Of one process."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[int, int]] = {}
        self._buckets: dict[str, tuple[float, int]] = {}

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def total(self, account: str) -> tuple[int, int]:
        return self._totals.get(account, (0, 0))

    def add(self, account: str, requests: int, tokens: int) -> None:
        before = self.total(account)
        self._totals[account] = before[0] + requests, before[1] + tokens

    def bucket(self, account: str) -> tuple[float, int]:
        return self._buckets.get(account, (0.0, 0))

    def fill(self, account: str, level: float, at_ns: int) -> None:
        self._buckets[account] = level, at_ns


class SharedUsage:
    """Of `num_processes`, of which this is `index`. The clock must be one of the machine, not of a process."""

    def __init__(self, path: Path, index: int, num_processes: int) -> None:
        self._row_words = _COLUMNS + 2 * num_processes
        num_bytes = MAX_ACCOUNTS * self._row_words * 8
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, num_bytes)
        memory = memoryview(mmap.mmap(self._file, num_bytes))
        self._ints, self._floats = memory.cast("q"), memory.cast("d")
        self._column = _COLUMNS + 2 * index
        self._rows: dict[str, int] = {}
        self._depth = 0

    def locked(self) -> AbstractContextManager[None]:
        return self._locked()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._depth == 0:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def total(self, account: str) -> tuple[int, int]:
        row = self._row(account)
        columns = self._ints[row + _COLUMNS : row + self._row_words]
        return sum(columns[::2]), sum(columns[1::2])

    def add(self, account: str, requests: int, tokens: int) -> None:
        at = self._row(account) + self._column
        self._ints[at] += requests
        self._ints[at + 1] += tokens

    def bucket(self, account: str) -> tuple[float, int]:
        row = self._row(account)
        return self._floats[row + _LEVEL], self._ints[row + _AT]

    def fill(self, account: str, level: float, at_ns: int) -> None:
        row = self._row(account)
        self._floats[row + _LEVEL], self._ints[row + _AT] = level, at_ns

    def forget(self, index: int) -> None:
        """Give back all that process `index` holds: it has died."""
        with self.locked():
            for row in range(0, len(self._ints), self._row_words):
                at = row + _COLUMNS + 2 * index
                self._ints[at] = self._ints[at + 1] = 0

    def _row(self, account: str) -> int:
        """Where an account's row begins; one that is new takes the first free row. Raises SteelyardError."""
        row = self._rows.get(account)
        if row is not None:
            return row
        digest = memoryview(sha256(b"account " + account.encode()).digest()).cast("q").tolist()
        with self.locked():
            for row in range(0, len(self._ints), self._row_words):
                found = self._ints[row + _DIGEST : row + _LEVEL].tolist()
                if not any(found):
                    for word, value in enumerate(digest):
                        self._ints[row + word] = value
                elif found != digest:
                    continue
                self._rows[account] = row
                return row
        raise SteelyardError(f"more than {MAX_ACCOUNTS - 1} tenants have been served; start the server again")
