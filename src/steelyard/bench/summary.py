"""From records to the numbers of a report: per window, per clock, plain JSON values. Judges nothing (see gates.py).

Latencies are those of requests scheduled in the window that succeeded; a timeout counts with the time it was given
(censored), so that the slowest are not deleted. Shares are of all requests scheduled. Tokens count when they came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from steelyard.bench.record import Clock, RequestRecord, Slo
from steelyard.bench.scrape import ServerSide, mean_of
from steelyard.bench.stats import quantile, quantile_of, share_lower
from steelyard.bench.windows import Curve, Window, cells, in_flight, little, steady, whole_run

Json = dict[str, Any]
_CURVE = (*(i / 20 for i in range(20)), 0.97, 0.99, 1.0)
ESTIMATOR = "linear interpolation between order statistics; 95 % intervals from order statistics"


def describe(values: Iterable[float], scale: float = 1e6) -> Json | None:
    """n, mean, p50, p95, p99 (each with its interval and whether n supports it), max, and a curve of quantiles.

    None without values.
    """
    ordered = sorted(v / scale for v in values)
    if not ordered:
        return None
    found: Json = {"n": len(ordered), "mean": fmean(ordered), "max": ordered[-1], "min": ordered[0]}
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        at = quantile(ordered, q)
        found[name] = at.value
        found[name + "_interval"] = [at.low, at.high]
        found[name + "_quotable"] = at.quotable
    found["curve"] = [[q, quantile_of(ordered, q)] for q in _CURVE]
    return found


def summarise(
    records: Sequence[RequestRecord], slo: Slo, curve: Curve | None = None, server: ServerSide | None = None
) -> Json:
    """Every window of a run and of each group, failures, series. `curve`: the generator's own in-flight count."""
    counted = curve if curve is not None else in_flight(records)
    whole = whole_run(records)
    own = little(records, counted, whole)
    windows = [whole] + ([part] if (part := steady(counted, whole)) else [])
    groups = sorted({r.group for r in records})
    found: Json = {
        "estimator": ESTIMATOR,
        "requests": len(records),
        "failures": dict(Counter(r.failure for r in records if r.failure is not None)),
        "failure_details": sorted({r.detail for r in records if r.failure is not None})[:5],
        "wrong_length": sum(wrong_length(r) for r in records),
        "slo": {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "e2e_ms": slo.e2e_ms},
        "windows": {w.name: _window(records, counted, w, slo) for w in windows},
        "little_generator": own.residual,
        "little_generator_ms": own.gap_ms,
        "in_flight": cells(counted, whole),
    }
    if len(groups) > 1:
        each = {g: [r for r in records if r.group == g] for g in groups}
        found["groups"] = {g: _window(rs, in_flight(rs), whole_run(rs), slo) for g, rs in each.items()}
    opening = [r for r in records if r.opening]
    if opening:
        rest = [r for r in records if not r.opening]
        found["opening_wave"] = {
            "ttft_ms": describe(_present(r.ttft_ns() for r in opening if r.ok)),
            "others_ttft_ms": describe(_present(r.ttft_ns() for r in rest if r.ok)),
        }
    if server is not None and server.seen:
        found["server"] = server_side(server, records, whole)
    return found


def wrong_length(record: RequestRecord) -> bool:
    """A success that made another number of tokens than asked for although it should have ignored the end of text."""
    n = record.num_tokens
    return record.ok and record.ignore_eos and n is not None and n != record.asked_output_tokens


