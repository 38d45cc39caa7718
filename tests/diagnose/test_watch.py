"""`steelyard diagnose URL`: what a server that does not answer as hoped is said to have done."""

from __future__ import annotations

import argparse
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from steelyard.bench.scrape import Page, Sample, ServerSide, parse
from steelyard.cli.diagnose import _check_device, _why_no_page, observed
from steelyard.cli.main import main
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


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--plan-model", "llama3-8b", "--plan-device", "H200"], "the server runs on a CPU; measure it"),
        (["--plan-model", "llama3-8b", "--plan-device", "H2000"], "H2000"),
    ],
)
def test_what_cannot_be_planned_is_said_before_a_server_is_watched(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Cpu(BaseHTTPRequestHandler):
        def log_message(self, *what: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(b'steelyard:config_info{attention_backend="cpu"} 1\n')

    with ThreadingHTTPServer(("127.0.0.1", 0), Cpu) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}"
            assert main(["diagnose", url, "--seconds", "3600", *flags]) == 2
        finally:
            server.shutdown()
    assert says in capsys.readouterr().err


def _waves(waited_s: float) -> Page:
    return parse(
        f'steelyard:request_time_seconds_total{{state="wait_slot",tenant=""}} {waited_s}\n'
        f'steelyard:request_time_seconds_total{{state="wait_budget",tenant=""}} {waited_s / 9}\n'
    )


@pytest.mark.parametrize("has_accounts", [True, False])
def test_a_live_cap_is_named_though_the_rows_are_free_between_waves(has_accounts: bool) -> None:
    readings = [Sample(i, {"running": 4.0 if i % 4 == 0 else 8.0, "waiting": 8.0}) for i in range(20)]
    before, after = (_waves(10.0), _waves(100.0)) if has_accounts else (_page(5, 2), _page(11, 8))
    seen = observed("http://h", ServerSide(readings, before, after), {"max_num_seqs": "8"}, 10.0)
    assert seen.running == 7.0 and seen.at_cap == 0.75
    assert seen.waited_for_row == (pytest.approx(0.9) if has_accounts else None)
    assert diagnose(seen).verdict == "sequence cap (8)"
    assert observed("http://h", ServerSide(readings, before, after), {"max_num_seqs": "None"}, 10.0).at_cap is None


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
