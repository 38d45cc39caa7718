"""`LLM`: a tokenizer and an engine in this process, for prompts in lists. No server, no sockets, one thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from steelyard.checkpoint.find import open_checkpoint
from steelyard.config import EngineConfig
from steelyard.core.sampling import SamplingParams, StructuredOutputs
from steelyard.core.step import TokenLogprobs
from steelyard.engine import offline
from steelyard.engine.build import build_engine
from steelyard.engine.engine import Engine
from steelyard.errors import InvalidRequest
from steelyard.grammar import source
from steelyard.text.chat import ChatTemplate
from steelyard.text.stops import StopIds
from steelyard.text.stream import TextStream
from steelyard.text.tokenizer import Tokenizer
from steelyard.wire.messages import Control, Delta, Deltas, Finished, FromEngine, Logprob, Stop, Submit

Message = Mapping[str, Any]
Prompt = str | list[int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    text           without what ended it, unless `include_stop_str_in_output`
    token_ids      the id that ended it included; cut at a stop string
    finish_reason  stop, length, or error (then `error` says why)
    stop_reason    the stop string, or the id of `stop_token_ids`, that ended it; None for end of text and others
    logprobs       one a token, if asked for
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its choices in order.

    cached_tokens   prompt tokens whose KV was in the prefix cache
    preemptions     how often the first choice lost its KV and had it computed again
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text to show now; `finish_reason` is set in the last piece of an answer and in no other."""

    text: str
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a `generate` or `chat` is, after each step."""

    num_prompts: int
    num_finished: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt ready to run. `continues`: the answer goes on in the prompt's text, and is not one of its own."""

    prompt: str | None
    ids: list[int]
    sampling: SamplingParams
    continues: bool = True


