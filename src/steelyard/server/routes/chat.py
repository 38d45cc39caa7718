"""POST /v1/chat/completions: messages through the model's template, whole or as a stream.

A stream's first chunk of a choice carries the role and its first text together: the first event is the first token.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from steelyard.core.timed import State
from steelyard.errors import InvalidRequest
from steelyard.grammar.thinking import Thinking
from steelyard.server import sse
from steelyard.server.dialogue import THINK, Dialogue
from steelyard.server.exchange import Exchange
from steelyard.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from steelyard.server.protocol import ChatBody, given, unsupported_fields
from steelyard.server.run import Chunk, Reasoning, Run, max_output
from steelyard.server.sampling import chat_sampling
from steelyard.server.service import Service
from steelyard.text.tools import FORMATS, ToolFormat

_DECODER = msgspec.json.Decoder(ChatBody)
_UNSUPPORTED = unsupported_fields(ChatBody)


async def chat_completions(exchange: Exchange, raw: bytes) -> None:
    """Serve one request; raises SteelyardError for what the client must hear."""
    body = exchange.decode(_DECODER, raw, _UNSUPPORTED)
    async with conversation(exchange, body) as (run, dialogue):
        reply = _Reply(exchange, body, run, dialogue)
        await (reply.stream() if body.stream else reply.whole())


@asynccontextmanager
async def conversation(exchange: Exchange, body: ChatBody) -> AsyncIterator[tuple[Run, Callable[[], Dialogue]]]:
    """A chat in the engine's hands, and what reads its choices. Raises SteelyardError before anything is written."""
    service = exchange.service
    service.check_model(body.model)
    terms = replace(service.terms(exchange.tenant, body), grammar=await service.grammar(body))
    tools = _tools(service, body)
    sampling = chat_sampling(body)
    service.check_sampling(sampling)
    with service.admission.reserve(exchange.tenant) as place:
        exchange.to(State.TOKENIZE)
        text = service.prompts.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
            tools=[msgspec.to_builtins(tool) for tool in body.tools or ()] if body.tool_choice != "none" else None,
        )
        reasoning = _reasoning(service, body, text)
        if reasoning is not None and (terms.grammar or body.thinking_token_budget is not None):
            terms = replace(terms, grammar=_behind(service, reasoning, body.thinking_token_budget, terms.grammar))
        special = given(body.add_special_tokens, False)
        prompt = await service.prompts.from_text(text, special, "messages", terms.namespace)
        sampling = service.limited(sampling, [len(prompt.ids)])
        place.add_tokens(len(prompt.ids), max_output(sampling))
        continues = bool(body.continue_final_message)
        async with Run(exchange, [prompt], sampling, place, continues, reasoning) as run:
            await run.start(terms)
            yield run, lambda: Dialogue(tools, reasoning, body.parallel_tool_calls is False)


def _tools(service: Service, body: ChatBody) -> ToolFormat | None:
    """How calls are read out of the answer; None where there are none. Raises InvalidRequest."""
    if not body.tools or body.tool_choice == "none":
        return None
    if body.tool_choice not in (None, "auto"):
        return FORMATS["json"]
    if service.tool_format is None:
        raise InvalidRequest(
            "tools: this model's template shows no format of calls that is known here; "
            'start the server with --tool-call-parser, or send tool_choice "required"',
            param="tools",
            code="unsupported_parameter",
        )
    return service.tool_format


def _reasoning(service: Service, body: ChatBody, text: str) -> Reasoning | None:
    if not service.splits_reasoning:
        if body.thinking_token_budget is not None:
            raise InvalidRequest(
                "thinking_token_budget: this model's template shows no thinking; leave it out",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        return None
    return Reasoning(*THINK, inside=text.rstrip().endswith(THINK[0]), stops=bool(body.stop_in_reasoning))


def _behind(service: Service, marks: Reasoning, budget: int | None, grammar: str) -> str:
    """A grammar for thinking, then an answer that is held to `grammar`, or free if that is empty."""
    encode = service.prompts.need_tokenizer("messages").encode
    newlines = [encode(text, False) for text in ("\n", "\n\n")]
    return Thinking(
        opens=tuple(encode(marks.opens, False)),
        closes=tuple(encode(marks.closes, False)),
        gap=tuple(ids[0] for ids in newlines if len(ids) == 1),
        inside=marks.inside,
        budget=budget,
        answer=grammar,
    ).as_grammar()


class _Reply:
    """Writes the answer to one request, whole or in chunks."""

    def __init__(self, exchange: Exchange, body: ChatBody, run: Run, dialogue: Callable[[], Dialogue]) -> None:
        self._dialogues: defaultdict[int, Dialogue] = defaultdict(dialogue)
        self._exchange = exchange
        self._body = body
        self._run = run
        self._names = TokenNames(exchange.service.prompts.tokenizer)
        self._id = exchange.account.response_id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created_s = exchange.service.wall_s()
        self._begun: set[int] = set()

    async def whole(self) -> None:
        """Collect every choice, then answer in one."""
        choices = [self._choice(chunk, {"message": self._message(chunk)}) for chunk in await self._run.whole()]
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
        num_top = self._body.prompt_logprobs
        if num_top is not None:
            ids, known = self._run.prompt_of(0).ids, self._run.prompt_logprobs(0)
            answer["prompt_logprobs"] = prompt_logprobs(self._names, ids, known, num_top)
        await self._exchange.respond(200, sse.encode(answer))

    async def stream(self) -> None:
        """One event a chunk; all that is ready at once is one write."""
        options = self._body.stream_options
        include_usage = options is not None and bool(options.include_usage)
        model = self._exchange.service.model_name
        form = sse.ChunkFormat(self._id, "chat.completion.chunk", self._created_s, model, include_usage)
        await self._run.stream(lambda chunk: form.chunk(choice) if (choice := self._encoded(chunk)) else b"")
        last = form.usage(sse.encode(self._run.usage())) if include_usage else b""
        if self._body.return_ledger:
            last += form.ledger(sse.encode(self._exchange.ledger()))
        await self._exchange.end(last + sse.DONE)

    def _encoded(self, chunk: Chunk) -> bytes:
        """One choice's JSON; empty if all of the chunk is held back until more of the answer has come."""
        said = self._dialogues[chunk.index].feed(chunk)
        first = chunk.index not in self._begun
        plain = not self._body.logprobs and not self._body.return_token_ids and chunk.finish_reason is None
        if plain and said.nothing:
            return b""
        if plain and not first and not said.reasoning and not said.calls:
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                chunk.index,
                sse.encode(said.content),
            )
        self._begun.add(chunk.index)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if said.content or not (said.reasoning or said.calls):
            delta["content"] = said.content
        if said.reasoning:
            delta["reasoning_content"] = said.reasoning
        if said.calls:
            delta["tool_calls"] = said.calls
        return sse.encode(self._choice(chunk, {"delta": delta}))

    def _message(self, chunk: Chunk) -> dict[str, Any]:
        said = self._dialogues[chunk.index].feed(chunk)
        content = said.content if said.content or not said.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if said.reasoning:
            message["reasoning_content"] = said.reasoning
        if said.calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in said.calls]
        return message

    def _choice(self, chunk: Chunk, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = chat_logprobs(self._names, chunk.ids, chunk.logprobs) if self._body.logprobs else None
        choice = {"index": chunk.index, **content, "logprobs": logprobs, "finish_reason": None}
        if chunk.finish_reason is not None:
            choice["finish_reason"] = self._dialogues[chunk.index].finish_reason(chunk)
            choice["stop_reason"] = chunk.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = chunk.ids
        return choice
