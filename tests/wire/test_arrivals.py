"""Messages are taken off a socket as they come, in order, in batches; closing waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import zmq

from steelyard.wire.arrivals import MAX_BATCH, Arrivals

WAIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], Arrivals]]:
    """A sender, and what arrives over the other end, with the number of its arrival for a clock."""
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (receiver, sender):
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
    receiver.bind("inproc://pair")
    sender.connect("inproc://pair")
    count = itertools.count()
    arrivals = Arrivals(receiver, lambda: next(count))
    yield sender, arrivals
    arrivals.close()
    arrivals.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("with_thread", [True, False])
def test_a_flood_comes_in_order_and_in_batches(pair: tuple[zmq.Socket[bytes], Arrivals], with_thread: bool) -> None:
    sender, arrivals = pair
    if with_thread:
        arrivals.start()
    frames = [str(number).encode() for number in range(3 * MAX_BATCH + 7)]
    for frame in frames:
        sender.send_multipart([frame, b"more"])
    batches = [arrivals.take(WAIT_S)]
    while sum(map(len, batches)) < len(frames):
        batches.append(arrivals.take(WAIT_S))
    assert max(map(len, batches)) <= MAX_BATCH
    assert [a for batch in batches for a in batch] == [([frame, b"more"], at) for at, frame in enumerate(frames)]


def test_nothing_is_waited_for_where_nothing_comes(pair: tuple[zmq.Socket[bytes], Arrivals]) -> None:
    _, arrivals = pair
    arrivals.start()
    assert arrivals.take(0.0) == arrivals.take(0.01) == []
