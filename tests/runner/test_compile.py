"""Kernels compiled where there is no GPU: a start finds every one, wherever their folder went, and says how many."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from steelyard.checkpoint.find import open_checkpoint
from steelyard.cli import doctor
from steelyard.cli.main import main
from steelyard.config import EngineConfig
from steelyard.engine.build import runner_options
from steelyard.errors import StartError
from steelyard.kernels.ahead import KernelCache, Kernels, keep_kernels, kept_in, launching_nothing
from steelyard.kernels.gpu import gpu_of_arch
from steelyard.runner import start_device
from steelyard.runner.options import RunnerOptions, resolve_kv_dtype
from tests import tiny_model
from tests.runner.compile_cases import CONFIG

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kept() -> Iterator[None]:
    """Triton's folder and listener as they were, afterwards."""
    with knobs.cache.scope(), knobs.compilation.scope():
        yield


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The lines of compile_cases by their case, with kernels counted."""
    command = [sys.executable, "-m", "tests.runner.compile_cases", str(tmp_path_factory.mktemp("ahead"))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {row["case"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_a_folder_that_was_moved_has_every_kernel_and_nothing_is_compiled_twice(cases: dict[str, Any]) -> None:
    first, again = cases["empty folder"], cases["again, moved"]
    assert first["found"] == {} and first["compiled"]["prefill_hopper"] == 1
    assert again["compiled"] == {} and again["found"] == first["compiled"]
    assert again["bytes"] == first["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "start"), [("empty folder", "start"), ("fp8", "start with fp8")])
def test_a_start_and_steps_of_every_size_compile_nothing_and_need_no_less_than_was_compiled(
    cases: dict[str, Any], ahead: str, start: str
) -> None:
    made = Counter(cases[ahead]["compiled"]) + Counter(cases[ahead]["found"])
    assert cases[start]["compiled"] == {} and cases[start]["found"] == made
    assert cases[start]["graphs"] > 0 and cases[start]["launchers"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdpa", "naive"])
def test_an_attention_without_kernels_gets_exactly_those_that_its_steps_launch(
    cases: dict[str, Any], name: str
) -> None:
    made = Counter(cases[name]["compiled"]) + Counter(cases[name]["found"])
    steps = cases[f"steps with {name}"]
    assert steps["compiled"] == {} and steps["found"] == made
    assert "rms_norm_rows" in made and not {"prefill", "prefill_hopper", "decode"} & made.keys()


def test_a_kernel_s_key_does_not_tell_which_was_launched_first() -> None:
    code = """from steelyard.kernels import ahead, triton_linear
