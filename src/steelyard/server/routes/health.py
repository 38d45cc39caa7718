"""GET /health (a token can be made), /live (this process answers) and /metrics. None of them costs the engine work."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from steelyard.server.exposition import CONTENT_TYPE
from steelyard.server.responses import json_response
from steelyard.server.service import Service
from steelyard.server.tenants import check_operator


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
        service, client = self._service, self._service.client
        if not service.config.public_metrics:
            check_operator(request.state.tenant)
        metrics = await service.all_metrics()
        page = metrics.page(service.model_name, client.info, client.status, service.unhealthy())
        return Response(page, media_type=None, headers={"content-type": CONTENT_TYPE})
