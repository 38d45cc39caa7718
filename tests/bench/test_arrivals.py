"""Schedules: the same for a seed, the same total load whatever the burstiness."""

from __future__ import annotations

import pytest

from steelyard.bench.arrivals import Arrivals, make_schedule, replay
from steelyard.errors import InvalidRequest


def test_a_seed_gives_one_schedule() -> None:
    arrivals = Arrivals("poisson", rate=10.0)
    first, again, other = (make_schedule(arrivals, 100, seed) for seed in (1, 1, 2))
    assert first == again and first.digest != other.digest


@pytest.mark.parametrize(("process", "burstiness", "cv"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0)])
def test_gaps_have_the_asked_burstiness_and_rate(process: str, burstiness: float, cv: float) -> None:
    schedule = make_schedule(Arrivals(process, rate=20.0, burstiness=burstiness), 4000, 0)  # type: ignore[arg-type]
    assert schedule.rate == pytest.approx(20.0)
    assert schedule.cv == pytest.approx(cv, rel=0.1)


def test_burstiness_alone_changes_no_total() -> None:
    ends = [make_schedule(Arrivals("gamma", rate=5.0, burstiness=k), 50, 3).at_s[-1] for k in (0.2, 1.0, 9.0)]
    assert ends == pytest.approx([10.0] * 3)


def test_constant_gaps_do_not_drift() -> None:
    schedule = make_schedule(Arrivals("constant", rate=7.0), 700, 0)
    assert schedule.at_s[-1] == pytest.approx(100.0) and schedule.cv == pytest.approx(0.0, abs=1e-9)


def test_a_trace_keeps_its_times() -> None:
    assert replay([5.0, 7.0, 6.0], time_scale=2.0).at_s == (0.0, 2.0, 4.0)


@pytest.mark.parametrize(
    "bad",
    [{"process": "poisson"}, {"process": "closed"}, {"process": "gamma", "rate": 1.0, "burstiness": 0.0}]
    + [{"process": "poisson", "rate": float("inf")}, {"process": "closed", "concurrency": 0}],
)
def test_impossible_arrivals_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        Arrivals(**bad)  # type: ignore[arg-type]
