"""One measured run against one server: look at it, warm up, send, look again, sum up, judge. Speaks HTTP only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from steelyard.bench.arrivals import Arrivals, Schedule, make_schedule
from steelyard.bench.clients import RunClock, Sent, Server, send
from steelyard.bench.gates import Facts, as_json, judge, label_of
from steelyard.bench.http import HttpClient
from steelyard.bench.load import OnProgress
from steelyard.bench.record import RequestRecord, Slo
from steelyard.bench.scrape import Scraper, ServerSide, instruments_of
from steelyard.bench.server_facts import server_facts
from steelyard.bench.stats import slope
from steelyard.bench.summary import Json, summarise
from steelyard.bench.workload import PlannedRequest, digest, num_repeated
from steelyard.core.environment import environment
from steelyard.errors import InvalidRequest

SCHEMA = "steelyard.bench/1"
_WARM_ROUNDS = 4
_SETTLED = 0.02


@dataclass(frozen=True, slots=True)
class Work:
    """What one run sends. `warmup` is disjoint from what is measured and has every shape of it."""

    requests: Sequence[PlannedRequest]
    schedule: Schedule
    arrivals: Arrivals
    warmup: Sequence[PlannedRequest] = ()
    seed: int = 0
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is made and judged. `floor_tpot_ms` None: the physical floor is not checked."""

    slo: Slo = field(default_factory=Slo)
    processes: int = 1
    scrape_interval_s: float = 0.5
    floor_tpot_ms: float | None = None
    selftest: Json | None = None
    command: str = ""
    name: str = ""


@dataclass(slots=True)
class RunResult:
    """The report as JSON values, and every record behind it. `stopped`: of a run that was cancelled before its end."""

    report: Json
    records: list[RequestRecord]
    stopped: bool = False

    @property
    def valid(self) -> bool:
        return bool(self.report["valid"])


async def run_session(
    server: Server, work: Work, options: RunOptions, on_progress: OnProgress = lambda progress: None
) -> RunResult:
    """Raises InvalidRequest if the server does not answer at all or refuses the first warm-up request.

    Cancelled while it measures, it returns what has ended, with the rest as dropped; if none has: CancelledError.
    """
    settled = await warm_up(server, work) if work.warmup else None
    start_wall_ns = time.time_ns() + round((2.5 if options.processes > 1 else 1.0) * 1e9)
    clock = RunClock(start_wall_ns)
    client = HttpClient(server.base_url, clock, server.api_key)
    scraper = Scraper(client, clock, options.scrape_interval_s)
    before = environment()
    try:
        await scraper.start()
        sent = await send(
            server,
            work.arrivals,
            work.requests,
            work.schedule,
            processes=options.processes,
            start_wall_ns=start_wall_ns,
            on_progress=on_progress,
        )
        if not any(r.ok for r in sent.records):
            sent.whole()
        side = await scraper.stop()
        facts = await server_facts(client, side.after)
    finally:
        client.close()
    report = make_report(sent, side, work, options, settled)
    report["environment"] = before | {"gpus_after": environment()["gpus"]}
    report["server_facts"] = facts
    report["request"] = {"base_url": server.base_url, **_shape(server)}
    report["started_unix_s"] = start_wall_ns / 1e9
    return RunResult(report, sent.records, sent.stopped)


def _shape(server: Server) -> Json:
    shape = server.shape
    named = {"model": shape.model, "endpoint": shape.endpoint, "ignore_eos": shape.ignore_eos}
    return named | {"extra": dict(shape.extra)}


def make_report(sent: Sent, side: ServerSide, work: Work, options: RunOptions, settled: bool | None) -> Json:
    """Sum up and judge: everything that needs no server any more."""
    summary = summarise(sent.records, options.slo, sent.in_flight, side)
    facts = facts_of(sent, work, options, summary, settled)
    gates = judge(replace(facts, instruments=instruments_of(side.after)))
    label = label_of(gates)
    arrivals, schedule = work.arrivals, work.schedule
    return {
        "schema": SCHEMA,
        "name": options.name,
        "command": options.command,
        "valid": label == "valid",
        "label": label,
        "gates": as_json(gates),
        "workload": {
            "digest": digest(work.requests),
            "requests": len(work.requests),
            "mean_input_len": fmean(len(r.prompt_ids) for r in work.requests),
            "mean_output_len": fmean(r.output_len for r in work.requests),
            "declared_cached": declared_cached(work.requests),
            "cache_state": "cold" if not declared_cached(work.requests) else "primed",
            "seed": work.seed,
            "nonce": work.nonce,
        },
        "arrivals": {
            "process": arrivals.process,
            "rate": arrivals.rate,
            "burstiness": arrivals.burstiness,
            "max_concurrency": arrivals.concurrency,
            "ramp_s": arrivals.ramp_s,
            "schedule_digest": schedule.digest,
            "schedule_rate": schedule.rate,
            "schedule_cv": schedule.cv,
        },
        "client": {
            "processes": len(sent.stats),
            "cpu_share": max((s.cpu_share for s in sent.stats), default=None),
            "selftest": options.selftest,
        },
        "floor_tpot_ms": options.floor_tpot_ms,
        "summary": summary,
    }


