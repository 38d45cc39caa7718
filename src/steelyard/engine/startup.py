"""What the start took and what it left: seconds of each phase beside the device's memory, as a table in the log."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from steelyard.core.step import MemoryTerms, Runner
from steelyard.ledger.memory import MAX_UNACCOUNTED, is_accounted_for, start_table, unaccounted_share

_log = logging.getLogger(__name__)


def process_age_s() -> float | None:
    """Seconds since this process began, None where the system does not say: on a start's first line, its imports."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def start_seconds(runner: Runner, imported_s: float | None, built_s: float) -> dict[str, float]:
    """Phases in order, `other` last: what of `built_s`, all but the imports, the runner does not name."""
    named: dict[str, float] = getattr(runner, "start_seconds", {})
    before = {} if imported_s is None else {"import": imported_s}
    return {**before, **named, "other": max(0.0, built_s - sum(named.values()))}


def say_memory(terms: MemoryTerms, seconds: dict[str, float]) -> None:
    """The table, and a warning if too much of the device is in no term."""
    _log.info("the device's memory, and the start:\n%s", "\n".join(start_table(terms, seconds)))
    if not is_accounted_for(terms):
        _log.warning(
            "%.1f %% of the device's memory is in no account, more than %.0f %%: a term is missing or was measured "
            "while another process took or gave memory",
            *(100 * unaccounted_share(terms), 100 * MAX_UNACCOUNTED),
        )
