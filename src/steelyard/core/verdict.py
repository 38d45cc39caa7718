"""What is said of an arm's answers: each figure beside its limit, and one word. Values; nothing is judged here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "does not count"]
_DIGITS = re.compile(r"\.(\d+)")
_MOST_DIGITS = 18
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
        form = self._telling
        low, high = _shown(self.low, form), _shown(self.high, form)
        if self.low is not None and self.high is not None:
            return f"{low} to {high}"
        return f"at least {low}" if self.low is not None else f"at most {high}"

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of a table, under HEADER."""
        return self.name, _shown(self.value, self._telling), self.limit, _shown(self.noise, self.form), self.outcome

    @property
    def sentence(self) -> str:
        """What it missed and by how much; of one that does not count, why."""
        return self.note or f"{self.name} {_shown(self.value, self._telling)}, {self.limit}"

    @property
    def _telling(self) -> str:
        """The form with as many digits as tell a figure that fails from the bounds that it missed."""
        if self.outcome != "fail" or self.value is None:
            return self.form
        forms = (_DIGITS.sub(f".{digits}", self.form) for digits in range(_digits_of(self.form), _MOST_DIGITS))
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        telling = (form for form in forms if all(format(self.value, form) != format(b, form) for b in bounds))
        return next(telling, self.form)


def _shown(number: float | None, form: str) -> str:
    return "-" if number is None else format(number, form)


def _digits_of(form: str) -> int:
    found = _DIGITS.search(form)
    assert found is not None, f"{form} names no number of digits"
    return int(found[1])


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
