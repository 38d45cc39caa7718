"""The end of a listening socket: nobody new gets into its queue, and who is in it can still be accepted and answered.

Closing a listening socket resets the connections that the kernel has made and nobody has accepted. Linux has no call
that only stops new ones (`shutdown` resets the queue too), so a filter on the socket drops every SYN: a client sends it
again after a second and is refused then, or comes to another socket on the port. A UNIX socket loses its name. What
neither reaches: a handshake that is half done over a slow network when the socket is closed at last.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass

_SO_ATTACH_FILTER = 26
_INSTRUCTIONS = (
    (0x30, 0, 0, 13),  # load the byte of TCP's flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # a SYN alone?
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # let it pass
)
"""Classic BPF: (code, jump if true, jump if false, value) each; Linux's Documentation/networking/filter.rst."""


@dataclass(frozen=True, slots=True)
class SocketName:
    """A UNIX socket's path and the file that it was; somebody else's socket may stand there later."""

    path: str
    device: int
    inode: int

    @classmethod
    def of(cls, path: str) -> SocketName | None:
        """Of the socket that is there now; None: nothing is."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        return cls(path, found.st_dev, found.st_ino)

    def unlink(self) -> None:
        """Remove it, if it is still there."""
        if SocketName.of(self.path) == self:
            with suppress(OSError):
                os.unlink(self.path)


def turn_away(sock: socket.socket, name: SocketName | None = None) -> None:
    """From now on no connection enters the queue of a listening socket, a UNIX socket of that name.

    Where the system cannot: nothing happens.
    """
    with suppress(OSError):
        if name is not None:
            name.unlink()
        elif sock.family != socket.AF_UNIX and sys.platform == "linux":
            program = b"".join(struct.pack("HBBI", *one) for one in _INSTRUCTIONS)
            buffer = ctypes.create_string_buffer(program)
            fprog = struct.pack("HP", len(_INSTRUCTIONS), ctypes.addressof(buffer))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)


def has_queued(sock: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
