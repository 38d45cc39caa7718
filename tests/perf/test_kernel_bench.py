"""The kernel bench: arithmetic of a case, rows that cannot lie, and reports that hold what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from steelyard.kernels.cpu_kv import KvWriter
from steelyard.perf import attention_backends, kernel_bench
from steelyard.perf.attention_backends import naive, prepare
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.ceilings import Ceiling
from steelyard.perf.kernel_bench import Report, Row, run_bench
from steelyard.perf.kernel_report import WIDTH, case_line, draw, text_table, to_html, to_json
from steelyard.perf.timing import extra_bytes, median_ms

torch.set_num_threads(1)
CPU = torch.device("cpu")
CASE = AttentionCase(2, 40, 48, 4, 2, 16, True, torch.float32)
DECODE = replace(CASE, num_q=1)


@pytest.fixture(scope="module")
def report() -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_bench, "median_ms", partial(median_ms, budget_s=0.0))
        return run_bench([CASE, DECODE], attention_backends.NAMES, ("forward", "backward"), CPU)


def rows_of(report: Report, backend: str, direction: str = "forward") -> list[Row]:
    return [row for row in report.rows if row.backend == backend and row.direction == direction]


def test_on_a_cpu_the_serving_attention_reads_its_pool_as_the_server_does_both_in_one_copy() -> None:
    k, v = torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    kv = attention_backends._paged(k, v, (7, 2, 2, 16, 16))
    [runs] = KvWriter().runs(kv).blocks
    assert runs.shape[0] == 7 * 2 * 2
    assert torch.equal(kv.v[1, 1], v[0, :16, 1]) and torch.equal(kv.k[6, 0, :8], k[1, 32:, 0])


def test_flops_and_bytes_are_the_papers() -> None:
    square = AttentionCase(1, 1000, 1000, 1, 1, 64, False, torch.bfloat16)
    assert square.flops() == 4 * 1000 * 1000 * 64
    assert replace(square, causal=True).flops() == square.flops() / 2
    assert square.flops(backward=True) == 2.5 * square.flops()
    assert square.naive_bytes == 2 * (4 * 1000**2 + 4 * 1000 * 64)
    assert square.least_bytes == 2 * 4 * 1000 * 64
    assert square.tiled_bytes == 2 * 64 * (2 * 1000 + 2 * 8 * 1000)  # 8 tiles of queries read all keys
    assert square.least_bytes < replace(square, causal=True).tiled_bytes < square.tiled_bytes < square.naive_bytes


def test_decode_moves_the_cache_once_whatever_the_group() -> None:
    many = AttentionCase(8, 1, 4096, 32, 8, 128, True, torch.bfloat16)
    assert many.kind == "decode"
    assert many.tiled_bytes == many.least_bytes == 8 * 2 * 128 * (2 * 32 + 2 * 8 * 4096)
    assert many.flops() == 4 * 8 * 32 * 128 * 4096


@pytest.mark.parametrize("name", ["sdpa-math", "sdpa-flash", "steelyard"])
@pytest.mark.parametrize("case", [CASE, DECODE, replace(CASE, causal=False), replace(CASE, num_q=48)], ids=str)
def test_every_attention_of_the_cpu_computes_what_naive_does(name: str, case: AttentionCase) -> None:
    torch.manual_seed(0)
    q = torch.randn(case.batch, case.num_q, case.num_heads, case.head_dim)
    k, v = (torch.randn(case.batch, case.num_k, case.num_kv_heads, case.head_dim) for _ in range(2))
    torch.testing.assert_close(prepare(name, case, CPU)(q, k, v), naive(q, k, v, case.causal), rtol=1e-4, atol=1e-5)


def test_each_attention_is_a_row_with_figures_or_a_reason(report: Report) -> None:
    for row in report.rows:
        assert (row.ms is None) == bool(row.note), row
    assert {row.backend for row in report.rows if row.ms is not None} == {
        "naive",
        "sdpa-math",
        "sdpa-flash",
        "steelyard",
    }
    assert rows_of(report, "steelyard", "backward")[0].note == "forward only"
    assert "GPU" in rows_of(report, "flashinfer")[0].note
    assert not [row for row in report.rows if row.case.kind == "decode" and row.direction == "backward"]


def test_figures_are_against_naive_and_the_ceiling(report: Report) -> None:
    base, other = rows_of(report, "naive")[0], rows_of(report, "sdpa-flash")[0]
    assert base.ms is not None and other.ms is not None and other.tflops is not None
    assert other.speedup == pytest.approx(base.ms / other.ms)
    assert other.tflops == pytest.approx(CASE.flops() / other.ms / 1e9)
    assert other.share == pytest.approx(other.tflops * 1e12 / report.ceiling.matmul_flops)
    decode = rows_of(report, "sdpa-flash")[1]
    assert decode.ms is not None
    assert decode.share == pytest.approx(DECODE.least_bytes / decode.ms * 1e3 / report.ceiling.read_bandwidth)


def test_naive_needs_memory_for_the_scores_and_flash_does_not() -> None:
    case = AttentionCase(1, 256, 256, 2, 2, 16, False, torch.float32)
    q, k, v = (torch.randn(1, 256, 2, 16) for _ in range(3))
    scores = 2 * 256 * 256 * 4
    flash = prepare("sdpa-flash", case, CPU)
    assert extra_bytes(lambda: naive(q, k, v, False), CPU) >= 2 * scores
    assert extra_bytes(lambda: flash(q, k, v), CPU) < scores / 4


@pytest.fixture
def no_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_bench, "measure_ceiling", lambda device, dtype: Ceiling("float32", 1e12, 1e10, 1e10))


@pytest.mark.usefixtures("no_ceiling")
def test_wrong_numbers_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: AttentionCase, device: torch.device) -> attention_backends.Forward:
        return lambda q, k, v: naive(q, k, v, case.causal) * 1.001

    monkeypatch.setitem(attention_backends.OTHERS, "steelyard", wrong)
    rows = run_bench([CASE], ("naive", "steelyard"), ("forward",), CPU).rows
    assert rows[1].ms is None and rows[1].note.startswith("wrong: relative error")


@pytest.mark.parametrize(
    ("failure", "note"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "out of memory"),
        (RuntimeError("No available kernel. Aborting execution."), "no such kernel here"),
    ],
)
@pytest.mark.usefixtures("no_ceiling")
def test_a_failure_is_a_row(failure: Exception, note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(case: AttentionCase, device: torch.device) -> attention_backends.Forward:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            raise failure

        return forward

    monkeypatch.setitem(attention_backends.OTHERS, "steelyard", failing)
    rows = run_bench([CASE], ("steelyard", "naive"), ("forward",), CPU).rows
    assert [row.note for row in rows] == [note, ""]


def test_reports_hold_every_row(report: Report) -> None:
    values = json.loads(to_json(report))
    assert len(values["rows"]) == len(report.rows)
    first = values["rows"][0]
    assert first["dtype"] == "float32" and first["naive_bytes"] == CASE.naive_bytes and first["num_kv_heads"] == 2
    assert values["environment"]["torch"] == torch.__version__
    text = text_table(report)
    assert case_line(report.rows[0]) in text and "FlashInfer needs a GPU" in text
    page = to_html(report)
    assert page.count("<svg") == 9 and "http" not in page.replace("http-equiv", "")


def test_no_text_of_a_picture_is_cut_or_lies_on_a_line() -> None:
    name = "steelyard-train"
    svg = draw("forward, extra memory, MiB", {name: [(512, 64.0), (16384, 16_500.0)]})
    assert "keys of a sequence" in svg and ">MiB</text></g>" in svg
    points = [float(p.split(",")[0]) for p in re.findall(r'points="([^"]+)"', svg)[0].split()]
    texts = re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)"[^>]*>([^<]+)<', svg)
    for x, anchor, text in texts:
        width = 6.6 * len(text)
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        assert text == "MiB" or (left >= 0 and left + width <= WIDTH), f"{text} is cut"
        assert text != name or left > max(points), "the key lies on a line"
    assert {"512", "16384", name} <= {text for _, _, text in texts}


@pytest.mark.usefixtures("no_ceiling")
def test_a_caller_may_end_the_cases() -> None:
    def cases() -> object:
        yield CASE
        kernel_bench_done.append(True)

    kernel_bench_done: list[bool] = []
    assert len(kernel_bench.run_bench(cases(), ("naive",), ("forward",), CPU).rows) == 1  # type: ignore[arg-type]
    assert kernel_bench_done == [True]
