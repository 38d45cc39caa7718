"""One choice of one API request, as the engine and scheduler see it. Its state is its ledger account."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from steelyard.core.sampling import SamplingParams
from steelyard.core.step import TokenLogprobs, Want
from steelyard.core.timed import State, Timed


class FinishReason(Enum):
    """Why a request ended; `STOP` covers end-of-text, stop ids and stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client left or asked
    DEADLINE = "deadline"  # the client's time limit passed
    ERROR = "error"  # the engine could not go on


class Request(Timed):
    """A sequence being served.

    id, index        API request and choice number: together unique among live requests
    tokens           prompt followed by generated ids, as committed
    num_computed     positions whose KV is committed (valid in this request's blocks)
    block_hashes     keys of the full blocks of `tokens` known so far; grows with commits
    fork_of          the sibling whose prompt KV this choice shares once it is there (n > 1)
    row, epoch       its line in the device tables while resident; -1 otherwise
    max_tokens       definite: clamped at admission if the client gave none
    has_grammar      its tokens are held to a grammar; it is scheduled once that is compiled (grammar_ready)
    stop_ids         token ids that end it (empty under ignore_eos, plus stop_token_ids)
    weight           of its tenant, under a fair order
    ttft_slo_ns, tpot_slo_ns  targets for the first token, from start_ns, and for each further one; None: none
    slo_rank         0; 1 once it is late, -1 when it was late and its turn has come
    num_drafted, num_accepted  guesses that were checked, and those of them that were right (scheduler/speculation.py)
    first_token_ns   when its first token was committed
    pooling          POOL_LAST or POOL_MEAN: it ends with its prompt, and its answer is a vector; else NOTHING
    pooled           parts of that vector so far: (number of positions, their pooled values)
    """

    __slots__ = (
        "block_hashes",
        "cached_tokens",
        "deadline_ns",
        "detail",
        "epoch",
        "first_token_ns",
        "fork_of",
        "grammar_ready",
        "has_grammar",
        "id",
        "index",
        "max_tokens",
        "namespace",
        "num_accepted",
        "num_computed",
        "num_drafted",
        "num_overshoot",
        "num_preemptions",
        "num_recomputed",
        "order_key",
        "pooled",
        "pooling",
        "priority",
        "prompt_len",
        "prompt_logprobs",
        "reason",
        "recompute_until",
        "row",
        "sampling",
        "slo_rank",
        "stop_ids",
        "stop_token",
        "tenant",
        "tokens",
        "tpot_slo_ns",
        "ttft_slo_ns",
        "weight",
    )

    def __init__(
        self,
        id: str,
        prompt: list[int],
        sampling: SamplingParams,
        now_ns: int,
        *,
        index: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        namespace: bytes = b"",
        tenant: str = "",
        priority: int = 0,
        block_hashes: list[bytes] | None = None,
        fork_of: Request | None = None,
        deadline_ns: int | None = None,
    ) -> None:
        super().__init__(State.WAIT_STEP_BOUNDARY, now_ns)
        self.id = id
        self.index = index
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.sampling = sampling
        self.max_tokens = sampling.max_tokens or 0
        self.stop_ids = stop_ids
        self.namespace = namespace
        self.tenant = tenant
        self.priority = priority
        self.block_hashes = block_hashes if block_hashes is not None else []
        self.fork_of = fork_of
        self.deadline_ns = deadline_ns
        self.has_grammar = False
        self.grammar_ready = False
        self.row = -1
        self.epoch = 0
        self.num_computed = 0
        self.cached_tokens = 0  # prompt tokens that this request never computed: found in the cache
        self.num_preemptions = self.num_recomputed = 0  # how often, and positions computed again after one
        self.recompute_until = 0  # positions below this were computed before the last preemption
        self.num_overshoot = 0  # tokens computed beyond the end and thrown away
        self.num_drafted = self.num_accepted = 0
        self.order_key: tuple[float, ...] = ()
        self.ttft_slo_ns: int | None = None
        self.tpot_slo_ns: int | None = None
        self.weight, self.slo_rank, self.first_token_ns = 1.0, 0, 0
        self.reason: FinishReason | None = None
        self.stop_token: int | None = None  # the id that ended it, if one did
        self.detail = ""  # what went wrong, for ERROR
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooling = Want.NOTHING
        self.pooled: list[tuple[int, tuple[float, ...]]] = []

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_every_position(self) -> bool:
        """Whether something is asked of each prompt position, so that no cached KV can stand in for it."""
        return self.sampling.prompt_logprobs is not None or Want.POOL_MEAN in self.pooling

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last token, which it generated, is computed."""
        return self.num_generated > 0 and self.num_computed == len(self.tokens) - 1

    def vector(self) -> list[float]:
        """What was pooled over all parts, each weighted by its positions; empty if nothing was."""
        if len(self.pooled) == 1:
            return list(self.pooled[0][1])
        total = sum(count for count, _ in self.pooled)
        weights = [count / total for count, _ in self.pooled]
        return [sum(w * x for w, x in zip(weights, at)) for at in zip(*(values for _, values in self.pooled))]

    @property
    def key(self) -> tuple[str, int]:
        return (self.id, self.index)

    def __repr__(self) -> str:
        state = self.state.value
        return f"Request({self.id}#{self.index}, {len(self.tokens)} tokens, {self.num_computed} computed, {state})"


class Emitted(NamedTuple):
    """Event: a commit appended `ids` to a request. One is made per row and step."""

    request: Request
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: a request reached its end. Nothing more is emitted for it.

    Its ledger is closed and its blocks are released, or, if a step in flight still has its row, it is in
    `State.OVERSHOOT` until that step is committed.
    """

    request: Request
    reason: FinishReason


Event = Emitted | Ended
