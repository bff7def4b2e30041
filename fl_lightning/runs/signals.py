"""Handling of SIGINT and SIGTERM during the rounds of a run."""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals
from types import TracebackType

from fl_lightning.core.errors import Interrupted
from fl_lightning.core.interrupt import DeferredSignals


class RunSignals(DeferredSignals):
    """Context around a run's rounds: SIGINT or SIGTERM ends the run at the next call of `check`.

    It is called between two clients, and while an engine waits for other processes or machines.

    Args:
        progress: Returns the progress of the run, for the error message.
    """

    def __init__(self, progress: Callable[[], str]) -> None:
        super().__init__()
        self._progress = progress

    def __enter__(self) -> RunSignals:
        super().__init__()  # forget the signals of an earlier `fit`
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, SystemExit):  # Lightning raises it on SIGTERM during a fit
            self.check()

    def check(self) -> None:
        """End the run with an error if SIGINT or SIGTERM has arrived.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        if self.received is not None:
            name = Signals(self.received).name
            raise Interrupted(self.received, f"stopped by {name} {self._progress()}")
