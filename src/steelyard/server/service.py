"""What every route needs, in one value: the engine's client, prompts, limits, metrics. Made once by `create_app`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from steelyard.config import ServerConfig
from steelyard.core.sampling import SamplingParams
from steelyard.errors import EngineDead, InvalidRequest
from steelyard.server.admission import Admission
from steelyard.server.client import EngineClient
from steelyard.server.errors import ModelNotFound, ShuttingDown
from steelyard.server.metrics import Metrics
from steelyard.server.prompts import Prompts
from steelyard.wire.messages import Ready

log = logging.getLogger("steelyard.server")


@dataclass(slots=True)
class Service:
    """The server's shared state.

    eos_token_ids  ids that end a text unless ignore_eos
    draining       True from the first signal to stop: what runs goes on, nothing new is taken
    num_in_flight  HTTP requests for tokens that have not been answered to the end
    """

    config: ServerConfig
    client: EngineClient
    prompts: Prompts
    metrics: Metrics
    model_name: str
    eos_token_ids: frozenset[int]
    clock_ns: Callable[[], int]
    created_s: int
    admission: Admission = field(init=False)
    draining: bool = False
    num_in_flight: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self.config.max_num_queued_reqs, self.config.max_num_queued_tokens, self.clock_ns)

    def check_admits(self) -> None:
        """Raises ShuttingDown or EngineDead if a new request cannot be taken."""
        if self.draining:
            raise ShuttingDown("the server is shutting down and takes no new requests")
        if self.client.death is not None:
            raise EngineDead(self.client.death)

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless `name` is what is served here, or not given."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"model: {name[:200]!r} is not served here, {self.model_name!r} is", param="model")

    def unhealthy(self) -> str | None:
        """Why a request sent now would get no token, or None."""
        return "the server is shutting down" if self.draining else self.client.unhealthy()

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises InvalidRequest for token ids outside the vocabulary, and for stop strings where no text is made."""
        sampling.check_vocab(self._ready.vocab_size)
        if sampling.stop and self.prompts.tokenizer is None:
            raise InvalidRequest("stop: this server makes token ids, not text; use stop_token_ids", param="stop")

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of one request: what context and KV pool allow."""
        ready = self._ready
        return min(ready.max_model_len, ready.block_size * min(ready.num_blocks))

    def wall_s(self) -> int:
        """Seconds since 1970, for `created`; the only wall clock here."""
        return int(time.time())

    @property
    def _ready(self) -> Ready:
        ready = self.client.info
        assert ready is not None, "the server takes requests only after the engine is ready"
        return ready
