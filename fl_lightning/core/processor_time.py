"""The processor time of a run: that of this process, of its ended child processes, and of its worker processes."""

from __future__ import annotations

import os

_of_workers = 0.0


def processor_seconds() -> float:
    """Return the processor time of this process, its ended child processes and its worker processes, in seconds.

    The time of worker processes is the sum of what `add_worker_seconds` has added.
    """
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + _of_workers


def add_worker_seconds(seconds: float) -> None:
    """Add the processor time of a worker process, in seconds, to the total that `processor_seconds` returns."""
    global _of_workers
    _of_workers += seconds
