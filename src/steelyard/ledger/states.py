"""What each account of a request's time means, in which order and groups they are shown. Names, no arithmetic."""

from __future__ import annotations

from steelyard.core.timed import State

GROUPS: dict[str, tuple[State, ...]] = {
    "edge": (State.AUTH, State.HTTP_READ, State.TOKENIZE, State.WIRE),
    "waiting": (
        State.WAIT_STEP_BOUNDARY,
        State.WAIT_SLOT,
        State.WAIT_KV,
        State.WAIT_BUDGET,
        State.WAIT_POLICY,
        State.WAIT_GRAMMAR,
    ),
    "resident": (
        State.PREFILL,
        State.DECODE,
        State.RECOMPUTE,
        State.RESIDENT_UNSCHEDULED,
        State.ENGINE_GAP,
    ),
    "displaced": (State.PREEMPTED, State.SWAP_OUT, State.SWAPPED, State.SWAP_IN),
    "tail": (State.OVERSHOOT, State.DETOKENIZE, State.STREAM, State.CLIENT_SLOW),
}
"""Every account but `in_engine` (an interval that the engine's own accounts replace) and `ended`, in order of life."""

DESCRIPTIONS: dict[State, str] = {
    State.HTTP_READ: "reading and checking the request's body",
    State.AUTH: "checking the declared size and the key",
    State.TOKENIZE: "chat template and tokenizer",
    State.WIRE: "between server and engine, there and back",
    State.WAIT_STEP_BOUNDARY: "for the step that was running to end",
    State.WAIT_SLOT: "for a row: max_num_seqs requests were running",
    State.WAIT_KV: "for KV blocks",
    State.WAIT_BUDGET: "for tokens of the step's budget",
    State.WAIT_POLICY: "because the batching policy let nobody in, or for a sibling's prompt",
    State.WAIT_GRAMMAR: "for its grammar to be compiled",
    State.PREFILL: "steps that computed its prompt",
    State.DECODE: "steps that computed its next token",
    State.RECOMPUTE: "steps that computed again what a preemption lost",
    State.RESIDENT_UNSCHEDULED: "held a row, but the step had nothing for it",
    State.ENGINE_GAP: "held a row while the device ran no step",
    State.PREEMPTED: "displaced: others needed its blocks",
    State.SWAP_OUT: "its KV was moved to the host",
    State.SWAPPED: "displaced, its KV on the host",
    State.SWAP_IN: "its KV was moved back",
    State.OVERSHOOT: "computed beyond its end",
    State.DETOKENIZE: "after the last token: making text",
    State.STREAM: "after the last token: writing the response",
    State.CLIENT_SLOW: "after the last token: the client did not read",
    State.IN_ENGINE: "in the engine, which has not accounted for it yet",
}

COMPUTING = frozenset({State.PREFILL, State.DECODE, State.RECOMPUTE, State.ENGINE_GAP})
"""Accounts between which a gap is divided only when a step commits; counted as one where numbers at an instant are."""

TIMED_NAMES = tuple(state.value for states in GROUPS.values() for state in states)


def group_of(name: str) -> str:
    """The group that shows the account `name`; "other" for one that is in none."""
    return next((group for group, states in GROUPS.items() if name in {s.value for s in states}), "other")
