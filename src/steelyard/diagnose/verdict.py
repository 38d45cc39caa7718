"""Which resource binds: all rules weighed against one another, with margin, runner-up, and what was not read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from steelyard.diagnose.observation import Observation
from steelyard.diagnose.rules import DEVICE_BUSY, RULES, Finding

Gain = Callable[[str, Observation], str | None]
"""What plan predicts of turning a flag (one of plan.gain.KNOBS), in words; None where it cannot say."""


NOTHING_RAN = "nothing: no request ran in the time that was looked at; send load, and look again"


@dataclass(frozen=True, slots=True)
class Stage:
    """Which half of a request is bad, by targets: the first question of every diagnosis."""

    name: str
    advice: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`also` holds besides the verdict; `margin` is its score over the next one's; `doubts`: numbers that cannot be.

    invalid  of a run that failed its gates: which, and why; empty for any other
    """

    verdict: str
    finding: Finding | None
    runner_up: Finding | None
    margin: float | None
    also: tuple[Finding, ...]
    stage: Stage | None
    unread: tuple[str, ...]
    doubts: tuple[str, ...]
    predicted: str | None
    invalid: str = ""

    def text(self) -> str:
        """The diagnosis for a person, numbers first."""
        lines = [f"NOT VALID, and what follows is of a run not to be believed: {self.invalid}"] if self.invalid else []
        lines.append(f"Binding: {self.verdict}")
        if self.finding is not None:
            lines += [f"  {line}" for line in self.finding.evidence]
            lines.append(f"  try one thing: {self.finding.knob}")
        if self.predicted is not None:
            lines.append(f"  predicted: {self.predicted}")
        if self.runner_up is not None and self.runner_up not in self.also:
            clear = f", {self.margin:.3g} times less clear" if self.margin is not None and self.margin >= 1.0 else ""
            lines.append(f"Next: {self.runner_up.name}{clear}")
            lines += [f"  {line}" for line in (*self.runner_up.evidence, *self.runner_up.against)]
        for finding in self.also:
            lines.append(f"Also: {finding.name}")
            lines += [f"  {line}" for line in (*finding.evidence, *finding.against)]
        if self.stage is not None:
            lines.append(f"Stage: {self.stage.name}: {self.stage.advice}")
        lines += [f"Cannot be: {doubt}" for doubt in self.doubts]
        lines += [f"Not read: {what}" for what in self.unread]
        return "\n".join(lines) + "\n"


def diagnose(o: Observation, gain: Gain = lambda flag, o: None, slo_ms: tuple[float, float] | None = None) -> Diagnosis:
    """Weigh every rule. `slo_ms`: targets of TTFT and TPOT, for the stage rules."""
    if _nothing_ran(o):
        return Diagnosis(NOTHING_RAN, None, None, None, (), None, (), (), None, o.invalid)
    findings = [f for rule in RULES if (f := rule(o)) is not None]
    holding = sorted((f for f in findings if f.holds), key=_strength, reverse=True)
    others = sorted((f for f in findings if not f.holds), key=lambda f: f.score, reverse=True)
    if holding:
        first = holding[0]
        next_best = holding[1] if len(holding) > 1 else others[0] if others else None
        verdict = first.name + (f" ({o.max_num_seqs})" if first.name == "sequence cap" else "")
        margin = first.score / next_best.score if next_best is not None and next_best.score else None
    else:
        first, margin = None, None
        next_best = others[0] if others else None
        verdict = "nothing: not saturated" if _idle(o) else "not decided: no rule has its evidence"
    stage = stage_of(o, slo_ms) if slo_ms is not None else None
    capped = [f for f in others if f.name == "client" and f.score >= 1.0]
    return Diagnosis(
        verdict=verdict,
        finding=first,
        runner_up=next_best,
        margin=margin,
        also=(*holding[1:], *capped),
        stage=stage,
        unread=o.unread if stage is not None or slo_ms is None else (*o.unread, _no_stage(o)),
        doubts=doubts(o),
        predicted=gain(first.flag, o) if first is not None and first.flag else None,
        invalid=o.invalid,
    )


def _strength(finding: Finding) -> tuple[bool, bool, float]:
    """Interference and prefill explain latency; a cap or a full pool explains why more cannot run, and goes first.

    That the device is busy says least, and goes last.
    """
    structural = finding.name in ("client", "sequence cap", "KV capacity", "fragmentation")
    return structural, finding.name != "device", finding.score


def _nothing_ran(o: Observation) -> bool:
    """Shown to have had no work at all: then no rule has anything to weigh, and none comes next."""
    worked = (o.running, o.waiting, o.output_tokens_per_s, o.input_tokens_per_s, o.achieved_rate, o.busy)
    return o.running is not None and o.output_tokens_per_s is not None and not any(worked)


def _idle(o: Observation) -> bool:
    """Shown to be idle: a queue that was not read is no empty queue."""
    below_cap = o.client_cap is None or (o.little_in_flight or 0.0) < 0.95 * o.client_cap
    if o.busy is not None and o.busy >= DEVICE_BUSY:
        return False
    return o.queued is not None and o.queued < 1.0 and below_cap and (o.attainment is None or o.attainment >= 0.99)


def doubts(o: Observation) -> tuple[str, ...]:
    """Numbers of the observation that no machine can produce together."""
    found = []
    if o.floor_step_s is not None and o.tpot_s is not None and o.tpot_s < o.floor_step_s:
        found.append(
            f"{o.tpot_s * 1e3:.3g} ms a token is under the physical floor of {o.floor_step_s * 1e3:.3g} ms; "
            "look for chunks counted as tokens"
        )
    if o.kv_usage == 0.0 and (o.decoding or 0.0) >= 1.0:
        found.append("KV in use is 0 while sequences run: the metric was renamed or is absent, and read as zero")
    return tuple(found)


def _no_stage(o: Observation) -> str:
    """Why there is no stage although targets were given."""
    missing = [name for name, value in (("TTFT", o.ttft_s), ("TPOT", o.tpot_s)) if value is None]
    return f"{' and '.join(missing)}, so no stage: no request told in the time looked at, or the source does not"


def stage_of(o: Observation, slo_ms: tuple[float, float]) -> Stage | None:
    """TTFT bad and TPOT fine, the other way round, both, or neither."""
    if o.ttft_s is None or o.tpot_s is None:
        return None
    slow_first, slow_rest = o.ttft_s * 1e3 > slo_ms[0], o.tpot_s * 1e3 > slo_ms[1]
    if slow_first and slow_rest:
        return Stage("both are slow", "the server is over capacity: less load or more replicas before any tuning")
    if slow_first:
        return Stage("TTFT is slow, TPOT is fine", "queueing or prefill: admit more at once, reuse prefixes")
    if slow_rest:
        return Stage("TTFT is fine, TPOT is slow", "steps are long: fewer sequences a step, smaller prompt chunks")
    return Stage("both are within their targets", "nothing to mend")
