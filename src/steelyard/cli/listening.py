"""Where the server listens: a TCP port or a UNIX socket, bound before anything is loaded, and how that is shown."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from steelyard.config import ServerConfig
from steelyard.errors import StartError


def bound(config: ServerConfig) -> socket.socket:
    """A socket bound to the configured address; it listens later. Raises StartError."""
    if config.uds is not None:
        return _unix(config)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise cannot_listen(config, error) from None
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
