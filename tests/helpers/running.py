"""Processes that run beside the tests, and ports for them."""

import socket
import time
from pathlib import Path


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def alive(pid):
    """Return whether a process is running and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(processes, seconds=60.0):
    """Return whether processes end within a time."""
    until = time.monotonic() + seconds
    while any(map(alive, processes)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, processes))
