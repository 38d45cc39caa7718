"""POST /v1/completions: prompts as text or token ids, one or many, whole or as a stream."""

from __future__ import annotations

import uuid
from dataclasses import replace
from math import inf
from typing import Any

import msgspec

from steelyard.core.sampling import SamplingParams
from steelyard.core.timed import State
from steelyard.errors import InvalidRequest
from steelyard.server import sse
from steelyard.server.exchange import Exchange
from steelyard.server.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from steelyard.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    MAX_CHOICES,
    CompletionBody,
    given,
    prompts_of,
    unsupported_fields,
)
from steelyard.server.run import Chunk, Run, max_output
from steelyard.server.sampling import completion_sampling
from steelyard.server.service import Service
from steelyard.server.terms import Prompt
from steelyard.wire.messages import Logprob

_DECODER = msgspec.json.Decoder(CompletionBody)
_UNSUPPORTED = unsupported_fields(CompletionBody)
_OBJECT = "text_completion"


async def completions(exchange: Exchange, raw: bytes) -> None:
    """Serve one request; raises SteelyardError for what the client must hear."""
    service = exchange.service
    body = exchange.decode(_DECODER, raw, _UNSUPPORTED)
    service.check_model(body.model)
    terms = replace(service.terms(exchange.tenant, body), grammar=await service.grammar(body))
    sampling = completion_sampling(body)
    service.check_sampling(sampling)
    with service.admission.reserve(exchange.tenant) as place:
        exchange.to(State.TOKENIZE)
        prompts = await _prompts(service, body, sampling.n, terms.namespace)
        sampling = service.limited(sampling, [len(prompt.ids) for prompt in prompts])
        if sampling.max_tokens is None:
            sampling = replace(sampling, max_tokens=_default_max_tokens(service, prompts, sampling))
        place.add_tokens(sum(len(prompt.ids) for prompt in prompts), max_output(sampling, len(prompts)))
        async with Run(exchange, prompts, sampling, place, continues=True) as run:
            await run.start(terms)
            reply = _Reply(exchange, body, run)
            await (reply.stream() if body.stream else reply.whole())


async def _prompts(service: Service, body: CompletionBody, n: int, namespace: bytes) -> list[Prompt]:
    asked = prompts_of(body.prompt, "prompt")
    if len(asked) * n > MAX_CHOICES:
        raise InvalidRequest(f"prompt: {len(asked)} prompts times n = {n} are over {MAX_CHOICES}", param="prompt")
    prompts: list[Prompt] = []
    for item in asked:
        if isinstance(item, str):
            special = given(body.add_special_tokens, True)
            prompts.append(await service.prompts.from_text(item, special, "prompt", namespace))
        else:
            prompts.append(await service.prompts.from_ids(item, "prompt", namespace))
    return prompts


def _default_max_tokens(service: Service, prompts: list[Prompt], sampling: SamplingParams) -> int | None:
    """OpenAI's default, or what room the longest prompt leaves; None lets the engine refuse what has no room."""
    room = service.max_request_tokens - max(len(prompt.ids) for prompt in prompts)
    asked = max(DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
    return min(asked, room) if room > 0 else None


class _Reply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, exchange: Exchange, body: CompletionBody, run: Run) -> None:
        service = exchange.service
        self._exchange = exchange
        self._body = body
        self._run = run
        self._names = TokenNames(service.prompts.tokenizer)
        self._id = exchange.account.response_id = f"cmpl-{uuid.uuid4().hex}"
        self._created_s = service.wall_s()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()
        self._token_ids = bool(body.return_token_ids) or service.prompts.tokenizer is None

    async def whole(self) -> None:
        """Collect every choice, then answer in one."""
        shown = self._best(await self._run.whole())
        choices = [{**self._choice(chunk, whole=True), "index": number} for number, chunk in enumerate(shown)]
        answer = {
            "id": self._id,
            "object": _OBJECT,
            "created": self._created_s,
            "model": self._exchange.service.model_name,
            "choices": choices,
            "usage": self._run.usage(),
        }
        if self._body.return_ledger:
            answer["ledger"] = self._exchange.ledger()
        await self._exchange.respond(200, sse.encode(answer))

    def _best(self, chunks: list[Chunk]) -> list[Chunk]:
        """Of each prompt's choices the n with the highest log-probability a token; all if no more were made."""
        num_made, num_shown = self._run.n, given(self._body.n, 1)
        if num_made == num_shown:
            return chunks
        shown: list[Chunk] = []
        for first in range(0, len(chunks), num_made):
            shown += sorted(chunks[first : first + num_made], key=_mean_logprob, reverse=True)[:num_shown]
        return shown

    async def stream(self) -> None:
        """One event a chunk; all that is ready at once is one write."""
        options = self._body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        model = self._exchange.service.model_name
        form = sse.ChunkFormat(self._id, _OBJECT, self._created_s, model, include_usage)
        await self._run.stream(lambda chunk: form.chunk(self._encoded(chunk)))
        last = form.usage(sse.encode(self._run.usage())) if include_usage else b""
        if self._body.return_ledger:
            last += form.ledger(sse.encode(self._exchange.ledger()))
        await self._exchange.end(last + sse.DONE)

    def _encoded(self, chunk: Chunk) -> bytes:
        body = self._body
        if body.logprobs is None and not body.echo and not self._token_ids and chunk.finish_reason is None:
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (
                chunk.index,
                sse.encode(chunk.text),
            )
        return sse.encode(self._choice(chunk, whole=False))

    def _choice(self, chunk: Chunk, whole: bool) -> dict[str, Any]:
        """A choice's JSON. The prompt (echo, prompt_token_ids) goes with its first chunk."""
        body, prompt = self._body, self._run.prompt_of(chunk.index)
        first = chunk.index not in self._echoed
        self._echoed.add(chunk.index)
        echo = bool(body.echo) and first
        choice: dict[str, Any] = {
            "index": chunk.index,
            "text": self._prompt_text(prompt) + chunk.text if echo else chunk.text,
            "logprobs": None if body.logprobs is None else self._choice_logprobs(chunk, prompt, echo and whole),
            "finish_reason": chunk.finish_reason,
        }
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if body.prompt_logprobs is not None:
            known = self._run.prompt_logprobs(chunk.index)
            choice["prompt_logprobs"] = prompt_logprobs(self._names, prompt.ids, known, body.prompt_logprobs)
        if self._token_ids:
            choice["token_ids"] = chunk.ids
            if first:
                choice["prompt_token_ids"] = prompt.ids
        return choice

    def _choice_logprobs(self, chunk: Chunk, prompt: Prompt, echo: bool) -> dict[str, Any]:
        form = self._logprobs.setdefault(chunk.index, CompletionLogprobs(self._names))
        if not echo:
            return form.of(chunk.ids, chunk.logprobs)
        num_top = self._body.logprobs or 0
        known = [Logprob(entry.logprob, entry.top[:num_top]) for entry in self._run.prompt_logprobs(chunk.index)]
        return form.of([*prompt.ids, *chunk.ids], [None, *known, *chunk.logprobs])

    def _prompt_text(self, prompt: Prompt) -> str:
        tokenizer = self._exchange.service.prompts.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.ids, given(self._body.skip_special_tokens, True))


def _mean_logprob(chunk: Chunk) -> float:
    return sum(entry.logprob for entry in chunk.logprobs) / len(chunk.logprobs) if chunk.logprobs else -inf
