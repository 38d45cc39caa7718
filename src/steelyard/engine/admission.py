"""What a `Submit` must be before it becomes requests, and how a refusal is said. Lengths are the scheduler's matter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from steelyard.core.request import Request
from steelyard.core.step import RunnerCaps, Want
from steelyard.errors import InvalidRequest, Overloaded, SteelyardError
from steelyard.grammar.thinking import Thinking
from steelyard.wire.messages import Refused, Submit

HASH_BYTES = 32
WANTS = {"tokens": Want.NOTHING, "pool_last": Want.POOL_LAST, "pool_mean": Want.POOL_MEAN}
"""`Submit.want`, and how the request is pooled."""

_log = logging.getLogger(__name__)


def check_submit(submit: Submit, caps: RunnerCaps) -> None:
    """Raises InvalidRequest for an empty prompt, an id outside the vocabulary, or what this engine cannot give."""
    tokens, vocab_size = submit.tokens, caps.vocab_size
    if not tokens:
        raise InvalidRequest("prompt: must have at least 1 token, got 0", param="prompt")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        position = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"prompt: token ids must be between 0 and {vocab_size - 1}, got {tokens[position]} at position {position}",
            param="prompt",
        )
    submit.sampling.check_vocab(vocab_size)
    if submit.want not in WANTS:
        raise InvalidRequest(f"want: this engine gives {', '.join(WANTS)}, not {submit.want!r}", param="want")
    if WANTS[submit.want] and (submit.sampling.n != 1 or submit.grammar):
        raise InvalidRequest("want: a pooled answer has n = 1 and no grammar", param="want")
    num_full = len(tokens) // caps.block_size
    if len(submit.block_hashes) > num_full or any(len(key) != HASH_BYTES for key in submit.block_hashes):
        raise InvalidRequest(
            f"block_hashes: at most {num_full} keys of {HASH_BYTES} bytes go with this prompt", param="block_hashes"
        )


def make_choices(submit: Submit, seed: int, eos_token_ids: frozenset[int], now_ns: int) -> Iterator[Request]:
    """The request's n choices. Choice i draws with seed + i; all but the first share the first one's prompt KV.

    A grammar may have to end before `min_tokens`, or although `ignore_eos`: engine/grammars.py sees to all of that.
    """
    sampling = replace(submit.sampling, min_tokens=0) if submit.grammar else submit.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    thinking = Thinking.of(submit.grammar)
    ends_with_grammar = bool(submit.grammar if thinking is None else thinking.answer)
    if ends_with_grammar or not sampling.ignore_eos:  # at a grammar's end there is nothing else to say
        stop_ids |= eos_token_ids
    first: Request | None = None
    for index in range(sampling.n):
        choice = Request(
            submit.id,
            submit.tokens,
            sampling.for_choice(index, seed),
            now_ns,
            index=index,
            stop_ids=stop_ids,
            namespace=submit.namespace,
            tenant=submit.tenant,
            priority=submit.priority,
            block_hashes=list(submit.block_hashes),
            fork_of=first,
            deadline_ns=None if submit.deadline_in_ns is None else now_ns + submit.deadline_in_ns,
        )
        choice.has_grammar = bool(submit.grammar)
        choice.pooling = WANTS[submit.want]
        choice.weight = submit.weight
        choice.ttft_slo_ns, choice.tpot_slo_ns = submit.ttft_slo_in_ns, submit.tpot_slo_ns
        first = first or choice
        yield choice


def refusal(request_id: str, error: Exception) -> Refused:
    """The error as a message; status, code and parameter are the error's own. Ours to mend: 500, and a log entry."""
    if not isinstance(error, SteelyardError):
        _log.error("a request could not be taken in", exc_info=error)
        error = SteelyardError(f"the engine failed to take this request in: {type(error).__name__}: {error}")
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return Refused(request_id, error.status, error.code, error.message, error.param, retry_after_s)
