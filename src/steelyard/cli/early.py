"""What a server needs besides its model, tried before the model is loaded: minutes later is late for a wrong path.

It opens and closes; who uses a thing opens it again, and says what else is wrong with it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from steelyard.config import ServerConfig
from steelyard.errors import StartError
from steelyard.server.app import check_spans


def check_early(http: ServerConfig) -> None:
    """Raises StartError naming the flag."""
    check_spans(http.otlp_traces_endpoint)
    for path in http.public_prefix:
        with _named("--public-prefix", path), Path(path).open("rb"):
            pass
    if http.ledger_log is not None:
        with _named("--ledger-log", http.ledger_log), Path(http.ledger_log).open("ab"):
            pass
    if http.ssl_certfile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with _named("--ssl-certfile and --ssl-keyfile", f"{http.ssl_certfile}, {http.ssl_keyfile}"):
            context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile)
        if http.ssl_ca_certs is not None:
            with _named("--ssl-ca-certs", http.ssl_ca_certs):
                context.load_verify_locations(http.ssl_ca_certs)


@contextmanager
def _named(flag: str, value: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StartError(f"{flag} {value}: {error.strerror or error}") from None
