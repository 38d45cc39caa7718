"""`steelyard generate`: completes prompts from arguments or a JSONL file, in this process.

arguments          -> text on stdout         --output FILE -> JSONL in the file
--input FILE.jsonl -> JSONL on stdout        progress      -> stderr
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.cli.prompts import (
    PromptLine,
    add_sampling_arguments,
    make_sampling,
    read_lines,
    result_line,
    sampling_values,
)
from steelyard.errors import InvalidRequest, StartError, reason

if TYPE_CHECKING:
    from steelyard.llm import LLM, Job, Progress, RequestOutput

DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete")
    parser.add_argument("--input", metavar="FILE", help="JSONL, one prompt a line, in place of arguments; -: stdin")
    parser.add_argument("--output", metavar="FILE", help="write JSONL here; -: to stdout")
    parser.add_argument("--chat", action="store_true", help="arguments are a user's messages to answer")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_sampling_arguments(parser, max_tokens=DEFAULT_MAX_TOKENS)
    add_engine_arguments(parser, positional_model=False)


def run(args: argparse.Namespace) -> int:
    """Complete every prompt; 1 if one of them failed in the engine. Raises InvalidRequest and StartError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = engine_config(args)
    lines = _lines(args)
    with ExitStack() as stack:
        out = sys.stdout
        if args.output not in (None, "-"):
            out = stack.enter_context(_opened(args.output, "w"))
        from steelyard.llm import LLM

        llm = LLM.from_config(config)
        results = _complete(llm, lines, show_progress=not args.no_progress)
        as_text = args.input is None and args.output is None
        for line, result in zip(lines, results):
            out.write(_as_text(result, with_title=len(lines) > 1) if as_text else result_line(line, result) + "\n")
        out.flush()
    failed = [(line, c.error) for line, r in zip(lines, results) for c in r.outputs if c.finish_reason == "error"]
    for line, error in failed:
        print(f"steelyard generate: {line.where}: {error}", file=sys.stderr)
    return 1 if failed else 0


def _lines(args: argparse.Namespace) -> list[PromptLine]:
    if (args.input is None) == (not args.prompts):
        raise StartError("give prompts as arguments, or a file with --input")
    values = sampling_values(args)
    if args.input is None:
        sampling = make_sampling(values)
        kind = "messages" if args.chat else "prompt"
        wrapped = [[{"role": "user", "content": p}] if args.chat else p for p in args.prompts]
        return [PromptLine(f"prompt {i}", kind, p, sampling) for i, p in enumerate(wrapped, 1)]
    if args.input == "-":
        return read_lines(sys.stdin, "stdin", values)
    with _opened(args.input, "r") as file:
        try:
            return read_lines(file, args.input, values)
        except UnicodeDecodeError as error:
            raise StartError(f"{args.input}: not UTF-8 text: {error}") from None


def _complete(llm: LLM, lines: Sequence[PromptLine], *, show_progress: bool) -> list[RequestOutput]:
    """Run all lines together; what the engine refuses is said with its line."""
    from steelyard.engine.offline import PromptRefused

    jobs: list[Job] = []
    for line in lines:
        try:
            is_chat = line.kind == "messages"
            jobs.append(llm.chat_job(line.value, line.sampling) if is_chat else llm.job(line.value, line.sampling))
        except InvalidRequest as error:
            raise InvalidRequest(f"{line.where}: {error.message}", param=error.param) from None
    with _progress_bar(len(jobs), show_progress) as progress:
        try:
            return llm.complete(jobs, progress=progress)
        except PromptRefused as refused:
            raise InvalidRequest(f"{lines[refused.number].where}: {refused.reason}", param=refused.param) from None


@contextmanager
def _progress_bar(num_prompts: int, show: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar on stderr with prompts done and tokens a second."""
    if not show:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f} tokens/s"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=num_prompts, tokens=0, rate=0.0)

        def update(progress: Progress) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = progress.num_generated_tokens / elapsed if elapsed else 0.0
            bar.update(task, completed=progress.num_finished, tokens=progress.num_generated_tokens, rate=rate)

        yield update


def _as_text(result: RequestOutput, *, with_title: bool) -> str:
    """The choices of a prompt for a reader; several prompts are told apart by their text."""
    text = "".join(choice.text + "\n" for choice in result.outputs)
    return f"== {result.prompt}\n{text}\n" if with_title else text


def _opened(name: str, mode: str) -> TextIO:
    try:
        return cast(TextIO, Path(name).open(mode, encoding="utf-8"))
    except OSError as error:
        raise StartError(f"cannot open {name}: {reason(error)}") from None
