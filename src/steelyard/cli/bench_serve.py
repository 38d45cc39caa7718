"""`steelyard bench serve`: a load against any OpenAI-compatible server. Flags mean what vLLM's of that name mean."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.cli.values import above, json_object, new_folder, old_file, real, span, together, url, whole
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    from steelyard.bench.arrivals import Arrivals
    from steelyard.bench.clients import Server
    from steelyard.bench.load import Progress
    from steelyard.bench.session import RunOptions, RunResult, Work


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_load_arguments(parser)
    group = parser.add_argument_group("judging and saving")
    add = group.add_argument
    add("--plan-model", metavar="MODEL", help="with --plan-device: check results against the device's physical floor")
    add("--plan-device", metavar="DEVICE", help="such as H200, or a .toml file")
    add("--no-selftest", action="store_true", help="do not run the client against an echo server first")
    add("--save-result", action="store_true", help="write report (JSON, Markdown, CSV, HTML), records and vLLM's JSON")
    add("--result-dir", type=new_folder, default=Path("results"), metavar="DIR", help="of what is saved")
    add("--name", default="", help="of the run, in reports and file names")
    add("--json", action="store_true", help="print the report as JSON")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to send, and how requests are written."""
    add = parser.add_argument_group("server").add_argument
    add("--base-url", type=url, default="http://127.0.0.1:8000", metavar="URL", help="of the server")
    add("--model", metavar="NAME", help="in requests (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="where the server asks for one")
    add_request_arguments(parser)


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """How requests are written."""
    add = parser.add_argument_group("requests").add_argument
    add(
        "--endpoint",
        choices=("/v1/completions", "/v1/chat/completions"),
        default="/v1/completions",
        help="where requests go",
    )
    add("--prompt-kind", choices=("ids", "text"), help="token ids, or text (default: ids; chat: text)")
    add("--tokenizer", metavar="MODEL", help="for text prompts, and for the ids that may be drawn")
    add("--vocab-size", type=whole(8), metavar="N", help="draw ids below this (default: the tokenizer's, else 30000)")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of the asked length")
    add("--token-ids", action=argparse.BooleanOptionalAction, help="ask for ids in the stream (default: if known)")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="fields for every request")
    add(
        "--timeout", type=above(0), default=600.0, metavar="SECONDS", help="from the scheduled time; then it has failed"
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What is sent, and when."""
    group = parser.add_argument_group("load")
    add = group.add_argument
    add("--num-prompts", type=whole(1), default=100, metavar="N", help="requests, of each group (default: 100)")
    add("--group", action="append", metavar="NAME", help="short-short, long-short, short-long, long-long, all")
    add("--group-divisor", type=whole(1), default=1, metavar="N", help="shorten the groups so much, for a slow machine")
    add("--random-input-len", type=whole(1), default=256, metavar="TOKENS", help="of a prompt")
    add("--random-output-len", type=whole(1), default=128, metavar="TOKENS", help="of an answer")
    add(
        "--random-range-ratio",
        type=real(0, 1),
        default=0.0,
        metavar="R",
        help="lengths between 1 - R and 1 + R of those",
    )
    add("--shared-prefix", type=whole(0), metavar="TOKENS", help="in front of every prompt, on top of its input length")
    add("--num-prefixes", type=whole(1), default=1, metavar="N", help="different ones, for --shared-prefix")
    add("--turns", type=whole(1), metavar="N", help="conversations of this many turns; --num-prompts of them")
    add("--trace", type=old_file, metavar="FILE", help="replay Azure's or BurstGPT's CSV, or Mooncake's JSON Lines")
    add("--time-scale", type=above(0), default=1.0, metavar="X", help="stretch a trace's times (default: 1)")
    add("--request-rate", type=above(0, inf), metavar="RATE", help="open loop, requests/s (default: a closed loop)")
    add(
        "--burstiness", type=above(0, inf), default=1.0, metavar="K", help="gamma shape; 1: Poisson, inf: constant gaps"
    )
    add("--max-concurrency", type=whole(1), metavar="N", help="slots of a closed loop (default: 8), cap of an open one")
    add("--ramp", type=real(0), default=0.0, metavar="SECONDS", help="over which a closed loop's slots begin")
    add(
        "--think-time",
        type=real(0),
        default=0.0,
        metavar="SECONDS",
        help="between an answer and the next request of a slot",
    )
    add(
        "--warmup", type=whole(0), metavar="N", help="requests before, of every group, not measured (default: as slots)"
    )
    add("--client-processes", type=whole(1), default=1, metavar="N", help="to send from")
    add(
        "--goodput",
        type=targets,
        action="append",
        default=[],
        metavar="NAME:TIME",
        help="ttft, tpot or e2el: ttft:500ms",
    )
    add("--seed", type=whole(0), default=0, help="of prompts, lengths and arrivals")


def run(args: argparse.Namespace) -> int:
    """Measure and print. Exit status 1: the run is not valid. Raises KeyboardInterrupt if it was stopped."""
    import uvloop

    result = uvloop.run(measure(args))
    finish(args, [result])
    if result.stopped:
        ended = sum(r.done_ns is not None for r in result.records)
        raise KeyboardInterrupt(f"the report is of the {ended} of {len(result.records)} requests that had ended")
    return 0 if result.valid else 1


async def measure(args: argparse.Namespace) -> RunResult:
    """One run by the flags: self-test, warm-up, load, report."""
    from steelyard.bench.session import run_session

    server = await find_server(args)
    work = make_work(args)
    options = await run_options(args, work)
    with Display(len(work.requests), sys.stderr.isatty() and not args.json) as show:
        return await run_session(server, work, options, show)


async def find_server(args: argparse.Namespace) -> Server:
    """Ask the server what it serves. Raises InvalidRequest if nobody answers."""
    from steelyard.bench.clients import Server
    from steelyard.bench.http import HttpClient
    from steelyard.bench.scrape import fetch
    from steelyard.bench.server_facts import model_of, server_facts
    from steelyard.bench.target import CHAT, RequestShape

    client = HttpClient(args.base_url, time.perf_counter_ns, args.api_key)
    try:
        status, text = await fetch(client, "/v1/models")
        if status is None:
            raise InvalidRequest(f"--base-url {args.base_url}: no answer ({text})", param="base_url")
        model, owner, _ = model_of(await server_facts(client, {}))
    finally:
        client.close()
    name = args.model or model
    if name is None:
        raise InvalidRequest("--model: the server lists none; give its name", param="model")
    token_ids = args.token_ids
    if token_ids is None:
        token_ids = owner in ("steelyard", "vllm") and args.endpoint != CHAT
    extra = args.extra_body
    shape = RequestShape(name, args.endpoint, args.ignore_eos, token_ids, extra=extra)
    return Server(args.base_url, shape, args.api_key, args.timeout)


def make_work(args: argparse.Namespace, seed: int | None = None, nonce: str | None = None) -> Work:
    """Requests, warm-up and schedule of the flags. Raises InvalidRequest naming the flag at fault."""
    from steelyard.bench.session import Work
    from steelyard.bench.workload import PromptMaker

    if args.num_prompts < 1:
        raise InvalidRequest(f"--num-prompts must be at least 1, got {args.num_prompts}", param="num_prompts")
    seed = args.seed if seed is None else seed
    nonce = secrets.token_hex(8) if nonce is None else nonce
    vocabulary, count = _vocabulary(args)
    arrivals = make_arrivals(args)
    requests, schedule = _requests(args, PromptMaker(seed, nonce, vocabulary), arrivals, seed)
    warm = _warmup(args, PromptMaker(seed, f"{nonce} warm-up", vocabulary), requests, arrivals)
    kind = args.prompt_kind or ("text" if "chat" in args.endpoint else "ids")
    if kind == "text":
        from steelyard.bench.text_prompts import as_text

        if count is None:
            raise InvalidRequest("--tokenizer is needed to make text of a known length", param="tokenizer")
        requests, warm = as_text(requests, count, seed, nonce), as_text(warm, count, seed, f"{nonce} warm-up")
    elif "chat" in args.endpoint:
        raise InvalidRequest("--prompt-kind ids: chat takes text only", param="prompt_kind")
    return Work(requests, schedule, arrivals, warm, seed, nonce)


def make_arrivals(args: argparse.Namespace) -> Arrivals:
    from steelyard.bench.arrivals import Arrivals

    cap, think_s = args.max_concurrency, args.think_time
    if args.trace is not None:
        return Arrivals("trace", None, concurrency=cap, think_s=think_s)
    if args.request_rate is None or args.request_rate == float("inf"):
        slots = cap or (args.num_prompts if args.request_rate else 8)
        return Arrivals("closed", concurrency=slots, ramp_s=args.ramp, think_s=think_s)
    if args.burstiness == float("inf"):
        return Arrivals("constant", args.request_rate, concurrency=cap, think_s=think_s)
    process: Any = "poisson" if args.burstiness == 1.0 else "gamma"
    return Arrivals(process, args.request_rate, args.burstiness, cap, think_s=think_s)


def _requests(args: argparse.Namespace, maker: Any, arrivals: Arrivals, seed: int) -> tuple[list[Any], Any]:
    import random

    from steelyard.bench.arrivals import make_schedule, replay
    from steelyard.bench.traces import read_trace, requests_of
    from steelyard.bench.workload import Lengths, group_lengths

    if args.trace is not None:
        rows = read_trace(args.trace, args.num_prompts)
        return requests_of(rows, maker), replay([r.at_s for r in rows], args.time_scale)
    lengths = Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    if args.turns is not None:
        requests = maker.multi_turn(lengths, args.num_prompts, args.turns)
    elif args.shared_prefix is not None:
        requests = maker.shared_prefix(lengths, args.num_prompts, args.shared_prefix, args.num_prefixes)
    elif args.group:
        requests = []
        for name, own in group_lengths(args.group, args.group_divisor).items():
            requests += maker.unique(own, args.num_prompts, name, len(requests))
        random.Random(f"order {seed}").shuffle(requests)
    else:
        requests = maker.unique(lengths, args.num_prompts, "random")
    return requests, make_schedule(arrivals, len(requests), seed)


def _warmup(args: argparse.Namespace, maker: Any, requests: Sequence[Any], arrivals: Arrivals) -> list[Any]:
    """Every shape to be measured, in other prompts, its output cut to 32 tokens: enough for every step to be seen."""
    from steelyard.bench.workload import Lengths

    count = args.warmup if args.warmup is not None else 2 * min(arrivals.concurrency or 8, len(requests))
    shapes = {(r.group, len(r.prompt_ids), min(r.output_len, 32)): None for r in requests}
    if len(shapes) > 64:
        ordered = sorted(shapes)
        shapes = dict.fromkeys(ordered[:: len(ordered) // 32])
    found: list[Any] = []
    for group, input_len, output_len in shapes:
        each = max(count // len(shapes), 1) if count else 0
        found += maker.unique(Lengths(input_len, output_len), each, group, len(found))
    return found


def _vocabulary(args: argparse.Namespace) -> tuple[Any, Any]:
    """(ids to draw from, how to count tokens of a text). Without a tokenizer: ids most models have."""
    from steelyard.bench.workload import Vocabulary

    if args.tokenizer is None:
        if args.vocab_size is None:
            return Vocabulary(), None
        return Vocabulary(min(100, args.vocab_size // 4), args.vocab_size), None
    from steelyard.checkpoint.find import open_checkpoint
    from steelyard.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_checkpoint(open_checkpoint(args.tokenizer))
    high = min(tokenizer.vocab_size, args.vocab_size or tokenizer.vocab_size)
    return Vocabulary(0, high, tokenizer.special_ids), lambda text: len(tokenizer.encode(text))


_TARGETS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2e_ms", "e2e": "e2e_ms"}


def targets(text: str) -> dict[str, float]:
    """`ttft:500 tpot:50ms e2el:9s` by the names of Slo, in milliseconds, which plain numbers are in."""
    found: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.partition(":")
        try:
            found[_TARGETS[name]] = span("ms")(value)
        except (KeyError, argparse.ArgumentTypeError):
            shape = "must be ttft:TIME, tpot:TIME or e2el:TIME, such as ttft:500ms (a plain number: ms)"
            raise argparse.ArgumentTypeError(f"{shape}, got {word!r}") from None
    return found


async def run_options(args: argparse.Namespace, work: Work) -> RunOptions:
    """How the run is judged: targets, the physical floor, the self-test at about the run's own rate."""
    from steelyard.bench.floor import floor_tpot_ms, roofline_of
    from steelyard.bench.record import Slo
    from steelyard.bench.selftest import EchoLoad, self_test
    from steelyard.bench.session import RunOptions

    together(args, "plan_model", "plan_device")
    floor = None
    if args.plan_model and args.plan_device:
        roofline = roofline_of(args.plan_model, args.plan_device)
        floor = floor_tpot_ms(roofline, min(len(r.prompt_ids) for r in work.requests))
    test = None
    if not args.no_selftest:
        rate = args.request_rate or 2.0 * (work.arrivals.concurrency or 8)
        load = EchoLoad(min(rate, 500.0), events=32, processes=args.client_processes)
        test = (await self_test(load)).as_json()
    return RunOptions(
        slo=Slo(**{name: ms for words in args.goodput for name, ms in words.items()}),
        processes=args.client_processes,
        floor_tpot_ms=floor,
        selftest=test,
        command=" ".join(["steelyard", *sys.argv[1:]]),
        name=args.name,
    )


class Display:
    """One line on a terminal that follows a run; nothing elsewhere."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._shown, self._last = total, shown, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if not self._shown or now - self._last < 0.2:
            return
        self._last = now
        text = f"{progress.done}/{self._total} done, {progress.in_flight} in flight, {progress.failed} failed"
        print(f"\r{text}, {progress.output_tokens:,} tokens\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def finish(args: argparse.Namespace, results: Sequence[RunResult]) -> None:
    """Print, and save where asked."""
    from steelyard.bench.export import to_markdown
    from steelyard.cli.bench_save import save

    for result in results:
        print(json.dumps(result.report) if args.json else to_markdown(result.report))
    if args.save_result:
        for path in save(args.result_dir, results):
            print(f"wrote {path}", file=sys.stderr)
