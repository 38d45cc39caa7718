"""Types of flags' values, shared by all commands: numbers in a range, times, addresses, where a file may be written.

Each is given to argparse as `type=`. What does not fit raises argparse.ArgumentTypeError, which the parser prints with
the flag's name, before anything is measured or loaded.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidRequest

_SPAN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m)?", re.ASCII)
_UNITS_NS = {"us": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9}


def whole(least: int | None = None, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `least` and at most `most`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        if (least is not None and value < least) or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be a whole number {_range(least, most)}, got {value}")
        return value

    return parse


def wholes(least: int) -> Callable[[str], tuple[int, ...]]:
    """`1,8,32`: whole numbers of at least `least`, separated by commas."""

    def parse(text: str) -> tuple[int, ...]:
        try:
            return tuple(whole(least)(part) for part in text.split(","))
        except argparse.ArgumentTypeError:
            what = f"must be whole numbers {_range(least, None)} with commas between, such as 1,8,32"
            raise argparse.ArgumentTypeError(f"{what}, got {text!r}") from None

    return parse


def real(least: float = -math.inf, most: float | None = None) -> Callable[[str], float]:
    """A number of at least `least` and at most `most`; inf only where `most` is inf."""

    def parse(text: str) -> float:
        value = _number(text)
        if not max(least, -sys.float_info.max) <= value or (value == math.inf if most is None else value > most):
            raise argparse.ArgumentTypeError(f"must be a number {_range(least, most)}, got {text}")
        return value

    return parse


def above(limit: float, most: float | None = None) -> Callable[[str], float]:
    """A number above `limit` and at most `most`; inf only where `most` is inf."""

    def parse(text: str) -> float:
        value = _number(text)
        if not limit < value or (value == math.inf if most is None else value > most):
            upper = "" if most is None or most == math.inf else f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"must be a number above {limit:g}{upper}, got {text}")
        return value

    return parse


def span(plain: str) -> Callable[[str], float]:
    """`500ms`, `0.5s`, `2m`, `80us`: an amount of time above 0, in units of `plain`, which a bare number has too."""

    def parse(text: str) -> float:
        match = _SPAN.fullmatch(text.strip())
        ns = float(match[1]) * _UNITS_NS[match[2] or plain] if match else 0.0
        if not 0.0 < ns < math.inf:
            raise argparse.ArgumentTypeError(f"must be a time above 0, such as 500ms or 0.5s, got {text!r}")
        return ns / _UNITS_NS[plain]

    return parse


def counts(text: str) -> tuple[int, int]:
    """`8` or `1..256`: (first, last), whole numbers of at least 1, the first no larger than the last."""
    low, dots, high = text.partition("..")
    try:
        first, last = int(low), int(high if dots else low)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or LOW..HIGH, such as 1..256, got {text!r}") from None
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"must be LOW..HIGH with 1 <= LOW <= HIGH, got {text}")
    return first, last


def url(text: str) -> str:
    """A server's address, without a slash at its end."""
    if not text.startswith(("http://", "https://")) or not text.split("://", 1)[1].strip("/"):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https://, such as http://{text or 'HOST:PORT'}")
    return text.rstrip("/")


def new_file(text: str) -> Path:
    """A path that a file can be written to: its folder is there, and it is no folder itself."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: there is no folder {path.parent}")
    return path


def new_folder(text: str) -> Path:
    """A path that a folder is at, or can be made at."""
    path = Path(text)
    taken = next((p for p in (path, *path.parents) if p.exists()), Path("."))
    if not taken.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be a folder: {taken} is a file")
    return path


def old_file(text: str) -> Path:
    """A file that is there to be read."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    return path


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


def together(args: argparse.Namespace, *names: str) -> None:
    """Flags of which one alone would be ignored. Raises InvalidRequest naming the one that is missing."""
    given = [n for n in names if getattr(args, n) is not None]
    missing = [n for n in names if getattr(args, n) is None]
    if given and missing:
        flag, other = (f"--{n.replace('_', '-')}" for n in (missing[0], given[0]))
        raise InvalidRequest(f"{flag} is missing: {other} means nothing without it", param=missing[0])


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def _range(least: float | None, most: float | None) -> str:
    if least is None or least == -math.inf:
        return "that is finite" if most is None else f"of at most {most:g}"
    if most is None or most == math.inf:
        return f"of at least {least:g}"
    return f"between {least:g} and {most:g}"
