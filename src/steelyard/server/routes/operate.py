"""What an operator does to a running server: POST /reset_prefix_cache, for all or for one tenant."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from steelyard.errors import InvalidRequest
from steelyard.server.responses import json_response
from steelyard.server.service import Service
from steelyard.server.tenants import check_operator


class Operate:
    """Handlers over one service. All need an operator's key."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Forget cached KV: of everybody, or of `?tenant=NAME` with every salt of it. Raises InvalidRequest."""
        service, tenants = self._service, self._service.tenants
        check_operator(request.state.tenant)
        name = request.query_params.get("tenant")
        if name is not None and name not in tenants.all:
            raise InvalidRequest(f"tenant: there is no tenant {name[:64]!r}", param="tenant")
        service.client.control("drop_cache", b"" if name is None else tenants.namespace(tenants.all[name]))
        return json_response({"status": "ok"})
