"""POST /v1/chat/completions: messages through the model's template, whole or as a stream.

A stream's first chunk of a choice carries the role and its first text together: the first event is the first token.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from steelyard.core.timed import State
from steelyard.server import sse
from steelyard.server.exchange import Exchange
from steelyard.server.logprobs import TokenNames, chat_logprobs
from steelyard.server.protocol import ChatBody, chat_sampling, given, unsupported_fields
from steelyard.server.run import Chunk, Run, max_output

_DECODER = msgspec.json.Decoder(ChatBody)
_UNSUPPORTED = unsupported_fields(ChatBody)


async def chat_completions(exchange: Exchange, raw: bytes) -> None:
    """Serve one request; raises SteelyardError for what the client must hear."""
    service = exchange.service
    body = exchange.decode(_DECODER, raw, _UNSUPPORTED)
    service.check_model(body.model)
    terms = service.terms(exchange.tenant, body)
    sampling = chat_sampling(body)
    service.check_sampling(sampling)
    with service.admission.reserve(exchange.tenant) as place:
        exchange.to(State.TOKENIZE)
        text = service.prompts.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
        )
        special = given(body.add_special_tokens, False)
        prompt = await service.prompts.from_text(text, special, "messages", terms.namespace)
        sampling = service.limited(sampling, [len(prompt.ids)])
        place.add_tokens(len(prompt.ids), max_output(sampling))
        continues = bool(body.continue_final_message)
        async with Run(exchange, [prompt], sampling, place, continues) as run:
            await run.start(terms)
            reply = _Reply(exchange, body, run)
            await (reply.stream() if body.stream else reply.whole())


class _Reply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, exchange: Exchange, body: ChatBody, run: Run) -> None:
        self._exchange = exchange
        self._body = body
        self._run = run
        self._names = TokenNames(exchange.service.prompts.tokenizer)
        self._id = exchange.account.response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created_s = exchange.service.wall_s()
        self._begun: set[int] = set()

    async def whole(self) -> None:
        """Collect every choice, then answer in one."""
        choices = [
            self._choice(chunk, {"message": {"role": "assistant", "content": chunk.text, "refusal": None}})
            for chunk in await self._run.whole()
        ]
        answer = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created_s,
            "model": self._exchange.service.model_name,
            "choices": choices,
            "usage": self._run.usage(),
        }
        if self._body.return_ledger:
            answer["ledger"] = self._exchange.ledger()
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._run.prompt_of(0).ids
        await self._exchange.respond(200, sse.encode(answer))

    async def stream(self) -> None:
        """One event a chunk; all that is ready at once is one write."""
        options = self._body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        model = self._exchange.service.model_name
        form = sse.ChunkFormat(self._id, "chat.completion.chunk", self._created_s, model, include_usage)
        async for chunks in self._run.chunks():
            await self._exchange.write(b"".join([form.chunk(self._encoded(chunk)) for chunk in chunks]))
        last = form.usage(sse.encode(self._run.usage())) if include_usage else b""
        if self._body.return_ledger:
            last += form.ledger(sse.encode(self._exchange.ledger()))
        await self._exchange.end(last + sse.DONE)

    def _encoded(self, chunk: Chunk) -> bytes:
        first = chunk.index not in self._begun
        plain = not self._body.logprobs and not self._body.return_token_ids and chunk.finish_reason is None
        if plain and not first:
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                chunk.index,
                sse.encode(chunk.text),
            )
        self._begun.add(chunk.index)
        delta = {"role": "assistant", "content": chunk.text} if first else {"content": chunk.text}
        return sse.encode(self._choice(chunk, {"delta": delta}))

    def _choice(self, chunk: Chunk, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self._names, chunk.ids, chunk.logprobs) if self._body.logprobs else None
        choice = {"index": chunk.index, **content, "logprobs": logprobs, "finish_reason": chunk.finish_reason}
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.ids
        return choice
