"""Whether a run may be believed: each gate compares numbers and says which. A run that fails one is not valid.

A gate without its numbers is "not checked" and says what is missing; it never passes by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from steelyard.bench.record import ClientStats
from steelyard.bench.stats import quantile_of

Json = dict[str, Any]
Outcome = Literal["pass", "warn", "fail", "not checked"]

DELAY_LIMIT_MS = 10.0
RATE_LEAST = 0.98
LENGTH_TOLERANCE = 0.01
LITTLE_LIMIT = 0.05
LITTLE_LIMIT_MS = 2.0
TOKEN_RATIO_TOLERANCE = 0.02
FAILURE_LIMIT = 0.01
CPU_LIMIT = 0.9
LAG_LIMIT_MS = 10.0
COLD_HIT_LIMIT = 0.01
WALL_STEP_LIMIT_MS = 50.0


@dataclass(frozen=True, slots=True)
class Gate:
    """One judgement. `label` is what a failing one puts on the result."""

    name: str
    outcome: Outcome
    evidence: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What gates look at beside the summary. None: not known.

    floor_tpot_ms  the shortest time a token can take by the device's datasheet, from plan
    cache          "cold", or the share of prompt tokens that is declared to be cached
    instruments    settings of the server that slow it to watch it, by its own word
    """

    summary: Json
    open_loop: bool = False
    asked_rate: float | None = None
    achieved_rate: float | None = None
    schedule_rate: float | None = None
    declared_cached: float = 0.0
    num_repeated: int = 0
    prompt_ratio: float | None = None
    output_ratio: float | None = None
    usage_missing: int = 0
    floor_tpot_ms: float | None = None
    fastest_tpot_ms: float | None = None
    ignore_eos: bool = True
    clients: Sequence[ClientStats] = field(default_factory=tuple)
    selftest: Json | None = None
    in_flight_t: float | None = None
    warmed_up: bool | None = None
    early_ttft_ratio: float | None = None
    instruments: Sequence[str] | None = None


def judge(facts: Facts) -> list[Gate]:
    """Every gate, in order of what a reader should see first."""
    return [gate(facts) for gate in GATES]


def label_of(gates: Sequence[Gate]) -> str:
    """ "valid", or the labels of what failed, the worst first."""
    labels = list(dict.fromkeys(g.label for g in gates if g.outcome == "fail"))
    order = ("INVALID", "CLIENT-LIMITED")
    labels.sort(key=lambda label: order.index(label) if label in order else len(order))
    return ", ".join(labels) or "valid"


def as_json(gates: Sequence[Gate]) -> list[Json]:
    return [asdict(g) for g in gates]


def _whole(facts: Facts) -> Json:
    found: Json = facts.summary["windows"]["whole run"]
    return found


def _floor(facts: Facts) -> Gate:
    name = "physical floor"
    if facts.floor_tpot_ms is None or facts.fastest_tpot_ms is None:
        return Gate(name, "not checked", "needs --plan-model and --plan-device")
    floor, fastest = facts.floor_tpot_ms, facts.fastest_tpot_ms
    per_event = _whole(facts).get("tokens_per_event") or 1.0
    text = f"fastest TPOT {fastest:.3f} ms, floor {floor:.3f} ms (weights over peak bandwidth)"
    if fastest >= floor:
        return Gate(name, "pass", text)
    if per_event > 1.5:
        return Gate(name, "warn", f"{text}; {per_event:.1f} tokens an event: possible with speculation only")
    return Gate(name, "fail", f"{text}: no device can do this; the count of tokens or the clock is wrong", "INVALID")


def _delay(facts: Facts) -> Gate:
    name = "sent on time"
    delay = _whole(facts).get("delay_ms")
    if delay is None:
        return Gate(name, "not checked", "no request was sent")
    text = f"schedule delay median {delay['p50']:.1f} ms, p99 {delay['p99']:.1f} ms, limit {DELAY_LIMIT_MS:g} ms"
    if delay["p50"] > DELAY_LIMIT_MS:
        return Gate(name, "fail", text + ": latencies from send hide this wait", "CLIENT-LIMITED")
    return Gate(name, "warn" if delay["p99"] > DELAY_LIMIT_MS else "pass", text)


def _rate(facts: Facts) -> Gate:
    name = "rate achieved"
    if not facts.open_loop:
        return Gate(name, "pass", "closed loop: no rate was asked")
    asked, achieved = facts.asked_rate, facts.achieved_rate
    if not asked or achieved is None:
        return Gate(name, "not checked", "the asked or the achieved rate is not known")
    text = f"sent {achieved:.3f}/s of {asked:.3f}/s asked ({achieved / asked:.3f}, least {RATE_LEAST})"
    if achieved / asked < RATE_LEAST:
        return Gate(name, "fail", text, "CLIENT-LIMITED")
    return Gate(name, "pass", text)


