"""The ASGI application: a table of routes over one `Service`.

One layer around it, `Edge`: each more would cost every event of every stream.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Awaitable, Callable
from types import ModuleType

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from steelyard.config import ServerConfig
from steelyard.errors import NotFound, StartError, SteelyardError
from steelyard.server.client import EngineClient
from steelyard.server.dialogue import THINK
from steelyard.server.edge import Edge
from steelyard.server.errors import MethodNotAllowed
from steelyard.server.exchange import Endpoint
from steelyard.server.metrics import Metrics
from steelyard.server.prompts import Prompts
from steelyard.server.public import load_public
from steelyard.server.responses import error_response
from steelyard.server.routes.chat import chat_completions
from steelyard.server.routes.completions import completions
from steelyard.server.routes.docs import Docs
from steelyard.server.routes.embeddings import embeddings
from steelyard.server.routes.health import Health
from steelyard.server.routes.ledger import LedgerRoutes
from steelyard.server.routes.models import Models
from steelyard.server.routes.operate import Operate
from steelyard.server.routes.page import Page
from steelyard.server.routes.responses import ResponseRoutes, responses
from steelyard.server.routes.tokenize import detokenize, tokenize
from steelyard.server.service import Service, SpanLog
from steelyard.server.tenants import Tenants, load_tenants
from steelyard.server.usage import Usage
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from steelyard.text.tools import FORMATS, ToolFormat, detect_format
from steelyard.wire.messages import Vocabulary


def make_service(
    config: ServerConfig,
    client: EngineClient,
    metrics: Metrics,
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    template: ChatTemplate | None,
    eos_token_ids: frozenset[int] = frozenset(),
    tenants: Tenants | None = None,
    usage: Usage | None = None,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> Service:
    """The shared state of a server whose engine is ready. Without a tokenizer: token ids in, token ids out."""
    info = client.info
    if tokenizer is not None:
        client.vocabulary = lambda: Vocabulary(tokenizer.to_json(), sorted(eos_token_ids))
    assert info is not None, "the engine is not ready"
    client.public = load_public(config.public_prefix, tokenizer, info)
    prompts = Prompts(client, tokenizer, template, info.vocab_size, info.max_model_len)
    return Service(
        config=config,
        client=client,
        prompts=prompts,
        metrics=metrics,
        tool_format=_tool_format(config, template),
        splits_reasoning=_splits_reasoning(config, template),
        tenants=tenants or load_tenants(None, config.api_key),
        model_name=model_name,
        eos_token_ids=eos_token_ids,
        clock_ns=clock_ns,
        created_s=int(time.time()),
        spans=load_spans(config.otlp_traces_endpoint, model_name, clock_ns),
        usage=usage,
    )


def load_spans(endpoint: str | None, model_name: str, clock_ns: Callable[[], int]) -> SpanLog | None:
    """Traces to `endpoint`, if there is one. Raises StartError if their packages are not installed, or it is no URL."""
    module = check_spans(endpoint)
    if module is None:
        return None
    found: SpanLog = module.open_spans(endpoint, model_name, clock_ns)
    return found


def check_spans(endpoint: str | None) -> ModuleType | None:
    """The module that makes spans, if there is an endpoint. Raises as `load_spans` does."""
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise StartError(f"--otlp-traces-endpoint must be a URL like http://localhost:4318/v1/traces, got {endpoint!r}")
    try:
        return importlib.import_module("steelyard.server.spans")
    except ImportError as error:
        raise StartError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'steelyard[otel]'"
        ) from error


def _tool_format(config: ServerConfig, template: ChatTemplate | None) -> ToolFormat | None:
    name: str | None = config.tool_call_parser
    if name == "auto":
        name = detect_format(template.source if template is not None else None)
    return FORMATS.get(name or "none")


def _splits_reasoning(config: ServerConfig, template: ChatTemplate | None) -> bool:
    if config.reasoning_parser == "auto":
        return template is not None and THINK[1] in (template.source or "")
    return config.reasoning_parser != "none"


def create_app(service: Service) -> ASGIApp:
    """The application. Its routes answer errors in OpenAI's shape, those of the router included."""
    health, models, operate, docs = Health(service), Models(service), Operate(service), Docs()
    kept = ResponseRoutes(service)
    generating = {
        "/v1/completions": completions,
        "/v1/chat/completions": chat_completions,
        "/v1/embeddings": embeddings,
        "/v1/responses": responses,
        "/tokenize": tokenize,
        "/detokenize": detokenize,
    }
    endpoints = {path: Endpoint(service, path, handler) for path, handler in generating.items()}
    router = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
            Route("/v1/models", models.all),
            Route("/v1/models/{id:path}", models.one),
            Route("/v1/responses/{id}", kept.one, methods=["GET", "DELETE"]),
            Route("/tokenizer_info", models.tokenizer_info),
            Route("/version", models.version),
            Route("/openapi.json", docs.document),
            Route("/docs", docs.page),
            Route("/health", health.health),
            Route("/live", health.live),
            Route("/metrics", health.metrics),
            *(Route(path, handler) for path, handler in ledger_routes(service).items()),
            Route("/reset_prefix_cache", operate.reset_prefix_cache, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _router_error, SteelyardError: _our_error, Exception: _fault},
    )
    return Edge(router, service, endpoints)


def ledger_routes(service: Service) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """GET routes of the ledgers and of the page that shows them, by path."""
    ledger, page = LedgerRoutes(service), Page()
    return {
        "/ledger/requests": ledger.requests,
        "/ledger/requests/{id}": ledger.request,
        "/ledger/steps": ledger.steps,
        "/ledger/steps/{id:int}": ledger.step,
        "/ledger/memory": ledger.memory,
        "/ledger/little": ledger.little,
        "/ledger/prompts": ledger.prompts,
        "/ledger/live": ledger.live,
        "/": page.index,
        "/static/{name}": page.static,
    }


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    if error.status_code == 405:
        headers = dict(error.headers or {})
        return error_response(MethodNotAllowed(f"{where}: use {headers.get('Allow', 'another method')}"), headers)
    if error.status_code == 404:
        return error_response(NotFound(f"{where}: there is no such route"))
    ours = SteelyardError(f"{where}: {error.detail}")
    ours.status = error.status_code
    return error_response(ours)


async def _fault(request: Request, error: Exception) -> Response:
    """A mistake of ours; the router logs it after this."""
    return error_response(SteelyardError("the server failed; the fault is in its log"))


async def _our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SteelyardError)
    return error_response(error)
