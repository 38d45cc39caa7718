"""Amounts of time and memory as people read them."""

from __future__ import annotations


def duration(amount_ns: int) -> str:
    """Rounded for people: 412 ms, 1.53 s, 87 us."""
    sign, ns = ("-", -amount_ns) if amount_ns < 0 else ("", amount_ns)
    if ns >= 1_000_000_000:
        return f"{sign}{ns / 1e9:.2f} s"
    return f"{sign}{ns / 1e6:.1f} ms" if ns >= 1_000_000 else f"{sign}{ns / 1e3:.0f} us"


def size(num_bytes: int) -> str:
    """1.9 GiB, 34.0 MiB, 512 bytes."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
