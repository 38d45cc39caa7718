"""POST /tokenize and /detokenize: the same tokenizer and template that requests go through."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.errors import InvalidRequest
from steelyard.server import sse
from steelyard.server.exchange import Exchange
from steelyard.server.logprobs import TokenNames
from steelyard.server.protocol import DetokenizeBody, TokenizeBody, given

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(exchange: Exchange, raw: bytes) -> None:
    """Ids of a prompt or of rendered messages. The text may be as long as the context, as for a completion."""
    service = exchange.service
    body = exchange.decode(_TOKENIZE, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give either prompt or messages", param="prompt")
    if body.messages is not None:
        text = service.prompts.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
        )
        ids = await service.prompts.encode(text, given(body.add_special_tokens, False), "messages")
    else:
        ids = await service.prompts.encode(body.prompt or "", given(body.add_special_tokens, True), "prompt")
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.prompts.max_model_len, "tokens": ids}
    if body.return_token_strs:
        names = TokenNames(service.prompts.tokenizer)
        answer["token_strs"] = [names.text(token) for token in ids]
    await exchange.respond(200, sse.encode(answer))


async def detokenize(exchange: Exchange, raw: bytes) -> None:
    """The text of ids, special tokens included unless asked otherwise."""
    service = exchange.service
    body = exchange.decode(_DETOKENIZE, raw)
    service.check_model(body.model)
    tokenizer = service.prompts.need_tokenizer("tokens")
    service.prompts.check_ids(body.tokens, "tokens")
    text = tokenizer.decode(body.tokens, given(body.skip_special_tokens, False))
    await exchange.respond(200, sse.encode({"prompt": text}))