def _offered(facts: Facts) -> Gate:
    name = "schedule"
    if not facts.open_loop or not facts.asked_rate or facts.schedule_rate is None:
        return Gate(name, "pass", "no rate was asked")
    ratio = facts.schedule_rate / facts.asked_rate
    text = f"the schedule offers {facts.schedule_rate:.3f}/s of {facts.asked_rate:.3f}/s asked"
    return Gate(name, "pass" if abs(ratio - 1) <= 0.01 else "fail", text, "INVALID")


def _client(facts: Facts) -> Gate:
    name = "client not busy"
    if not facts.clients:
        return Gate(name, "not checked", "the client's CPU and lag were not recorded")
    cpu = max(c.cpu_share for c in facts.clients)
    lags = sorted(lag / 1e6 for c in facts.clients for lag in c.lag_ns)
    p99 = quantile_of(lags, 0.99) if lags else 0.0
    text = f"CPU of the busiest process {cpu:.0%} (limit {CPU_LIMIT:.0%}), event loop late by {p99:.1f} ms at p99"
    if cpu > CPU_LIMIT:
        return Gate(name, "fail", text + ": use more --client-processes", "CLIENT-LIMITED")
    return Gate(name, "warn" if p99 > LAG_LIMIT_MS else "pass", text)


def _selftest(facts: Facts) -> Gate:
    name = "client self-test"
    test = facts.selftest
    if test is None:
        return Gate(name, "not checked", "no echo server was run before")
    text = (
        f"an echo server at {test['rate']:.0f} requests/s, {test['events_per_s']:.0f} events/s: gaps late by "
        f"{test['late_p99_ms']:.2f} ms at p99, CPU {test['cpu_share']:.0%}"
    )
    return Gate(name, "pass" if test["ok"] else "fail", text, "CLIENT-LIMITED")


def _ratio(name: str, ratio: float | None, what: str, both_ways: bool) -> Gate:
    if ratio is None:
        return Gate(name, "not checked", f"the server's usage has no {what} tokens")
    off = abs(ratio - 1.0) if both_ways else 1.0 - ratio
    text = f"{what} tokens {ratio:.4f} of those asked, tolerance {LENGTH_TOLERANCE:.0%}"
    return Gate(name, "pass" if off <= LENGTH_TOLERANCE else "fail", text, "INVALID")


def _prompt(facts: Facts) -> Gate:
    return _ratio("prompt length", facts.prompt_ratio, "prompt", True)


def _output(facts: Facts) -> Gate:
    if not facts.ignore_eos:
        return Gate("output length", "pass", "answers end by themselves: lengths are the model's")
    return _ratio("output length", facts.output_ratio, "completion", True)


def _usage(facts: Facts) -> Gate:
    missing = facts.usage_missing
    if missing:
        text = f"{missing} answers without usage: their tokens are counted by the client or not at all"
        return Gate("server counts", "warn", text)
    return Gate("server counts", "pass", "every answer had the server's usage")


def _failures(facts: Facts) -> Gate:
    total, failed = facts.summary["requests"], sum(facts.summary["failures"].values())
    share = failed / total if total else 1.0
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(facts.summary["failures"].items()))
    text = f"{failed} of {total} requests failed" + (f" ({kinds})" if kinds else "")
    outcome: Outcome = "fail" if share > FAILURE_LIMIT else "warn" if failed else "pass"
    return Gate("failures", outcome, text, "INVALID")


def _little(facts: Facts) -> Gate:
    steady = facts.summary["windows"].get("steady")
    own, gap_ms = facts.summary["little_generator"], facts.summary["little_generator_ms"]
    if own > LITTLE_LIMIT and gap_ms > LITTLE_LIMIT_MS:
        text = f"residual {own:.1%} over the whole run, {gap_ms:.1f} ms a request: records are missing"
        return Gate("Little's law", "fail", text, "INVALID")
    if steady is None:
        return Gate("Little's law", "warn", f"residual {own:.2%}; the run has no steady part of a fifth or more")
    residual = steady["little_residual"]
    text = f"residual {own:.2%} over the run, {residual:.2%} in the steady part, limit {LITTLE_LIMIT:.0%}"
    return Gate("Little's law", "warn" if residual > LITTLE_LIMIT else "pass", text)


