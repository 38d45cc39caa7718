"""Measured steps as kept in JSON Lines: what each did and how long the device took. Reading only, no fitting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import StartError, reason
from steelyard.plan.costs import Chunk


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One measured step. `chunks` says what it did; `workload` names the run it came from."""

    chunks: tuple[Chunk, ...]
    device_s: float
    workload: str = ""

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> StepRecord:
        """Read a kept record.

        `device_ns`, and either `chunks` [[num_new, context_len, count, num_sampled], ...] (the last two optional) or
        sums: `prefill_tokens`, `prefill_rows`, `prefill_context_sum`, `prefill_sampled`, `decode_rows`, `context_sum`
        (of decode rows, the new token included). From sums, rows are taken to be alike. Raises StartError naming the
        field.
        """
        device_ns = _count(row, "device_ns", low=1)
        if "chunks" in row:
            chunks = tuple(_chunk(c) for c in row["chunks"])
        else:
            chunks = _alike(row)
        if not chunks:
            raise StartError(f"a step record without work: {json.dumps(row)[:200]}", param="decode_rows")
        return cls(chunks, device_ns / 1e9, str(row.get("workload", "")))


def read_records(path: Path, flag: str = "records") -> list[StepRecord]:
    """Every step of a JSON Lines file. Raises StartError naming file and line, and the flag it was given with."""
    records = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--{flag} {path}: cannot be read ({reason(error)})", param=flag) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise StartError("is no JSON object", param=flag)
            records.append(StepRecord.from_json(row))
        except ValueError as error:
            raise StartError(f"--{flag} {path}: line {number} is no JSON ({error})", param=flag) from error
        except StartError as error:
            raise StartError(f"--{flag} {path}: line {number}: {error.message}", param=error.param) from error
    if not records:
        raise StartError(f"--{flag} {path}: has no step records", param=flag)
    return records


def _chunk(value: Any) -> Chunk:
    ok = isinstance(value, list) and 2 <= len(value) <= 4 and all(type(v) is int for v in value)
    if not ok or not 1 <= value[0] <= value[1] or (len(value) > 2 and value[2] < 1):
        raise StartError(f"chunks must be [num_new, context_len, count, num_sampled], got {value!r}", param="chunks")
    return Chunk(*value)


def _alike(row: dict[str, Any]) -> tuple[Chunk, ...]:
    """Chunks with the given sums. Contexts of decode rows keep their sum exactly: two groups one token apart."""
    chunks = []
    rows = _count(row, "decode_rows", default=0)
    if rows:
        low, extra = divmod(_count(row, "context_sum", low=rows), rows)
        if extra:
            chunks.append(Chunk(1, low + 1, extra))
        chunks.append(Chunk(1, low, rows - extra))
    tokens = _count(row, "prefill_tokens", default=0)
    if tokens:
        rows = min(_count(row, "prefill_rows", default=1, low=1), tokens)
        context = _count(row, "prefill_context_sum", default=tokens, low=tokens)
        low, extra = divmod(tokens, rows)
        each = max(context // rows, low + 1)
        sampled = min(_count(row, "prefill_sampled", default=rows), rows)
        for new, count in ((low + 1, extra), (low, rows - extra)):
            ends = min(sampled, count)
            sampled -= ends
            chunks += [Chunk(new, each, k, s) for k, s in ((ends, 1), (count - ends, 0)) if k]
    return tuple(chunks)


def _count(row: dict[str, Any], name: str, *, default: int | None = None, low: int = 0) -> int:
    value = row.get(name, default)
    if type(value) is not int or value < low:
        raise StartError(f"{name} must be an integer of at least {low}, got {value!r}", param=name)
    return value
