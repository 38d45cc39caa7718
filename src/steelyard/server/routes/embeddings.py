"""POST /v1/embeddings: texts or token ids to vectors, the final hidden states of the model pooled over each input."""

from __future__ import annotations

import base64
import math
from array import array
from dataclasses import replace
from typing import Any

import msgspec

from steelyard.core.sampling import SamplingParams
from steelyard.core.timed import State
from steelyard.errors import InvalidRequest
from steelyard.server import sse
from steelyard.server.exchange import Exchange
from steelyard.server.protocol import MAX_INPUTS, EmbeddingBody, given, prompts_of
from steelyard.server.run import Run
from steelyard.server.service import Service
from steelyard.server.terms import Prompt

_DECODER = msgspec.json.Decoder(EmbeddingBody)


async def embeddings(exchange: Exchange, raw: bytes) -> None:
    """Serve one request; raises SteelyardError for what the client must hear."""
    service = exchange.service
    body = exchange.decode(_DECODER, raw)
    service.check_model(body.model)
    terms = replace(service.terms(exchange.tenant, body), want=f"pool_{given(body.pooling, 'last')}")
    with service.admission.reserve(exchange.tenant) as place:
        exchange.to(State.TOKENIZE)
        prompts = await _inputs(service, body, terms.namespace)
        service.limited(SamplingParams(), [len(prompt.ids) for prompt in prompts])
        place.add_tokens(sum(len(prompt.ids) for prompt in prompts), 0)
        async with Run(exchange, prompts, SamplingParams(temperature=0.0), place, continues=True) as run:
            await run.start(terms)
            await run.whole()
            vectors = [_shaped(run.pooled(index), body) for index in range(len(prompts))]
            await exchange.respond(200, sse.encode(_answer(exchange, body, vectors, run.usage()["prompt_tokens"])))


async def _inputs(service: Service, body: EmbeddingBody, namespace: bytes) -> list[Prompt]:
    asked = prompts_of(body.input, "input")
    if len(asked) > MAX_INPUTS:
        raise InvalidRequest(f"input: {len(asked)} inputs are over {MAX_INPUTS}", param="input")
    special = given(body.add_special_tokens, True)
    prompts: list[Prompt] = []
    for item in asked:
        if isinstance(item, str):
            prompts.append(await service.prompts.from_text(item, special, "input", namespace))
        else:
            prompts.append(await service.prompts.from_ids(item, "input", namespace))
    return prompts


def _shaped(vector: array[float], body: EmbeddingBody) -> array[float]:
    """Cut to `dimensions`, then to length 1 unless asked otherwise. Raises InvalidRequest for more than there are."""
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise InvalidRequest(
                f"dimensions: must be at most {len(vector)}, this model's hidden size, got {body.dimensions}",
                param="dimensions",
            )
        vector = vector[: body.dimensions]
    if body.normalize is False:
        return vector
    length = math.sqrt(math.fsum(value * value for value in vector))
    return array("f", [value / length for value in vector]) if length else vector


def _answer(exchange: Exchange, body: EmbeddingBody, vectors: list[array[float]], num_tokens: int) -> dict[str, Any]:
    """Vectors as lists of numbers, or as base64 of little-endian float32."""
    packed = body.encoding_format == "base64"
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(vector.tobytes()).decode() if packed else vector.tolist(),
            }
            for index, vector in enumerate(vectors)
        ],
        "model": exchange.service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