class LLM:
    """A model that completes prompts. Options are EngineConfig's fields.

    Raises StartError (CheckpointError for the model's files) if it cannot start, with what to do about it.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._start(EngineConfig(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        self.config = config
        checkpoint = open_checkpoint(config.model, "dummy" if config.script else config.load_format)
        self._tokenizer: Tokenizer | None = None
        bos_token = eos_token = None
        if not self.config.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_checkpoint(checkpoint)
            bos_token, eos_token = self._tokenizer.bos_token, self._tokenizer.eos_token
        self._template = ChatTemplate(checkpoint.chat_template, bos_token, eos_token)
        self._engine = build_engine(self.config, checkpoint=checkpoint)
        self._num_submitted = 0
        self._checker: source.GrammarChecker | None = None

    @property
    def engine(self) -> Engine:
        """The loop itself, for measurements."""
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises InvalidRequest under skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequest("this LLM was made with skip_tokenizer_init: give token ids, take token ids")
        return self._tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget the KV of all finished prompts."""
        self._engine.control(Control("drop_cache"))

    def apply_chat_template(self, messages: Sequence[Message], **kwargs: Any) -> str:
        """The prompt's text, special tokens in it. Raises InvalidRequest where the template refuses."""
        return self._template.render(messages, **kwargs)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text or token ids); results in the order of the prompts.

        Sampling parameters are one for all, or one a prompt. Raises InvalidRequest, before anything is computed, if
        any prompt cannot be served.
        """
        pairs = _paired(_listed(prompts), sampling_params)
        return self.complete([self.job(prompt, sampling) for prompt, sampling in pairs], progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[Progress], None] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; each is rendered with the model's chat template."""
        talks: list[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        pairs = _paired(talks, sampling_params)
        return self.complete([self.chat_job(talk, s, **template_kwargs) for talk, s in pairs], progress=progress)

    def job(self, prompt: Prompt, sampling: SamplingParams) -> Job:
        """A text or token ids, to be completed."""
        text = prompt if isinstance(prompt, str) else None
        return Job(text, self.encode(prompt) if isinstance(prompt, str) else list(prompt), sampling)

    def chat_job(self, messages: Sequence[Message], sampling: SamplingParams, **template_kwargs: Any) -> Job:
        """A conversation, to be answered."""
        text = self.apply_chat_template(messages, **template_kwargs)
        return Job(text, self.encode(text, False), sampling, continues=False)

    def complete(
        self, jobs: Sequence[Job], *, progress: Callable[[Progress], None] | None = None
    ) -> list[RequestOutput]:
        """Run jobs of any kind together; results in their order. Raises PromptRefused with the number of a bad one."""
        choices: dict[str, list[_Choice]] = {}
        submits = [self._submit(job) for job in jobs]
        for submit, job in zip(submits, jobs):
            choices[submit.id] = [self._choice(job) for _ in range(job.sampling.n)]
        num_finished = num_tokens = 0
        for messages in offline.run(self._engine, submits):
            num_tokens += sum(len(i.ids) for m in messages if isinstance(m, Deltas) for i in m.items)
            num_finished += self._hear(messages, choices)
            if progress is not None:
                progress(Progress(len(jobs), num_finished, num_tokens))
        return [_request_output(job, choices[submit.id]) for job, submit in zip(jobs, submits)]

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[Piece, None, None]:
        """Answer one conversation piece by piece (n = 1). Closing the iterator stops the answer."""
        job = self.chat_job(messages, replace(sampling_params or SamplingParams(), n=1))
        choice, submit = self._choice(job), self._submit(job)
        shown = 0
        for messages_of_step in offline.run(self._engine, [submit]):
            self._hear(messages_of_step, {submit.id: [choice]})
            piece, shown = choice.text[shown:], len(choice.text)
            if piece or choice.end is not None:
                yield Piece(piece, None if choice.end is None else choice.output(0).finish_reason)

    # inside

    def _submit(self, job: Job) -> Submit:
        self._num_submitted += 1
        grammar, sampling = self._grammar(job.sampling.structured_outputs), job.sampling
        if grammar:
            sampling = replace(sampling, structured_outputs=None)
        return Submit(f"offline-{self._num_submitted}", job.ids, sampling, grammar=grammar)

    def _grammar(self, asked: StructuredOutputs | None) -> str:
        """Checked, and the engine knows the vocabulary; "" for free text. Raises InvalidRequest."""
        if asked is None:
            return ""
        [(kind, value)] = source.kinds_given(asked)
        grammar = source.from_kind(kind, value)
        self._checker = self._checker or source.GrammarChecker()
        self._checker.check(grammar, "structured_outputs")
        self._engine.grammars.set_vocabulary(self.tokenizer.to_json(), sorted(self._engine.options.eos_token_ids))
        return grammar

    def _choice(self, job: Job) -> _Choice:
        stop_ids = StopIds.of(job.sampling, self._engine.options.eos_token_ids)
        if self._tokenizer is None:
            if job.sampling.stop:
                raise InvalidRequest("stop: without a tokenizer there is no text; use stop_token_ids", param="stop")
            return _Choice(None, stop_ids)
        return _Choice(TextStream.for_request(self._tokenizer, job.sampling, job.continues), stop_ids)

    def _hear(self, messages: Sequence[FromEngine], choices: Mapping[str, list[_Choice]]) -> int:
        """Take a step's messages in; returns how many prompts they finished. Stops choices at their stop strings."""
        ends = {(m.id, m.index): m for m in messages if isinstance(m, Finished)}
        for item in (item for m in messages if isinstance(m, Deltas) for item in m.items):
            key = (item.id, item.index)
            keep = choices[item.id][item.index].feed(item, ends.get(key))
            if keep is not None and key not in ends:
                stopped = self._engine.stop(Stop(item.id, item.index, "stop_string", keep))
                ends |= {(m.id, m.index): m for m in stopped if isinstance(m, Finished)}
        for (id, index), finished in ends.items():
            choices[id][index].finish(finished)
        return sum(all(c.end is not None for c in choices[id]) for id in {id for id, _ in ends})


class _Choice:
    """One choice while it grows. `stream` None: ids only."""

    def __init__(self, stream: TextStream | None, stop_ids: StopIds) -> None:
        self.text = ""
        self.end: Finished | None = None
        self._stream = stream
        self._stop_ids = stop_ids
        self._ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._stop_string: str | None = None
        self._keep = -1

    def feed(self, delta: Delta, end: Finished | None) -> int | None:
        """Take new tokens; `end` if they are the last. Returns how many tokens to keep when a stop string is found."""
        if self._stop_string is not None:
            return None
        shown = self._stop_ids.shown(delta.ids, len(self._ids), None if end is None else end.stop_token)
        self._ids += delta.ids
        self._logprobs += delta.logprobs or []
        if self._stream is None:
            return None
        piece = self._stream.feed(shown)
        self.text += piece.text
        if piece.stop_string is None:
            return None
        self._stop_string, self._keep = piece.stop_string, piece.keep
        return piece.keep

    def finish(self, end: Finished) -> None:
        self.end = end
        if self._stream is not None:
            self.text += self._stream.finish()

    def output(self, index: int) -> CompletionOutput:
        end = self.end
        assert end is not None, "a choice that has not ended"
        count = len(self._ids) if self._stop_string is None else self._keep
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self._ids[:count]),
            finish_reason=end.reason if self._stop_string is None else "stop",
            stop_reason=self._stop_string or self._stop_ids.reason(end.stop_token),
            logprobs=None if self._stop_ids.sampling.logprobs is None else _logprobs(self._logprobs[:count]),
            error=end.message or None,
        )


def _request_output(job: Job, choices: Sequence[_Choice]) -> RequestOutput:
    first = choices[0].end
    assert first is not None
    return RequestOutput(
        prompt=job.prompt,
        prompt_token_ids=tuple(job.ids),
        outputs=tuple(choice.output(index) for index, choice in enumerate(choices)),
        cached_tokens=first.usage.cached_tokens,
        prompt_logprobs=None if first.prompt_logprobs is None else _logprobs(first.prompt_logprobs),
        preemptions=first.usage.preemptions,
    )


def _logprobs(values: Sequence[Logprob]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value.logprob, tuple(value.top)) for value in values)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, and a list of numbers, is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _paired(
    items: Sequence[T], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[T, SamplingParams]]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [(item, sampling_params or SamplingParams()) for item in items]
    if len(sampling_params) != len(items):
        raise InvalidRequest(
            f"sampling_params: {len(sampling_params)} given for {len(items)} prompts; give one for all or one a prompt",
            param="sampling_params",
        )
    return list(zip(items, sampling_params))