def _present(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _window(records: Sequence[RequestRecord], curve: Curve, window: Window, slo: Slo) -> Json:
    mine = [r for r in records if window.has(r.start_ns(Clock.SERVICE))] if window.name == "steady" else list(records)
    good = [r for r in mine if r.ok]
    seconds = window.seconds
    balance = little(records, curve, window)
    clock = Clock.USER
    met = sum(slo.met(r, clock) for r in mine)
    found: Json = {
        "seconds": seconds,
        "start_s": window.start_ns / 1e9,
        "scheduled": len(mine),
        "ok": len(good),
        "request_rate": sum(r.ok and r.done_ns is not None and _ended_in(r, window) for r in records) / seconds,
        "mean_in_flight": balance.mean_in_flight,
        "little_residual": balance.residual,
        "latency_ms": {c.value: _latencies(mine, c) for c in Clock},
        **_tokens(records, window),
    }
    found |= _gaps(good)
    if slo.asked and mine:
        tokens = sum(r.num_tokens or 0 for r in mine if slo.met(r, clock))
        found["attainment"] = met / len(mine)
        found["attainment_lower"] = share_lower(met, len(mine))
        found["goodput_requests_per_s"] = met / seconds
        found["goodput_tokens_per_s"] = tokens / seconds
    return found


def _ended_in(record: RequestRecord, window: Window) -> bool:
    return bool(record.events) and window.has(record.events[-1].t_ns)


def _latencies(records: Sequence[RequestRecord], clock: Clock) -> Json:
    """By name. E2E holds timeouts too, at the time they were given: `censored` says how many."""
    good = [r for r in records if r.ok]
    late = [r for r in records if r.failure == "timeout" and r.done_ns is not None]
    censored = [float((r.done_ns or 0) - r.start_ns(clock)) for r in late]
    return {
        "ttft": describe(_present(r.ttft_ns(clock) for r in good)),
        "ttfo": describe(_present(r.ttfo_ns(clock) for r in good)) if _reasons(good) else None,
        "e2e": describe(_present(r.e2e_ns(clock) for r in good) + censored),
        "ntpot": describe(_present(r.ntpot_ns(clock) for r in good)),
        "censored": len(censored),
    }


def _reasons(records: Sequence[RequestRecord]) -> bool:
    return any(e.channel == "reasoning" for r in records for e in r.events)


def _gaps(good: Sequence[RequestRecord]) -> Json:
    """TPOT over requests, ITL over tokens, ICL over events, the longest stall of each request, tokens an event."""
    events = sum(len(r.events) for r in good)
    tokens = sum(sum(r.tokens_by_event()) for r in good if r.events)
    weighted = [(r.tpot_ns(), (r.num_tokens or 1) - 1) for r in good]
    whole = sum((t or 0.0) * n for t, n in weighted if t is not None)
    count = sum(n for t, n in weighted if t is not None)
    return {
        "tpot_ms": describe(_present(r.tpot_ns() for r in good)),
        "tpot_token_weighted_ms": whole / count / 1e6 if count else None,
        "itl_ms": describe(gap for r in good for gap in r.itl_ns()),
        "icl_ms": describe(float(gap) for r in good for gap in r.icl_ns()),
        "max_stall_ms": describe(float(max(gaps)) for r in good if (gaps := r.icl_ns())),
        "tokens_per_event": tokens / events if events else None,
        "token_counts": "from the server" if all(r.counts_known for r in good) else "estimated",
        "delay_ms": describe(float(d) for r in good if (d := r.delay_ns) is not None),
    }


def _tokens(records: Sequence[RequestRecord], window: Window) -> Json:
    """Tokens a second: prompts whose first token came in the window, output whose events came in it."""
    computed = cached = output = 0
    known = True
    for record in records:
        if not record.events:
            continue
        if window.has(record.events[0].t_ns):
            prompt, hit = record.usage.prompt_tokens, record.usage.cached_tokens
            known = known and hit is not None
            cached += hit or 0
            computed += (prompt if prompt is not None else record.asked_prompt_tokens) - (hit or 0)
        for event, count in zip(record.events, record.tokens_by_event()):
            output += count if window.has(event.t_ns) else 0
    seconds = window.seconds
    return {
        "input_tokens_per_s": (computed + cached) / seconds,
        "input_computed_tokens_per_s": computed / seconds if known else None,
        "input_cached_tokens_per_s": cached / seconds if known else None,
        "output_tokens_per_s": output / seconds,
    }


def server_side(server: ServerSide, records: Sequence[RequestRecord], window: Window) -> Json:
    """What the server said over the same run. A name it does not have is None, and listed as absent."""
    gauges = {word: [(t, v) for t, v in server.series(word) if window.has(t)] for word in _GAUGES}
    found: Json = {word: _gauge(points) for word, points in gauges.items()}
    found |= {word: server.delta(word) for word in _COUNTERS}
    found["absent"] = [word for word in (*_GAUGES, *_COUNTERS) if found[word] is None]
    found["series"] = {word: [((t - window.start_ns) / 1e9, v) for t, v in points] for word, points in gauges.items()}
    generated = found["generation_tokens"]
    mine = sum(r.num_tokens or sum(r.tokens_by_event()) for r in records if r.events)
    found["token_ratio"] = mine / generated if generated else None
    queries, hits = found["prefix_queries"], found["prefix_hits"]
    found["prefix_hit_rate"] = hits / queries if queries and hits is not None else None
    found["time_by_state_s"] = server.label_deltas("steelyard:request_time_seconds_total", "state")
    return found


_GAUGES = ("running", "waiting", "kv_usage", "kv_slack_tokens", "kv_blocks_peak", "kv_largest_run")
_COUNTERS = (
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
    "queue_s",
    "prefill_s",
    "decode_s",
    "requests_ended",
    "recomputed_tokens",
    "overshoot_tokens",
    "steps",
    "device_s",
    "step_tokens",
    "padded_tokens",
    "held_slots",
    "kv_fragmented",
)


def _gauge(points: Sequence[tuple[int, float]]) -> Json | None:
    if not points:
        return None
    return {"mean": mean_of(points), "max": max(v for _, v in points), "n": len(points)}
