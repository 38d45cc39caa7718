"""The HTTP server's flags, and the file that may stand for them. Names are vLLM's where the meaning is the same."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from steelyard.cli.options import parse_size
from steelyard.cli.parser import Misuse, Parser
from steelyard.config import LOG_FORMATS, REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from steelyard.errors import StartError, reason

_SECONDS: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
_TOKENS: dict[str, Any] = {"type": int, "metavar": "TOKENS"}
_NUMBERS = (int, float, parse_size)
"""Types of flags whose values may stand in the file without quotes."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every flag of ServerConfig. A flag that is not given leaves its field's default."""
    parser.add_argument("--config", metavar="FILE", help="TOML with these flags' names; the command line goes first")
    _add_listening(parser)
    _add_limits(parser)
    _add_access(parser)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The flags as a ServerConfig. Raises StartError for a value out of range."""
    given = {f.name: getattr(args, f.name) for f in fields(ServerConfig) if hasattr(args, f.name)}
    for name in ("api_key", "allowed_origins", "public_prefix"):
        if name in given:
            given[name] = tuple(given[name])
    return ServerConfig(**given)


def with_file(args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]) -> argparse.Namespace:
    """`args`, and what the file named by --config says where they say nothing. Raises StartError."""
    if getattr(args, "config", None) is None:
        return args
    path = Path(args.config)
    parser = Parser(add_help=False)
    add_arguments(parser)
    found = argparse.Namespace()
    try:
        for name, value in tomllib.loads(path.read_text(encoding="utf-8")).items():
            _take(parser, found, name, value)
    except (OSError, ValueError) as error:
        raise StartError(f"--config {path}: {reason(error)}") from None
    except Misuse as mistake:
        raise StartError(f"--config {path}: {mistake.what}") from None
    if hasattr(args, "model_positional"):  # it is --model by another name
        vars(found).pop("model", None)
    return argparse.Namespace(**{**vars(found), **vars(args)})


def _take(parser: Parser, found: argparse.Namespace, name: str, value: object) -> None:
    """Set what one line of the file says. Raises Misuse for what no command line could say with this flag."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict) for item in items):
        parser.error(f"{name} is a table: the file has flags' names and their values, and no tables")
    flag = f"--{name.replace('_', '-')}"
    action = parser.action_of(flag)
    if action.dest == "config":
        parser.error("--config cannot stand in the file: one file is read")
    if hasattr(found, action.dest):
        parser.error(f"{flag}: its value is given twice")
    if action.nargs == 0:
        if not isinstance(value, bool):
            parser.error(f"{flag}: must be true or false, got {_kind(value)}")
        said = flag if value else _opposite(action, flag)
        if said is not None:
            parser.set_flag(found, said, [])
        return
    if isinstance(value, list) and action.nargs is None:
        parser.error(f"{flag}: takes one value, got a list")
    is_number = action.type in _NUMBERS
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (int, float, str) if is_number else str):
            parser.error(f"{flag}: must be {'a number' if is_number else 'text in quotes'}, got {_kind(item)}")
    parser.set_flag(found, flag, [str(item) for item in items])


def _opposite(action: argparse.Action, flag: str) -> str | None:
    """What says the contrary: --no-x of --x; None where that is not to give the flag at all."""
    if not isinstance(action, argparse.BooleanOptionalAction):
        return None
    return next(other for other in action.option_strings if other != flag)


def _kind(value: object) -> str:
    """What a TOML value is; the value itself may be a key, and is not shown."""
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return kinds.get(type(value), "a date or a time")


