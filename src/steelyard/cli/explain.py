"""`steelyard explain`: a request's life from its ledger, as a timeline and in sentences. Reads a server or a log.

steelyard explain cmpl-1a2f...            ask the server that served it
steelyard explain --slowest 10            the slowest of the last requests
steelyard explain --timeline [--svg FILE]   who was in which row, step by step
steelyard explain ledger.jsonl [--slowest 10]   from a --ledger-log file, without a server
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from steelyard.cli.durations import duration, size
from steelyard.cli.timeline import picture, timeline
from steelyard.cli.values import new_file, url, whole
from steelyard.core.timed import State
from steelyard.errors import NotFound, StartError, reason
from steelyard.ledger.states import DESCRIPTIONS, TIMED_NAMES, group_of

_MARKS = {"edge": "e", "waiting": ".", "displaced": "x", "resident": "#", "tail": "t"}
_WIDTH = 72
_TIMEOUT_S = 10.0
_MOST = 1000
"""What a server tells of at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", nargs="?", help="a request's id, or a file written by --ledger-log")
    add("--url", type=url, default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    add("--api-key", help="where the server needs one")
    add("--slowest", type=whole(1, _MOST), metavar="N", help="the N slowest of the last requests")
    add("--timeline", action="store_true", help="rows over the last steps")
    add("--svg", type=new_file, metavar="FILE", help="of --timeline: draw it too, to scale in time")
    add("--last", type=whole(1, _MOST), default=100, metavar="N", help="steps of --timeline (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print what was asked for. Raises StartError where nothing answers, NotFound for an unknown request."""
    if args.svg is not None and not args.timeline:
        raise StartError("--svg: draws what --timeline prints; give --timeline too")
    path = Path(args.what) if args.what else None
    if path is not None and path.suffix == ".jsonl":
        records = read_log(path)
        count = args.slowest or 1
        print("\n\n".join(explain(r) for r in sorted(records, key=lambda r: -int(r["total_ns"]))[:count]))
        return 0
    ask = _Server(args.url, args.api_key)
    if args.timeline:
        ids = [step["id"] for step in ask(f"/ledger/steps?last={args.last}")["steps"]]
        steps = [ask(f"/ledger/steps/{id}") for id in ids]
        if args.svg is not None:
            args.svg.write_text(picture(steps))
        print(timeline(steps))
        return 0
    if args.what is not None:
        print(explain(ask(f"/ledger/requests/{args.what}")))
        return 0
    found = ask(f"/ledger/requests?slowest=1&last={args.slowest or 10}")["requests"]
    print(
        "\n\n".join(explain(ask(f"/ledger/requests/{record['id']}")) for record in found) or "no request has ended yet"
    )
    return 0


def read_log(path: Path) -> list[dict[str, Any]]:
    """Raises StartError naming file and line."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: cannot be read ({reason(error)})") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            int(record["total_ns"])
        except (ValueError, KeyError, TypeError):
            raise StartError(f"{path}, line {number}: not a request's ledger") from None
        records.append(record)
    if not records:
        raise StartError(f"{path}: has no request in it")
    return records


def explain(record: dict[str, Any]) -> str:
    """A request's account as lines of text."""
    buckets, total_ns = record["buckets_ns"], record["total_ns"]
    tokens = record["tokens"]
    computed = f"{tokens['computed']} positions computed"
    again = f"{tokens['recomputed']} again, {tokens['overshoot']} beyond the end"
    lines = [
        f"{record['id']}  {record['endpoint']}  {record['outcome']}  {duration(total_ns)}",
        f"  |{bar(buckets, total_ns)}|",
        f"  {tokens['prompt']} prompt tokens ({tokens['cached']} cached), {tokens['generated']} generated, "
        f"{computed} ({again}), {duration(record['cost_ns'])} of device time",
        f"  {sentence(record)}",
        *(f"  {line}" for line in _slowest(record)),
    ]
    for name in TIMED_NAMES:
        if buckets.get(name):
            share = buckets[name] / max(total_ns, 1)
            lines.append(f"  {duration(buckets[name]):>10} {share:6.1%}  {name:22} {DESCRIPTIONS[State(name)]}")
    return "\n".join(lines)


def bar(buckets: dict[str, int], total_ns: int) -> str:
    """The accounts in order of life as one line: e edge, . waiting, x displaced, # resident, t tail."""
    marks, spent_ns = "", 0
    for name in TIMED_NAMES:
        spent_ns += buckets.get(name, 0)
        marks += _MARKS[group_of(name)] * (round(_WIDTH * spent_ns / max(total_ns, 1)) - len(marks))
    return marks.ljust(_WIDTH)


def sentence(record: dict[str, Any]) -> str:
    """What it waited for longest, who had it, and when its first token came."""
    buckets = record["buckets_ns"]
    waits = {n: ns for n, ns in buckets.items() if group_of(n) in ("waiting", "displaced") and ns}
    ttft_ns = record.get("ttft_ns")
    whole = f"its first token came after {duration(ttft_ns)}" if ttft_ns else "no token came"
    if not waits:
        return f"It waited for nothing; {whole}."
    name = max(waits, key=lambda n: waits[n])
    rest_ns = sum(waits.values()) - waits[name]
    more = f", and {duration(rest_ns)} for other reasons" if rest_ns else ""
    holders = _holders(record) if name == State.WAIT_KV.value or group_of(name) == "displaced" else ""
    return f"It waited {duration(waits[name])} {DESCRIPTIONS[State(name)]}{holders}{more}; {whole}."


def _holders(record: dict[str, Any]) -> str:
    """Who had the KV blocks when it began to wait for them: of the choice that found the most taken."""
    held = [(choice.get("engine") or {}).get("kv_held") for choice in record.get("choices", ())]
    most = max((h for h in held if h and h["bytes"]), key=lambda h: int(h["bytes"]), default=None)
    if most is None:
        return ""
    count = most["num_requests"]
    return f" ({count} request{'s' if count != 1 else ''} held {size(most['bytes'])})"


def _slowest(record: dict[str, Any]) -> list[str]:
    """Of each choice's slowest token: what made it slow, the largest part first."""
    found = []
    for choice in record.get("choices", ()):
        for step in ((choice.get("engine") or {}).get("slowest_steps") or [])[:1]:
            what = "token" if step.get("kind", "decode") == "decode" else "step (it has one token at most)"
            found.append(
                f"Choice {choice['index']}: of its slowest {what}'s {duration(step['span_ns'])}, {_told(step)}."
            )
    return found


def _told(step: dict[str, Any]) -> str:
    """The parts of a step, none larger than the whole, and how far the model of a step was off."""
    causes = step["causes"]
    (first_ns, first), *rest = [(ns, words) for ns, words in sorted(_parts(step), reverse=True) if ns > 0]
    text = ", ".join([f"{duration(first_ns)} were {first}", *(f"{duration(ns)} {words}" for ns, words in rest)])
    if causes["residual_ns"] < 0:
        text += f"; by the rates of other steps such work takes {duration(-causes['residual_ns'])} longer"
    return text


def _parts(step: dict[str, Any]) -> list[tuple[int, str]]:
    """A step's time as one request met it, in words. They sum to the step and the wait before it.

    In a step shorter than the model expects all its parts shrink alike, as the shares of its cost do.
    """
    causes, residual_ns, gap_ns = step["causes"], step["causes"]["residual_ns"], sum(step["gaps_ns"].values())
    amounts_ns = {name: ns for name, ns in causes.items() if name.endswith("_ns") and name != "residual_ns"}
    expected_ns = sum(amounts_ns.values())
    if residual_ns < 0:
        shrunk_ns = {name: ns * (expected_ns + residual_ns) // expected_ns for name, ns in amounts_ns.items()}
        causes = {**causes, **shrunk_ns}
    why = "not explained" if expected_ns else "not told apart yet: fewer than 64 steps had run"
    parts = [
        (causes["own_ns"], "its own work"),
        (causes["padding_ns"] + causes["overhead_ns"], "the engine's (padding, overhead)"),
        (max(residual_ns, 0), why),
        (gap_ns, "the device waiting before it"),
    ]
    if "others_ns" in causes:
        return [*parts, (causes["others_ns"], "other requests' work")]
    rows, tokens = causes["others_prefill_rows"], causes["others_prefill_tokens"]
    whose = f"another request's prefill chunk of {tokens:,} tokens"
    if rows > 1:
        whose = f"prefill chunks of {rows} other requests ({tokens:,} tokens)"
    rows = causes["others_decode_rows"]
    decodes = f"the decode{'s' if rows != 1 else ''} of {rows} other request{'s' if rows != 1 else ''}"
    return [*parts, (causes["others_prefill_ns"], whose), (causes["others_decode_ns"], decodes)]


class _Server:
    """GET as JSON. Raises NotFound and StartError with what the server said."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __call__(self, path: str) -> Any:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            message = _message(error)
            raise (NotFound(message) if error.code == 404 else StartError(message)) from None
        except (OSError, ValueError) as error:
            raise StartError(f"{self._url} does not answer ({error}); name the server with --url") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code}"
