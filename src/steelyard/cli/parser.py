"""The argument parser of every command: a mistake is one line, and a flag that is not there names its neighbour."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class Helps(argparse.RawDescriptionHelpFormatter):
    """A flag's default is in its help, whether or not whoever wrote the help thought of it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """As argparse.ArgumentDefaultsHelpFormatter, which repeats a default that the text tells."""
        text, value = action.help, action.default
        told = not text or "default" in text or not action.option_strings
        if told or value is None or value is argparse.SUPPRESS or value in (False, "", [], (), {}):
            return text
        return f"{text} (default: {value})"


class Misuse(Exception):
    """What is wrong with a command line: one line for the user, the command's name first."""


class Parser(argparse.ArgumentParser):
    """Subcommands' parsers are of this class too, and the innermost one speaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Helps, **options})

    def error(self, message: str) -> NoReturn:
        """Raises Misuse with one line that says where the flags are listed, and not all of them."""
        raise Misuse(f"{self.prog}: {message.removeprefix('argument ')} (`{self.prog} --help` lists what it takes)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but what is not known is an error here, and not of the parser around this one."""
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(self._unknown(rest))
        return found, rest

    def _unknown(self, words: Sequence[str]) -> str:
        flag = next((w for w in words if w.startswith("-")), None)
        if flag is None:
            return f"does not know what to do with: {' '.join(words)}"
        name = flag.partition("=")[0]
        near = difflib.get_close_matches(name, list(self._option_string_actions), 1)
        return f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else "")
