"""Bounded KV: a model without windows is held to its latest positions and its first ones. Says what that means.

    position   0 .. S-1 | given back ..................... | p-N+1 .. p        what the query at p sees
               sinks    |                                  | window

Xiao et al. 2024, "Efficient streaming language models with attention sinks", with one difference: they number the
positions inside the cache, here every key keeps the position it was rotated to when it was written. Distances then stay
within what the model was trained for, since --max-model-len does; KV of equal tokens is equal, in any chunks, and may
be shared by prefix; and nothing is rotated again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from steelyard.models.config import DecoderConfig
from steelyard.models.families import decoder_config
from steelyard.plan.shape import ModelShape

DEFAULT_SINKS = 4
"""What the paper found to be enough."""
_log = logging.getLogger(__name__)


def model_shape(config: Mapping[str, Any], kv_window: int | None, kv_sinks: int | None) -> ModelShape:
    """The model with every layer bounded; `kv_window` None: as it is. Raises StartError for one with windows."""
    shape = ModelShape.from_config(dict(config))
    return shape if kv_window is None else shape.bounded(kv_window, sinks_of(kv_sinks))


def bounded_config(config: Mapping[str, Any], kv_window: int | None, kv_sinks: int | None) -> DecoderConfig:
    """The same for the decoder; says so."""
    decoder = decoder_config(config)
    if kv_window is None:
        return decoder
    sinks = sinks_of(kv_sinks)
    _log.warning(
        "--kv-window %d: attention sees the latest %d tokens and the first %d, whatever lies between is forgotten; "
        "answers about it will be wrong (steelyard quality says how far)",
        *(kv_window, kv_window, sinks),
    )
    return decoder.bounded(kv_window, sinks)


def sinks_of(kv_sinks: int | None) -> int:
    return DEFAULT_SINKS if kv_sinks is None else kv_sinks
