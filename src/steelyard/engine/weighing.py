"""What the engine answers about its ledgers: plain values that msgpack carries. Reads; settles; changes nothing else.

steps N     the last N steps                  step ID     one step with every share
request ID  all its choices, live or closed   requests    the live ones
memory      bytes by what holds them          little      both sides of the law      blocks   the pool as a map
prompts N   the last N prompts as keyed hashes of their tokens
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from steelyard.engine.ledgers import Ledgers
from steelyard.engine.prompts import MAX_PROMPTS
from steelyard.ledger.memory import (
    Holding,
    PoolUse,
    cached_fates,
    device_bytes,
    is_accounted_for,
    pool_bytes,
    pool_use,
    unaccounted_share,
)

if TYPE_CHECKING:
    from steelyard.engine.engine import Engine

LEDGER_TOPICS = ("steps", "step", "request", "requests", "memory", "little", "blocks", "prompts")
MAX_MAP = 4096
_MAX_LIVE = 512
_CLEAN, _CACHED, _ACTIVE, _SHARED = 0, 1, 2, 3


def ledger_answer(engine: Engine, ledgers: Ledgers, topic: str, argument: str) -> Any:
    """An argument that is no number counts as 0."""
    now_ns = engine.clock_ns()
    number = int(argument) if argument.isascii() and argument.isdigit() else 0
    match topic:
        case "steps":
            return ledgers.steps(number)
        case "step":
            return ledgers.step(number)
        case "request":
            engine.scheduler.settle(now_ns)
            return [_with_bytes(engine, choice) for choice in ledgers.request(argument, now_ns)]
        case "requests":
            engine.scheduler.settle(now_ns)
            return [_live(ledgers, account.request, now_ns) for account in ledgers.accounts.live[:_MAX_LIVE]]
        case "little":
            engine.scheduler.settle(now_ns)
            return ledgers.little(now_ns)
        case "blocks":
            return block_map(engine)
        case "prompts":
            return ledgers.prompts.of(ledgers.accounts.recent(min(number, MAX_PROMPTS) or MAX_PROMPTS))
    return memory(engine)


def _with_bytes(engine: Engine, choice: dict[str, Any]) -> dict[str, Any]:
    """A choice's account with the blocks that others held as bytes too."""
    held = choice["kv_held"]
    if held is not None:
        sizes = _block_bytes(engine, engine.runner.memory().kv_pool_bytes)
        held["bytes"] = sum(count * size for count, size in zip(held["blocks"], sizes))
    return choice


def _live(ledgers: Ledgers, request: Any, now_ns: int) -> dict[str, Any]:
    account = ledgers.accounts.get(request)
    assert account is not None
    return account.as_dict(now_ns)


def memory(engine: Engine) -> dict[str, Any]:
    """The device's bytes, which sum to its total, what the start took, and each KV group's blocks, slots and bytes."""
    terms = engine.runner.memory()
    uses = pools(engine)
    sizes = _block_bytes(engine, terms.kv_pool_bytes)
    size = engine.cache.block_size
    return {
        "device_bytes": device_bytes(terms),
        "unaccounted_share": unaccounted_share(terms),
        "accounted_for": is_accounted_for(terms),
        "start_seconds": dict(engine.options.start_seconds),
        "pools": [
            {
                **{name: getattr(use, name) for name in PoolUse.__slots__},
                "block_size": size,
                "bytes": pool_bytes(use, size, block_bytes),
                "fates": cached_fates(*fates),
            }
            for use, block_bytes, fates in zip(uses, sizes, engine.cache.fates())
        ],
        "host_pools": [
            {**asdict(use), "bytes": {state: num * block_bytes for state, num in asdict(use).items()}}
            for use, block_bytes in zip(engine.cache.host.usage_of_groups(), sizes)
        ],
    }


def pools(engine: Engine) -> list[PoolUse]:
    """Each group's blocks by use. A partition: checked here, every time."""
    cache = engine.cache
    residents = engine.scheduler.residents()
    found: list[PoolUse] = []
    for group, (num_blocks, clean, cached) in enumerate(cache.pools()):
        holdings = []
        for request in residents:
            table = cache.tables(request)[group]
            twins = [cache.has_twin(group, b, key) for b, key in zip(table, request.block_hashes)]
            holdings.append(Holding(table, request.num_computed, twins))
        use = pool_use(num_blocks, clean, cached, cache.block_size, holdings)
        use.check(cache.block_size)
        found.append(use)
    return found


def block_map(engine: Engine) -> dict[str, Any]:
    """The first group's pool as one code a block: 0 clean, 1 cached, 2 in use, 3 shared; folded where it is large.

    `live` names the holders: block ids by request, for those that hold any.
    """
    cache = engine.cache
    num_blocks = cache.pools()[0][0]
    codes = bytearray(num_blocks + 1)
    for block_id in cache.cached_ids(0):
        codes[block_id] = _CACHED
    for request in engine.scheduler.residents():
        for block_id in cache.tables(request)[0]:
            if block_id:
                codes[block_id] = _SHARED if codes[block_id] in (_ACTIVE, _SHARED) else _ACTIVE
    fold = -(-num_blocks // MAX_MAP)
    cells = [max(codes[i : i + fold]) for i in range(1, num_blocks + 1, fold)]
    return {"num_blocks": num_blocks, "fold": fold, "cells": "".join(map(str, cells))}


def _block_bytes(engine: Engine, pool_bytes_: int) -> list[int]:
    """Bytes of a block of each group: as the engine was told, else the pool's over its blocks."""
    told = engine.options.block_bytes
    if told:
        return list(told)
    counts = [num_blocks + 1 for num_blocks, _, _ in engine.cache.pools()]
    return [pool_bytes_ // sum(counts)] * len(counts)