def declared_cached(requests: Sequence[PlannedRequest]) -> float:
    """Share of prompt tokens that the plan itself says are shared."""
    total = sum(len(r.prompt_ids) for r in requests)
    return sum(r.shared_len for r in requests) / total if total else 0.0


def facts_of(sent: Sent, work: Work, options: RunOptions, summary: Json, settled: bool | None) -> Facts:
    """What the gates compare."""
    good = [r for r in sent.records if r.ok]
    prompts = [r for r in good if r.usage.prompt_tokens is not None]
    outputs = [r for r in good if r.num_tokens is not None]
    fastest = [t for r in good if (t := r.tpot_ns()) is not None and (r.num_tokens or 0) >= 8]
    last_send_s = max((r.send_ns for r in sent.records if r.send_ns is not None), default=0) / 1e9
    begin_s = summary["windows"]["whole run"]["start_s"]
    growth = [point for point in summary["in_flight"] if point[0] + begin_s <= last_send_s]
    return Facts(
        summary=summary,
        open_loop=work.arrivals.open,
        asked_rate=work.arrivals.rate,
        achieved_rate=achieved_rate(sent.records),
        schedule_rate=work.schedule.rate,
        declared_cached=1.0 if any(r.group == "trace" for r in work.requests) else declared_cached(work.requests),
        num_repeated=num_repeated(work.requests),
        prompt_ratio=_ratio([(r.usage.prompt_tokens or 0, r.asked_prompt_tokens) for r in prompts]),
        output_ratio=_ratio([(r.num_tokens or 0, r.asked_output_tokens) for r in outputs]),
        usage_missing=sum(r.usage.completion_tokens is None for r in good),
        floor_tpot_ms=options.floor_tpot_ms,
        fastest_tpot_ms=min(fastest) / 1e6 if fastest else None,
        ignore_eos=all(r.ignore_eos for r in sent.records),
        clients=tuple(sent.stats),
        selftest=options.selftest,
        in_flight_t=slope(growth)[1] if work.arrivals.open else None,
        warmed_up=settled,
        early_ttft_ratio=_early(good),
    )


def achieved_rate(records: Sequence[RequestRecord]) -> float | None:
    """Sends a second: what the server really received, gaps from the run's start counted as the schedule counts."""
    sends = [r.send_ns for r in records if r.send_ns is not None]
    last = max(sends, default=0)
    return len(sends) / (last / 1e9) if last > 0 else None


def _ratio(pairs: Sequence[tuple[int, int]]) -> float | None:
    """Mean of got over asked; None without any."""
    return fmean(got / asked for got, asked in pairs) if pairs else None


def _early(good: Sequence[RequestRecord]) -> float | None:
    """Median time to first token of the first tenth over that of the rest; None for too few requests."""
    ordered = sorted((r for r in good if r.events and not r.opening), key=lambda r: r.sched_ns)
    tenth = len(ordered) // 10
    if tenth < 5:
        return None
    first, rest = ([r.ttft_ns() or 0 for r in part] for part in (ordered[:tenth], ordered[tenth:]))
    return median(first) / max(median(rest), 1)


async def warm_up(server: Server, work: Work) -> bool:
    """Rounds of the warm-up requests until their token times settle; returns whether they did.

    Raises InvalidRequest with the server's own words if every request of a round fails: nothing can be measured then.
    """
    before: float | None = None
    slots = min(work.arrivals.concurrency or 16, len(work.warmup))
    arrivals = Arrivals("closed", concurrency=slots)
    size = -(-len(work.warmup) // _WARM_ROUNDS)
    for number in range(_WARM_ROUNDS):
        part = work.warmup[number * size : (number + 1) * size]
        if not part:
            break
        sent = (await send(server, arrivals, part, make_schedule(arrivals, len(part), 0))).whole()
        good = [r for r in sent.records if r.ok]
        if not good:
            first = sent.records[0]
            raise InvalidRequest(f"{server.base_url}: the warm-up failed ({first.failure}: {first.detail})")
        times = [t for r in good if (t := r.tpot_ns()) is not None]
        now = median(times) if times else None
        if before is not None and now is not None and abs(now - before) <= _SETTLED * before:
            return True
        before = now
        await asyncio.sleep(0)
    return False


def single(arrivals: Arrivals, requests: Sequence[PlannedRequest], **fields: Any) -> Work:
    """Work whose schedule follows from its arrivals."""
    seed = int(fields.get("seed", 0))
    return Work(requests, make_schedule(arrivals, len(requests), seed), arrivals, **fields)
