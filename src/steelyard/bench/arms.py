"""What ablations compare: arms as flags of `steelyard serve`, one change apart. Definitions; nothing is run here.

knob   two arms, A as engines did it before, B as this one does: what one change buys
set    three or more arms along one line of development, each against the one before it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.errors import InvalidRequest

UNSHARED = "--no-enable-prefix-caching"
WHOLE = "--no-enable-chunked-prefill"


@dataclass(frozen=True, slots=True)
class Knob:
    """Flags of each arm, and the account that the change should move.

    read_back  the setting, as the server reports it, that must differ between the arms
    both       flags of both arms, so that nothing else differs: without a KV cache no prefix is cached either
    follows    settings that cannot stay as they were; any other difference voids the comparison
    """

    name: str
    a: tuple[str, ...]
    b: tuple[str, ...]
    moves: str
    read_back: str
    both: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


_POOL = ("num_blocks", "num_gpu_blocks")
KNOBS: dict[str, Knob] = {
    k.name: k
    for k in (
        Knob("kv-cache", ("--kv-cache", "off"), (), "compute", "kv_cache", both=(UNSHARED, WHOLE)),
        Knob("attention", ("--attention-backend", "naive"), (), "memory traffic", "attention_backend"),
        Knob("batching", ("--batching", "static"), (), "queueing", "batching", follows=("batch_size",)),
        Knob(
            "allocation", ("--kv-allocation", "contiguous-max"), (), "fragmentation", "kv_allocation", both=(UNSHARED,)
        ),
        Knob("prefix-caching", (UNSHARED,), (), "compute", "enable_prefix_caching"),
        Knob(
            "chunked-prefill", (WHOLE,), (), "interference", "enable_chunked_prefill",
            follows=("max_num_batched_tokens",),
        ),
        Knob(
            "budget", ("--max-num-batched-tokens", "2048"), ("--max-num-batched-tokens", "512"), "interference",
            "max_num_batched_tokens",
        ),
        Knob("graphs", ("--enforce-eager",), (), "launch", "enforce_eager"),
        Knob("overlap", ("--no-async-scheduling",), ("--async-scheduling",), "launch", "async_scheduling"),
        Knob(
            "dtype", ("--dtype", "float32"), ("--dtype", "bfloat16"), "memory traffic", "dtype",
            follows=("kv_layout", *_POOL),
        ),
        Knob(
            "kv-cache-dtype", ("--kv-cache-dtype", "auto"), ("--kv-cache-dtype", "fp8"), "memory traffic",
            "kv_cache_dtype", follows=("kv_layout", *_POOL),
        ),
        Knob(
            "kv-window", (), ("--kv-window", "256"), "memory traffic", "kv_window",
            follows=("kv_sinks", "kv_layout", *_POOL),
        ),
        Knob(
            "block-size", ("--block-size", "16"), ("--block-size", "64"), "fragmentation", "block_size",
            follows=_POOL,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ArmSet:
    """Arms in order of development: (name, flags). `both`, `read_back`, `follows` as in Knob, over all of them."""

    name: str
    arms: tuple[tuple[str, tuple[str, ...]], ...]
    both: tuple[str, ...]
    read_back: tuple[str, ...]
    follows: tuple[str, ...] = ()

    def knobs(self) -> list[Knob]:
        """Each arm against the one before it."""
        found = []
        for (before, a), (after, b) in zip(self.arms, self.arms[1:]):
            changed = "what the arms differ in"
            found.append(Knob(f"{before} -> {after}", a, b, changed, "", self.both, (*self.read_back, *self.follows)))
        return found


_NAIVE = ("--attention-backend", "naive")
SETS: dict[str, ArmSet] = {
    s.name: s
    for s in (
        ArmSet(
            "combinations",
            (
                ("no cache, naive attention", ("--kv-cache", "off", *_NAIVE)),
                ("cache, naive attention", _NAIVE),
                ("cache, efficient attention", ()),
            ),
            (UNSHARED, WHOLE),
            ("kv_cache", "attention_backend"),
        ),
        ArmSet(
            "batching",
            (
                ("static", ("--batching", "static", WHOLE)),
                ("dynamic", ("--batching", "dynamic", WHOLE)),
                ("continuous, whole prompts", (WHOLE,)),
                ("continuous, chunked prompts", ()),
            ),
            (UNSHARED,),
            ("batching", "enable_chunked_prefill"),
            ("batch_size", "batch_timeout", "max_num_batched_tokens"),
        ),
    )
}


def knobs_named(names: Sequence[str]) -> list[Knob]:
    """Raises InvalidRequest for a name that is not in the table."""
    for name in names:
        if name not in KNOBS:
            raise InvalidRequest(f"--knob must be of {', '.join(KNOBS)}, got {name!r}", param="knob")
    return [KNOBS[name] for name in names]


def sets_named(names: Sequence[str]) -> list[ArmSet]:
    """Raises InvalidRequest for a name that is not in the table."""
    for name in names:
        if name not in SETS:
            raise InvalidRequest(f"--set must be of {', '.join(SETS)}, got {name!r}", param="set")
    return [SETS[name] for name in names]
