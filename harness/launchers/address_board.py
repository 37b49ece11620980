"""Tells all ranks of a job where rank 0 listens, without a file that hundreds of them would poll.

The job's supervisor keeps the board: a socket that answers who knows the attempt's secret. Rank 0 posts its
address, the others get it as soon as it is there. The board's own address is in the ranks' environment, the
secret in a private file of the attempt's folder, which each rank reads once.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
from contextlib import closing, suppress
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
        self._listener = socket.create_server(("", 0), backlog=_BACKLOG)
        self._loop = asyncio.new_event_loop()
        self._posted: asyncio.Future[bytes] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        """`host:port`, by which other hosts reach the board."""
        return f"{reachable_name()}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._closed.set_result, None)
        self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_until_closed())

    async def _serve_until_closed(self) -> None:
        server = await asyncio.start_server(
            self._answer, sock=self._listener, backlog=_BACKLOG, limit=_MOST_BYTES
        )
        async with server:
            await self._closed

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one rank, once rank 0 has posted; one that is gone costs nobody else anything."""
        with closing(writer), suppress(OSError, EOFError, asyncio.LimitOverrunError):
            line = await reader.readuntil(b"\n")
            token, _, request = line.removesuffix(b"\n").partition(b" ")
            if not hmac.compare_digest(token, _token(self._secret, request)):
                return
            if request != b"get" and not self._posted.done():
                self._posted.set_result(request)
            writer.write(await asyncio.shield(self._posted) + b"\n")
            await writer.drain()


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
