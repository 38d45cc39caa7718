"""Writes the tables between marks in docs/gpu.md and docs/attention.md, and a picture, from kept results; no run.

python tools/gpu_page.py            write         python tools/gpu_page.py --check      1 where the page is not that
"""

from __future__ import annotations

import html
import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/gpu.md", ROOT / "docs/attention.md")
PICTURE = ROOT / "docs/pictures/h200-workloads.svg"
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)
MODELS = ("llama3-8b", "qwen3-0.6b")
DECODES = ((1, 1024), (1, 8192), (8, 4096), (32, 1024), (64, 1024), (64, 4096), (256, 1024), (256, 2048))
COLORS = {"arithmetic": "#bbb", "Steelyard": "#0a7", "vLLM": "#c60"}
WIDTH, LEFT, BAR, GAP = 760, 250, 14, 14


def kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" + " ---: |" * (len(heads) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def measured(model: str, case: str) -> dict[str, Any]:
    return next(r for r in kept("h200.json") if r.get("model") == model and r["case"] == case)


def offline() -> str:
    """Seconds of every workload beside vLLM's and arithmetic's, and the geometric mean of the ratios."""
    rows = []
    for model, cases in kept("h200-peers.json")["offline_seconds"].items():
        ratios = []
        for case, peer in cases.items():
            row = measured(model, case)
            ratios.append(row["seconds"] / peer["vllm"])
            runs = ", ".join(f"{s:.2f}" for s in row["all_seconds"])
            rows.append(
                (f"{model} {case}", f"{row['seconds']:.2f}", runs, f"{peer['vllm']:.2f}", f"{ratios[-1]:.2f}",
                 f"{peer['arithmetic']:.2f}", f"{row['out_tok_s']:,.0f}")
            )  # fmt: skip
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        rows.append((f"**{model}, geometric mean**", "", "", "", f"**{mean:.2f}**", "", ""))
    return table(("workload", "seconds", "each run", "vLLM", "of vLLM's time", "arithmetic", "output tok/s"), rows)


def single() -> str:
    rows = []
    for model, cases in kept("h200-peers.json")["single_tpot_ms"].items():
        for case, peer in cases.items():
            row = measured(model, case)
            tpot = row["tpot_ms"]
            rows.append(
                (f"{model} {case}", f"{row['ttft_ms']:.1f}", f"{tpot:.2f}", peer["vllm"], f"{tpot / peer['vllm']:.2f}",
                 peer["arithmetic"])
            )  # fmt: skip
    return table(("request", "TTFT, ms", "TPOT, ms", "vLLM's TPOT", "of vLLM's", "arithmetic"), rows)


def start() -> str:
    """Cold starts, and those that find kernels compiled ahead where they were measured."""
    rows = []
    for model in MODELS:
        row = measured(model, "single 128/257")
        peer = kept("h200-peers.json")["startup_s"][model]["vllm"]
        rows.append((model, f"{row['cold_start_s']:.1f}", _phases(row), peer))
        for ahead in (r for r in kept("h200.json") if r.get("model") == model and "ahead_start_s" in r):
            num_kernels, found = ahead["kernels_compiled"] + ahead["kernels_from_cache"], ahead["kernels_from_cache"]
            name = f"{model}, {found} of {num_kernels} kernels compiled ahead"
            rows.append((name, f"{ahead['ahead_start_s']:.1f}", _phases(ahead), peer))
    return table(("model", "process to first token, s", "of that, s", "vLLM, start to ready, s"), rows)


