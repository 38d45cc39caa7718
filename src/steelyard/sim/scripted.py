"""A runner that answers prompts with token ids from a script: the engine and server without a model."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.core.step import (
    POOLED,
    MemoryTerms,
    RowEnter,
    RowOut,
    RowWork,
    RunnerCaps,
    StepPlan,
    StepResult,
    StepTiming,
    TokenLogprobs,
    Want,
)
from steelyard.errors import StartError, reason

SCRIPT_HIDDEN_SIZE = 8
"""Values of a pooled answer."""


@dataclass(frozen=True, slots=True)
class Script:
    """What to answer: `answers` by prompt ids, `default` for other prompts; then the end-of-text id for ever.

    A file is JSON: {"eos_token_id": 2, "default": [5, 6], "answers": [{"prompt": [1, 2], "output": [3, 4]}]}; with
    "step_ms", each step takes so long, as one of a model would.
    """

    eos_token_id: int
    default: tuple[int, ...] = ()
    answers: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    step_ms: float = 0.0

    @classmethod
    def load(cls, path: Path) -> Script:
        """Raises StartError naming the file and what is wrong with it."""
        try:
            raw = json.loads(path.read_text())
            return cls(
                eos_token_id=int(raw["eos_token_id"]),
                default=_ids(raw.get("default", ())),
                answers={_ids(item["prompt"]): _ids(item["output"]) for item in raw.get("answers", ())},
                step_ms=float(raw.get("step_ms", 0)),
            )
        except OSError as error:
            raise StartError(f"--script {path}: cannot be read ({reason(error)})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StartError(f"--script {path}: {type(error).__name__}: {error}") from error

    def token(self, output: Sequence[int], index: int) -> int:
        return output[index] if index < len(output) else self.eos_token_id


class ScriptedRunner:
    """Implements core.step.Runner. `delay` is called once a step, when it is collected, and may sleep.

    Without one a step takes the script's `step_ms`.
    """

    def __init__(
        self,
        caps: RunnerCaps,
        script: Script,
        *,
        delay: Callable[[StepPlan], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._caps = caps
        self._script = script
        self._delay = delay or self._take_time
        self._clock = clock
        self._rows: dict[int, tuple[RowEnter, tuple[int, ...]]] = {}
        self._pending: deque[tuple[StepPlan, StepResult]] = deque()
        self._done_ns = 0

    @property
    def caps(self) -> RunnerCaps:
        return self._caps

    def launch(self, plan: StepPlan) -> StepResult:
        for row in plan.leave:
            del self._rows[row]
        for enter in plan.enter:
            prompt = enter.tokens[: enter.prompt_len]
            self._rows[enter.row] = (enter, self._script.answers.get(prompt, self._script.default))
        prompt_logprobs = {w.row: self._prompt_logprobs(w) for w in plan.work if Want.PROMPT_LOGPROBS in w.want}
        pooled = {w.row: self._pooled(w) for w in plan.work if w.want & POOLED}
        timing = StepTiming(self._clock(), 0, 0)
        rows = tuple([self._answer(w) for w in plan.work])
        result = StepResult(plan.id, rows, timing, prompt_logprobs, pooled)
        self._pending.append((plan, result))
        return result

    def sample(self, step: StepResult, masks: dict[int, Any]) -> None:
        """Masks change nothing: the script is what is answered."""

    def collect(self, step: StepResult) -> StepResult:
        plan, result = self._pending.popleft()
        assert result is step, "steps are collected in launch order"
        self._delay(plan)
        launch_ns, done_ns = result.timing.launch_ns, self._clock()
        began_ns = max(launch_ns, self._done_ns)
        self._done_ns = done_ns
        timing = StepTiming(launch_ns, done_ns, done_ns - began_ns)
        return StepResult(result.id, result.rows, timing, result.prompt_logprobs, result.pooled)

    def memory(self) -> MemoryTerms:
        return MemoryTerms(total_bytes=0)

    def _take_time(self, plan: StepPlan) -> None:
        if self._script.step_ms > 0:
            time.sleep(self._script.step_ms / 1e3)

    def _answer(self, work: RowWork) -> RowOut:
        enter, output = self._rows[work.row]
        if Want.TOKEN not in work.want:
            return RowOut(work.row, enter.epoch, ())
        token = self._script.token(output, work.start + work.num_new - enter.prompt_len)
        logprobs = None
        if Want.TOP_LOGPROBS in work.want:
            logprobs = (self._logprobs(token, enter.sampling.logprobs or 0),)
        return RowOut(work.row, enter.epoch, (token,), logprobs)

    def _prompt_logprobs(self, work: RowWork) -> tuple[TokenLogprobs, ...]:
        enter, _ = self._rows[work.row]
        end = min(work.start + work.num_new, enter.prompt_len - 1)
        num_top = enter.sampling.prompt_logprobs or 0
        return tuple(self._logprobs(enter.tokens[p + 1], num_top) for p in range(work.start, end))

    def _pooled(self, work: RowWork) -> tuple[float, ...]:
        """Made up, SCRIPT_HIDDEN_SIZE values a token, by its id alone."""
        tokens = self._rows[work.row][0].tokens[work.start : work.start + work.num_new]
        tokens = tokens if Want.POOL_MEAN in work.want else tokens[-1:]
        found = [[1 + (token * (i + 1)) % 7 for i in range(SCRIPT_HIDDEN_SIZE)] for token in tokens]
        return tuple(sum(column) / len(found) for column in zip(*found))

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        """Made up, of the right shape: the token itself is the most likely one."""
        top = tuple(((token + i) % self._caps.vocab_size, -0.25 - i) for i in range(num_top))
        return TokenLogprobs(-0.25, top)


def _ids(values: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
