"""Schemathesis over our own /openapi.json, on a real engine over a script: no 500, no answer unlike its schema.

Requests that keep to the schema and requests that break it; those that break it must be refused with a 4xx.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from steelyard.server import openapi
from steelyard.server.operations import OPERATIONS
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served


def no_fault_of_the_server(context: Any, response: Any, case: Any) -> None:
    """No 5xx but the one a client asks for: its own time limit passed first."""
    late = response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    assert response.status_code < 500 or late, response.text


CHECKS = [
    no_fault_of_the_server,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
SCHEMA = schemathesis.openapi.from_dict(openapi.document("test"))
LABELS = [f"{op.method.upper()} {op.path}" for op in OPERATIONS]
BREAKABLE = {
    f"{op.method.upper()} {op.path}"
    for op in OPERATIONS
    if op.takes is not None or any(one["in"] == "query" or one["schema"]["type"] != "string" for one in op.parameters)
}
"""Operations that a request can be wrong for: any text is a name."""
FEW, MANY = 8, 150


@pytest.fixture(scope="module")
def scripted(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    yield from serve(tokenizer, template, RealEngine(vocab_size=tokenizer.vocab_size))


def canary(served: Served) -> Any:
    answer = served.complete(temperature=0, max_tokens=5, return_token_ids=True).json()
    return answer["choices"]


def say_alive(served: Served) -> None:
    """What an engine's process says ten times a second."""
    engine: Any = served.engine
    served.run(engine.client.on_messages, [engine.engine.status()])


def try_out(served: Served, label: str, num_examples: int) -> None:
    method, path = label.split(" ")
    operation = SCHEMA[path][method]
    before = canary(served)
    modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * (label in BREAKABLE)
    for mode in modes:

        @settings(
            max_examples=num_examples,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            say_alive(served)
            case.call_and_validate(base_url=served.url, checks=CHECKS, timeout=60)

        check()
    assert canary(served) == before


@pytest.mark.parametrize("label", LABELS)
def test_few_examples(scripted: Served, label: str) -> None:
    try_out(scripted, label, FEW)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("label", LABELS)
def test_many_examples(scripted: Served, label: str) -> None:
    try_out(scripted, label, MANY)
