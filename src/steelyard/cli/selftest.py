"""`steelyard selftest`: does a request's answer depend on its company? See perf/selftest.py for the situations."""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from steelyard.cli.options import add_engine_arguments, engine_config
from steelyard.cli.values import real, whole

if TYPE_CHECKING:
    from steelyard.config import EngineConfig
    from steelyard.perf.selftest import Outcome

NEAR_TIE_NATS = 0.25
MARKS = f"""each row is one of
  ok    the same tokens as the request alone
  near  differs, within rounding: the first other token of a greedy answer is within --near-tie ({NEAR_TIE_NATS} nats)
        of the one taken, by the request alone; or a draw moved, as any rounding lets some do
  FAIL  differs by more (with --deterministic: at all, also in a bit of a log-probability), or did not come about
1 is returned where a row says FAIL"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-len", type=whole(16), default=96, metavar="TOKENS", help="of the request (default: 96)"
    )
    parser.add_argument(
        "--max-tokens", type=whole(16), default=48, metavar="TOKENS", help="of its answer (default: 48)"
    )
    parser.add_argument(
        "--near-tie",
        type=real(0),
        default=NEAR_TIE_NATS,
        metavar="NATS",
        help=f"two tokens this near may change places (default: {NEAR_TIE_NATS}); with --deterministic nothing may",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    add_engine_arguments(parser)
    parser.epilog = MARKS


def run(args: argparse.Namespace) -> int:
    """Print every situation; 1 if one differs by more than it may, or did not come about. Raises StartError."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    config = engine_config(args)
    limit = 0.0 if config.deterministic else args.near_tie
    ours = logging.getLogger("steelyard")
    level = ours.level
    try:
        return _run(args, config, limit, ours)
    finally:
        ours.setLevel(level)


def _run(args: argparse.Namespace, config: EngineConfig, limit: float, log: logging.Logger) -> int:
    """After the first engine `log` tells errors only: the others are small on purpose, and would warn of that."""
    from steelyard.llm import LLM
    from steelyard.perf.selftest import Load, run_selftest, seconds_alone

    def make(**changes: Any) -> LLM:
        llm = LLM.from_config(replace(config, **changes))
        log.setLevel(logging.ERROR)
        return llm

    load = Load(args.prompt_len, args.max_tokens, config.seed)
    outcomes = []
    for outcome in run_selftest(make, load):
        outcomes.append(outcome)
        if not args.json:
            print(_line(outcome, limit), flush=True)
    failed = [o for o in outcomes if not _passes(o, limit)]
    cost = None
    if config.deterministic:
        cost = seconds_alone(make(), load) / seconds_alone(make(deterministic=False), load)
    if args.json:
        print(json.dumps({"outcomes": [asdict(o) for o in outcomes], "passed": not failed, "cost": cost}))
        return 1 if failed else 0
    if cost is not None:
        print(f"--deterministic takes {cost:.2f} times as long for this request alone, in this run")
    print(_verdict(outcomes, failed))
    return 1 if failed else 0


def _passes(outcome: Outcome, limit: float) -> bool:
    if not outcome.happened:
        return False
    if limit == 0.0:
        return outcome.is_identical
    if outcome.sampled:
        return True  # a draw lies between two cumulated sums: any rounding moves some draws to a neighbour in id order
    return outcome.first_difference is None or (outcome.gap is not None and outcome.gap <= limit)


def _line(outcome: Outcome, limit: float) -> str:
    """A row, its mark of MARKS first."""
    at = outcome.first_difference
    if not outcome.happened:
        said = "did not come about: nothing was tested"
    elif outcome.is_identical:
        said = "the same tokens, the same bits"
    elif at is None:
        said = f"the same tokens, log-probabilities within {outcome.largest:.1g}"
    else:
        gap = "not among its best few" if outcome.gap is None else f"{outcome.gap:.2g} nats from it"
        before = f"; before it log-probabilities within {outcome.largest:.1g}" if outcome.largest else ""
        said = f"token {at} is another ({'a draw moved' if outcome.sampled else gap}){before}"
    mark = "FAIL"
    if _passes(outcome, limit):
        mark = "ok  " if at is None else "near"
        said = said if at is None else f"differs, within rounding: {said}"
    kind = "sampled" if outcome.sampled else "greedy"
    return f"{mark} {outcome.situation:<10} {kind:<8} {outcome.evidence:<14} {said}"


def _verdict(outcomes: list[Outcome], failed: list[Outcome]) -> str:
    if failed:
        return f"{len(failed)} of {len(outcomes)} situations failed"
    if all(o.is_identical for o in outcomes):
        return "the answer does not depend on the request's company, to the last bit"
    differ = sum(o.first_difference is not None for o in outcomes)
    said = f"{differ} of {len(outcomes)} answers differ, within rounding"
    return f"{said}: what decides is the request's company; --deterministic removes that, at a price"
