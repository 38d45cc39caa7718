"""The scheduler's invariants, over everything that is live. Slow; raises AssertionError and changes nothing."""

from __future__ import annotations

from steelyard.core.timed import State
from steelyard.scheduler.live import Live, PlannedStep
from steelyard.scheduler.rows import Resident


def check_live(live: Live) -> None:
    """Run every check below, and the cache's own."""
    live.cache.check()
    _check_places(live)
    for resident in live.rows:
        _check_resident(live, resident)
    _check_in_flight(live)


def _check_places(live: Live) -> None:
    """Each request is in one place, each list in order, each row free or held."""
    rows, waiting = live.rows, live.waiting.items
    for items in (waiting, rows.decodes, rows.prefills, rows.paused):
        keys = [item.order_key for item in items]
        assert keys == sorted(keys) and len(set(keys)) == len(keys), "a list is out of order"
    running = [r.request for items in (rows.decodes, rows.prefills, rows.paused) for r in items]
    known = {request for siblings in live.requests.values() for request in siblings.values()}
    assert len(running) + len(waiting) == len(known), "a request is in two places or in none"
    assert known == {*running, *waiting}
    leaving = {*live.swapping, *(request for step in live.in_flight for request in step.swapped)}
    held = list(rows)
    assert len(held) + rows.num_free == len(rows.by_row), "a row is lost"
    assert {r.request for r in held if not r.ended} == set(running)
    for request in waiting:
        assert request.state.waiting, f"{request} waits"
        displaced = request.state in (State.PREEMPTED, State.SWAP_OUT, State.SWAPPED)
        assert displaced == (request.num_preemptions > 0), f"{request} was preempted {request.num_preemptions} times"
        assert request.num_computed == 0, f"{request} waits and counts KV as its own"
        swapped = request.state in (State.SWAP_OUT, State.SWAPPED)
        assert swapped == bool(live.cache.swapped_tokens(request)), f"{request}: what the host keeps"
        assert (request.state is State.SWAP_OUT) == (request in leaving), f"{request}: its KV is under way"
        assert request.row == -1 and not live.cache.tables(request), f"{request} waits and holds something"


def _check_resident(live: Live, resident: Resident) -> None:
    request, tables = resident.request, live.cache.tables(resident.request)
    assert live.rows.by_row[resident.row] is resident and request.row == resident.row
    assert request.epoch == resident.epoch
    assert tables, f"{request} has a row and no blocks"
    assert resident.room == live.cache.room(request), f"{request}: room {resident.room}"
    if resident.ended:
        assert request.state is State.OVERSHOOT and resident.work_in_flight is not None
        return
    assert request.state.resident, f"{request} has a row"
    assert request.num_computed < len(request.tokens), f"{request} computed more than is known"
    assert len(request.tokens) < resident.end_len, f"{request} should have ended"
    assert resident.is_prefill == (resident.next_start < resident.known_len)
    assert request.total_ns == sum(request.buckets_ns.values()), f"{request}: the ledger does not add up"


def _check_in_flight(live: Live) -> None:
    """What is in flight is held: rows, blocks, and only private blocks are written."""
    if live.in_flight:
        _check_states(live, live.in_flight[0])
    latest = {}
    for step in live.in_flight:
        for row, work in step.works.items():
            resident = live.rows.by_row[row]
            assert resident is not None, f"row {row} is in flight and free"
            end = work.start + work.num_new
            assert end <= resident.room, f"{resident.request}: writes beyond its blocks"
            assert live.cache.may_write(resident.request, work.start, end), f"{resident.request}: writes a shared block"
            latest[row] = work
    for resident in live.rows:
        assert resident.work_in_flight is latest.get(resident.row), f"{resident.request}: work in flight disagrees"


def _check_states(live: Live, oldest: PlannedStep) -> None:
    """A row of the oldest step in flight is in the state of its work there."""
    for row, work in oldest.works.items():
        resident = live.rows.by_row[row]
        assert resident is not None
        request, is_again = resident.request, work.start < resident.request.recompute_until
        is_decode = work.start + work.num_new > resident.known_len
        state = State.DECODE if is_decode else State.RECOMPUTE if is_again else State.PREFILL
        if work.start == resident.swapped_at:
            state = State.SWAP_IN
        assert resident.ended or request.state is state, f"{request} is computing: {state}"
