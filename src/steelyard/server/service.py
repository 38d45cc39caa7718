"""What every route needs, in one value: the engine's client, prompts, limits, metrics. Made once by `create_app`."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from steelyard.config import ServerConfig
from steelyard.core.sampling import SamplingParams
from steelyard.core.timed import State
from steelyard.errors import ContextLengthExceeded, EngineDead, InvalidRequest
from steelyard.grammar.source import GrammarChecker
from steelyard.server.admission import Admission
from steelyard.server.client import EngineClient
from steelyard.server.errors import ModelNotFound, ShuttingDown
from steelyard.server.ledger import Account, Ledgers
from steelyard.server.metrics import Metrics
from steelyard.server.prompts import Prompts
from steelyard.server.protocol import AccountBody, GenerationBody
from steelyard.server.response_store import ResponseStore
from steelyard.server.structured import grammar_of
from steelyard.server.tenants import Tenant, Tenants
from steelyard.server.terms import Terms
from steelyard.server.usage import Usage
from steelyard.text.tools import ToolFormat
from steelyard.wire.messages import Ready

log = logging.getLogger("steelyard.server")


class SpanLog(Protocol):
    """Where closed accounts go as traces: server/spans.py, whose packages need not be there."""

    def add(self, account: Account, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


async def _nobody(what: str, value: Any) -> list[Any]:
    return []


@dataclass(slots=True)
class Service:
    """The server's shared state.

    eos_token_ids  ids that end a text unless ignore_eos
    tool_format    how the model writes tool calls, None: not known
    splits_reasoning  what it thinks between marks is told apart from what it says
    draining       True from the first signal to stop: what runs goes on, nothing new is taken
    num_in_flight  HTTP requests for tokens that have not been answered to the end
    usage          counts of what is served, shared with the other front ends if there are any
    ask_others     what the other front ends answer to a question (see `siblings`); nothing where there are none;
                   raises Overloaded where one that does not answer may have what is looked for
    """

    config: ServerConfig
    client: EngineClient
    prompts: Prompts
    metrics: Metrics
    tenants: Tenants
    tool_format: ToolFormat | None
    splits_reasoning: bool
    model_name: str
    eos_token_ids: frozenset[int]
    clock_ns: Callable[[], int]
    created_s: int
    usage: Usage | None = None
    admission: Admission = field(init=False)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)
    ledgers: Ledgers = field(init=False)
    responses: ResponseStore = field(init=False)
    draining: bool = False
    num_in_flight: int = 0
    spans: SpanLog | None = None
    ask_others: Callable[[str, Any], Awaitable[list[Any]]] = _nobody

    def __post_init__(self) -> None:
        self.ledgers = Ledgers(self.config.ledger_log, lambda: self.metrics.lost_lines.add(1, "ledger"))
        self.responses = ResponseStore(self.clock_ns)
        config = self.config
        limits = (config.max_num_queued_reqs, config.max_num_queued_tokens)
        self.admission = Admission(*limits, self.clock_ns, self.usage)

    def close_account(self, account: Account) -> None:
        """Its request is over, here and in the engine; the account is final and goes to all who keep them."""
        account.timed.to(State.ENDED, max(self.clock_ns(), account.timed.since_ns))
        record = account.record()
        self.ledgers.add(record)
        self.metrics.account(record["buckets_ns"], account.tenant)
        if self.spans is not None:
            self.spans.add(account, record)

    def close(self) -> None:
        """Write out what is still to be written of accounts."""
        self.ledgers.close()
        if self.spans is not None:
            self.spans.close()

    async def all_metrics(self) -> Metrics:
        """What this process and the other front ends have counted."""
        own = self.metrics.snapshot()
        others = await self.ask_others("metrics", own)
        if not others:
            return self.metrics
        total = Metrics()
        for snapshot in (own, *others):
            total.add(snapshot)
        return total

    def check_admits(self) -> None:
        """Raises ShuttingDown or EngineDead if a new request cannot be taken."""
        if self.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if self.client.death is not None:
            raise EngineDead(self.client.death)
        if (stuck := self.client.stuck()) is not None:
            raise EngineDead(stuck)

    def terms(self, tenant: Tenant, body: AccountBody) -> Terms:
        """On whose account a request runs. Raises InvalidRequest for a priority or target that would have no effect."""
        policy = self._ready.config.get("scheduling_policy")
        for name, value, needed in (
            ("priority", body.priority, "priority"),
            ("ttft_slo_ms", body.ttft_slo_ms, "slo"),
            ("tpot_slo_ms", body.tpot_slo_ms, "slo"),
        ):
            if value and policy != needed:
                raise InvalidRequest(
                    f"{name}: this server schedules by {policy}; it is started with --scheduling-policy {needed}, or "
                    "leave the field out",
                    param=name,
                    code="unsupported_parameter",
                )
        if body.priority is not None:
            tenant.check_priority(body.priority)
        return Terms(
            tenant=tenant.name,
            namespace=self.tenants.namespace(tenant, body.cache_salt),
            priority=tenant.priority if body.priority is None else body.priority,
            first_token_ns=_ns(body.ttft_deadline_ms),
            deadline_ns=_ns(body.deadline_ms),
            ttft_slo_ns=_ns(_first(body.ttft_slo_ms, tenant.ttft_slo_ms, self.config.ttft_slo_ms)),
            tpot_slo_ns=_ns(_first(body.tpot_slo_ms, tenant.tpot_slo_ms, self.config.tpot_slo_ms)),
            weight=tenant.weight,
        )

    def set_tenants(self, tenants: Tenants) -> None:
        """Take over a changed table, made with the same server key; revoked keys end here, and what they cached."""
        revoked = self.tenants.revoked_in(tenants)
        for namespace in revoked:
            self.client.control("drop_cache", namespace)
        for name, tenant in self.tenants.all.items():
            if self.tenants.namespace(tenant) in revoked:
                self.responses.forget(name)
        self.tenants = tenants

    async def grammar(self, body: GenerationBody) -> str:
        """What the output is held to, checked; "" for free text. Raises InvalidRequest."""
        grammar, param = await grammar_of(body, self.grammars)
        if grammar:
            self.prompts.need_tokenizer(param)
        return grammar

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is what is served here, or not given."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"model: {name[:200]!r} is not served here, {self.model_name!r} is", param="model")

    def unhealthy(self) -> str | None:
        """Why a request sent now would get no token, or None."""
        return "the server is shutting down" if self.draining else self.client.unhealthy()

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, and for stop strings where no text is made."""
        sampling.check_vocab(self._ready.vocab_size)
        if sampling.stop and self.prompts.tokenizer is None:
            raise InvalidRequest("stop: this server makes token ids, not text; use stop_token_ids", param="stop")

    def limited(self, sampling: SamplingParams, prompt_lens: list[int]) -> SamplingParams:
        """Sampling with a max_tokens within the operator's limits, if it was not given.

        Raises ContextLengthExceeded, with the numbers and the limit's flag, for what was asked and is over one.
        """
        config, longest = self.config, max(prompt_lens)
        asked = sampling.max_tokens
        if config.max_input_tokens is not None and longest > config.max_input_tokens:
            raise _over(f"the prompt has {longest} tokens", config.max_input_tokens, "--max-input-tokens", "prompt")
        most = config.max_output_tokens
        if most is not None and asked is not None and asked > most:
            raise _over(f"max_tokens is {asked}", most, "--max-output-tokens", "max_tokens")
        total = config.max_total_tokens
        if total is not None:
            if longest + (asked or 1) > total:
                param = "prompt" if longest >= total else "max_tokens"
                what = f"the prompt has {longest} tokens and max_tokens is {asked or 'at least 1'}"
                raise _over(what, total, "--max-total-tokens", param)
            most = min(total - longest, most) if most is not None else total - longest
        if asked is None and most is not None:
            room = self.max_request_tokens - longest
            return replace(sampling, max_tokens=max(min(most, room), 1))
        return sampling

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request: what the engine allows."""
        return self._ready.max_request_tokens

    @property
    def seen_tokens(self) -> int | None:
        """What attention sees of a context that is longer (--kv-window and its sinks); None: all."""
        config = self._ready.config
        window = config.get("kv_window")
        return None if window is None else window + (config.get("kv_sinks") or 0)

    def wall_s(self) -> int:
        """Seconds since 1970, for `created`; the only wall clock here."""
        return int(time.time())

    @property
    def _ready(self) -> Ready:
        ready = self.client.info
        assert ready is not None, "the server takes requests only after the engine is ready"
        return ready


def _over(what: str, limit: int, flag: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"{what}, but this server's limit is {limit} ({flag}); shorten the prompt or lower max_tokens", param=param
    )


def _first(*values: float | None) -> float | None:
    """The first that is given."""
    return next((value for value in values if value is not None), None)


def _ns(milliseconds: float | None) -> int | None:
    return None if milliseconds is None else int(milliseconds * 1e6)
