"""What is said of an arm's answers: each figure beside its limit, and one word. Values; nothing is judged here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "does not count"]
HEADER = ("figure", "arm", "limit", "base itself", "outcome")


@dataclass(frozen=True, slots=True)
class Held:
    """A figure of an arm, held to a limit. None: there is no such figure, or no such bound.

    value       passes from `low` to `high`, both included
    noise       the same of the base against itself
    form        the format specification of its numbers
    note        of one that does not count: why not, and what to do
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    noise: float | None
    form: str
    outcome: Outcome
    note: str = ""

    @property
    def limit(self) -> str:
        """The bounds in words."""
        if self.low is not None and self.high is not None:
            return f"{self._shown(self.low)} to {self._shown(self.high)}"
        if self.low is not None:
            return f"at least {self._shown(self.low)}"
        return f"at most {self._shown(self.high)}"

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of a table, under HEADER."""
        return self.name, self._shown(self.value), self.limit, self._shown(self.noise), self.outcome

    @property
    def sentence(self) -> str:
        """What it missed and by how much; of one that does not count, why."""
        return self.note or f"{self.name} {self._shown(self.value)}, {self.limit}"

    def _shown(self, number: float | None) -> str:
        return "-" if number is None else format(number, self.form)


@dataclass(frozen=True, slots=True)
class Verdict:
    """outcome  of all figures: pass, fail or does not count; without figures, why there are none
    judged   which arm, against which
    """

    outcome: str
    figures: tuple[Held, ...] = ()
    judged: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome == "pass"

    @property
    def summary(self) -> str:
        """One line: the word, and every figure that did not pass with its limit."""
        off = [f.sentence for f in self.figures if f.outcome != "pass"]
        if self.passed:
            return f"pass: all {len(self.figures)} figures are inside their limits"
        return f"{self.outcome}: {'; '.join(off)}" if off else self.outcome
