"""`steelyard diagnose`: which resource binds a running server or a saved report; where shared prefixes break."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.cli.values import above, old_file, span, together, whole
from steelyard.errors import InvalidRequest, reason

if TYPE_CHECKING:
    from steelyard.bench.scrape import ServerSide
    from steelyard.diagnose.observation import Observation
    from steelyard.diagnose.verdict import Gain
    from steelyard.plan.gain import Running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="?", metavar="URL|REPORT", help="a server with /metrics, or a saved report (JSON)")
    add("--stage", type=whole(0), metavar="N", help="of a report by stages (default: the last)")
    add("--seconds", type=above(0), default=10.0, help="to watch a server (default: 10)")
    add("--max-num-seqs", type=whole(1), metavar="N", help="the server's cap, where it does not say")
    add("--plan-model", metavar="MODEL", help="with --plan-device: step times against the device's floor")
    add("--plan-device", metavar="DEVICE", help="its name, or a .toml file of `steelyard plan --measure`")
    add("--ttft", type=span("ms"), metavar="TIME", help="target, such as 500ms (plain: ms): which stage misses it")
    add("--tpot", type=span("ms"), metavar="TIME", help="target for each further token, with --ttft")
    add("--prompts", type=old_file, metavar="FILE", help="JSON Lines of prompts: see where shared prefixes break")
    add("--prefixes", action="store_true", help="the same of a server's last prompts, by hashes it tells an operator")
    add("--api-key", metavar="KEY", help="an operator's, where the server asks for one")
    add("--show-text", action="store_true", help="look at the text of prompts; else only hashes are compared")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis. Raises InvalidRequest naming what cannot be read."""
    together(args, "plan_model", "plan_device")
    together(args, "ttft", "tpot")
    if args.source is None and args.prompts is None:
        raise InvalidRequest("give a URL, a report, or --prompts FILE", param="source")
    if args.source is not None:
        _diagnose(args)
    if args.prefixes:
        _live_prefixes(args)
    if args.prompts is not None:
        _prefixes(args)
    return 0


def _diagnose(args: argparse.Namespace) -> None:
    from steelyard.diagnose.sources import read_report
    from steelyard.diagnose.verdict import diagnose

    gain = _gain(args)  # whatever cannot be planned is said before a server is watched
    if args.source.startswith(("http://", "https://")):
        seen = asyncio.run(_watch(args))
    else:
        seen = read_report(Path(args.source), args.stage)
    if args.max_num_seqs is not None:
        seen = replace(seen, max_num_seqs=args.max_num_seqs)
    seen = _with_floor(args, seen)
    slo = (args.ttft, args.tpot) if args.ttft is not None and args.tpot is not None else None
    found = diagnose(seen, gain, slo_ms=slo)
    print(json.dumps(asdict(found)) if args.json else found.text())


def _gain(args: argparse.Namespace) -> Gain:
    """What plan predicts of turning a flag; nothing without a model and a device, or where too little was read."""
    if not (args.plan_model and args.plan_device):
        return lambda flag, seen: None
    from steelyard.bench.floor import roofline_of
    from steelyard.plan.calibration import default_calibration
    from steelyard.plan.gain import gain

    roofline = roofline_of(args.plan_model, args.plan_device)
    calibration = default_calibration(roofline)

    def predicted(flag: str, seen: Observation) -> str | None:
        running = _running(seen)
        found = gain(flag, roofline, calibration, running) if running else None
        return None if found is None else found.text

    return predicted


def _running(seen: Observation) -> Running | None:
    """The observation as plan takes it; None where neither the sequences that run nor their lengths are known."""
    from steelyard.plan.gain import Running

    if (seen.decoding or 0.0) < 1.0 or seen.input_len is None:
        return None
    output_len = max(seen.output_len or 1.0, 1.0)
    return Running(
        decoding=seen.decoding or 1.0,
        context_len=max(seen.input_len + output_len / 2, 1.0),
        waiting=seen.queued or 0.0,
        prompt_len=seen.input_len * (1.0 - (seen.prefix_hit_rate or 0.0)),
        output_len=output_len,
        kv_usage=min(seen.kv_usage, 1.0) if seen.kv_usage else None,
        step_s=seen.step_s if seen.step_s is not None else seen.tpot_s,
    )


def _with_floor(args: argparse.Namespace, seen: Observation) -> Observation:
    """The floor of a decode step of the batch and context seen."""
    if not (args.plan_model and args.plan_device):
        return seen
    from steelyard.bench.floor import floor_tpot_ms, roofline_of

    context = round((seen.input_len or 1) + (seen.output_len or 0) / 2)
    batch = max(round(seen.decoding or 1), 1)
    floor_s = floor_tpot_ms(roofline_of(args.plan_model, args.plan_device), context, batch) / 1e3
    return replace(seen, floor_step_s=floor_s)


async def _watch(args: argparse.Namespace) -> Observation:
    """Watch a server's counters for a while. Raises InvalidRequest if it has none."""
    from steelyard.bench.http import HttpClient
    from steelyard.bench.scrape import Scraper, fetch
    from steelyard.bench.server_facts import server_facts

    client = HttpClient(args.source, time.perf_counter_ns, args.api_key)
    try:
        scraper = Scraper(client, time.perf_counter_ns)
        await scraper.start()
        if not scraper.side.before:
            raise InvalidRequest(f"{args.source}: {_why_no_page(*await fetch(client))}", param="source")
        facts = await server_facts(client, scraper.side.before)
        _check_device(args, facts.get("config", {}))
        began = time.perf_counter()
        await asyncio.sleep(args.seconds)
        side = await scraper.stop()
        seconds = time.perf_counter() - began
        if not side.after:
            raise InvalidRequest(f"{args.source}: went away while it was watched", param="source")
    finally:
        client.close()
    return observed(args.source, side, facts.get("config", {}), seconds)


