"""An engine in a few lines, for tests of the server alone: it answers each Submit with the ids it is told to."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from steelyard.server.client import EngineClient
from steelyard.wire.messages import (
    Accepted,
    Answer,
    Ask,
    Delta,
    Deltas,
    Finished,
    FromEngine,
    Logprob,
    Pause,
    Ready,
    Refused,
    Resume,
    Status,
    Stop,
    Submit,
    ToEngine,
    Usage,
)

MAX_MODEL_LEN = 256
BLOCK_SIZE = 16
NUM_BLOCKS = 32


class FakeEngine:
    """Lives on the server's loop. The fields may be changed by a test before it sends a request.

    reply      the ids of choice `index` of a Submit, before max_tokens
    per_step   tokens a delta
    stalled    no token comes while True
    pause_at   no more than this many tokens of a choice come while set
    refuse     what to refuse the next Submits with
    fail_at    the number of tokens after which a choice fails, None: never
    joined     deltas and end of a choice come in one batch
    end_with   the reason of every end, in place of the usual one
    """

    def __init__(self) -> None:
        self.client: EngineClient | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.received: list[ToEngine] = []
        self.tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.reset()

    def reset(self) -> None:
        self.reply: Callable[[Submit, int], list[int]] = lambda submit, index: [40 + index] * 1000
        self.per_step = 1
        self.stalled = False
        self.pause_at: int | None = None
        self.paused: set[str] = set()
        self.refuse: Refused | None = None
        self.fail_at: int | None = None
        self.joined = False
        self.end_with: str | None = None
        self.received.clear()

    @property
    def submits(self) -> list[Submit]:
        return [m for m in self.received if isinstance(m, Submit)]

    @property
    def stops(self) -> list[Stop]:
        return [m for m in self.received if isinstance(m, Stop)]

    def send(self, message: ToEngine) -> None:
        self.received.append(message)
        assert self.loop is not None
        match message:
            case Submit():
                self.loop.call_soon(self._accept, message)
            case Stop():
                self._stop(message)
            case Pause():
                self.paused.add(message.id)
            case Resume():
                self.paused.discard(message.id)
            case Ask():
                value = [] if message.what == "requests" else {"what": message.what}
                self.loop.call_soon(self.say, Answer(message.id, value))

    def say(self, *messages: FromEngine) -> None:
        assert self.client is not None
        self.client.on_messages(messages)

    def _accept(self, submit: Submit) -> None:
        refuse = self.refuse
        if refuse is not None:
            self.say(Refused(submit.id, refuse.status, refuse.code, refuse.message, refuse.param, refuse.retry_after_s))
            return
        max_tokens = submit.sampling.max_tokens or MAX_MODEL_LEN - len(submit.tokens)
        self.say(Accepted(submit.id, max_tokens))
        assert self.loop is not None
        for index in range(submit.sampling.n):
            task = self.loop.create_task(self._run(submit, index, max_tokens))
            self.tasks[(submit.id, index)] = task

    async def _run(self, submit: Submit, index: int, max_tokens: int) -> None:
        if submit.want != "tokens":
            self._end(submit, index, 0, "stop")
            return
        whole = self.reply(submit, index)
        ids = whole[:max_tokens]
        sent = 0
        while sent < len(ids):
            await asyncio.sleep(0)
            while self._held(submit.id, sent):
                await asyncio.sleep(0.002)
            if self.fail_at is not None and sent >= self.fail_at:
                self._end(submit, index, sent, "error", message="the row failed: not a number")
                return
            some = ids[sent : sent + self.per_step]
            sent += len(some)
            delta = Deltas([Delta(submit.id, index, some, _logprobs(some, submit.sampling.logprobs))])
            if self.joined and sent == len(ids):
                self._end(submit, index, sent, *_reason(submit, ids, whole), first=delta)
                return
            self.say(delta)
        self._end(submit, index, sent, *_reason(submit, ids, whole))

    def _held(self, id: str, sent: int) -> bool:
        return self.stalled or id in self.paused or (self.pause_at is not None and sent >= self.pause_at)

    def _end(
        self,
        submit: Submit,
        index: int,
        num: int,
        reason: str,
        stop_token: int | None = None,
        message: str = "",
        first: Deltas | None = None,
    ) -> None:
        self.tasks.pop((submit.id, index), None)
        prompt = _logprobs(submit.tokens[1:], submit.sampling.prompt_logprobs)
        cached = BLOCK_SIZE if len(submit.tokens) > BLOCK_SIZE else 0
        usage = Usage(len(submit.tokens), num, cached)
        ledger = {"prefill": 10, "decode": 20}
        pooled = b"" if submit.want == "tokens" else array("f", [3.0, 4.0]).tobytes()
        reason = self.end_with or reason
        finished = Finished(submit.id, index, reason, usage, ledger, stop_token, message, prompt, 0, pooled)
        self.say(*([first] if first else []), finished)

    def _stop(self, stop: Stop) -> None:
        for (id, index), task in list(self.tasks.items()):
            if id == stop.id and stop.index in (-1, index):
                task.cancel()
                submit = next(m for m in self.submits if m.id == id)
                reason = "stop" if stop.reason == "stop_string" else "abort"
                assert self.loop is not None
                self.loop.call_soon(self._end, submit, index, max(stop.keep, 0), reason)


def _reason(submit: Submit, ids: list[int], whole: list[int]) -> tuple[str, int | None]:
    if len(ids) < len(whole):
        return "length", None
    stop_ids = {2, *submit.sampling.stop_token_ids}
    return ("stop", ids[-1]) if ids and ids[-1] in stop_ids else ("length", None)


def _logprobs(ids: list[int], num_top: int | None) -> list[Logprob] | None:
    if num_top is None:
        return None
    return [Logprob(-0.5, [(token + i, -0.5 - i) for i in range(num_top)]) for token in ids]


def ready(vocab_size: int) -> Ready:
    lens = (MAX_MODEL_LEN, min(MAX_MODEL_LEN, BLOCK_SIZE * NUM_BLOCKS))
    return Ready("tiny", "f" * 64, "float32/16", BLOCK_SIZE, [NUM_BLOCKS], *lens, 8, 256, vocab_size, True, {})


def idle(**changes: object) -> Status:
    values: dict[str, object] = {
        "steps": 5,
        "running": 0,
        "waiting": 0,
        "waiting_by_reason": {},
        "blocks_total": NUM_BLOCKS,
        "blocks_free": NUM_BLOCKS,
        "blocks_cached": 0,
        "blocks_active": 0,
        "counters": {"preemptions": 3},
        "busy": False,
    }
    return Status(**{**values, **changes})  # type: ignore[arg-type]
