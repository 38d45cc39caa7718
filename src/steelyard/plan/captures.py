"""Which steps a GPU's runner captures as graphs, by size: the runner captures by this rule and plans count by it.

    decode  R rows of one token        row buckets up to max_num_seqs
    mixed   T tokens of any rows       token buckets, while launching a step takes longer than running it

A step runs in the smallest bucket that holds it; the rest is padding. Each row bucket has two more graphs, for the
head of its sampled rows: by temperature alone, or with cuts.
"""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.plan.shape import ModelShape

LAYER_LAUNCH_S = 850e-6
"""Host time to launch one layer from Python, measured beside an H200: a step of 28 layers took 24 ms."""
FLOPS = 600e12


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes. `mixed` empty: steps with prefills are never captured."""

    decode: tuple[int, ...]
    mixed: tuple[int, ...]

    @classmethod
    def of(cls, max_rows: int, max_tokens: int, num_layers: int, layer_elements: int) -> Buckets:
        """`layer_elements`: weights of all layers, which set how long a token takes."""
        launch_bound = int(num_layers * LAYER_LAUNCH_S * FLOPS / (2 * max(layer_elements, 1)))
        limit = min(max_tokens, max(launch_bound, 2 * max_rows))
        mixed = [size for size in _sizes(limit, 32) if size >= 32 or size == limit]
        return cls(tuple(_sizes(max_rows, 8)), tuple(mixed))

    @classmethod
    def of_model(cls, shape: ModelShape, max_rows: int, max_tokens: int) -> Buckets:
        """The buckets of a model whose steps have at most so many rows and tokens."""
        return cls.of(max_rows, max_tokens, shape.num_layers, sum(layer.parameters for layer in shape.layers))

    @property
    def num_graphs(self) -> int:
        """Graphs that a start captures."""
        return len(self.mixed) + 3 * len(self.decode)


NOTHING = Buckets((), ())
"""Without graphs."""


def _sizes(largest: int, fine: int) -> list[int]:
    """1, 2, 4 .. `fine`, then eight steps an octave at multiples of `fine`, then `largest` itself."""
    sizes = [2**k for k in range(20) if 2**k < min(fine, largest)]
    size = fine
    while size < largest:
        sizes.append(size)
        size += max(fine, 2 ** (size.bit_length() - 4))
    return [*sizes, largest]