def observed(source: str, side: ServerSide, settings: Mapping[str, str], seconds: float) -> Observation:
    """What a server's counters say of the seconds between two pages. Times are means over the requests of that span."""
    from steelyard.bench.scrape import mean_of
    from steelyard.diagnose.observation import Observation, share_at_cap, share_for_row
    from steelyard.diagnose.sources import whole_or_none

    ended, generated, computed = (side.delta(w) for w in ("requests_ended", "generation_tokens", "prompt_tokens"))
    gauges = {word: mean_of(side.series(word)) for word in ("running", "waiting", "kv_usage")}
    per = {word: _each(side.delta(word), ended) for word in ("queue_s", "prefill_s", "decode_s")}
    length, cap = _each(generated, ended), whole_or_none(settings.get("max_num_seqs"))
    tpot_s = _each(per["decode_s"], length - 1 if length and length > 1 else None)
    ttft_s = _each(side.delta("ttft_s"), side.delta("first_tokens"))
    states = side.label_deltas("steelyard:request_time_seconds_total", "state")
    unread = [f"{word}: the server has no such metric" for word, value in gauges.items() if value is None]
    return Observation(
        source=source,
        achieved_rate=_each(ended, seconds),
        running=gauges["running"],
        waiting=gauges["waiting"],
        kv_usage=gauges["kv_usage"],
        kv_usage_max=max((v for _, v in side.series("kv_usage")), default=None),
        max_num_seqs=cap,
        at_cap=share_at_cap(side.series("running"), side.series("waiting"), cap),
        waited_for_row=share_for_row(states, gauges["waiting"], seconds),
        preemptions_per_s=_each(side.delta("preemptions"), seconds),
        input_tokens_per_s=_each(computed, seconds),
        output_tokens_per_s=_each(generated, seconds),
        output_len=length,
        input_len=_each(computed, ended),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        queue_s=per["queue_s"],
        prefill_s=per["prefill_s"],
        decode_s=per["decode_s"],
        busy=_share(side.delta("device_s"), seconds),
        settings=settings,
        unread=tuple(unread),
    )


def _why_no_page(status: int | None, text: str) -> str:
    if status is None:
        return f"does not answer ({text})"
    if status in (401, 403):
        return "its /metrics page needs an operator's key: give it with --api-key"
    return f"has no /metrics page to read (it answers {status})"


def _check_device(args: argparse.Namespace, config: dict[str, str]) -> None:
    """A floor of another kind of device than the server's says nothing. Raises InvalidRequest."""
    from steelyard.diagnose.knobs import on_cpu
    from steelyard.plan.device import DEVICES, find_device

    if on_cpu(config) and args.plan_device and find_device(args.plan_device).name.lower() in DEVICES:
        raise InvalidRequest(
            f"--plan-device {args.plan_device}: the server runs on a CPU; measure it with `steelyard plan --measure "
            "--save mine.toml` there and give that file",
            param="plan_device",
        )


def _share(part: float | None, whole_s: float) -> float | None:
    """A counter that grows at the ends of steps may hold more than the time that was watched."""
    return None if part is None else min(part / whole_s, 1.0)


def _each(value: float | None, count: float | None) -> float | None:
    return None if value is None or not count else value / count


def _live_prefixes(args: argparse.Namespace) -> None:
    """Raises InvalidRequest if the server tells nothing of its prompts, or has seen fewer than two."""
    from steelyard.bench.http import HttpClient
    from steelyard.bench.scrape import fetch
    from steelyard.diagnose.prefixes import look

    async def ask() -> tuple[int | None, str]:
        client = HttpClient(args.source, time.perf_counter_ns, args.api_key)
        try:
            return await fetch(client, "/ledger/prompts?last=64")
        finally:
            client.close()

    status, text = asyncio.run(ask())
    if status != 200:
        raise InvalidRequest(
            f"--prefixes: {args.source} does not tell its prompts' hashes ({status})", param="prefixes"
        )
    found = look([prompt["token_hashes"] for prompt in json.loads(text)["prompts"]])
    if found is None:
        raise InvalidRequest(f"--prefixes: {args.source} has seen fewer than two prompts", param="prefixes")
    print(json.dumps(asdict(found)) if args.json else found.text())


def _prefixes(args: argparse.Namespace) -> None:
    from steelyard.diagnose.prefixes import look

    prompts, texts, unit = _read_prompts(args.prompts)
    found = look(prompts, texts if args.show_text else None, unit)
    if found is None:
        raise InvalidRequest(f"--prompts {args.prompts}: at least two prompts are needed", param="prompts")
    print(json.dumps(asdict(found)) if args.json else found.text())


def _read_prompts(path: Path) -> tuple[list[list[Any]], list[list[str]] | None, int]:
    """Sequences to compare: `token_ids`, `hash_ids` (512 tokens each, as Mooncake), or words of a `prompt`, hashed."""
    prompts: list[list[Any]] = []
    texts: list[list[str]] = []
    unit = 1
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--prompts {path}: {reason(error)}", param="prompts") from error
    for number, row in enumerate(rows, 1):
        if "hash_ids" in row:
            prompts.append(row["hash_ids"])
            unit = 512
        elif "token_ids" in row:
            prompts.append(row["token_ids"])
        elif isinstance(row.get("prompt"), str):
            texts.append(row["prompt"].split())
            prompts.append([hash(word) for word in texts[-1]])
        else:
            raise InvalidRequest(f"--prompts {path}: line {number} has no prompt, token_ids or hash_ids")
    return prompts, texts if len(texts) == len(prompts) else None, unit
