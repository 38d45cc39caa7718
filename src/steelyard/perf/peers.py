"""This engine's rows beside a plain one's: which claims of others they show or refute, and the table. Runs nothing.

A row is plain values: `engine`, `case`, `seconds`, `out_tok_s`, and of its case `ttft_ms`, `tpot_ms`, `mean_answer_s`
or those of `kv_fields`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from steelyard.perf.padded_batch import KvHeld

Json = dict[str, Any]
ENGINES = ("steelyard", "transformers")
SINGLE, BATCH, WHOLE = "single 128/33", "32 of mixed", "mixed, whole"
CLAIMS = (
    ("TTFT lower, %", SINGLE, "ttft_ms", 60.0),
    ("TPOT lower, %", SINGLE, "tpot_ms", 60.0),
    ("time until a request is answered lower, %", BATCH, "mean_answer_s", 60.0),
    ("peak KV lower, %", BATCH, "peak_kv_bytes", 90.0),
    ("KV held without need lower, mean over the run, %", BATCH, "mean_waste", 90.0),
)
"""What is lower, where, and the least cut that is claimed: 60 to 90 % of latency, 90 % and more of KV."""
LEAST_SPEEDUP = 5.0
"""Of 5 to 100 times the throughput."""


def kv_fields(held: KvHeld) -> Json:
    """The columns on KV: bytes, and shares of what is held."""
    return {
        "peak_kv_bytes": held.peak,
        "needed_kv_bytes": held.peak_needed,
        "most_needed_kv_bytes": held.most_needed,
        "mean_share_needed": held.mean_share,
        "mean_waste": 1.0 - held.mean_share,
    }


def judged(rows: Sequence[Json]) -> list[Json]:
    """Each claim with what was found. The whole workload, which a static batch cannot take, is held to the batch."""
    at = {(row["engine"], row["case"]): row for row in rows}
    found = list[Json]()
    for claim, case, key, least in CLAIMS:
        ours, theirs = (at[engine, case][key] for engine in ENGINES)
        cut = 100.0 * (1.0 - ours / theirs)
        row = {"claim": f"{claim} ({case})", "ours": ours, "theirs": theirs, "found": cut}
        found.append(row | {"claimed": f"{least:.0f} or more", "shown": cut >= least})
    for case in (SINGLE, BATCH, WHOLE):
        ours = at[ENGINES[0], case]["out_tok_s"]
        theirs = at[ENGINES[1], BATCH if case == WHOLE else case]["out_tok_s"]
        row = {"claim": f"output tokens/s, times ({case})", "ours": ours, "theirs": theirs, "found": ours / theirs}
        found.append(row | {"claimed": "5 to 100", "shown": ours / theirs >= LEAST_SPEEDUP})
    return found


def table(rows: Sequence[Json], claims: Sequence[Json]) -> str:
    """Both tables as Markdown; a figure that a case has not is left empty."""
    lines = ["| engine | case | TTFT, ms | TPOT, ms | s | out tok/s | peak KV, MB | needed then | needed, mean |"]
    lines.append("|" + " --- |" * 9)
    for r in rows:
        cells = [f"{r[k]:.2f}" if k in r else "" for k in ("ttft_ms", "tpot_ms")]
        cells += [f"{r['seconds']:.2f}", f"{r['out_tok_s']:,.0f}"]
        cells += [f"{r[k] / 1e6:,.1f}" if k in r else "" for k in ("peak_kv_bytes", "needed_kv_bytes")]
        cells.append(f"{r['mean_share_needed']:.1%}" if "mean_share_needed" in r else "")
        lines.append(f"| {r['engine']} | {r['case']} | {' | '.join(cells)} |")
    lines += ["", "| claim | claimed | found | |", "| --- | --- | --- | --- |"]
    for c in claims:
        verdict = "shown" if c["shown"] else "refuted"
        lines.append(f"| {c['claim']} | {c['claimed']} | {c['found']:.1f} | {verdict} |")
    return "\n".join(lines)
