"""POST /v1/responses: a chat whose answer is a list of items, whole or as named events, and may be gone on from.

    input (+ previous_response_id) --> turns --> the chat's own path --> items --> kept for the tenant

GET and DELETE /v1/responses/{id} are about what is kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from steelyard.errors import InvalidRequest
from steelyard.server import sse
from steelyard.server.dialogue import Dialogue
from steelyard.server.exchange import Exchange
from steelyard.server.protocol import Message, unsupported_fields
from steelyard.server.protocol_responses import ResponsesBody, as_chat, in_our_names, turns_of
from steelyard.server.response_items import Event, Output
from steelyard.server.response_store import Kept, ResponseNotFound
from steelyard.server.responses import json_response
from steelyard.server.routes.chat import conversation
from steelyard.server.run import Chunk, Run
from steelyard.server.service import Service

_DECODER = msgspec.json.Decoder(ResponsesBody)
_UNSUPPORTED = unsupported_fields(ResponsesBody)


async def responses(exchange: Exchange, raw: bytes) -> None:
    """Serve one request; raises SteelyardError for what the client must hear."""
    service = exchange.service
    body = exchange.decode(_DECODER, raw, _UNSUPPORTED)
    turns = turns_of(body.input)
    if body.previous_response_id is not None:
        kept = await _kept(service, exchange.tenant.name, body.previous_response_id, "previous_response_id")
        turns = [*kept.turns, *turns]
    try:
        async with conversation(exchange, as_chat(body, turns)) as (run, dialogue):
            reply = _Reply(exchange, body, turns, run, dialogue())
            await (reply.stream() if body.stream else reply.whole())
    except InvalidRequest as error:
        raise in_our_names(error) from None


async def _kept(service: Service, tenant: str, id: str, param: str | None = None) -> Kept:
    """Here, or at another front end. Raises ResponseNotFound."""
    try:
        return service.responses.get(tenant, id, param)
    except ResponseNotFound:
        for turns, answer in await service.ask_others("response", [tenant, id]):
            return Kept(msgspec.convert(turns, tuple[Message, ...]), answer, 0, 0)
        raise


class ResponseRoutes:
    """Handlers of what is kept, over one service. All raise ResponseNotFound."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def one(self, request: Request) -> Response:
        service, tenant, id = self._service, request.state.tenant.name, request.path_params["id"]
        if request.method != "DELETE":
            kept = await _kept(service, tenant, id)
            return Response(kept.answer, media_type="application/json")
        try:
            service.responses.delete(tenant, id)
        except ResponseNotFound:
            if not await service.ask_others("forget_response", [tenant, id]):
                raise
        return json_response({"id": id, "object": "response", "deleted": True})


class _Reply:
    """Writes the answer to one request, whole or as events."""

    def __init__(
        self, exchange: Exchange, body: ResponsesBody, turns: Sequence[Message], run: Run, dialogue: Dialogue
    ) -> None:
        self._exchange = exchange
        self._body = body
        self._turns = turns
        self._run = run
        self._dialogue = dialogue
        self._output = Output()
        self._id = exchange.account.response_id = f"resp_{uuid.uuid4().hex}"
        self._created_s = exchange.service.wall_s()
        self._num_events = 0

    async def whole(self) -> None:
        """Collect everything, then answer in one."""
        [chunk] = await self._run.whole()
        self._take(chunk)
        await self._exchange.respond(200, sse.encode(self._finished(chunk.finish_reason)))

    async def stream(self) -> None:
        """Named events, numbered; the last one has the whole response."""
        begun = self._answer("in_progress")
        await self._exchange.write(self._encoded([_about("created", begun), _about("in_progress", begun)]))
        reason: str | None = None
        async for chunks in self._run.chunks():
            events = [event for chunk in chunks for event in self._take(chunk)]
            reason = chunks[-1].finish_reason
            if events:
                await self._exchange.write(self._encoded(events))
        answer = self._finished(reason)
        await self._exchange.end(self._encoded([_about(answer["status"], answer)]))

    def _take(self, chunk: Chunk) -> list[Event]:
        events = self._output.feed(self._dialogue.feed(chunk))
        if chunk.finish_reason is not None:
            events += self._output.finish(_status(chunk.finish_reason))
        return events

    def _finished(self, reason: str | None) -> dict[str, Any]:
        """The response at its end, kept unless the client said not to."""
        answer = self._answer(_status(reason), reason)
        if self._body.store is not False:
            turns = [*self._turns, self._output.message()]
            self._exchange.service.responses.keep(self._exchange.tenant.name, self._id, turns, answer)
        return answer

    def _answer(self, status: str, reason: str | None = None) -> dict[str, Any]:
        """The response object: what was asked, as it was understood, and what came out."""
        body = self._body
        whole = status != "in_progress"
        why = {"length": "max_output_tokens"}.get(reason or "", reason)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "model": self._exchange.service.model_name,
            "output": self._output.items if whole else [],
            "usage": self._usage() if whole else None,
            "error": None,
            "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": _text_config(body),
            "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
            "tools": [msgspec.to_builtins(tool) for tool in body.tools or ()],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        used = self._run.usage()
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": used.get("prompt_tokens_details", {}).get("cached_tokens", 0)},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            },
            "total_tokens": used["total_tokens"],
        }

    def _encoded(self, events: list[Event]) -> bytes:
        written = b""
        for event in events:
            written += sse.named_event(event["type"], sse.encode({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return written


def _about(what: str, answer: dict[str, Any]) -> Event:
    return {"type": f"response.{what}", "response": answer}


def _status(reason: str | None) -> str:
    return "completed" if reason in ("stop", "tool_calls") else "incomplete"


def _text_config(body: ResponsesBody) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    plain = msgspec.to_builtins(form) if form is not None else {"type": "text"}
    return {"format": {name: value for name, value in plain.items() if value is not None}}
