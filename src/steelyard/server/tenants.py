"""Who asks: API keys, the tenant behind each, and the namespace its KV blocks are shared in.

    Authorization: Bearer KEY --SHA-256, constant-time--> Tenant --HMAC(server key, name, salt)--> namespace

Keys are stored as hashes only: they are random and long, so a fast hash is enough. Without any key the server has one
tenant, who may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from steelyard.config import MAX_SLO_MS
from steelyard.errors import InvalidRequest, StartError, reason
from steelyard.server.errors import Forbidden, Unauthorized

KEY_PREFIX = "sk-steelyard-"
_HASH = "sha256:"
NAMESPACE_BYTES = 16
_LIMITS = ("max_concurrent_requests", "max_in_flight_tokens", "max_tokens_per_minute")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One customer of this server, as the operator declared it.

    weight           share of the machine under fair scheduling
    ttft_slo_ms ...  targets of its requests that bring none, under slo scheduling
    operator         sees every tenant and may change the server's state
    priority         of its requests that name none; lower goes first
    min_priority     the lowest its requests may name; None: 0, or `priority` if that is lower, and any for an operator
    max_...          its own limits, None: none; in-flight tokens are prompts and outputs of requests being served
    label            its name on metrics
    """

    name: str
    key_hashes: tuple[bytes, ...] = ()
    weight: float = 1.0
    operator: bool = False
    priority: int = 0
    min_priority: int | None = None
    max_concurrent_requests: int | None = None
    max_in_flight_tokens: int | None = None
    max_tokens_per_minute: int | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    label: str = ""

    def check_priority(self, priority: int) -> None:
        """Raises InvalidRequest for one that would put its request before what this tenant is entitled to."""
        least = self.min_priority
        if least is None and not self.operator:
            least = min(0, self.priority)
        if least is not None and priority < least:
            raise InvalidRequest(
                f"priority: must be at least {least} for this tenant, got {priority}; lower goes first, and how low a "
                "tenant may go is the operator's choice (min_priority in the --tenants file)",
                param="priority",
            )


class Tenants:
    """The table of tenants. `open` is True while there is no key at all: then everybody is the one tenant.

    server_key  32 random bytes, the same in every process that shares an engine
    """

    def __init__(self, tenants: Sequence[Tenant], server_key: bytes) -> None:
        self.all = {tenant.name: replace(tenant, label=tenant.label or tenant.name) for tenant in tenants}
        self.open = not any(tenant.key_hashes for tenant in tenants)
        self._by_hash = [(digest, tenant) for tenant in self.all.values() for digest in tenant.key_hashes]
        self.server_key = server_key

    def identify(self, authorization: bytes | None) -> Tenant:
        """The tenant of an Authorization header. Raises Unauthorized. Takes equally long for every wrong key."""
        if self.open:
            return next(iter(self.all.values()))
        kind, _, key = (authorization or b"").strip().partition(b" ")
        if kind.lower() != b"bearer" or not key:
            raise Unauthorized("this server needs a key: send it as `Authorization: Bearer KEY`")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, tenant in self._by_hash:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("this key is not known here")
        return found

    def namespace(self, tenant: Tenant, cache_salt: str | None = None) -> bytes:
        """Whose KV blocks a prompt may share: 16 bytes of the tenant, then 16 of its salt if it gave one.

        A client chooses the salt and never the first half, so a salt narrows what is shared and cannot widen it.
        The one tenant of a server without keys has the empty namespace.
        """
        own = b"" if self.open else self._mac(b"tenant", tenant.name)
        return own if cache_salt is None else own + self._mac(b"salt", cache_salt)

    def revoked_in(self, later: Tenants) -> list[bytes]:
        """Namespaces of tenants that are gone in `later`, or have lost a key: what they cached is to be forgotten."""
        kept = {digest: tenant.name for digest, tenant in later._by_hash}
        gone = {tenant.name for digest, tenant in self._by_hash if kept.get(digest) != tenant.name}
        return [self.namespace(self.all[name]) for name in sorted(gone)]

    def plain(self) -> list[dict[str, Any]]:
        """Of JSON's types, for `of_plain` in another process."""
        return [asdict(one) | {"key_hashes": [digest.hex() for digest in one.key_hashes]} for one in self.all.values()]

    @classmethod
    def of_plain(cls, tenants: list[dict[str, Any]], server_key: bytes) -> Tenants:
        hashes = [tuple(map(bytes.fromhex, one["key_hashes"])) for one in tenants]
        return cls([Tenant(**one | {"key_hashes": of}) for one, of in zip(tenants, hashes)], server_key)

    def _mac(self, kind: bytes, text: str) -> bytes:
        return hmac.digest(self.server_key, kind + b"\0" + text.encode(), "sha256")[:NAMESPACE_BYTES]


