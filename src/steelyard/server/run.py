"""From the engine's ids to chunks of text: all choices of one HTTP request, shared by both endpoints.

    collector --updates--> Choice (text, stop strings, held tokens) --Chunk--> endpoint's own JSON

Ids and logprobs are held back as long as their text is, so that what a stop string cuts off was never sent.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from steelyard.core.request import FinishReason
from steelyard.core.sampling import SamplingParams
from steelyard.core.timed import State
from steelyard.errors import RequestFailed
from steelyard.server.admission import Place
from steelyard.server.collector import Collector, Sink, Update
from steelyard.server.errors import DeadlineExceeded
from steelyard.server.exchange import Exchange
from steelyard.server.terms import Prompt, Terms
from steelyard.text.marks import ReasoningGate
from steelyard.text.stops import StopIds
from steelyard.text.stream import TextStream
from steelyard.wire.messages import Delta, Finished, Logprob


@dataclass(slots=True)
class Chunk:
    """What to send of one choice. `finish_reason` is set in a choice's last chunk and in no other."""

    index: int
    text: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Marks around what a model thinks. `inside`: the prompt has the opening one; `stops`: stop strings count there."""

    opens: str
    closes: str
    inside: bool
    stops: bool = False

    def gate(self) -> ReasoningGate:
        return ReasoningGate(self.opens, self.closes, self.inside, self.stops)


class Choice:
    """One choice. `stream` None: ids only."""

    def __init__(self, index: int, stream: TextStream | None, stop_ids: StopIds):
        self.index = index
        self.end: Finished | None = None
        self.stop_string_keep: int | None = None
        self.num_tokens = 0
        self._stream = stream
        self._stop_ids = stop_ids
        self._num_sent = 0
        self._text_ended = False
        self._held = Chunk(index, "")

    @property
    def num_completion_tokens(self) -> int:
        """Generated tokens that count: none behind a stop string, whenever the engine was told of it."""
        assert self.end is not None, "usage asked for before the end"
        num_tokens = self.end.usage.completion_tokens
        return num_tokens if self.stop_string_keep is None else min(num_tokens, self.stop_string_keep)

    @property
    def num_reasoning_tokens(self) -> int:
        """Up to and with the closing mark."""
        gate = self._stream.gate if self._stream is not None else None
        if gate is None:
            return 0
        return gate.passed_at or (self.num_completion_tokens if gate.inside else 0)

    def feed(self, update: Update) -> Chunk | None:
        """The chunk that `update` makes ready, if any. Raises RequestFailed if the engine could not go on."""
        self.end = update.finished or self.end
        if self._text_ended:
            return None
        if update.finished is not None and update.finished.reason == FinishReason.ERROR.value:
            raise RequestFailed(update.finished.message or "the engine could not finish this request")
        ids = update.ids
        shown = ids
        if not self._stop_ids.ids.isdisjoint(ids):
            stop_token = None if update.finished is None else update.finished.stop_token
            shown = self._stop_ids.shown(ids, self.num_tokens, stop_token)
        self.num_tokens += len(ids)
        num_ready = self.num_tokens
        piece = self._stream.feed(shown) if self._stream is not None else None
        passes = piece is not None and piece.text and piece.stop_string is None and piece.num_shown == num_ready
        if passes and piece is not None and update.finished is None and not self._held.ids:
            self._num_sent = num_ready
            return Chunk(self.index, piece.text, ids, update.logprobs)
        self._held.ids += ids
        self._held.logprobs += update.logprobs
        if piece is not None:
            self._held.text += piece.text
            num_ready = piece.num_shown
            if piece.stop_string is not None:
                self.stop_string_keep = piece.keep
                return self._last(FinishReason.STOP.value, piece.stop_string, piece.keep)
        if update.finished is not None:
            return self._finish(update.finished)
        if self._stream is not None and not self._held.text:
            return None
        return self._release(num_ready)

    def _finish(self, finished: Finished) -> Chunk:
        if self._stream is not None:
            self._held.text += self._stream.finish()
        return self._last(finished.reason, self._stop_ids.reason(finished.stop_token), self.num_tokens)

    def _last(self, reason: str, stop_reason: str | int | None, keep: int) -> Chunk:
        """The last chunk: the rest of the first `keep` tokens."""
        self._text_ended = True
        chunk = self._release(keep)
        chunk.finish_reason, chunk.stop_reason = reason, stop_reason
        return chunk

    def _release(self, num_ready: int) -> Chunk:
        """All text that is there, and what is told of the first `num_ready` tokens; the others wait."""
        held, num_new = self._held, num_ready - self._num_sent
        assert num_new >= 0, "a token was sent that does not belong to the text"
        self._num_sent = num_ready
        self._held = Chunk(self.index, "", held.ids[num_new:], held.logprobs[num_new:])
        return Chunk(self.index, held.text, held.ids[:num_new], held.logprobs[:num_new])


class Run:
    """A request in the engine's hands. Use as a context: leaving it stops what still runs.

    continues  the text goes on where the prompt's ends (completions), and is not one of its own (chat)
    reasoning  what is known of the model's thinking before it begins, None: it is not told apart
    """

    def __init__(
        self,
        exchange: Exchange,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        place: Place,
        continues: bool,
        reasoning: Reasoning | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._exchange = exchange
        self._continues = continues
        self._prompts = prompts
        self._sampling = sampling
        self._place = place
        self._collector: Collector | None = None
        service = exchange.service
        stop_ids = StopIds.of(sampling, service.eos_token_ids)
        self._choices = [Choice(index, self._text_stream(), stop_ids) for index in range(len(prompts) * sampling.n)]

    async def start(self, terms: Terms) -> None:
        """Submit. Raises what the engine refuses with, before any byte of a response."""
        exchange = self._exchange
        exchange.to(State.IN_ENGINE)
        self._collector = await exchange.service.client.submit(
            self._prompts, self._sampling, terms, exchange.arrived_ns, exchange.account.opened
        )
        exchange.accepted = True

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        collector = self._collector
        if collector is None:
            return
        exchange = self._exchange
        exchange.service.client.close(collector)
        num_output = self._place.num_output_tokens = sum(choice.num_tokens for choice in self._choices)
        tokens, label = exchange.service.metrics.tenant_tokens, exchange.tenant.label
        tokens.add(sum(len(prompt.ids) for prompt in self._prompts), label, "prompt")
        tokens.add(num_output, label, "generation")

    async def stream(self, event: Callable[[Chunk], bytes]) -> None:
        """Write chunks as they come, until every choice has ended; `event`: one as bytes, none if it has no news.

        Once the stream has begun and while its reader keeps up, a delta is written where it arrives: the handler
        sleeps, and a token costs no turn of the event loop.
        """
        exchange = self._exchange

        def through(index: int, delta: Delta) -> bool:
            if not exchange.write_now(b""):
                return False
            try:
                chunk = self._feed(Update(index, delta.ids, delta.logprobs or []))
                if chunk is not None and (written := event(chunk)):
                    exchange.write_now(written)
            except Exception as error:
                assert self._collector is not None
                self._collector.fail(error)
            return True

        async for chunks in self.chunks(through):
            if written := b"".join(map(event, chunks)):
                await exchange.write(written)

    def _feed(self, update: Update) -> Chunk | None:
        """The chunk that an update makes ready; a stop string in it ends the choice in the engine too."""
        choice, collector = self._choices[update.index], self._collector
        assert collector is not None
        chunk = choice.feed(update)
        if chunk is not None and choice.end is None and choice.stop_string_keep is not None:
            self._exchange.service.client.stop_choice(collector, choice.index, choice.stop_string_keep)
        return chunk

    async def chunks(self, sink: Sink | None = None) -> AsyncIterator[list[Chunk]]:
        """Chunks as they come, at most one a choice at a time, until every choice has ended; but those `sink` takes."""
        collector = self._collector
        assert collector is not None, "chunks asked for before start"
        client = self._exchange.service.client
        num_open = len(self._choices)
        while num_open:
            updates = await collector.take(sink)
            self._check_deadline(updates)
            client.resume(collector)
            self._place.release(served=True)
            if collector.ended_ns:
                self._exchange.to(State.DETOKENIZE, collector.ended_ns)
            ready: list[Chunk] = []
            for update in updates:
                if chunk := self._feed(update):
                    ready.append(chunk)
                num_open -= update.finished is not None
            if collector.ended_ns:
                self._exchange.to(State.STREAM)
            if ready:
                yield ready

    def _check_deadline(self, updates: Sequence[Update]) -> None:
        """A deadline that passed before any token is an error; later it is how a choice ends."""
        late = all(u.finished is not None and u.finished.reason == FinishReason.DEADLINE.value for u in updates)
        if late and not any(update.ids for update in updates) and not any(c.num_tokens for c in self._choices):
            raise DeadlineExceeded("the request's deadline passed before its first token was computed")

    async def whole(self) -> list[Chunk]:
        """Every choice in one chunk, in order of their numbers, once all have ended."""
        joined: dict[int, Chunk] = {}
        async for chunks in self.chunks():
            for chunk in chunks:
                into = joined.setdefault(chunk.index, Chunk(chunk.index, ""))
                into.text += chunk.text
                into.ids += chunk.ids
                into.logprobs += chunk.logprobs
                into.finish_reason, into.stop_reason = chunk.finish_reason, chunk.stop_reason
        return [joined[index] for index in sorted(joined)]

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of all prompts and choices together; and what --kv-window left of a longer context."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self._prompts)
        completion_tokens = sum(choice.num_completion_tokens for choice in self._choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        seen = self._exchange.service.seen_tokens
        longest = max(len(self.prompt_of(c.index).ids) + c.num_completion_tokens for c in self._choices)
        if seen is not None and longest > seen:
            usage["context_bounded_to"] = seen
        if self._reasoning is not None:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
        if self._exchange.service.config.enable_prompt_tokens_details:
            firsts = (choice.end for choice in self._choices[:: self._sampling.n])
            usage["prompt_tokens_details"] = {"cached_tokens": sum(end.usage.cached_tokens for end in firsts if end)}
        return usage

    @property
    def n(self) -> int:
        """Choices a prompt."""
        return self._sampling.n

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self._prompts[index // self._sampling.n]

    def prompt_logprobs(self, index: int) -> list[Logprob]:
        """Of choice `index`'s prompt, once it has ended; empty if not asked for."""
        end = self._choices[index].end
        return list(end.prompt_logprobs or ()) if end is not None else []

    def pooled(self, index: int) -> array[float]:
        """The vector of choice `index`, once it has ended. Raises RequestFailed if the engine gave none."""
        end = self._choices[index].end
        if end is None or not end.pooled:
            raise RequestFailed("the request ended before its vector was computed")
        return array("f", end.pooled)

    def _text_stream(self) -> TextStream | None:
        tokenizer = self._exchange.service.prompts.tokenizer
        if tokenizer is None:
            return None
        gate = self._reasoning.gate() if self._reasoning is not None else None
        return TextStream.for_request(tokenizer, self._sampling, continues=self._continues, gate=gate)


def max_output(sampling: SamplingParams, num_prompts: int = 1) -> int | None:
    """The most tokens a request's choices can have together; None if it set no limit."""
    return None if sampling.max_tokens is None else sampling.max_tokens * sampling.n * num_prompts
