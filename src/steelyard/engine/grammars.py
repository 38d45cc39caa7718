"""The grammars of live requests: compiled in a bounded pool, walked as tokens come, masks for the rows of a step.

    open --pool--> compiled --poll--> request may be scheduled --masks(plan)--> row -> mask --accept(ids)--> ...

A mask is made for (row, epoch, position): the request that holds the row in that epoch, with exactly the tokens
below that position consumed. A row whose request has ended meanwhile gets none; what it samples is thrown away.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from steelyard.core.request import Request
from steelyard.core.step import StepPlan, Want
from steelyard.errors import InvalidRequest, Overloaded
from steelyard.grammar.masks import Vocabulary
from steelyard.grammar.thinking import Walker

MAX_COMPILING = 256
MAX_KEPT = 64
"""Compiled grammars kept for later requests with the same text."""
_THREADS = 1
"""More would take the interpreter lock from the loop, and a compilation is milliseconds."""


@dataclass(slots=True)
class _Compiling:
    future: Future[Walker]
    requests: list[Request]
    grammar: str


class Grammars:
    """One engine's. All methods are called by its loop; only compiling, and `before_compile`, happen in a thread."""

    def __init__(
        self,
        vocab_size: int,
        compile: Callable[[Vocabulary, str], Walker] = lambda words, text: words.compile(text),
        before_compile: Callable[[str], None] = lambda grammar: None,
    ) -> None:
        self._before_compile = before_compile
        self._vocab_size = vocab_size
        self._compile = compile
        self._pool: ThreadPoolExecutor | None = None
        self._vocabulary: Future[Vocabulary] | None = None
        self._compiling: list[_Compiling] = []
        self._walkers: dict[tuple[str, int], Walker] = {}
        self._kept: OrderedDict[str, Walker] = OrderedDict()
        self._failed: list[tuple[Request, str]] = []
        self._min_tokens: dict[tuple[str, int], int] = {}
        self._eos_token_ids = frozenset[int]()

    def set_vocabulary(self, tokenizer_json: str, eos_token_ids: Sequence[int]) -> None:
        """The tokens' texts, from a server; the first stay."""
        if self._vocabulary is None:
            self._eos_token_ids = frozenset(eos_token_ids)
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
            self._vocabulary = self._pool.submit(Vocabulary, tokenizer_json, self._vocab_size, eos_token_ids)

    def check(self, grammar: str) -> None:
        """Raises InvalidRequest or Overloaded if one more request with this grammar cannot be taken."""
        if grammar and self._vocabulary is None:
            raise InvalidRequest("grammar: this engine knows no vocabulary, so it cannot hold an output to a grammar")
        if grammar and len(self._compiling) >= MAX_COMPILING:
            raise Overloaded(f"{len(self._compiling)} grammars wait to be compiled", retry_after_s=1.0)

    def open(self, requests: Sequence[Request], grammar: str, min_tokens: int = 0) -> None:
        """Requests just taken in, all with this grammar; with "" nothing is to be done.

        min_tokens  none of them ends before it has so many, unless its grammar has to
        """
        if not grammar:
            return
        if min_tokens:
            self._min_tokens |= {request.key: min_tokens for request in requests}
        kept = self._kept.get(grammar)
        if kept is not None:
            self._kept.move_to_end(grammar)
            self._begin(requests, kept)
            return
        assert self._pool is not None, "opened without a vocabulary"
        future = self._pool.submit(self._compiled, grammar)
        self._compiling.append(_Compiling(future, list(requests), grammar))

    def close(self, request: Request) -> None:
        self._walkers.pop(request.key, None)
        self._min_tokens.pop(request.key, None)

    def poll(self) -> list[tuple[Request, str]]:
        """Let requests whose grammar is ready be scheduled; returns those whose grammar failed, and why."""
        if not self._compiling and not self._failed:
            return []
        failed, self._failed = self._failed, []
        for job in [job for job in self._compiling if job.future.done()]:
            self._compiling.remove(job)
            error = job.future.exception()
            if error is not None:
                failed += [(request, str(error)) for request in job.requests]
                continue
            walker = self._kept[job.grammar] = job.future.result()
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            self._begin(job.requests, walker)
        return failed

    def wait(self) -> bool:
        """Until one more grammar is compiled, for a caller with nothing else to do; False if none is being compiled."""
        wait([job.future for job in self._compiling], return_when=FIRST_COMPLETED)
        return bool(self._compiling)

    def accept(self, request: Request, ids: Iterable[int]) -> None:
        """Tokens were committed. Those that the grammar does not have fail the request at the next poll."""
        walker = self._walkers.get(request.key)
        if walker is not None and not walker.consume(list(ids)) and request.reason is None:
            self._failed.append((request, walker.error or "a token that the grammar does not have was sampled"))

    def masks(self, plan: StepPlan, request_at: Callable[[int], Request]) -> dict[int, npt.NDArray[np.int32]]:
        """Masks of the plan's masked rows, int32 [ceil(vocab / 32)] each."""
        found: dict[int, npt.NDArray[np.int32]] = {}
        masked = frozenset(plan.masked)
        for work in plan.work:
            if work.row not in masked or Want.TOKEN not in work.want:
                continue
            request = request_at(work.row)
            if request.reason is not None:
                continue
            position = work.start + work.num_new
            assert position == len(request.tokens), f"a mask for position {position} of {request}"
            walker = self._walkers[request.key]
            mask = np.frombuffer(walker.mask(), np.int32)
            found[work.row] = _without(mask, self._unwanted_ends(request))
            if walker.error:
                self._failed.append((request, walker.error))
        return found

    def _unwanted_ends(self, request: Request) -> frozenset[int]:
        if request.num_generated < self._min_tokens.get(request.key, 0):
            return request.stop_ids
        return self._eos_token_ids & request.stop_ids if request.sampling.ignore_eos else frozenset()

    def _compiled(self, grammar: str) -> Walker:
        """Runs in the pool, behind the making of the vocabulary."""
        assert self._vocabulary is not None
        self._before_compile(grammar)
        return self._compile(self._vocabulary.result(), grammar)

    def _begin(self, requests: Iterable[Request], walker: Walker) -> None:
        for request in requests:
            if request.reason is None:
                self._walkers[request.key] = walker.copy()
                request.grammar_ready = True


def _without(mask: npt.NDArray[np.int32], ids: frozenset[int]) -> npt.NDArray[np.int32]:
    """The mask without these ids; as it is if nothing else would be left."""
    if not ids:
        return mask
    fewer = mask.copy()
    words = fewer.view(np.uint32)
    for token in ids:
        words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return fewer if fewer.any() else mask
