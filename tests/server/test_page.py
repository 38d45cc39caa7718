"""The live page: its files need no key and no other host; in a real browser it shows real traffic, by keyboard too."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from importlib.resources import files

import httpx
import pytest

from steelyard.core.timed import State
from steelyard.ledger.states import GROUPS
from steelyard.server.routes.page import PATHS
from steelyard.text.chat import ChatTemplate
from steelyard.text.tokenizer import Tokenizer
from tests import tiny_model
from tests.server.browser import CHROMIUM, Browser
from tests.server.real_engine import RealEngine, serve
from tests.server.served import Served
from tests.server.test_ledger import TENANTS

STATIC = files("steelyard.server").joinpath("static")


@pytest.fixture
def shared(tokenizer: Tokenizer) -> Iterator[Served]:
    template = ChatTemplate(tiny_model.TEMPLATE, tiny_model.BOS, tiny_model.IM_END)
    engine = RealEngine()
    engine.delay = lambda plan: time.sleep(0.004)
    yield from serve(tokenizer, template, engine, tenants=TENANTS)


def test_the_files_need_no_key_and_name_no_other_host(shared: Served) -> None:
    for path in PATHS:
        response = shared.http.get(path)
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", response.text)
        assert not re.search(r"innerHTML|outerHTML|document\.write|eval\(", response.text)
    assert shared.http.get("/static/nothing.js", headers={"authorization": "Bearer boss"}).status_code == 404


def test_the_page_knows_every_account() -> None:
    script = STATIC.joinpath("live.js").read_text()
    for group, states in GROUPS.items():
        [listed] = re.findall(rf"^  {group}: \[(.*)\],$", script, re.M)
        assert set(re.findall(r'"(\w+)"', listed)) == {state.value for state in states}, group
    assert len(State) == sum(map(len, GROUPS.values())) + 2


def test_no_tile_stands_alone_in_its_row() -> None:
    """By the columns of every width: the last row is whole, or has at least two."""
    [values] = re.findall(r"const values = \[\n(.*?)\n  \];", STATIC.joinpath("live.js").read_text(), re.S)
    num_tiles = len(re.findall(r'^    \["', values, re.M))
    columns = re.findall(r"#tiles \{[^}]*repeat\((\d+),", STATIC.joinpath("live.css").read_text())
    assert num_tiles == 9 and len(columns) == 3
    assert all(num_tiles % int(n) != 1 for n in columns), (num_tiles, columns)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_every_bar_says_what_it_is_of(shared: Served) -> None:
    since = "document.querySelector('.since').textContent"
    with Browser(1280, 900) as page:

        def enter() -> None:
            page.open(shared.url + "/")
            _until(page, "document.getElementById('key')?.hidden === false || document.querySelector('.tile') !== null")
            page.run("document.getElementById('secret').value = 'boss'; document.getElementById('key').requestSubmit()")
            _until(page, "document.querySelectorAll('.tile').length === 9")

        enter()
        assert page.run(since) == "since this page was opened"
        for part in ("accounts", "tenants"):
            assert page.run(f"document.getElementById('{part}').textContent") == "nothing yet"
        tops = page.run("[...document.querySelectorAll('.tile')].map((tile) => tile.offsetTop)")
        assert len(set(tops)) == 1
        said = page.run("document.getElementById('steps-text').textContent")
        assert said == "device time and the gap before it", "a step without a floor has no dashes to speak of"
        shared.http.post(
            "/v1/completions", json={"prompt": [5] * 40, "max_tokens": 8}, headers={"authorization": "Bearer acme"}
        )
        _until(page, "document.querySelectorAll('#accounts .bar i').length > 1")
        assert page.run(since) == "since this page was opened"
        enter()
        _until(page, f"{since}.startsWith('since the server started')")
        assert page.run("document.querySelectorAll('#accounts .bar i').length > 1")
        assert "acme" in page.run("document.getElementById('tenants').textContent")
        drawn = "m.bars(div, { bounds: [1, 2], counts: [1, 0, 3] }, (ns) => `${ns / 1e9} s`); return div.textContent"
        script = f"const div = document.createElement('div'); {drawn}"
        said = page.run(f"import('/static/draw.js').then((m) => {{ {script} }})")
        assert "\u2264 1 s" in said and "> 2 s" in said, "what lies beyond the last bound is above it"
        cut = "return [...div.querySelectorAll('svg text')].map((t) => t.getBBox().x)"
        for words in ("636 ms", "100.0 s", "999 \u00b5s"):
            drawn = f"m.stepChart(div, [{{ span_ns: 9, device_ns: 9, gaps_ns: {{}}, tokens: {{}} }}], () => '{words}')"
            script = f"const div = document.body.appendChild(document.createElement('div')); {drawn}; {cut}"
            left = page.run(f"import('/static/draw.js').then((m) => {{ {script} }})")
            assert len(left) == 3 and min(left) >= 0, f"{words} is cut at the left: {left}"
        key = "document.getElementById('blocks-key').textContent"
        assert page.run(key) == "cleancachedin useshared"
        assert page.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_it_asks_for_a_key_and_shows_what_happens(shared: Served) -> None:
    def load() -> None:
        with httpx.Client(base_url=shared.url, timeout=30, headers={"authorization": "Bearer acme"}) as http:
            for i in range(4):
                http.post("/v1/completions", json={"prompt": [5 + i] * 40, "max_tokens": 60})

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    with Browser(390, 844, dark=True) as page:
        page.open(shared.url + "/")
        _until(page, "document.getElementById('key')?.hidden === false")
        page.run("document.getElementById('secret').focus()")
        page.run("document.getElementById('secret').value = 'boss'")
        page.press("Enter", 13)
        page.run("document.getElementById('key').requestSubmit()")
        _until(page, "document.querySelectorAll('.tile').length > 5")
        _until(page, "document.querySelectorAll('#slowest li').length > 3")
        assert page.run("document.documentElement.scrollWidth") <= 390
        assert page.run("document.querySelector('#steps svg rect') !== null")
        page.run("document.getElementById('try').requestSubmit()")
        _until(page, "document.querySelectorAll('#ledger .bar i').length > 1")
        assert len(page.run("document.getElementById('answer').textContent")) > 20
        page.run("document.getElementById('secret').value = 'acme'; document.getElementById('key').requestSubmit()")
        _until(page, "document.getElementById('state').textContent === 'requests of acme'")
        assert page.run("[...document.querySelectorAll('.operator')].every((part) => part.hidden)")
        assert page.errors == []
    for thread in threads:
        thread.join()


def _until(page: Browser, condition: str) -> None:
    deadline = time.monotonic() + 60
    while not page.run(condition):
        assert time.monotonic() < deadline, f"waited in vain: {condition}"
        time.sleep(0.2)
