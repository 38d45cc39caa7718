"""One request, computed in seven situations: are its tokens the same, and if not, by how little do they differ.

    alone        after nothing else                     crowd       beside other requests
    again        its prompt found in the prefix cache   chunks      its prompt over several steps
    preempted    its KV lost and computed again         restart     a new engine

Each situation is looked at: that it really came about is part of the answer. Printing is not done here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from steelyard.core.sampling import SamplingParams
from steelyard.core.step import TokenLogprobs
from steelyard.errors import InvalidRequest
from steelyard.llm import LLM, RequestOutput

Make = Callable[..., LLM]
"""A new LLM, with these of EngineConfig's fields changed."""

CROWD = 7
NUM_TOP = 5


@dataclass(frozen=True, slots=True)
class Load:
    """The request under test: a random prompt of `prompt_len` tokens, `max_tokens` of output, greedy or sampled."""

    prompt_len: int = 96
    max_tokens: int = 48
    seed: int = 0

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The prompt, then those of the crowd: longer, so that in need of room the one under test is displaced."""
        rng = random.Random(self.seed)
        lengths = [self.prompt_len] + [self.prompt_len * (7 + i) // 6 for i in range(CROWD)]
        return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]

    def sampling(self) -> list[SamplingParams]:
        """Greedy, and sampled with a seed of its own."""
        return [
            SamplingParams(temperature=t, seed=11, max_tokens=self.max_tokens, ignore_eos=True, logprobs=NUM_TOP)
            for t in (0.0, 1.0)
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One situation against `alone`.

    happened    whether the situation came about, and `evidence` for it
    first_difference   of token ids; None: all equal
    gap         nats between the two tokens there, by the request alone; None: equal, or beyond its best few
    largest     difference of the log-probabilities of tokens before it, in nats; 0.0: the same bits
    """

    situation: str
    sampled: bool
    happened: bool
    evidence: str
    first_difference: int | None
    gap: float | None
    largest: float

    @property
    def is_identical(self) -> bool:
        return self.first_difference is None and self.largest == 0.0


def run_selftest(make: Make, load: Load) -> Iterator[Outcome]:
    """Every situation, greedy and sampled, as it is known. Raises StartError; InvalidRequest if the load cannot fit."""
    alone = make()
    prompts = load.prompts(alone.engine.runner.caps.vocab_size)
    longest = max(map(len, prompts)) + load.max_tokens
    if longest > alone.engine.runner.caps.max_model_len:
        raise InvalidRequest(
            f"--prompt-len {load.prompt_len} and --max-tokens {load.max_tokens} need {longest} tokens for the crowd's "
            f"longest, more than the context of {alone.engine.runner.caps.max_model_len}; ask for less",
            param="prompt_len",
        )
    size = alone.engine.runner.caps.block_size
    chunked = {"max_num_batched_tokens": max(size, load.prompt_len // 4), "max_num_seqs": CROWD + 1}
    starts = -(-sum(map(len, prompts[:4])) // size) + 4
    small = {"num_gpu_blocks_override": starts + load.max_tokens // size, "kv_cache_memory_bytes": None}
    base = [_run(alone, prompts[:1], sampling) for sampling in load.sampling()]
    situations: list[tuple[str, Callable[[], LLM], int]] = [
        ("again", lambda: alone, 1),
        ("crowd", lambda: alone, CROWD + 1),
        ("chunks", lambda: make(**chunked), 1),
        ("preempted", lambda: make(**small), 4),
        ("restart", make, 1),
    ]
    for name, engine, num_prompts in situations:
        for sampling, (expected, _) in zip(load.sampling(), base, strict=True):
            llm = engine()
            if name != "again":
                llm.reset_prefix_cache()
            found, evidence = _run(llm, prompts[:num_prompts], sampling)
            yield _compare(name, sampling, expected, found, evidence)


def seconds_alone(llm: LLM, load: Load) -> float:
    """Wall time of the greedy request alone, the second of two with nothing cached."""
    prompts, sampling = load.prompts(llm.engine.runner.caps.vocab_size)[:1], load.sampling()[0]
    for _ in range(2):
        llm.reset_prefix_cache()
        began_ns = time.perf_counter_ns()
        _run(llm, prompts, sampling)
    return (time.perf_counter_ns() - began_ns) / 1e9


def _run(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> tuple[RequestOutput, dict[str, int]]:
    """The request under test is submitted last: the latest is preempted first."""
    before = llm.engine.scheduler.counters.as_dict()
    output = llm.generate([*prompts[1:], prompts[0]], sampling)[-1]
    after = llm.engine.scheduler.counters.as_dict()
    return output, {name: after[name] - before[name] for name in after} | {"rows": len(prompts)}


def _compare(
    name: str, sampling: SamplingParams, expected: RequestOutput, found: RequestOutput, counted: dict[str, int]
) -> Outcome:
    evidence, happened = {
        "again": (f"{found.cached_tokens} cached", found.cached_tokens > 0),
        "crowd": (f"{counted['rows']} rows", counted["steps"] < counted["generation_tokens"] // 2),
        "chunks": (f"{counted['prefill_chunks']} chunks", counted["prefill_chunks"] > 1),
        "preempted": (f"{found.preemptions} times", found.preemptions > 0),
        "restart": ("a new engine", True),
    }[name]
    first, gap, largest = _difference(expected, found)
    return Outcome(name, sampling.temperature > 0, happened, evidence, first, gap, largest)


def _difference(expected: RequestOutput, found: RequestOutput) -> tuple[int | None, float | None, float]:
    ours, theirs = expected.outputs[0], found.outputs[0]
    assert ours.logprobs is not None and theirs.logprobs is not None
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    same = slice(0, first)
    both = zip(ours.logprobs[same], theirs.logprobs[same], strict=True)
    largest = max((abs(a.logprob - b.logprob) for a, b in both), default=0.0)
    return first, None if first is None else _gap(ours.logprobs[first], theirs.token_ids[first]), largest


def _gap(alone: TokenLogprobs, other: int) -> float | None:
    """Nats from the token taken alone to `other`, both by the request alone."""
    known = dict(alone.top)
    return None if other not in known else abs(alone.logprob - known[other])
