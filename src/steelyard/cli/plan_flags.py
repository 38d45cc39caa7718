"""Which flags each topic of `steelyard plan` reads. Any other flag is refused: a flag that nothing reads is a mistake.

A flag that stands in no set below is refused by every topic, so none can be forgotten.
"""

from __future__ import annotations

import argparse

from steelyard.errors import StartError

_ALWAYS = {"words", "device"}
_TIMES = {"measure", "save", "records"}
_MODEL = {"tp", "dtype", "kv_cache_dtype"}
_BYTES = {"gpu_memory_utilization", "block_size", "enforce_eager"}
_SIZES = {*_BYTES, "max_num_seqs", "max_num_batched_tokens"}
_TARGETS = {"cached_tokens", "arrival_cv", "ttft", "tpot", "attainment"}
_LOAD = {"rate", "input", "output", "trace", *_TARGETS}
_FLEET = {"replicas", "price_per_hour"}
_STEPS = {"context", "batch"}
_HISTORY = {"history", "remove", "tail", "summary", "turns", "hit_rate"}

READ_BY: dict[str, set[str]] = {
    "": {*_MODEL, *_SIZES, *_LOAD, *_FLEET, *_STEPS, *_TIMES, "explain", "plot", "json"},
    "compare": {*_MODEL, *_SIZES, *_LOAD, *_FLEET, *_STEPS, *_TIMES, "to", "json"},
    "tune": {*_MODEL, *_BYTES, *_LOAD, *_TIMES, "price_per_hour", "json"},
    "cache": {*_MODEL, *_SIZES, *_LOAD, *_HISTORY, *_TIMES, "network", "json"},
    "waste": {*_MODEL, *_SIZES, "input", "output", "context", "json"},
    "fit": {*_MODEL, *_TIMES, "held_out", "json"},
    "--measure": {"measure", "save"},
}
"""Names of flags by topic; "": the plan itself, "--measure": without a model."""

_ONLY_WITH_LOAD = {topic: {*_TARGETS, *_FLEET} for topic in READ_BY} | {"cache": {*_TARGETS, *_SIZES}}


def keep_defaults(parser: argparse.ArgumentParser) -> None:
    """To be called when all flags are added: what they are where nobody gives them, as `defaults` of the result."""
    parser.set_defaults(defaults=vars(parser.parse_args([])))


def refuse_unread(args: argparse.Namespace, topic: str) -> None:
    """Raises StartError naming a flag that was given and that the topic does not read, and who does."""
    given = [name for name, default in args.defaults.items() if getattr(args, name) != default]
    for name in given:
        if name not in _ALWAYS | READ_BY[topic]:
            readers = [_command(other) for other, names in READ_BY.items() if name in names]
            raise StartError(
                f"{_flag(name)} is read by {', '.join(readers)} only, not by {_command(topic)}", param=name
            )
    _refuse_unread_beside(args, topic, given)


def _refuse_unread_beside(args: argparse.Namespace, topic: str, given: list[str]) -> None:
    """Flags that the topic reads, but not beside these others."""
    if args.trace is None and args.rate is None and args.input is None and args.output is None:
        for name in given:
            if name in _ONLY_WITH_LOAD[topic] & READ_BY[topic]:
                raise StartError(
                    f"{_flag(name)} needs a load: give --rate, --input and --output, or --trace", param=name
                )
    for name, without in (("attainment", "ttft"),):
        if name in given and getattr(args, without) is None:
            raise StartError(f"{_flag(name)} is of requests within --{without}, which is not given", param=name)
    for name, other in (("input", "trace"), ("output", "trace"), ("arrival_cv", "trace"), ("explain", "json")):
        if name in given and other in given:
            said = "comes from --trace" if other == "trace" else "is of the tables, which --json replaces"
            raise StartError(f"{_flag(name)} {said}: give one or the other", param=name)


def _flag(name: str) -> str:
    return "--tensor-parallel-size" if name == "tp" else f"--{name.replace('_', '-')}"


def _command(topic: str) -> str:
    return (
        f"`steelyard plan {topic} MODEL`".replace("  ", " ") if topic != "--measure" else "`steelyard plan --measure`"
    )
