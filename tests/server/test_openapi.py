"""The API's own description: complete, of the structs that decode, and readable without anything from outside."""

from __future__ import annotations

import json
import re
from typing import Any

from steelyard.server.app import create_app
from tests.server.served import Served


def test_the_document_has_every_route_and_no_other(served: Served) -> None:
    routes = create_app(served.service)._app.routes  # type: ignore[attr-defined]
    served_there = {
        (method.lower(), re.sub(r":\w+}", "}", route.path)) for route in routes for method in route.methods - {"HEAD"}
    }
    paths = served.http.get("/openapi.json").json()["paths"]
    assert {(method, path) for path, methods in paths.items() for method in methods} == served_there


def test_every_reference_resolves_and_every_route_answers_as_described(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])
    assert {"ChatBody", "CompletionBody", "ErrorBody", "Tool", "ChatAnswer"} <= set(document["components"]["schemas"])
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            path = path.replace("{id}", "1").replace("{name}", "live.js")
            response = served.http.request(method, path, json={} if method == "post" else None)
            described = operation["responses"].get(str(response.status_code), operation["responses"]["default"])
            kind = response.headers["content-type"].split(";")[0]
            assert {kind, "*/*"} & set(described["content"]), path
            assert served.http.request("PUT", path).status_code == 405


def test_fields_and_limits_come_from_the_structs(served: Served) -> None:
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    chat: dict[str, Any] = schemas["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["messages"]["minItems"] == 1
    assert chat["properties"]["deadline_ms"]["anyOf"][0]["exclusiveMinimum"] == 0


def test_every_field_of_a_request_for_tokens_is_described_and_ranges_are_those_that_are_checked(served: Served) -> None:
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    for body in ("ChatBody", "CompletionBody", "EmbeddingBody"):
        bare = [name for name, field in schemas[body]["properties"].items() if "description" not in field]
        assert not [name for name in bare if _takes(schemas[body]["properties"][name])], body
    limits = {
        name: kind["maximum"]
        for name, field in schemas["CompletionBody"]["properties"].items()
        for kind in field.get("anyOf", [field])
        if kind.get("maximum", 2**63) < 2**31
    }
    assert {"temperature", "top_p", "n", "logprobs", "max_tokens"} <= set(limits)
    for name, most in limits.items():
        answer = served.post("/v1/completions", {"prompt": "x", name: most + 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2
    assert "number (from 0, to 2)" in served.http.get("/docs").text


def _takes(field: dict[str, Any]) -> bool:
    """Whether anything but null may be in it."""
    return field.get("type") != "null"


def test_the_page_names_every_field_and_asks_no_other_host(served: Served) -> None:
    response = served.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    named = (
        "structured_outputs",
        "tool_choice",
        "POST /v1/chat/completions",
        "DELETE /v1/responses/{id}",
        "ChatAnswer",
    )
    for name in named:
        assert name in response.text
    links = set(re.findall(r'href="#(\w+)"', response.text))
    assert "ChatBody" not in links and "Message" in links
    assert links <= set(re.findall(r'id="(\w+)"', response.text))
    assert "list of (string | integer | list of integer)" in response.text and "(from 1, to 1,048,576)" in response.text
    assert "src=" not in response.text
    assert not re.search(r"https?://", response.text)
