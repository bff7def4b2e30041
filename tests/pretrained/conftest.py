"""Fixtures of the tests of pretrained models."""

import socket

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail on each connection."""

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the internet was used")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
