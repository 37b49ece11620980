"""A server without a network: what `requests` gets from an address."""

from __future__ import annotations

import io
from collections.abc import Mapping

import requests


class Server:
    """Answers by the last part of the address: bytes, an HTTP status other than 200, or an exception.

    Attributes:
        asked: the addresses, in order.
    """

    def __init__(self, monkeypatch, answers: Mapping[str, bytes | int | Exception]) -> None:
        self.asked: list[str] = []
        self._answers = answers
        monkeypatch.setattr(requests, "get", self._get)

    def _get(self, url: str, **_: object) -> requests.Response:
        self.asked.append(url)
        answer = self._answers[url.rpartition("/")[2]]
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.url = url
        response.status_code = answer if isinstance(answer, int) else 200
        response.raw = io.BytesIO(b"" if isinstance(answer, int) else answer)
        return response
