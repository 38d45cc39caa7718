"""`steelyard chat`: a conversation in the terminal, streamed, in this process. Works on a pipe, too: a line is a turn.

Ctrl-C stops the answer     Ctrl-D leaves     /clear forgets the conversation     /system TEXT sets its frame
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.cli.prompts import add_sampling_arguments, make_sampling, sampling_values
from steelyard.errors import InvalidRequest

if TYPE_CHECKING:
    from steelyard.core.sampling import SamplingParams
    from steelyard.llm import LLM

DEFAULT_MAX_TOKENS = 1024
DEFAULT_TEMPERATURE = 0.7
HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /clear, /system TEXT, /help"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message for the conversation")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS, temperature=DEFAULT_TEMPERATURE)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Talk until the end of input."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = engine_config(args)
    sampling = make_sampling(sampling_values(args))
    from steelyard.llm import LLM

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  (line editing and history for input)

        print(f"steelyard: loading {config.model}", file=sys.stderr)
    conversation = Conversation(LLM.from_config(config), sampling, args.system)
    if is_terminal:
        print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if line.strip():
            conversation.turn(line.strip())


class Conversation:
    """The messages so far, and a way to add to them. Answers go to stdout, all else to stderr."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return system + self._turns

    def turn(self, line: str) -> None:
        """A command, or something to answer."""
        command, _, rest = line.partition(" ")
        match command:
            case "/clear":
                self._turns.clear()
            case "/system":
                self._system = rest.strip() or None
                self._turns.clear()
            case "/help":
                print(HELP, file=sys.stderr)
            case _ if command.startswith("/"):
                print(f"no such command {command}: {HELP}", file=sys.stderr)
            case _:
                self._answer(line)

    def _answer(self, text: str) -> None:
        """Stream an answer. A stopped one stays as far as it came; a refused question is taken back."""
        self._turns.append({"role": "user", "content": text})
        answer = ""
        try:
            with closing(self._llm.stream_chat(self.messages, self._sampling)) as pieces:
                for piece in pieces:
                    answer += piece.text
                    print(piece.text, end="", flush=True)
                    if piece.finish_reason not in (None, "stop"):
                        print(f" [{piece.finish_reason}]", end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr, flush=True)
        except InvalidRequest as error:
            self._turns.pop()
            hint = " (/clear begins anew)" if error.code == "context_length_exceeded" else ""
            print(f"steelyard chat: {error.message}{hint}", file=sys.stderr)
            return
        print(flush=True)
        self._turns.append({"role": "assistant", "content": answer})
