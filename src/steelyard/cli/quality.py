"""`steelyard quality`: an optimised server against a base one, with the base against itself as the noise floor."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steelyard.cli.plan_text import table
from steelyard.cli.values import url, whole
from steelyard.core.verdict import HEADER
from steelyard.errors import RequestFailed
from steelyard.quality.tasks import ENOUGH_TASKS

if TYPE_CHECKING:
    from steelyard.core.verdict import Verdict
    from steelyard.quality.compare import Answer, Distance, Scored


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", type=url, required=True, metavar="URL", help="the server whose answers count as right")
    add("--arm", type=url, required=True, metavar="URL", help="the server to judge")
    add("--model", metavar="NAME", help="in requests (default: the first that each server lists)")
    add("--tasks", type=whole(1), default=ENOUGH_TASKS, metavar="N", help="to ask")
    add(
        "--at-once",
        type=whole(1),
        default=8,
        metavar="N",
        help="requests at a time; the noise floor takes 1 (default: 8)",
    )
    add("--top", type=whole(1), default=5, metavar="K", help="log probabilities at each place, for KL")
    add("--seed", type=whole(0), default=0, help="of the tasks")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the verdict and every figure with its limit. Exit status 1: it did not pass."""
    options = {"model": args.model, "num_tasks": args.tasks, "at_once": args.at_once, "top": args.top}
    verdict, arm, noise = asyncio.run(judge_servers(args.base, args.arm, seed=args.seed, **options))
    if args.json:
        found = {"verdict": asdict(verdict), "arm": asdict(arm), "noise": asdict(noise)}
        print(json.dumps(found, allow_nan=False))
    else:
        rows = [figure.cells for figure in verdict.figures]
        print("\n".join([verdict.summary, *table(HEADER, rows)]))
    return 0 if verdict.passed else 1


async def judge_servers(
    base_url: str,
    arm_url: str,
    *,
    model: str | None = None,
    num_tasks: int = ENOUGH_TASKS,
    at_once: int = 8,
    top: int = 5,
    seed: int = 0,
) -> tuple[Verdict, Distance, Distance]:
    """(verdict, the arm from the base, the base at one request at a time from itself)."""
    from steelyard.quality.ask import apart, ask
    from steelyard.quality.gate import judge
    from steelyard.quality.tasks import make_tasks

    tasks = make_tasks(num_tasks, seed)
    async with HttpArm(base_url, model, top) as base, HttpArm(arm_url, model, top) as arm:
        many = await ask(base, tasks, at_once)
        single = await ask(base, tasks, 1)
        judged = await ask(arm, tasks, at_once)
    found, noise = apart(many, judged), apart(many, single)
    return judge(found, noise), found, noise


class HttpArm:
    """quality.ask.Arm over an OpenAI server that echoes prompts with log probabilities."""

    def __init__(self, url: str, model: str | None, top: int) -> None:
        from steelyard.bench.http import HttpClient

        self._client = HttpClient(url, time.perf_counter_ns)
        self._url, self._model, self._top = url, model, top

    async def __aenter__(self) -> HttpArm:
        from steelyard.bench.server_facts import model_of, server_facts

        if self._model is None:
            self._model, _, _ = model_of(await server_facts(self._client, {}))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._client.close()

    async def score(self, text: str) -> Scored:
        """What of it the server tells; of the rest, and of a server that tells nothing, the lists are short."""
        from steelyard.quality.compare import Scored

        choice, _ = await self._complete({"prompt": text, "max_tokens": 1, "echo": True, "logprobs": self._top})
        tokens, logprobs, top = (_listed(choice, name) for name in ("tokens", "token_logprobs", "top_logprobs"))
        num = max(len(tokens) - 1, 0)  # the last is the one it went on with
        return Scored(tuple(tokens[:num]), tuple(logprobs[:num]), tuple(values or {} for values in top[:num]))

    async def answer(self, text: str, max_tokens: int) -> Answer:
        """Raises RequestFailed for an answer without text or without a count of its tokens."""
        from steelyard.quality.compare import Answer

        choice, usage = await self._complete({"prompt": text, "max_tokens": max_tokens})
        said, num = choice.get("text"), usage.get("completion_tokens")
        if not isinstance(said, str) or not isinstance(num, int) or num < 0:
            raise RequestFailed(f"{self._url}: gave no text with usage.completion_tokens; judge a server that does")
        return Answer(said, num)

    async def _complete(self, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The choice and the usage. Raises RequestFailed with the server's words."""
        from steelyard.bench.http import Exchange, TransportError

        body = json.dumps({"model": self._model, "temperature": 0.0, **fields}).encode()
        exchange = Exchange("/v1/completions", body)
        try:
            await self._client.exchange(exchange)
        except TransportError as error:
            raise RequestFailed(f"{self._url}: {error}") from error
        text = bytes(exchange.content).decode(errors="replace")
        if exchange.status != 200:
            raise RequestFailed(f"{self._url}: {exchange.status}: {text[:300]}")
        try:
            value = json.loads(text)
            choice, usage = value["choices"][0], value.get("usage") or {}
        except (ValueError, LookupError, TypeError, AttributeError):
            choice = usage = None
        if not isinstance(choice, dict) or not isinstance(usage, dict):
            raise RequestFailed(f"{self._url}: answers /v1/completions with what is no completion: {text[:300]}")
        return choice, usage


def _listed(choice: dict[str, Any], name: str) -> list[Any]:
    """One of the lists of a choice's log probabilities; empty where the server gave none."""
    logprobs = choice.get("logprobs")
    found = logprobs.get(name) if isinstance(logprobs, dict) else None
    return found if isinstance(found, list) else []
