"""The engine's state as messages, answers and dumps. Reads; changes nothing."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steelyard.core.request import Emitted, Request
from steelyard.core.step import TokenLogprobs
from steelyard.engine.weighing import LEDGER_TOPICS, ledger_answer
from steelyard.ledger.accounts import Account
from steelyard.wire.messages import Delta, Finished, Logprob, Ready, Status, Usage

if TYPE_CHECKING:
    from steelyard.engine.engine import Engine

MAX_DUMPED = 50
"""Requests in a dump; the log must stay readable."""


def ready(engine: Engine) -> Ready:
    caps, scheduler, options = engine.runner.caps, engine.scheduler, engine.options
    return Ready(
        model=options.model,
        fingerprint=caps.fingerprint,
        kv_layout=caps.kv_layout,
        block_size=caps.block_size,
        num_blocks=list(caps.num_blocks),
        max_model_len=caps.max_model_len,
        max_request_tokens=min(caps.max_model_len, scheduler.bound.tokens + 1),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        vocab_size=caps.vocab_size,
        enable_prefix_caching=engine.cache.enable_prefix_caching,
        config=options.config,
    )


def status(engine: Engine) -> Status:
    scheduler, usage = engine.scheduler, engine.cache.usage()
    counters = scheduler.counters.as_dict() | _work(engine)
    stalled_ns = engine.stalled_ns(engine.clock_ns())
    detail = f"broken invariant, draining: {engine.broken}" if engine.broken else ""
    if stalled_ns and not detail:
        detail = f"{scheduler.num_running} running and {scheduler.num_waiting} waiting requests"
    return Status(
        steps=counters["steps"],
        running=scheduler.num_running,
        waiting=scheduler.num_waiting,
        waiting_by_reason=scheduler.waiting_by_reason(),
        blocks_total=usage.total,
        blocks_free=usage.free,
        blocks_cached=usage.cached,
        blocks_active=usage.active,
        counters=counters,
        busy=engine.has_work,
        stalled_ns=stalled_ns,
        detail=detail,
        gauges={
            "kv_slack_tokens": usage.slack_tokens,
            "kv_blocks_peak": engine.cache.most_active(),
            "kv_largest_run": engine.cache.largest_run(),
            **{f"host_blocks_{state}": num for state, num in asdict(engine.cache.host.usage()).items()},
        },
    )


def _work(engine: Engine) -> dict[str, int]:
    """What steps computed and what was lost beside it, as counters."""
    totals = engine.ledgers.book.totals
    return {
        "step_device_ns": totals.device_ns,
        "step_tokens": totals.num_tokens,
        "padded_tokens": engine.ledgers.padded_tokens,
        "held_slots": engine.scheduler.held_slots,
        "kv_fragmented": engine.cache.num_fragmented(),
        "host_blocks_out": engine.cache.host.num_out,
        "host_blocks_in": engine.cache.host.num_in,
    }


def delta(event: Emitted) -> Delta:
    request, logprobs = event.request, event.logprobs
    return Delta(request.id, request.index, list(event.ids), None if logprobs is None else as_logprobs(logprobs))


def finished(request: Request, account: Account | None) -> Finished:
    """A choice's end, with its ledger as it stands: the buckets sum to the time since it was submitted."""
    assert request.reason is not None, f"{request} has not ended"
    return Finished(
        id=request.id,
        index=request.index,
        reason=request.reason.value,
        usage=Usage(
            prompt_tokens=request.prompt_len,
            completion_tokens=request.num_generated,
            cached_tokens=request.cached_tokens,
            recomputed_tokens=request.num_recomputed,
            preemptions=request.num_preemptions,
            overshoot_tokens=request.num_overshoot,
            shared_tokens=account.shared_tokens if account is not None else 0,
            computed_tokens=account.computed_tokens if account is not None else 0,
            lost_tokens=account.tokens()["lost"] if account is not None else 0,
            drafted_tokens=request.num_drafted,
            accepted_tokens=request.num_accepted,
        ),
        ledger={state.value: amount_ns for state, amount_ns in request.buckets_ns.items()},
        stop_token=request.stop_token,
        message=request.detail,
        prompt_logprobs=None if request.sampling.prompt_logprobs is None else as_logprobs(request.prompt_logprobs),
        cost_ns=account.cost_ns if account is not None else 0,
        pooled=array("f", request.vector()).tobytes() if request.pooling else b"",
    )


def as_logprobs(values: Sequence[TokenLogprobs]) -> list[Logprob]:
    return [Logprob(value.logprob, list(value.top)) for value in values]


def answer(engine: Engine, what: str) -> Any:
    """Plain values that msgpack carries."""
    topic, _, argument = what.partition(" ")
    if topic in LEDGER_TOPICS:
        return ledger_answer(engine, engine.ledgers, topic, argument)
    match what:
        case "stats":
            return stats(engine)
        case "config":
            return engine.options.config
        case "check":
            return {"ok": engine.check(), "broken": engine.broken}
    return {"error": f"no such question: {what!r}; ask stats, config, check, {', '.join(LEDGER_TOPICS)}"}


def stats(engine: Engine) -> dict[str, Any]:
    scheduler = engine.scheduler
    return {
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "waiting_by_reason": scheduler.waiting_by_reason(),
        "in_flight": scheduler.in_flight,
        "draining": engine.draining,
        "broken": engine.broken,
        "stalled_ns": engine.stalled_ns(engine.clock_ns()),
        "counters": scheduler.counters.as_dict(),
        "cache": asdict(engine.cache.usage()),
    }


def dump(engine: Engine) -> str:
    """All that helps to understand a fault, as JSON of a few lines. Never raises: the books may be in any state."""
    lines: list[str] = []
    for name, read in (
        ("stats", lambda: json.dumps(stats(engine))),
        ("config", lambda: json.dumps(engine.options.config)),
    ):
        try:
            lines.append(f"{name} {read()}")
        except Exception as error:
            lines.append(f"{name} cannot be read: {error!r}")
    requests = list(engine.live_requests())
    lines += [
        f"{request!r}, row {request.row}, {request.num_preemptions} preemptions" for request in requests[:MAX_DUMPED]
    ]
    if len(requests) > MAX_DUMPED:
        lines.append(f"and {len(requests) - MAX_DUMPED} more")
    return "\n".join(lines)
