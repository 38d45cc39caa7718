"""The workloads every engine is measured on, by name: prompts of random token ids, lengths fixed or drawn.

The file beside this one has the cases and two model configs; a drawing is seeded by the case's name, so that every
engine gets the same lengths and ids.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.errors import InvalidRequest
from steelyard.plan.presets import PRESETS, preset_config, preset_name

FILE = Path(__file__).with_name("workloads.json")
RESERVED_IDS = 1000
"""The last ids of a vocabulary are no ordinary text."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload. `lens`: (prompt tokens, output tokens) of each request, all submitted at once."""

    name: str
    lens: tuple[tuple[int, int], ...]

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids, the same for a name and a vocabulary."""
        rng = random.Random(f"{self.name}/ids")
        top = max(vocab_size - RESERVED_IDS, 2)
        return [[rng.randrange(top) for _ in range(num_prompt)] for num_prompt, _ in self.lens]

    @property
    def output_tokens(self) -> int:
        return sum(num_output for _, num_output in self.lens)

    def scaled(self, share: float) -> Case:
        """The first `share` of the requests; at least one."""
        return Case(self.name, self.lens[: max(1, round(len(self.lens) * share))])


def find_case(name: str) -> Case:
    """A case by its name, or by a beginning that only it has. Raises InvalidRequest with the names there are."""
    known = {c["name"]: c for kind in ("offline", "single") for c in _file()[kind]}
    found = [n for n in known if n == name] or [n for n in known if n.startswith(name)]
    if len(found) != 1:
        raise InvalidRequest(f"workload {name!r}: choose one of {', '.join(known)}", param="workload")
    row = known[found[0]]
    rng = random.Random(found[0])
    lens = [(_length(rng, row["input"]), _length(rng, row["output"])) for _ in range(row.get("requests", 1))]
    return Case(found[0], tuple(lens))


def case_names(kind: str) -> list[str]:
    """Names of all `offline` or `single` cases."""
    return [row["name"] for row in _file()[kind]]


def model_config(name: str) -> dict[str, Any] | None:
    """The config of a model of the file, or of a preset of the planner; None if neither has the name."""
    own = _file()["models"].get(name)
    if own is not None:
        return dict(own)
    return preset_config(name) if preset_name(name) in PRESETS else None


def write_config(name: str, folder: Path) -> Path:
    """A directory with nothing but the named model's config.json. Raises InvalidRequest for an unknown name."""
    config = model_config(name)
    if config is None:
        known = ", ".join([*_file()["models"], *PRESETS])
        raise InvalidRequest(f"model {name!r} has no config here: choose one of {known}", param="model")
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    return place


def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def _length(rng: random.Random, value: int | list[int]) -> int:
    return value if isinstance(value, int) else rng.randint(*value)
