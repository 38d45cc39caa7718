"""`steelyard diagnose URL`: what a server that does not answer as hoped is said to have done."""

from __future__ import annotations

import argparse

import pytest

from steelyard.bench.scrape import Page, ServerSide, parse
from steelyard.cli.diagnose import _check_device, _why_no_page, observed
from steelyard.diagnose.verdict import diagnose
from steelyard.errors import InvalidRequest


def test_why_a_page_was_not_read_is_told_apart() -> None:
    assert "needs an operator's key: give it with --api-key" in _why_no_page(401, "")
    assert "does not answer (refused)" in _why_no_page(None, "refused")
    assert "has no /metrics page to read (it answers 404)" in _why_no_page(404, "")


def test_a_gpus_floor_is_refused_for_a_server_on_a_cpu() -> None:
    args = argparse.Namespace(plan_device="H200")
    with pytest.raises(InvalidRequest, match="the server runs on a CPU"):
        _check_device(args, {"device": "auto", "attention_backend": "cpu"})
    _check_device(args, {"device": "auto", "attention_backend": "triton"})
    _check_device(argparse.Namespace(plan_device=None), {"attention_backend": "cpu"})


def _page(first_tokens: int, ended: int) -> Page:
    """Counters of a server after requests of 3 tokens: 0.8 s to the first, then 0.1 s each."""
    return parse(
        f"vllm:time_to_first_token_seconds_sum {0.8 * first_tokens}\n"
        f"vllm:time_to_first_token_seconds_count {first_tokens}\n"
        f"vllm:request_decode_time_seconds_sum {0.2 * ended}\n"
        f"vllm:e2e_request_latency_seconds_count {ended}\n"
        f"vllm:generation_tokens_total {3 * ended}\nvllm:prompt_tokens_total {9 * ended}\n"
    )


def test_a_live_server_is_held_against_targets_as_a_report_is() -> None:
    settings = {"max_num_seqs": "64", "attention_backend": "cpu"}
    seen = observed("http://h", ServerSide(before=_page(5, 2), after=_page(11, 8)), settings, 10.0)
    assert (seen.ttft_s, seen.tpot_s) == (pytest.approx(0.8), pytest.approx(0.1))
    assert (seen.max_num_seqs, seen.settings) == (64, settings)
    said = diagnose(seen, slo_ms=(500.0, 150.0)).text()
    assert "Stage: TTFT is slow, TPOT is fine" in said
    still = observed("http://h", ServerSide(before=_page(5, 2), after=_page(5, 2)), {"max_num_seqs": ""}, 10.0)
    assert (still.ttft_s, still.tpot_s, still.max_num_seqs) == (None, None, None)
