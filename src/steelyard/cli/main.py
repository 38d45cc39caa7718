"""The `steelyard` command: finds the subcommand and loads only its module. One file a subcommand.

All but a few small modules is loaded inside `main`, where a Ctrl-C is caught.
"""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence

from steelyard import __version__
from steelyard.cli.interrupts import INTERRUPTED, Interrupts

COMMANDS: dict[str, str] = {
    "serve": "serve a model over the OpenAI API",
    "compile": "compile a model's GPU kernels where there is no GPU, for servers to find at their start",
    "keys": "make API keys for the tenants of a server",
    "generate": "complete prompts from arguments or a JSONL file",
    "chat": "talk to a model in the terminal",
    "explain": "tell where a request's time went, from a server's ledger or a log",
    "plan": "say what serving a model will cost, before anything runs",
    "bench": "measure: a server under load, the engine alone, attention kernels, and this machine's own limits",
    "diagnose": "say which resource binds a server or a saved benchmark, with the numbers, and what to try",
    "ablate": "change one thing of the server at a time, and see what it cost or saved, and where",
    "quality": "judge whether a faster server still answers as well as a base one",
    "selftest": "ask whether a request's answer depends on what is computed beside it",
    "doctor": "look at this machine, run attention here, and say which kernels really ran",
}
"""Name and one-line help. Module `steelyard.cli.NAME` has `add_arguments(parser)` and `run(args) -> int`."""


STDOUT_CLOSED = 141
"""Exit status where the reader of standard output went away: 128 and SIGPIPE, as for other programs."""
_COMPUTING = frozenset(
    {"compile", "generate", "chat", "selftest", "doctor", "plan", "bench throughput", "bench latency", "bench kernels"}
)
"""Those that load torch as they run, and have no event loop."""
_CLEAR = "\r\x1b[K"  # a line of progress, or the terminal's ^C


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake prints one line and returns 2. Without `argv`, the process is ours.

    Whatever a command was doing, Ctrl-C ends it with one line, which has the words of its KeyboardInterrupt if it
    raises one itself, and it ends without a word where nobody reads its output any longer (`| head`).
    """
    interrupts = Interrupts(is_ours=argv is None)
    status = INTERRUPTED
    try:
        interrupts.hear()
        status = _told(list(sys.argv[1:] if argv is None else argv), interrupts)
    except KeyboardInterrupt:  # another one, while the first was being told
        if argv is not None:
            raise
    finally:
        status = interrupts.leave(status)
    return status


def _told(words: list[str], interrupts: Interrupts) -> int:
    try:
        try:
            return _run(words, interrupts)
        finally:
            sys.stdout.flush()  # here and not at the interpreter's exit, where nothing can be caught
    except KeyboardInterrupt as stop:
        kept = f"; {stop}" if str(stop) else ""
        print(f"{_CLEAR if sys.stderr.isatty() else ''}steelyard {_chosen(words)}: stopped{kept}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        if not _output_is_gone():
            raise
        return STDOUT_CLOSED


def _run(words: list[str], interrupts: Interrupts) -> int:
    from steelyard.cli.parser import Misuse, Parser
    from steelyard.engine.threads import with_short_spins
    from steelyard.errors import SteelyardError, reason

    os.environ.update(with_short_spins(os.environ))  # before a command loads torch
    parser = Parser(prog="steelyard", description="An LLM inference server that weighs what it spends.")
    parser.add_argument("--version", action="version", version=f"steelyard {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = _chosen(words)
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"steelyard.cli.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    try:
        args = parser.parse_args(words)
    except Misuse as mistake:
        print(mistake, file=sys.stderr)
        return 2
    try:
        interrupts.run(has_loop=f"{args.command} {getattr(args, 'bench', '')}".strip() not in _COMPUTING)
        return int(args.run(args))
    except SteelyardError as error:
        print(f"steelyard {args.command}: {error.message}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None:  # not of a file that was named
            raise
        print(f"steelyard {args.command}: {error.filename}: {reason(error)}", file=sys.stderr)
        return 2


def _chosen(words: list[str]) -> str | None:
    """The subcommand."""
    return next((w for w in words if not w.startswith("-")), None)


def _output_is_gone() -> bool:
    """Whether standard output has no reader, as against a pipe of the command's own that broke.

    What is still to be written is dropped, so that the interpreter does not try again on its way out.
    """
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, output)
    os.close(sink)
    return True


if __name__ == "__main__":
    sys.exit(main())
