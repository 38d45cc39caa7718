"""Observations from saved reports: ours, vLLM's result JSON, inference-perf-like stages. Absent stays absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steelyard.diagnose.observation import Observation, derived_tpot_s, share_at_cap, share_for_row
from steelyard.errors import InvalidRequest, reason

Json = dict[str, Any]


def read_report(path: Path, stage: int | None = None) -> Observation:
    """A saved report of any known kind. Raises InvalidRequest naming the file and what it lacks."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path}: cannot be read as JSON ({reason(error)})") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path}: must be a JSON object")
    try:
        if str(value.get("schema", "")).startswith("steelyard.bench/"):
            return from_ours(value)
        if "stages" in value:
            return from_stages(value, stage)
        if "request_throughput" in value and "duration" in value:
            return from_vllm(value)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(f"{path}: lacks {error}") from error
    raise InvalidRequest(f"{path}: is no report of `steelyard bench`, of vLLM's bench, and has no stages")


def from_ours(report: Json, max_num_seqs: int | None = None, floor_step_s: float | None = None) -> Observation:
    """Our own report, with the server's side if it was read. The steady window where there is one."""
    windows = report["summary"]["windows"]
    window = windows.get("steady", windows["whole run"])
    server = report["summary"].get("server") or {}
    service = window["latency_ms"]["service"]
    seconds = windows["whole run"]["seconds"]
    ended = server.get("requests_ended")
    per = {w: server[w] / ended if ended and server.get(w) is not None else None for w in _HISTOGRAMS}
    config = report.get("server_facts", {}).get("config", {})
    cap = max_num_seqs if max_num_seqs is not None else whole_or_none(config.get("max_num_seqs"))
    unread = [f"{word}: the server has no such metric" for word in server.get("absent", ())]
    if not server:
        unread.append("the server's side: it has no /metrics page")
    if cap is None:
        unread.append("max_num_seqs: the server does not say; give --max-num-seqs")
    preemptions = server.get("preemptions")
    return Observation(
        source=report.get("name") or "report",
        asked_rate=report["arrivals"]["rate"],
        achieved_rate=window["request_rate"],
        delay_s=_ms(window.get("delay_ms"), "p99"),
        client_cap=report["arrivals"]["max_concurrency"],
        in_flight=window["mean_in_flight"],
        running=_part(server.get("running"), "mean"),
        waiting=_part(server.get("waiting"), "mean"),
        max_num_seqs=cap,
        **_for_row(server, cap, seconds),
        kv_usage=_part(server.get("kv_usage"), "mean"),
        kv_usage_max=_part(server.get("kv_usage"), "max"),
        preemptions_per_s=None if preemptions is None else preemptions / seconds,
        input_tokens_per_s=window["input_computed_tokens_per_s"] or window["input_tokens_per_s"],
        output_tokens_per_s=window["output_tokens_per_s"],
        input_len=report["workload"]["mean_input_len"],
        output_len=report["workload"]["mean_output_len"],
        prefix_hit_rate=server.get("prefix_hit_rate"),
        ttft_s=_ms(service["ttft"], "p50"),
        tpot_s=_ms(window["tpot_ms"], "p50"),
        icl_p50_s=_ms(window["icl_ms"], "p50"),
        icl_p99_s=_ms(window["icl_ms"], "p99"),
        e2e_s=_ms(service["e2e"], "mean"),
        **per,
        busy=server["device_s"] / seconds if server.get("device_s") is not None and seconds else None,
        floor_step_s=floor_step_s,
        attainment=window.get("attainment"),
        invalid=_invalid(report),
        settings=config,
        unread=tuple(unread),
    )


def _invalid(report: Json) -> str:
    """The label of a run that is not valid, with the sentence of each gate that it failed; empty for a valid one."""
    if report.get("valid", True):
        return ""
    failed = [f"{gate['name']}: {gate['evidence']}" for gate in report.get("gates", ()) if gate["outcome"] == "fail"]
    return f"{report.get('label') or 'not valid'}: {'; '.join(failed) or 'it does not say why'}"


_HISTOGRAMS = ("queue_s", "prefill_s", "decode_s")


