"""The API as an OpenAPI 3.1 document, made from a table of operations and their structs; nothing is written twice."""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.server import answers
from steelyard.server.field_notes import annotate
from steelyard.server.operations import OPERATIONS, Operation

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_EVENTS = "text/event-stream"


def document(version: str) -> dict[str, Any]:
    """The whole document, of JSON's own types."""
    used = [kind for op in OPERATIONS for kind in (op.takes, op.gives) if isinstance(kind, type)]
    structs = list(dict.fromkeys([*used, answers.ErrorBody, answers.UnavailableAnswer]))
    found, components = msgspec.json.schema_components(structs, ref_template=_REF)
    refs = dict(zip(structs, found))
    for op in OPERATIONS:
        if op.takes is not None:
            annotate(components[op.takes.__name__])
    paths: dict[str, Any] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op, refs)
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


def _operation(op: Operation, refs: dict[type, Any]) -> dict[str, Any]:
    kind = op.gives if isinstance(op.gives, str) else _JSON
    content: dict[str, Any] = {kind: {"schema": refs[op.gives]} if isinstance(op.gives, type) else {}}
    if op.streams:
        content[_EVENTS] = {}
    failed = {"description": "An error, in OpenAI's shape.", "content": {_JSON: {"schema": refs[answers.ErrorBody]}}}
    found: dict[str, Any] = {
        "summary": op.what,
        "operationId": f"{op.method}_{op.path.strip('/').translate(_NAMES)}",
        "responses": {"200": {"description": "The answer.", "content": content}, "default": failed},
    }
    if op.path == "/health":
        why = {"schema": refs[answers.UnavailableAnswer]}
        found["responses"]["503"] = {"description": "No token can be made now.", "content": {_JSON: why}}
    if op.parameters:
        found["parameters"] = list(op.parameters)
    if op.takes is not None:
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": refs[op.takes]}}}
    return found


_NAMES = str.maketrans({"/": "_", ".": "_", "{": None, "}": None})


def page(found: dict[str, Any]) -> str:
    """The document as one page to read, without a script or anything from outside."""
    parts = [_HEAD]
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {path}</code></h2><p>{_escaped(operation['summary'])}</p>")
            schemas = found["components"]["schemas"]
            parts += [f"<p>{_parameter(one)}</p>" for one in operation.get("parameters", ())]
            for title, kept in (("takes", operation.get("requestBody")), ("gives", operation["responses"]["200"])):
                schema = (kept or {}).get("content", {}).get(_JSON, {}).get("schema")
                if schema is not None:
                    parts.append(f"<h3>{title}</h3>{_fields(schemas[_name(schema)])}")
    parts.append("<h2>Parts</h2>")
    for name, schema in found["components"]["schemas"].items():
        if "properties" in schema:
            parts.append(
                f'<h3 id="{name}">{name}</h3><p>{_escaped(schema.get("description", ""))}</p>{_fields(schema)}'
            )
    return "".join(parts)


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{name}</code>{' *' if name in required else ''}</td><td>{_kind(field)}</td>"
        f"<td>{_escaped(field.get('description', ''))}</td></tr>"
        for name, field in schema["properties"].items()
        if _kind(field) != "null"
    ]
    return f"<table>{''.join(rows)}</table>"


def _parameter(one: dict[str, Any]) -> str:
    return f"<code>{one['name']}</code> in the {one['in']}: {_kind(one['schema'])}"


def _name(reference: dict[str, Any]) -> str:
    return str(reference["$ref"].rsplit("/", 1)[1])


def _kind(schema: dict[str, Any]) -> str:
    """A field's type in a few words of HTML, with links to structs and with its limits."""
    if "$ref" in schema:
        return f'<a href="#{_name(schema)}">{_name(schema)}</a>'
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"]]
        return " | ".join(kind for kind in kinds if kind != "null" or len(kinds) == 1)
    if "enum" in schema:
        return " | ".join(_escaped(repr(value)) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array" and schema.get("items"):
        items = _kind(schema["items"])
        kind = f"list of ({items})" if " | " in items else f"list of {items}"
    limits = [f"{words} {schema[key]:,.15g}" for key, words in _LIMITS.items() if abs(schema.get(key, 2**40)) < 2**40]
    return f"{kind} ({', '.join(limits)})" if limits else kind


_LIMITS = {
    "minimum": "from",
    "exclusiveMinimum": "above",
    "maximum": "to",
    "minItems": "at least",
    "maxItems": "at most",
    "minLength": "characters from",
    "maxLength": "to",
}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Steelyard API</title>
<meta name="viewport" content="width=device-width"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;width:100%}td{border-top:1px solid #ddd;padding:.2rem .6rem;vertical-align:top}
h2{margin:2rem 0 0}code{font-size:.95em}</style><h1>Steelyard API</h1>
<p>Bodies are JSON; a star marks what is required. <a href="openapi.json">openapi.json</a> is the same for programs.</p>
"""
