"""`steelyard keys new`: a random API key for a client, and its hash for the tenants file. Keeps neither."""

from __future__ import annotations

import argparse

from steelyard.errors import StartError
from steelyard.server.tenants import hash_key, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key")
    new.add_argument("name", nargs="?", default="acme", help="of the tenant (default: acme)")
    of = actions.add_parser("hash", help="the hash of a key that exists, read from standard input")
    of.set_defaults(name="")


def run(args: argparse.Namespace) -> int:
    """Print the key once and the lines that go into the file."""
    if args.action == "hash":
        try:
            key = input().strip()
        except EOFError:
            key = ""
        if not key:
            raise StartError("keys hash: give the key on standard input")
        print(hash_key(key))
        return 0
    if '"' in args.name or "\\" in args.name:
        raise StartError(f"a tenant's name has no quotes or backslashes, got {args.name!r}")
    key = new_key()
    print(f'{key}\n\n[[tenant]]\nname = "{args.name}"\nkeys = ["{hash_key(key)}"]')
    return 0