def _phases(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {seconds:.1f}" for name, seconds in row["phases"].items() if seconds >= 0.05)


def curve() -> str:
    heads = ("model", "rows at 1k", "step, ms", "tok/s", "of peak FLOPs", "of peak bandwidth", "launch")
    return table(heads, [_point(row) for row in kept("h200.json") if row["case"].startswith("batch")])


def _point(row: dict[str, Any]) -> tuple[object, ...]:
    shares = [f"{100 * row[name]:.{digits}f} %" for name, digits in (("mfu", 0), ("mbu", 0), ("launch_share", 1))]
    return (row["model"], row["batch"], f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", *shares)


def host() -> str:
    rows = []
    for row in kept("h200.json"):
        if "host_us" in row:
            us = row["host_us"]
            own = us["schedule"] + us["launch"] + us["commit"] + us["_messages"]
            parts = [f"{us[k] / 1e3:.2f}" for k in ("schedule", "launch", "commit", "_messages")]
            rows.append((row["model"], us["rows"], *parts, f"{own / 1e3:.2f}", f"{us['step'] / 1e3:.2f}"))
    heads = ("model", "rows", "schedule", "launch", "commit", "messages", "host in all", "step, ms")
    return table(heads, rows)


def served() -> str:
    rows = [
        (r["model"], r["fronts"], r["label"], f"{r['seconds']:.2f}", f"{r['out_tok_s']:,.0f}", f"{r['of_offline']:.2f}")
        for r in kept("h200-served.json")
    ]
    return table(("model", "front ends", "run", "seconds", "output tok/s", "of offline"), rows)


def kernels() -> str:
    """Attention of the shapes that were measured beside FlashInfer."""
    found = []
    for row in kept("kernels_h200.json")["rows"]:
        if row.get("form") == "shipped" and row["item"] == "decode" and row["pool"] == "b64":
            name = f"decode, {row['rows']} rows of {row['ctx']:,}"
            found.append((name, f"{row['us']:.1f}", f"{row['tb_s']:.2f} TB/s", f"{row['of_flashinfer']:.2f}"))
        if row.get("form") == "gluon" and row["case"] == "b64":
            name = f"prefill, {row['shape']}"
            found.append((name, f"{row['us']:.0f}", f"{row['tflops']:.0f} TFLOP/s", f"{row['of_flashinfer']:.2f}"))
    return table(("attention, heads 32 on 8, size 128", "us", "rate", "of FlashInfer's rate"), found)


def combinations() -> str:
    """Seconds of each group, then milliseconds of a middle decode step, one arm a column."""
    arms = kept("h200-ablation.json")["combinations"]["arms"]
    rows = [
        (first["case"], *(f"{r['seconds']:.2f}" for r in each), *(f"{r['decode_step_ms']:.2f}" for r in each))
        for each in zip(*arms.values(), strict=True)
        for first in each[:1]
    ]
    heads = [f"{what}: {name.replace('attention', 'attn.')}" for what in ("s", "decode ms") for name in arms]
    return table(("requests", *heads), rows)


def batching() -> str:
    rows = []
    for name, arm in kept("h200-ablation.json")["batching"]["arms"].items():
        if isinstance(arm, dict):
            rows.append((name, f"not measured: {arm['failed']}", "", "", "", ""))
            continue
        (r,) = arm
        predicted, steps = f"{r['predicted_s']:.2f}", f"{r['steps']:,}"
        rows.append((name, f"{r['seconds']:.2f}", predicted, f"{r['out_tok_s']:,.0f}", steps, f"{r['held_slots']:,}"))
    return table(("batching", "seconds", "predicted", "output tok/s", "steps", "slots held for nothing"), rows)


def fp8() -> str:
    """Decode attention over an fp8 pool, each shape against bfloat16 in the same run."""
    found = {(r["rows"], r["ctx"], r["form"]): r for r in kept("h200-fp8-kv.json")["rows"] if r["item"] == "decode"}
    rows = []
    for (num_rows, ctx, form), r in found.items():
        if form == "shipped":
            wide = found[num_rows, ctx, "bf16"]["us"]
            times = (f"{wide:.1f}", f"{r['us']:.1f}", f"{r['floor_us']:.1f}")
            rows.append((f"{num_rows} rows of {ctx:,}", *times, f"{r['of_bf16_rate']:.2f}"))
    return table(("decode attention", "bf16, us", "fp8, us", "least, us", "of bf16's rate"), rows)


def swap() -> str:
    r = kept("h200-swap.json")
    p = r["predicted"]
    both = r["swap_out_ms"] + r["swap_in_ms"]
    rows = [
        ("measured", f"{both:.1f}", f"{r['recompute_ms']:.1f}", f"{r['factor']:.2f}"),
        ("predicted", f"{2 * p['swap_one_way_ms']:.1f}", f"{p['recompute_ms']:.1f}", f"{p['factor']:.2f}"),
    ]
    return table((f"{r['model']}, {r['tokens']:,} tokens", "swap out and in, ms", "recompute, ms", "factor"), rows)


def ragged() -> str:
    """Decode attention of 32 heads, rows of each kind of lengths: parts of even rows, and finer ones."""
    rows = []
    for r in kept("h200-ragged.json")["rows"]:
        if r["heads"] == 32 and r["rows"] in (32, 64, 256):
            times = (f"{r[key]:.0f}" for key in ("floor_us", "as_even_us", "finer_us"))
            rows.append((f"{r['rows']} rows, {r['contexts']}", *times))
    return table(("decode attention, contexts", "least, us", "parts as of even rows, us", "finer parts, us"), rows)


def fair() -> str:
    """Two tenants under two orders, each run a line."""
    rows = []
    for r in kept("h200-fair.json")["runs"]:
        gaps = f"{r['largest_gap_ms'] / 1e3:.2f}", f"{r['bound_ms'] / 1e3:.1f}" if r["policy"] == "fair" else ""
        rows.append((f"`{r['policy']}`", *gaps, f"{r['ttft_of_first_shorts_s']:.2f}", f"{r['tokens_per_s']:,.0f}"))
    heads = ("order", "largest gap, s of device time", "bound, s", "TTFT of the first short ones, s", "tokens/s in all")
    return table(heads, rows)


def transformers() -> str:
    """Each claim of others with both figures of one run; a single request against the better of its two attentions."""
    results, rows = kept("h200-transformers.json"), []
    for model in MODELS:
        at = {(r["engine"], r["case"]): r for r in results["rows"] if r["model"] == model}
        ours = at["steelyard", "single 128/33"]
        peers = [r for (engine, case), r in at.items() if engine != "steelyard" and case == ours["case"]]
        for what, key in (("TTFT, ms", "ttft_ms"), ("TPOT, ms", "tpot_ms")):
            best = min(r[key] for r in peers)
            rows.append((model, what, f"{best:.1f}", f"{ours[key]:.2f}", f"-{100 * (1 - ours[key] / best):.0f} %"))
        own, batch = at["steelyard", "32 of mixed"], at["transformers", "32 of mixed"]
        whole = at["steelyard", "mixed, whole"]
        for name, r in (("32 of mixed, output tok/s", own), ("all of mixed at once, output tok/s", whole)):
            pair = (f"{batch['out_tok_s']:,.0f}", f"{r['out_tok_s']:,.0f}")
            rows.append((model, name, *pair, f"{r['out_tok_s'] / batch['out_tok_s']:.0f}x"))
        for name, key, scale, form in (
            ("32 of mixed, mean time to an answer, s", "mean_answer_s", 1.0, ".1f"),
            ("32 of mixed, KV at its peak, GB", "peak_kv_bytes", 1e9, ".2f"),
            ("32 of mixed, KV held and not needed, mean share", "mean_waste", 1.0, ".2f"),
        ):
            change = f"-{100 * (1 - own[key] / batch[key]):.0f} %"
            rows.append((model, name, format(batch[key] / scale, form), format(own[key] / scale, form), change))
    return table(("model", "what", "transformers", "Steelyard", "change"), rows)


def attention(direction: str) -> tuple[list[int], dict[tuple[str, int], dict[str, Any]]]:
    """(lengths, rows by backend and length) of the laboratory's causal prefill with heads of 128."""
    found = {
        (r["backend"], r["num_q"]): r
        for r in kept("h200-kernels.json")["kernels"]["rows"]
        if (r["kind"], r["causal"], r["head_dim"], r["direction"]) == ("prefill", True, 128, direction)
    }
    return sorted({length for _, length in found}), found


def forward() -> str:
    lengths, found = attention("forward")
    rows = []
    for n in lengths:
        rates = [f"{found[name, n]['tflops']:.0f}" for name in ("naive", "steelyard", "sdpa-flash", "sdpa-cudnn")]
        naive, own = found["naive", n], found["steelyard", n]
        extra = (f"{naive['extra_bytes'] / 2**30:.1f} GiB", f"{own['extra_bytes'] / 2**20:.0f} MiB")
        less = naive["extra_bytes"] / own["extra_bytes"]
        rows.append((f"{n:,}", *rates, f"{naive['ms'] / own['ms']:.1f}x", *extra, f"{less:.0f}x"))
    heads = ("length", "naive", "Steelyard", "torch flash", "cuDNN", "faster than naive", "naive's extra", "ours")
    return table((*heads, "less memory"), rows)


def gradient() -> str:
    lengths, found = attention("backward")
    rows = []
    for n in lengths:
        names = ("naive", "steelyard-train", "sdpa-flash", "sdpa-cudnn")
        rates = [f"{found[name, n]['tflops']:.0f}" if "tflops" in found[name, n] else "-" for name in names]
        own = found["steelyard-train", n]["ms"]
        times = (f"{found['naive', n]['ms'] / own:.1f}x", f"{found['sdpa-cudnn', n]['ms'] / own:.2f}")
        rows.append((f"{n:,}", *rates, *times))
    heads = ("length", "naive gradient", "Steelyard", "torch flash", "cuDNN", "faster than naive", "of cuDNN")
    return table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        offline, single, start, curve, host, served, kernels, combinations, batching, fp8, swap, fair, ragged,
        transformers, forward, gradient,
    )
}  # fmt: skip


