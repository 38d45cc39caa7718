"""Ablations as Markdown and as JSON: a table a change, a table a set of arms. Shows; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from steelyard.bench.ablate import Comparison, at_path, spent
from steelyard.bench.arms import ArmSet
from steelyard.bench.repeats import LEAST_PAIRS, Paired
from steelyard.core.digits import in_digits
from steelyard.core.verdict import HEADER, Verdict

Json = dict[str, Any]
SPEED_ONLY = Verdict("speed only")
MEANT = (
    "A and B are means over the runs of each; the difference is the geometric mean over pairs of B over A, less 1, and "
    "so not quite B over A of the row."
)
COLUMNS = {
    "output tok/s": ("output_tokens_per_s",),
    "prefill: TTFT p50, ms": ("latency_ms", "service", "ttft", "p50"),
    "decode: TPOT p50, ms": ("tpot_ms", "p50"),
    "ICL p99, ms": ("icl_ms", "p99"),
    "E2E mean, ms": ("latency_ms", "service", "e2e", "mean"),
}


@dataclass(frozen=True, slots=True)
class SetResult:
    """All arms of a set: reports by arm in its order, each step of the way compared, and the quality of each arm."""

    arms: ArmSet
    reports: Sequence[Sequence[Json]]
    steps: Sequence[Comparison]
    quality: Sequence[Verdict]

    def as_json(self) -> Json:
        """Plain values; every run's figures."""
        names = [name for name, _ in self.arms.arms]
        rows = []
        for name, reports, said in zip(names, self.reports, self.quality):
            figures = {title: [at_path(r, path) for r in reports] for title, path in COLUMNS.items()}
            row = {"arm": name, "figures": figures, "spent": [spent(r) for r in reports]}
            rows.append(row | {"quality": asdict(said)})
        return {"set": self.arms.name, "arms": rows, "groups": self.groups()}

    def groups(self) -> Json:
        """Prefill and decode of each group of lengths, by arm, means over runs; empty where there was one group."""
        found: Json = {}
        for (name, _), reports in zip(self.arms.arms, self.reports):
            for report in reports:
                for group, window in report["summary"].get("groups", {}).items():
                    into = found.setdefault(group, {}).setdefault(name, {"ttft_ms": [], "tpot_ms": []})
                    ttft, tpot = window["latency_ms"]["service"]["ttft"], window["tpot_ms"]
                    into["ttft_ms"] += [ttft["p50"]] if ttft else []
                    into["tpot_ms"] += [tpot["p50"]] if tpot else []
        return found


def knobs_markdown(found: Sequence[Comparison], quality: bool = True) -> str:
    """A table a knob; the quality of the answers beside the speed, or that it was not measured, unless left out."""
    lines = [f"B against A, pairs of runs with the same seed; intervals of 95 %, of {LEAST_PAIRS} pairs or more.", ""]
    for c in found:
        lines += [f"## {c.title}", "", f"Expected to move: {c.moves}.", *_comparison(c)]
        lines += ["", *(quality_lines(c) if quality else ()), ""]
    return "\n".join(lines) + "\n"


def _comparison(c: Comparison) -> list[str]:
    lines = ["", "| metric | A | B | difference | decided |", "| --- | --- | --- | --- | --- |"]
    for title, p in c.metrics.items():
        a, b = (fmean(v) for v in c.values[title])
        shown = relative(p)
        lines.append(f"| {title} | {in_digits(a)} | {in_digits(b)} | {shown} | {'yes' if p.decided else 'no'} |")
    lines += ["", MEANT, "", _prediction(c)]
    if c.attribution:
        lines += ["", "| account, ms a request | difference |", "| --- | --- |"]
        lines += [f"| {name} | {value:+.3f} |" for name, value in c.attribution.items()]
        lines.append(f"| residual, in no account | {c.residual_ms:+.3f} |")
    if c.spent:
        lines += ["", "| what was spent | A | B |", "| --- | --- | --- |"]
        lines += [f"| {title} | {in_digits(a)} | {in_digits(b)} |" for title, (a, b) in c.spent.items()]
    return lines + ["", *(f"* Not to be quoted as it is: {why}." for why in c.void)]


def quality_lines(of: Comparison | SetResult) -> list[str]:
    """A line a verdict, one for all that are alike, then every figure of them in one table, beside its limit."""
    found = of.quality if isinstance(of, SetResult) else [of.quality or SPEED_ONLY]
    said = [f"* Quality, {v.judged}: {v.summary}" if v.judged else f"Quality: {v.summary}" for v in found]
    lines = list(dict.fromkeys(said))
    if not any(v.figures for v in found):
        return lines
    lines += ["", f"| judged | {' | '.join(HEADER)} |", "|" + " --- |" * (len(HEADER) + 1)]
    return lines + [f"| {v.judged} | {' | '.join(f.cells)} |" for v in found for f in v.figures]


def relative(found: Paired) -> str:
    """The change from A to B with its interval, none of them below -100 %; `-` where there is none."""
    change = found.relative
    if change.low is None or change.high is None:
        return f"{change.mean:+.1%} (-)"
    return f"{change.mean:+.1%} ({change.low:+.1%} to {change.high:+.1%})"


def _prediction(c: Comparison) -> str:
    e = c.expected
    if e is None:
        return "Predicted: nothing; plan has no term for this, or no model and device were named."
    seen = c.metrics.get(e.of)
    observed = "not measured" if seen is None else f"{in_digits(1.0 + seen.relative.mean)}"
    return f"Predicted: {e.of}, B over A, {in_digits(e.ratio)} ({e.formula}); observed {observed}."


def set_markdown(result: SetResult, quality: bool = True) -> str:
    """One table: an arm a row, prefill and decode apart; by group; quality, unless left out; each step attributed."""
    heads = list(COLUMNS)
    lines = [f"## {result.arms.name}", "", f"Flags of all arms: {' '.join(result.arms.both)}", ""]
    lines += [f"| arm | {' | '.join(heads)} | quality |", "|" + " --- |" * (len(heads) + 2)]
    for (name, _), reports, said in zip(result.arms.arms, result.reports, result.quality):
        cells = [_mean([at_path(r, path) for r in reports]) for path in COLUMNS.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {said.outcome} |")
    groups = result.groups()
    if groups:
        names = [name for name, _ in result.arms.arms]
        lines += ["", f"| group, TTFT / TPOT p50 in ms | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
        for group, by_arm in groups.items():
            cells = [" / ".join(_mean(by_arm[n][k]) for k in ("ttft_ms", "tpot_ms")) for n in names if n in by_arm]
            lines.append(f"| {group} | {' | '.join(cells)} |")
    lines += ["", *(quality_lines(result) if quality else ())]
    for step in result.steps:
        lines += ["", f"### {step.knob}", *_comparison(step)]
    return "\n".join(lines) + "\n"


def _mean(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return in_digits(fmean(known)) if known else "-"