def _tokens(facts: Facts) -> Gate:
    ratio = facts.summary.get("server", {}).get("token_ratio")
    if ratio is None:
        return Gate("token reconciliation", "not checked", "the server has no counter of generated tokens")
    text = f"the client received {ratio:.4f} of the tokens the server counted, tolerance {TOKEN_RATIO_TOLERANCE:.0%}"
    ok = abs(ratio - 1.0) <= TOKEN_RATIO_TOLERANCE
    return Gate("token reconciliation", "pass" if ok else "fail", text, "INVALID")


def _cache(facts: Facts) -> Gate:
    """Cold prompts must not hit; a declared share of hits must be there."""
    name = "prefix cache"
    if facts.num_repeated:
        text = f"{facts.num_repeated} prompts begin as another one does, with no sharing declared"
        return Gate(name, "fail", text, "INVALID")
    whole = _whole(facts)
    cached, computed = whole["input_cached_tokens_per_s"], whole["input_computed_tokens_per_s"]
    if cached is None or computed is None:
        rate = facts.summary.get("server", {}).get("prefix_hit_rate")
        if rate is None:
            return Gate(name, "not checked", "neither usage nor counters say what was cached")
    else:
        rate = cached / (cached + computed) if cached + computed else 0.0
    text = f"{rate:.1%} of prompt tokens came from the cache, at most {facts.declared_cached:.1%} declared"
    if rate > facts.declared_cached + COLD_HIT_LIMIT:
        return Gate(name, "fail", text, "INVALID")
    low = facts.declared_cached > 0 and rate < 0.5 * facts.declared_cached
    return Gate(name, "warn" if low else "pass", text)


def _chunks(facts: Facts) -> Gate:
    whole = _whole(facts)
    each = whole["tokens_per_event"]
    if each is None:
        return Gate("chunk is not token", "not checked", "no events")
    text = f"{each:.3f} tokens an event, counts {whole['token_counts']}"
    unclear = each > 1.05 or whole["token_counts"] == "estimated"
    return Gate("chunk is not token", "warn" if unclear else "pass", text)


def _samples(facts: Facts) -> Gate:
    ttft = _whole(facts)["latency_ms"]["service"]["ttft"]
    n = 0 if ttft is None else ttft["n"]
    text = f"{n} requests; a p99 as pass or fail needs 459, a p95 90 (99 % confidence)"
    return Gate("sample size", "pass" if n >= 459 else "warn", text)


def _warm(facts: Facts) -> Gate:
    if facts.warmed_up is None:
        return Gate("warm-up", "not checked", "no warm-up was run")
    ratio = facts.early_ttft_ratio
    text = "token times had settled" if facts.warmed_up else "token times still moved by over 2 % when it ended"
    if ratio is not None:
        text += f"; first tenth's time to first token is {ratio:.2f} of the rest's"
    bad = not facts.warmed_up or (ratio is not None and ratio > 1.5)
    return Gate("warm-up", "warn" if bad else "pass", text)


def _growth(facts: Facts) -> Gate:
    if not facts.open_loop or facts.in_flight_t is None:
        return Gate("stationary", "pass", "closed loop")
    text = f"slope of in-flight has t = {facts.in_flight_t:.1f}"
    if facts.in_flight_t > 12.0:
        return Gate("stationary", "warn", text + ": more comes than leaves, latencies depend on the run's length")
    return Gate("stationary", "pass", text)


def _wall(facts: Facts) -> Gate:
    if not facts.clients:
        return Gate("clocks", "not checked", "not recorded")
    step = max(abs(c.wall_step_ns) for c in facts.clients) / 1e6
    text = f"wall clock moved {step:.1f} ms against the monotonic clock"
    return Gate("clocks", "warn" if step > WALL_STEP_LIMIT_MS else "pass", text)


def _instruments(facts: Facts) -> Gate:
    """Checks, profilers and request logs cost time in one server and not in the next."""
    name = "instruments"
    if facts.instruments is None:
        return Gate(name, "not checked", "the server does not say what it runs with")
    if facts.instruments:
        return Gate(
            name, "fail", f"the server ran with {', '.join(facts.instruments)} on: it is slower for it", "INVALID"
        )
    return Gate(name, "pass", "the server ran without checks, profiler and request log")


GATES: tuple[Callable[[Facts], Gate], ...] = (
    _floor,
    _failures,
    _delay,
    _rate,
    _offered,
    _client,
    _selftest,
    _prompt,
    _output,
    _usage,
    _tokens,
    _little,
    _cache,
    _warm,
    _growth,
    _chunks,
    _samples,
    _wall,
    _instruments,
)
