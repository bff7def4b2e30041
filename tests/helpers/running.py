"""Check whether processes are running."""

import time
from pathlib import Path


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
