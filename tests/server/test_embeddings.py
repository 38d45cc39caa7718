"""Vectors over HTTP with the official client, on a real engine whose runner makes them up from the token ids."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from steelyard.text.tokenizer import Tokenizer
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served
from tests.server.test_bad_requests import check_error

PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def vectors(tokenizer: Tokenizer) -> Iterator[Served]:
    yield from serve(tokenizer, None, RealEngine(vocab_size=tokenizer.vocab_size))


def plain(tokens: list[int], mean: bool) -> list[float]:
    """What the scripted runner answers."""
    rows = [[1 + (t * (i + 1)) % 7 for i in range(8)] for t in tokens]
    return [sum(c) / len(rows) for c in zip(*rows)] if mean else [float(x) for x in rows[-1]]


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in values))
    return [x / length for x in values]


def embed(served: Served, **body: Any) -> Any:
    return served.post(PATH, body)


def test_the_official_client_gets_one_unit_vector_an_input_by_base64_and_by_numbers(vectors: Served) -> None:
    texts = ["The sea", "one two three", "x"]
    answer = vectors.openai.embeddings.create(model="tiny", input=texts)  # asks for base64 by itself
    ids = [vectors.tokenizer.encode(text) for text in texts]
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, tokens in zip(answer.data, ids):
        assert item.embedding == pytest.approx(unit(plain(tokens, mean=False)), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    numbers = vectors.openai.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert [d.embedding for d in numbers.data] == [d.embedding for d in answer.data]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_token_ids_and_pooling_over_chunks_and_cached_prefixes(vectors: Served, pooling: str) -> None:
    tokens = [(7 * i) % 300 for i in range(150)]
    for _ in range(2):
        for given in (tokens, [tokens], [tokens, tokens]):
            answer = embed(vectors, input=given, pooling=pooling, normalize=False).json()
            for item in answer["data"]:
                assert item["embedding"] == pytest.approx(plain(tokens, pooling == "mean"), rel=1e-6)
    assert answer["usage"] == {"prompt_tokens": 300, "total_tokens": 300}


def test_dimensions_cut_the_vector_before_it_is_normed(vectors: Served) -> None:
    cut = embed(vectors, input="The sea", dimensions=3, encoding_format="base64").json()["data"][0]["embedding"]
    tokens = vectors.tokenizer.encode("The sea")
    assert list(array("f", base64.b64decode(cut))) == pytest.approx(unit(plain(tokens, mean=False)[:3]), abs=1e-6)
    error = check_error(embed(vectors, input="x", dimensions=9))
    assert error["param"] == "dimensions" and "8" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [320]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [1] * 257}, "prompt"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_field(vectors: Served, body: dict[str, Any], param: str) -> None:
    assert check_error(embed(vectors, **body), 404 if param == "model" else 400)["param"] == param


def test_a_prompt_that_fills_the_context_is_embedded(vectors: Served) -> None:
    assert embed(vectors, input=[1] * 256).status_code == 200
    assert vectors.service.admission.num_requests == 0 and vectors.service.admission.num_tokens == 0
