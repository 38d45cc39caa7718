"""What the server and the engine say to each other: msgspec structs, packed as tagged arrays. No behaviour.

    server -> engine   Submit  Stop  Pause  Resume  Ask  Control  Vocabulary
    engine -> server   Ready (once), Accepted | Refused, then Deltas (one message a step) and Finished;
                       Status every 100 ms, Pulse every 500 ms also within a step; Answer; Fault

No byte of a response is sent to a client before `Accepted` or `Refused` has come.
"""

from __future__ import annotations

from typing import Any

import msgspec

from steelyard.core.sampling import SamplingParams


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Submit(_Message, frozen=True):
    """A prompt of token ids; `n` choices are numbered 0 .. n-1. Hashes are of the prompt's full blocks.

    want     tokens; or pool_last, pool_mean: the answer is one vector of hidden-state values, and no token is made
    grammar  what the output must be, in llguidance's JSON; after a `Vocabulary`
    deadline_in_ns, first_token_in_ns  when it must have ended, and when it must have a token, from now
    ttft_slo_in_ns, tpot_slo_ns  targets for the first token, from now, and for each further one; weight: its tenant's
    """

    id: str
    tokens: list[int]
    sampling: SamplingParams
    namespace: bytes = b""
    tenant: str = ""
    priority: int = 0
    block_hashes: list[bytes] = []
    deadline_in_ns: int | None = None
    want: str = "tokens"
    first_token_in_ns: int | None = None
    grammar: str = ""
    ttft_slo_in_ns: int | None = None
    tpot_slo_ns: int | None = None
    weight: float = 1.0


class Stop(_Message, frozen=True):
    """End a choice (index -1: all). reason `stop_string` is a success that keeps the first `keep` generated tokens."""

    id: str
    index: int
    reason: str  # stop_string, disconnect, abort, deadline
    keep: int = -1


class Pause(_Message, frozen=True):
    """The reader of this request is too slow: keep its KV, compute nothing for it."""

    id: str


class Resume(_Message, frozen=True):
    id: str


class Vocabulary(_Message, frozen=True):
    """The tokens' texts (a tokenizer.json), for engines that hold outputs to grammars. Sent once, when first needed."""

    tokenizer_json: str
    eos_token_ids: list[int]


class Ask(_Message, frozen=True):
    """A question answered by `Answer` with the same id; `what`: stats, config, memory, check, and of the ledgers

    steps N, step ID, request ID, little, blocks.
    """

    id: str
    what: str


class Control(_Message, frozen=True):
    """drain: finish what runs, refuse the rest; halt: stop now; drop_cache: forget a namespace (empty: all)."""

    what: str
    namespace: bytes = b""


class Ready(_Message, frozen=True):
    """The engine can make tokens; sent to every server that connects. `config` is what it really runs with.

    max_request_tokens  prompt and output of one request together: what context, KV pool and step allow
    """

    model: str
    fingerprint: str
    kv_layout: str
    block_size: int
    num_blocks: list[int]
    max_model_len: int
    max_request_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    enable_prefix_caching: bool
    config: dict[str, Any]


class Accepted(_Message, frozen=True):
    id: str
    max_tokens: int  # definite now: as asked, or clamped if none was given


class Refused(_Message, frozen=True):
    id: str
    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Logprob(_Message, frozen=True):
    logprob: float
    top: list[tuple[int, float]] = []


class Delta(_Message, frozen=True):
    """New ids of one choice, with logprobs beside them if asked for."""

    id: str
    index: int
    ids: list[int]
    logprobs: list[Logprob] | None = None


class Usage(_Message, frozen=True):
    """Tokens of one choice. computed: positions computed in all, of which overshoot and lost were thrown away.

    drafted_tokens are guesses that were checked, accepted_tokens those of them that were right; the others are lost.
    shared_tokens come from a sibling choice, cached_tokens from the prefix cache; a request that was stopped before
    its prompt was computed has computed fewer than its prompt.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    recomputed_tokens: int = 0
    preemptions: int = 0
    overshoot_tokens: int = 0
    shared_tokens: int = 0
    computed_tokens: int = 0
    lost_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Deltas(_Message, frozen=True):
    """All a step produced, in one message; `prompt_logprobs` come with a request's first delta."""

    items: list[Delta]


class Finished(_Message, frozen=True):
    """A choice's end. `stop_token` is the id that ended it, if one did; ledger is {bucket name: ns}.

    `cost_ns` is its share of the device's time so far. `pooled`: native float32 values, where a vector was wanted.
    """

    id: str
    index: int
    reason: str  # FinishReason values
    usage: Usage
    ledger: dict[str, int] = {}
    stop_token: int | None = None
    message: str = ""
    prompt_logprobs: list[Logprob] | None = None
    cost_ns: int = 0
    pooled: bytes = b""


class Status(_Message, frozen=True):
    """Proof of progress and the gauges of the moment. Counters only grow; `gauges` are others, by name."""

    steps: int
    running: int
    waiting: int
    waiting_by_reason: dict[str, int]
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_active: int
    counters: dict[str, int]
    busy: bool
    stalled_ns: int = 0
    detail: str = ""
    gauges: dict[str, int] = {}


class Pulse(_Message, frozen=True):
    """The process runs; `step_ns`: how long its loop has been inside one step, 0 outside. Comes beside the rest."""

    step_ns: int = 0


class Answer(_Message, frozen=True):
    id: str
    value: Any


class Fault(_Message, frozen=True):
    """The engine cannot go on; sent once, then its process ends."""

    message: str


ToEngine = Submit | Stop | Pause | Resume | Ask | Control | Vocabulary
FromEngine = Ready | Accepted | Refused | Deltas | Finished | Status | Pulse | Answer | Fault
