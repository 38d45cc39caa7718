"""Where the server listens: a TCP port or a UNIX socket, bound before anything is loaded, and how that is shown."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import Any

from steelyard.config import ServerConfig
from steelyard.errors import StartError


def bound(config: ServerConfig) -> list[socket.socket]:
    """Sockets bound to the configured address, one a front end; they listen later. Raises StartError.

    Several share the port by SO_REUSEPORT, which a second server of the same user could do too: a socket without it,
    bound first, finds out whether the port is free.
    """
    count = config.api_server_count
    if config.uds is not None:
        return [_unix(config)] * count
    try:
        family, kind, proto, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        first = _tcp(family, kind, proto, address, shared=False)
        if count == 1:
            return [first]
        address = first.getsockname()
        first.close()
        return [_tcp(family, kind, proto, address, shared=True) for _ in range(count)]
    except OSError as error:
        raise cannot_listen(config, error) from None


def _tcp(family: int, kind: int, proto: int, address: Any, shared: bool) -> socket.socket:
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def cannot_listen(config: ServerConfig, error: OSError) -> StartError:
    if config.uds is not None:
        hint = "; remove it if nothing uses it" if error.errno == errno.EADDRINUSE else ""
        return StartError(f"cannot listen on {config.uds}: {error.strerror or error}{hint}")
    if error.errno == errno.EADDRINUSE:
        return StartError(
            f"port {config.port} on {config.host} is taken: stop what uses it, or choose another with --port"
        )
    return StartError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}")


def is_public(config: ServerConfig) -> bool:
    """Whether other machines may reach the address."""
    if config.uds is not None:
        return False
    try:
        return not ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        return config.host != "localhost"


def shown_address(config: ServerConfig, sock: socket.socket) -> tuple[str, str]:
    """Where it listens, and the words after `curl` that reach it."""
    if config.uds is not None:
        return config.uds, f"--unix-socket {config.uds} http://localhost{config.root_path}"
    host, port = sock.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    return url, url


def _unix(config: ServerConfig) -> socket.socket:
    """For this user only, whatever the umask is."""
    assert config.uds is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        sock.bind(config.uds)
    except OSError as error:
        raise cannot_listen(config, error) from None
    finally:
        os.umask(before)
    return sock