from steelyard.kernels.triton_act import activate, gated_rows
linear = next(f for f in vars(triton_linear).values() if getattr(f, "__name__", "") == "row_linear")
for settled in (False, True):
    for order in ((gated_rows, linear), (linear, gated_rows)):
        for function in (activate, gated_rows, linear):
            function.hash, function.used_global_vals = None, {}
        if settled:
            ahead.keep_kernels(None)
        keys = {function.__name__: function.cache_key for function in order}
        print(keys["gated_rows"], keys["row_linear"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    as_it_comes, turned, *settled = [line.split() for line in done.stdout.splitlines()]
    assert as_it_comes[0] != turned[0] and as_it_comes[1] != turned[1], "Triton's keys no longer depend on the order"
    assert settled[0] == settled[1]


@pytest.mark.slow
def test_flags_that_change_kernels_need_others_and_share_the_rest(cases: dict[str, Any]) -> None:
    for case, changed in (("fp8", "prefill"), ("blocks of 32", "prefill_hopper")):
        assert changed in cases[case]["compiled"] and "rms_norm_rows" not in cases[case]["compiled"]
        assert cases[case]["found"]["rms_norm_rows"] == cases["empty folder"]["compiled"]["rms_norm_rows"]


@pytest.mark.usefixtures("kept")
def test_files_of_a_kernel_are_found_in_the_folder_that_is_named_and_not_where_they_were_written(
    tmp_path: Path,
) -> None:
    keep_kernels(str(tmp_path / "first"))
    written = KernelCache("key")
    group = {name: written.put(b"binary", name) for name in ("k.json", "k.cubin")}
    written.put_group("k.json", group)
    assert written.get_group("k.json") == group and kept_in() == tmp_path / "first"
    (tmp_path / "first").rename(tmp_path / "second")
    keep_kernels(str(tmp_path / "second"))
    moved = KernelCache("key")
    assert moved.get_group("k.json") == {name: str(tmp_path / "second/key" / name) for name in group}
    assert moved.get_group("other.json") is None


@pytest.mark.parametrize(
    ("file", "content"),
    [("k.cubin", None), ("k.cubin", ""), ("k.cubin", "cut"), ("k.json", "{}"), ("__grp__k.json", ""),
     ("__grp__k.json", "[1]"), ("__grp__k.json", '{"child_paths": {}}'), ("launcher.so", "")],
)  # fmt: skip
@pytest.mark.usefixtures("kept")
def test_a_file_that_is_not_as_it_was_put_is_made_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, content: str | None
) -> None:
    keep_kernels(str(tmp_path))
    cache = KernelCache("key")
    group = {name: cache.put("whole", name, binary=False) for name in ("k.json", "k.cubin")}
    cache.put_group("k.json", group)
    launcher = cache.put(b"whole", "launcher.so")
    assert (cache.get_group("k.json"), cache.get_file("launcher.so")) == (group, launcher) and not caplog.records
    path = tmp_path / "key" / file
    path.unlink() if content is None else path.write_text(content)
    assert (cache.get_group("k.json") is None) == (file != "launcher.so")
    assert (cache.get_file("launcher.so") is None) == (file == "launcher.so")
    assert [r.message.partition(" of ")[0] for r in caplog.records] == [file if file == "launcher.so" else "k.json"]


@pytest.mark.usefixtures("kept")
def test_what_a_killed_process_left_half_put_is_removed_and_what_a_living_one_puts_stays(tmp_path: Path) -> None:
    keep_kernels(str(tmp_path))
    whole = Path(KernelCache("key").put("whole", "k.json"))
    code = """import os, sys
from steelyard.kernels.ahead import KernelCache, keep_kernels
keep_kernels(sys.argv[1])
os.replace = lambda *paths: os.kill(os.getpid(), 9)
KernelCache("key").put("half", "k.json")
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    left = list(tmp_path.glob("*/tmp.pid_*/k.json"))
    assert killed.returncode == -9 and [path.read_text() for path in left] == ["half"]
    living = [tmp_path / "key" / f"tmp.pid_{pid}_x" for pid in (os.getpid(), 1)]
    others = [tmp_path / "key" / name for name in ("tmp.pid_x_y", "tmp.pid_")]
    for path in (*living, *others):
        path.mkdir()
    keep_kernels(str(tmp_path))
    assert not left[0].exists() and all(path.is_dir() for path in (*living, *others))
    assert whole.read_text() == "whole"


@pytest.mark.parametrize("name", ["k.json", "launcher.so", "launcher.so.sha256"])
@pytest.mark.usefixtures("kept")
def test_a_put_whose_folder_another_machine_took_for_a_dead_process_s_is_made_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_kernels(str(tmp_path))
    cache, replaced = KernelCache("key"), os.replace
    cleaned: list[str] = []

    def cleaned_once(source: str, target: str) -> None:
        if Path(target).name == name and not cleaned:
            cleaned.append(target)
            Path(source).unlink()
            Path(source).parent.rmdir()
        replaced(source, target)

    monkeypatch.setattr(os, "replace", cleaned_once)
    file = name.removesuffix(".sha256")
    assert Path(cache.put("whole", file)).read_text() == "whole"
    assert cleaned and cache.get_file(file) is not None and not list(tmp_path.glob("*/tmp.pid_*"))


def test_launchers_of_another_triton_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    monkeypatch.delattr("triton.backends.nvidia.driver.make_launcher")
    with pytest.raises(StartError, match="pip install triton=="), launching_nothing(gpu_of_arch("sm_90"), False):
        pass


@pytest.mark.parametrize("how", ["cannot be entered", "name too long", "leads to itself", "is a file"])
@pytest.mark.usefixtures("kept")
def test_a_folder_that_cannot_be_looked_into_is_said_in_a_line_with_its_flag(how: str, tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300 if how == "name too long" else "folder")
    if how == "cannot be entered":
        folder.mkdir(0)
    elif how == "leads to itself":
        folder.symlink_to(folder)
    elif how == "is a file":
        folder.write_text("")
    before = os.geteuid()
    try:
        if how == "cannot be entered" and before == 0:  # root enters everywhere
            os.seteuid(65534)
        with pytest.raises(StartError, match=rf"--kernel-cache .*{folder.name}: ") as said:
            keep_kernels(str(folder))
            KernelCache("key").put("whole", "k.json")
    finally:
        os.seteuid(before)
    assert said.value.param == "kernel_cache"


@pytest.mark.usefixtures("kept")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep_kernels(str(tmp_path / "file"))
    with pytest.raises(StartError, match=r"--kernel-cache .*/file: .*irectory"):
        KernelCache("key")


def test_kernels_are_counted_once_and_one_that_comes_late_is_told(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Kernels()
    for key, is_hit in (("a", False), ("a", True), ("b", True), ("b", True)):
        kernels(metadata={"hash": key, "name": f"kernel {key}"}, cache_hit=is_hit)
    assert kernels.counts == {"compiled": 1, "from_cache": 1} and str(kernels).startswith("1 compiled, 1 from /")
    kernels.is_serving = True
    with caplog.at_level(logging.WARNING):
        kernels(metadata={"hash": "b", "name": "kernel b"}, cache_hit=True)
        assert not caplog.records
        kernels(metadata={"hash": "c", "name": "kernel c"}, cache_hit=False)
    assert "kernel c was compiled while serving" in caplog.text


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.usefixtures("kept")
def test_a_late_kernel_is_told_where_requests_wait_for_it_and_nowhere_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    kernels = Kernels()
    monkeypatch.setattr(start_device, "count_kernels", lambda: kernels)
    checkpoint = open_checkpoint(str(tiny_model.write(tmp_path / "tiny")))
    options = RunnerOptions(device="cpu", backend="reference", num_gpu_blocks_override=4, max_num_seqs=1, serves=serves)
    start_device.start_device_runner(checkpoint, options)
    kernels(metadata={"hash": "a", "name": "late"}, cache_hit=False)
    assert ("kernel late was compiled while serving" in caplog.text) == serves


def test_an_engine_serves_and_the_doctor_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[RunnerOptions] = []
    monkeypatch.setattr("steelyard.runner.start.start_runner", lambda checkpoint, options: given.append(options))
    calls, trouble = doctor._model_calls(str(tiny_model.write(tmp_path / "tiny")), torch.device("cpu"))
    assert trouble == "" and len(calls) == 2 and [options.serves for options in given] == [False]
    assert runner_options(EngineConfig()).serves


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arch", "sm_99"], "--arch must be one of sm_80, sm_86"),
        (["--arch", "sm_90", "--device", "cpu"], "kernels are compiled for GPUs: drop --device cpu"),
        (["--arch", "sm_90", "--deterministic"], "drop --device cpu and --deterministic"),
        (["--arch", "sm_90", "--script", "s.json"], "--script answers without a model"),
        ([], "missing: --arch"),
    ],
)
@pytest.mark.usefixtures("kept")
def test_what_cannot_be_compiled_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = ["compile", str(tmp_path), "--load-format", "dummy", "--kernel-cache", str(tmp_path / "kernels"), *words]
    assert main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("kept")
def test_interpreted_kernels_are_not_taken_for_compiled_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    folder = str(tmp_path / "kernels")
    assert main(["compile", str(tmp_path), "--load-format", "dummy", "--arch", "sm_90", "--kernel-cache", folder]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


def test_an_fp8_pool_needs_a_gpu_that_has_such_numbers() -> None:
    options = RunnerOptions(kv_cache_dtype="fp8")
    assert resolve_kv_dtype(options, torch.bfloat16, gpu_of_arch("sm_89"), "triton") == torch.float8_e4m3fn
    with pytest.raises(StartError, match=r"compute capability 8\.9"):
        resolve_kv_dtype(options, torch.bfloat16, gpu_of_arch("sm_80"), "triton")


def test_an_architecture_is_a_compute_capability() -> None:
    assert gpu_of_arch("sm_120").capability == (12, 0) and gpu_of_arch("sm_90").number == 90
