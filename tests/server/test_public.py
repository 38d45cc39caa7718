"""A prefix the operator has declared is shared by all tenants; what comes behind it, or is not declared, by nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steelyard.core.hashing import chain, root_hash
from steelyard.errors import StartError
from steelyard.server.client import EngineClient
from steelyard.server.metrics import Metrics
from steelyard.server.public import PublicPrefixes, load_public
from steelyard.server.tenants import Tenant, Tenants
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Control, Finished
from tests.server import fake_engine
from tests.server.test_side_channel import Bench

SIZE = fake_engine.BLOCK_SIZE
READY = fake_engine.ready(320)
TENANTS = Tenants([Tenant(name, (name.encode() * 32,)) for name in "ab"], b"k" * 32)
RNG = random.Random(6)


def ids(length: int) -> list[int]:
    return [RNG.randrange(300) for _ in range(length)]


def own(name: str, salt: str | None = None) -> bytes:
    return TENANTS.namespace(TENANTS.all[name], salt)


@dataclass
class Asked:
    """Keys of one prompt for tenants a and b, and how many of the first are equal."""

    a: list[bytes]
    b: list[bytes]

    @property
    def num_shared(self) -> int:
        return next((i for i, (x, y) in enumerate(zip(self.a, self.b)) if x != y), len(self.a))


def asked(prompt: list[int], *prefixes: list[int]) -> Asked:
    public = PublicPrefixes(prefixes, READY)
    return Asked(public.keys(prompt, own("a")), public.keys(prompt, own("b")))


@pytest.mark.parametrize("prefix_len", [0, 15, 16, 17, 47, 48, 100])
@pytest.mark.parametrize("rest_len", [0, 1, 15, 16, 40])
def test_whole_blocks_of_a_declared_prefix_are_shared_but_never_a_prompts_last_block(
    prefix_len: int, rest_len: int
) -> None:
    prefix = ids(prefix_len)
    prompt = prefix + ids(rest_len)
    keys = asked(prompt, prefix)
    assert len(keys.a) == len(keys.b) == len(prompt) // SIZE
    assert keys.num_shared == max(0, min(prefix_len // SIZE, len(prompt) // SIZE - 1))
    assert not set(keys.a[keys.num_shared :]) & set(keys.b)


def test_what_is_not_declared_is_keyed_as_without_any_and_of_two_the_longer_counts() -> None:
    short = ids(40)
    long = short + ids(60)
    other = ids(90)
    root = root_hash(READY.fingerprint, READY.kv_layout, own("a"))
    assert asked(other, short, long).a == chain(root, other, SIZE)
    assert asked(long + ids(30), long, short).num_shared == len(long) // SIZE
    assert asked(short + ids(60), long, short).num_shared == len(short) // SIZE


def test_keys_behind_different_public_prefixes_differ() -> None:
    first, second, rest = ids(SIZE), ids(SIZE), ids(3 * SIZE)
    public = PublicPrefixes([first, second], READY)
    assert not set(public.keys(first + rest, own("a"))) & set(public.keys(second + rest, own("a")))


def test_a_salt_shares_nothing() -> None:
    client = EngineClient(lambda message: None, lambda: 0, 20.0, Metrics())
    client.on_messages([READY])
    prefix = ids(5 * SIZE)
    client.public = PublicPrefixes([prefix], READY)
    prompt = prefix + ids(SIZE)
    plain = [client.block_hashes(prompt, own(name)) for name in "ab"]
    assert plain[0][:5] == plain[1][:5]
    salted = [client.block_hashes(prompt, own(name, "s")) for name in "ab"]
    assert not (set(salted[0]) | set(salted[1])) & set(plain[0] + plain[1])
    assert not set(salted[0]) & set(salted[1])


def test_files_are_read_as_prompts_begin_and_mistakes_are_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "system.txt"
    text = "You are a sailor on a ship, and you answer in one short sentence."
    path.write_text(text)
    public: Any = load_public([str(path)], tokenizer, READY)
    for special in (False, True):
        prompt = tokenizer.encode(text + " What is the sea, and what is a ship?", special)
        a, b = public.keys(prompt, own("a")), public.keys(prompt, own("b"))
        assert a[0] == b[0] and a[-1] != b[-1]
    path.write_text("short")
    with pytest.raises(StartError, match="less than a block of 16"):
        load_public([str(path)], tokenizer, READY)
    with pytest.raises(StartError, match="missing"):
        load_public([str(tmp_path / "missing")], tokenizer, READY)
    assert load_public([], tokenizer, READY) is None


def test_an_engine_shares_the_public_blocks_and_those_alone() -> None:
    bench = Bench(7)
    prefix, private = bench.fresh(64), bench.fresh(64)
    bench.public = PublicPrefixes([prefix], bench.engine.ready())

    def cached(tenant: str, prompt: list[int]) -> int:
        bench.submit(tenant, prompt, max_tokens=20)
        ended: list[Finished] = []
        while bench.engine.has_work:
            ended += [m for m in bench.engine.step() if isinstance(m, Finished)]
        return ended[0].usage.cached_tokens

    assert cached("a", prefix + private) == 0
    assert cached("b", prefix + private) == 64
    assert cached("a", prefix + private) == 112
    assert cached("b", prefix + private) == 112
    assert cached("c", prefix + private) == 64
    assert cached("c", private) == 0
    bench.engine.control(Control("drop_cache", bench.tenants.namespace(bench.tenants.all["b"])))
    assert cached("b", prefix + private) == 64
    assert bench.engine.check()