def from_vllm(value: Json) -> Observation:
    """What `vllm bench serve` saves. It has no server side and no schedule."""
    rate = value.get("request_rate")
    lengths = value.get("output_lens") or []
    completed = max(value["completed"], 1)
    return Observation(
        source="vLLM bench result",
        asked_rate=None if rate in (None, "inf") else float(rate),
        achieved_rate=float(value["request_throughput"]),
        client_cap=value.get("max_concurrency"),
        input_tokens_per_s=value["total_input_tokens"] / value["duration"],
        output_tokens_per_s=value["output_throughput"],
        input_len=value["total_input_tokens"] / completed,
        output_len=sum(lengths) / len(lengths) if lengths else value["total_output_tokens"] / completed,
        ttft_s=_seconds(value.get("median_ttft_ms")),
        tpot_s=_seconds(value.get("median_tpot_ms")),
        icl_p50_s=_seconds(value.get("median_itl_ms")),
        icl_p99_s=_seconds(value.get("p99_itl_ms")),
        e2e_s=_seconds(value.get("mean_e2el_ms")),
        unread=("schedule delay: not in such a report", "the server's side: not in such a report"),
    )


def from_stages(value: Json, stage: int | None = None) -> Observation:
    """A report by stages of rising rate, as inference-perf writes: the last stage, or the one named.

    Means are taken as they are; the time per output token is derived from E2E, TTFT and length where it can be, since
    what such reports call TPOT has counted chunks. A KV share of exactly 0 while tokens come is not a reading.
    """
    stages = value["stages"]
    if stage is not None and not 0 <= stage < len(stages):
        raise InvalidRequest(f"--stage must be between 0 and {len(stages) - 1}, got {stage}", param="stage")
    s = stages[len(stages) - 1 if stage is None else stage]
    unread = []
    kv = s.get("kv_usage", value.get("kv_usage"))
    if kv == 0.0 and s.get("output_tokens_per_s"):
        kv = None
        unread.append("KV in use: reported as 0 while tokens were generated, so the metric is absent, not zero")
    e2e, ttft, n = s.get("e2e_s"), s.get("ttft_s"), s.get("output_len", value.get("output_len"))
    tpot = s.get("derived_tpot_s")
    if tpot is None and None not in (e2e, ttft, n):
        tpot = derived_tpot_s(e2e, ttft, n)
    client, server = s.get("client_requests"), s.get("server_requests")
    if client and server and abs(server / client - 1.0) > 0.02:
        unread.append(f"server counters: they saw {server} requests, the client {client}; the windows are not the same")
    return Observation(
        source=f"stage {len(stages) - 1 if stage is None else stage}",
        asked_rate=s.get("asked_rate"),
        achieved_rate=s.get("achieved_rate"),
        delay_s=s.get("delay_s"),
        client_cap=value.get("client_cap"),
        max_num_seqs=value.get("max_num_seqs"),
        kv_usage=kv,
        input_tokens_per_s=_product(s.get("achieved_rate"), value.get("input_len")),
        output_tokens_per_s=s.get("output_tokens_per_s"),
        input_len=value.get("input_len"),
        output_len=n,
        ttft_s=ttft,
        tpot_s=tpot if tpot is not None else s.get("reported_tpot_s"),
        e2e_s=e2e,
        unread=tuple(unread),
    )


def _for_row(server: Json, cap: int | None, seconds: float) -> dict[str, float | None]:
    """What shows that requests waited for a row: the readings, and the accounts."""
    waiting = _part(server.get("waiting"), "mean")
    return {
        "at_cap": share_at_cap(_points(server, "running"), _points(server, "waiting"), cap),
        "waited_for_row": share_for_row(server.get("time_by_state_s") or {}, waiting, seconds),
    }


def _points(server: Json, name: str) -> list[tuple[float, float]]:
    return [(t, number) for t, number in (server.get("series") or {}).get(name, ())]


def _ms(stats: Json | None, name: str) -> float | None:
    return None if stats is None else stats[name] / 1e3


def _part(stats: Json | None, name: str) -> float | None:
    return None if stats is None else stats[name]


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _product(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a * b


def whole_or_none(value: Any) -> int | None:
    """A number that a server tells as a word; None for any other word."""
    return int(value) if value is not None and str(value).isdigit() else None
