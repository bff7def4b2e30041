"""Reports of the progress within a round: engines report it, and a progress display listens.

Reports pass through a context variable, because loops deep inside an engine make them. Without a listener, a report
does nothing. In a worker process, the listener sends the steps to the main process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol


class ProgressListener(Protocol):
    """Receives the reports of a round."""

    def on_steps(self, done: int, total: int, clients: int) -> None:
        """Called after each training step of this process, and about once a second for those of worker processes."""

    def on_client(self) -> None:
        """Called when a client has finished its training or failed, in the order in which they finish."""

    def on_evaluated(self, done: int, total: int) -> None:
        """Called when the model of a client has been evaluated after the round."""

    def on_waiting(self) -> None:
        """Called about once a second while other processes or machines train clients."""


_listener: ContextVar[ProgressListener | None] = ContextVar("listener", default=None)


@contextmanager
def listen(listener: ProgressListener) -> Iterator[None]:
    """Context in which a listener receives all reports."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_steps(done: int, total: int, clients: int = 1) -> None:
    """Report the progress of the clients that are being trained. Call it after each training step.

    Args:
        done: Number of training steps of these clients so far.
        total: Number of their training steps in all.
        clients: Number of the clients that are trained together.
    """
    if listener := _listener.get():
        listener.on_steps(done, total, clients)


def report_waiting() -> None:
    """Report that other processes or machines are training clients."""
    if listener := _listener.get():
        listener.on_waiting()


def report_client() -> None:
    """Report that a client has finished its training in the round, or failed."""
    if listener := _listener.get():
        listener.on_client()


def report_evaluated(done: int, total: int) -> None:
    """Report that the models of some clients have been evaluated after a round.

    Args:
        done: Number of evaluated models.
        total: Number of models to evaluate.
    """
    if listener := _listener.get():
        listener.on_evaluated(done, total)
