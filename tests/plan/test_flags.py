"""Every flag of every topic of `steelyard plan` changes what the topic says, or is refused by name: none is ignored."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from steelyard.cli import plan
from steelyard.cli.main import main
from steelyard.cli.plan_flags import READ_BY
from steelyard.perf import ceilings
from steelyard.plan.defaults import ON_GPU
from steelyard.plan.device import Ceilings, find_device
from tests.plan.test_fit import single, write_records

LOAD = "--rate 2 --input 512 --output 64"
ON = "llama-3.1-8b --device L4"
BASES = {
    "": f"plan {ON} {LOAD} --ttft 500ms --tpot 100ms --price-per-hour 2",
    "compare": f"plan compare {ON} {LOAD} --ttft 500ms --tpot 100ms --price-per-hour 2 --to tp=2",
    "tune": f"plan tune {ON} {LOAD} --ttft 500ms --tpot 100ms --price-per-hour 2",
    "cache": f"plan cache {ON} --rate 0.1 --input 1000 --output 1000",
    "waste": f"plan waste {ON} --context 8192",
    "fit": f"plan fit {ON} --records one.jsonl",
    "--measure": "plan --measure",
}
OF_LOAD = {n for n in READ_BY["cache"] if n not in READ_BY["fit"] | {"network"} and n in READ_BY["compare"]}
UNSEEN = {"cache": OF_LOAD, "--measure": {"measure"}}
"""What a load says of a cache is one threshold, which has a test of its own; a flag that the base has already."""
VALUES = {
    "device": "H100", "save": "mine.toml", "tp": "4", "dtype": "fp8", "kv_cache_dtype": "fp8", "context": "700",
    "gpu_memory_utilization": "0.8", "block_size": "512", "max_num_seqs": "4", "max_num_batched_tokens": "640",
    "batch": "3", "records": "two.jsonl", "rate": "3", "input": "300", "output": "32", "cached_tokens": "200",
    "arrival_cv": "3", "trace": "trace.jsonl", "ttft": "300ms", "tpot": "85ms", "attainment": "0.99", "replicas": "7",
    "price_per_hour": "5", "plot": "plan.html", "to": "device=H100", "network": "10", "history": "9000",
    "remove": "1000", "tail": "300", "summary": "100", "turns": "3", "hit_rate": "0.5", "held_out": "two.jsonl",
}  # fmt: skip


def options() -> dict[str, argparse.Action]:
    parser = argparse.ArgumentParser(add_help=False)
    plan.add_arguments(parser)
    return {a.dest: a for a in parser._actions if a.option_strings}


OPTIONS = options()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "one.jsonl", single(128, 40), "one")
    write_records(tmp_path / "two.jsonl", single(4096, 30), "two")
    row = '{{"arrival_s": {}, "input": {}, "output": 50}}\n'
    (tmp_path / "trace.jsonl").write_text("".join(row.format(i * i / 50, 100 + 40 * i) for i in range(20)))
    measured = Ceilings(50e12, 40e12, 250e9, 200e9, 220e9, 5e-6)

    def measure(name: str | None = None) -> object:
        return find_device("L4" if name is None else name).with_ceilings(measured)

    monkeypatch.setattr(ceilings, "measure", measure)
    return tmp_path


def said(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, everything that was said or written, and standard error."""
    written = [folder / name for name in ("mine.toml", "plan.html")]
    for path in written:
        path.unlink(missing_ok=True)
    status = main(shlex.split(line))
    out, err = capsys.readouterr()
    return status, out + "".join(p.read_text() for p in written if p.exists()), err


def flag(name: str) -> str:
    return f"{OPTIONS[name].option_strings[0]} {'' if OPTIONS[name].nargs == 0 else VALUES[name]}"


@pytest.mark.parametrize(
    ("topic", "name"), [(t, n) for t in BASES for n in OPTIONS if n not in {*READ_BY[t], "device"}]
)
def test_a_flag_that_a_topic_does_not_read_is_refused_by_name(
    topic: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = said(f"{BASES[topic]} {flag(name)}", folder, capsys)
    assert (status, out) == (2, "")
    assert f"steelyard plan: {OPTIONS[name].option_strings[0]} is read by" in err


@pytest.mark.slow  # plans a model twice for each; that no flag is forgotten is held by the tests beside it
@pytest.mark.parametrize(
    ("topic", "name"),
    [(t, n) for t in BASES for n in OPTIONS if n in {*READ_BY[t], "device"} - UNSEEN.get(t, set())],
)
def test_a_flag_that_a_topic_reads_changes_what_it_says(
    topic: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, loaded = BASES[topic], BASES[topic]
    if name == "trace":
        loaded = re.sub(r"--(rate|input|output) \S+ ", "", loaded)
    beside = "--measure " if name == "save" and topic != "--measure" else ""
    status, out, err = said(f"{loaded} {beside}{flag(name)}", folder, capsys)
    assert status in (0, 1), err
    assert out != said(f"{base} {beside}", folder, capsys)[1], f"{flag(name)} changed nothing"


def test_the_walk_has_every_flag_and_topic() -> None:
    assert set(BASES) == set(READ_BY) == {*plan.TOPICS, "", "--measure"}
    assert set(VALUES) == {name for name, action in OPTIONS.items() if action.nargs != 0}
    assert set().union(*READ_BY.values()) | {"device"} == set(OPTIONS)


def test_what_a_cache_is_worth_depends_on_the_load_and_the_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = set()
    for flags in ("", "--max-num-seqs 4", "--input 2000 --output 200 --ttft 1.5s --tpot 90ms --block-size 512"):
        shares.add(said(f"{BASES['cache']} {flags}", folder, capsys)[1].rpartition("A cache that holds")[2])
    assert len(shares) == 3


@pytest.mark.parametrize("name", [f.name for f in fields(ON_GPU)])
def test_a_size_that_is_not_given_is_that_of_serve_on_a_gpu(name: str) -> None:
    assert OPTIONS[name].default == getattr(ON_GPU, name)