def _add_listening(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server", argument_default=argparse.SUPPRESS).add_argument
    add("--host", help="address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", type=int, help="0: any that is free (default: 8000)")
    add("--uds", metavar="PATH", help="listen on a UNIX socket, for this user only, and not on a port")
    add("--root-path", metavar="PATH", help="what a proxy in front takes off the path, such as /llm")
    add("--ssl-keyfile", metavar="FILE", help="serve HTTPS with this key")
    add("--ssl-certfile", metavar="FILE", help="and this certificate")
    add("--ssl-ca-certs", metavar="FILE", help="ask clients for a certificate of one of these authorities")
    add("--served-model-name", metavar="NAME", help="the model's name in requests and answers (default: its own)")
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS, help="how the model writes calls (default: by its template)")
    add("--reasoning-parser", choices=REASONING_PARSERS, help="tell thinking apart (default: by its template)")
    add("--api-server-count", type=int, metavar="N", help="HTTP processes on the one address (default: 1)")
    add("--log-format", choices=LOG_FORMATS, help="of what its processes log (default: text)")
    add(
        "--stall-limit",
        dest="stall_limit_s",
        help="without a step making progress, before /health says 503 and requests end (default: 20)",
        **_SECONDS,
    )
    add(
        "--step-limit",
        dest="step_limit_s",
        help="for one step, which may take longer than a stall, before the same (default: 300)",
        **_SECONDS,
    )
    add(
        "--shutdown-timeout",
        dest="shutdown_timeout_s",
        help="for running requests to finish after SIGTERM; a second one ends them (default: 30)",
        **_SECONDS,
    )
    add(
        "--enable-prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        help="cached tokens in usage (default: on)",
    )
    add("--ledger-log", metavar="FILE", help="append each request's whole account as a line of JSON")
    add(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send each request's account as OpenTelemetry spans (needs the package's extra `otel`)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("limits", argument_default=argparse.SUPPRESS).add_argument
    add("--max-input-tokens", help="prompt of one request", **_TOKENS)
    add("--max-output-tokens", help="output of one choice", **_TOKENS)
    add("--max-total-tokens", help="prompt and output of one request", **_TOKENS)
    add("--ttft-slo-ms", type=float, metavar="MS", help="target for the first token (--scheduling-policy slo)")
    add("--tpot-slo-ms", type=float, metavar="MS", help="and for each further one; tenants and requests may differ")
    add("--max-num-queued-reqs", type=int, metavar="N", help="requests that may wait for their first token")
    add("--max-num-queued-tokens", help="prompt tokens that may wait", **_TOKENS)
    add("--max-body-bytes", type=parse_size, metavar="SIZE", help="largest request body (default: 8MiB)")
    add("--max-header-bytes", type=parse_size, metavar="SIZE", help="of a request's line and headers (default: 64KiB)")
    add("--max-header-count", type=int, metavar="N", help="headers of a request (default: 128)")
    add("--header-timeout", dest="header_timeout_s", help="for a request's headers to come (default: 20)", **_SECONDS)
    add("--body-timeout", dest="body_timeout_s", help="for a request's body to come (default: 60)", **_SECONDS)
    add(
        "--slow-client-timeout",
        dest="slow_client_timeout_s",
        help="for a reader that takes nothing of its stream (default: 60)",
        **_SECONDS,
    )
    add(
        "--ignore-unknown-fields",
        action=argparse.BooleanOptionalAction,
        help="name them in a header in place of refusing them (default: off)",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("access", argument_default=argparse.SUPPRESS).add_argument
    add("--tenants", metavar="FILE", help="TOML with tenants, their keys and limits; see `steelyard keys`")
    add("--api-key", nargs="+", metavar="KEY", help="of an operator; a file is safer: other users can read arguments")
    add("--public-prefix", nargs="+", metavar="FILE", help="texts at the start of prompts, cached for all tenants")
    add("--api-key-file", metavar="FILE", help="the same, one key a line")
    add(
        "--public-metrics",
        action=argparse.BooleanOptionalAction,
        help="/metrics needs no key (default: an operator's)",
    )
    add("--allowed-origins", nargs="+", type=_origins, action=_Origins, metavar="ORIGIN", help="pages that may ask")


def _origins(text: str) -> list[str]:
    """One origin, or a JSON list of them as vLLM takes it."""
    try:
        found = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(origin, str) for origin in found):
        raise argparse.ArgumentTypeError(f"must be an origin or a JSON list of them, got {text!r}")
    return found


class _Origins(argparse.Action):
    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None) -> None:
        setattr(namespace, self.dest, [origin for group in values for origin in group])
