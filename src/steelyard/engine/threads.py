"""How torch's threads wait for each other on a CPU: set in the environment, before the process loads torch.

Without a setting an idle OpenMP thread of GNU's runtime spins for milliseconds before it sleeps. A step is hundreds of
short parallel regions, so where anything else wants a core (the HTTP process, a neighbour) spinning threads keep the
very thread they wait for off the core: steps take many times as long. A short spin costs a quiet machine next to
nothing. docs/cpu.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping

SPIN_COUNT = "3000"
CHOSEN_BY_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def with_short_spins(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with a short spin, unless it already says how threads wait. Other OpenMP runtimes ignore it."""
    if any(name in environ for name in CHOSEN_BY_USER):
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": SPIN_COUNT}
