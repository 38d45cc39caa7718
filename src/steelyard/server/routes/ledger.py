"""GET /ledger/...: where time and memory went, of one request, of steps, of the device.

    /ledger/requests?last=N[&slowest=1]   /ledger/requests/{id}      a tenant sees its own
    /ledger/steps?last=N  /ledger/steps/{id}  /ledger/memory  /ledger/little  /ledger/live     an operator's
    /ledger/prompts?last=N                                                                   an operator's

What a tenant hears of others is merged into one number, without counts.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from steelyard.errors import InvalidRequest, NotFound
from steelyard.server.ledger import as_json, brief
from steelyard.server.responses import json_response
from steelyard.server.service import Service
from steelyard.server.tenants import Tenant, check_operator

MAX_LAST = 1000
_LIVE_STEPS = 120
_CLOSING_S = 0.25
"""A record is closed behind the last byte of its response: who asks at once may be quicker than that."""
_LIVE_REQUESTS = 8
_LIVE_RECENT = 200
_OTHERS = ("others_prefill_ns", "others_decode_ns")
_FOR_TENANTS = ("id", "start", "kind", "span_ns", "device_ns", "gaps_ns", "own_cost_ns")


class LedgerRoutes:
    """Handlers over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def requests(self, request: Request) -> Response:
        found = await self._found(_last(request), _scope(request), bool(request.query_params.get("slowest")))
        return json_response({"requests": found})

    async def request(self, request: Request) -> Response:
        """The final account of one request, with what made its slowest steps slow. Raises NotFound."""
        id, only = request.path_params["id"], _scope(request)
        answer = await self._ended(id, only)
        if answer is None:
            await asyncio.sleep(_CLOSING_S)
            answer = await self._ended(id, only)
        if answer is None:
            raise NotFound(f"request {id[:200]!r} is not among the last ones that have ended")
        if self._service.client.death is None:
            for choice in answer["choices"]:
                choice["engine"] = await self._engine_side(choice, only is None)
        return json_response(answer)

    async def _ended(self, id: str, only: str | None) -> dict[str, Any] | None:
        record = self._service.ledgers.get(id, only)
        found = [as_json(record)] if record is not None else await self._service.ask_others("request", [id, only])
        return found[0] if found else None

    async def steps(self, request: Request) -> Response:
        check_operator(_tenant(request))
        return json_response({"steps": await self._service.client.ask(f"steps {_last(request)}")})

    async def step(self, request: Request) -> Response:
        """One step with every participant's share. Raises NotFound."""
        check_operator(_tenant(request))
        step = await self._service.client.ask(f"step {request.path_params['id']}")
        if step is None:
            raise NotFound(f"step {request.path_params['id']} is not kept: only the last few thousand are")
        return json_response(step)

    async def memory(self, request: Request) -> Response:
        check_operator(_tenant(request))
        return json_response(await self._service.client.ask("memory"))

    async def little(self, request: Request) -> Response:
        check_operator(_tenant(request))
        return json_response(await self._service.client.ask("little"))

    async def prompts(self, request: Request) -> Response:
        """The last prompts as hashes: no text, no token, but every tenant's, so an operator's."""
        check_operator(_tenant(request))
        return json_response({"prompts": await self._service.client.ask(f"prompts {_last(request)}")})

    async def live(self, request: Request) -> Response:
        """All that the live page shows, in one answer."""
        service, tenant = self._service, _tenant(request)
        only = _scope(request)
        answer: dict[str, Any] = {
            "model": service.model_name,
            "tenant": tenant.label,
            "operator": tenant.operator,
            "slowest": await self._found(_LIVE_REQUESTS, only, True),
            "recent": await self._found(_LIVE_RECENT, only, False),
        }
        if tenant.operator and service.client.death is None:
            status, metrics = service.client.status, await service.all_metrics()
            answer |= {
                "status": {name: getattr(status, name) for name in status.__struct_fields__} if status else None,
                "accounts_s": {"/".join(labels): v for labels, v in metrics.request_ns.values.items() if v},
                "ttft": _histogram(metrics.ttft),
                "itl": _histogram(metrics.itl),
                "blocks": await service.client.ask("blocks"),
                "steps": await service.client.ask(f"steps {_LIVE_STEPS}"),
                "running": (await service.client.ask("requests"))[:_LIVE_REQUESTS],
            }
        return json_response(answer)

    async def _found(self, count: int, only: str | None, slowest: bool) -> list[dict[str, Any]]:
        """As `Ledgers.last`, of all front ends: oldest first, or slowest first."""
        own = [brief(record) for record in self._service.ledgers.last(count, only, slowest)]
        others = await self._service.ask_others("requests", [count, only, slowest])
        if not others:
            return own
        found = own + [record for records in others for record in records]
        if slowest:
            return sorted(found, key=lambda r: -int(r["total_ns"]))[:count]
        return sorted(found, key=lambda r: r["started_s"] + r["total_ns"] / 1e9)[-count:]

    async def _engine_side(self, choice: dict[str, Any], whole: bool) -> dict[str, Any] | None:
        """What the engine says of a choice now that it has let go of it, or None if it has forgotten."""
        found = await self._service.client.ask(f"request {choice['engine_id']}")
        mine = next((c for c in found if c["index"] == choice["engine_index"]), None)
        if mine is None or whole:
            return mine
        mine["slowest_steps"] = [_merged(step) for step in mine["slowest_steps"]]
        mine["kv_held"] = None
        return dict(mine)


def _merged(step: dict[str, Any]) -> dict[str, Any]:
    """A step as a tenant may see it: others as one number, without counts."""
    causes = step["causes"]
    kept = {name: value for name, value in causes.items() if name.endswith("_ns") and name not in _OTHERS}
    return {
        **{name: step[name] for name in _FOR_TENANTS},
        "causes": {**kept, "others_ns": sum(causes[name] for name in _OTHERS)},
    }


def _histogram(histogram: Any) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts, "sum": histogram.sum}


def _tenant(request: Request) -> Tenant:
    tenant = request.state.tenant
    assert isinstance(tenant, Tenant)
    return tenant


def _scope(request: Request) -> str | None:
    """Whose requests may be seen: one tenant's, or all (None)."""
    tenant = _tenant(request)
    return None if tenant.operator else tenant.label


def _last(request: Request) -> int:
    """Raises InvalidRequest."""
    text = request.query_params.get("last", "100")
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= MAX_LAST):
        raise InvalidRequest(f"last: must be a number between 1 and {MAX_LAST}, got {text[:50]!r}", param="last")
    return int(text)
