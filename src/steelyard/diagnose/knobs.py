"""What to turn once it is known what binds: the knobs of each verdict that this server, by its settings, can turn.

`settings` are the words a server reports of itself (`steelyard:config_info`, `vllm:cache_config_info`); a word that it
does not say rules nothing out. Decides nothing of what binds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Settings = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Knob:
    """One change: in words, the flag whose gain plan can tell (empty: none), and whether a server can make it."""

    text: str
    flag: str = ""
    can: Callable[[Settings], bool] = lambda settings: True


def on_cpu(settings: Settings) -> bool:
    """Whether a server says that it computes on a CPU."""
    return "cpu" in (settings.get("device"), settings.get("attention_backend"), settings.get("attention"))


def _is(settings: Settings, name: str, word: str, unsaid: bool) -> bool:
    return settings[name].lower() == word if name in settings else unsaid


def _wide_kv(settings: Settings) -> bool:
    """Its KV is not of 8 bits, and its attention could read such."""
    plain = settings.get("attention_backend") in ("sdpa", "naive")
    return not plain and not settings.get("kv_cache_dtype", "").startswith(("fp8", "int8"))


def _no_reuse(settings: Settings) -> bool:
    return _is(settings, "enable_prefix_caching", "false", unsaid=True)


_KV8 = Knob("an 8-bit KV cache (--kv-cache-dtype fp8)", "kv_cache_dtype", _wide_kv)
_CACHE = Knob("prefix caching", "enable_prefix_caching", _no_reuse)
_WEIGHTS = Knob("a checkpoint with 8-bit weights", "dtype")

KNOBS: Mapping[str, tuple[Knob, ...]] = {
    "client": (Knob("more client processes"), Knob("a higher cap of the client")),
    "sequence cap": (Knob("a larger --max-num-seqs", "max_num_seqs"),),
    "KV capacity": (_KV8, Knob("a smaller --max-num-seqs")),
    "prefill compute": (
        _CACHE,
        _WEIGHTS,
        Knob("shorter prompts, or ones that begin alike", can=lambda s: not _no_reuse(s)),
    ),
    "decode bandwidth": (_WEIGHTS, _KV8),
    "host": (
        Knob(
            "CUDA graphs (leave out --enforce-eager)",
            "enforce_eager",
            lambda s: not on_cpu(s) and _is(s, "enforce_eager", "true", unsaid=True),
        ),
        Knob("--async-scheduling", can=lambda s: not on_cpu(s) and _is(s, "async_scheduling", "false", unsaid=True)),
    ),
    "interference": (Knob("a smaller --max-num-batched-tokens", "max_num_batched_tokens"),),
    "fragmentation": (
        Knob("a smaller --block-size", "block_size"),
        Knob("--kv-allocation paged", can=lambda s: not _is(s, "kv_allocation", "paged", unsaid=False)),
    ),
    "device": (_CACHE, Knob("shorter prompts"), Knob("another replica")),
}
"""By verdict, the most telling first."""

ELSEWHERE: Mapping[str, str] = {
    "host": "no setting of this server launches its steps sooner: a faster core, or fewer processes beside it",
}
"""What to do where none of a verdict's knobs is left to turn; the other verdicts have one that always is."""


def advice(verdict: str, settings: Settings) -> tuple[str, str]:
    """(words, flag): what to try, and the flag of the first of it, whose gain plan can tell. Empty flag: none."""
    left = [knob for knob in KNOBS[verdict] if knob.can(settings)]
    if not left:
        return ELSEWHERE[verdict], ""
    return ", or ".join(knob.text for knob in left), left[0].flag
