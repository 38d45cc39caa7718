"""The doctor: it reports what ran, not what should have, and says why nothing faster did."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from steelyard.cli.doctor import _cuda_words
from steelyard.perf import doctor, kernel_bench
from steelyard.perf.attention_cases import AttentionCase
from steelyard.perf.ceilings import Ceiling
from steelyard.perf.doctor import Examination, examine
from steelyard.perf.environment import architecture, environment, why_not_importable
from steelyard.perf.profile_kernels import KernelTime, is_no_marker, kernels_of, path_of, standard_error

torch.set_num_threads(1)
CPU = torch.device("cpu")
CASES = (
    AttentionCase(1, 64, 64, 4, 2, 16, True, torch.float32),
    AttentionCase(2, 1, 64, 4, 2, 16, True, torch.float32),
)


@pytest.fixture(scope="module")
def found() -> Examination:
    slow = torch.randn(1, 2, 32, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_bench, "measure_ceiling", lambda device, dtype: Ceiling("float32", 1e12, 1e10, 1e10))
        return _examine(slow)


def _examine(slow: torch.Tensor) -> Examination:
    return examine(CPU, CASES, {"a slow model": lambda: torch.softmax(slow @ slow.transpose(-1, -2), -1) @ slow})


def test_the_profiler_tells_paths_apart() -> None:
    q = torch.randn(1, 2, 64, 16)
    flash = kernels_of(lambda: scaled_dot_product_attention(q, q, q, is_causal=True), CPU)
    assert path_of(flash) == doctor.path_of(flash) and path_of(flash).name == "torch flash" and path_of(flash).is_fast
    math = kernels_of(lambda: scaled_dot_product_attention(q, q, q, dropout_p=0.5), CPU)
    assert path_of(math).name == "score matrix in memory" and not path_of(math).is_fast
    assert path_of(kernels_of(lambda: q + 1, CPU)).name == "no attention kernel recognised"


@pytest.mark.parametrize(
    ("kernel", "path"),
    [
        ("decode_split", "steelyard Triton"),
        ("prefill_hopper", "steelyard Triton"),
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<...>", "FlashInfer"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "torch flash"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "cuDNN"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(...)", "torch memory-efficient"),
        ("void at::native::(anonymous namespace)::softmax_warp_forward<...>", "score matrix in memory"),
    ],
)
def test_gpu_kernels_are_known_by_their_names(kernel: str, path: str) -> None:
    assert path_of([KernelTime(kernel, 1, 1.0), KernelTime("elementwise", 1, 1.0)]).name == path


def test_ours_ran_and_was_compared(found: Examination) -> None:
    assert found.backends["steelyard"] is None
    assert [ran.is_fast for ran in found.ran] == [True, True, False]
    assert {(row.case.kind, row.backend) for row in found.compared if row.ms is not None} == {
        (kind, name) for kind in ("prefill", "decode") for name in ("naive", "sdpa-flash", "steelyard")
    }


def test_a_path_not_taken_is_a_finding_with_its_reason(found: Examination) -> None:
    assert any("No fast path in a slow model" in sentence for sentence in found.findings)
    assert not any("dropout" in sentence for sentence in found.findings), "nothing that is served has any"
    assert found.backends["steelyard-train"] is not None and "GPU" in found.backends["steelyard-train"]


def test_it_is_json(found: Examination) -> None:
    assert json.loads(json.dumps(found.to_dict()))["backends"]["naive"] is None


def test_what_cuda_is_here_is_said_in_words() -> None:
    none: dict[str, str | None] = {"runtime": None, "driver": None, "driver_supports": None, "nvcc": None}
    assert _cuda_words(none) == ["torch is built without CUDA", "no driver", "no nvcc"]
    all_of_it = none | {"runtime": "13.0", "driver": "580.1", "driver_supports": "13.0", "nvcc": "12.4"}
    said = "torch is built with CUDA 13.0; driver 580.1, which runs CUDA 13.0; nvcc 12.4"
    assert "; ".join(_cuda_words(all_of_it)) == said
    assert "-" not in "; ".join(_cuda_words(none | {"driver": "580.1"}))


def facts(**cuda: str | None) -> Examination:
    values = environment()
    values["cuda"] = {"runtime": None, "driver": None, "driver_supports": None, "nvcc": None} | cuda
    return Examination(values, "cpu", {}, backends={"steelyard": None})


@pytest.mark.parametrize(
    ("cuda", "words"),
    [
        ({"driver": "550.1", "driver_supports": "12.4"}, "CPU-only build"),
        ({"runtime": "13.0", "driver": "550.1", "driver_supports": "12.4"}, "update the driver"),
        ({"runtime": "13.0", "driver": "580.1", "driver_supports": "13.0", "nvcc": "12.4"}, "nvcc is 12.4"),
    ],
)
def test_cuda_versions_that_do_not_go_together_are_said(cuda: dict, words: str) -> None:
    assert any(words in sentence for sentence in doctor._findings(facts(**cuda)))


def test_matching_versions_are_no_finding() -> None:
    assert doctor._findings(facts()) == ["Every path examined was a fast one."]


def test_an_attention_that_another_one_of_the_table_beats_is_a_finding() -> None:
    times_ms = {"naive": (1.0, 0.1), "sdpa-flash": (1.0, 1.0), "steelyard": (1.3, 1.1)}
    seen = facts()
    seen.compared = [
        kernel_bench.Row(case, name, "forward", ms=ms, speedup=1.0)
        for name, by_case in times_ms.items()
        for case, ms in zip(CASES, by_case)
    ]
    [sentence] = doctor._findings(seen)
    assert "1.30 times as long as sdpa-flash" in sentence and str(CASES[0]) in sentence


def test_a_library_that_is_missing_or_breaks_gives_its_reason(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_importable("json") is None
    assert "No module named" in (why_not_importable("no_such_library") or "")
    (tmp_path / "breaks_on_import.py").write_text("raise OSError('libcudart.so.12: cannot open\\nmore')")  # type: ignore[operator]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert why_not_importable("breaks_on_import") == "OSError: libcudart.so.12: cannot open"
    assert [architecture(*c) for c in ((8, 0), (8, 9), (9, 0), (10, 0))] == ["Ampere", "Ada", "Hopper", "Blackwell"]


def test_the_profilers_own_words_are_dropped_and_no_others(capfd: pytest.CaptureFixture[str]) -> None:
    with standard_error(is_no_marker):
        os.write(2, b"USDT:2026 profiler_start\nan error of somebody\n")
        print("and of Python", file=sys.__stderr__)
    kernels_of(lambda: torch.ones(2) + 1, torch.device("cpu"))
    assert capfd.readouterr().err == "an error of somebody\nand of Python\n"


def test_torch_says_why_in_a_warning_or_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with standard_error(lambda line: "keep" in line) as lines:
        os.write(2, b"[W1130 02:34:16.2 sdp_utils_cpp.h:91] Warning: Expected bfloat16. Got float (function check)\n")
        os.write(2, b"keep this\n")
    assert capfd.readouterr().err == "keep this\n" and len(lines) == 2
    said = [
        *lines[:1],
        "Flash attention kernel not used because: (Triggered internally at x)",
        "Expected bfloat16. Got float",
    ]
    assert doctor._reasons(said) == "Expected bfloat16. Got float"
    assert doctor._reasons([]) == "not said by torch"


def test_choices_of_one_reason_are_one_finding() -> None:
    found = facts()
    found.choices = [doctor.TorchChoice("float32", dim, "causal", "torch memory-efficient", "no") for dim in (64, 80)]
    [finding] = doctor._findings(found)
    assert finding == "torch takes 'torch memory-efficient' for float32, head size 64 causal, head size 80 causal: no."
