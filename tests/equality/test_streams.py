"""Thirty-two streams of the official client at once say what each says alone: SmolLM2 in float32, greedy, over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from openai import AsyncOpenAI

NUM_STREAMS = 32
MAX_TOKENS = 16
NEAR_TIE = 1e-3
"""Two best tokens closer than this, in log-probability, may change places when sums are made in another order."""
SUBJECTS = ("rivers", "bread", "the moon", "chess", "bees", "glass", "trains", "salt")
TASKS = ("Name three facts about {}.", "Write one sentence about {}.", "Why do people like {}?", "Ask me about {}.")


@dataclass(frozen=True)
class Said:
    """One answer: its tokens, and for each the lead in log-probability over the runner-up."""

    tokens: tuple[str, ...]
    leads: tuple[float, ...]
    finish_reason: str | None


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "steelyard.cli.main",
        "serve",
        "smollm2",
        "--dtype",
        "float32",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, start_new_session=True)
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}/health")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not become ready")


async def say(client: AsyncOpenAI, prompt: str) -> Said:
    stream = await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        logprobs=True,
        top_logprobs=2,
    )
    tokens: list[str] = []
    leads: list[float] = []
    finish_reason = None
    async for chunk in stream:
        for choice in chunk.choices:
            finish_reason = choice.finish_reason or finish_reason
            for entry in (choice.logprobs.content or []) if choice.logprobs else []:
                tokens.append(entry.token)
                leads.append(entry.top_logprobs[0].logprob - entry.top_logprobs[1].logprob)
    return Said(tuple(tokens), tuple(leads), finish_reason)


async def say_all(base_url: str, prompts: list[str]) -> tuple[list[Said], list[Said]]:
    """Answers to all prompts at once, then to each alone."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=600) as client:
        together = await asyncio.gather(*(say(client, prompt) for prompt in prompts))
        alone = [await say(client, prompt) for prompt in prompts]
    return list(together), alone


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_concurrent_streams_equal_the_same_requests_alone(base_url: str) -> None:
    prompts = [task.format(subject) for subject in SUBJECTS for task in TASKS]
    assert len(set(prompts)) == NUM_STREAMS
    together, alone = asyncio.run(say_all(base_url, prompts))
    near_ties = 0
    for prompt, one, other in zip(prompts, alone, together):
        assert other.finish_reason in {"stop", "length"}, prompt
        if one.tokens == other.tokens:
            assert one.finish_reason == other.finish_reason
            continue
        at = next(i for i, (a, b) in enumerate(zip(one.tokens, other.tokens)) if a != b)
        print(f"{prompt!r}: token {at} differs, where the runner-up was {one.leads[at]:.2e} behind")
        assert one.leads[at] < NEAR_TIE, (prompt, one.tokens, other.tokens)
        near_ties += 1
    print(f"{NUM_STREAMS} streams, {sum(len(s.tokens) for s in together)} tokens, {near_ties} near-ties")
    assert near_ties <= 2
