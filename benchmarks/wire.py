"""What the engine's end of the channel costs: microseconds a step and a message, with its receiving thread and without.

    python benchmarks/wire.py [--messages 2000] [--out benchmarks/results/wire.json]

`step`: what a loop at work pays, a send of the tokens of 64 rows and a look at what came. `trip`: an idle engine is
woken, receives and answers. `lay`: how late a message is noted that comes while the loop computes for 20 ms, all of
it in Python: what holds the interpreter's lock. The twin without a thread is a plain ROUTER in the same loops; it
knows nothing of when a message came. Both take turns in one process.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import zmq

from steelyard.core.environment import environment
from steelyard.wire.channel import Codec, EngineSide, new_address, remove_address
from steelyard.wire.messages import Answer, Delta, Deltas, Pause

TURNS = 10
COMPUTE_NS = 20_000_000
TOKENS = Deltas([Delta(str(row), 0, [5]) for row in range(64)])


class Plain:
    """A ROUTER that its one thread reads between steps."""

    def __init__(self, address: str) -> None:
        self._codec = Codec()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(address)

    def recv(self, timeout_ms: int = 0) -> list[bytes]:
        """The peers that sent."""
        found: list[bytes] = []
        if self._socket.poll(timeout_ms):
            try:
                while True:
                    peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                    found += [peer] if self._codec.to_engine(frame) else []
            except zmq.Again:
                pass
        return found

    def send(self, peer: bytes, message: Answer | Deltas) -> None:
        self._socket.send_multipart([peer, self._codec.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Threaded:
    """The engine's end as it is."""

    def __init__(self, address: str) -> None:
        self.side = EngineSide(address)

    def recv(self, timeout_ms: int = 0) -> list[bytes]:
        return [received.peer for received in self.side.recv(timeout_ms)]

    def send(self, peer: bytes, message: Answer | Deltas) -> None:
        self.side.send(peer, message)

    def close(self) -> None:
        self.side.close()


class Bench:
    """One end under test, and a server's DEALER."""

    def __init__(self, make: Callable[[str], Plain | Threaded]) -> None:
        self.address = new_address()
        self.end = make(self.address)
        self._context = zmq.Context()
        self.dealer = self._context.socket(zmq.DEALER)
        self.dealer.connect(self.address)
        self.frame = Codec().encode(Pause("x"))
        self.dealer.send(self.frame)
        (self.peer,) = self.end.recv(10_000)

    def step_us(self, num: int) -> list[float]:
        found = []
        for _ in range(num):
            began_ns = time.perf_counter_ns()
            self.end.send(self.peer, TOKENS)
            self.end.recv()
            found.append((time.perf_counter_ns() - began_ns) / 1000)
            self.dealer.recv()
        return found

    def trip_us(self, num: int) -> list[float]:
        def answer() -> None:
            for _ in range(num):
                for peer in self.end.recv(10_000):
                    self.end.send(peer, Answer("x", None))

        thread = threading.Thread(target=answer)
        thread.start()
        found = []
        for _ in range(num):
            began_ns = time.perf_counter_ns()
            self.dealer.send(self.frame)
            self.dealer.recv()
            found.append((time.perf_counter_ns() - began_ns) / 1000)
        thread.join()
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.end.close()
        remove_address(self.address)


def lay_us(bench: Bench, num: int) -> list[float]:
    """When its arrival was noted, less when the message was sent."""
    assert isinstance(bench.end, Threaded)
    found = []
    for _ in range(num):
        began_ns = time.monotonic_ns()
        bench.dealer.send(bench.frame)
        while time.monotonic_ns() - began_ns < COMPUTE_NS:
            pass
        (received,) = bench.end.side.recv(10_000)
        found.append((received.arrived_ns - began_ns) / 1000)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "wire.json")
    args = parser.parse_args()
    plain, threaded = Bench(Plain), Bench(Threaded)
    spent: dict[str, list[float]] = {name: [] for name in ("step", "step_plain", "trip", "trip_plain")}
    for _ in range(TURNS):
        num = max(1, args.messages // TURNS)
        spent["step"] += threaded.step_us(num)
        spent["step_plain"] += plain.step_us(num)
        spent["trip"] += threaded.trip_us(num)
        spent["trip_plain"] += plain.trip_us(num)
    spent["lay"] = lay_us(threaded, max(1, args.messages // 20))
    report: dict[str, object] = {
        "what": "the engine's end of the channel, medians in microseconds",
        "environment": environment(),
        "messages": args.messages,
        **{f"{name}_us": round(median(values), 1) for name, values in spent.items()},
    }
    for bench in (plain, threaded):
        bench.close()
    print(json.dumps(report, indent=2))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
