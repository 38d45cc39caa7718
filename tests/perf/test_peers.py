"""Claims are judged by what the rows say, each on its own case, and the table shows what was judged."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.perf.padded_batch import KvHeld
from steelyard.perf.peers import BATCH, SINGLE, WHOLE, judged, kv_fields, table


def row(engine: str, case: str, rate: float, **more: Any) -> dict[str, Any]:
    return {"engine": engine, "case": case, "seconds": 2.0, "out_tok_s": rate, **more}


ROWS = [
    row("steelyard", SINGLE, 100.0, ttft_ms=5.0, tpot_ms=1.0),
    row("steelyard", BATCH, 900.0, mean_answer_s=1.0, **kv_fields(KvHeld(4e6, 3.9e6, 3.9e6, 0.98))),
    row("steelyard", WHOLE, 4000.0, mean_answer_s=3.0, **kv_fields(KvHeld(30e6, 29e6, 29e6, 0.98))),
    row("transformers", SINGLE, 25.0, ttft_ms=10.0, tpot_ms=10.0),
    row("transformers", BATCH, 100.0, mean_answer_s=10.0, **kv_fields(KvHeld(10e6, 1e6, 4e6, 0.4))),
]


def test_each_claim_is_held_to_the_rows_of_its_case() -> None:
    found = {c["claim"].partition(" (")[0]: c for c in judged(ROWS) if "tokens/s" not in c["claim"]}
    cuts = {name: pytest.approx(c["found"]) for name, c in found.items()}
    assert cuts == {
        "TTFT lower, %": 50.0,
        "TPOT lower, %": 90.0,
        "time until a request is answered lower, %": 90.0,
        "peak KV lower, %": 60.0,
        "KV held without need lower, mean over the run, %": 100 * (1 - 0.02 / 0.6),
    }
    assert [c["shown"] for c in found.values()] == [False, True, True, False, True]


def test_the_whole_workload_is_held_to_the_static_batch() -> None:
    times = [(c["found"], c["shown"]) for c in judged(ROWS) if "tokens/s" in c["claim"]]
    assert times == [(4.0, False), (9.0, True), (40.0, True)]


def test_the_table_has_every_row_and_every_verdict() -> None:
    text = table(ROWS, judged(ROWS))
    assert text.count("| steelyard |") == 3 and text.count("| transformers |") == 2
    assert text.count("| shown |") == 5 and text.count("| refuted |") == 3
    assert "| transformers | 32 of mixed |  |  | 2.00 | 100 | 10.0 | 1.0 | 40.0% |" in text
