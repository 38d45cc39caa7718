"""`steelyard diagnose URL`: what a server that does not answer as hoped is said to have done."""

from __future__ import annotations

import argparse

import pytest

from steelyard.cli.diagnose import _check_device, _why_no_page
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
