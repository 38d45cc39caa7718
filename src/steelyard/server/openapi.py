"""The API as an OpenAPI 3.1 document, made from the structs that bodies are decoded with; nothing is written twice."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"

POSTS: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "Answer a conversation, whole or as a stream of events."),
    "/v1/completions": (CompletionBody, "Go on with a text or token ids, whole or as a stream of events."),
    "/tokenize": (TokenizeBody, "Token ids of a text or a conversation."),
    "/detokenize": (DetokenizeBody, "The text of token ids."),
}
"""Routes that take a body: its struct, and what they do."""

GETS: dict[str, str] = {
    "/v1/models": "What is served here.",
    "/version": "The server's version.",
    "/health": "200 while a token can be made, else 503 with the reason.",
    "/live": "200 while the process answers.",
    "/metrics": "Prometheus' text format.",
}


class ApiError(msgspec.Struct):
    """`param` is the path of the field at fault, `code` a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ApiError


def document(version: str) -> dict[str, Any]:
    """The whole document, of JSON's own types."""
    bodies = [body for body, _ in POSTS.values()]
    (*refs, error), components = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=_REF)
    failed = {"description": "An error, in OpenAI's shape.", "content": {_JSON: {"schema": error}}}
    paths: dict[str, Any] = {path: {"get": _operation(what, failed, path)} for path, what in GETS.items()}
    for (path, (_, what)), ref in zip(POSTS.items(), refs):
        operation = _operation(what, failed, path, streams=path.startswith("/v1/"))
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": ref}}}
        paths[path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Steelyard", "version": version, "description": "An LLM inference server."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(what: str, failed: dict[str, Any], path: str, streams: bool = False) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else _JSON
    content: dict[str, Any] = {kind: {}}
    if streams:
        content[_EVENTS] = {}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}, "default": failed}
    if path == "/health":
        answers["503"] = {"description": "No token can be made now; `reason` says why.", "content": {_JSON: {}}}
    return {"summary": what, "operationId": path.strip("/").replace("/", "_"), "responses": answers}


def page(found: dict[str, Any]) -> str:
    """The document as one page to read, without a script or anything from outside."""
    parts = [_HEAD]
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{_escaped(operation['summary'])}</p>")
            body = operation.get("requestBody")
            if body is not None:
                name = body["content"][_JSON]["schema"]["$ref"].rsplit("/", 1)[1]
                parts.append(_fields(found["components"]["schemas"][name]))
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{name}</code>{' *' if name in required else ''}</td><td>{_escaped(_kind(field))}</td></tr>"
        for name, field in schema["properties"].items()
        if _kind(field) != "null"
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """A field's type in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"]]
        return " | ".join(kind for kind in kinds if kind != "null" or len(kinds) == 1)
    if "enum" in schema:
        return " | ".join(repr(value) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    return f"list of {_kind(schema['items'])}" if kind == "array" and schema.get("items") else kind


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Steelyard API</title>
<meta name="viewport" content="width=device-width"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.2rem .6rem;vertical-align:top}
h2{margin:2rem 0 0}code{font-size:.95em}</style><h1>Steelyard API</h1>
<p>Bodies are JSON; a star marks what is required. <a href="openapi.json">openapi.json</a> is the same for programs.</p>
"""
