"""What is submitted: a prompt, and the terms it runs under. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.core.sampling import SamplingParams
from steelyard.wire.messages import Submit


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the keys of their full blocks."""

    ids: list[int]
    block_hashes: list[bytes]


@dataclass(frozen=True, slots=True)
class Terms:
    """On whose account a request runs, and how long it may take from its arrival.

    first_token_ns, deadline_ns  limits for the first token and for all of it; None: none
    grammar                      what its output is held to, as llguidance has it; "": free text
    ttft_slo_ns, tpot_slo_ns     targets for the first token and for each further one; None: none
    weight                       of the tenant
    want                         tokens, or a vector: pool_last, pool_mean
    """

    tenant: str = ""
    namespace: bytes = b""
    priority: int = 0
    first_token_ns: int | None = None
    deadline_ns: int | None = None
    ttft_slo_ns: int | None = None
    tpot_slo_ns: int | None = None
    weight: float = 1.0
    grammar: str = ""
    want: str = "tokens"


def submit_of(id: str, prompt: Prompt, sampling: SamplingParams, terms: Terms, spent_ns: int) -> Submit:
    """What the engine is told of a request that came `spent_ns` ago: its times are counted from now."""

    def left_ns(limit_ns: int | None) -> int | None:
        return None if limit_ns is None else limit_ns - spent_ns

    return Submit(
        id,
        prompt.ids,
        sampling,
        namespace=terms.namespace,
        tenant=terms.tenant,
        priority=terms.priority,
        block_hashes=prompt.block_hashes,
        grammar=terms.grammar,
        want=terms.want,
        deadline_in_ns=left_ns(terms.deadline_ns),
        first_token_in_ns=left_ns(terms.first_token_ns),
        ttft_slo_in_ns=left_ns(terms.ttft_slo_ns),
        tpot_slo_ns=terms.tpot_slo_ns,
        weight=terms.weight,
    )