def page(path: Path) -> str:
    """A page with every table between marks as the results have it."""
    return MARK.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], path.read_text())


def picture() -> str:
    """A group of bars a workload: arithmetic, Steelyard, vLLM, as shares of vLLM's time."""
    marks, y = [], 46
    for model, cases in kept("h200-peers.json")["offline_seconds"].items():
        for case, peer in cases.items():
            seconds = {
                "arithmetic": peer["arithmetic"],
                "Steelyard": measured(model, case)["seconds"],
                "vLLM": peer["vllm"],
            }
            marks.append(_text(LEFT - 8, y + 1.5 * BAR + 4, f"{model} {case}", "end"))
            for name, value in seconds.items():
                width = (WIDTH - LEFT - 60) * value / peer["vllm"]
                marks.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{COLORS[name]}"/>')
                marks.append(_text(LEFT + width + 5, y + BAR - 4, f"{value:.2f} s", "start", 10))
                y += BAR
            y += GAP
    for at, (name, color) in enumerate(COLORS.items()):
        marks.append(f'<rect x="{LEFT + 110 * at}" y="8" width="10" height="10" fill="{color}"/>')
        marks.append(_text(LEFT + 110 * at + 14, 17, name, "start"))
    marks.append(_text(LEFT, 35, "Each workload has its own scale: vLLM's time is the whole width.", "start"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" role="img">'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}{ground}{''.join(marks)}</svg>\n"


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    style = f'font-family="system-ui,sans-serif" font-size="{size}" fill="#222"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {style}>{html.escape(text)}</text>'


def main() -> int:
    wanted = {path: page(path) for path in PAGES} | {PICTURE: picture()}
    if "--check" in sys.argv:
        return int(any(not path.exists() or path.read_text() != text for path, text in wanted.items()))
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
