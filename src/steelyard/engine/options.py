"""What the engine is told when it is made, and how it says that it is past help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steelyard.errors import EngineDead


class EngineFault(EngineDead):
    """The runner failed: no step can follow. The message says how."""

    code = "engine_fault"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine adds to what scheduler and runner were built with.

    model, config     as `Ready` reports them
    eos_token_ids     end a choice unless it ignores them
    seed              of the seeds given to requests that bring none
    check_invariants  run `check` after every step
    block_bytes       of each KV group; empty: the pool's bytes over its blocks
    start_seconds     of each phase of the start, in order
    """

    model: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    check_invariants: bool = False
    block_bytes: tuple[int, ...] = ()
    start_seconds: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
