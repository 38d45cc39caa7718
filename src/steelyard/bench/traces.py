"""Traces as work: Azure's and BurstGPT's CSV, Mooncake's JSON Lines. Rows in, requests with times out."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from steelyard.bench.workload import PlannedRequest, PromptMaker
from steelyard.errors import InvalidRequest, reason

FORMATS = (
    "Azure's CSV (TIMESTAMP, ContextTokens, ...), BurstGPT's (Timestamp, Request tokens, ...) or Mooncake's JSON Lines"
)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """Seconds, tokens in and out, and block hashes where the trace has them."""

    at_s: float
    input_len: int
    output_len: int
    hashes: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Rows in order of time, rows without tokens left out. Raises InvalidRequest naming file and line.

    Azure      TIMESTAMP, ContextTokens, GeneratedTokens                        dates
    BurstGPT   Timestamp, Request tokens, Response tokens, ...                  seconds; failed rows have 0 tokens out
    Mooncake   {"timestamp": ms, "input_length", "output_length", "hash_ids"}
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--trace {path}: cannot be read ({reason(error)})", param="trace") from error
    lines = text.splitlines()
    rows: Iterable[tuple[int, Any]]
    if text.lstrip().startswith("{"):
        rows = ((n, line) for n, line in enumerate(lines, 1) if line.strip())
    else:
        rows = enumerate(csv.DictReader(lines), 2)
    found = []
    for number, row in rows:
        try:
            found.append(_row(json.loads(row) if isinstance(row, str) else row))
        except (KeyError, TypeError, ValueError):
            raise InvalidRequest(f"--trace {path}: line {number} is no request of {FORMATS}", param="trace") from None
    kept = sorted((r for r in found if r.input_len > 0 and r.output_len > 0), key=lambda r: r.at_s)
    if not kept:
        raise InvalidRequest(f"--trace {path}: has no requests with tokens", param="trace")
    return kept[:limit]


def _row(row: dict[str, Any]) -> TraceRow:
    if "input_length" in row:
        hashes = tuple(int(h) for h in row.get("hash_ids", ()))
        return TraceRow(float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"]), hashes)
    if "ContextTokens" in row:
        at_s = datetime.fromisoformat(str(row["TIMESTAMP"])[:26]).timestamp()
        return TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    return TraceRow(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def requests_of(rows: Iterable[TraceRow], maker: PromptMaker) -> list[PlannedRequest]:
    """A request a row, in order; equal block hashes become equal token ids."""
    return [maker.blocks(i, row.hashes, row.input_len, row.output_len) for i, row in enumerate(rows)]
