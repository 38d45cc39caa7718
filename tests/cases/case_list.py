"""Which of the publicly reported faults have a case here, and why the others have none: nothing is left out in silence.

The ids are the numbers of a list of faults that users of serving engines have reported; each test says its own.
"""

from __future__ import annotations

import re
from pathlib import Path

_IDS = """
    S01 S03 S05 S07 S09 S11 S13 S15 S17 S19 S21 S23 S25 S27 S29
    K01 K03 K05 K07 K09 K11 K13 K15 K17 K19 K21 K23 K25 K27
    D01 D03 D05 D07 D09 D11 D13 D15 D17 D19 D21
    P01 P03 P05 P07 P09 P11 P13 P15 P17
    A01 A03 A05 A07 A09 A11 A13 A15
    C01 C03 C05
    M01 M03 M05 M07 M09
    B01 B03 B05 B07 B09
"""
CASES = tuple(_IDS.split())

INAPPLICABLE = {
    "S17": "there is no chunk size apart from a step's token budget: no two numbers that could disagree",
}
"""Case: why it cannot arise here."""

ELSEWHERE = {
    "K25": "tests/equality/test_swap.py: requests that are swapped and resumed answer as if nothing had happened",
    "M07": "tests/server/test_ledger.py: the server's named parts sum to its time, and that lies within the client's",
    "B09": "tests/bench/test_sweep.py: runs far apart are not one number",
    "B07": "tests/bench/test_record.py: the server's usage counts",
    "B05": "tests/bench/test_workload.py: a shared prefix comes on top of the input",
    "B03": "tests/bench/test_load.py: the wait for the client's own cap counts",
    "B01": "tests/bench/test_record.py: the first token's delay is in no gap",
    "D09": "tests/server/test_structured.py: reasoning and content, streamed and whole",
    "D17": "tests/server/test_structured.py: one logprob a token in both parts",
    "D19": "tests/server/test_structured.py: stop strings and reasoning",
    "S27": "tests/equality/test_families.py and tests/scheduler/test_public_cases.py: windows free blocks",
    "K17": "tests/test_llm.py: results in the order of the prompts, both times",
    "D11": "tests/server/test_completions.py: a failed first token is an HTTP error",
    "A05": "tests/server/test_completions.py, test_chat.py: both shapes of logprobs",
    "M05": "tests/server/test_health.py: one time to first token a request",
    "M09": "tests/server/test_health.py: exposed names equal the documented ones",
    "C03": "tests/server/test_faults.py: 500 streams of a killed client, and M03 here",
    "A15": "tests/server/test_disconnect.py: what was abandoned is counted when the engine has ended it",
}
"""Case: where it is held when not black-box in this folder."""


def ids_tested() -> set[str]:
    """Ids in the names of tests in this folder: test_s01_..., test_p01_p03_..."""
    found: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M):
            found |= {case.upper() for case in re.findall(r"(?<=_)[a-z]\d\d(?=_)", name)}
    return found
