"""The front ends of one server and the process that started them: questions and answers over a UNIX socket.

    front end 0 --ask--> hub --ask--> front ends 1, 2, ...; their answers, in a list, go back to front end 0
                         hub --tell("engine_died")--> all

A question is a word and a plain value; what each means is `answer` here and `Hub.answer` there. One that is not
answered in time counts as not answered: a front end that hangs holds up no other. Where something is looked for,
though, silence is no "no": what the silent one may have is not said to be missing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from steelyard.errors import Overloaded
from steelyard.server.ledger import as_json, brief
from steelyard.server.metrics import Metrics
from steelyard.server.response_store import ResponseNotFound
from steelyard.server.service import Service

ANSWER_S = 2.0
SNAPSHOT_S = 1.0
"""How often the hub remembers what front ends have counted: so much at most is lost with one that dies."""
_SEARCHES = frozenset({"request", "response", "forget_response"})
"""Questions of which one front end at most has the answer."""
_LENGTH_BYTES = 4
_MAX_BYTES = 2**30

_log = logging.getLogger("steelyard.server")


class Link:
    """One end of a connection. `answer` is called for each question that comes."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[str, Any], Awaitable[Any]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the other end closes."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
                if length > _MAX_BYTES:
                    return
                number, what, value = msgspec.msgpack.decode(await self._reader.readexactly(length))
                if what is None:
                    future = self._asked.pop(number, None)
                    if future is not None and not future.done():
                        future.set_result(value)
                else:
                    task = asyncio.get_running_loop().create_task(self._reply(number, what, value))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.close()

    async def ask(self, what: str, value: Any = None) -> Any:
        """The other end's answer. Raises OSError (ConnectionError, TimeoutError) if there is none."""
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(number, what, value)
            async with asyncio.timeout(ANSWER_S):
                return await future
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        self._writer.close()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionResetError("the other end has closed"))

    def _send(self, number: int, what: str | None, value: Any) -> None:
        if self._writer.is_closing():
            raise ConnectionResetError("the other end has closed")
        frame = msgspec.msgpack.encode((number, what, value))
        self._writer.write(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame)

    async def _reply(self, number: int, what: str, value: Any) -> None:
        try:
            answer = await self._answer(what, value)
        except Exception:
            _log.exception("a question of a sibling, %s, failed", what)
            answer = None
        try:
            self._send(number, None, answer)
        except ConnectionError:
            return


class Hub:
    """The end of the process that started the front ends. `on_listening` gets the number of each that listens."""

    def __init__(self, on_listening: Callable[[int], None]) -> None:
        self._on_listening = on_listening
        self._links: dict[int, Link] = {}
        self._counted: dict[int, Any] = {}
        self._retired = Metrics()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def open(self, path: str) -> None:
        self._server = await asyncio.start_unix_server(self._connected, path)
        self._tasks.append(asyncio.get_running_loop().create_task(self._remember()))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self._links.values()):
            link.close()

    async def tell(self, what: str, value: Any) -> None:
        """Say something to every front end, and wait until each has heard it."""
        await self._gather(what, value, -1)

    def lost(self, index: int) -> None:
        """A front end has died: what it had counted stays counted."""
        self._links.pop(index, None)
        counted = self._counted.pop(index, None)
        if counted is not None:
            self._retired.add(counted)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        index = -1

        async def answer(what: str, value: Any) -> Any:
            nonlocal index
            if what == "listening":
                index = int(value)
                self._links[index] = link
                self._on_listening(index)
                return None
            return await self.answer(index, what, value)

        link = Link(reader, writer, answer)
        await link.run()
        if self._links.get(index) is link:
            del self._links[index]

    async def answer(self, index: int, what: str, value: Any) -> list[Any] | None:
        """What all front ends but `index` say; of what is counted, also what is remembered of those that are gone.

        None: something was looked for, nobody who answered has it, and not all did.
        """
        if what != "metrics":
            asked = self._links.keys() - {index}
            found = list((await self._gather(what, value, index)).values())
            missed = what in _SEARCHES and len(found) < len(asked) and not any(found)
            return None if missed else found
        answers = await self._gather(what, None, index)
        self._counted |= {i: answer for i, answer in answers.items() if i in self._links}
        if index in self._links and value is not None:
            self._counted[index] = value  # it shows them: should it die, they stay
        return [self._retired.snapshot(), *(counted for i, counted in self._counted.items() if i != index)]

    async def _gather(self, what: str, value: Any, but: int) -> dict[int, Any]:
        asked = {index: link for index, link in self._links.items() if index != but}
        answers = await asyncio.gather(*(link.ask(what, value) for link in asked.values()), return_exceptions=True)
        return {i: answer for i, answer in zip(asked, answers) if not isinstance(answer, BaseException)}

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(SNAPSHOT_S)
            answers = await self._gather("metrics", None, -1)
            self._counted |= {i: answer for i, answer in answers.items() if i in self._links}


async def join(path: str, index: int, service: Service, on_told: Callable[[str, Any], None]) -> Link:
    """Connect front end `index` to its hub: from here on it answers its siblings, and `service` can ask them."""

    async def answered(what: str, value: Any) -> Any:
        if what in _ANSWERS:
            return _ANSWERS[what](service, value)
        on_told(what, value)
        return None

    async def others(what: str, value: Any) -> list[Any]:
        try:
            found = await link.ask(what, value)
        except OSError as error:
            _log.warning("the other front ends do not answer %s: %r", what, error)
            found = None
        if found is None and what in _SEARCHES:
            raise Overloaded(
                "it may be kept by another front end of this server, which does not answer now: ask again",
                retry_after_s=ANSWER_S,
            )
        return [answer for answer in found or () if answer is not None]

    reader, writer = await asyncio.open_unix_connection(path)
    link = Link(reader, writer, answered)
    service.ask_others = others
    return link


def _metrics(service: Service, value: Any) -> Any:
    return service.metrics.snapshot()


def _request(service: Service, value: Any) -> Any:
    record = service.ledgers.get(*value)
    return None if record is None else as_json(record)


def _requests(service: Service, value: Any) -> Any:
    return [brief(record) for record in service.ledgers.last(*value)]


def _response(service: Service, value: Any) -> Any:
    try:
        kept = service.responses.get(*value)
    except ResponseNotFound:
        return None
    return msgspec.to_builtins(kept.turns), kept.answer


def _forget_response(service: Service, value: Any) -> Any:
    try:
        service.responses.delete(*value)
    except ResponseNotFound:
        return None
    return True


_ANSWERS: dict[str, Callable[[Service, Any], Any]] = {
    "metrics": _metrics,
    "request": _request,
    "requests": _requests,
    "response": _response,
    "forget_response": _forget_response,
}
