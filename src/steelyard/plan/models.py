"""From what a user calls a model to its shape: a directory, a config or GGUF file, a preset, or a hub id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steelyard.checkpoint.entry import Checkpoint, TensorEntry
from steelyard.checkpoint.find import EMBEDDED, open_checkpoint
from steelyard.errors import CheckpointError
from steelyard.plan.formats import KINDS, WeightFormat, weight_format
from steelyard.plan.presets import PRESETS, preset_config, preset_name
from steelyard.plan.shape import ModelShape

_ENDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model to plan for.

    stored        how its weights are stored, as a format
    stored_bytes  bytes of its tensors where there are weights on disk; None: only a config is known
    source        where the shape comes from, for the reader
    """

    shape: ModelShape
    stored: WeightFormat
    stored_bytes: int | None
    source: str


def find_model(model: str) -> PlannedModel:
    """Find a model by path, by preset name, or as a hub id (whose files may be downloaded, but no weights).

    Raises CheckpointError naming what was tried, or the field of a config at fault.
    """
    path = Path(model)
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))
        return _from_checkpoint(open_checkpoint(model, "auto" if has_weights else "dummy"))
    if path.is_file():
        return _from_checkpoint(open_checkpoint(model, "auto" if path.suffix == ".gguf" else "dummy"))
    if model == EMBEDDED:
        with suppress(CheckpointError):  # its package is not installed: the preset has the same shape
            return _from_checkpoint(open_checkpoint(model))
    if preset_name(model):
        shape = ModelShape.from_config(preset_config(model))
        return PlannedModel(shape, weight_format(shape.native_format), None, f"preset {shape.name}")
    try:
        return _from_checkpoint(open_checkpoint(model, "dummy"))
    except CheckpointError as error:
        if error.param:
            raise
        raise CheckpointError(f"{error.message}. Presets are {', '.join(PRESETS)}", param="model") from error


def _from_checkpoint(checkpoint: Checkpoint) -> PlannedModel:
    shape = ModelShape.from_config(checkpoint.config, checkpoint.name)
    source = str(checkpoint.path)
    if not checkpoint.tensors:
        return PlannedModel(shape, weight_format(shape.native_format), None, source)
    stored_bytes = sum(t.nbytes for t in checkpoint.tensors.values())
    return PlannedModel(shape, _stored_format(checkpoint.tensors), stored_bytes, source)


def _stored_format(tensors: Mapping[str, TensorEntry]) -> WeightFormat:
    """The format whose kinds hold most elements of each sort: layers' matrices, ends, vectors."""
    sorts: dict[str, Counter[str]] = {"body": Counter(), "ends": Counter(), "vectors": Counter()}
    for name, tensor in tensors.items():
        if len(tensor.shape) < 2:
            sort = "vectors"
        else:
            sort = "ends" if any(end in name for end in _ENDS) else "body"
        kind = {"I8": "I8", "F8_E4M3": "F8", "F8_E5M2": "F8"}.get(tensor.kind, tensor.kind)
        if kind not in KINDS:
            raise CheckpointError(f"{tensor.source_name}: kind {tensor.kind} has no known size", param="dtype")
        sorts[sort][kind] += tensor.nbytes
    kinds = {sort: found.most_common(1)[0][0] for sort, found in sorts.items() if found}
    body = kinds.get("body", "BF16")
    return WeightFormat(f"{body} as stored", body, kinds.get("ends", body), kinds.get("vectors", body))
