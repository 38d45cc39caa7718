"""Every route of the API as a table: method, path, what it does, what it takes and gives. openapi.py writes it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from steelyard.server import answers
from steelyard.server.protocol import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from steelyard.server.protocol_responses import ResponsesBody
from steelyard.server.routes.ledger import MAX_LAST

Parameter = dict[str, Any]
TEXT, HTML = "text/plain", "text/html"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    gives    the struct of its JSON, another content type's name, or None for JSON of any shape
    streams  the answer may be a stream of events instead
    """

    method: str
    path: str
    what: str
    gives: type | str | None
    takes: type | None = None
    parameters: tuple[Parameter, ...] = ()
    streams: bool = False


def _parameter(name: str, where: str, **schema: Any) -> Parameter:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


_ID = _parameter("id", "path", type="string", minLength=1)
_STEP = _parameter("id", "path", type="integer", minimum=0)
_LAST = _parameter("last", "query", type="integer", minimum=1, maximum=MAX_LAST)
_SLOWEST = _parameter("slowest", "query", type="string")
_TENANT = _parameter("tenant", "query", type="string")
_NAME = _parameter("name", "path", type="string", minLength=1)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Answer a conversation, whole or as a stream of events.",
        answers.ChatAnswer, ChatBody, streams=True,
    ),
    Operation(
        "post", "/v1/completions", "Go on with a text or token ids, whole or as a stream of events.",
        answers.CompletionAnswer, CompletionBody, streams=True,
    ),
    Operation(
        "post", "/v1/responses", "Answer input items, whole or as a stream of named events; may go on from an answer.",
        answers.ResponseAnswer, ResponsesBody, streams=True,
    ),
    Operation("get", "/v1/responses/{id}", "An answer that is kept.", answers.ResponseAnswer, None, (_ID,)),
    Operation("delete", "/v1/responses/{id}", "Forget an answer.", answers.DeletedAnswer, None, (_ID,)),
    Operation(
        "post", "/v1/embeddings", "A vector of each text or list of token ids.",
        answers.EmbeddingsAnswer, EmbeddingBody,
    ),
    Operation(
        "post", "/tokenize", "Token ids of a text or a conversation.", answers.TokenizeAnswer, TokenizeBody
    ),
    Operation("post", "/detokenize", "The text of token ids.", answers.DetokenizeAnswer, DetokenizeBody),
    Operation("get", "/tokenizer_info", "What a client needs that renders for itself.", answers.TokenizerInfo),
    Operation("get", "/v1/models", "What is served here.", answers.ModelList),
    Operation("get", "/v1/models/{id}", "One model.", answers.ModelCard, None, (_ID,)),
    Operation("get", "/version", "The server's version.", answers.VersionAnswer),
    Operation("get", "/health", "200 while a token can be made, else 503 with the reason.", answers.StatusAnswer),
    Operation("get", "/live", "200 while the process answers.", answers.StatusAnswer),
    Operation("get", "/metrics", "Prometheus' text format.", TEXT),
    Operation("get", "/openapi.json", "This document.", None),
    Operation("get", "/docs", "This document, to read.", HTML),
    Operation(
        "get", "/ledger/requests", "Accounts of the last requests, or of the slowest of them.",
        answers.RequestsAnswer, None, (_LAST, _SLOWEST),
    ),
    Operation("get", "/ledger/requests/{id}", "One request's account, final.", None, None, (_ID,)),
    Operation("get", "/ledger/steps", "The last steps.", answers.StepsAnswer, None, (_LAST,)),
    Operation("get", "/ledger/steps/{id}", "One step, with every participant's share.", None, None, (_STEP,)),
    Operation("get", "/ledger/memory", "Where the device's memory is.", None),
    Operation("get", "/ledger/little", "Time in states against the number in them.", None),
    Operation("get", "/ledger/prompts", "The last prompts as hashes of their tokens.", None, None, (_LAST,)),
    Operation("get", "/ledger/live", "All that the live page shows.", None),
    Operation("get", "/", "The live page.", HTML),
    Operation("get", "/static/{name}", "A file of the live page.", "*/*", None, (_NAME,)),
    Operation(
        "post", "/reset_prefix_cache", "Forget cached KV, of all or of one tenant.",
        answers.StatusAnswer, None, (_TENANT,),
    ),
)  # fmt: skip
