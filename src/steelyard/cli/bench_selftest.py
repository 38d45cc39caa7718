"""`steelyard bench selftest`: can this machine, as a client, see streams of this rate on time? No server is needed."""

from __future__ import annotations

import argparse
import json

from steelyard.cli.values import above, real, whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--request-rate", type=above(0), default=20.0, metavar="RATE", help="requests/s (default: 20)")
    add("--events", type=whole(2), default=64, metavar="N", help="of each answer (default: 64)")
    add("--gap-ms", type=real(0), default=10.0, metavar="MS", help="between events (default: 10)")
    add("--seconds", type=above(0), default=3.0, help="to run")
    add("--client-processes", type=whole(1), default=1, metavar="N", help="to send from")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what an echo server's answers looked like from here. Exit status 1: late, lossy or out of CPU."""
    import uvloop

    from steelyard.bench.selftest import EchoLoad, self_test

    load = EchoLoad(args.request_rate, args.events, args.gap_ms, args.seconds, args.client_processes)
    found = uvloop.run(self_test(load))
    if args.json:
        print(json.dumps(found.as_json()))
    else:
        verdict = "on time" if found.ok else "NOT ON TIME: a result at this rate would be the client's"
        print(f"{verdict}: {found.rate:g} requests/s, {found.events_per_s:,.0f} events/s")
        print(f"  events late by {found.late_p50_ms:.3f} ms (p50), {found.late_p99_ms:.3f} ms (p99)")
        print(f"  TPOT off by at most {found.tpot_error_ms:.3f} ms of {args.gap_ms:g}; {found.lost} answers lost")
        print(f"  CPU of the busiest client process {found.cpu_share:.0%}")
    return 0 if found.ok else 1
