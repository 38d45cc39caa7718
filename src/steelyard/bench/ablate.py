"""One change at a time: in which order runs go, what their difference is made of, and why it may not be believed.

Arms run interleaved (A B A B ...), each pair with one seed, so that drift of the machine is in both members of a pair.
The difference of mean request time is split by the accounts of the server's ledger; what they do not hold is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from steelyard.bench.arms import Knob
from steelyard.bench.expect import Expected
from steelyard.bench.repeats import LEAST_PAIRS, Paired, paired
from steelyard.core.verdict import Verdict

Json = dict[str, Any]

ACCOUNTS: Mapping[str, tuple[str, ...]] = {
    "queueing": ("wait_step_boundary", "wait_slot", "wait_budget", "wait_policy", "wait_grammar"),
    "fragmentation and KV capacity": ("wait_kv",),
    "prefill (compute)": ("prefill",),
    "decode (memory traffic)": ("decode",),
    "preemption": ("preempted", "recompute", "swap_out", "swapped", "swap_in"),
    "launch and scheduling": ("engine_gap", "resident_unscheduled", "overshoot"),
    "edge": ("http_read", "auth", "tokenize", "wire", "detokenize", "stream", "client_slow"),
}
"""What a reader asks for, and the states of a request's ledger that make it up."""

METRICS: Mapping[str, tuple[str, ...]] = {
    "output tokens/s": ("output_tokens_per_s",),
    "TTFT p50, ms": ("latency_ms", "service", "ttft", "p50"),
    "TPOT p50, ms": ("tpot_ms", "p50"),
    "ICL p99, ms": ("icl_ms", "p99"),
    "E2E mean, ms": ("latency_ms", "service", "e2e", "mean"),
}


def interleaved(pairs: int, arms: str = "AB") -> Iterator[tuple[int, str]]:
    """(pair, arm): A B B A ..., the order turning, so that no arm is always the warmer one."""
    for pair in range(pairs):
        for arm in arms if pair % 2 == 0 else reversed(arms):
            yield pair, arm


SPENT: Mapping[str, tuple[str, float]] = {
    "positions computed an output token": ("step_tokens", 1.0),
    "positions of padding an output token": ("padded_tokens", 1.0),
    "device time an output token, ms": ("device_s", 1e3),
    "steps an output token": ("steps", 1.0),
    "slots held empty an output token": ("held_slots", 1.0),
}
"""What the server's counters say was spent, over the tokens it generated: counter, and a factor."""
LEVELS: Mapping[str, tuple[str, str]] = {
    "running, mean": ("running", "mean"),
    "waiting, mean": ("waiting", "mean"),
    "share of KV in use, most": ("kv_usage", "max"),
    "slots reserved or unfilled, mean": ("kv_slack_tokens", "mean"),
}
TOTALS: Mapping[str, str] = {
    "allocations refused though blocks were free": "kv_fragmented",
    "preemptions": "preemptions",
    "positions computed again": "recomputed_tokens",
}


