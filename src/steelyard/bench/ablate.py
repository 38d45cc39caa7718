"""One knob at a time: which flags make the two arms, in which order runs go, and what their difference is made of.

Arms run interleaved (A B A B ...), each pair with one seed, so that drift of the machine is in both members of a pair.
The difference of mean request time is split by the accounts of the server's ledger; what they do not hold is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from steelyard.bench.repeats import Paired, paired
from steelyard.errors import InvalidRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Knob:
    """Flags of `steelyard serve` for each arm, and the account that the change should move."""

    name: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    moves: str
    read_back: str | None = None


KNOBS: dict[str, Knob] = {
    k.name: k
    for k in (
        Knob("kv-cache", ("--kv-cache", "off"), (), "compute"),
        Knob("attention", ("--attention-backend", "naive"), (), "memory traffic"),
        Knob("batching", ("--batching", "static"), (), "queueing"),
        Knob("allocation", ("--kv-allocation", "contiguous"), (), "fragmentation"),
        Knob(
            "prefix-caching",
            ("--no-enable-prefix-caching",),
            ("--enable-prefix-caching",),
            "compute",
            "enable_prefix_caching",
        ),
        Knob("budget", ("--max-num-batched-tokens", "8192"), ("--max-num-batched-tokens", "512"), "interference"),
        Knob("graphs", ("--enforce-eager",), (), "launch"),
        Knob("overlap", ("--no-async-scheduling",), ("--async-scheduling",), "launch"),
        Knob("dtype", ("--dtype", "float32"), ("--dtype", "bfloat16"), "memory traffic", "kv_layout"),
        Knob("block-size", ("--block-size", "16"), ("--block-size", "64"), "fragmentation", "block_size"),
    )
}

ACCOUNTS: Mapping[str, tuple[str, ...]] = {
    "queueing": ("wait_step_boundary", "wait_slot", "wait_budget", "wait_policy", "wait_grammar"),
    "KV shortage": ("wait_kv",),
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


def knobs_named(names: Sequence[str]) -> list[Knob]:
    """Raises InvalidRequest for a name that is not in the table."""
    for name in names:
        if name not in KNOBS:
            raise InvalidRequest(f"--knob must be of {', '.join(KNOBS)}, got {name!r}", param="knob")
    return [KNOBS[name] for name in names]


def interleaved(pairs: int) -> Iterator[tuple[int, str]]:
    """(pair, arm): A B A B ..., the first member alternating, so that neither is always the warmer one."""
    for pair in range(pairs):
        for arm in "AB" if pair % 2 == 0 else "BA":
            yield pair, arm


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms of one knob. `void`: why the difference may not be quoted; empty: it may."""

    knob: str
    metrics: Mapping[str, Paired]
    values: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    attribution: Mapping[str, float]
    residual_ms: float | None
    void: tuple[str, ...]


def compare(knob: Knob, a: Sequence[Json], b: Sequence[Json]) -> Comparison:
    """Reports of the arms, pair by pair."""
    metrics, values = {}, {}
    for title, path in METRICS.items():
        pairs = [(_at(x, path), _at(y, path)) for x, y in zip(a, b)]
        known = [(x, y) for x, y in pairs if x is not None and y is not None]
        if known:
            left, right = [x for x, _ in known], [y for _, y in known]
            metrics[title], values[title] = paired(left, right), (tuple(left), tuple(right))
    parts, residual = attribute(a, b)
    return Comparison(knob.name, metrics, values, parts, residual, tuple(_void(knob, a, b)))


def attribute(a: Sequence[Json], b: Sequence[Json]) -> tuple[dict[str, float], float | None]:
    """Milliseconds a request that each account grew by from A to B, and what of the client's E2E is in none of them.

    ({}, None) where a server keeps no ledger: a foreign one shows queue, prefill and decode at most.
    """
    before, after = [accounts(r) for r in a], [accounts(r) for r in b]
    if not all(before) or not all(after):
        return {}, None
    parts = {name: fmean(x[name] for x in after) - fmean(x[name] for x in before) for name in ACCOUNTS}
    path = METRICS["E2E mean, ms"]
    wholes = [fmean(v for r in arm if (v := _at(r, path)) is not None) for arm in (a, b)]
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
    digests = {(x["workload"]["digest"], y["workload"]["digest"]) for x, y in zip(a, b)}
    if any(x != y for x, y in digests):
        yield "the arms did not do the same work: their workload hashes differ"
    if len(a) < 3:
        yield f"{len(a)} pairs: at least 3 are needed to say anything of noise"
    said = [tuple(_config(r) for r in arm) for arm in (a, b)]
    changed = {k for x, y in zip(*said) for k in x.keys() | y.keys() if x.get(k) != y.get(k)}
    if knob.read_back is None:
        yield f"the server does not report what {knob.name} is set to, so it is not shown to have taken effect"
    elif knob.read_back not in changed:
        yield f"{knob.read_back} reads the same in both arms: the flag had no effect"
    others = changed - {knob.read_back, "num_gpu_blocks"}
    if others:
        yield f"more than the knob changed: {', '.join(sorted(others))}"


def _config(report: Json) -> Json:
    """What the server says it runs with. The KV layout ends in the block size, which has a name of its own."""
    found = dict(report.get("server_facts", {}).get("config", {}))
    if "kv_layout" in found:
        found["kv_layout"] = str(found["kv_layout"]).rpartition("/")[0]
    return found


def _at(report: Json, path: Sequence[str]) -> float | None:
    value: Any = report["summary"]["windows"]["whole run"]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def to_markdown(found: Sequence[Comparison], quality: Mapping[str, str]) -> str:
    """A table a knob; the quality of the answers beside the speed, or that it was not measured."""
    lines = ["# Ablation", "", "B against A, pairs of runs with the same seed; intervals of 95 %.", ""]
    for c in found:
        knob = KNOBS[c.knob]
        arms = f"A {' '.join(knob.a) or '(as it is)'}, B {' '.join(knob.b) or '(as it is)'}"
        lines += [f"## {c.knob}: {arms}", "", f"Expected to move: {knob.moves}.", ""]
        lines += ["| metric | A | B | difference | decided |", "| --- | --- | --- | --- | --- |"]
        for title, p in c.metrics.items():
            a, b = (fmean(v) for v in c.values[title])
            d = p.difference
            shown = f"{p.relative:+.1%} ({d.low:+.4g} to {d.high:+.4g})"
            lines.append(f"| {title} | {a:.4g} | {b:.4g} | {shown} | {'yes' if p.decided else 'no'} |")
        if c.attribution:
            lines += ["", "| account, ms a request | difference |", "| --- | --- |"]
            lines += [f"| {name} | {value:+.3f} |" for name, value in c.attribution.items()]
            lines.append(f"| residual, in no account | {c.residual_ms:+.3f} |")
        lines += ["", f"Quality: {quality.get(c.knob, 'speed only')}", ""]
        lines += [f"* Not to be quoted as it is: {why}." for why in c.void]
    return "\n".join(lines) + "\n"
