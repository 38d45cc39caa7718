"""The argument parser of every command: a mistake is one line, and a flag that is not there names its neighbour.

Flags are written out: an abbreviation that is clear today may be ambiguous with the next flag that is added.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from steelyard.cli.values import real, whole

_OUR_WORDS = {
    "expected one argument": "needs a value",
    "expected at least one argument": "needs at least one value",
    "ignored explicit argument": "takes no value, got",
    "the following arguments are required:": "missing:",
}
"""argparse's words, and what this program says."""


class Helps(argparse.RawDescriptionHelpFormatter):
    """A flag's default is in its help, whether or not whoever wrote the help thought of it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """As argparse.ArgumentDefaultsHelpFormatter, which repeats a default that the text tells."""
        text, value = action.help, action.default
        told = not text or "default" in text or not action.option_strings
        if told or value is None or value is argparse.SUPPRESS or value in (False, "", [], (), {}):
            return text
        as_typed = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        return f"{text} (default: {as_typed})"


class Misuse(Exception):
    """What is wrong with a command line. As text: one line for the user, the command's name first."""

    def __init__(self, command: str, what: str) -> None:
        super().__init__(f"{command}: {what} (`{command} --help` lists what it takes)")
        self.what = what


class Parser(argparse.ArgumentParser):
    """Subcommands' parsers are of this class too, and the innermost one speaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Helps, "allow_abbrev": False, **options})
        self.register("type", int, whole())
        self.register("type", float, real())

    def error(self, message: str) -> NoReturn:
        """Raises Misuse with one line that says where the flags are listed, and not all of them."""
        for theirs, ours in _OUR_WORDS.items():
            message = message.replace(theirs, ours)
        raise Misuse(self.prog, message.removeprefix("argument "))

    def action_of(self, flag: str) -> argparse.Action:
        """What `flag` does. Raises Misuse if there is no such flag."""
        if (action := self._option_string_actions.get(flag)) is None:
            self.error(self._no_flag(flag))
        return action

    def set_flag(self, namespace: argparse.Namespace, flag: str, texts: Sequence[str]) -> None:
        """As if `flag` and `texts` stood on the command line, whatever the texts begin with. Raises Misuse.

        There may be as many texts as the flag takes, but that one that takes several needs at least one.
        """
        action = self.action_of(flag)
        try:
            if action.nargs == "+" and not texts:
                raise argparse.ArgumentError(action, "needs at least one value")
            values = [self._get_value(action, text) for text in texts]
            for value in values:
                self._check_value(action, value)
        except argparse.ArgumentError as error:
            self.error(str(error))
        action(self, namespace, values if action.nargs is not None else values[0], flag)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse's, in the words of all our errors."""
        if action.choices is not None and value not in action.choices:
            allowed = [str(choice) for choice in action.choices]
            text = f"must be one of {', '.join(allowed)}, got {value!r}"
            raise argparse.ArgumentError(action, text + _perhaps(difflib.get_close_matches(str(value), allowed, 1)))

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
        return self._no_flag(flag.partition("=")[0])

    def _no_flag(self, name: str) -> str:
        flags = list(self._option_string_actions)
        begun = [known for known in flags if known.startswith(name)] if name.startswith("--") else []
        return f"there is no flag {name}" + _perhaps(begun or difflib.get_close_matches(name, flags, 1))


def _perhaps(near: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""
