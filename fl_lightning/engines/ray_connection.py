"""The connection to a Ray cluster: its address, and the files that are sent to its machines."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from fl_lightning.core.errors import ConfigError, require_extra

CONNECT = 10.0  # seconds in which a cluster must accept a connection, and answer
LOCAL_FILES = ("working_dir", "py_modules")  # entries of a runtime environment that may name files of this machine
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the start, and empty settings
SETTINGS = 4  # the type of the first frame that an HTTP/2 server sends


def check_address(address: str | None) -> None:
    """Check that a server of HTTP/2, as Ray's are, answers at an address, because Ray itself waits for minutes.

    Args:
        address: The address; None for the one in `RAY_ADDRESS`. Without host and port, such as `auto`, it is not
            checked.

    Raises:
        ConfigError: Nothing answers.
    """
    key, text = ("engine.address", address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    try:
        place = urlsplit(f"//{text.removeprefix('ray://')}")
        if place.hostname and place.port:
            with socket.create_connection((place.hostname, place.port), CONNECT) as channel:
                if os.environ.get("RAY_USE_TLS", "0") == "0" and not speaks_http2(channel):
                    raise ValueError("another service")
    except (OSError, ValueError) as error:
        fix = "Correct the address, or start the cluster with `ray start --head`"
        raise ConfigError(f"{key}: no Ray cluster answers ({text}: {error}). {fix}") from error


def speaks_http2(channel: socket.socket) -> bool:
    """Return whether the server of a connection answers as one of HTTP/2."""
    channel.sendall(HTTP2)
    return channel.recv(4)[3:] == bytes([SETTINGS])


def check_local_files(runtime_env: Mapping[str, Any]) -> None:
    """Check that the files exist that a runtime environment sends to the machines. URIs are not checked.

    Raises:
        ConfigError: A file or folder does not exist.
    """
    for key in LOCAL_FILES:
        held = runtime_env.get(key)
        for path in held if isinstance(held, list) else [held]:
            if isinstance(path, str) and "://" not in path and not os.path.exists(path):
                raise ConfigError(f"engine.runtime_env.{key}: {path} does not exist. Correct the path")


def import_ray() -> ModuleType:
    """Import and return the package `ray`.

    Raises:
        ConfigError: Ray is not installed.
    """
    with require_extra("ray", "engine: RayEngine needs ray"):
        import ray
    return ray


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Context that restores the handlers of SIGINT and SIGTERM at its end.

    Ray replaces them, and its handlers would end a run in the middle of a round.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
