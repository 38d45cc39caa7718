"""Three kinds of predicted time that must not be mixed: Floor, Reach and Estimate. Types and nothing else.

    Floor     datasheet peaks; a measured step under it means the arithmetic, or the measurement, is wrong
    Reach     ceilings measured on the machine; a step under it says: measure the ceilings again
    Estimate  the calibrated model, smooth where arithmetic and memory cross: the one to predict with

Each adds to and compares with its own kind only; `seconds` leaves the type on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class _Time:
    seconds: float

    def __post_init__(self) -> None:
        assert self.seconds >= 0.0, f"a time of {self.seconds} s"

    def __add__(self, other: Self) -> Self:
        return type(self)(self.seconds + self._same(other))

    def __mul__(self, factor: float) -> Self:
        return type(self)(self.seconds * factor)

    def __lt__(self, other: Self) -> bool:
        return self.seconds < self._same(other)

    def __le__(self, other: Self) -> bool:
        return self.seconds <= self._same(other)

    def _same(self, other: Self) -> float:
        if type(other) is not type(self):
            raise TypeError(f"a {type(self).__name__} does not mix with a {type(other).__name__}")
        return other.seconds

    @property
    def ms(self) -> float:
        return self.seconds * 1e3

    @property
    def ns(self) -> int:
        return round(self.seconds * 1e9)

    def is_broken_by(self, measured_s: float) -> bool:
        """True where a measured time is below this one by more than a clock's rounding (1 part in 10^6)."""
        return measured_s < self.seconds * (1.0 - 1e-6)


class Floor(_Time):
    """Nothing can be faster on this device."""

    __slots__ = ()


class Reach(_Time):
    """What this machine's measured ceilings allow."""

    __slots__ = ()


class Estimate(_Time):
    """What is expected to happen."""

    __slots__ = ()
