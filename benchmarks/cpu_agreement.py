"""How near a quantised model's packed weights come to its float32 self: top-1 agreement and perplexities over a text.

python benchmarks/cpu_agreement.py MODEL_FILE      one line of JSON; run by benchmarks/cpu.py
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from steelyard.core.sampling import SamplingParams
from steelyard.core.step import TokenLogprobs
from steelyard.llm import LLM

NUM_TOKENS = 400
ROWS = 4  # tokens a step: few enough for the packed forms


def predictions(path: str, dtype: str) -> list[TokenLogprobs]:
    """Of each token of the text, from those before it."""
    text = Path(__file__).parents[1].joinpath("docs", "architecture.md").read_text()
    llm = LLM(path, dtype=dtype, max_num_batched_tokens=ROWS, num_gpu_blocks_override=64)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    output = llm.generate([llm.encode(text)[:NUM_TOKENS]], sampling)[0]
    return [p for p in output.prompt_logprobs or () if p is not None]


def main() -> None:
    """Compare --dtype auto with float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", metavar="MODEL_FILE")
    path = parser.parse_args().path
    exact, packed = (predictions(path, dtype) for dtype in ("float32", "auto"))
    same = sum(a.top[0][0] == b.top[0][0] for a, b in zip(exact, packed, strict=True))
    perplexities = [math.exp(-sum(p.logprob for p in some) / len(some)) for some in (exact, packed)]
    found = {
        "positions": len(exact),
        "top1_agreement": same / len(exact),
        "perplexity_float32": perplexities[0],
        "perplexity_packed": perplexities[1],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
