"""From messages or text to token ids: template, tokenizer, and the limits that are known before the engine is asked.

Long text is encoded in a thread, so that a prompt of a megabyte holds up nobody's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from steelyard.errors import ContextLengthExceeded, InvalidRequest
from steelyard.server.client import EngineClient
from steelyard.server.protocol import Message
from steelyard.server.terms import Prompt
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer

LONG_CHARS = 4096
"""Text above this is encoded in a thread: below, the change of threads costs more than the work."""
LONG_IDS = 4096
"""The same for hashing token ids."""


_RESERVED = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)


class Prompts:
    """Turns what a client sent into prompts. Tokenizer and template are None where the server runs without them."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vocab_size: int,
        max_model_len: int,
    ) -> None:
        self._client = client
        self._template = template
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="encode")
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    @property
    def chat_template(self) -> str | None:
        """Its source; None where the model has none."""
        return self._template.source if self._template is not None else None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer. Raises InvalidRequest, naming the field that asked for it, if the server has none."""
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{param}: this server runs with --skip-tokenizer-init; send token ids to /v1/completions", param=param
            )
        return self.tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        kwargs: dict[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The chat as the model's text. Raises InvalidRequest: no template, or the template's own refusal."""
        self.need_tokenizer("messages")
        assert self._template is not None, "a server with a tokenizer has a template, if only one that refuses"
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be true together with add_generation_prompt",
                param="continue_final_message",
            )
        for name in kwargs or ():
            if name in _RESERVED:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} is set by other fields", param=f"chat_template_kwargs.{name}"
                )
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        plain = [msgspec.to_builtins(message) for message in messages]
        for i, message in enumerate(plain):
            if message["content"] is None and not (message["role"] == "assistant" and message["tool_calls"]):
                where = f"messages[{i}].content"
                raise InvalidRequest(
                    f"{where}: is required, but in an assistant's tool_calls",
                    param=where,
                    code="missing_required_parameter",
                )
            if message["role"] == "developer":
                message["role"] = "system"
        text = self._template.render(plain, tools=tools, add_generation_prompt=opens, **(kwargs or {}))
        return _left_open(text, messages[-1]) if continue_final_message else text

    async def from_text(self, text: str, add_special_tokens: bool, param: str, namespace: bytes = b"") -> Prompt:
        """Raises ContextLengthExceeded before encoding if the text cannot fit, InvalidRequest if nothing comes out."""
        ids = await self.encode(text, add_special_tokens, param)
        if not ids:
            raise InvalidRequest(f"{param}: comes out as no tokens at all; say something", param=param)
        return await self._hashed(ids, namespace)

    async def from_ids(self, ids: list[int], param: str, namespace: bytes = b"") -> Prompt:
        """Raises InvalidRequest if there are none or one is outside the vocabulary."""
        if not ids:
            raise InvalidRequest(f"{param}: must have at least one token id", param=param)
        self.check_ids(ids, param)
        return await self._hashed(ids, namespace)

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises InvalidRequest if an id is outside the model's vocabulary."""
        bad = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise InvalidRequest(
                f"{param}: token ids must be between 0 and {self._vocab_size - 1}, got {bad}", param=param
            )

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of `text`. Raises ContextLengthExceeded, before encoding, if no encoding of it could fit."""
        tokenizer = self.need_tokenizer(param)
        fewest = tokenizer.fewest_tokens(text)
        if fewest > self.max_model_len:
            raise ContextLengthExceeded(
                f"{param}: {len(text)} characters are at least {fewest} tokens, "
                f"and the context is {self.max_model_len} tokens",
                param=param,
            )
        if len(text) <= LONG_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, tokenizer.encode, text, add_special_tokens)

    async def _hashed(self, ids: list[int], namespace: bytes) -> Prompt:
        if len(ids) > self.max_model_len:
            return Prompt(ids, [])  # the engine refuses it with the numbers
        if len(ids) <= LONG_IDS:
            return Prompt(ids, self._client.block_hashes(ids, namespace))
        loop = asyncio.get_running_loop()
        return Prompt(ids, await loop.run_in_executor(self._threads, self._client.block_hashes, ids, namespace))


def _left_open(text: str, last: Message) -> str:
    """The rendered chat up to the end of its last message's content, so that the model goes on writing it."""
    parts = last.content or ""
    content = parts if isinstance(parts, str) else parts[-1].text
    for wanted in (content, content.strip()):
        at = text.rfind(wanted) if wanted else -1
        if at >= 0:
            return text[: at + len(wanted)]
    raise InvalidRequest(
        "continue_final_message: the chat template does not show the last message's content", param="messages"
    )
