"""Outputs held to a grammar on a real model: every one conforms, whatever is scheduled beside it and however."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from steelyard.checkpoint.find import open_checkpoint
from steelyard.config import EngineConfig
from steelyard.core.sampling import SamplingParams
from steelyard.engine.build import build_engine
from steelyard.engine.engine import Engine
from steelyard.grammar import source
from steelyard.scheduler.protocols import Faults
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Accepted, Deltas, Finished, Refused, Stop, Submit
from tests import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["sea", "ship"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = source.from_json_schema(SCHEMA)
WORD = source.from_regex("(sea|ship){3,9}x")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(str(model)))


def engine_on(model: Path, tokenizer: Tokenizer, **config: Any) -> Engine:
    values = {"num_gpu_blocks_override": 64, "max_num_seqs": 8, "dtype": "float32", "check_invariants": True, **config}
    engine = build_engine(EngineConfig(model=str(model), max_model_len=512, **values))
    engine.grammars.set_vocabulary(tokenizer.to_json(), [2])
    return engine


def run(engine: Engine, *submits: Submit, num_steps: int = 5000) -> dict[tuple[str, int], list[int]]:
    """Ids of every choice that ended well."""
    ids: dict[tuple[str, int], list[int]] = {}
    ended: dict[tuple[str, int], str] = {}
    for submit in submits:
        assert isinstance(engine.submit(submit), Accepted)
    for _ in range(num_steps):
        if not engine.has_work:
            break
        for message in engine.step():
            if isinstance(message, Deltas):
                for item in message.items:
                    ids.setdefault((item.id, item.index), []).extend(item.ids)
            elif isinstance(message, Finished):
                ended[(message.id, message.index)] = message.reason + message.message
    assert not engine.has_work
    assert set(ended.values()) == {"stop"}, ended
    return ids


def submit(id: str, grammar: str, n: int = 1, **sampling: Any) -> Submit:
    values = {"temperature": 1.0, "seed": 3, "max_tokens": 150, **sampling}
    return Submit(id, [5, 6, 7, len(id), *map(ord, id)], SamplingParams(n=n, **values), grammar=grammar)


def check(tokenizer: Tokenizer, ids: list[int], grammar: str) -> str:
    assert ids[-1] == 2
    text = tokenizer.decode(ids)
    if grammar is JSON:
        value = json.loads(text)
        assert set(value) == {"name", "size"}
        assert value["name"] in ("sea", "ship")
        assert 0 <= value["size"] <= 99
    else:
        assert re.fullmatch("(sea|ship){3,9}x", text), text
    return text


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_output_conforms_beside_others_and_through_preemption(
    model: Path, tokenizer: Tokenizer, overlap: bool
) -> None:
    engine = engine_on(model, tokenizer, async_scheduling=overlap, num_gpu_blocks_override=11)
    submits = [submit(f"{'j' if i % 2 else 'w'}{i}", JSON if i % 2 else WORD, n=1 + i % 3) for i in range(5)]
    free = submit("free", "", ignore_eos=False, logit_bias=((2, 12.0),))
    ids = run(engine, *submits, free)
    assert len(ids) == sum(s.sampling.n for s in submits) + 1
    texts = {key: check(tokenizer, ids[key], JSON if key[0][0] == "j" else WORD) for key in ids if key[0] != "free"}
    assert len(set(texts.values())) > 4
    assert engine.scheduler.counters.preemptions > 0
    alone = engine_on(model, tokenizer)
    for one in (*submits[1:3], free):
        assert run(alone, one) == {key: ids[key] for key in ids if key[0] == one.id}


@pytest.mark.parametrize("overlap", [False, True])
def test_min_tokens_gives_way_only_to_a_grammar_that_must_end(model: Path, tokenizer: Tokenizer, overlap: bool) -> None:
    engine = engine_on(model, tokenizer, async_scheduling=overlap)
    short, free = source.from_regex("a"), source.from_regex("a*")
    ends = {"logit_bias": ((2, 100.0),)}
    ids = run(
        engine, *(submit(f"{m}", short, min_tokens=m) for m in (0, 3, 20)), submit("9", free, min_tokens=9, **ends)
    )
    assert [tokenizer.decode(ids[(f"{m}", 0)][:-1]) for m in (0, 3, 20)] == ["a"] * 3
    assert 2 not in ids[("9", 0)][:9] and len(ids[("9", 0)]) == 10
    assert not engine.grammars._min_tokens
    assert run(engine, submit("on", short, ignore_eos=True))[("on", 0)] == ids[("0", 0)]


def test_a_request_waits_for_its_grammar_and_holds_up_nobody(model: Path, tokenizer: Tokenizer) -> None:
    engine, let_go = engine_on(model, tokenizer), Event()
    compile = engine.grammars._compile
    engine.grammars._compile = lambda words, text: (let_go.wait(30), compile(words, text))[1]
    engine.submit(submit("slow", JSON))
    other = submit("other", "", logit_bias=((2, 100.0),))
    engine.submit(other)
    ended: list[str] = []
    while "other" not in ended:
        ended += [m.id for m in engine.step() if isinstance(m, Finished)]
    assert ended == ["other"]
    assert engine.scheduler.waiting_by_reason() == {"wait_grammar": 1}
    let_go.set()
    last: list[Finished] = []
    while engine.has_work:
        last += [m for m in engine.step() if isinstance(m, Finished)]
    assert [m.reason for m in last] == ["stop"]
    assert last[0].ledger["wait_grammar"] > 0


def test_stopping_in_every_state_leaves_no_walker(model: Path, tokenizer: Tokenizer) -> None:
    engine, let_go = engine_on(model, tokenizer), Event()
    compile = engine.grammars._compile
    engine.grammars._compile = lambda words, text: (let_go.wait(30), compile(words, text))[1]
    engine.submit(submit("a", JSON))
    engine.stop(Stop("a", -1, "disconnect"))
    let_go.set()
    engine.submit(submit("b", WORD))
    while not engine.scheduler.num_running:
        engine.step()
    engine.stop(Stop("b", -1, "disconnect"))
    while engine.has_work:
        engine.step()
    assert not engine.grammars._walkers
    assert run(engine, submit("c", JSON))


def test_without_a_vocabulary_and_for_a_bad_grammar_the_engine_says_so(model: Path, tokenizer: Tokenizer) -> None:
    engine = build_engine(EngineConfig(model=str(model), max_model_len=512, num_gpu_blocks_override=64))
    assert isinstance(engine.submit(submit("a", JSON)), Refused)
    engine.grammars.set_vocabulary(tokenizer.to_json(), [2])
    engine.submit(submit("b", source.from_json_schema({"type": "strin"})))
    ended: list[Finished] = []
    while engine.has_work:
        ended += [m for m in engine.step() if isinstance(m, Finished)]
    assert ended[0].reason == "error"
    assert "strin" in ended[0].message


def test_a_fault_while_compiling_ends_that_request_alone(model: Path, tokenizer: Tokenizer) -> None:
    class Broken(Faults):
        def before_compile(self, grammar: str) -> None:
            if grammar == WORD:
                raise RuntimeError("injected")

    config = EngineConfig(model=str(model), max_model_len=512, num_gpu_blocks_override=64, dtype="float32")
    engine = build_engine(config, faults=Broken())
    engine.grammars.set_vocabulary(tokenizer.to_json(), [2])
    for broken in (submit("word", WORD), submit("json", JSON)):
        assert isinstance(engine.submit(broken), Accepted)
    ends: dict[str, Finished] = {}
    while engine.has_work:
        ends |= {m.id: m for m in engine.step() if isinstance(m, Finished)}
    assert ends["word"].reason == "error"
    assert "injected" in ends["word"].message
    assert ends["json"].reason == "stop"