def check_operator(tenant: Tenant) -> None:
    """Raises Forbidden."""
    if not tenant.operator:
        raise Forbidden("this needs an operator's key")


def new_key() -> str:
    """A random key of 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """A key as a tenants file has it."""
    return _HASH + hashlib.sha256(key.encode()).hexdigest()


def load_tenants(path: Path | None, keys: Sequence[str], server_key: bytes | None = None) -> Tenants:
    """The tenants of a TOML file and of plain keys (one operator, `default`). Raises StartError naming the field.

    [[tenant]]
    name = "acme"                          # and any field of `Tenant`
    keys = ["sha256:9f86d081884c7d65..."]  # what `steelyard keys new` prints
    """
    tenants: list[Tenant] = []
    if path is not None:
        try:
            raw = tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise StartError(f"--tenants {path}: {reason(error)}") from None
        entries = raw.pop("tenant", [])
        if raw or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise StartError(f"--tenants {path}: must hold [[tenant]] tables and nothing else")
        tenants = [_tenant(path, entry) for entry in entries]
    if keys or not tenants:
        hashes = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
        tenants.append(Tenant("default", hashes, operator=True))
    for what, values in (
        ("name", [tenant.name for tenant in tenants]),
        ("key", [digest for tenant in tenants for digest in tenant.key_hashes]),
    ):
        if len(set(values)) < len(values):
            raise StartError(f"--tenants {path}: a {what} is there twice; each tenant needs its own")
    return Tenants(tenants, server_key or secrets.token_bytes(32))


_FIELDS: dict[str, tuple[type | tuple[type, ...], Callable[[Any], bool]]] = {
    "name": (str, lambda value: 0 < len(value) <= 64),
    "label": (str, lambda value: 0 < len(value) <= 64),
    "weight": ((int, float), lambda value: 0 < value < 1e9),
    "operator": (bool, lambda value: True),
    "priority": (int, lambda value: abs(value) < 2**31),
    "min_priority": (int, lambda value: abs(value) < 2**31),
    "ttft_slo_ms": ((int, float), lambda value: 0 < value <= MAX_SLO_MS),
    "tpot_slo_ms": ((int, float), lambda value: 0 < value <= MAX_SLO_MS),
    **{name: (int, lambda value: value > 0) for name in _LIMITS},
}


def _tenant(path: Path, entry: dict[str, Any]) -> Tenant:
    name = entry.get("name")
    where = f"--tenants {path}: tenant {name!r}"
    keys = entry.pop("keys", [])
    hashes = tuple(_digest(where, key) for key in keys) if isinstance(keys, list) else ()
    if not hashes or name is None:
        raise StartError(f"{where}: needs a name and at least one of keys (see `steelyard keys new`)")
    for field, value in entry.items():
        if field not in _FIELDS:
            raise StartError(f"{where}: {field} is not a field of a tenant; there are {', '.join(_FIELDS)}, keys")
        kind, ok = _FIELDS[field]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool) or not ok(value):
            raise StartError(f"{where}: {field} cannot be {value!r}")
    tenant = Tenant(key_hashes=hashes, **entry)
    if tenant.min_priority is not None and tenant.priority < tenant.min_priority:
        raise StartError(f"{where}: priority {tenant.priority} is below its min_priority {tenant.min_priority}")
    return tenant


def _digest(where: str, key: object) -> bytes:
    text = key.removeprefix(_HASH) if isinstance(key, str) and key.startswith(_HASH) else ""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise StartError(f"{where}: keys are {_HASH} and 64 hexadecimal digits, as `steelyard keys new` prints them")
    return digest


def read_keys(path: Path) -> list[str]:
    """Plain keys of a file, one a line; empty lines and those that begin with # are skipped. Raises StartError."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeError) as error:
        raise StartError(f"--api-key-file {path}: {reason(error)}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise StartError(f"--api-key-file {path}: has no key in it")
    return keys
