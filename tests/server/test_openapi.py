"""The API's own description: complete, of the structs that decode, and readable without anything from outside."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.server.served import Served


def test_every_reference_resolves_and_every_route_answers_as_described(served: Served) -> None:
    document = served.http.get("/openapi.json").json()
    names = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert names <= set(document["components"]["schemas"])
    assert {"ChatBody", "CompletionBody", "ErrorBody", "Tool"} <= set(document["components"]["schemas"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            response = served.http.request(method, path, json={} if method == "post" else None)
            described = operation["responses"].get(str(response.status_code), operation["responses"]["default"])
            assert response.headers["content-type"].split(";")[0] in described["content"], path
            assert served.http.request("DELETE", path).status_code == 405


def test_fields_and_limits_come_from_the_structs(served: Served) -> None:
    schemas = served.http.get("/openapi.json").json()["components"]["schemas"]
    chat: dict[str, Any] = schemas["ChatBody"]
    assert chat["required"] == ["messages"]
    assert chat["additionalProperties"] is False
    assert chat["properties"]["messages"]["minItems"] == 1
    assert chat["properties"]["deadline_ms"]["anyOf"][0]["exclusiveMinimum"] == 0


def test_the_page_names_every_field_and_asks_no_other_host(served: Served) -> None:
    response = served.http.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for name in ("structured_outputs", "tool_choice", "max_completion_tokens", "POST /v1/chat/completions"):
        assert name in response.text
    assert "src=" not in response.text
    assert not re.search(r"https?://", response.text)
