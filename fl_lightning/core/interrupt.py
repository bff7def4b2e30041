"""Handle SIGINT and SIGTERM: wait for a safe point, or end at once without a traceback."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any

from fl_lightning.core.terminal import CLEAR_LINE, can_erase


class Stopped(KeyboardInterrupt):
    """`KeyboardInterrupt` that this package raises on SIGINT or SIGTERM.

    The class distinguishes it from a `KeyboardInterrupt` that other code raises.

    Args:
        number: The signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stop(number: int, frame: FrameType | None) -> None:
    """Signal handler that raises `Stopped`."""
    raise Stopped(number)


def end(number: int, frame: FrameType | None) -> None:
    """Signal handler that ends the process with a line on stderr and exit code 128 + n, without cleaning up."""
    clear = CLEAR_LINE if os.isatty(2) and can_erase() else ""  # of the status and of the terminal's own ^C
    with suppress(OSError):
        os.write(2, f"{clear}fl-lightning: {describe_stop(number)}\n".encode())  # `print` may have been interrupted
    os._exit(128 + number)


def end_on_interrupt() -> None:
    """Make SIGINT end the process at once, while there is nothing to clean up. SIGTERM does so anyway."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background processes of a shell may ignore it
        signal.signal(signal.SIGINT, end)


def describe_stop(number: int) -> str:
    """Return the message about a process that a signal stopped."""
    return f"stopped by {signal.Signals(number).name}"


@contextmanager
def raise_on_signal(number: int) -> Iterator[None]:
    """Context in which a signal raises `Stopped`, unless the signal is ignored or handled by other code."""
    before = signal.getsignal(number)
    ours = before in (signal.SIG_DFL, signal.default_int_handler, end)
    if not ours or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(number, stop)
    try:
        yield
    finally:
        signal.signal(number, before)


class DeferredSignals:
    """Context in which a first SIGINT or SIGTERM is only recorded. A second signal raises `Stopped` at once.

    Does nothing outside the main thread, where Python allows no handlers.

    Attributes:
        received: Number of the first signal; None if none has arrived.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> DeferredSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise Stopped(number)
        self.received = number
