"""GET /v1/models, /v1/models/{id}, /tokenizer_info and /version: what is served here, and by what."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from steelyard import __version__
from steelyard.server.responses import json_response
from steelyard.server.service import Service


class Models:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._version = __version__

    async def all(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card()]})

    async def one(self, request: Request) -> Response:
        """Raises ModelNotFound."""
        self._service.check_model(request.path_params["id"])
        return json_response(self._card())

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._version})

    async def tokenizer_info(self, request: Request) -> Response:
        """What clients need that render and count for themselves, by vLLM's names. Raises InvalidRequest."""
        prompts = self._service.prompts
        tokenizer = prompts.need_tokenizer("tokenizer_info")
        return json_response(
            {
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": prompts.max_model_len,
                "chat_template": prompts.chat_template,
            }
        )

    def _card(self) -> dict[str, Any]:
        service = self._service
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created_s,
            "owned_by": "steelyard",
            "root": service.model_name,
            "parent": None,
            "max_model_len": service.prompts.max_model_len,
        }
