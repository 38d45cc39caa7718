"""GET /health (a token can be made), /live (this process answers) and /metrics. None of them costs the engine work."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from steelyard.server.exposition import CONTENT_TYPE
from steelyard.server.responses import json_response
from steelyard.server.service import Service


class Health:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        """200, or 503 with the reason: starting, draining, stalled or dead."""
        reason = self._service.unhealthy()
        if reason is not None:
            return json_response({"status": "unavailable", "reason": reason}, 503)
        return json_response({"status": "ok"})

    async def live(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Everything to an operator; to a tenant its own tokens, responses and time by account."""
        service, client, tenant = self._service, self._service.client, request.state.tenant
        metrics = await service.all_metrics()
        if service.config.public_metrics or tenant.operator:
            page = metrics.page(service.model_name, client.info, client.status, service.unhealthy())
        else:
            page = metrics.tenant_page(service.model_name, tenant.label)
        return Response(page, media_type=None, headers={"content-type": CONTENT_TYPE})
