"""Starts an engine in a process of its own. Knows only how to call it: nothing of the engine is imported.

    parent --stdin: {"address", "config", "log_format"} and a newline, then held open--> engine process
    parent <====== wire/channel at `address` ======> engine process

The engine ends when its stdin closes, so it never outlives its parent, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

from steelyard.config import EngineConfig
from steelyard.engine.threads import with_short_spins


def start_engine_process(config: EngineConfig, address: str, log_format: str = "text") -> subprocess.Popen[bytes]:
    """Start `python -m steelyard.engine.process`; its first message on the channel is Ready, or a Fault.

    It never hears SIGINT, which a terminal sends to all of a command's processes; it drains at SIGTERM, and exits with
    0 after a drain or halt, 2 if it could not start, 1 after a Fault. Keep the returned process's stdin open for as
    long as the engine is wanted.
    """
    command = [sys.executable, "-m", "steelyard.engine.process"]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited: from its first import on
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=with_short_spins(os.environ))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdin is not None
    start = {"address": address, "config": asdict(config), "log_format": log_format}
    process.stdin.write(json.dumps(start).encode() + b"\n")
    process.stdin.flush()
    return process
