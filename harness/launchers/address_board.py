"""Tells all ranks of a job where rank 0 listens, without a file that hundreds of them would poll.

The job's supervisor keeps the board: a socket that answers who knows the attempt's secret. Rank 0 posts its
address, the others get it as soon as it is there. The board's own address is in the ranks' environment, the
secret in a private file of the attempt's folder, which each rank reads once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import threading
from contextlib import suppress
from typing import Any, Self

VARIABLE = "KRONSCALE_BOARD"
"""Environment variable of a job's ranks with the board's `host:port`."""

SECRET_BYTES = 32

_MOST_BYTES = 4096  # of a request
_BACKLOG = 4096  # connections of ranks that all start at once


def new_secret() -> bytes:
    """A secret for one start of one attempt."""
    return secrets.token_bytes(SECRET_BYTES)


class AddressBoard:
    """A board for one start of one attempt; open from the `with` line on.

    Args:
        secret: known to the ranks only.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._posted: bytes | None = None
        self._waiting: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("", 0), backlog=_BACKLOG)
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        """`host:port`, by which other hosts reach the board."""
        return f"{reachable_name()}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        for file in (self._listener, self._stopped):
            self._selector.register(file, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    self._close()
                    return
                with suppress(OSError):  # one that is gone costs nobody else anything
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        connection.setblocking(False)
                        self._selector.register(connection, selectors.EVENT_READ, bytearray())
                    else:
                        self._read(key.fileobj, key.data)  # type: ignore[arg-type]  # a socket, as registered

    def _read(self, connection: socket.socket, received: bytearray) -> None:
        try:
            data = connection.recv(_MOST_BYTES)
        except OSError:
            data = b""
        received += data
        if data and b"\n" not in received and len(received) < _MOST_BYTES:
            return
        self._selector.unregister(connection)
        token, _, request = bytes(received).partition(b"\n")[0].partition(b" ")
        if not data or not hmac.compare_digest(token, _token(self._secret, request)):
            connection.close()
            return
        if request != b"get":
            self._posted = request
        self._waiting.append(connection)
        if self._posted is not None:
            for one in self._waiting:
                with suppress(OSError):
                    one.sendall(self._posted + b"\n")
                one.close()
            self._waiting.clear()

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            with suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]  # all are sockets
        for connection in self._waiting:
            connection.close()
        self._selector.close()


def post_address(board: str, secret: bytes, where: dict[str, Any], seconds: float) -> None:
    """Post rank 0's address on the board at `board`.

    Raises:
        OSError: the board cannot be reached.
    """
    _ask(board, secret, json.dumps(where).encode(), seconds)


def get_address(board: str, secret: bytes, seconds: float) -> dict[str, Any]:
    """Rank 0's address, once it is on the board.

    Raises:
        TimeoutError: it was not there within `seconds`.
        OSError: the board cannot be reached.
    """
    found: dict[str, Any] = json.loads(_ask(board, secret, b"get", seconds))
    return found


def reachable_name() -> str:
    """Name of this host for other hosts; `localhost` where it cannot resolve its own."""
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:  # it can still host all of its ranks
        return "localhost"
    return host


def _ask(board: str, secret: bytes, request: bytes, seconds: float) -> bytes:
    host, _, port = board.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(_token(secret, request) + b" " + request + b"\n")
        answer = bytearray()
        while not answer.endswith(b"\n"):
            data = connection.recv(_MOST_BYTES)
            if not data:
                raise ConnectionError(f"the board at {board} closed the connection: it is of another attempt")
            answer += data
    return bytes(answer)


def _token(secret: bytes, request: bytes) -> bytes:
    return hmac.new(secret, b"board\n" + request, "sha256").hexdigest().encode()