def spent(report: Json) -> dict[str, float]:
    """Titles of SPENT, LEVELS and TOTALS that the server said, with their values."""
    server = report["summary"].get("server") or {}
    generated = server.get("generation_tokens")
    found = {}
    for title, (word, factor) in SPENT.items():
        if generated and server.get(word) is not None:
            found[title] = factor * server[word] / generated
    for title, (word, part) in LEVELS.items():
        if server.get(word) is not None:
            found[title] = server[word][part]
    return found | {title: server[word] for title, word in TOTALS.items() if server.get(word) is not None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms of one knob. `void`: why the difference may not be quoted; empty: it may.

    spent    what the server's counters say of each arm, means over runs
    quality  of B's answers against A's; None: of a step in a set, which has them by arm
    """

    knob: str
    title: str
    moves: str
    metrics: Mapping[str, Paired]
    values: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    attribution: Mapping[str, float]
    residual_ms: float | None
    void: tuple[str, ...]
    spent: Mapping[str, tuple[float, float]]
    expected: Expected | None = None
    quality: Verdict | None = None

    @property
    def decides(self) -> bool:
        """Whether any of its differences is decided and may be quoted."""
        return not self.void and any(p.decided for p in self.metrics.values())


def compare(knob: Knob, a: Sequence[Json], b: Sequence[Json]) -> Comparison:
    """Reports of the arms, pair by pair."""
    metrics, values = {}, {}
    for title, path in METRICS.items():
        pairs = [(at_path(x, path), at_path(y, path)) for x, y in zip(a, b)]
        known = [(x, y) for x, y in pairs if x and y]  # a figure of 0 is of a run in which nothing ended
        if known:
            left, right = [x for x, _ in known], [y for _, y in known]
            metrics[title], values[title] = paired(left, right), (tuple(left), tuple(right))
    parts, residual = attribute(a, b)
    title = f"{knob.name}: A {' '.join(knob.a) or '(as it is)'}, B {' '.join(knob.b) or '(as it is)'}"
    void, used = tuple(_void(knob, a, b)), _means(a, b)
    return Comparison(knob.name, title, knob.moves, metrics, values, parts, residual, void, used)


def _means(a: Sequence[Json], b: Sequence[Json]) -> dict[str, tuple[float, float]]:
    """Of what both arms said in every run."""
    before, after = [spent(r) for r in a], [spent(r) for r in b]
    known = [t for t in (before[0] if before else ()) if all(t in x for x in (*before, *after))]
    return {t: (fmean(x[t] for x in before), fmean(x[t] for x in after)) for t in known}


def attribute(a: Sequence[Json], b: Sequence[Json]) -> tuple[dict[str, float], float | None]:
    """Milliseconds a request that each account grew by from A to B, and what of the client's E2E is in none of them.

    ({}, None) where a server keeps no ledger: a foreign one shows queue, prefill and decode at most.
    """
    before, after = [accounts(r) for r in a], [accounts(r) for r in b]
    if not all(before) or not all(after):
        return {}, None
    parts = {name: fmean(x[name] for x in after) - fmean(x[name] for x in before) for name in ACCOUNTS}
    path = METRICS["E2E mean, ms"]
    wholes = [fmean(v for r in arm if (v := at_path(r, path)) is not None) for arm in (a, b)]
    return parts, wholes[1] - wholes[0] - sum(parts.values())


def accounts(report: Json) -> dict[str, float]:
    """Milliseconds a request in each account; empty if the server has no ledger of states."""
    server = report["summary"].get("server") or {}
    states, ended = server.get("time_by_state_s"), server.get("requests_ended")
    if not states or not ended:
        return {}
    return {name: 1e3 * sum(states.get(s, 0.0) for s in own) / ended for name, own in ACCOUNTS.items()}


def _void(knob: Knob, a: Sequence[Json], b: Sequence[Json]) -> Iterator[str]:
    invalid = [r["label"] for r in (*a, *b) if not r["valid"]]
    if invalid:
        yield f"{len(invalid)} runs are not valid ({', '.join(sorted(set(invalid)))})"
    if knob.name == "prefix-caching" and not any(map(_shares, b)):
        yield "no prompt shared its beginning with another, so no cache could find any: give --shared-prefix 256"
    digests = {(x["workload"]["digest"], y["workload"]["digest"]) for x, y in zip(a, b)}
    if any(x != y for x, y in digests):
        yield "the arms did not do the same work: their workload hashes differ"
    if len(a) < LEAST_PAIRS:
        yield f"{len(a)} pair{'s'[len(a) == 1 :]}: at least {LEAST_PAIRS} are needed to say anything of noise"
    said = [tuple(_config(r) for r in arm) for arm in (a, b)]
    changed = {k for x, y in zip(*said) for k in x.keys() | y.keys() if x.get(k) != y.get(k)}
    if not any(any(config) for config in said):
        yield f"the server does not report its settings, so {knob.name} is not shown to have taken effect"
    elif knob.read_back and knob.read_back not in changed:
        yield f"{knob.read_back} reads the same in both arms: the flag had no effect"
    others = changed - {knob.read_back, "num_blocks", "num_gpu_blocks", *knob.follows}
    if others:
        yield f"more than the knob changed: {', '.join(sorted(others))}"


def _shares(report: Json) -> bool:
    """Whether prompts of a run shared a prefix by its plan, or a cache found one."""
    server = report["summary"].get("server") or {}
    return report["workload"].get("declared_cached", 0.0) > 0.0 or (server.get("prefix_hits") or 0) > 0


def _config(report: Json) -> Json:
    """What the server says it runs with. The KV layout ends in the block size, which has a name of its own."""
    found = dict(report.get("server_facts", {}).get("config", {}))
    if "kv_layout" in found:
        found["kv_layout"] = str(found["kv_layout"]).rpartition("/")[0]
    return found


def at_path(report: Json, path: Sequence[str]) -> float | None:
    """A figure of the whole run by its keys; None where it is not there."""
    value: Any = report["summary"]["windows"]["whole run"]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
